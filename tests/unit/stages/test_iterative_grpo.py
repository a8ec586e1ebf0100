"""The order of what an iteration does, from the start and from each step at which a run may resume."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from megarl.stages import iterative_grpo as module
from megarl.stages.iterative_grpo import iterative_grpo


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("start", [0, 1, 2, 3, 4])
def test_an_iteration_begins_at_its_first_step_only(
    monkeypatch: pytest.MonkeyPatch, start: int, trains: bool
) -> None:
    said: list[str] = []

    @contextmanager
    def phase():
        yield

    def sample(prompts, step):
        said.append(f"sample {step}")
        return ["ranking"]

    run = SimpleNamespace(
        start=start, steps=4, prompts=None, phases=SimpleNamespace(sync=phase, rollout=phase, train=phase),
        checkpoint=SimpleNamespace(hold=lambda: said.append("hold")),
        weights=SimpleNamespace(publish=lambda version: said.append(f"publish {version}")),
    )  # fmt: skip
    model = SimpleNamespace(
        sample=sample, train=lambda fresh, step: said.append(f"train on {fresh[0]} {step}")
    )
    monkeypatch.setattr(module, "train", lambda rl: said.append(f"steps {rl.start}..{rl.steps}"))
    iterative_grpo(run, 2, lambda: said.append("reset"), model if trains else None)

    def begins(step: int) -> list[str]:
        first, last = ([f"sample {step}"], [f"train on ranking {step}"]) if trains else ([], [])
        return ["hold", f"publish {step}", *first, "reset", *last]

    assert (
        said
        == {
            0: [*begins(0), "steps 0..2", *begins(2), "steps 2..4"],
            1: ["steps 1..2", *begins(2), "steps 2..4"],
            2: [*begins(2), "steps 2..4"],
            3: ["steps 3..4"],
            4: [],
        }[start]
    )
