"""The loop of stage sft: when it evaluates, when it stops, and what a resumed run knows."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.stages import sft as stage
from megarl.stages.offline import OfflineRun, train_offline
from megarl.stages.sft import Sft
from megarl.types import CheckFailed, ObjectiveState, StepReport, UpdateReport

LOSSES = [3.0, 1.0, 2.0, 1.5, 0.5, 0.4]  # of the evaluations


@dataclass
class Recorded:
    rows: list[dict[str, Any]] = field(default_factory=list)
    saved: list[tuple[int, ObjectiveState, bool]] = field(default_factory=list)

    @contextmanager
    def step(self, _step: int) -> Any:
        yield lambda rollout, report, sync: self.rows.append(report.metrics)

    def span(self, _name: str) -> Any:
        return nullcontext()

    def maybe_save(self, step: int, state: ObjectiveState, *, last: bool = False) -> None:
        self.saved.append((step, state, last))


def update(is_skipped: bool) -> StepReport:
    return StepReport((UpdateReport(1.0, 1.0, 0.1, skipped=is_skipped),))


def run(monkeypatch: pytest.MonkeyPatch, **values: Any) -> Recorded:
    recorded, losses = Recorded(), iter(values.pop("losses", LOSSES))
    skips = iter(values.pop("skips", ()))
    monkeypatch.setattr(stage, "mean_loss", lambda trainer, batch: next(losses))
    monkeypatch.setattr(
        stage, "train_supervised", lambda trainer, batch: update(next(skips, False))
    )
    monkeypatch.setattr(stage, "sampled_accuracy", lambda batch, logprobs: 0.1)
    trainer = SimpleNamespace(logprobs=lambda batch: None)
    parts: dict[str, Any] = {
        "prompts": SimpleNamespace(take=lambda count: []), "telemetry": recorded, "checkpoint": recorded,
        "phases": SimpleNamespace(train=nullcontext, save=nullcontext), "is_stopping": lambda: False,
        "state": ObjectiveState(0.0), "steps": 12, "prompts_per_step": 1, "start": 0,
    }  # fmt: skip
    offline = OfflineRun(
        **(parts | {name: values.pop(name) for name in [*values] if name in parts})
    )
    learner: Any = Sft(offline, trainer, lambda: None, **({"eval_every": 2} | values))  # type: ignore[arg-type]
    train_offline(offline, lambda prompts: None, learner.learn, is_done=learner.is_done)
    return recorded


def test_it_evaluates_every_so_often_and_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = run(monkeypatch, steps=5)
    assert [row.get("eval/loss") for row in recorded.rows] == [None, 3.0, None, 1.0, 2.0]
    assert not any("eval/loss" in row for row in run(monkeypatch, eval_every=0).rows)


def test_patience_counts_from_the_lowest_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = run(monkeypatch, patience=2)
    assert [(step, last) for step, _, last in recorded.saved][-1] == (8, True) and len(
        recorded.rows
    ) == 8
    assert [state.held_out for _, state, _ in recorded.saved[1::2]] == [
        (3.0, 0),
        (1.0, 0),
        (1.0, 1),
        (1.0, 2),
    ]
    assert len(run(monkeypatch, patience=3).rows) == 12, "the next one is lower"
    assert len(run(monkeypatch, patience=2, losses=[float("nan")] * 6).rows) == 4


def test_a_resumed_run_goes_on_counting(monkeypatch: pytest.MonkeyPatch) -> None:
    state = replace(ObjectiveState(0.0), held_out=(1.0, 1))
    assert len(run(monkeypatch, patience=2, state=state, start=6, losses=LOSSES[3:]).rows) == 2
    done = replace(state, held_out=(1.0, 2))
    assert not run(monkeypatch, patience=2, state=done, start=8).rows, "it has ended before"


def test_a_run_whose_every_update_was_skipped_is_refused_at_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(CheckFailed, match="each update of the run was skipped"):
        run(monkeypatch, steps=2, skips=[True, True])
    assert len(run(monkeypatch, steps=2, skips=[False, True]).rows) == 2
    learned = replace(ObjectiveState(0.0), has_learned=True)
    assert run(monkeypatch, steps=2, start=1, skips=[True], state=learned).rows, "before it resumed"
