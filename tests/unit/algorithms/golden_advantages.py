"""Golden advantages: how each peer's entry is written with ours."""

from __future__ import annotations

import torch
from golden_cases import Case, Outputs, rule
from torch import Tensor

from megarl.algorithms.advantages import ADVANTAGES, returns
from megarl.algorithms.kl import KL
from megarl.algorithms.rows import clean
from megarl.algorithms.whitening import whiten, whiten_stats

__all__ = ["estimate"]


def estimate(case: Case, name: str, rewards_T: Tensor, **options) -> Tensor:
    return ADVANTAGES[name](rewards_T, case.mask, case.cu_seqlens, case.group, **options)


@rule(r"verl\.adv\.gae\.(?P<kind>raw|kl)\.g(?P<gamma>[\d.]+)\.l(?P<lam>[\d.]+)")
def verl_gae(case: Case, kind: str, gamma: str, lam: str) -> Outputs:
    name = {"raw": "token_level_scores", "kl": "token_level_rewards_kl0.01"}[kind]
    values_T, rewards_T = case.flat("values"), case.rewards(name, on_hole="drop")
    options = {"gamma": float(gamma), "lam": float(lam), "values_T": values_T}
    raw_T = estimate(case, "gae", rewards_T, whiten=False, **options)
    return {
        "advantages": estimate(case, "gae", rewards_T, **options),
        "returns": torch.where(case.mask, returns(raw_T, values_T), 0),
    }


@rule(r"verl\.adv\.(grpo|grpo_vectorized)\.std(?P<std>\d)")
def verl_grpo(case: Case, std: str) -> Outputs:
    scale = "group" if std == "1" else "none"
    return {"advantages": estimate(case, "grpo", case.rewards(), scale=scale, singleton="raw")}


@rule(r"verl\.adv\.rloo(?P<how>|_vectorized)")
def verl_rloo(case: Case, how: str) -> Outputs:
    return {
        "advantages": estimate(case, "rloo", case.rewards(), singleton="zero" if how else "raw")
    }


@rule(r"verl\.adv\.opo")
def verl_opo(case: Case) -> Outputs:
    return {"advantages": estimate(case, "opo", case.rewards(), singleton="raw")}


@rule(r"verl\.adv\.gpg")
def verl_gpg(case: Case) -> Outputs:
    return {"advantages": estimate(case, "gpg", case.rewards(), singleton="raw")}


@rule(r"verl\.adv\.reinforce_plus_plus_baseline")
def verl_reinforce_pp_baseline(case: Case) -> Outputs:
    return {"advantages": estimate(case, "reinforce_pp_baseline", case.rewards())}


@rule(r"verl\.adv\.reinforce_plus_plus\.(?P<kind>raw|kl)\.g(?P<gamma>[\d.]+)")
def verl_reinforce_pp(case: Case, kind: str, gamma: str) -> Outputs:
    name = {"raw": "token_level_scores", "kl": "token_level_rewards_kl0.01"}[kind]
    rewards_T = case.rewards(name, on_hole="drop")
    return {
        "advantages": estimate(case, "reinforce_pp", rewards_T, gamma=float(gamma)),
        "returns": estimate(case, "reinforce_pp", rewards_T, gamma=float(gamma), whiten=False),
    }


@rule(r"verl\.adv\.remax")
def verl_remax(case: Case) -> Outputs:
    rewards_T = case.rewards(on_hole="drop")
    return {
        "advantages": estimate(case, "remax", rewards_T, baseline_N=case.raw("reward_baselines")),
        "returns": estimate(case, "reinforce", rewards_T),
    }


@rule(r"verl\.masked_whiten")
def verl_whiten(case: Case) -> Outputs:
    x_T = case.flat("values")
    return {"whitened": whiten(x_T, case.mask)}


@rule(r"ref\.adv\.grpo_process\.ub(?P<unbiased>\d)\.eps(?P<eps>.*)")
def ref_grpo_process(case: Case, unbiased: str, eps: str) -> Outputs:
    options = {
        "std": "unbiased" if unbiased == "1" else "biased",
        "eps": float(eps),
        "singleton": "raw",
    }
    steps_T = case.raw("step_mask")[case.kept].bool()
    rewards_T = case.rewards(on_hole="drop")
    return {"advantages": estimate(case, "grpo_process", rewards_T, step_ends_T=steps_T, **options)}


def kl_rewards(case: Case, coef: float, *, limit: float = float("inf")) -> Tensor:
    kl_T = KL["k1"](case.flat("old_log_prob"), case.flat("ref_log_prob")).clamp(-limit, limit)
    return case.outcome(case.raw("scores")) - coef * kl_T


@rule(r"ref\.adv\.reinforce_plus_plus")
def ref_reinforce_pp(case: Case) -> Outputs:
    rewards_T = kl_rewards(case, 0.01)
    return {
        "A": estimate(case, "reinforce_pp", rewards_T, whiten=False),
        "whitened_unbiased": estimate(case, "reinforce_pp", rewards_T),
        "whitened_biased": estimate(case, "reinforce_pp", rewards_T, std="biased"),
    }


@rule(r"slime\.returns\.reinforce_plus_plus\.g1\.0")
def slime_reinforce_pp(case: Case) -> Outputs:
    return {"returns": estimate(case, "reinforce_pp", kl_rewards(case, 0.01), whiten=False)}


@rule(
    r"openrlhf\.adv\.(?P<name>gae|reinforce|reinforce_baseline|rloo|group_norm|dr_grpo)\.g1\.0\.l1\.0\.clip0\.(?P<how>nostd\d)"
)
def openrlhf_adv(case: Case, name: str, how: str) -> Outputs:
    """The reward-to-go of group-adjusted outcomes minus KL."""
    scores_N = case.raw("scores")
    if name in ("rloo", "group_norm", "dr_grpo", "reinforce_baseline"):
        ours = {"rloo": "rloo", "group_norm": "grpo"}.get(name, "dr_grpo")
        options = {"eps": 1e-9} if name == "group_norm" else {}
        adjusted_T = estimate(case, ours, case.outcome(scores_N), **options)
        last_T = case.outcome(torch.ones_like(scores_N))
        adjusted_T = torch.where(last_T == 1, adjusted_T, 0)
    else:
        adjusted_T = case.outcome(scores_N)
    rewards_T = adjusted_T - 0.01 * KL["k1"](
        case.flat("old_log_prob"), case.flat("ref_log_prob")
    ).clamp(-10, 10)
    returns_T = estimate(case, "reinforce", rewards_T)
    if name in ("rloo", "group_norm", "dr_grpo"):  # these the peer leaves as they are
        return {"returns": returns_T, "advantages": returns_T}
    if name == "gae":
        values_T = case.flat("values")
        raw_T = estimate(case, "gae", rewards_T, values_T=values_T, whiten=False)
        returns_T = torch.where(case.mask, returns(raw_T, values_T), 0)
    else:
        raw_T = returns_T
    whitened_T = whiten(raw_T, case.mask, biased=True)
    if how == "nostd1":
        whitened_T = clean(raw_T - whiten_stats(raw_T, case.mask).mean, case.mask)
    return {"returns": returns_T, "advantages": whitened_T}


@rule(r"trl\.adv\.grpo\.(?P<scale>group|batch|none)")
def trl_grpo(case: Case, scale: str) -> Outputs:
    return {
        "advantages": estimate(
            case, "grpo", case.outcome(case.raw("scores")), scale=scale, eps=1e-4
        )
    }


@rule(r"trl\.adv\.rloo\.n0\.b(?P<beta>.*)")
def trl_rloo(case: Case, beta: str) -> Outputs:
    return {"advantages": estimate(case, "rloo", kl_rewards(case, float(beta)))}


@rule(r"nemo\.adv\.grpo\.loo(?P<loo>\d)\.norm(?P<norm>\d)")
def nemo_grpo(case: Case, loo: str, norm: str) -> Outputs:
    options = {"scale": "group" if norm == "1" else "none", "leave_one_out": loo == "1"}
    return {"advantages": estimate(case, "grpo", case.outcome(case.raw("scores")), **options)}


@rule(r"roll\.reward_norm\.group")
def roll_grpo(case: Case) -> Outputs:
    return {"rewards": estimate(case, "grpo", case.outcome(case.raw("scores")))}
