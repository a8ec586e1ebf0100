"""Collates groups of samples, or prompts with answers, into a flat batch. Tokens are shifted into labels only here.

tokens     p0 p1 r0 r1 r2         labels   p1 r0 r1 r2  0
trainable   F  F  T  T  T         mask      F  T  T  T  F       an outcome reward sits at the last T
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import torch
from torch import Tensor

from megarl.data.tokenizer import Tokenizer
from megarl.types import FINISH, Group, Prompt, Sample, TokenBatch, TrainBatch


def token_batch(rows: Sequence[tuple[Tensor, Tensor]], *, temperature: float) -> TokenBatch:
    """Returns the batch of `rows`, each (tokens [L] int64, trainable [L] bool: True where the token is learned)."""
    return TokenBatch(
        tokens=_flat([tokens for tokens, _ in rows], torch.int64),
        labels=_flat([_shifted(tokens, 0) for tokens, _ in rows], torch.int64),
        mask=_flat([_shifted(trainable, False) for _, trainable in rows], torch.bool),
        cu_seqlens=torch.tensor([0, *(tokens.numel() for tokens, _ in rows)]).cumsum(0),
        temperature=temperature,
    )


def supervised_batch(tokenizer: Tokenizer, prompts: Sequence[Prompt]) -> TokenBatch:
    """Returns one row per prompt, whose answer and end token are learned. Raises ValueError if an answer is missing."""
    rows = []
    for prompt in prompts:
        if prompt.answer is None:
            raise ValueError(
                f"problem {prompt.prompt_id} ({prompt.text[:40]!r}) has no answer, but stage: sft trains on answers; "
                "add an answer to every row of the task"
            )
        tokens = torch.tensor([*prompt.tokens, *tokenizer.encode_answer(prompt.answer)])
        rows.append((tokens, torch.arange(tokens.numel()) >= len(prompt.tokens)))
    return token_batch(rows, temperature=1.0)


def collate(groups: Sequence[Group], *, temperature: float, mask_truncated: bool = False) -> TrainBatch:
    """Returns one row per sample, in order: N samples with T tokens in all. Every sample must be scored.

    With `mask_truncated`, the mask of samples that reached the token limit is False, so they are not trained on.
    """
    rows = [(index, group, sample) for index, group in enumerate(groups) for sample in group.samples]
    samples = [sample for _, _, sample in rows]
    is_masked = [mask_truncated and sample.finish == "length" for sample in samples]
    masks = [_shifted(s.trainable & (not masked), False) for s, masked in zip(samples, is_masked, strict=True)]
    reward_rows = [_place_rewards(sample, mask) for sample, mask in zip(samples, masks, strict=True)]
    logprobs = [torch.where(m, _shifted(s.rollout_logprobs, 0.0), 0.0) for s, m in zip(samples, masks, strict=True)]
    tokens = token_batch([(sample.tokens, sample.trainable) for sample in samples], temperature=temperature)
    outcome_N = torch.tensor([position for _, _, position in reward_rows], dtype=torch.int64)
    return TrainBatch(
        tokens=tokens.tokens,
        labels=tokens.labels,
        mask=_flat(masks, torch.bool),
        rollout_logprobs=_flat(logprobs, torch.float32),
        token_rewards=_flat([rewards for rewards, _, _ in reward_rows], torch.float32),
        step_ends=_flat([ends for _, ends, _ in reward_rows], torch.bool),
        outcome_at=torch.where(outcome_N < 0, -1, outcome_N + tokens.cu_seqlens[:-1]),
        cu_seqlens=tokens.cu_seqlens,
        rewards=torch.tensor([_reward(sample) for sample in samples], dtype=torch.float32),
        baseline=torch.tensor([group.baseline or 0.0 for _, group, _ in rows], dtype=torch.float32),
        group=torch.tensor([index for index, _, _ in rows], dtype=torch.int64),
        prompt_id=torch.tensor([sample.prompt_id for sample in samples], dtype=torch.int64),
        finish=torch.tensor([FINISH.index(sample.finish) for sample in samples], dtype=torch.int64),
        versions=torch.tensor([sample.versions for sample in samples], dtype=torch.int64).reshape(-1, 2),
        temperature=temperature,
    )


def _flat(rows: list[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat([torch.zeros(0, dtype=dtype), *(row.to(dtype) for row in rows)])


def _shifted(x_L: Tensor, last: float) -> Tensor:
    """Moves the value of token t + 1 to position t; the last position gets `last`."""
    return torch.cat([x_L[1:], x_L.new_full((min(x_L.numel(), 1),), last)])


def _reward(sample: Sample) -> float:
    assert sample.reward is not None, f"sample {sample.index} of prompt {sample.prompt_id} was not scored"
    return sample.reward


def _place_rewards(sample: Sample, mask_L: Tensor) -> tuple[Tensor, Tensor, int]:
    """Returns rewards [L], step ends [L] and the position of the outcome reward, -1 if there is none.

    The reward of a masked position moves to the trained one before it. If there is none, the row is not trained on:
    its mask is set to False in place. The outcome is a step that ends at the last trained position, even if it is 0;
    a process step that ends there as well is merged with it, and their rewards add up.
    """
    rewards_L, ends_L = torch.zeros(mask_L.numel()), torch.zeros(mask_L.numel(), dtype=torch.bool)
    trained = mask_L.nonzero().flatten().tolist()
    if trained and any(token <= trained[0] for token, _ in sample.step_rewards):
        mask_L.fill_(False)
        trained = []
    if not trained:
        return rewards_L, ends_L, -1
    outcome = [(trained[-1], _reward(sample))] if sample.has_outcome else []
    # token t + 1 is trained at position t
    steps = [(trained[bisect_left(trained, token) - 1], reward) for token, reward in sample.step_rewards]
    for position, reward in (*outcome, *steps):
        rewards_L[position] += reward
        ends_L[position] = True
    return rewards_L, ends_L, trained[-1] if sample.has_outcome else -1
