"""Groups into a flat batch: the shift, the place of rewards, one row a sample."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from sample_rows import batch_of, sample

from megarl.data.collate import collate, take_rows
from megarl.types import FINISH, Group, Prompt


def test_shift_labels_mask_and_logprobs():
    batch = batch_of(
        sample("..xxx", reward=0.5), sample(".x", first=30, reward=2.0, finish="length")
    )
    assert batch.tokens.tolist() == [10, 11, 12, 13, 14, 30, 31]
    assert batch.labels.tolist() == [11, 12, 13, 14, 0, 31, 0]
    assert batch.mask.tolist() == [False, True, True, True, False, True, False]
    assert batch.rollout_logprobs.tolist() == [0, -12, -13, -14, 0, -31, 0]
    assert batch.versions.tolist() == [-1, 12 % 7, 13 % 7, 14 % 7, -1, 31 % 7, -1]
    assert batch.token_rewards.tolist() == [0, 0, 0, 0.5, 0, 2.0, 0]
    assert batch.cu_seqlens.tolist() == [0, 5, 7]
    assert (batch.rewards.tolist(), batch.finish.tolist(), batch.temperature) == (
        [0.5, 2.0],
        [0, 1],
        0.7,
    )


def test_groups_are_dense_ids_in_order():
    groups = [
        Group(
            Prompt(7, (), ""),
            (sample(".x", prompt_id=7), sample(".x", prompt_id=7, index=1)),
            baseline=0.25,
        ),
        Group(Prompt(3, (), ""), (sample(".x", prompt_id=3),)),
    ]
    batch = collate(groups, temperature=1.0)
    assert batch.group.tolist() == [0, 0, 1]
    assert batch.prompt_id.tolist() == [7, 7, 3]
    assert batch.baseline.tolist() == [0.25, 0.25, 0.0]


def test_outcome_on_the_last_sampled_token_not_on_what_the_environment_wrote():
    batch = batch_of(sample(".xx..", reward=1.5))
    assert batch.token_rewards.tolist() == [0, 1.5, 0, 0, 0]
    assert batch.step_ends.tolist() == [False, True, False, False, False]


def test_step_rewards_on_masked_tokens_move_back():
    # tokens 0..6, sampled: 1 2 5; a step that ends at token 3 (written by a tool) belongs to token 2 = position 1
    batch = batch_of(sample(".xx..x.", reward=1.0, step_rewards=((1, 0.25), (3, 0.5))))
    assert batch.token_rewards.tolist() == [0.25, 0.5, 0, 0, 1.0, 0, 0]
    assert batch.step_ends.tolist() == [True, True, False, False, True, False, False]


def test_an_outcome_of_zero_is_a_step_and_a_mere_sum_of_steps_is_none():
    steps = ((2, 0.25),)
    batch = batch_of(sample(".xxx", reward=0.0, step_rewards=steps))
    assert batch.step_ends.tolist() == [False, True, True, False] and batch.outcome_at.tolist() == [
        2
    ]
    batch = batch_of(sample(".xxx", reward=0.25, step_rewards=steps, has_outcome=False))
    assert batch.step_ends.tolist() == [
        False,
        True,
        False,
        False,
    ] and batch.outcome_at.tolist() == [-1]
    assert batch.token_rewards.tolist() == [0, 0.25, 0, 0]


def test_a_step_that_ends_with_the_row_is_one_step_with_the_outcome():
    batch = batch_of(sample(".x"), sample(".xxx", reward=1.0, step_rewards=((3, 0.25),)))
    assert batch.token_rewards.tolist() == [1, 0, 0, 0, 1.25, 0] and batch.outcome_at.tolist() == [
        0,
        4,
    ]
    assert batch.step_ends.tolist() == [True, False, False, False, True, False]


def test_what_was_cut_takes_no_part_when_masked():
    cut = sample(".xx", reward=1.0, finish="length", step_rewards=((1, 0.5),))
    groups = [Group(Prompt(0, (), ""), (cut, sample(".xx", index=1)))]
    batch = collate(groups, temperature=1.0, mask_truncated=True)
    assert batch.mask.tolist() == [False, False, False, True, True, False]
    assert (
        batch.outcome_at.tolist() == [-1, 4]
        and not batch.token_rewards[:3].any()
        and not batch.step_ends[:3].any()
    )
    assert not batch.rollout_logprobs[:3].any() and (batch.versions[:3] == -1).all()
    assert collate(groups, temperature=1.0).mask.sum() == 4


def test_a_step_reward_before_anything_sampled_rejects_the_row():
    batch = batch_of(sample("..xx", step_rewards=((1, 0.5),)))
    assert (
        not batch.mask.any() and not batch.token_rewards.any() and not batch.rollout_logprobs.any()
    )


def test_a_row_that_sampled_nothing_has_no_reward_and_no_mask():
    batch = batch_of(sample("....", reward=3.0), sample("x", reward=1.0))
    assert not batch.mask.any() and not batch.token_rewards.any()
    assert batch.rewards.tolist() == [3.0, 1.0]


def test_collate_leaves_the_samples_as_they_were():
    one = sample("..xx", step_rewards=((1, 0.5),))
    batch_of(one)
    assert one.trainable.tolist() == [False, False, True, True]


def test_no_samples_at_all():
    batch = collate([], temperature=1.0)
    assert (batch.num_rows, batch.num_tokens, batch.versions.shape) == (0, 0, (0,))


def test_an_unscored_sample_is_our_own_mistake():
    with pytest.raises(AssertionError, match="not scored"):
        batch_of(sample(".x", reward=None))


def test_rows_of_a_batch_are_the_batch_of_these_rows():
    samples = [
        sample(".xx", reward=0.5),
        sample(".xxx.", reward=1.5, step_rewards=((2, 0.25),)),
        sample(".x", reward=2.0, has_outcome=False),
        sample("..xx", reward=3.0),
    ]
    for rows in ([3, 1, 2], [0], []):
        whole, expected = batch_of(*samples), batch_of(*(samples[row] for row in rows))
        part, expected = take_rows(whole, rows), replace(expected, group=whole.group[rows])
        for field in fields(expected):
            ours, theirs = getattr(part, field.name), getattr(expected, field.name)
            assert (
                torch.equal(ours, theirs) if isinstance(theirs, torch.Tensor) else ours == theirs
            ), field.name


def test_only_what_reached_the_token_limit_is_masked():
    samples = [sample(".xx", index=i, finish=finish) for i, finish in enumerate(FINISH)]
    group = Group(Prompt(0, (), ""), tuple(samples))
    for is_masked, rows in ((False, [True, True, True]), (True, [True, False, True])):
        batch = collate([group], temperature=1.0, mask_truncated=is_masked)
        assert FINISH == ("stop", "length", "abort")
        assert batch.mask.view(3, 3).any(1).tolist() == rows
        assert (batch.outcome_at >= 0).tolist() == rows
