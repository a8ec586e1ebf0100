"""Prompts with responses that people or judges have compared -> PreferenceBatch.

    {"prompt": ..., "chosen": ..., "rejected": ..., "margin": 1.0}      one pair; the margin is optional
    {"prompt": ..., "responses": [...]}                                 a ranking, best first
    {"prompt": ..., "responses": [...], "ranks": [2, 1, 1]}             1 is best; equal ranks give no pair
    {"prompt": ..., "responses": [...], "scores": [0.1, 0.9, 0.9]}      the highest is best

A response is text or a list of chat messages that ends with the assistant's; it may repeat the prompt's messages.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import permutations
from typing import Any

import torch

from megarl.data.collate import token_batch
from megarl.data.tokenizer import Tokenizer
from megarl.types import PreferenceBatch, Prompt


def preference_batch(tokenizer: Tokenizer, prompts: Sequence[Prompt]) -> PreferenceBatch:
    """Returns a row for each response, which ends with the end token and is learned, and every pair of unequal ones.

    Prompts whose responses are all tied have no rows. Raises ValueError with the problem's number and the remedy.
    """
    rows, group, pairs, margins = [], [], [], []
    for prompt in prompts:
        responses, ranks, margin = ranked_responses(prompt)
        better = [pair for pair in permutations(range(len(ranks)), 2) if ranks[pair[0]] < ranks[pair[1]]]
        if better:
            pairs += [(len(rows) + one, len(rows) + other) for one, other in better]
            margins += [margin] * len(better)
            group += [group[-1] + 1 if group else 0] * len(responses)
        for response in responses if better else ():
            tokens = torch.tensor([*prompt.tokens, *tokenizer.encode_answer(response)])
            rows.append((tokens, torch.arange(tokens.numel()) >= len(prompt.tokens)))
    return PreferenceBatch.of(
        token_batch(rows, temperature=1.0),
        group=torch.tensor(group, dtype=torch.int64),
        pairs=torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2),
        margins=torch.tensor(margins, dtype=torch.float32),
    )


def ranked_responses(prompt: Prompt) -> tuple[list[str], list[float], float]:
    """Returns the responses of a prompt, their ranks (the lowest is best) and the margin of its pairs."""
    extra, where = prompt.extra, f"problem {prompt.prompt_id} ({prompt.text[:40]!r})"
    keys = [key for key in ("chosen", "rejected", "responses") if extra.get(key) is not None]
    if keys == ["chosen", "rejected"]:
        margin = 0.0 if extra.get("margin") is None else _numbers([extra["margin"]], 1, f"{where}: margin")[0]
        return [_response(extra[key], prompt, f"{where}: {key}") for key in keys], [0.0, 1.0], margin
    if keys != ["responses"]:
        raise ValueError(
            f"{where} has {' and '.join(keys) or 'no responses'}, but preferences are learned from `chosen` and "
            "`rejected`, or from `responses`; write one or the other in every row of the task"
        )
    values = extra["responses"]
    if not isinstance(values, Sequence) or isinstance(values, str) or len(values) < 2:
        raise ValueError(f"{where}: responses must be a list of two or more, best first, not {str(values)[:60]!r}")
    orders = [key for key in ("ranks", "scores") if extra.get(key) is not None]
    if len(orders) > 1:
        raise ValueError(f"{where} has ranks and scores, which may contradict each other; keep one")
    numbers = _numbers(extra[orders[0]], len(values), f"{where}: {orders[0]}") if orders else range(len(values))
    sign = -1.0 if orders == ["scores"] else 1.0
    return [_response(value, prompt, f"{where}: responses") for value in values], [sign * n for n in numbers], 0.0


def _numbers(values: Any, count: int, where: str) -> list[float]:
    is_list = isinstance(values, Sequence) and not isinstance(values, str) and len(values) == count
    if not is_list or not all(isinstance(value, int | float) and math.isfinite(value) for value in values):
        raise ValueError(f"{where} must be {count} finite numbers, one for each response, not {str(values)[:60]}")
    return [float(value) for value in values]


def _response(value: Any, prompt: Prompt, where: str) -> str:
    """The text of a response. Messages before the assistant's last one must be the prompt's."""
    if isinstance(value, str):
        return value
    is_list = isinstance(value, Sequence) and all(isinstance(message, Mapping) for message in value)
    last = value[-1] if is_list and value else {}
    if last.get("role") != "assistant" or not isinstance(last.get("content"), str):
        shown = str(value)[:60]
        raise ValueError(f"{where} must be text, or messages that end with the assistant's, not {shown!r}; correct it")
    texts = [str(message.get("content")) for message in value[:-1]]
    both = "\n".join(f"{message.get('role')}: {text}" for message, text in zip(value, texts, strict=False))
    if texts and prompt.text not in (both, texts[-1]):
        raise ValueError(
            f"{where} begins with {len(texts)} messages that are not the prompt's; a response is one message, alone or "
            "after the prompt's"
        )
    return last["content"]
