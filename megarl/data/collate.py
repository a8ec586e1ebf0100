"""Groups of samples into one flat batch. The only place where tokens are shifted into labels.

tokens     p0 p1 r0 r1 r2         labels   p1 r0 r1 r2  0
trainable   F  F  T  T  T         mask      F  T  T  T  F       an outcome reward sits at the last T
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import torch
from torch import Tensor

from megarl.types import FINISH, Group, Sample, TokenBatch, TrainBatch

__all__ = ["collate", "token_batch"]


def token_batch(rows: Sequence[tuple[Tensor, Tensor]], *, temperature: float) -> TokenBatch:
    """The batch of `rows`, each (tokens [L] int64, trainable [L] bool: True where the token is learned)."""
    return TokenBatch(
        tokens=_flat([tokens for tokens, _ in rows], torch.int64),
        labels=_flat([_shifted(tokens, 0) for tokens, _ in rows], torch.int64),
        mask=_flat([_shifted(trainable, False) for _, trainable in rows], torch.bool),
        cu_seqlens=torch.tensor([0, *(tokens.numel() for tokens, _ in rows)]).cumsum(0),
        temperature=temperature,
    )


def collate(groups: Sequence[Group], *, temperature: float, mask_truncated: bool = False) -> TrainBatch:
    """Every sample one row, groups in order. Samples must have been scored. N = samples, T = all their tokens.

    `mask_truncated`: what was cut at the token limit is a row without a trainable token, so it takes no part.
    """
    rows = [(index, group, sample) for index, group in enumerate(groups) for sample in group.samples]
    samples = [sample for _, _, sample in rows]
    masks = [_mask(sample, mask_truncated) for sample in samples]
    placed = [_place_rewards(sample, mask) for sample, mask in zip(samples, masks, strict=True)]
    logprobs = [torch.where(m, _shifted(s.rollout_logprobs, 0.0), 0.0) for s, m in zip(samples, masks, strict=True)]
    tokens = token_batch([(sample.tokens, sample.trainable) for sample in samples], temperature=temperature)
    outcome_at = torch.tensor([at for _, _, at in placed], dtype=torch.int64)
    return TrainBatch(
        tokens=tokens.tokens,
        labels=tokens.labels,
        mask=_flat(masks, torch.bool),
        rollout_logprobs=_flat(logprobs, torch.float32),
        token_rewards=_flat([rewards for rewards, _, _ in placed], torch.float32),
        step_ends=_flat([ends for _, ends, _ in placed], torch.bool),
        outcome_at=torch.where(outcome_at < 0, -1, outcome_at + tokens.cu_seqlens[:-1]),
        cu_seqlens=tokens.cu_seqlens,
        rewards=torch.tensor([_reward(sample) for sample in samples], dtype=torch.float32),
        baseline=torch.tensor([group.baseline or 0.0 for _, group, _ in rows], dtype=torch.float32),
        group=torch.tensor([index for index, _, _ in rows], dtype=torch.int64),
        prompt_id=torch.tensor([sample.prompt_id for sample in samples], dtype=torch.int64),
        finish=torch.tensor([FINISH.index(sample.finish) for sample in samples], dtype=torch.int64),
        versions=torch.tensor([sample.versions for sample in samples], dtype=torch.int64).reshape(-1, 2),
        temperature=temperature,
    )


def _mask(sample: Sample, mask_truncated: bool) -> Tensor:
    mask_L = _shifted(sample.trainable, False)
    return torch.zeros_like(mask_L) if mask_truncated and sample.finish == "length" else mask_L


def _flat(parts: list[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat([part.to(dtype) for part in parts]) if parts else torch.zeros(0, dtype=dtype)


def _shifted(x_L: Tensor, last: float) -> Tensor:
    """Position t gets what is said of token t + 1."""
    return torch.cat([x_L[1:], x_L.new_full((min(x_L.numel(), 1),), last)])


def _reward(sample: Sample) -> float:
    assert sample.reward is not None, f"sample {sample.index} of prompt {sample.prompt_id} was not scored"
    return sample.reward


def _place_rewards(sample: Sample, mask_L: Tensor) -> tuple[Tensor, Tensor, int]:
    """(rewards [L], step ends [L], position of the outcome or -1). A reward found on a False position moves to the
    True one before it; one with none before it rejects the row (its mask becomes all False).

    An outcome is one more step at the last True position, and counts as such when it is 0. Where a step of the
    process ends there too, the two are one step with the sum of their rewards: a position holds one number.
    """
    rewards_L, ends_L = torch.zeros(mask_L.numel()), torch.zeros(mask_L.numel(), dtype=torch.bool)
    trained = mask_L.nonzero().flatten().tolist()
    if not trained:
        return rewards_L, ends_L, -1
    outcome_at = trained[-1] if sample.has_outcome else -1
    placed = [(outcome_at, _reward(sample))] if sample.has_outcome else []
    for token, reward in sample.step_rewards:
        before = bisect_left(trained, token)  # token t + 1 is trained at position t
        if not before:
            mask_L.fill_(False)
            return rewards_L.zero_(), ends_L.fill_(False), -1
        placed.append((trained[before - 1], reward))
    for position, reward in placed:
        rewards_L[position] += reward
        ends_L[position] = True
    return rewards_L, ends_L, outcome_at
