"""Numbers nobody meant: whatever the rewards are, what comes out is finite, 0 where it must be, and never an exception.
And the calls as documented: every common option, any order of dtypes, half precision."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from reduced import AGGREGATIONS, CORRECTIONS, LOSSES, SELECT, WEIGHTS
from torch import Tensor

from megarl.algorithms.advantages import ADVANTAGES, returns
from megarl.algorithms.kl import KL
from megarl.algorithms.losses import clipped_value_loss
from megarl.algorithms.whitening import whiten, whiten_stats

LENGTHS, GROUPS = (3, 1, 4, 2, 5, 3), (7, 7, 3, 3, 3, 9)  # ragged groups, one of them a single row
OUTCOMES = {
    "1e30": (1e30, -1e30, 1e30, 0.0, 1e-30, 1e30),
    "the largest": (3.4e38, -3.4e38, 3.4e38, 3.4e38, 0.0, 1.0),
    "inf": (float("inf"), 1.0, float("-inf"), 0.0, 1.0, float("inf")),
    "nan": (float("nan"), 1.0, 0.0, float("nan"), 1.0, 2.0),
    "all nan": (float("nan"),) * 6,
    "equal": (0.7,) * 6,
    "zero": (0.0,) * 6,
}


def batch(outcomes: tuple[float, ...], *, mask: str = "full", dtype: torch.dtype = torch.float32):
    """(rewards_T, mask_T, cu_seqlens, group_N); an outcome on the last True position of its row, NaN on False ones."""
    cu = torch.tensor([0, *LENGTHS]).cumsum(0)
    mask_T = torch.ones(int(cu[-1]), dtype=torch.bool)
    if mask == "none":
        mask_T[:] = False
    if mask == "holes":
        mask_T[[1, 3, 5, 6, 12]] = False  # row 1 has nothing left
    rewards_T = torch.where(mask_T, 0.0, float("nan")).to(dtype)
    for start, end, outcome in zip(cu[:-1], cu[1:], outcomes, strict=True):
        trained = mask_T[start:end].nonzero().flatten()
        if trained.numel():
            rewards_T[start + trained[-1]] = outcome
    return rewards_T, mask_T, cu, torch.tensor(GROUPS)


def more(mask_T: Tensor, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    values_T = torch.linspace(-1, 1, mask_T.numel(), dtype=dtype)
    steps_T = torch.arange(mask_T.numel()) % 2 == 0
    return {
        "values_T": values_T,
        "step_ends_T": steps_T,
        "baseline_N": torch.zeros(len(LENGTHS), dtype=dtype),
    }


@pytest.mark.parametrize("name", ADVANTAGES)
def test_any_reward_has_an_advantage(name: str) -> None:
    for outcomes, mask, dtype in product(
        OUTCOMES, ("full", "holes", "none"), (torch.float32, torch.float64)
    ):
        at = batch(OUTCOMES[outcomes], mask=mask, dtype=dtype)
        for options in ({"whiten": True}, {"whiten": False}):
            ours_T = ADVANTAGES[name](*at, **more(at[1], dtype), **options)
            assert ours_T.dtype == dtype
            assert ours_T.isfinite().all() and not ours_T[~at[1]].any(), (outcomes, mask, options)


def test_a_huge_reward_leaves_the_small_ones_of_other_rows() -> None:
    rewards_T = torch.tensor([1e-3, 2e-3, 1e20, -3.0, 0.5, 0.25])
    mask_T, cu = torch.ones(6, dtype=torch.bool), torch.tensor([0, 2, 4, 6])
    ours_T = ADVANTAGES["reinforce"](rewards_T, mask_T, cu, torch.arange(3))
    torch.testing.assert_close(ours_T, torch.tensor([3e-3, 2e-3, 1e20, -3.0, 0.75, 0.25]))


@pytest.mark.parametrize("outcomes", ["1e30", "inf", "nan"])
@pytest.mark.parametrize("name", ADVANTAGES)
def test_any_advantage_goes_through_any_loss_and_aggregation(name: str, outcomes: str) -> None:
    at = batch(OUTCOMES[outcomes], mask="holes")
    _, mask_T, cu, group_N = at
    advantages_T, even_T = ADVANTAGES[name](*at, **more(mask_T)), ADVANTAGES["dr_grpo"](*at)
    for loss_name in LOSSES:
        old_T = torch.linspace(-2, -0.1, mask_T.numel())
        new_T = (old_T + 0.1).requires_grad_()
        loss_T = LOSSES[loss_name](
            new_T, old_T, even_T if loss_name == "gspo" else advantages_T, mask_T, cu
        )
        for aggregation in AGGREGATIONS:
            loss = AGGREGATIONS[aggregation](loss_T, mask_T, cu, group_N, constant=5)
            (grad_T,) = torch.autograd.grad(loss, new_T, retain_graph=True)
            assert loss.isfinite() and grad_T.isfinite().all(), (loss_name, aggregation)
            assert not grad_T[~mask_T].any(), (loss_name, aggregation)


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_nothing_sampled_is_loss_zero_with_a_graph(name: str) -> None:
    rewards_T, mask_T, cu, group_N = batch(OUTCOMES["nan"], mask="none")
    for loss_name in LOSSES:
        new_T = torch.full_like(rewards_T, float("nan"), requires_grad=True)
        loss_T = LOSSES[loss_name](new_T, rewards_T, rewards_T, mask_T, cu)
        loss = AGGREGATIONS[name](loss_T, mask_T, cu, group_N, constant=5)
        loss.backward()
        assert loss == 0 and not new_T.grad.any(), loss_name


def test_no_rows_at_all() -> None:
    nothing, cu = torch.zeros(0), torch.zeros(1, dtype=torch.int64)
    mask_T, group_N = nothing.bool(), torch.zeros(0, dtype=torch.int64)
    extra = {"values_T": nothing, "step_ends_T": mask_T, "baseline_N": nothing}
    for name in ADVANTAGES:
        assert ADVANTAGES[name](nothing, mask_T, cu, group_N, **extra).numel() == 0
    for name in LOSSES:
        assert LOSSES[name](nothing, nothing, nothing, mask_T, cu).numel() == 0
    for name in CORRECTIONS:
        assert (
            CORRECTIONS[name](
                nothing, nothing, mask_T, cu, logprobs_T=nothing, advantages_T=nothing
            ).numel()
            == 0
        )
    for name in AGGREGATIONS:
        assert AGGREGATIONS[name](nothing, mask_T, cu, group_N, constant=5) == 0
    for name in SELECT:
        assert SELECT[name](nothing, nothing, nothing, mask_T).numel() == 0


def test_a_row_out_of_range_leaves_the_others_alone() -> None:
    """A huge or broken row among good ones: these get what they get without it."""
    for name in ADVANTAGES:
        for bad in (float("nan"), float("inf"), 3e38):
            rewards_T, mask_T, cu, group_N = batch((1.0, 0.0, 1.0, bad, 0.0, 0.5))
            ours_T = ADVANTAGES[name](rewards_T, mask_T, cu, group_N, **more(mask_T))
            keep_T = torch.ones_like(mask_T)
            keep_T[cu[3] : cu[4]] = False
            cut = {key: x[keep_T] for key, x in more(mask_T).items() if key != "baseline_N"}
            lengths = torch.tensor([0, *LENGTHS[:3], *LENGTHS[4:]])
            rest_N = torch.arange(6) != 3
            at = (rewards_T[keep_T], mask_T[keep_T], lengths.cumsum(0), group_N[rest_N])
            expected_T = ADVANTAGES[name](*at, **cut, baseline_N=torch.zeros(5))
            torch.testing.assert_close(
                ours_T[keep_T],
                expected_T,
                msg=lambda text, name=name, bad=bad: f"{name} {bad} {text}",
            )
            assert not ours_T[~keep_T].any()


COMMON = {
    "gamma": 1.0,
    "lam": 1.0,
    "eps": 1e-6,
    "std": "unbiased",
    "singleton": "zero",
    "whiten": False,
}


@pytest.mark.parametrize("name", ADVANTAGES)
def test_every_common_option_is_taken_where_it_changes_nothing(name: str) -> None:
    at = batch((1.0, 0.0, 1.0, 0.0, 0.0, 1.0))
    ours = ADVANTAGES[name](*at, **more(at[1]), **COMMON)
    assert ours.shape == at[0].shape
    for std in ("biased", "unbiased"):
        assert ADVANTAGES[name](*at, **more(at[1]), std=std, whiten=True).isfinite().all()
    whitened = whiten(ours, at[1])
    torch.testing.assert_close(
        ADVANTAGES[name](*at, **more(at[1]), **COMMON | {"whiten": True, "eps": 1e-8}), whitened
    )
    with pytest.raises(ValueError, match="std='population'"):
        ADVANTAGES[name](*at, **more(at[1]), std="population")
    with pytest.raises(TypeError, match="clip"):
        ADVANTAGES[name](*at, **more(at[1]), clip=1)


def test_groups_of_one_can_be_an_error() -> None:
    at = batch((1.0, 0.0, 1.0, 0.0, 0.0, 1.0))
    with pytest.raises(ValueError, match="singleton=error, but 1 groups have one sample"):
        ADVANTAGES["grpo"](*at, singleton="error")


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_as_fp32(half: torch.dtype) -> None:
    """Whatever is given, the result is that of the same numbers in fp32."""
    rewards_T, mask_T, cu, group_N = batch((1.0, 0.0, 1.0, 0.0, 0.0, 1.0), mask="holes")
    low_T = torch.linspace(-3, -0.1, mask_T.numel()).to(half)
    new_T, extra = (low_T * 0.9).to(half), more(mask_T, half)
    exact = {name: x.float() if x.is_floating_point() else x for name, x in extra.items()}
    for name in ADVANTAGES:
        ours_T = ADVANTAGES[name](rewards_T.to(half), mask_T, cu, group_N, **extra)
        assert torch.equal(ours_T, ADVANTAGES[name](rewards_T, mask_T, cu, group_N, **exact)), name
    for name in LOSSES:
        ours_T = LOSSES[name](new_T, low_T, torch.ones_like(low_T), mask_T, cu)
        assert torch.equal(
            ours_T, LOSSES[name](new_T.float(), low_T.float(), torch.ones(len(low_T)), mask_T, cu)
        ), name
    for name in CORRECTIONS:
        now = {"logprobs_T": new_T, "advantages_T": -torch.ones_like(new_T)}
        ours_T = CORRECTIONS[name](new_T, low_T, mask_T, cu, **now)
        now = {key: x.float() for key, x in now.items()}
        assert torch.equal(
            ours_T, CORRECTIONS[name](new_T.float(), low_T.float(), mask_T, cu, **now)
        ), name
    for name in KL:
        assert torch.equal(KL[name](new_T, low_T), KL[name](new_T.float(), low_T.float())), name
    for name in AGGREGATIONS:
        ours = AGGREGATIONS[name](low_T, mask_T, cu, group_N, constant=5)
        assert torch.equal(
            ours, AGGREGATIONS[name](low_T.float(), mask_T, cu, group_N, constant=5)
        ), name
    at = (new_T, low_T, low_T, mask_T)
    value_loss = clipped_value_loss
    assert torch.equal(value_loss(*at), value_loss(*(x.float() for x in at[:3]), mask_T))
    assert torch.equal(whiten(low_T, mask_T), whiten(low_T.float(), mask_T))


def test_masks_and_offsets_of_any_integer_type() -> None:
    rewards_T, mask_T, cu, group_N = batch((1.0, 0.0, 1.0, 0.0, 0.0, 1.0), mask="holes")
    expected = ADVANTAGES["grpo"](rewards_T, mask_T, cu, group_N)
    for mask in (mask_T.long(), mask_T.float(), mask_T.to(torch.uint8)):
        assert torch.equal(ADVANTAGES["grpo"](rewards_T, mask, cu.int(), group_N.int()), expected)
        assert torch.equal(WEIGHTS["token-mean"](mask, cu.int()), WEIGHTS["token-mean"](mask_T, cu))
        assert whiten_stats(rewards_T, mask) == whiten_stats(rewards_T, mask_T)


def test_decoupled_lambda_is_two_calls() -> None:
    """The policy's lambda and the critic's (VAPO): advantages of one, returns of the other."""
    rewards_T, mask_T, cu, group_N = batch((1.0, 0.0, 1.0, 0.0, 0.0, 1.0), dtype=torch.float64)
    at, values_T = (rewards_T, mask_T, cu, group_N), more(mask_T, torch.float64)["values_T"]
    full = ADVANTAGES["gae"](*at, values_T=values_T, lam=1.0, whiten=False)
    torch.testing.assert_close(returns(full, values_T), ADVANTAGES["reinforce"](*at))
    assert not torch.equal(ADVANTAGES["gae"](*at, values_T=values_T, lam=0.95, whiten=False), full)


def test_value_loss_has_the_half() -> None:
    loss_T = clipped_value_loss(
        torch.tensor([3.0]), torch.tensor([3.0]), torch.tensor([1.0]), torch.ones(1)
    )
    assert loss_T.item() == 2.0


@pytest.mark.parametrize("spoilt", [float("nan"), float("inf"), 1e38])
def test_a_row_whose_value_or_baseline_is_out_of_range_takes_no_part(spoilt):
    rewards = torch.tensor([0.0, 1.0, 0.0, 3.0, 0.0, 2.0])
    rows = (torch.ones(6, dtype=torch.bool), torch.tensor([0, 2, 4, 6]), torch.arange(3))
    values = torch.tensor([0.5, 0.25, 0.0, spoilt, 1.0, 0.0])
    ours = ADVANTAGES["gae"](rewards, *rows, values_T=values)
    kept = torch.tensor([0, 1, 4, 5])
    rest = (torch.ones(4, dtype=torch.bool), torch.tensor([0, 2, 4]), torch.arange(2))
    expected = ADVANTAGES["gae"](rewards[kept], *rest, values_T=values[kept])
    torch.testing.assert_close(ours[kept], expected)
    assert not ours[2:4].any()
    baselines = torch.tensor([0.5, spoilt, 1.0])
    ours = ADVANTAGES["remax"](rewards, *rows, baseline_N=baselines)
    assert ours.tolist() == [0.5, 0.5, 0.0, 0.0, 1.0, 1.0]
