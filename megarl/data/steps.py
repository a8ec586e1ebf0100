"""TRL's rows {"prompt": ..., "completions": ["step 1", "step 2"], "labels": [true, false]} -> StepBatch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, cast

import torch

from megarl.data.collate import token_batch
from megarl.data.tokenizer import Tokenizer
from megarl.types import Prompt, StepBatch


def step_batch(tokenizer: Tokenizer, prompts: Sequence[Prompt], *, separator: str) -> StepBatch:
    """Returns one row per prompt, each step followed by `separator`, which belongs to it.

    Raises ValueError with the problem's number and the remedy.
    """
    rows, ends, right = [], [], []
    for prompt in prompts:
        tokens = list(prompt.tokens)
        for text, label in _steps(prompt):
            tokens += [token for token, _ in tokenizer.split(text + separator)]
            ends.append(sum(len(row) for row, _ in rows) + len(tokens) - 1)
            right.append(label)
        rows.append((torch.tensor(tokens), torch.zeros(len(tokens), dtype=torch.bool)))
    flat, end_K = token_batch(rows, temperature=1.0), torch.tensor(ends, dtype=torch.int64)
    is_right_T = flat.mask.index_put((end_K,), torch.tensor(right, dtype=torch.bool))
    values: dict[str, Any] = asdict(flat) | {"mask": flat.mask.index_fill(0, end_K, True), "is_right": is_right_T}
    return StepBatch(**values)


def _steps(prompt: Prompt) -> list[tuple[str, bool]]:
    texts, labels = (cast(Any, prompt.extra.get(key)) for key in ("completions", "labels"))
    are_lists = isinstance(texts, Sequence) and isinstance(labels, Sequence) and 0 < len(texts) == len(labels)
    if not are_lists or not all(isinstance(text, str) and text.strip() for text in texts) or set(labels) - {0, 1}:
        raise ValueError(
            f"problem {prompt.prompt_id} ({prompt.text[:40]!r}) has completions={str(texts)[:60]} and labels="
            f"{str(labels)[:60]}, but a process reward model learns from a list of texts, and true or false for each; "
            "correct the row"
        )
    return [(text, bool(label)) for text, label in zip(texts, labels, strict=True)]
