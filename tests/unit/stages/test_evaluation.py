"""Accuracy on held-out problems, with a sampler that is a plain function."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.config.load import parse_config
from megarl.stages.evaluation import (
    Evaluation,
    Measure,
    ProblemSet,
    correctness,
    describe,
    evaluation_of,
    make_evaluation,
    sampled,
)
from megarl.telemetry.metrics import forget_steps
from megarl.types import Prompt, Request, Sample, Terminated


def sample(prompt_id: int = 0, **fields: Any) -> Sample:
    zeros = torch.zeros(2)
    return Sample(
        prompt_id,
        0,
        torch.tensor([1, 2]),
        torch.tensor([False, True]),
        zeros,
        zeros.int(),
        "stop",
        **fields,
    )


def test_partial_credit_is_not_right() -> None:
    assert correctness(sample(reward=1.1, rewards={"accuracy": 1.0, "format": 1.0})) == 1.0
    assert correctness(sample(reward=0.6, rewards={"accuracy": 0.5, "format": 1.0})) == 0.0
    assert correctness(sample(reward=None)) == 0.0
    assert correctness(sample(reward=0.25)) == 0.25, "without an accuracy reward, the reward itself"


def test_a_run_is_one_line_of_shares(tmp_path: Path) -> None:
    asked: list[Request] = []

    def generate(requests: Sequence[Request], *, version: int) -> list[Sample]:
        asked.extend(requests)
        return [
            sample(r.prompt.prompt_id, reward=1.0, rewards={"accuracy": float(r.prompt.prompt_id)})
            for r in requests
        ]

    prompts = [Prompt(number, (1,), "") for number in range(2)]
    sets = [
        ProblemSet("accuracy", lambda: prompts, 0.0),
        ProblemSet("sampled_accuracy", lambda: prompts, 1.0),
    ]
    file = tmp_path / "eval.jsonl"
    evaluation = Evaluation(
        [partial(sampled, generate, 0, part) for part in sets], every=2, last_step=5, file=file
    )
    assert [step for step in range(6) if evaluation.maybe_run(step)] == [0, 2, 4, 5]
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    shares = {
        name: value for name, value in lines[1].items() if not name.endswith(("/low", "/high"))
    }
    assert shares == {"step": 2, "size": 2, "accuracy": 0.5, "sampled_accuracy": 0.5}
    assert lines[1]["accuracy/low"] < 0.5 < lines[1]["accuracy/high"]
    assert {request.temperature for request in asked} == {0.0, 1.0}
    assert len({request.seed for request in asked}) == 2, "the same random streams at every step"
    forget_steps(file, 4)
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [0, 2]


@pytest.mark.parametrize(
    ("rewards", "names"),
    [
        (["accuracy", "format"], ["accuracy", "sampled_accuracy"]),
        (["format", "code"], ["reward", "sampled_reward"]),
    ],
)
def test_a_weighted_sum_of_rewards_is_not_called_accuracy(
    tmp_path: Path, rewards: list[str], names: list[str]
) -> None:
    config = parse_config({"rewards": [{"name": name} for name in rewards], "eval": {"size": 2}})
    env = SimpleNamespace(is_main=False)
    rank: Any = SimpleNamespace(config=config, env=env)
    evaluation = evaluation_of(rank, lambda requests, version: [], 0, lambda step, results: None)
    measures: Any = evaluation.measures
    assert [measure.args[-1].metric for measure in measures] == names


def test_a_line_stays_until_its_replacement(tmp_path: Path) -> None:
    """A run of 4 steps, resumed at its end, is stopped while it evaluates, then evaluates again."""
    config = parse_config(
        {
            "run": {"dir": str(tmp_path), "name": "run"},
            "train": {"steps": 4},
            "eval": {"every": 2},
        }
    )
    rank: Any = SimpleNamespace(config=config, env=SimpleNamespace(is_main=True))
    file = config.run_dir / "eval.jsonl"
    file.parent.mkdir()
    file.write_text("".join(f'{{"step": {step}, "size": 1}}\n' for step in (0, 2, 4, 6)))

    def stopped(step: int) -> dict[str, float]:
        raise Terminated("stopped by SIGTERM")

    def lines(measure: Measure) -> list[dict[str, float]]:
        with suppress(Terminated):
            make_evaluation(rank, [measure], 4, lambda step, results: None).maybe_run(4)
        return [json.loads(line) for line in file.read_text().splitlines()]

    before = [{"step": step, "size": 1} for step in (0, 2, 4)]
    assert lines(stopped) == before
    assert lines(lambda step: {"size": 9}) == [*before[:2], {"step": 4, "size": 9}]


def test_a_set_with_several_samples_has_pass_at_k_and_intervals_of_problems(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four problems, four samples of each: number n has n right ones."""
    seeds: set[int] = set()

    def generate(requests: Sequence[Request], *, version: int) -> list[Sample]:
        seeds.update(request.seed for request in requests)
        return [
            sample(
                r.prompt.prompt_id,
                reward=1.0,
                rewards={"accuracy": float(r.index < r.prompt.prompt_id)},
            )
            for r in requests
        ]

    prompts = [Prompt(number, (1,), "") for number in range(4)]
    sets = [
        ProblemSet("accuracy", lambda: prompts, 0.0),
        ProblemSet("aime/mean@4", lambda: prompts, 1.0, samples=4),
    ]
    measures = [partial(sampled, generate, 0, part) for part in sets]
    result = Evaluation(measures, every=1, last_step=1, file=tmp_path / "eval.jsonl").run(0)
    said = capsys.readouterr().out
    assert len(seeds) == 16, "every sample has its own random stream"
    assert (result["size"], result["aime/size"]) == (4, 4)
    assert result["aime/mean@4"] == (0 + 1 + 2 + 3) / 16
    assert result["aime/pass@2"] == pytest.approx((0 + 1 / 2 + 5 / 6 + 1) / 4)
    assert result["aime/pass@4"] == 3 / 4 and "aime/pass@3" not in result
    assert result["aime/mean@4/low"] < 0.2 and result["aime/mean@4/high"] > 0.6, (
        "of 4 problems, not of 16 samples"
    )
    header, *rows = said.splitlines()
    assert header.split() == ["step", "0", "value", "95%", "interval", "problems"]
    assert [row.split()[0] for row in rows] == [
        "accuracy",
        "aime/mean@4",
        "aime/pass@2",
        "aime/pass@4",
    ]
    assert rows[1].split()[1:] == ["0.375", "0.145", "..", "0.680", "4"]
    assert f"{describe(result)}\n" == said
