"""OPSM, GPG and reward heads at ties, against plain Python in fp64: values and gradients."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from reduced import CORRECTIONS, WEIGHTS
from test_objective import algorithm, losses_of, make_batch, scored_by

from megarl.algorithms.advantages import ADVANTAGES
from megarl.algorithms.reward_model import row_scores
from megarl.config.algorithm import check_algorithm
from megarl.config.schema import Config
from megarl.types import TokenOutputs

F64 = torch.float64


def masked_rows(old, rollout, new, advantages, mask, lengths, delta):
    """OPSM's mask, row by row: the engine's log-probs, or the trainer's old ones where they lack."""
    weights, start = [], 0
    for length in lengths:
        span = [t for t in range(start, start + length) if mask[t]]
        sampled = [rollout[t] if math.isfinite(rollout[t]) else old[t] for t in span]
        gap = sum(b - new[t] for b, t in zip(sampled, span, strict=True)) / max(len(span), 1)
        weights += [
            float(mask[t] and not (gap > delta and advantages[t] < 0))
            for t in range(start, start + length)
        ]
        start += length
    return weights


@pytest.mark.parametrize("seed", [0, 2, 3, 4])
def test_opsm_drops_what_the_engine_held_more_likely(seed):
    random = torch.Generator().manual_seed(seed)
    lengths = [3, 1, 6, 4, 2, 5]
    size = sum(lengths)
    old = -2 * torch.rand(size, generator=random, dtype=F64)
    rollout = old + 0.4 * torch.randn(size, generator=random, dtype=F64)
    rollout[torch.rand(size, generator=random) < 0.15] = float("nan")
    new = (old + 0.2 * torch.randn(size, generator=random, dtype=F64)).requires_grad_()
    advantages = torch.randn(size, generator=random, dtype=F64)
    mask = torch.rand(size, generator=random) < 0.8
    cu = torch.tensor([0, *lengths]).cumsum(0)
    ours = CORRECTIONS["opsm"](
        old, rollout, mask, cu, logprobs_T=new, advantages_T=advantages, delta=0.05
    )
    at = [x.tolist() for x in (old, rollout, new.detach(), advantages, mask)]
    assert ours.tolist() == masked_rows(*at, lengths, 0.05)
    assert not ours.requires_grad and 0 < ours.sum() < mask.sum()


@pytest.mark.parametrize("is_missing", [False, True])
@pytest.mark.parametrize("use_rollout_logprobs", [False, True])
def test_opsm_acts_in_the_first_update_of_a_batch(use_rollout_logprobs, is_missing):
    """At the old policy itself, where only the engine's log-probs differ."""
    rules = algorithm(
        advantage="rloo",
        loss="reinforce",
        correction="opsm",
        correction_options={"delta": 0.1},
        use_rollout_logprobs=use_rollout_logprobs,
    )
    scored = scored_by(make_batch(), rules)
    engine = torch.where(scored.mask, scored.old_logprobs + 0.8, 0.0)
    if is_missing:
        engine = torch.full_like(engine, float("nan"))
    scored = replace(scored, rollout_logprobs=engine)
    new = scored.old_logprobs.clone().requires_grad_()
    losses_of(new, scored, rules).loss.sum().backward()
    dropped = torch.zeros_like(scored.mask) if is_missing else scored.advantages < 0
    expected = torch.where(scored.mask & ~dropped, -scored.advantages, 0.0)
    assert torch.equal(new.grad, expected) and bool((scored.advantages < 0).any())


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_opsm_is_allowed_beside_the_engines_log_probs(correction):
    """It is no importance weight, which the ratio to the engine's policy already has."""
    config = {"algorithm": {"use_rollout_logprobs": True, "correction": correction}}
    if correction in ("none", "opsm"):
        check_algorithm(Config.model_validate(config))
        return
    with pytest.raises(ValueError, match=f"correction={correction} would count it twice"):
        check_algorithm(Config.model_validate(config))


def gpg_rewards(groups, singleton="zero"):
    """Advantages of GPG, group by group: B / (B - M) x (reward - mean)."""
    learns = [len(set(g)) > 1 or (singleton == "raw" and len(g) == 1) for g in groups]
    rows = sum(map(len, groups))
    signal = sum(len(g) for g, one in zip(groups, learns, strict=True) if one)
    factor = rows / signal if signal else 1.0
    result = []
    for g in groups:
        centre = 0.0 if singleton == "raw" and len(g) == 1 else sum(g) / len(g)
        result += [factor * (x - centre) if len(set(g)) > 1 or not centre else 0.0 for x in g]
    return result, factor


@pytest.mark.parametrize("shift", [0.0, -1.0, 5.0])
@pytest.mark.parametrize(
    ("groups", "factor"),
    [
        ([[1, 0, 0, 0], [0, 1, 1, 1]], 1.0),
        ([[1, 0, 0, 0], [0, 0, 0, 0]], 2.0),
        ([[1, 1, 1, 1], [0, 1, 1, 1]], 2.0),
        ([[1, 0], [0, 0, 0], [1, 1, 1], [2, 1, 0]], 11 / 5),
        ([[0, 0], [1, 1]], 1.0),
        ([[1, 0], [1]], 3 / 2),
    ],
)
def test_gpgs_factor_is_the_share_of_samples_whose_group_differs(groups, factor, shift):
    """Wherever 0 lies; value of the advantages, and of the gradient of the mean loss."""
    groups = [[x + shift for x in g] for g in groups]
    expected, ours_factor = gpg_rewards(groups)
    assert ours_factor == pytest.approx(factor)
    scores = torch.tensor([x for g in groups for x in g], dtype=F64)
    group = torch.tensor([i for i, g in enumerate(groups) for _ in g])
    rows = (torch.ones(len(scores), dtype=torch.bool), torch.arange(len(scores) + 1))
    ours = ADVANTAGES["gpg"](scores, *rows, group)
    assert ours.tolist() == pytest.approx(expected, abs=1e-15 * (1 + abs(shift)))
    new = torch.zeros(len(scores), dtype=F64, requires_grad=True)
    weights = WEIGHTS["seq-mean-token-mean"](*rows, group)
    (-ours * new * weights).sum().backward()
    slopes = [-x / len(scores) for x in expected]
    assert new.grad.tolist() == pytest.approx(slopes, abs=1e-15 * (1 + abs(shift)))


def test_gpg_counts_a_group_of_one_where_its_raw_reward_is_its_advantage():
    """Rewards 1, 0 and a 3 alone: every sample has an advantage, so the factor is 1; a row that is not
    trained is no sample."""
    scores = torch.tensor([1.0, 0.0, 3.0, 7.0], dtype=F64)
    rows = (torch.tensor([True, True, True, False]), torch.arange(5))
    group = torch.tensor([0, 0, 1, 2])
    assert ADVANTAGES["gpg"](scores, *rows, group, singleton="raw").tolist() == [0.5, -0.5, 3, 0]
    assert ADVANTAGES["gpg"](scores, *rows, group).tolist() == [0.75, -0.75, 0, 0]


# --- heads at ties --------------------------------------------------------------------------------------------------

LENGTHS = (4, 3, 6, 2)  # rows of one token of prompt each; the last has no response
ROWS = torch.tensor([0, *LENGTHS]).cumsum(0)
MASK = torch.ones(sum(LENGTHS), dtype=torch.bool)
MASK[ROWS[1:] - 1] = False
MASK[ROWS[3] :] = False
TIES = {  # values, and how many share the largest and the smallest
    "all": [0.0] * 15,
    "some": [9, 2, 2, 1, -9, 1, 1, 9, 3, 0, 3, 0, 3, 0, 0],
}


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("ties", TIES)
@pytest.mark.parametrize("aggregate", ["max", "min", "mean", "sum", "weighted", "last"])
def test_a_heads_weights_are_the_same_in_both_directions_at_ties(aggregate, ties, sign):
    """max and min: the gradient is shared evenly by the tokens that have the extreme value."""
    values = torch.tensor(TIES[ties], dtype=F64, requires_grad=True)
    gates = torch.zeros(15, dtype=F64, requires_grad=True)
    scores = row_scores(TokenOutputs(values_T=values, gates_T=gates), MASK, ROWS, aggregate)
    slopes = torch.tensor([1.0, 3.0, 0.5, 2.0], dtype=F64) * sign
    (scores * slopes).sum().backward()
    expected = [0.0] * 15
    for row, (start, end) in enumerate(zip(ROWS[:-1].tolist(), ROWS[1:].tolist(), strict=True)):
        own = [] if row == 3 else range(start + 1, end)
        plain = [TIES[ties][t] for t in own]
        if aggregate in ("max", "min") and plain:
            extreme = max(plain) if aggregate == "max" else min(plain)
            own = [t for t in own if TIES[ties][t] == extreme]
            assert scores[row] == extreme
        if aggregate == "last":
            own = [end - 1]
        for t in own:
            expected[t] = float(slopes[row]) / (1 if aggregate == "sum" else len(own))
    assert values.grad.tolist() == pytest.approx(expected, abs=1e-15)
