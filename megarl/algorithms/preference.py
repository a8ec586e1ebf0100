"""Losses over pairs of responses: Bradley-Terry for reward models, DPO and its variants for
policies.

Rows of one prompt share a micro-batch, so each micro-batch has whole pairs. A pair's loss is at the
last position of its better row, where `pair_weights` has the pair's share of its update's loss.
N = rows of a batch, T = positions, P = pairs; R, M, Q = the same of a micro-batch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from megarl.algorithms.objective import Objective, planned_rows
from megarl.algorithms.rows import Groups, Rows, at_least_fp32
from megarl.config.schema import Dpo
from megarl.platform.device import to_device
from megarl.types import (
    Loss,
    MicrobatchPlan,
    MicrobatchRows,
    PreferenceBatch,
    ScoredBatch,
    TokenBatch,
    TokenLosses,
    TokenOutputs,
)


def bradley_terry(
    scores_N: Tensor, pairs: Tensor, margins: Tensor, *, centre: float = 0.0
) -> Tensor:
    """Returns [P]: -log sigmoid(better - worse - margin) + centre x (better + worse)^2.

    Margins are as in Llama 2 (arXiv 2307.09288, section 3.2.2); `centre` keeps scores near 0
    (arXiv 2312.09244).
    """
    better_P, worse_P = scores_N.to(at_least_fp32(scores_N.dtype))[pairs].unbind(1)
    loss_P = -logsigmoid(better_P - worse_P - margins)
    return loss_P + centre * (better_P + worse_P).square() if centre else loss_P


DPO_LOSSES: dict[
    str, Callable[[Tensor, float, float], Tensor]
] = {  # log-ratio [P], beta, label smoothing -> loss [P]
    # arXiv 2305.18290, equation 7; with label smoothing, its authors' conservative DPO
    "sigmoid": lambda h_P, beta, flipped: (
        -(1 - flipped) * logsigmoid(beta * h_P) - flipped * logsigmoid(-beta * h_P)
    ),
    # unbiased if this share of labels is flipped: arXiv 2403.00409, section 3.2
    "robust": lambda h_P, beta, flipped: (
        (flipped * logsigmoid(-beta * h_P) - (1 - flipped) * logsigmoid(beta * h_P))
        / (1 - 2 * flipped)
    ),
    "hinge": lambda h_P, beta, _: (1 - beta * h_P).relu(),  # arXiv 2309.06657, section 3
    "ipo": lambda h_P, beta, _: (h_P - 1 / (2 * beta)).square(),  # arXiv 2310.12036, equation 17
}


def dpo(policy_N: Tensor, reference_N: Tensor, pairs: Tensor, options: Dpo) -> Tensor:
    """Returns [P]: the loss of each pair, from log-probs of responses (sums or means over tokens).

    A pair's log-ratio is policy - reference of the better response, minus that of the worse one.
    """
    better_P, worse_P = (policy_N - reference_N)[pairs].unbind(1)
    return DPO_LOSSES[options.loss](better_P - worse_P, options.beta, options.label_smoothing)


def response_logprobs(
    logprobs_T: Tensor, mask_T: Tensor, cu_seqlens: Tensor, *, average: bool = False
) -> Tensor:
    """Returns [N] fp64: the log-prob of each response, or with `average` its mean over tokens."""
    rows = Rows.of(mask_T, cu_seqlens)
    return (rows.mean if average else rows.sum)(logprobs_T.double())


def dpo_losses(
    batch: PreferenceBatch,
    reference_N: Tensor | None,
    options: Dpo,
    outputs: TokenOutputs,
    rows: MicrobatchRows,
) -> TokenLosses:
    """Computes the DPO loss of each pair; a types.Loss, once its first three arguments are bound.

    Rewards to report are beta x (policy - reference); sums are over pairs.

    `reference_N` [N] fp64: `response_logprobs` under the reference; None: the reference is the
    policy in this forward pass.
    """
    assert outputs.logprobs_T is not None
    pairs, _ = local_pairs(batch, rows)
    policy_R = response_logprobs(
        outputs.logprobs_T, rows.mask, rows.cu_seqlens, average=options.averages
    )
    reference_R = (
        policy_R.detach()
        if reference_N is None
        else to_device(reference_N[[*rows.rows]], policy_R.device)
    )
    rewards_R = options.beta * (policy_R - reference_R).detach()
    rewards_Q2 = rewards_R[pairs]
    logprobs_Q2 = policy_R.detach()[pairs]
    values = {
        "rewards/margin": rewards_Q2[:, 0] - rewards_Q2[:, 1],
        "rewards/accuracy": ranked_right(rewards_R, pairs),
        "logprobs/chosen": logprobs_Q2[:, 0],
        "logprobs/rejected": logprobs_Q2[:, 1],
    }
    if outputs.entropy_T is not None:
        entropy_R = response_logprobs(
            outputs.entropy_T.detach(), rows.mask, rows.cu_seqlens, average=True
        )
        values["entropy"] = entropy_R[pairs].mean(1)
    return pair_losses(dpo(policy_R, reference_R, pairs, options), values, pairs, rows)


def local_pairs(batch: PreferenceBatch, rows: MicrobatchRows) -> tuple[Tensor, Tensor]:
    """Returns the pairs of a micro-batch, [Q, 2] as indices of its rows (0..R - 1), and their
    margins [Q], on the device.
    """
    index_R = torch.tensor(rows.rows, dtype=torch.int64)
    places_N = torch.full((batch.num_rows,), -1)
    places_N[index_R] = torch.arange(len(rows.rows))
    places = places_N[batch.pairs]
    is_here_P = places[:, 0] >= 0
    assert torch.equal(is_here_P, places[:, 1] >= 0), "a pair is split between micro-batches"
    return to_device(places[is_here_P], rows.mask.device), to_device(
        batch.margins[is_here_P], rows.mask.device
    )


def ranked_right(scores_N: Tensor, pairs: Tensor) -> Tensor:
    """Returns [P]: 1 where the better row has the higher score, 0.5 where both have the same."""
    better_P, worse_P = scores_N[pairs].unbind(1)
    return ((better_P - worse_P).sign() + 1) / 2


def pair_losses(
    loss_Q: Tensor, values: Mapping[str, Tensor], pairs: Tensor, rows: MicrobatchRows
) -> TokenLosses:
    """Returns the loss of each pair at the last position of its better row, 0 elsewhere, and sums
    of `values` over pairs.
    """
    last_Q = (rows.cu_seqlens[1:] - 1)[pairs[:, 0]]
    loss_M = loss_Q.new_zeros(rows.mask.numel()).index_add(0, last_Q, loss_Q)
    return TokenLosses(
        loss_M,
        {name: value_Q.sum() for name, value_Q in values.items()},
        torch.tensor(len(pairs), device=loss_Q.device),
    )


def pair_weights(
    batch: PreferenceBatch, plan: MicrobatchPlan, *, by_prompt: bool = False
) -> Tensor:
    """Returns [T] fp64: each pair's share of the loss of its update, at every position of its rows.

    All pairs of an update count equally; with `by_prompt`, all prompts do, as in arXiv 2203.02155,
    equation 1.
    """
    weights_N = torch.zeros(batch.num_rows, dtype=torch.float64)
    better_P = batch.pairs[:, 0]
    num_groups = int(batch.group.max()) + 1 if batch.num_rows else 0
    for update in plan.updates():
        is_planned_N = planned_rows(update, batch.num_rows)
        count_G = batch.group[better_P[is_planned_N[better_P]]].bincount(minlength=num_groups)
        divisor_G = count_G * (count_G > 0).sum() if by_prompt else count_G.sum().expand(num_groups)
        weights_N += is_planned_N / divisor_G.clamp(min=1).double()[batch.group]
    return weights_N.repeat_interleave(batch.lengths_N)


def best_and_worst(batch: ScoredBatch) -> list[int]:
    """Returns the rows of each prompt's best and worst response; none if all its rewards are equal.

    Of equal responses, it takes the first.
    """
    is_trained_N = Rows.of(batch.mask, batch.cu_seqlens).num_tokens_N > 0
    rewards = Groups.of(batch.group, is_trained_N).centre(batch.rewards).tolist()
    group = batch.group.tolist()
    chosen = []
    trained = is_trained_N.nonzero().flatten().tolist()
    for _, members in groupby(trained, key=group.__getitem__):
        rows = list(members)
        best = max(rows, key=rewards.__getitem__)
        worst = min(rows, key=rewards.__getitem__)
        chosen += [best, worst] if rewards[best] > rewards[worst] else []
    return chosen


@dataclass(frozen=True)
class DpoObjective(Objective):
    """DPO on sampled responses: each prompt has two rows, the better one first
    (`best_and_worst`).
    """

    options: Dpo = field(default_factory=Dpo)
    couples_rows = True

    @property
    def needs_reference(self) -> bool:
        return self.options.reference == "initial"

    def weights(self, batch: ScoredBatch, plan: MicrobatchPlan) -> Tensor:
        return pair_weights(_pairs_of(batch), plan)

    def loss(self, batch: ScoredBatch, select_T: Tensor | None = None) -> Loss:
        """Returns the DPO loss of the batch's pairs.

        If the reference is the policy of the previous round, its log-probs are those before the
        first update.
        """
        logprobs_T = batch.ref_logprobs if self.needs_reference else batch.old_logprobs
        reference_N = None
        if logprobs_T is not None:
            reference_N = response_logprobs(
                logprobs_T, batch.mask, batch.cu_seqlens, average=self.options.averages
            )
        return partial(dpo_losses, _pairs_of(batch), reference_N, self.options)


def _pairs_of(batch: ScoredBatch) -> PreferenceBatch:
    pairs = torch.arange(batch.num_rows).reshape(-1, 2)
    assert torch.equal(batch.group[pairs[:, 0]], batch.group[pairs[:, 1]]), (
        "two rows of each prompt"
    )
    group = torch.arange(len(pairs)).repeat_interleave(2)
    return PreferenceBatch(
        **batch.fields_of(TokenBatch), group=group, pairs=pairs, margins=torch.zeros(len(pairs))
    )
