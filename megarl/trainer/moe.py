"""Router auxiliary losses, weighted like the rows of the main loss, and balancing by a router bias.

    Microbatch -> RouterRows --BalancedRouter.routing--> gradient of the logits
                                                         tokens of each expert --> bias

For a row of T tokens, prompt included, E experts of which each token takes K:

    balance  sum_e f_e P_e, which is 1 where balanced
             f_e = E / (K T) * number of tokens with e among their K best scores
             P_e = mean of the scores of e, which sum to 1 over the experts
    z        mean of logsumexp(logits)^2

Balance follows DeepSeek-V3 (arXiv 2412.19437, eq. 17-20): Switch's (arXiv 2101.03961, eq. 4-6) per
row. z is ST-MoE's (arXiv 2202.08906, eq. 5). A row's weight is the sum of its tokens' weights in
the main loss, so sums over micro-batches and ranks do not depend on how rows are distributed;
padding does not count. Ranks exchange counts only: f has no gradient, and P is a sum over tokens
whose gradients are added up in the router's weight.

Shapes: N local tokens, R rows of a micro-batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor
from torch.nn import Module, ModuleList

from megarl.config.schema import Moe
from megarl.layout import Axis
from megarl.models.shape import ModelShape
from megarl.platform.device import to_device
from megarl.trainer.context_parallel import cu_seqlens_of
from megarl.trainer.microbatch import Microbatch


@dataclass(frozen=True)
class RouterRows:
    """Which row of a micro-batch each of this rank's tokens belongs to."""

    row_N: Tensor  # [N] int64, R for padding
    length_R: Tensor  # [R] fp32, tokens of each whole row
    weight_R: Tensor  # [R] fp32, each row's share of the loss

    @classmethod
    def of(
        cls, microbatch: Microbatch, weights_T: Tensor, tensor: Axis, device: torch.device
    ) -> "RouterRows":
        """Finds the row of each local token; `weights_T` covers the whole batch."""
        cu_seqlens = cu_seqlens_of(microbatch.lengths)
        source_N = microbatch.local_source(tensor)
        row_N = torch.bucketize(source_N, cu_seqlens[1:], right=True)
        row_N = torch.where(source_N < 0, len(microbatch.lengths), row_N)
        weights_M = weights_T[microbatch.rows.index]
        until = torch.cat([weights_T.new_zeros(1), weights_M.cumsum(0)])[cu_seqlens]
        return cls(
            to_device(row_N, device),
            to_device(cu_seqlens.diff().float(), device),
            to_device(until.diff().float(), device),
        )

    def as_one(self) -> "RouterRows":
        """Returns the whole micro-batch as a single row."""
        is_padding_N = self.row_N == self.length_R.numel()
        return RouterRows(is_padding_N.long(), self.length_R.sum()[None], self.weight_R.sum()[None])

    def sums(self, x_NE: Tensor) -> Tensor:
        """Returns [R, E]: sums over the tokens of each row."""
        whole = x_NE.new_zeros(self.length_R.numel() + 1, *x_NE.shape[1:])
        return whole.index_add(0, self.row_N, x_NE)[:-1]


def scores_of(logits_NE: Tensor, kind: str) -> Tensor:
    """Returns [N, E] fp32 that sum to 1 over experts: softmax, or sigmoids divided by their sum."""
    if kind == "softmax":
        return logits_NE.float().softmax(-1)
    sigmoid_NE = logits_NE.float().sigmoid()
    return sigmoid_NE / (sigmoid_NE.sum(-1, keepdim=True) + 1e-20)


def balance(
    scores_NE: Tensor, rows: RouterRows, *, topk: int, group: dist.ProcessGroup | None
) -> Tensor:
    """Returns [R]: this rank's contribution to each row's balance loss.

    The ranks of `group` have the other tokens of these rows, and must call it too.
    """
    best_NE = torch.zeros_like(scores_NE).scatter(1, scores_NE.topk(topk).indices, 1.0).detach()
    count_RE = rows.sums(best_NE)
    if group is not None and group.size() > 1:
        dist.all_reduce(count_RE, group=group)
    length_R1 = rows.length_R[:, None]
    f_RE = count_RE * scores_NE.shape[1] / (topk * length_R1)
    return (f_RE * rows.sums(scores_NE) / length_R1).sum(1)


def mean_square_lse(logits_NE: Tensor, rows: RouterRows) -> Tensor:
    """Returns [R]: this rank's contribution to each row's z loss."""
    return rows.sums(logits_NE.float().logsumexp(-1).square()) / rows.length_R


class BalancedRouter(TopKRouter):
    """Megatron's router with the auxiliary losses of the current update.

    The n-th call with gradients enabled is for the n-th micro-batch. It happens in the forward pass
    or, with recomputation, in the backward pass.
    """

    losses: "RouterLosses | None" = None
    calls = 0

    def routing(self, logits: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.losses is None or not torch.is_grad_enabled():
            return super().routing(logits, *args, **kwargs)
        rows = self.losses.rows[self.calls]
        self.calls += 1
        if rows.length_R.numel():
            loss = self.losses.loss(self, logits.flatten(0, -2), rows)
            logits = MoEAuxLossAutoScaler.apply(logits, loss)
        probs, chosen_NE = super().routing(logits, *args, **kwargs)
        self.losses.counts[self] += rows.sums(chosen_NE.float()).sum(0)
        return probs, chosen_NE


def routers_of(chunks: Sequence[Module]) -> list[BalancedRouter]:
    """Returns the routers of this rank's layers, in layer order."""
    return [x for x in ModuleList(chunks).modules() if isinstance(x, BalancedRouter)]


@dataclass
class RouterLosses:
    """Auxiliary losses of this rank's routers in one update: `begin`, its passes, `finish`."""

    chunks: Sequence[Module]
    moe: Moe
    shape: ModelShape
    tensor: Axis

    def __post_init__(self) -> None:
        self._routers = routers_of(self.chunks)
        self.counts = {}  # router -> [E]: tokens of each expert
        # layers with experts, on all stages
        self._num_layers = sum(kind.has_experts for kind in self.shape.layer_kinds)

    def begin(
        self, microbatches: Sequence[Microbatch], weights_T: Tensor, device: torch.device
    ) -> None:
        self.rows = [RouterRows.of(x, weights_T, self.tensor, device) for x in microbatches]
        zero = torch.zeros((), dtype=torch.float64, device=device)
        self._sums = {"moe/aux_loss": zero, "moe/z_loss": zero.clone()}
        for router in self._routers:
            router.losses = self
            router.calls = 0
            self.counts[router] = torch.zeros(self.shape.experts, device=device)

    def loss(self, router: BalancedRouter, logits_NE: Tensor, rows: RouterRows) -> Tensor:
        """Returns 0-d: the weighted losses of this rank's tokens in one layer and micro-batch."""
        moe = self.moe
        balance_rows = rows.as_one() if moe.aux_loss_type == "megatron" else rows
        scores_NE = scores_of(logits_NE, router.score_function)
        balance_R = balance(scores_NE, balance_rows, topk=router.topk, group=router.tp_cp_group)
        aux = (balance_rows.weight_R * balance_R).sum()
        z = (rows.weight_R * mean_square_lse(logits_NE, rows)).sum()
        self._sums["moe/aux_loss"] += aux.detach() / self._num_layers
        self._sums["moe/z_loss"] += z.detach() / self._num_layers
        return moe.aux_loss * aux + moe.z_loss * z

    @torch.no_grad()
    def finish(self, *, step: bool) -> dict[str, Tensor]:
        """Returns this rank's part of each loss, averaged over layers, without its coefficient.

        With `step`, updates biases: experts with more tokens than the mean become less likely,
        others more likely (DeepSeek-V3).
        """
        assert all(router.calls == len(self.rows) for router in self._routers), (
            "a router missed a micro-batch"
        )
        for router in self._routers:
            router.losses = None
            if step and self.moe.bias_update_rate:
                tokens_E = self.counts[router]
                dist.all_reduce(tokens_E, group=router.tp_dp_cp_group)
                bias: Any = router.expert_bias  # [E] fp32
                bias += self.moe.bias_update_rate * (tokens_E.mean() - tokens_E).sign()
        return self._sums


def forget_last_batch(chunks: Sequence[Module]) -> None:
    """Drops the last batch's tensors, which Megatron's dispatchers keep.

    Their autograd graph refers to the parameters in a cycle that the garbage collector cannot see,
    so the model would never be freed.
    """
    for module in ModuleList(chunks).modules():
        if hasattr(module, "token_dispatcher"):
            state = vars(module.token_dispatcher)
            state.update({name: None for name, value in state.items() if torch.is_tensor(value)})
