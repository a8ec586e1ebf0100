"""Accuracy on held-out problems, with a sampler that is a plain function."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megarl.stages.evaluation import Evaluation, correctness
from megarl.types import Prompt, Request, Sample


def sample(prompt_id: int = 0, **fields: Any) -> Sample:
    return Sample(
        prompt_id, 0, torch.tensor([1, 2]), torch.tensor([False, True]), torch.zeros(2), (0, 0), "stop", **fields
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
            sample(r.prompt.prompt_id, reward=1.0, rewards={"accuracy": float(r.prompt.prompt_id)}) for r in requests
        ]

    prompts = [Prompt(number, (1,), "") for number in range(2)]
    temperatures = (("accuracy", 0.0), ("sampled_accuracy", 1.0))
    file = tmp_path / "eval.jsonl"
    evaluation = Evaluation(generate, lambda: prompts, temperatures, run_seed=0, every=2, last_step=5, file=file)
    assert [step for step in range(6) if evaluation.maybe_run(step)] == [0, 2, 4, 5]
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert lines[1] == {"step": 2, "size": 2, "accuracy": 0.5, "sampled_accuracy": 0.5}
    assert {request.temperature for request in asked} == {0.0, 1.0}
    assert len({request.seed for request in asked}) == 2, "the same random streams at every step"
    evaluation.forget(4)
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [0, 2]
