"""From prompts to groups, with a policy and rewards that are plain functions."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch

from megarl.algorithms.objective import Objective
from megarl.config.schema import Algorithm
from megarl.data.collate import collate
from megarl.data.ledger import Ledger
from megarl.rollout.sampling import request_seed
from megarl.rollout.schedule import (
    ASKED,
    KEPT,
    Rollouts,
    digest_samples,
    has_spread,
    oldest_version,
)
from megarl.types import (
    CheckFailed,
    Group,
    Prompt,
    Request,
    Sample,
    StepReport,
    TokenScores,
    UpdateReport,
)


class Counting:
    """roles.Prompts: prompt i has the tokens (i,)."""

    def __init__(self) -> None:
        self.position = 0
        self.kept: dict[str, float] = {}

    def take(self, count: int) -> list[Prompt]:
        taken = [Prompt(i, (i,), str(i)) for i in range(self.position, self.position + count)]
        self.position += count
        return taken

    def put_back(self, prompts):
        assert [prompt.prompt_id for prompt in prompts] == list(
            range(self.position - len(prompts), self.position)
        )
        self.position -= len(prompts)

    def observe(self, groups):
        pass

    def state(self):
        return {"position": self.position, "kept": dict(self.kept)}

    def restore(self, state):
        self.position, self.kept = state["position"], dict(state["kept"])


def generator(reward):
    """`reward(prompt_id, index)` of each sample; the tokens depend on the seed alone."""

    def generate(requests: Sequence[Request], *, version: int) -> list[Sample]:
        samples = []
        for request in requests:
            value = reward(request.prompt.prompt_id, request.index)
            tokens = torch.tensor([*request.prompt.tokens, request.seed % 67])
            samples.append(
                Sample(
                    request.prompt.prompt_id,
                    request.index,
                    tokens,
                    torch.tensor([False, True]),
                    torch.zeros(2),
                    torch.tensor([-1, version], dtype=torch.int32),
                    "stop",
                    reward=value,
                    extra={} if value is not None else {"dropped": "reward/f/error"},
                )
            )
        return samples

    return generate


def differs(group: Group) -> bool:
    """Of thousands of groups, quicker than `has_spread`."""
    return len({sample.reward for sample in group.samples}) > 1


def rollouts(reward, **more) -> Rollouts:
    return Rollouts(generator(reward), samples_per_prompt=3, temperature=0.5, run_seed=7, **more)


def test_groups_hold_every_sample_in_order():
    prompts = Counting()
    groups = (
        rollouts(lambda prompt, index: prompt + index / 10).collect(prompts, 4, version=2).groups
    )
    assert [group.prompt.prompt_id for group in groups] == [0, 1, 2, 3]
    assert [[s.index for s in group.samples] for group in groups] == [[0, 1, 2]] * 4
    assert groups[3].samples[2].reward == 3.2
    assert prompts.position == 4


def test_requests_carry_seed_and_temperature():
    seen: list[Request] = []

    def generate(requests, *, version):
        seen.extend(requests)
        return generator(lambda *_: 1.0)(requests, version=version)

    Rollouts(generate, samples_per_prompt=2, temperature=0.5, run_seed=7).collect(
        Counting(), 2, version=3
    )
    assert [(r.prompt.prompt_id, r.index, r.temperature) for r in seen] == [
        (0, 0, 0.5), (0, 1, 0.5), (1, 0, 0.5), (1, 1, 0.5),
    ]  # fmt: skip
    assert [r.seed for r in seen] == [
        request_seed(7, 3, prompt, index) for prompt in (0, 1) for index in (0, 1)
    ]


def test_samples_without_a_reward_are_left_out_and_counted_by_cause():
    roll = rollouts(lambda prompt, index: None if (prompt, index) == (1, 0) else 1.0)
    rollout = roll.collect(Counting(), 2, version=0)
    assert [[s.index for s in group.samples] for group in rollout.groups] == [[0, 1, 2], [1, 2]]
    assert rollout.counts["samples/dropped"] == rollout.counts["reward/f/error"] == 1


def test_a_group_without_any_sample_is_left_out():
    roll = rollouts(lambda prompt, index: None if prompt == 0 else 1.0)
    rollout = roll.collect(Counting(), 2, version=0)
    assert [group.prompt.prompt_id for group in rollout.groups] == [1]
    assert (rollout.counts["groups/empty"], rollout.counts["samples/dropped"]) == (1, 3)


def test_filtered_groups_are_replaced_by_fresh_prompts():
    roll = rollouts(
        lambda prompt, index: float(prompt % 2 and index), has_spread=differs, filter_zero_std=True
    )
    prompts = Counting()
    rollout = roll.collect(prompts, 4, version=0)
    assert [group.prompt.prompt_id for group in rollout.groups] == [1, 3, 5, 7]
    assert rollout.counts["groups/filtered"] >= 3
    assert len(rollout.generated) == prompts.position == 8  # what was sampled, kept or not
    assert rollout.counts["rollout/refills"] == 1, (
        "half are kept, so twice as many as are missing are asked for"
    )


@pytest.mark.parametrize("seed", range(20))
def test_what_is_trained_on_does_not_depend_on_how_many_are_asked_for(seed):
    """The same groups in every step as if each missing one were asked for alone, whatever earlier steps kept."""
    draw = random.Random(seed)
    has_spread_of: dict[int, bool] = {}

    def reward(prompt, index):
        rate = 0.9 - 0.7 * prompt / 500  # falls, so that the last steps do not foretell this one
        return float(has_spread_of.setdefault(prompt, draw.random() < rate) and index)

    roll, prompts, position = (
        rollouts(reward, has_spread=differs, filter_zero_std=True, max_refills=30),
        Counting(),
        0,
    )
    for step in range(20):
        if step % 5 == 4:
            prompts.kept.update({KEPT: draw.uniform(0, 50), ASKED: draw.uniform(50, 100)})
        rollout = roll.collect(prompts, 12, version=step)
        wanted = [
            prompt for prompt in range(position, max(has_spread_of) + 1) if has_spread_of[prompt]
        ]
        assert [group.prompt.prompt_id for group in rollout.groups] == wanted[:12]
        assert prompts.position == wanted[11] + 1, (
            "the stream goes on after the last group that is trained on"
        )
        assert (
            rollout.counts["groups/surplus"]
            == sum(differs(group) for group in rollout.generated) - 12
        )
        position = prompts.position


def test_a_few_prompts_are_enough_at_the_end_of_the_budget():
    """The 4th of 4 kept groups is the last of 12 prompts, however many were asked for before."""
    for history in ({}, {KEPT: 12.0, ASKED: 12.0}, {KEPT: 0.0, ASKED: 400.0}):
        prompts = Counting()
        prompts.kept.update(history)
        roll = rollouts(
            lambda prompt, index: float(prompt in (0, 1, 2, 11) and index),
            has_spread=differs,
            filter_zero_std=True,
            max_refills=2,
        )
        rollout = roll.collect(prompts, 4, version=0)
        assert [group.prompt.prompt_id for group in rollout.groups] == [
            0,
            1,
            2,
            11,
        ] and prompts.position == 12


def test_after_the_first_step_most_steps_need_no_refill():
    """Asking only for what is missing would take 2.9 rounds on average."""
    draw = random.Random(0)
    has_spread_of = [draw.random() < 0.5 for _ in range(10_000)]
    roll, prompts = (
        rollouts(
            lambda prompt, index: float(has_spread_of[prompt] and index),
            has_spread=differs,
            filter_zero_std=True,
        ),
        Counting(),
    )
    counts = [roll.collect(prompts, 32, version=step).counts for step in range(60)]
    refills = [count["rollout/refills"] for count in counts]
    assert refills[0] >= 1 and sum(refills[1:]) < 18 and max(refills[1:]) <= 2
    assert sum(count["groups/surplus"] for count in counts[1:]) < 59 * 32 * 0.2


def test_where_every_group_is_kept_no_more_than_the_batch_is_asked_for():
    roll, prompts = (
        rollouts(lambda prompt, index: float(index), has_spread=differs, filter_zero_std=True),
        Counting(),
    )
    for step in range(3):
        assert len(roll.collect(prompts, 8, version=step).generated) == 8
        assert prompts.position == 8 * (step + 1)


def test_a_resumed_run_asks_for_as_many():
    def steps(roll, prompts, first):
        return [
            (r.digest, dict(r.counts))
            for r in (roll.collect(prompts, 8, version=v) for v in range(first, 6))
        ]

    draw = random.Random(3)
    has_spread_of = [draw.random() < 0.6 for _ in range(10_000)]
    prompts, again = Counting(), Counting()
    reward = lambda prompt, index: float(has_spread_of[prompt] and index)  # noqa: E731
    for step in range(3):
        rollouts(reward, has_spread=differs, filter_zero_std=True).collect(prompts, 8, version=step)
    again.restore(json.loads(json.dumps(prompts.state())))
    assert steps(rollouts(reward, has_spread=differs, filter_zero_std=True), again, 3) == steps(
        rollouts(reward, has_spread=differs, filter_zero_std=True), prompts, 3
    )


def test_refills_are_bounded():
    roll = rollouts(
        lambda prompt, index: float(prompt == 0 and index),
        has_spread=differs,
        filter_zero_std=True,
        max_refills=2,
    )
    prompts = Counting()
    assert len(roll.collect(prompts, 2, version=0).groups) == 1
    assert prompts.position == 2 + 2 + 2, "at most as many again as were asked for"


def test_when_every_group_is_flat_the_step_goes_on_with_as_many_as_asked():
    roll = rollouts(lambda *_: 1.0, has_spread=differs, filter_zero_std=True, max_refills=2)
    rollout = roll.collect(Counting(), 2, version=0)
    assert [group.prompt.prompt_id for group in rollout.groups] == [0, 1]
    names = ("groups/kept_flat", "groups/filtered", "rollout/refills")
    assert [rollout.counts[name] for name in names] == [2, 4, 2]


def test_an_empty_step_quotes_why_its_first_sample_was_dropped():
    roll = rollouts(lambda *_: None, filter_zero_std=True, max_refills=1)
    generate = roll.generate

    def failing(requests, **kwargs):
        samples = generate(requests, **kwargs)
        return [
            sample.without_reward("reward/r:f/error", f"raised KeyError: {sample.index}")
            for sample in samples
        ]

    roll.generate = failing
    said = re.escape("be trained on (reward/r:f/error: raised KeyError: 0); check the rewards")
    with pytest.raises(ValueError, match=said):
        roll.collect(Counting(), 2, version=5)


def test_no_group_at_the_start_says_why():
    roll = rollouts(lambda *_: None, has_spread=differs, filter_zero_std=True, max_refills=1)
    with pytest.raises(
        ValueError, match=r"step 5: none of 4 groups can be trained on .*reward/f/error"
    ):
        roll.collect(Counting(), 2, version=5)


def test_later_an_empty_step_changes_nothing_until_the_third_in_a_row():
    broken = False
    roll = rollouts(lambda *_: None if broken else 1.0)
    prompts = Counting()
    for _ in range(2):  # the count starts again after a step with groups
        broken = False
        rollout = roll.collect(prompts, 2, version=0)
        assert len(rollout.groups) == 2 and not rollout.counts["rollout/empty"]
        broken = True
        for _ in range(2):
            rollout = roll.collect(prompts, 2, version=1)
            assert rollout.groups == () and rollout.counts["rollout/empty"] == 1
    with pytest.raises(CheckFailed, match="empty step 3 in a row"):
        roll.collect(prompts, 2, version=2)


def test_the_oldest_version_is_of_every_trained_token():
    """Also of one in the middle; prompts and tools have version -1."""
    mixed = replace(group_of(1.0).samples[0], versions=torch.tensor([-1, 4, 3, 5]).int())
    assert oldest_version([replace(group_of(1.0), samples=(mixed,))]) == 3
    assert oldest_version([]) is None


def test_the_share_of_kept_groups_forgets_half_of_earlier_steps():
    roll, prompts = (
        rollouts(lambda prompt, index: float(index), has_spread=differs, filter_zero_std=True),
        Counting(),
    )
    for step, seen in enumerate((4.0, 6.0, 7.0)):
        roll.collect(prompts, 4, version=step)
        assert prompts.kept == {KEPT: seen, ASKED: seen}


def test_each_refill_asks_for_twice_as_many_where_earlier_steps_promised_more():
    roll, prompts = (
        rollouts(lambda *_: 1.0, has_spread=differs, filter_zero_std=True, max_refills=15),
        Counting(),
    )
    prompts.kept = {KEPT: 1000.0, ASKED: 1000.0}
    counts = roll.collect(prompts, 1, version=0).counts
    assert prompts.position == 16 and counts["rollout/refills"] == 4  # 1, 1, 2, 4, 8


def group_of(*rewards: float, finish="stop", steps=(), has_outcome=True) -> Group:
    """`steps`: (token, reward) of each sample; tokens 1 to 3 are trained."""
    tokens = torch.arange(4)
    steps = steps or [()] * len(rewards)
    samples = tuple(
        Sample(
            0,
            index,
            tokens,
            tokens > 0,
            torch.zeros(4),
            torch.zeros(4).int(),
            finish,
            reward=reward,
            step_rewards=tuple(steps[index]),
            has_outcome=has_outcome,
        )
        for index, reward in enumerate(rewards)
    )
    return Group(Prompt(0, (1,), ""), samples)


@pytest.mark.parametrize(
    ("rewards", "clip", "spread"),
    [
        ([0.0, 1.0], None, True),
        ([1.0, 1.0], None, False),
        ([7.0, 9.0, 8.0, 6.0], (-5, 5), False),
        ([7.0, 9.0, 4.0, 6.0], (-5, 5), True),
        ([0.3, 0.1 + 0.2], None, False),
        ([2.0**24, 2.0**24 + 1], None, False),  # equal in fp32
        ([1e-13, 0.0], None, False),  # differ by less than rounding of 1
        ([3e38, 1.0, 1.0], None, False),  # beyond the range of statistics: it takes no part
        ([5.0], None, False),
    ],
)
def test_spread_is_that_of_the_advantages(rewards, clip, spread):
    algorithm = Algorithm(reward_clip=clip)
    group = group_of(*rewards)
    assert has_spread(group, algorithm) == spread == has_advantages(group, algorithm)
    cut = group_of(*rewards, finish="length")
    assert not has_spread(cut, Algorithm(truncated="mask"))
    assert has_spread(cut, algorithm) == spread


def has_advantages(group: Group, algorithm: Algorithm) -> bool:
    batch = collate([group], temperature=1.0, mask_truncated=algorithm.truncated == "mask")
    objective = Objective(algorithm)
    none = TokenScores(torch.zeros(batch.num_tokens), None)
    scored, _ = objective.advantages(batch, none, objective.initial_state())
    return bool(scored.advantages.any())


@pytest.mark.parametrize("advantage", ["grpo", "rloo", "dr_grpo", "opo", "gpg", "grpo_process"])
def test_groups_with_spread_are_those_with_advantages(advantage):
    """Rewards of few values, so that some are equal; steps of any, which add up or are compared."""
    draw = random.Random(7)
    seen = set()
    for _ in range(60):
        values = draw.choice([(0.5,), (0.0, 1.0), (0.25, 0.5)])
        steps = [
            [(token, draw.choice(values)) for token in (1, 3)[: draw.choice((1, 2))]]
            for _ in range(3 * draw.randrange(2))
        ]
        clip = draw.choice([None, (0.0, 0.25)])
        algorithm = Algorithm(advantage=advantage, reward_clip=clip)
        rewards = [draw.choice(values) for _ in range(3)]
        has_outcome = not steps or draw.random() < 0.5
        if not has_outcome:
            rewards = [sum(reward for _, reward in one) for one in steps]
        group = group_of(*rewards, steps=steps, has_outcome=has_outcome)
        seen.add(has_spread(group, algorithm))
        assert has_spread(group, algorithm) == has_advantages(group, algorithm), group
    assert seen == {True, False}


def test_steps_that_differ_are_spread_where_tokens_have_advantages_of_their_own():
    group = group_of(1.0, 1.0, steps=[[(1, 0.75), (3, 0.25)], [(1, 0.25), (3, 0.75)]])
    expected = {"grpo": False, "reinforce": True, "gae": True, "grpo_process": True}
    for advantage, spread in expected.items():
        assert has_spread(group, Algorithm(advantage=advantage)) == spread, advantage
    longer = group_of(1.0, 0.5, steps=[[(1, 0.5), (3, 0.5)], [(1, 0.5)]], has_outcome=False)
    expected = {"grpo": True, "reinforce": True, "grpo_process": False}
    for advantage, spread in expected.items():
        assert has_spread(longer, Algorithm(advantage=advantage)) == spread, advantage


def test_groups_without_spread_are_counted_whether_or_not_they_are_replaced():
    def reward(prompt: int, index: int) -> float:
        return 7.0 + index * (prompt % 2)

    for clip, flat in ((None, 2), ((-5.0, 5.0), 4)):
        spread = partial(has_spread, algorithm=Algorithm(reward_clip=clip))
        rollout = rollouts(reward, has_spread=spread).collect(Counting(), 4, version=0)
        assert rollout.counts["groups/flat"] == flat and len(rollout.groups) == 4
    filtered = rollouts(reward, has_spread=spread, filter_zero_std=True, max_refills=1)
    counts = filtered.collect(Counting(), 4, version=0).counts
    assert counts["groups/flat"] == 8 and counts["groups/kept_flat"] == 4


@pytest.mark.parametrize(
    ("skipped", "outcome"),
    [
        ((), "trained"),
        ((False,), "trained"),
        ((True, False), "trained"),
        ((True, True), "dropped/update_skipped"),
    ],
)
def test_prompts_whose_updates_were_all_skipped_are_not_trained(skipped, outcome, tmp_path):
    ledger = Ledger(Counting())
    ledger.open(tmp_path / "ledger.jsonl", step=0)
    roll = rollouts(
        lambda prompt, index: float(prompt and index), filter_zero_std=True, ledger=ledger
    )
    roll.collect(ledger, 2, version=0)
    updates = tuple(UpdateReport(0.0, 0.0, 0.0, skipped=one) for one in skipped)
    roll.trained(0, StepReport(updates))
    events = [
        json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().split("\n") if line
    ]
    (settled,) = [event for event in events if event["event"] == "settled"]
    assert settled["outcomes"] == {outcome: [[1, 2]], "filtered/no_spread": [[0, 0]]}
    assert settled["oldest"] == 0 and settled["by"] == "policy"


def test_the_greedy_sample_is_the_baseline_and_is_not_trained():
    seen: list[Request] = []

    def reward(prompt, index):
        return None if (prompt, index) == (1, 3) else 10.0 * prompt + index

    def generate(requests, *, version):
        seen.extend(requests)
        return generator(reward)(requests, version=version)

    roll = Rollouts(
        generate, samples_per_prompt=3, temperature=0.5, run_seed=7, greedy_baseline=True
    )
    rollout = roll.collect(Counting(), 3, version=0)
    assert [
        (group.prompt.prompt_id, group.baseline, len(group.samples)) for group in rollout.groups
    ] == [
        (0, 3, 3),
        (2, 23, 3),
    ]
    assert [r.temperature for r in seen[:4]] == [0.5, 0.5, 0.5, 0.0]
    assert rollout.counts["groups/no_baseline"] == rollout.counts["samples/dropped"] == 1
    assert all(
        group.baseline is None
        for group in rollouts(reward).collect(Counting(), 1, version=0).groups
    )


def test_counts_are_of_the_last_step_only():
    roll = rollouts(lambda prompt, index: None if prompt == 0 and index == 0 else 1.0)
    prompts = Counting()
    roll.collect(prompts, 2, version=0)
    assert not roll.collect(prompts, 2, version=1).counts["samples/dropped"]


def test_seeds_are_31_bits_all_different_and_the_same_in_every_process():
    seeds = [
        request_seed(r, s, p, i)
        for r in range(3)
        for s in range(5)
        for p in range(20)
        for i in range(8)
    ]
    assert len(set(seeds)) == len(seeds) and all(0 <= seed < 2**31 for seed in seeds)
    code = "from megarl.rollout.sampling import request_seed; print(request_seed(1, 2, 3, 4))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(other.stdout) == request_seed(1, 2, 3, 4)
    assert request_seed(1, 23, 4, 5) != request_seed(12, 3, 4, 5)


def test_digest_sees_every_token_and_its_place():
    def digest_of(**change) -> str:
        roll = rollouts(lambda prompt, index: float(index))
        for name, value in change.items():
            setattr(roll, name, value)
        return roll.collect(Counting(), 2, version=0).digest

    assert digest_of() == digest_of()
    assert len({digest_of(), digest_of(run_seed=8), digest_of(samples_per_prompt=2)}) == 3


def test_digest_sees_which_sample_it_is():
    def digest_of(prompt_id: int, index: int) -> str:
        tokens = torch.tensor([1, 2])
        return digest_samples(
            [Sample(prompt_id, index, tokens, tokens > 1, torch.zeros(2), tokens.int(), "stop")]
        )

    assert len({digest_of(0, 0), digest_of(0, 1), digest_of(1, 0)}) == 3
