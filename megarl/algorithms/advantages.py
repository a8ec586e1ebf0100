"""From rewards to advantages: one function an estimator, over flat [T]. Called as

    ADVANTAGES[name](rewards_T, mask_T, cu_seqlens, group_N, *, values_T, step_ends_T, baseline_N, whiten, **options)

`rewards_T` holds each token's reward: an outcome reward sits on the row's last True position, and KL in the
reward is already subtracted. The result is 0 on False positions, in the dtype of `rewards_T` (fp32 at least). Rows
without a True position, or with a number that is not finite or near the end of that dtype's range, take no part in
any statistic and get 0. With `whiten` the result is whitened over all tokens of the batch, by `std` and `eps` where
the estimator has none of its own.
N = rows, K = spans (spans.py), S = step ends. R_i = a row's score, mu and s = its group's mean and standard deviation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from inspect import signature
from typing import Any, Literal

import torch
from torch import Tensor

from megarl.algorithms.returns import sums_to_end, td_lambda
from megarl.algorithms.rows import Groups, at_least_fp32
from megarl.algorithms.spans import Spans
from megarl.algorithms.whitening import stats_of, whiten_

__all__ = ["ADVANTAGES", "returns"]

Singleton = Literal["zero", "raw", "error"]
NEUTRAL = {"gamma": 1.0, "lam": 1.0, "singleton": "zero"}  # common options, taken by all where they change nothing


@dataclass(frozen=True, slots=True)
class _Scored:
    """What every estimator is given, on the CPU: numbers that can be summed."""

    spans: Spans
    rewards_K: Tensor  # each span's; 0 in rows that are not valid
    group_N: Tensor
    valid_N: Tensor  # bool: has a True position, and numbers that can be summed
    limit: float  # of the result
    values_K: Tensor | None  # fp64, as rewards_K
    step_ends_K: Tensor | None  # bool
    baseline_N: Tensor | None  # fp64

    def scores(self) -> tuple[Tensor, Groups]:
        """Each row's [N] fp64, and the groups of the rows."""
        return self.spans.sum(self.rewards_K), Groups.of(self.group_N, self.valid_N)

    def tokens(self, x_N: Tensor) -> Tensor:
        """[K]: a row's value on all its spans, 0 where the row is not valid."""
        x_N = torch.where(self.valid_N, x_N, 0).clamp(-self.limit, self.limit)
        return self.spans.spread(x_N.to(self.rewards_K.dtype))


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
    whiten: bool = False,
    **options: Any,
) -> Tensor:
    own = _options(estimator)
    scaling = {name: options.pop(name) for name in ("std", "eps") if name in options and name not in own}
    _check_choice("std", scaling.get("std", "unbiased"), ("unbiased", "biased"))
    options = {name: x for name, x in options.items() if name in own or NEUTRAL.get(name) != x}
    given = {"values_T": values_T, "step_ends_T": step_ends_T, "baseline_N": baseline_N}
    used = {name: given[name] for name in _NEEDS.get(estimator, ())}
    if missing := [name for name, x in used.items() if x is None]:
        raise ValueError(f"advantage={estimator.__name__} needs {missing[0]} [{missing[0][-1]}]")
    every = options.get("gamma", 1.0) != 1.0 or "values_T" in used
    batch = _scored(rewards_T, mask_T, cu_seqlens, group_N, of_rows=estimator in _OF_ROWS, every=every, **used)
    x_K = estimator(batch, **options)
    if whiten:
        x_K = _whitened(x_K, batch, biased=scaling.get("std") == "biased", eps=scaling.get("eps", 1e-8))
    return batch.spans.lay(x_K.to(at_least_fp32(rewards_T.dtype))).to(rewards_T.device)


def _scored(
    rewards_T: Tensor,
    mask_T: Tensor,
    cu_seqlens: Tensor,
    group_N: Tensor,
    *,
    of_rows: bool,
    every: bool,
    values_T: Tensor | None = None,
    step_ends_T: Tensor | None = None,
    baseline_N: Tensor | None = None,
) -> _Scored:
    """Rows cut into as few spans as the estimator can do with, and set apart where their numbers cannot be summed.

    `of_rows`: it looks at the scores of rows alone; `every`: at every token.
    """
    rewards_T = rewards_T.detach().cpu().to(at_least_fp32(rewards_T.dtype))
    step_ends_T = None if step_ends_T is None else step_ends_T.cpu().bool()
    marks = None if of_rows or every else rewards_T.numpy() != 0
    if marks is not None and step_ends_T is not None:
        marks |= step_ends_T.numpy()
    spans = Spans.of(mask_T.cpu().bool(), cu_seqlens.cpu(), marks=marks, every=every)
    limit = torch.finfo(rewards_T.dtype).max / 8
    rewards_K = spans.sum_within(rewards_T) if of_rows else spans.at_ends(rewards_T)
    valid_N = (spans.num_tokens_N > 0) & spans.sums_fit(rewards_K, limit)
    values_K = None if values_T is None else spans.at_ends(values_T).double()
    if values_K is not None:
        valid_N &= spans.sums_fit(values_K, limit)
    if baseline_N is not None:
        baseline_N = baseline_N.detach().cpu().double()
        valid_N &= baseline_N.abs() <= limit
    if not bool(valid_N.all()):
        valid_K = spans.spread(valid_N)
        rewards_K = torch.where(valid_K, rewards_K, 0)
        values_K = None if values_K is None else torch.where(valid_K, values_K, 0)
    return _Scored(
        spans=spans,
        rewards_K=rewards_K if spans.tokens_K is None else rewards_K.double(),  # few: the best costs nothing
        group_N=group_N.cpu(),
        valid_N=valid_N,
        limit=limit,
        values_K=values_K,
        step_ends_K=None if step_ends_T is None else spans.at_ends(step_ends_T),
        baseline_N=baseline_N,
    )


def _whitened(x_K: Tensor, batch: _Scored, *, biased: bool, eps: float) -> Tensor:
    """Over the tokens of the valid rows, 0 in the others."""
    valid_N, weights_K = batch.valid_N, batch.spans.tokens_K
    if bool((valid_N | (batch.spans.num_tokens_N == 0)).all()):
        return whiten_(x_K, stats_of(x_K, weights_K), biased=biased, eps=eps)
    valid_K = batch.spans.spread(valid_N)
    weights_K = valid_K.double() if weights_K is None else weights_K * valid_K
    return torch.where(valid_K, whiten_(x_K, stats_of(x_K, weights_K), biased=biased, eps=eps), 0)


@cache
def _options(estimator: Callable[..., Tensor]) -> frozenset[str]:
    return frozenset(p.name for p in signature(estimator).parameters.values() if p.kind is p.KEYWORD_ONLY)


def returns(advantages_T: Tensor, values_T: Tensor) -> Tensor:
    """What the critic is fitted to: un-whitened advantages plus the values they were made with."""
    return advantages_T + values_T


def _standardized(
    x_V: Tensor, groups: Groups, *, std: str, eps: float, singleton: Singleton, leave_one_out: bool = False
) -> Tensor:
    """(x - mu) / (s + eps) within each group. Equal values give exactly 0, a group of one 0, or x when "raw"."""
    _check_choice("std", std, ("unbiased", "biased"))
    _check_singletons(groups, singleton)
    mean_V = groups.mean(x_V)
    if leave_one_out:
        centred_V, scale_V = _others(x_V, mean_V, groups, biased=std == "biased")
        result_V = torch.where(scale_V > 0, centred_V / (scale_V + eps), centred_V)
    else:
        result_V = (x_V - mean_V) / (groups.std(x_V, mean_V, biased=std == "biased") + eps)
    result_V = torch.where(groups.is_flat(x_V, mean_V), 0, result_V)
    return torch.where(groups.size_V == 1, x_V, result_V) if singleton == "raw" else result_V


def _others(x_V: Tensor, mean_V: Tensor, groups: Groups, *, biased: bool) -> tuple[Tensor, Tensor]:
    """x minus the mean of the rest of its group, and the standard deviation of that rest."""
    num_V = groups.size_V
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
    score_N, groups = batch.scores()
    if scale == "group":
        how = {"std": std, "eps": eps, "singleton": singleton, "leave_one_out": leave_one_out}
        advantage_N = _standardized(score_N, groups, **how)
        return batch.tokens(torch.where(groups.size_V == 1, advantage_N / (1 + eps), advantage_N))
    centred_N = _centred(score_N, groups, singleton=singleton, leave_one_out=leave_one_out)
    if scale == "batch":
        _check_choice("std", std, ("unbiased", "biased"))
        everyone = Groups.of(torch.zeros_like(groups.group_V), groups.valid_V)
        centred_N = centred_N / (everyone.std(score_N, everyone.mean(score_N), biased=std == "biased") + eps)
    return batch.tokens(centred_N)


def _centred(score_N: Tensor, groups: Groups, *, singleton: Singleton = "zero", leave_one_out: bool = False) -> Tensor:
    """R - mu (the mean of the others with `leave_one_out`); exactly 0 where the group's scores are equal."""
    _check_singletons(groups, singleton)
    mean_N = groups.mean(score_N)
    centred_N = torch.where(groups.is_flat(score_N, mean_N), 0, score_N - mean_N)
    if leave_one_out:
        centred_N = centred_N * groups.size_V / (groups.size_V - 1).clamp(min=1)
    return torch.where(groups.size_V == 1, score_N, centred_N) if singleton == "raw" else centred_N


def dr_grpo(batch: _Scored, *, singleton: Singleton = "zero") -> Tensor:
    """A = R - mu, no division: arXiv 2503.20783 (its other half is the aggregation by a constant length)."""
    return batch.tokens(_centred(*batch.scores(), singleton=singleton))


def rloo(batch: _Scored, *, singleton: Singleton = "zero") -> Tensor:
    """A = R - mean of the others' R: Ahmadian et al. 2024, arXiv 2402.14740."""
    return batch.tokens(_centred(*batch.scores(), singleton=singleton, leave_one_out=True))


def opo(batch: _Scored, *, singleton: Singleton = "zero") -> Tensor:
    """A = R - sum(n R) / sum(n) over the group, n = tokens: arXiv 2505.23585."""
    (score_N, groups), length_N = batch.scores(), batch.spans.num_tokens_N.double()
    _check_singletons(groups, singleton)
    baseline_N = groups.sum(score_N * length_N) / groups.sum(length_N).clamp(min=1)
    advantage_N = torch.where(groups.is_flat(score_N, groups.mean(score_N)), 0, score_N - baseline_N)
    return batch.tokens(torch.where(groups.size_V == 1, score_N, advantage_N) if singleton == "raw" else advantage_N)


def gpg(batch: _Scored, *, singleton: Singleton = "zero") -> Tensor:
    """R - mu, times rows / rows whose score is not 0: arXiv 2504.02546."""
    score_N, groups = batch.scores()
    factor = batch.valid_N.sum() / (batch.valid_N & (score_N != 0)).sum().clamp(min=1)
    return batch.tokens(_centred(score_N, groups, singleton=singleton) * factor)


def reinforce(batch: _Scored, *, gamma: float = 1.0) -> Tensor:
    """A_t = sum over later trainable tokens of gamma^(their distance) r: Williams 1992."""
    return sums_to_end(batch.rewards_K, batch.spans.bounds, decay=gamma)


def reinforce_pp(batch: _Scored, *, gamma: float = 1.0) -> Tensor:
    """The reward-to-go, whitened over all tokens of the batch: REINFORCE++, arXiv 2501.03262."""
    return reinforce(batch, gamma=gamma)


def reinforce_pp_baseline(batch: _Scored, *, singleton: Singleton = "raw") -> Tensor:
    """R - mu on every token, then whitened over all tokens of the batch: arXiv 2501.03262."""
    return batch.tokens(_centred(*batch.scores(), singleton=singleton))


def remax(batch: _Scored, *, gamma: float = 1.0) -> Tensor:
    """The reward-to-go minus the reward of the prompt's greedy answer: arXiv 2310.10505."""
    assert batch.baseline_N is not None
    return reinforce(batch, gamma=gamma) - batch.tokens(batch.baseline_N)


def gae(batch: _Scored, *, gamma: float = 1.0, lam: float = 1.0) -> Tensor:
    """Generalised advantages over the True positions, value 0 after the last: arXiv 1506.02438."""
    assert batch.values_K is not None
    return td_lambda(batch.rewards_K.double(), batch.values_K, batch.spans.bounds, gamma=gamma, lam=lam)


def grpo_process(batch: _Scored, *, std: str = "unbiased", eps: float = 1e-6, singleton: Singleton = "zero") -> Tensor:
    """Each step's reward, standardised over all steps of the group; a token gets the sum of the steps that end
    at it or later: DeepSeekMath, arXiv 2402.03300, 4.1.3."""
    assert batch.step_ends_K is not None
    spans = batch.spans
    group_S, valid_S = (spans.spread(x_N)[batch.step_ends_K] for x_N in (batch.group_N, batch.valid_N))
    reward_S = batch.rewards_K[batch.step_ends_K].double()
    groups = Groups.of(group_S, valid_S)
    steps_K = torch.zeros(batch.rewards_K.numel(), dtype=torch.float64)
    step_S = _standardized(reward_S, groups, std=std, eps=eps, singleton=singleton)
    steps_K[batch.step_ends_K] = torch.where(valid_S, step_S, 0)
    return sums_to_end(steps_K, spans.bounds)


def _check_singletons(groups: Groups, singleton: str) -> None:
    _check_choice("singleton", singleton, ("zero", "raw", "error"))
    alone = int(((groups.size_V == 1) & groups.valid_V).sum()) if singleton == "error" else 0
    if alone:
        raise ValueError(f"{alone} groups of one with singleton=error; sample more a prompt, or say zero or raw")


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
_OF_ROWS = frozenset((rloo, reinforce_pp_baseline, grpo, dr_grpo, opo, gpg))
_NEEDS = {gae: ("values_T",), remax: ("baseline_N",), grpo_process: ("step_ends_T",)}
WHITENED = ("reinforce_pp", "reinforce_pp_baseline", "gae")  # unless `whiten` says otherwise
ADVANTAGES: dict[str, Callable[..., Tensor]] = {
    name: partial(_advantages, rule, whiten=name in WHITENED) for name, rule in _ESTIMATORS.items()
}
