"""Collates groups of samples, or prompts with answers, into a flat batch.

Only this module shifts tokens into labels.

tokens     p0 p1 r0 r1 r2         labels   p1 r0 r1 r2  0
trainable   F  F  T  T  T         mask      F  T  T  T  F       an outcome reward sits at the last T
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, pairwise
from math import nan
from typing import Any, TypeVar

import torch
from torch import Tensor

from megarl.data.rows import reference_text
from megarl.data.tokenizer import Tokenizer
from megarl.types import FINISH, Group, Prompt, Sample, TokenBatch, TrainBatch

AnyBatch = TypeVar("AnyBatch", bound=TrainBatch)


def token_batch(rows: Sequence[tuple[Tensor, Tensor]], *, temperature: float = 1.0) -> TokenBatch:
    """Returns the flat batch of `rows`: pairs (tokens [L] int64, trainable [L] bool), where
    trainable marks the tokens to learn.
    """
    cu_seqlens = torch.tensor([0, *(tokens.numel() for tokens, _ in rows)]).cumsum(0)
    tokens_T = _flat([tokens for tokens, _ in rows], torch.int64)
    return TokenBatch(
        tokens=tokens_T,
        labels=_shifted(tokens_T, cu_seqlens),
        mask=_shifted(_flat([trainable for _, trainable in rows], torch.bool), cu_seqlens),
        cu_seqlens=cu_seqlens,
        temperature=temperature,
    )


def supervised_batch(tokenizer: Tokenizer, prompts: Sequence[Prompt]) -> TokenBatch:
    """Returns one row per prompt.

    The learned tokens are those that `prompt.learned` marks, or else the answer and the end token.
    """
    rows = []
    for prompt in prompts:
        if prompt.learned:
            rows.append((torch.tensor(prompt.tokens), torch.tensor(prompt.learned)))
        else:
            rows.append(answer_row(tokenizer, prompt, reference_text(prompt.answer)))
    return token_batch(rows)


def answer_row(tokenizer: Tokenizer, prompt: Prompt, answer: str) -> tuple[Tensor, Tensor]:
    """Returns the tokens [L] of prompt, answer and end token, and a mask [L] of learned tokens,
    which is False for the prompt.
    """
    tokens = torch.tensor([*prompt.tokens, *tokenizer.encode_answer(answer)])
    return tokens, torch.arange(tokens.numel()) >= len(prompt.tokens)


def collate(
    groups: Sequence[Group], *, temperature: float, mask_truncated: bool = False
) -> TrainBatch:
    """Returns a batch with one row per sample, in order: N samples with T tokens in all.

    Every sample must have a reward. With `mask_truncated`, the mask of samples that reached the
    token limit is False, so they are not trained on.
    """
    samples = list(chain.from_iterable(group.samples for group in groups))
    rows = []
    for sample in samples:
        is_masked = mask_truncated and sample.finish == "length"
        rows.append((sample.tokens, sample.trainable & (not is_masked)))
    tokens = token_batch(rows, temperature=temperature)
    choices = tuple(sample.choices for sample in samples)
    if any(choices):
        tokens = replace(tokens, choices=choices)
    token_rewards, step_ends, outcome_at = _place_rewards(samples, tokens)
    logprobs_T = _shifted(
        _flat([sample.rollout_logprobs for sample in samples], torch.float32), tokens.cu_seqlens
    )
    versions_T = _shifted(
        _flat([sample.versions for sample in samples], torch.int32), tokens.cu_seqlens
    )
    sizes = torch.tensor([len(group.samples) for group in groups], dtype=torch.int64)
    baselines = torch.tensor([group.baseline or 0.0 for group in groups], dtype=torch.float32)
    return TrainBatch(
        **vars(tokens),
        rollout_logprobs=torch.where(tokens.mask, logprobs_T, 0.0),
        token_rewards=token_rewards,
        step_ends=step_ends,
        outcome_at=outcome_at,
        rewards=torch.tensor([sample.reward for sample in samples], dtype=torch.float32),
        baseline=baselines.repeat_interleave(sizes),
        group=torch.arange(len(groups)).repeat_interleave(sizes),
        prompt_id=torch.tensor([sample.prompt_id for sample in samples], dtype=torch.int64),
        finish=torch.tensor([FINISH.index(sample.finish) for sample in samples], dtype=torch.int64),
        versions=torch.where(tokens.mask, versions_T, -1),
        reward_parts=_reward_parts(samples),
    )


def take_rows(batch: AnyBatch, rows: Sequence[int]) -> AnyBatch:
    """Returns a batch of the given rows, in the given order."""
    rows_N = torch.tensor(rows, dtype=torch.int64)
    lengths_N = batch.cu_seqlens.diff()
    cu_seqlens = torch.cat([lengths_N.new_zeros(1), lengths_N[rows_N].cumsum(0)])
    shift_N = batch.cu_seqlens[rows_N] - cu_seqlens[:-1]
    index_T = torch.arange(int(cu_seqlens[-1])) + shift_N.repeat_interleave(lengths_N[rows_N])

    def taken(value: Any) -> Any:
        match value:
            case Tensor():
                return value[index_T if value.shape[0] == batch.num_tokens else rows_N]
            case tuple():
                return tuple(value[row] for row in rows if value)
            case dict():
                return {name: taken(part) for name, part in value.items()}
        return value

    values = {name: taken(value) for name, value in vars(batch).items()}
    values["cu_seqlens"] = cu_seqlens
    outcome_N = values["outcome_at"]
    values["outcome_at"] = torch.where(outcome_N >= 0, outcome_N - shift_N, -1)
    return replace(batch, **values)


def _reward_parts(samples: Sequence[Sample]) -> dict[str, Tensor]:
    parts = {}
    for name in sorted(set(chain.from_iterable(sample.rewards for sample in samples))):
        parts[name] = torch.tensor([sample.rewards.get(name, nan) for sample in samples])
    return parts


def _flat(rows: list[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat([torch.zeros(0, dtype=dtype), *(row.to(dtype) for row in rows)])


def _shifted(x_T: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Moves the value of token t + 1 of a row to position t; the last position of a row gets 0."""
    shifted_T = x_T.roll(-1)
    shifted_T[cu_seqlens[1:][cu_seqlens.diff() > 0] - 1] = 0
    return shifted_T


def _place_rewards(samples: Sequence[Sample], tokens: TokenBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Returns rewards [T], step ends [T] and the positions [N] of the outcome rewards (-1 for rows
    without an outcome reward).

    The reward of a masked position moves to the nearest trained position before it. If the row has
    no such position, the row is not trained on: its mask is set to False in place. The outcome is a
    step that ends at the last trained position, even if its reward is 0. A process step that ends
    at the same position is merged with the outcome: their rewards add up.
    """
    outcomes = []
    steps = []
    for sample, (start, end) in zip(samples, pairwise(tokens.cu_seqlens.tolist()), strict=True):
        assert sample.reward is not None, (
            f"sample {sample.index} of prompt {sample.prompt_id} was not scored"
        )
        positions = (start + tokens.mask[start:end].nonzero().flatten()).tolist()
        if positions and any(start + token <= positions[0] for token, _ in sample.step_rewards):
            tokens.mask[positions] = False
            positions = []
        outcomes.append(positions[-1] if positions and sample.has_outcome else -1)
        if outcomes[-1] >= 0:
            steps.append((outcomes[-1], sample.reward))
        if positions:  # token t + 1 is trained at position t
            steps += [
                (positions[bisect_left(positions, start + t) - 1], reward)
                for t, reward in sample.step_rewards
            ]
    end_K = torch.tensor([position for position, _ in steps], dtype=torch.int64)
    rewards_K = torch.tensor([reward for _, reward in steps], dtype=torch.float32)
    rewards_T = torch.zeros(tokens.num_tokens).index_add(0, end_K, rewards_K)
    ends_T = torch.zeros_like(tokens.mask).index_fill(0, end_K, True)
    return rewards_T, ends_T, torch.tensor(outcomes, dtype=torch.int64)
