"""What the rewards say of responses: `responses.jsonl` has {"row": n, "response": text}, as the model wrote it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml

from megarl.config.schema import Reward, Task
from megarl.data.tasks import load_sources
from megarl.data.tokenizer import load_tokenizer, prompt_encoder
from megarl.rewards.scorer import make_scorer
from megarl.types import Prompt, Sample


def scores(folder: Path) -> list[float | None]:
    """The accuracy of each response."""
    return [sample.rewards.get("accuracy") for sample in _scored(folder)]


def formats(folder: Path) -> list[float | None]:
    """The format reward of each response."""
    return [sample.rewards.get("format") for sample in _scored(folder)]


def texts(folder: Path) -> list[str]:
    """The text of each response that rewards get."""
    return [sample.text for sample in _scored(folder)]


def _scored(folder: Path) -> list[Sample]:
    """Scores as a run does: the prompt's tokens from the task, the response's decoded."""
    settings: Mapping[str, Any] = yaml.safe_load((folder / "task.yaml").read_text())
    task = Task(**{key: value for key, value in settings.items() if key != "stop"})
    (source,) = load_sources(task)
    tokenizer: Any = None
    if (folder / "tokenizer.json").exists():
        tokenizer = load_tokenizer(folder, stop=settings.get("stop", ()))
    prompts = []
    samples = []
    lines = (folder / "responses.jsonl").read_text(encoding="utf-8").split("\n")
    for index, line in enumerate(filter(None, lines)):
        response = json.loads(line)
        problem = source.problem(response.get("row", 0))
        tokens = (0,)
        ids = [0]
        if tokenizer is not None:
            tokens = prompt_encoder(tokenizer, task)(problem.question)
            ids = tokenizer.inner(response["response"], add_special_tokens=False)["input_ids"]
        prompts.append(Prompt(index, tokens, problem.text, problem.answer, problem.extra))
        row = torch.tensor([*tokens, *ids])
        trainable = torch.arange(len(row)) >= len(tokens)
        zeros = torch.zeros(len(row))
        samples.append(
            Sample(index, 0, row, trainable, zeros, zeros.int(), "stop", response["response"])
        )
    scorer = make_scorer(
        [Reward(name="accuracy"), Reward(name="format")],
        decode=tokenizer.decode if tokenizer else None,
        answer=task.answer,
        timeout_s=30.0,
    )
    return scorer.start(prompts).results(samples)
