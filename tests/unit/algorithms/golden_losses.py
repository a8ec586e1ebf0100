"""Golden losses, aggregations, KL terms and corrections: how each peer's entry is written with ours."""

from __future__ import annotations

import torch
from golden_cases import Case, Outputs, rule
from reduced import AGGREGATIONS, CORRECTIONS, LOSSES, SELECT, WEIGHTS
from torch import Tensor

from megarl.algorithms.kl import KL
from megarl.algorithms.losses import clipped_value_loss
from megarl.algorithms.objective import _kl_loss
from megarl.config.schema import KlTerm


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
    share_T = WEIGHTS[aggregation](case.mask, case.cu_seqlens, case.group, constant=constant).to(
        loss_T.dtype
    )
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
        return policy_loss(
            case, "cispo", aggregation="token-mean", advantages=f"adv_{adv}", **clips
        )
    return policy_loss(case, "cispo", aggregation=how, advantages=f"adv_{adv}")


@rule(r"verl\.loss\.gpg\.grpo\.(?P<aggregation>.*)")
def verl_gpg_loss(case: Case, aggregation: str) -> Outputs:
    return policy_loss(case, "gpg", aggregation=aggregation)


@rule(r"trl\.loss\.rloo")
def trl_rloo_loss(case: Case) -> Outputs:
    options = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None, "ratio": "sequence"}
    return policy_loss(case, "ppo_clip", aggregation="seq-mean-token-mean", **options)


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
    return {
        f"rank{rank}.loss": (2 * loss_T * share_T)[rows_N % 2 == rank].sum().detach()
        for rank in (0, 1)
    }


@rule(
    r"openrlhf\.loss\.(?P<how>ppo|ppo_seq|clip_higher|dual|gspo|tis|icepop|seqmask)\.(?P<adv>grpo|rfpp)"
)
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


@rule(
    r"trl\.loss\.(?P<how>grpo|bnpo|dr_grpo|dapo|cispo|sapo|gspo|luspo|delta|beta|opsm|tis)\.(?P<adv>grpo|rfpp)"
)
def trl_loss(case: Case, how: str, adv: str) -> Outputs:
    options = {
        "cispo": {"aggregation": "token-mean"},
        "sapo": {"aggregation": "seq-mean-token-mean"},
        "gspo": {"aggregation": "seq-mean-token-mean"},
        "luspo": {"aggregation": "seq-mean-token-sum", "clip_low": 0.2, "clip_high": 0.2},
        "grpo": {"aggregation": "seq-mean-token-mean", "clip_high": 0.2},
        "dr_grpo": {"aggregation": "seq-mean-token-sum-norm", "clip_high": 0.2},
        "dapo": {"aggregation": "token-mean", "clip_high": 0.28},
    }.get(how, {"aggregation": "token-mean", "clip_high": 0.2})
    name = {"cispo": "cispo", "sapo": "sapo", "gspo": "gspo", "luspo": "gspo"}.get(how, "ppo_clip")
    if name == "ppo_clip":
        options["dual_clip"] = 2.0 if how == "delta" else None
    if how == "tis":
        options["weights_T"] = case.flat("is_weights")
    if how == "opsm":
        logprobs = {"logprobs_T": case.flat("log_prob"), "advantages_T": case.flat("adv_grpo")}
        old = case.flat("old_log_prob")
        options["weights_T"] = CORRECTIONS["opsm"](
            old, old, case.mask, case.cu_seqlens, delta=0.01, **logprobs
        )
    done = policy_loss(case, name, advantages=f"adv_{adv}", **options)
    return plus_kl(case, done, "k3", coef=0.04) if how == "beta" else done


def plus_kl(case: Case, done: Outputs, estimator: str, *, coef: float) -> Outputs:
    logprobs_T = case.flat("log_prob").requires_grad_()
    clean_T = (
        torch.where(case.mask, logprobs_T, 0),
        torch.where(case.mask, case.flat("ref_log_prob"), 0),
    )
    kl = AGGREGATIONS["token-mean"](KL[estimator](*clean_T), case.mask, case.cu_seqlens)
    kl.backward()
    return {
        "loss": done["loss"] + coef * kl.detach(),
        "grad_log_prob": done["grad_log_prob"] + coef * logprobs_T.grad,
    }


@rule(
    r"nemo\.loss\.(?P<how>grpo|seq|gspo|dual|cispo|reinforce|onpolicy|tis|icepop|seqmask|kl)\.(?P<adv>grpo|rfpp)"
)
def nemo_loss(case: Case, how: str, adv: str) -> Outputs:
    name = {
        "gspo": "gspo",
        "cispo": "cispo",
        "reinforce": "reinforce",
        "onpolicy": "reinforce",
    }.get(how, "ppo_clip")
    options = {"ppo_clip": {"clip_high": 0.2, "dual_clip": 3.0 if how == "dual" else None}}.get(
        name, {}
    )
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
    if how == "kl":  # the peer's k3 carries the score function, which makes its gradient that of k2
        return plus_kl(case, done, "k3+", coef=0.01)
    return {"grad_log_prob": done["grad_log_prob"]} if how == "onpolicy" else done


@rule(r"areal\.loss\.(?P<how>ppo|clip_higher|dual|gspo)\.(?P<adv>grpo|rfpp)")
def areal_loss(case: Case, how: str, adv: str) -> Outputs:
    options = {
        "clip_higher": {"clip_high": 0.28, "dual_clip": None},
        "dual": {"clip_high": 0.2, "dual_clip": 3.0},
        "gspo": {"clip_low": 0.2, "clip_high": 0.2},
    }.get(how, {"clip_high": 0.2, "dual_clip": None})
    name = "gspo" if how == "gspo" else "ppo_clip"
    return policy_loss(case, name, aggregation="token-mean", advantages=f"adv_{adv}", **options)


@rule(r"verl\.loss\.bypass\.grpo\.(?P<name>ppo_clip|reinforce)\.None\.None")
def verl_bypass(case: Case, name: str) -> Outputs:
    """The caller gives the sampler's log-probs as the old ones: the ratio already holds the whole gap."""
    options = {"clip_high": 0.2, "dual_clip": 3.0} if name == "ppo_clip" else {}
    return policy_loss(case, name, aggregation="token-mean", **options)


# --- aggregations, value loss, KL, corrections ----------------------------------------------------------------------


def aggregate(case: Case, mode: str, *, scale: Tensor | float = 1.0) -> Outputs:
    loss_T = case.flat("loss_mat").requires_grad_()
    loss = (
        AGGREGATIONS[mode](
            loss_T, case.mask, case.cu_seqlens, case.group, constant=case.kept.shape[1]
        )
        * scale
    )
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
    loss_T = clipped_value_loss(
        values_T, case.flat("values"), case.flat("value_targets"), case.mask, clip=clip_at
    )
    loss = AGGREGATIONS[aggregation](loss_T, case.mask, case.cu_seqlens)
    loss.backward()
    return {"loss": loss.detach(), "grad_vpreds": values_T.grad}


@rule(r"(openrlhf|areal)\.value_loss")
def other_value(case: Case) -> Outputs:
    done = verl_value(case, "0.2", "token-mean")
    return {"loss": done["loss"], "grad_v": done["grad_vpreds"]}


@rule(
    r"(?P<peer>verl|openrlhf|slime|nemo)\.kl(?P<form>|_sf)\.(?P<name>kl|k1|abs|mse|k2|k2\+|low_var_kl|k3|k3\+|low_var_kl\+)"
)
def kl(case: Case, peer: str, form: str, name: str) -> Outputs:
    ours = {"kl": "k1", "mse": "k2", "k2+": "k2", "low_var_kl": "k3", "low_var_kl+": "k3+"}.get(
        name, name
    )
    if form:  # with the score function the gradient of k3 is that of k2
        ours = {"k3": "k3+"}.get(ours, ours)
    limit = (
        {"value_clamp": 10.0} if ours in ("k3", "k3+") and (peer, name) != ("slime", "k3") else {}
    )
    logprobs_T = case.flat("log_prob").requires_grad_()
    value_T = KL[ours](
        *(torch.where(case.mask, x_T, 0) for x_T in (logprobs_T, case.flat("ref_log_prob"))),
        **limit,
    )
    value_T.sum().backward()
    return {"kl": value_T.detach(), "grad_logprob": logprobs_T.grad}


@rule(r"slime\.kl\.unbiased_k3")
def unbiased_kl(case: Case) -> Outputs:
    """k3 times the ratio, both with gradient: what `kl.importance_weighted` does."""
    logprobs_T = case.flat("log_prob").requires_grad_()
    new_T, old_T, ref_T = (
        torch.where(case.mask, x, 0)
        for x in (logprobs_T, *map(case.flat, ("old_log_prob", "ref_log_prob")))
    )
    value_T = _kl_loss(
        new_T, old_T, ref_T, KlTerm(estimator="k3", coef=1.0, importance_weighted=True)
    )
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
    return {
        "weighted": torch.where(case.mask, case.flat("loss_mat"), 0)
        * CORRECTIONS[name](*gap, **bounds)
    }


@rule(r"slime\.opsm\.grpo")
def slime_opsm(case: Case) -> Outputs:
    old_T = case.flat("old_log_prob")
    new = {"logprobs_T": case.flat("log_prob"), "advantages_T": case.flat("adv_grpo")}
    return {
        "mask": CORRECTIONS["opsm"](old_T, old_T, case.mask, case.cu_seqlens, delta=0.01, **new)
    }
