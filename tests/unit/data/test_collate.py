"""Groups into a flat batch: the shift, the place of rewards, one row a sample."""

from __future__ import annotations

import pytest
from sample_rows import batch_of, sample

from megarl.data.collate import collate
from megarl.types import Group, Prompt


def test_shift_labels_mask_and_logprobs():
    batch = batch_of(sample("..xxx", reward=0.5), sample(".x", first=30, reward=2.0, finish="length"))
    assert batch.tokens.tolist() == [10, 11, 12, 13, 14, 30, 31]
    assert batch.labels.tolist() == [11, 12, 13, 14, 0, 31, 0]
    assert batch.mask.tolist() == [False, True, True, True, False, True, False]
    assert batch.rollout_logprobs.tolist() == [0, -12, -13, -14, 0, -31, 0]
    assert batch.token_rewards.tolist() == [0, 0, 0, 0.5, 0, 2.0, 0]
    assert batch.cu_seqlens.tolist() == [0, 5, 7]
    assert (batch.rewards.tolist(), batch.finish.tolist(), batch.temperature) == ([0.5, 2.0], [0, 1], 0.7)


def test_groups_are_dense_ids_in_order():
    groups = [
        Group(Prompt(7, (), ""), (sample(".x", prompt_id=7), sample(".x", prompt_id=7, index=1)), baseline=0.25),
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


def test_a_step_reward_before_anything_sampled_rejects_the_row():
    batch = batch_of(sample("..xx", step_rewards=((1, 0.5),)))
    assert not batch.mask.any() and not batch.token_rewards.any() and not batch.rollout_logprobs.any()


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
    assert (batch.num_rows, batch.num_tokens, batch.versions.shape) == (0, 0, (0, 2))


def test_an_unscored_sample_is_our_own_mistake():
    with pytest.raises(AssertionError, match="not scored"):
        batch_of(sample(".x", reward=None))
