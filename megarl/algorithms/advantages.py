"""From rewards to advantages: one function an estimator, over flat [T]. Called as

    ADVANTAGES[name](rewards_T, mask_T, cu_seqlens, group_N, *, values_T, step_ends_T, baseline_N, **options)

`rewards_T` holds each token's reward: an outcome reward sits on the row's last True position, and KL in the
reward is already subtracted. The result is 0 on False positions, in the dtype of `rewards_T`. Rows without a
True position, or with a score that is not finite, take no part in any statistic and get 0.
N = rows, T = positions, S = step ends. R_i = a row's score, mu and s = its group's mean and standard deviation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from megarl.algorithms.returns import reward_to_go, td_lambda
from megarl.algorithms.segments import Groups, Rows, clean
from megarl.algorithms.whitening import whiten as whiten_tokens

__all__ = ["ADVANTAGES", "returns"]

Singleton = Literal["zero", "raw"]


@dataclass(frozen=True, slots=True)
class _Scored:
    """The cleaned inputs of every estimator."""

    rewards_T: Tensor
    mask_T: Tensor
    rows: Rows
    groups: Groups  # of rows; valid: has a True position and a finite score
    score_N: Tensor  # fp64
    values_T: Tensor | None
    step_ends_T: Tensor | None
    baseline_N: Tensor | None

    def tokens(self, x_N: Tensor) -> Tensor:
        """Every token of a row gets the row's value."""
        return self.rows.spread(torch.where(self.groups.valid_V, x_N, 0))


def _advantages(
    estimator: Callable[..., Tensor],
    rewards_T: Tensor,
    mask_T: Tensor,
    cu_seqlens: Tensor,
    group_N: Tensor,
    *,
    values_T: Tensor | None = None,
    step_ends_T: Tensor | None = None,
    baseline_N: Tensor | None = None,
    **options: object,
) -> Tensor:
    mask_T = mask_T.bool()
    rows, rewards_T = Rows.of(mask_T, cu_seqlens), clean(rewards_T, mask_T)
    score_N = rows.sum(rewards_T.double())
    groups = Groups.of(group_N, (rows.num_tokens_N > 0) & score_N.isfinite())
    values_T = None if values_T is None else clean(values_T, mask_T)
    scored = _Scored(rewards_T, mask_T, rows, groups, score_N, values_T, step_ends_T, baseline_N)
    return clean(estimator(scored, **options), mask_T).to(rewards_T.dtype)


def returns(advantages_T: Tensor, values_T: Tensor) -> Tensor:
    """What the critic is fitted to: un-whitened advantages plus the values they were made with."""
    return advantages_T + values_T


def _standardized(
    x_V: Tensor, groups: Groups, *, std: str, eps: float, singleton: Singleton, leave_one_out: bool = False
) -> Tensor:
    """(x - mu) / (s + eps) within each group. Equal values give exactly 0, a group of one 0, or x when "raw"."""
    _check_choice("std", std, ("unbiased", "biased"))
    _check_choice("singleton", singleton, ("zero", "raw"))
    if leave_one_out:
        centred_V, scale_V = _others(x_V, groups, biased=std == "biased")
        result_V = torch.where(scale_V > 0, centred_V / (scale_V + eps), centred_V)
    else:
        result_V = (x_V - groups.mean(x_V)) / (groups.std(x_V, biased=std == "biased") + eps)
    result_V = torch.where(groups.is_flat(x_V), 0, result_V)
    return torch.where(groups.size_V == 1, x_V, result_V) if singleton == "raw" else result_V


def _others(x_V: Tensor, groups: Groups, *, biased: bool) -> tuple[Tensor, Tensor]:
    """x minus the mean of the rest of its group, and the standard deviation of that rest."""
    num_V = groups.size_V
    mean_V = groups.mean(x_V)
    rest_V = (num_V - 1).clamp(min=1)
    centred_V = (x_V - mean_V) * num_V / rest_V
    # Removing x shifts the mean by (x - mean) / (n - 1), and the squares by (x - mean)^2 n / (n - 1).
    squares_V = groups.sum((x_V - mean_V).square()) - (x_V - mean_V).square() * num_V / rest_V
    ddof = 0 if biased else 1
    variance_V = squares_V / (rest_V - ddof).clamp(min=1)
    rounding_V = 1e-12 * groups.sum((x_V - mean_V).square())
    return centred_V, torch.where(squares_V <= rounding_V, 0, variance_V).sqrt()


def grpo(
    batch: _Scored,
    *,
    std: str = "unbiased",
    eps: float = 1e-6,
    singleton: Singleton = "zero",
    scale: str = "group",
    leave_one_out: bool = False,
) -> Tensor:
    """A = (R - mu) / (s + eps): DeepSeekMath, arXiv 2402.03300, 4.1.2. `scale`: s of the group, the batch, or none."""
    _check_choice("scale", scale, ("group", "batch", "none"))
    if scale == "group":
        how = {"std": std, "eps": eps, "singleton": singleton, "leave_one_out": leave_one_out}
        advantage_N = _standardized(batch.score_N, batch.groups, **how)
        return batch.tokens(torch.where(batch.groups.size_V == 1, advantage_N / (1 + eps), advantage_N))
    centred_N = _centred(batch, singleton=singleton, leave_one_out=leave_one_out)
    if scale == "batch":
        everyone = Groups.of(torch.zeros_like(batch.groups.group_V), batch.groups.valid_V)
        centred_N = centred_N / (everyone.std(batch.score_N, biased=std == "biased") + eps)
    return batch.tokens(centred_N)


def _centred(batch: _Scored, *, singleton: Singleton = "zero", leave_one_out: bool = False) -> Tensor:
    """R - mu (the mean of the others with `leave_one_out`); exactly 0 where the group's scores are equal."""
    _check_choice("singleton", singleton, ("zero", "raw"))
    groups, score_N = batch.groups, batch.score_N
    centred_N = torch.where(groups.is_flat(score_N), 0, score_N - groups.mean(score_N))
    if leave_one_out:
        centred_N = centred_N * groups.size_V / (groups.size_V - 1).clamp(min=1)
    return torch.where(groups.size_V == 1, score_N, centred_N) if singleton == "raw" else centred_N


def dr_grpo(batch: _Scored, *, singleton: Singleton = "zero") -> Tensor:
    """A = R - mu, no division: arXiv 2503.20783 (its other half is the aggregation by a constant length)."""
    return batch.tokens(_centred(batch, singleton=singleton))


def rloo(batch: _Scored, *, singleton: Singleton = "zero") -> Tensor:
    """A = R - mean of the others' R: Ahmadian et al. 2024, arXiv 2402.14740."""
    return batch.tokens(_centred(batch, singleton=singleton, leave_one_out=True))


def opo(batch: _Scored, *, singleton: Singleton = "zero") -> Tensor:
    """A = R - sum(n R) / sum(n) over the group, n = tokens: arXiv 2505.23585."""
    groups, score_N, length_N = batch.groups, batch.score_N, batch.rows.num_tokens_N.double()
    baseline_N = groups.sum(score_N * length_N) / groups.sum(length_N).clamp(min=1)
    advantage_N = torch.where(groups.is_flat(score_N), 0, score_N - baseline_N)
    return batch.tokens(torch.where(groups.size_V == 1, score_N, advantage_N) if singleton == "raw" else advantage_N)


def gpg(batch: _Scored, *, singleton: Singleton = "zero") -> Tensor:
    """R - mu, times rows / rows whose score is not 0: arXiv 2504.02546."""
    valid_N = batch.groups.valid_V
    factor = valid_N.sum() / (valid_N & (batch.score_N != 0)).sum().clamp(min=1)
    return batch.tokens(_centred(batch, singleton=singleton) * factor)


def reinforce(batch: _Scored, *, gamma: float = 1.0, whiten: bool = False, **scaling: Any) -> Tensor:
    """A_t = sum over later trainable tokens of gamma^(their distance) r: Williams 1992."""
    return _maybe_whitened(reward_to_go(batch.rewards_T, batch.rows, gamma=gamma), batch, whiten, **scaling)


def reinforce_pp(batch: _Scored, *, gamma: float = 1.0, whiten: bool = True, **scaling: Any) -> Tensor:
    """The reward-to-go, whitened over all tokens of the batch: REINFORCE++, arXiv 2501.03262."""
    return reinforce(batch, gamma=gamma, whiten=whiten, **scaling)


def reinforce_pp_baseline(
    batch: _Scored, *, whiten: bool = True, singleton: Singleton = "raw", **scaling: Any
) -> Tensor:
    """R - mu on every token, then whitened over all tokens of the batch: arXiv 2501.03262."""
    return _maybe_whitened(batch.tokens(_centred(batch, singleton=singleton)), batch, whiten, **scaling)


def remax(batch: _Scored, *, gamma: float = 1.0, whiten: bool = False, **scaling: Any) -> Tensor:
    """The reward-to-go minus the reward of the prompt's greedy answer: arXiv 2310.10505."""
    baseline_N = _given(batch.baseline_N, "remax", "baseline_N [N]")
    advantage_T = reward_to_go(batch.rewards_T, batch.rows, gamma=gamma) - batch.rows.spread(baseline_N)
    return _maybe_whitened(advantage_T, batch, whiten, **scaling)


def gae(batch: _Scored, *, gamma: float = 1.0, lam: float = 1.0, whiten: bool = True, **scaling: Any) -> Tensor:
    """Generalised advantages over the True positions, value 0 after the last: arXiv 1506.02438."""
    values_T = _given(batch.values_T, "gae", "values_T [T]")
    advantage_T = td_lambda(batch.rewards_T, values_T, batch.rows, gamma=gamma, lam=lam)
    return _maybe_whitened(advantage_T, batch, whiten, **scaling)


def grpo_process(batch: _Scored, *, std: str = "unbiased", eps: float = 1e-6, singleton: Singleton = "zero") -> Tensor:
    """Each step's reward, standardised over all steps of the group; a token gets the sum of the steps that end
    at it or later: DeepSeekMath, arXiv 2402.03300, 4.1.3."""
    step_ends_T = _given(batch.step_ends_T, "grpo_process", "step_ends_T [T]").bool() & batch.mask_T
    step_S = step_ends_T.nonzero().flatten()
    row_S = batch.rows.row_T[step_S]
    groups = Groups.of(batch.groups.group_V[row_S], batch.groups.valid_V[row_S])
    reward_S = batch.rewards_T[step_S].double()
    steps_T = torch.zeros_like(batch.rewards_T, dtype=torch.float64)
    steps_T[step_S] = clean(_standardized(reward_S, groups, std=std, eps=eps, singleton=singleton), groups.valid_V)
    return reward_to_go(steps_T, batch.rows, gamma=1.0)


def _maybe_whitened(
    advantage_T: Tensor, batch: _Scored, whiten: bool, *, std: str = "unbiased", eps: float = 1e-8
) -> Tensor:
    """Over the tokens of all valid rows; `std` and `eps` are those of the whitening."""
    _check_choice("std", std, ("unbiased", "biased"))
    valid_T = batch.rows.spread(batch.groups.valid_V)
    if not whiten:
        return clean(advantage_T, valid_T)
    return whiten_tokens(advantage_T, valid_T, eps=eps, biased=std == "biased")


def _given(x: Tensor | None, estimator: str, what: str) -> Tensor:
    if x is None:
        raise ValueError(f"advantage={estimator} needs {what}")
    return x


def _check_choice(option: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{option}={value!r} is not one of {', '.join(choices)}")


_ESTIMATORS: dict[str, Callable[..., Tensor]] = {
    "reinforce": reinforce,
    "rloo": rloo,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "grpo": grpo,
    "grpo_process": grpo_process,
    "dr_grpo": dr_grpo,
    "remax": remax,
    "gae": gae,
    "opo": opo,
    "gpg": gpg,
}
ADVANTAGES: dict[str, Callable[..., Tensor]] = {name: partial(_advantages, rule) for name, rule in _ESTIMATORS.items()}
