"""Advantage estimators: each function computes the advantage of every token from the rewards of a
whole rollout batch.

    ADVANTAGES[name](
        rewards_T, mask_T, cu_seqlens, group_N, *, values_T, step_ends_T, baseline_N, whiten,
        **options
    )

T = positions, N = rows (samples), V = the values that group statistics are computed over: scores or
step rewards. An outcome reward is at the row's last True position; a KL penalty in the reward has
already been subtracted. The result [T] is 0 on False positions, in the dtype of `rewards_T` (at
least fp32). R_i = the score of row i, the sum of its rewards; mean and std are over the rows of its
group (samples of one prompt).

Options of all estimators: `whiten` normalises the result over all tokens of the batch, with `std`
("unbiased" or "biased") and `eps`; `singleton` is the advantage of a row that is alone in its
group: "zero", "raw" (its score), or "error".

Rows without a True position, or with a reward, value or baseline that is not finite or is close to
the dtype's limits, are left out of all statistics; their advantage is 0.
"""

from dataclasses import dataclass
from functools import partial
from inspect import getfullargspec
from typing import Any

import torch
from torch import Tensor

from megarl.algorithms.rows import Formula, Groups, Rows, at_least_fp32, clean
from megarl.algorithms.whitening import whiten as whiten_tokens


@dataclass(frozen=True)
class _Batch:
    """Cleaned inputs of an estimator. Rows left out of statistics have no True position."""

    rows: Rows
    groups: Groups  # which group each row belongs to
    rewards_T: Tensor  # cleaned only for estimators per token
    scores_N: Tensor  # fp64


# Estimators of one advantage per row [N], shared by all of its tokens.


def grpo(
    batch: _Batch,
    *,
    std: str = "unbiased",
    eps: float = 1e-6,
    singleton: str = "zero",
    scale: str = "group",
    leave_one_out: bool = False,
) -> Tensor:
    """GRPO: A_i = (R_i - mean) / (std + eps). DeepSeekMath, arXiv 2402.03300, section 4.1.2.

    `scale`: divide by the std of the "group" or of the "batch", or by "none". `leave_one_out`: use
    the mean and the group's std of the other rows.
    """
    _check_choice("scale", scale, ("group", "batch", "none"))
    score_N = batch.scores_N
    groups = batch.groups
    biased = std == "biased"
    centred_N = groups.centre(score_N)
    advantage_N = groups.leave_one_out(centred_N) if leave_one_out else centred_N
    if scale == "group":
        std_N = groups.std(centred_N, biased=biased, leave_one_out=leave_one_out)
        advantage_N = _divide(advantage_N, std_N, eps)
        score_N = score_N / (1 + eps)
    elif scale == "batch":
        everyone = Groups.of(torch.zeros_like(groups.group_V), groups.size_V > 0)
        advantage_N = _divide(
            advantage_N, everyone.std(everyone.centre(score_N), biased=biased), eps
        )
    return _with_singletons(advantage_N, score_N, groups, singleton)


def dr_grpo(batch: _Batch, *, singleton: str = "zero") -> Tensor:
    """Dr. GRPO: A_i = R_i - mean. arXiv 2503.20783.

    The other half of Dr. GRPO is the aggregation by a constant length (aggregation.py).
    """
    return grpo(batch, scale="none", singleton=singleton)


def rloo(batch: _Batch, *, singleton: str = "zero") -> Tensor:
    """RLOO: A_i = R_i - mean of the other rows' R. Ahmadian et al. 2024, arXiv 2402.14740."""
    return grpo(batch, scale="none", leave_one_out=True, singleton=singleton)


def reinforce_pp_baseline(batch: _Batch, *, singleton: str = "raw") -> Tensor:
    """REINFORCE++-baseline: A_i = R_i - mean, whitened over all tokens of the batch.

    arXiv 2501.03262.
    """
    return dr_grpo(batch, singleton=singleton)


def opo(batch: _Batch, *, singleton: str = "zero") -> Tensor:
    """OPO: A_i = R_i - sum_j(n_j R_j) / sum_j(n_j), n = tokens of a row. arXiv 2505.23585."""
    score_N = batch.scores_N
    length_N = batch.rows.num_tokens_N
    groups = batch.groups
    centred_N = groups.centre(score_N)  # so that equal scores give exactly 0
    baseline_N = groups.sum(length_N * centred_N) / groups.sum(length_N).clamp(min=1)
    return _with_singletons(centred_N - baseline_N, score_N, groups, singleton)


def gpg(batch: _Batch, *, singleton: str = "zero") -> Tensor:
    """GPG: A_i = (R_i - mean) x rows / (rows of groups whose scores differ). arXiv 2504.02546.

    With singleton "raw", rows that are alone in their group are in the divisor too.
    """
    learns_N = batch.groups.differ(batch.scores_N)
    if singleton == "raw":
        learns_N |= batch.groups.size_V == 1
    factor = (batch.groups.size_V > 0).sum() / learns_N.double().sum().clamp(min=1)
    return dr_grpo(batch, singleton=singleton) * factor


def _divide(centred_V: Tensor, std_V: Tensor, eps: float) -> Tensor:
    """Returns centred / (std + eps), or `centred_V` itself where std is 0."""
    return torch.where(std_V > 0, centred_V / (std_V + eps), centred_V)


def _with_singletons(advantage_V: Tensor, raw_V: Tensor, groups: Groups, singleton: str) -> Tensor:
    """Returns `advantage_V`, with 0 or `raw_V` in groups of one.

    Raises ValueError for groups of one if `singleton` is "error".
    """
    _check_choice("singleton", singleton, ("zero", "raw", "error"))
    is_single_V = groups.size_V == 1
    if singleton == "error" and is_single_V.any():
        raise ValueError(
            f"singleton=error, but {int(is_single_V.sum())} groups have one sample; sample more, "
            "or use zero or raw"
        )
    return torch.where(is_single_V, raw_V if singleton == "raw" else 0, advantage_V)


# Estimators of one advantage per token [T].


def reinforce(batch: _Batch, *, gamma: float = 1.0, total: bool = False) -> Tensor:
    """REINFORCE: A_t = sum of gamma^(t' - t) r_t' over t' >= t, where t counts trained tokens.

    Williams 1992.

    `total`: every token gets the sum from the row's first token on, number 1 of the choices for
    Psi_t in GAE (arXiv 1506.02438), equation 1.
    """
    return_T = batch.rows.sum_to_end(batch.rewards_T, decay=gamma)
    return batch.rows.spread(batch.rows.first(return_T)) if total else return_T


def reinforce_pp(batch: _Batch, *, gamma: float = 1.0) -> Tensor:
    """REINFORCE++: the reward-to-go, whitened over all tokens of the batch. arXiv 2501.03262."""
    return reinforce(batch, gamma=gamma)


def remax(batch: _Batch, baseline_N: Tensor, *, gamma: float = 1.0) -> Tensor:
    """ReMax: the reward-to-go minus the reward of the prompt's greedy response.

    arXiv 2310.10505.
    """
    return reinforce(batch, gamma=gamma) - batch.rows.spread(baseline_N.double())


def gae(batch: _Batch, values_T: Tensor, *, gamma: float = 1.0, lam: float = 1.0) -> Tensor:
    """GAE: A_t = delta_t + gamma lam A_(t+1), with delta_t = r_t + gamma V_(t+1) - V_t.

    V is 0 after the last token. Schulman et al. 2015, arXiv 1506.02438.
    """
    delta_T = batch.rewards_T + gamma * batch.rows.next(values_T) - values_T
    return batch.rows.sum_to_end(delta_T, decay=gamma * lam)


def grpo_process(
    batch: _Batch,
    step_ends_T: Tensor,
    *,
    std: str = "unbiased",
    eps: float = 1e-6,
    singleton: str = "zero",
) -> Tensor:
    """GRPO with process supervision: a token's advantage is a sum of step rewards.

    The sum is over the row's steps that end at the token or later. Step rewards are standardised
    over all steps of the group. DeepSeekMath, arXiv 2402.03300, section 4.1.3.
    """
    reward_V = batch.rewards_T[step_ends_T].double()
    groups = Groups.of(
        batch.rows.spread(batch.groups.group_V)[step_ends_T], step_ends_T[step_ends_T]
    )
    centred_V = groups.centre(reward_V)
    step_V = _divide(centred_V, groups.std(centred_V, biased=std == "biased"), eps)
    steps_T = torch.zeros_like(batch.rewards_T, dtype=torch.float64)
    steps_T[step_ends_T] = _with_singletons(step_V, reward_V, groups, singleton)
    return batch.rows.sum_to_end(steps_T)


def returns(advantages_T: Tensor, values_T: Tensor) -> Tensor:
    """Returns the critic's targets: advantages before whitening, plus the values that they were
    computed from.
    """
    return advantages_T + values_T


# The config reads these tables (megarl/config/estimators.py).
PER_ROW: dict[str, Formula] = {
    "rloo": rloo,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "opo": opo,
    "gpg": gpg,
}
PER_TOKEN: dict[str, Formula] = {
    "reinforce": reinforce,
    "reinforce_pp": reinforce_pp,
    "grpo_process": grpo_process,
    "remax": remax,
    "gae": gae,
}
# every estimator accepts these options at these values, which change nothing
_NEUTRAL = {"gamma": 1.0, "lam": 1.0, "singleton": "zero"}
WHITENED = ("reinforce_pp", "reinforce_pp_baseline", "gae")  # unless `whiten` is False


def _advantages(
    estimator: Formula,
    rewards_T: Tensor,
    mask_T: Tensor,
    cu_seqlens: Tensor,
    group_N: Tensor,
    *,
    whiten: bool = False,
    std: str = "unbiased",
    eps: float | None = None,
    values_T: Tensor | None = None,
    step_ends_T: Tensor | None = None,
    baseline_N: Tensor | None = None,
    **options: Any,
) -> Tensor:
    spec = getfullargspec(estimator)
    _check_choice("std", std, ("unbiased", "biased"))
    options = {
        key: x for key, x in options.items() if key in spec.kwonlyargs or _NEUTRAL.get(key) != x
    }
    if "std" in spec.kwonlyargs:  # for the estimator's own scaling; otherwise for `whiten`
        options["std"] = std
        if eps is not None:
            options["eps"] = eps
        std = "unbiased"
        eps = None

    given = {"values_T": values_T, "step_ends_T": step_ends_T, "baseline_N": baseline_N}
    inputs = {}
    for key in spec.args[1:]:  # all but the batch
        x = given[key]
        if x is None:
            raise ValueError(f"advantage={estimator.__name__} needs {key} [{key[-1]}]; pass it")
        inputs[key] = x

    dtype = at_least_fp32(rewards_T.dtype)
    per_row = estimator in PER_ROW.values()
    limit = torch.finfo(dtype).max / 8
    if not per_row:  # estimators per token read partial sums of a row, so rewards are cleaned too
        inputs["rewards_T"] = rewards_T
    rows = Rows.of(mask_T.to(rewards_T.device), cu_seqlens)
    batch, inputs = _clean_batch(rewards_T, rows, group_N, inputs, limit)
    advantages = estimator(batch, **inputs, **options).clamp(-limit, limit)
    if whiten:
        # a row's advantage counts once for each of its tokens
        count = batch.rows.num_tokens_N if per_row else batch.rows.mask_T
        eps = 1e-8 if eps is None else eps
        advantages = whiten_tokens(advantages, count, biased=std == "biased", eps=eps)
    advantages = advantages.to(dtype)
    return batch.rows.spread(advantages) if per_row else advantages


def _clean_batch(
    rewards_T: Tensor, rows: Rows, group_N: Tensor, inputs: dict[str, Tensor], limit: float
) -> tuple[_Batch, dict[str, Tensor]]:
    """Returns the estimator's batch and other inputs, cleaned.

    Rows that have a NaN, or whose sums could exceed `limit`, are left out.
    """
    scores_N = rows.sum(rewards_T.detach(), dtype=torch.float64)
    takes_part_N = (rows.num_tokens_N > 0) & (scores_N.abs() <= limit)
    inputs = {key: x.detach().to(rewards_T.device) for key, x in inputs.items()}
    for key, x in inputs.items():
        if key.endswith("_T"):
            inputs[key] = x = clean(x, rows.mask_T)
        if x.is_floating_point():
            takes_part_N &= (rows.sum(x.abs()) if key.endswith("_T") else x.abs()) <= limit
    if not takes_part_N.all():
        rows = Rows.of(rows.spread(takes_part_N), rows.cu_seqlens)
        scores_N = clean(scores_N, takes_part_N)
        inputs = {
            key: clean(x, rows.mask_T if key.endswith("_T") else takes_part_N)
            for key, x in inputs.items()
        }
    groups = Groups.of(group_N.to(rewards_T.device), takes_part_N)
    return _Batch(rows, groups, inputs.pop("rewards_T", rewards_T), scores_N), inputs


def _check_choice(option: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{option}={value!r} is not one of {', '.join(choices)}")


ADVANTAGES = {
    name: partial(_advantages, rule, whiten=name in WHITENED)
    for name, rule in (PER_ROW | PER_TOKEN).items()
}
