"""Worked numbers, edge cases of groups, and gradients in closed form."""

from __future__ import annotations

import math

import pytest
import torch
from reduced import AGGREGATIONS, CORRECTIONS, LOSSES, SELECT, WEIGHTS
from torch import Tensor

from megarl.algorithms.advantages import ADVANTAGES
from megarl.algorithms.kl import KL
from megarl.algorithms.whitening import whiten

F64 = torch.float64


def scores(
    values: list[float],
    *,
    group: list[int] | None = None,
    dtype: torch.dtype = F64,
    length: int = 2,
):
    """(rewards_T, mask_T, cu, group): rows of `length` tokens, all sampled, the score on the last one."""
    count = len(values)
    rewards_T = torch.zeros(count, length, dtype=dtype)
    rewards_T[:, -1] = torch.tensor(values, dtype=dtype)
    cu = torch.arange(count + 1) * length
    group_N = torch.zeros(count, dtype=torch.int64) if group is None else torch.tensor(group)
    return rewards_T.flatten(), torch.ones(count * length, dtype=torch.bool), cu, group_N


def per_row(name: str, values: list[float], *, group: list[int] | None = None, **options) -> Tensor:
    ours_T = ADVANTAGES[name](*scores(values, group=group), **options)
    assert torch.equal(ours_T[::2], ours_T[1::2])  # the same on every token of a row
    return ours_T[1::2]


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("grpo", {"eps": 0.0}, [0.57735026919, -1.15470053838, 0.57735026919]),
        ("grpo", {"eps": 0.0, "std": "biased"}, [0.70710678119, -1.41421356237, 0.70710678119]),
        ("rloo", {}, [0.5, -1.0, 0.5]),
        ("dr_grpo", {}, [1 / 3, -2 / 3, 1 / 3]),
        ("grpo", {"scale": "none"}, [1 / 3, -2 / 3, 1 / 3]),
    ],
)
def test_three_answers_right_wrong_right(name, options, expected):
    torch.testing.assert_close(
        per_row(name, [1, 0, 1], **options), torch.tensor(expected, dtype=F64)
    )


GROUPED = ("grpo", "rloo", "dr_grpo", "opo", "gpg")


@pytest.mark.parametrize("name", GROUPED)
def test_a_group_of_one_is_zero_unless_raw(name):
    assert per_row(name, [3.0, 1.0, 2.0], group=[5, 9, 9])[0] == 0
    assert per_row(name, [3.0, 1.0, 2.0], group=[5, 9, 9], singleton="raw")[0] == pytest.approx(
        3.0, rel=2e-6
    )


def test_the_batchs_deviation_is_of_every_row():
    """Those alone in their group as well: of 3, 0, 1 and 1, about the batch's mean 5/4."""
    ours = per_row("grpo", [3, 0, 1, 1], group=[5, 9, 9, 9], scale="batch", eps=0.0)
    deviation = (sum((x - 1.25) ** 2 for x in (3, 0, 1, 1)) / 3) ** 0.5
    expected = [0.0, *(x / deviation for x in (-2 / 3, 1 / 3, 1 / 3))]
    torch.testing.assert_close(ours, torch.tensor(expected, dtype=F64))


@pytest.mark.parametrize("value", [0.1, 1 / 3, 0.7, 1e6, -1e-8])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("name", [*GROUPED, "reinforce_pp_baseline"])
def test_equal_scores_give_exactly_zero(name, dtype, value):
    assert not ADVANTAGES[name](*scores([value] * 8, dtype=dtype)).any()


@pytest.mark.parametrize("name", [*GROUPED, "reinforce_pp_baseline"])
def test_scores_that_differ_by_rounding_are_equal(name):
    assert 0.1 + 0.2 != 0.3
    assert not ADVANTAGES[name](*scores([0.1 + 0.2, 0.3, 0.3])).any()


@pytest.mark.parametrize("name", ["grpo", "rloo", "dr_grpo"])
def test_groups_do_not_see_one_another_and_sum_to_zero(name):
    mixed = per_row(name, [1.0, 70.0, 0.0, 90.0, 1.0, 20.0], group=[1, 2, 1, 2, 1, 2])
    torch.testing.assert_close(mixed[::2], per_row(name, [1.0, 0.0, 1.0]))
    torch.testing.assert_close(mixed[1::2], per_row(name, [70.0, 90.0, 20.0]))
    assert mixed[::2].sum().abs() < 1e-12


@pytest.mark.parametrize("spoilt", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", [*GROUPED, "reinforce_pp_baseline", "reinforce_pp", "reinforce"])
def test_a_score_that_is_not_finite_takes_no_part(name, spoilt):
    ours = ADVANTAGES[name](*scores([1.0, spoilt, 0.0, 1.0]))
    without = ADVANTAGES[name](*scores([1.0, 0.0, 1.0]))
    assert not ours[2:4].any()
    torch.testing.assert_close(torch.cat([ours[:2], ours[4:]]), without)


def test_huge_rewards_stay_finite():
    for name in (*GROUPED, "reinforce_pp", "reinforce_pp_baseline"):
        ours = ADVANTAGES[name](*scores([1e30, -1e30, 1e30, 0.0], dtype=torch.float32))
        assert ours.isfinite().all()


def test_options_that_do_not_exist():
    with pytest.raises(ValueError, match="std='population' is not one of unbiased, biased"):
        per_row("grpo", [1, 0], std="population")
    with pytest.raises(ValueError, match="scale='token' is not one of group, batch, none"):
        per_row("grpo", [1, 0], scale="token")
    with pytest.raises(TypeError, match="lam"):
        per_row("grpo", [1, 0], lam=0.5)
    with pytest.raises(ValueError, match=r"advantage=gae needs values_T \[T\]"):
        per_row("gae", [1, 0])


def test_one_process_step_a_row_is_the_outcome():
    at = scores([1.0, 0.0, 1.0, 0.5], group=[0, 0, 1, 1])
    steps_T = torch.tensor([False, True] * 4)
    torch.testing.assert_close(
        ADVANTAGES["grpo_process"](*at, step_ends_T=steps_T), ADVANTAGES["grpo"](*at)
    )


def test_process_advantages_fall_by_each_step_passed():
    rewards_T = torch.tensor([1.0, 0.0, 2.0, 0.0, 4.0, 0.0], dtype=F64)
    steps_T = torch.tensor([True, False, True, False, True, False])
    at = (rewards_T, torch.ones(6, dtype=torch.bool), torch.tensor([0, 4, 6]), torch.tensor([0, 0]))
    ours = ADVANTAGES["grpo_process"](*at, step_ends_T=steps_T, eps=0.0)
    pool = torch.tensor([1.0, 2.0, 4.0], dtype=F64)
    first, second, third = (pool - pool.mean()) / pool.std()
    torch.testing.assert_close(
        ours, torch.stack([first + second, second, second, second * 0, third, third * 0])
    )


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_returns_are_the_double_loop_and_skip_holes(gamma):
    random = torch.Generator().manual_seed(0)
    rewards_T, mask_T = (
        torch.randn(40, generator=random, dtype=F64),
        torch.rand(40, generator=random) < 0.6,
    )
    cu = torch.tensor([0, 13, 14, 40])
    ours = ADVANTAGES["reinforce"](rewards_T, mask_T, cu, torch.arange(3), gamma=gamma)
    total_T = ADVANTAGES["reinforce"](
        rewards_T, mask_T, cu, torch.arange(3), gamma=gamma, total=True
    )
    for start, end in ((0, 13), (13, 14), (14, 40)):
        trained = [t for t in range(start, end) if mask_T[t]]
        for place, t in enumerate(trained):
            expected = sum(gamma**k * rewards_T[later] for k, later in enumerate(trained[place:]))
            assert ours[t] == pytest.approx(float(expected), abs=1e-12)
            assert total_T[t] == ours[trained[0]]
    assert not total_T[~mask_T].any()


def test_gae_at_its_ends():
    random = torch.Generator().manual_seed(0)
    rewards_T, values_T = torch.randn(2, 12, generator=random, dtype=F64)
    at = (rewards_T, torch.ones(12, dtype=torch.bool), torch.tensor([0, 5, 12]), torch.arange(2))
    returns_T = ADVANTAGES["reinforce"](*at)
    full = ADVANTAGES["gae"](*at, values_T=values_T, whiten=False)
    torch.testing.assert_close(full, returns_T - values_T)
    one_step = ADVANTAGES["gae"](*at, values_T=values_T, lam=0.0, whiten=False)
    torch.testing.assert_close(one_step[2], rewards_T[2] + values_T[3] - values_T[2])
    torch.testing.assert_close(one_step[4], rewards_T[4] - values_T[4])
    torch.testing.assert_close(
        ADVANTAGES["gae"](*at, values_T=0 * values_T, whiten=False), returns_T
    )


def test_reinforce_pp_is_whitened_over_tokens_of_the_whole_batch():
    at = scores([1.0, 0.0, 0.0, 1.0, 1.0], group=[0, 1, 2, 3, 4])
    raw = ADVANTAGES["reinforce_pp"](*at, whiten=False)
    torch.testing.assert_close(ADVANTAGES["reinforce_pp"](*at), whiten(raw, at[1]))
    assert raw.abs().sum() == 6


# --- losses in closed form ----------------------------------------------------------------------------------------


def loss_and_slope(name: str, log_ratio: float, advantage: float, **options) -> tuple[float, float]:
    new = torch.tensor([log_ratio - 1.0], dtype=F64, requires_grad=True)
    at = (
        torch.tensor([-1.0], dtype=F64),
        torch.tensor([advantage], dtype=F64),
        torch.tensor([True]),
    )
    loss_T = LOSSES[name](new, *at, torch.tensor([0, 1]), **options)
    loss_T.sum().backward()
    return loss_T.item(), new.grad.item()


@pytest.mark.parametrize("advantage", [2.0, -2.0])
@pytest.mark.parametrize("ratio", [1e-9, 0.5, 0.79, 0.81, 1.0, 1.27, 1.29, 2.9, 3.1, 1e9])
def test_ppo_clip_is_the_piecewise_weight(ratio, advantage):
    """A ratio inside; constant where the clip, the dual clip or the limit on the log-ratio acts."""
    value, slope = loss_and_slope("ppo_clip", math.log(ratio), advantage, dual_clip=3.0)
    clipped = ratio > 1.28 if advantage > 0 else ratio < 0.8 or ratio > 3.0
    limited = abs(math.log(ratio)) > 20
    assert slope == pytest.approx(0.0 if clipped or limited else -advantage * ratio)
    bound = min(ratio, 1.28) if advantage > 0 else min(max(ratio, 0.8), 3.0)
    assert value == pytest.approx(-advantage * max(bound, math.exp(-20)))


def test_without_dual_clip_the_loss_is_bounded_by_the_log_ratio_alone():
    assert loss_and_slope("ppo_clip", 30.0, -1.0, dual_clip=None)[0] == pytest.approx(math.exp(20))


@pytest.mark.parametrize("log_ratio", [-3.0, -0.1, 0.0, 0.1, 3.0])
def test_cispo_keeps_every_gradient(log_ratio):
    assert loss_and_slope("cispo", log_ratio, 2.0)[1] == pytest.approx(
        -2.0 * min(math.exp(log_ratio), 5.0)
    )


@pytest.mark.parametrize(("gap", "sign"), [(1e-6, 0), (-1e-6, 0), (1e-3, 1), (-1e-3, -1)])
def test_kl_cov_takes_no_sign_from_rounding(gap, sign):
    """Two passes under the same weights differ by some 1e-6 nats, either way."""
    _, slope = loss_and_slope("kl_cov", gap, 2.0, kl_coef=0.3, select_T=torch.tensor([True]))
    assert slope == pytest.approx(-2.0 * math.exp(gap) + 0.3 * sign)


def test_gspo_refuses_advantages_that_differ_within_a_row():
    zeros, mask = torch.zeros(4), torch.ones(4, dtype=torch.bool)
    with pytest.raises(ValueError, match="one advantage per row"):
        LOSSES["gspo"](
            zeros, zeros, torch.tensor([1.0, 1.0, 1.0, 2.0]), mask, torch.tensor([0, 2, 4])
        )


# --- weights and corrections ----------------------------------------------------------------------------------------


def test_aggregations_by_hand():
    """Rows of 2, 1 and 0 trained tokens; the first two are one prompt's, as is the third."""
    loss_T = torch.tensor([1.0, 2.0, 6.0, float("nan")], dtype=F64)
    at = (
        torch.tensor([True, True, True, False]),
        torch.tensor([0, 2, 3, 4]),
        torch.tensor([7, 7, 8]),
    )
    expected = {
        "token-mean": 3.0,
        "token-sum": 9.0,
        "seq-mean-token-mean": (1.5 + 6.0) / 2,
        "seq-mean-token-sum": 4.5,
        "seq-mean-token-sum-norm": 4.5 / 10,
        "prompt-mean": 3.0,
    }
    assert expected.keys() == AGGREGATIONS.keys() == WEIGHTS.keys()
    for name, value in expected.items():
        assert AGGREGATIONS[name](loss_T, *at, constant=10).item() == pytest.approx(value), name


def test_prompt_mean_weighs_prompts_alike():
    at = (torch.ones(4, dtype=torch.bool), torch.tensor([0, 1, 3, 4]), torch.tensor([1, 1, 2]))
    weights_T = WEIGHTS["prompt-mean"](*at)
    torch.testing.assert_close(weights_T, torch.tensor([1 / 6, 1 / 6, 1 / 6, 1 / 2], dtype=F64))


def test_dr_grpos_constant_must_be_given():
    with pytest.raises(ValueError, match="needs a positive constant, not None"):
        WEIGHTS["seq-mean-token-sum-norm"](torch.ones(2, dtype=torch.bool), torch.tensor([0, 2]))


@pytest.mark.parametrize("name", CORRECTIONS)
def test_no_gap_is_no_correction(name):
    same, mask = torch.tensor([-0.3, -2.0, -1.0]), torch.tensor([True, True, False])
    new = {"logprobs_T": same, "advantages_T": -torch.ones(3)}
    assert CORRECTIONS[name](same, same, mask, torch.tensor([0, 3]), **new).tolist() == [
        1.0,
        1.0,
        0.0,
    ]


def test_corrections_by_hand():
    """Two rows of two tokens; w = e^(o - b) = 0.25, 4, 1, 1.001."""
    w = torch.tensor([0.25, 4.0, 1.0, 1.001], dtype=F64)
    old, rollout = w.log() - 2.0, torch.full((4,), -2.0, dtype=F64)
    at = (old, rollout, torch.ones(4, dtype=torch.bool), torch.tensor([0, 2, 4]))
    expected = {
        ("tis", ()): [0.25, 2.0, 1.0, 1.001],
        ("tis", (("floor", 0.5), ("cap", 3.0))): [0.5, 3.0, 1.0, 1.001],
        ("seq_tis", ()): [1.0, 1.0, 1.001, 1.001],
        ("icepop", ()): [0.0, 4.0, 1.0, 1.001],
        ("seq_mask", ()): [1.0, 1.0, 1.0, 1.0],
        ("seq_mask", (("high", 1.0001),)): [1.0, 1.0, 0.0, 0.0],
        ("seq_mask", (("low", 1.0004),)): [0.0, 0.0, 1.0, 1.0],
    }
    for (name, options), value in expected.items():
        ours = CORRECTIONS[name](*at, **dict(options))
        torch.testing.assert_close(
            ours, torch.tensor(value, dtype=F64), msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("missing", [float("nan"), float("inf"), float("-inf")])
def test_a_missing_rollout_log_prob_corrects_nothing(missing):
    old, rollout = torch.tensor([-1.0, -1.0]), torch.tensor([missing, -0.5])
    ours = CORRECTIONS["tis"](old, rollout, torch.tensor([True, True]), torch.tensor([0, 2]))
    torch.testing.assert_close(ours, torch.tensor([1.0, math.exp(-0.5)]))


def test_opsm_drops_the_bad_tokens_of_rows_that_moved_away():
    old = torch.zeros(4, dtype=F64)
    new = torch.tensor([-0.2, -0.2, 0.1, 0.1], dtype=F64)
    at = (old, old, torch.ones(4, dtype=torch.bool), torch.tensor([0, 2, 4]))
    good_and_bad = torch.tensor([1.0, -1.0, -1.0, 1.0], dtype=F64)
    ours = CORRECTIONS["opsm"](*at, logprobs_T=new, advantages_T=good_and_bad, delta=0.1)
    assert ours.tolist() == [1.0, 0.0, 1.0, 1.0]


def test_a_correction_is_a_factor_on_the_gradient_and_carries_none():
    old = torch.tensor([-1.0, -2.0], dtype=F64, requires_grad=True)
    weights_T = CORRECTIONS["tis"](
        old, old.detach() - 0.3, torch.tensor([True, True]), torch.tensor([0, 2])
    )
    assert not weights_T.requires_grad


@pytest.mark.parametrize(
    ("name", "value"), [("k1", 30.0), ("k2", 450.0), ("k3", 29.0), ("k3+", 29.0), ("abs", 30.0)]
)
def test_kl_far_away_is_finite(name, value):
    new = torch.tensor([0.0, -30.0], dtype=F64, requires_grad=True)
    ours = KL[name](new, torch.tensor([-30.0, 0.0], dtype=F64))
    assert ours[0].item() == pytest.approx(value, rel=1e-6)
    ours.sum().backward()
    assert new.grad.isfinite().all() and ours.isfinite().all()


def test_opsm_drops_negative_tokens_of_rows_that_lost_likelihood():
    """Rows of two tokens whose log-probs fell and rose by half a nat; the second token of each is negative."""
    old = torch.full((4,), -2.0, dtype=F64)
    new = old + torch.tensor([-0.5, -0.5, 0.5, 0.5], dtype=F64)
    now = {"logprobs_T": new, "advantages_T": torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=F64)}
    at = (old, old, torch.ones(4, dtype=torch.bool), torch.tensor([0, 2, 4]))
    assert CORRECTIONS["opsm"](*at, delta=0.1, **now).tolist() == [1.0, 0.0, 1.0, 1.0]


def test_selection_is_by_covariance_about_both_means():
    logprobs_T, advantages_T = (
        torch.tensor([-3.0, -1.0, -2.0, 9.0]),
        torch.tensor([3.0, 3.0, 5.0, 9.0]),
    )
    mask_T = torch.tensor([True, True, True, False])
    chosen_T = SELECT["kl_cov"](logprobs_T, logprobs_T, advantages_T, mask_T, share=0.3)
    assert chosen_T.tolist() == [True, False, False, False]


def test_clip_cov_chooses_at_least_one_token_and_none_that_is_clipped():
    """Covariances 0, 12, 3 and 3, of which only the 3s are within the bounds; one of them is clipped."""
    new = torch.tensor([-2.0, -4.0, -1.0, -1.0])
    advantages = torch.tensor([0.0, -6.0, 3.0, 3.0])
    old = new - torch.tensor([0.0, 0.0, 0.0, 0.5])
    mask = torch.ones(4, dtype=torch.bool)
    bounds = {"low": 1.0, "high": 5.0, "share": 1e-3}
    drawn = set()
    for seed in range(8):
        for before in (old, new):
            generator = torch.Generator().manual_seed(seed)
            chosen = SELECT["clip_cov"](
                new, before, advantages, mask, generator=generator, **bounds
            )
            (token,) = chosen.nonzero().flatten().tolist()
            drawn.add((token, before is old))
    assert drawn == {(2, True), (2, False), (3, False)}
    assert not SELECT["clip_cov"](new, old, advantages, mask, low=3.1, high=5.0).any()
