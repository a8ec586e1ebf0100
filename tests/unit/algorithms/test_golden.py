"""Every golden entry with a meaning of ours: value and gradient, fp32 and fp64, with NaN at masked positions.

An entry is either matched by a rule or left out by name and reason; none is passed over in silence.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch
from golden_cases import CASES, FOLDER, Case, load_case, tolerance
from safetensors.torch import load_file
from torch import Tensor

from megarl.algorithms import (
    ADVANTAGES,
    AGGREGATIONS,
    CORRECTIONS,
    KL,
    LOSSES,
    SELECT,
    VALUE_LOSSES,
    WEIGHTS,
    Stats,
    returns,
    whiten,
    whiten_stats,
)

Outputs = dict[str, Tensor]
RULES: list[tuple[re.Pattern[str], Callable[..., Outputs]]] = []


def rule(pattern: str) -> Callable[[Callable[..., Outputs]], Callable[..., Outputs]]:
    def add(function: Callable[..., Outputs]) -> Callable[..., Outputs]:
        RULES.append((re.compile(pattern), function))
        return function

    return add


# --- what is left out, and why (entry, case, reason): the first match counts ---------------------------------------

LEFT_OUT = [
    (r"verl\.adv\.(grpo_passk|gdpo|optimal_token_baseline|tir_optimal).*", ".*", "no such estimator of ours"),
    (r"trl\.adv\.gdpo", ".*", "no such estimator of ours"),
    (r"(slime\.gae|roll\.gae).*", "multiturn|process|reward_on_hole|masked_row", "the peer ignores the mask"),
    (r"(slime|roll)\.gae.*", ".*", "the peer walks through padding"),
    (r"roll\.reinforce_return", ".*", "the peer pays gamma on every position"),
    (r"nemo\.adv\.reinforce_plus_plus.*|slime\.adv\.reinforce_plus_plus_baseline", ".*", "KL per token, not summed"),
    (r"slime\.returns\.reinforce_plus_plus\.g0.99", ".*", "the peer pays gamma on holes"),
    (r"openrlhf\.adv\.gae\.g0.99.*", ".*", "the peer walks through holes"),
    (r"openrlhf\.adv\..*clip0.5.*", ".*", "the peer clips after the baseline"),
    (r"openrlhf\.adv\.(?!rloo|dr_grpo).*nostd0", ".*", "the peer's variance is biased"),
    (r"openrlhf\.adv\.reinforce\.g0.99.*", ".*", "the peer pays gamma on holes"),
    (
        r"verl\.adv\.(grpo|rloo|gpg|opo|reinforce_plus_plus_baseline).*",
        "masked_row",
        "the empty row counts in the group",
    ),
    (r"(trl|nemo|roll)\.(adv|reward).*", "masked_row", "the empty row counts in the group"),
    (r"openrlhf\.adv.*", "masked_row", "the peer puts the reward of an empty row on its last column"),
    (r"verl\.loss\.(dppo|dro|bypass).*", ".*", "no such loss of ours"),
    (r"trl\.loss\.(vespo|luspo|beta_bc|rloo|delta|bnpo)\b.*", ".*", "no such loss of ours"),
    (r".*\.loss\.gspo\.rfpp.*", ".*", "advantages that differ within a row, which gspo refuses"),
    (r"verl\.loss\.geo_mean.*", "masked_row", "the empty row counts"),
    (r"verl\.loss\.geo_mean\.grpo\.is", ".*", "weights by the geometric mean"),
    (r"verl\.rc\.is\.sequence\.0\.5.*", ".*", "rejection by other statistics, or shrinking the denominator"),
    (r"trl\.loss\.(grpo|dr_grpo|sapo|gspo)\.grpo", "masked_row", "the empty row counts"),
    (
        r"(trl|nemo)\.loss.*|openrlhf\.kl.*|slime\.kl\.k3",
        "extreme",
        "the peer does not limit the log-ratio, or limits every value",
    ),
    (r"verl\.loss\.(clip|kl)_cov.*", "extreme", "the peer does not limit the log-ratio, or limits every value"),
    (r"roll\.reward_norm.*", "singletons", "NaN for a group of one"),
    (r"openrlhf\.adv\.(rloo|group_norm).*", "singletons|mixed_groups", "NaN for a group of one"),
    (r"trl\.adv\.rloo\.n1.*", ".*", "no such estimator of ours"),
    (r"nemo\.loss\.kl.*", ".*", "the score-function form of k3"),
    (r"areal\.loss.*", ".*", "decoupled: multiplies by an uncapped behaviour weight"),
    (r"roll\.agg.*", ".*", "numerator not masked, or not divided by the batch"),
    (r"verl\.rc\.rs.*", ".*", "rejection by other statistics, or shrinking the denominator"),
    (r"verl\.rc\.is.*bn1", ".*", "weights normalised by the batch"),
    (r"openrlhf\.compute_reward.*", ".*", "done by collate and the objective"),
    (
        r"(verl\.kl\.k1\+|verl\.kl\.abs\+|nemo\.kl.*|openrlhf\.kl\.k3|slime\.kl\.unbiased_k3)",
        ".*",
        "no such estimator of ours",
    ),
]


def reason_left_out(entry_id: str, case: str) -> str | None:
    for entry, cases, reason in LEFT_OUT:
        if re.fullmatch(entry, entry_id) and re.fullmatch(cases, case):
            return reason
    return None


# --- advantages ---------------------------------------------------------------------------------------------------


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
    return {"advantages": estimate(case, "rloo", case.rewards(), singleton="zero" if how else "raw")}


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
    options = {"std": "unbiased" if unbiased == "1" else "biased", "eps": float(eps), "singleton": "raw"}
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


@rule(r"openrlhf\.adv\.(?P<name>gae|reinforce|reinforce_baseline|rloo|group_norm|dr_grpo)\.g1\.0\.l1\.0\.clip0\..*")
def openrlhf_adv(case: Case, name: str) -> Outputs:
    """Returns before whitening: the reward-to-go of group-adjusted outcomes minus KL."""
    scores_N = case.raw("scores")
    if name in ("rloo", "group_norm", "dr_grpo", "reinforce_baseline"):
        ours = {"rloo": "rloo", "group_norm": "grpo"}.get(name, "dr_grpo")
        options = {"eps": 1e-9} if name == "group_norm" else {}
        adjusted_T = estimate(case, ours, case.outcome(scores_N), **options)
        last_T = case.outcome(torch.ones_like(scores_N))
        adjusted_T = torch.where(last_T == 1, adjusted_T, 0)
    else:
        adjusted_T = case.outcome(scores_N)
    rewards_T = adjusted_T - 0.01 * KL["k1"](case.flat("old_log_prob"), case.flat("ref_log_prob")).clamp(-10, 10)
    return {"returns": estimate(case, "reinforce", rewards_T)}


@rule(r"trl\.adv\.grpo\.(?P<scale>group|batch|none)")
def trl_grpo(case: Case, scale: str) -> Outputs:
    return {"advantages": estimate(case, "grpo", case.outcome(case.raw("scores")), scale=scale, eps=1e-4)}


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


# --- losses -------------------------------------------------------------------------------------------------------


def policy_loss(
    case: Case,
    name: str,
    *,
    aggregation: str,
    advantages: str = "adv_grpo",
    constant: float | None = None,
    weights_T: Tensor | None = None,
    **options,
) -> Outputs:
    """The loss and its gradient, summed with WEIGHTS as the actor does it."""
    logprobs_T = case.flat("log_prob").requires_grad_()
    at = (case.flat("old_log_prob"), case.flat(advantages), case.mask, case.cu_seqlens)
    loss_T = LOSSES[name](logprobs_T, *at, **options)
    if weights_T is not None:
        loss_T = loss_T * torch.where(case.mask, weights_T, 0)
    constant = constant or case.kept.shape[1]
    share_T = WEIGHTS[aggregation](case.mask, case.cu_seqlens, case.group, constant=constant).to(loss_T.dtype)
    loss = (loss_T * share_T).sum()
    loss.backward()
    return {"loss": loss.detach(), "grad_log_prob": logprobs_T.grad}


VERL_LOSSES = {"vanilla": "ppo_clip", "geo_mean": "gmpo"}


@rule(r"verl\.loss\.vanilla\.(?P<adv>grpo|rfpp)\.(?P<how>.*)")
def verl_vanilla(case: Case, adv: str, how: str) -> Outputs:
    options = {
        "clip_higher": {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 10.0},
        "nodual": {"clip_high": 0.2, "dual_clip": None},
        "is": {"clip_high": 0.2, "dual_clip": 3.0, "weights_T": case.flat("is_weights")},
    }.get(how, {"clip_high": 0.2, "dual_clip": 3.0})
    if how == "scale":
        options |= {"aggregation": "seq-mean-token-sum-norm", "constant": 100}
    options.setdefault("aggregation", how if how in WEIGHTS else "token-mean")
    return policy_loss(case, "ppo_clip", advantages=f"adv_{adv}", **options)


@rule(r"verl\.loss\.gspo\.grpo\.(?P<how>.*)")
def verl_gspo(case: Case, how: str) -> Outputs:
    clips = {"clip_low": 0.2, "clip_high": 0.2} if how == "wide" else {}
    aggregation = how if how in WEIGHTS else "seq-mean-token-mean"
    return policy_loss(case, "gspo", aggregation=aggregation, **clips)


@rule(r"verl-main\.loss\.gspo\.grpo")
def verl_main_gspo(case: Case) -> Outputs:
    return policy_loss(case, "gspo", aggregation="seq-mean-token-mean", clip_low=0.2, clip_high=0.2)


@rule(r"verl\.loss\.cispo\.(?P<adv>grpo|rfpp)\.(?P<how>.*)")
def verl_cispo(case: Case, adv: str, how: str) -> Outputs:
    if how == "narrow.is":
        clips = {"clip_low": 0.2, "clip_high": 0.28, "weights_T": case.flat("is_weights")}
        return policy_loss(case, "cispo", aggregation="token-mean", advantages=f"adv_{adv}", **clips)
    return policy_loss(case, "cispo", aggregation=how, advantages=f"adv_{adv}")


@rule(r"verl\.loss\.gpg\.grpo\.(?P<aggregation>.*)")
def verl_gpg_loss(case: Case, aggregation: str) -> Outputs:
    return policy_loss(case, "gpg", aggregation=aggregation)


@rule(r"verl\.loss\.sapo\.grpo")
def verl_sapo(case: Case) -> Outputs:
    return policy_loss(case, "sapo", aggregation="seq-mean-token-mean")


@rule(r"verl\.loss\.geo_mean\.grpo")
def verl_gmpo(case: Case) -> Outputs:
    return policy_loss(case, "gmpo", aggregation="seq-mean-token-mean")


@rule(r"verl\.loss\.(?P<name>clip_cov|kl_cov)\.grpo")
def verl_cov(case: Case, name: str) -> Outputs:
    choose = {"clip_cov": {"share": 1.0, "low": 0.3, "high": 5.0}, "kl_cov": {"share": 0.2}}[name]
    at = (case.flat("log_prob"), case.flat("old_log_prob"), case.flat("adv_grpo"), case.mask)
    return policy_loss(case, name, aggregation="token-mean", select_T=SELECT[name](*at, **choose))


@rule(r"verl\.shard2\.vanilla\.(?P<aggregation>.*)")
def verl_shards(case: Case, aggregation: str) -> Outputs:
    """Each rank's loss is twice its share of the whole batch's (verl multiplies by the number of ranks)."""
    logprobs_T = case.flat("log_prob").requires_grad_()
    at = (case.flat("old_log_prob"), case.flat("adv_grpo"), case.mask, case.cu_seqlens)
    loss_T = LOSSES["ppo_clip"](logprobs_T, *at, clip_high=0.2, dual_clip=3.0)
    constant = case.kept.shape[1]
    share_T = WEIGHTS[aggregation](case.mask, case.cu_seqlens, constant=constant).to(loss_T.dtype)
    rows_N = torch.arange(len(case.group)).repeat_interleave(case.cu_seqlens.diff())
    return {f"rank{rank}.loss": (2 * loss_T * share_T)[rows_N % 2 == rank].sum().detach() for rank in (0, 1)}


@rule(r"openrlhf\.loss\.(?P<how>ppo|ppo_seq|clip_higher|dual|gspo|tis|icepop|seqmask)\.(?P<adv>grpo|rfpp)")
def openrlhf_loss(case: Case, how: str, adv: str) -> Outputs:
    options = {
        "clip_higher": {"clip_high": 0.28, "dual_clip": None},
        "dual": {"clip_high": 0.2, "dual_clip": 3.0},
        "gspo": {"clip_low": 0.2, "clip_high": 0.2},
    }.get(how, {"clip_high": 0.2, "dual_clip": None})
    gap = (case.flat("old_log_prob"), case.flat("rollout_log_prob"), case.mask, case.cu_seqlens)
    if how == "tis":
        options["weights_T"] = CORRECTIONS["tis"](*gap, floor=0.5, cap=2.0)
    if how == "icepop":
        options["weights_T"] = CORRECTIONS["icepop"](*gap, low=0.5, high=2.0)
    if how == "seqmask":
        weight_T = CORRECTIONS["tis"](*gap, cap=1e30)
        options["weights_T"] = weight_T * CORRECTIONS["seq_mask"](*gap, low=0.97, high=1.03)
    aggregation = "seq-mean-token-mean" if how in ("ppo_seq", "gspo") else "token-mean"
    name = "gspo" if how == "gspo" else "ppo_clip"
    return policy_loss(case, name, aggregation=aggregation, advantages=f"adv_{adv}", **options)


@rule(r"slime\.loss\.(?P<how>ppo|cispo|gspo)\.(?P<adv>grpo|rfpp)")
def slime_loss(case: Case, how: str, adv: str) -> Outputs:
    options = {
        "ppo": {"clip_high": 0.28, "dual_clip": 3.0},
        "cispo": {},
        "gspo": {"clip_low": 0.2, "clip_high": 0.2},
    }[how]
    name = "ppo_clip" if how == "ppo" else how
    return policy_loss(case, name, aggregation="token-sum", advantages=f"adv_{adv}", **options)


@rule(r"trl\.loss\.(?P<how>grpo|dr_grpo|dapo|cispo|sapo|gspo|beta|opsm|tis)\.(?P<adv>grpo|rfpp)")
def trl_loss(case: Case, how: str, adv: str) -> Outputs:
    options = {
        "cispo": {"aggregation": "token-mean"},
        "sapo": {"aggregation": "seq-mean-token-mean"},
        "gspo": {"aggregation": "seq-mean-token-mean"},
        "grpo": {"aggregation": "seq-mean-token-mean", "clip_high": 0.2},
        "dr_grpo": {"aggregation": "seq-mean-token-sum-norm", "clip_high": 0.2},
        "dapo": {"aggregation": "token-mean", "clip_high": 0.28},
    }.get(how, {"aggregation": "token-mean", "clip_high": 0.2})
    name = how if how in ("cispo", "sapo", "gspo") else "ppo_clip"
    if name == "ppo_clip":
        options["dual_clip"] = None
    if how == "tis":
        options["weights_T"] = case.flat("is_weights")
    if how == "opsm":
        logprobs = {"logprobs_T": case.flat("log_prob"), "advantages_T": case.flat("adv_grpo")}
        old = case.flat("old_log_prob")
        options["weights_T"] = CORRECTIONS["opsm"](old, old, case.mask, case.cu_seqlens, delta=0.01, **logprobs)
    done = policy_loss(case, name, advantages=f"adv_{adv}", **options)
    if how == "beta":
        logprobs_T = case.flat("log_prob").requires_grad_()
        kl = AGGREGATIONS["token-mean"](KL["k3"](logprobs_T, case.flat("ref_log_prob")), case.mask, case.cu_seqlens)
        kl.backward()
        done = {
            "loss": done["loss"] + 0.04 * kl.detach(),
            "grad_log_prob": done["grad_log_prob"] + 0.04 * torch.where(case.mask, logprobs_T.grad, 0),
        }
    return done


@rule(r"nemo\.loss\.(?P<how>grpo|seq|gspo|dual|cispo|reinforce|onpolicy|tis|icepop|seqmask)\.(?P<adv>grpo|rfpp)")
def nemo_loss(case: Case, how: str, adv: str) -> Outputs:
    name = {"gspo": "gspo", "cispo": "cispo", "reinforce": "reinforce", "onpolicy": "reinforce"}.get(how, "ppo_clip")
    options = {"ppo_clip": {"clip_high": 0.2, "dual_clip": 3.0 if how == "dual" else None}}.get(name, {})
    if how == "gspo":
        options = {"clip_low": 0.2, "clip_high": 0.2}
    gap = (case.flat("old_log_prob"), case.flat("rollout_log_prob"), case.mask, case.cu_seqlens)
    if how == "tis":
        options["weights_T"] = CORRECTIONS["tis"](*gap)
    if how == "icepop":
        options["weights_T"] = CORRECTIONS["icepop"](*gap, low=0.5, high=2.0)
    if how == "seqmask":
        weight_T = CORRECTIONS["tis"](*gap, cap=1e30)
        options["weights_T"] = weight_T * CORRECTIONS["seq_mask"](*gap, low=0.97, high=1.03)
    aggregation = "seq-mean-token-mean" if how in ("seq", "gspo") else "token-mean"
    done = policy_loss(case, name, aggregation=aggregation, advantages=f"adv_{adv}", **options)
    return {"grad_log_prob": done["grad_log_prob"]} if how == "onpolicy" else done


# --- aggregations, value loss, KL, corrections ----------------------------------------------------------------------


def aggregate(case: Case, mode: str, *, scale: Tensor | float = 1.0) -> Outputs:
    loss_T = case.flat("loss_mat").requires_grad_()
    loss = AGGREGATIONS[mode](loss_T, case.mask, case.cu_seqlens, case.group, constant=case.kept.shape[1]) * scale
    loss.backward()
    return {"loss": loss.detach(), "grad_loss_mat": loss_T.grad}


@rule(r"verl\.agg\.(?P<mode>.*)")
def verl_aggregate(case: Case, mode: str) -> Outputs:
    return aggregate(case, mode)


@rule(r"openrlhf\.agg\.token(?P<token>\d)")
def openrlhf_aggregate(case: Case, token: str) -> Outputs:
    return aggregate(case, "token-mean" if token == "1" else "seq-mean-token-mean")


@rule(r"slime\.agg\.pertoken(?P<token>\d)")
def slime_aggregate(case: Case, token: str) -> Outputs:
    if token == "1":
        return aggregate(case, "token-sum")
    num_rows = int((case.raw("response_mask").sum(1) > 0).sum())
    return aggregate(case, "seq-mean-token-mean", scale=num_rows)


@rule(r"verl\.value_loss\.c(?P<clip>[\d.]+)\.(?P<aggregation>[a-z-]+)")
def verl_value(case: Case, clip: str, aggregation: str) -> Outputs:
    values_T = case.flat("vpreds").requires_grad_()
    clip_at = None if float(clip) > 1e6 else float(clip)
    loss_T = VALUE_LOSSES["clipped"](values_T, case.flat("values"), case.flat("value_targets"), case.mask, clip=clip_at)
    loss = AGGREGATIONS[aggregation](loss_T, case.mask, case.cu_seqlens)
    loss.backward()
    return {"loss": loss.detach(), "grad_vpreds": values_T.grad}


@rule(r"(openrlhf|areal)\.value_loss")
def other_value(case: Case) -> Outputs:
    done = verl_value(case, "0.2", "token-mean")
    return {"loss": done["loss"], "grad_v": done["grad_vpreds"]}


@rule(r"(?P<peer>verl|openrlhf|slime)\.kl\.(?P<name>kl|k1|abs|mse|k2|k2\+|low_var_kl|k3|k3\+|low_var_kl\+)")
def kl(case: Case, peer: str, name: str) -> Outputs:
    ours = {"kl": "k1", "mse": "k2", "k2+": "k2", "low_var_kl": "k3", "low_var_kl+": "k3+"}.get(name, name)
    limit = (
        {}
        if peer == "openrlhf" or ours not in ("k3", "k3+") or (peer, name) == ("slime", "k3")
        else {"value_clamp": 10.0}
    )
    logprobs_T = case.flat("log_prob").requires_grad_()
    value_T = KL[ours](*(torch.where(case.mask, x_T, 0) for x_T in (logprobs_T, case.flat("ref_log_prob"))), **limit)
    value_T.sum().backward()
    return {"kl": value_T.detach(), "grad_logprob": logprobs_T.grad}


@rule(r"verl\.rc\.is\.(?P<level>token|sequence)\.(?P<bounds>[\d._]+)\.bn0")
def verl_weights(case: Case, level: str, bounds: str) -> Outputs:
    low, _, high = bounds.rpartition("_")
    gap = (case.flat("old_log_prob"), case.flat("rollout_log_prob"), case.mask, case.cu_seqlens)
    if low:
        return {"weights": CORRECTIONS["icepop"](*gap, low=float(low), high=float(high))}
    return {"weights": CORRECTIONS["tis" if level == "token" else "seq_tis"](*gap, cap=float(high))}


@rule(r"slime\.(?P<name>tis|icepop)")
def slime_weights(case: Case, name: str) -> Outputs:
    gap = (case.flat("old_log_prob"), case.flat("rollout_log_prob"), case.mask, case.cu_seqlens)
    bounds = {"tis": {"floor": 0.5, "cap": 2.0}, "icepop": {"low": 0.5, "high": 2.0}}[name]
    return {"weighted": torch.where(case.mask, case.flat("loss_mat"), 0) * CORRECTIONS[name](*gap, **bounds)}


@rule(r"slime\.opsm\.grpo")
def slime_opsm(case: Case) -> Outputs:
    old_T = case.flat("old_log_prob")
    new = {"logprobs_T": case.flat("log_prob"), "advantages_T": case.flat("adv_grpo")}
    return {"mask": CORRECTIONS["opsm"](old_T, old_T, case.mask, case.cu_seqlens, delta=0.01, **new)}


# --- the comparison -----------------------------------------------------------------------------------------------


def differences(case: Case, entry_id: str, ours: Outputs) -> list[str]:
    """One line for each output that is not the peer's, at trained positions; ours is 0 at the others."""
    wrong = []
    compared = 0
    close = tolerance(case, entry_id)
    for name, value in ours.items():
        expected = case.output(entry_id, name)
        if expected is None:
            continue
        compared += 1
        if value.ndim and expected.ndim == 2:
            if bool(value[~case.mask].ne(0).any()):
                wrong.append(f"{entry_id} {name}: not 0 at masked positions")
            value, expected = value[case.mask], expected[case.kept][case.mask]
        elif value.ndim:  # the peer gives one number a row
            rows_T = torch.arange(expected.numel()).repeat_interleave(case.cu_seqlens.diff())
            value, expected = value[case.mask], expected[rows_T][case.mask]
        try:
            torch.testing.assert_close(value.to(expected.dtype), expected, equal_nan=False, **close)
        except AssertionError as error:
            wrong.append(f"{entry_id} {name}: {' '.join(str(error).split())[:200]}")
    if not compared:
        wrong.append(f"{entry_id}: no output compared")
    return wrong


def entries(name: str, dtype: str) -> Iterator[tuple[str, str | None]]:
    """(entry, why it is left out or None) of a case; entries on which the peer itself fails are not counted."""
    for entry in load_case(name, dtype).entries:
        if dtype not in (entry.get("raises") or {}):
            yield entry["id"], reason_left_out(entry["id"], name)


@pytest.mark.parametrize("dtype", ["f32", "f64"])
@pytest.mark.parametrize("name", CASES)
def test_entries(name: str, dtype: str):
    case = load_case(name, dtype)
    wrong = []
    for entry_id, left_out in entries(name, dtype):
        if left_out:
            continue
        found = [(match, function) for pattern, function in RULES if (match := pattern.fullmatch(entry_id))]
        if len(found) != 1:
            wrong.append(f"{entry_id}: matched by {len(found)} rules, and not left out")
            continue
        match, function = found[0]
        wrong += differences(case, entry_id, function(case, **match.groupdict()))
    if wrong:
        pytest.fail("\n".join(wrong), pytrace=False)


def test_how_many_are_compared(capsys: pytest.CaptureFixture[str]):
    listed = [(entry_id, why) for name in CASES for dtype in ("f32", "f64") for entry_id, why in entries(name, dtype)]
    reasons = Counter(why for _, why in listed if why)
    num_compared = len(listed) - reasons.total()
    with capsys.disabled():
        print(f"\ngolden entries: {num_compared} of {len(listed)} compared; left out:")
        for reason, count in reasons.most_common():
            print(f"  {count:4} {reason}")
    assert num_compared >= 0.65 * len(listed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("offset", [0, 100])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_whitening_of_shards(num_ranks: int, offset: int, dtype: torch.dtype):
    tensors = load_file(FOLDER / "misc.safetensors")
    name = f"{num_ranks}.{offset}.0"
    shards = [
        (tensors[f"in/w{name}.x{rank}"].to(dtype), tensors[f"in/w{name}.m{rank}"].bool()) for rank in range(num_ranks)
    ]
    stats = Stats(0, 0.0, 0.0)
    for x_T, mask_T in shards:
        stats = stats.merge(whiten_stats(torch.where(mask_T, x_T, float("nan")), mask_T))
    ours_T = torch.cat([whiten(x_T, mask_T, stats=stats) for x_T, mask_T in shards])
    mask_T = torch.cat([mask_T for _, mask_T in shards])
    which = "f32" if dtype == torch.float32 else "f64"
    peer_T = tensors[f"out/verl.full_whiten.{name}@{which}/y"]
    close = {"rtol": 1e-4, "atol": 1e-4} if which == "f32" else {"rtol": 1e-7, "atol": 1e-6}
    torch.testing.assert_close(ours_T[mask_T], peer_T[mask_T], **close)
    assert not ours_T[~mask_T].any()
