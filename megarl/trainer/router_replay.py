"""Replays the experts that the engine, or an earlier pass of the trainer, chose.

    routes of a row, on the ranks that own them
        --fetch: this rank's rows, its stage's layers-->  LayerRoutes of each router
        --in place of the router's top-k-->               experts

Experts' probabilities come from the trainer's own logits, so the router is trained at fixed routes.
Auxiliary losses use the router's own choices, which they have to balance; the update of its bias
counts the tokens that experts actually received. The trainer routes tokens without a known route
itself. Unlike Megatron's RouterReplay, which is a global list and a queue, each router has the
routes of all micro-batches of one pass.

Shapes: L tokens of a row, M of all rows of a rank, N of a micro-batch on this rank, K experts of a
token.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.layout import Layout, stage_layers
from megarl.models.shape import ModelShape
from megarl.platform.device import to_device
from megarl.trainer.context_parallel import cu_seqlens_of
from megarl.trainer.microbatch import Microbatch
from megarl.trainer.moe import routers_of
from megarl.trainer.parallel_groups import ProcessGroups
from megarl.types import CheckFailed, Choices, Routes, TokenBatch, route_dtype
from megarl.weights.sync.checksum import row_checksums
from megarl.weights.sync.transports.values import carry

carry(Routes)  # ranks send them to each other
# rows by data-parallel rank and micro-batch
RowsByRank = Sequence[Sequence[Sequence[int]]]
RowLayers = tuple[int, Routes, list[int]]  # a row, its routes, and some of its layers


@dataclass
class LayerRoutes:
    """One router's routes in one pass; replaces Megatron's RouterReplay.

    The n-th call in the forward pass is for the n-th micro-batch, and so is the n-th call of the
    recomputation, because a model chunk processes micro-batches in order.
    """

    experts: Sequence[Tensor] | None  # [N, K] of each micro-batch; None: record the router's own
    # [2], summed over layers: tokens that the trainer would route differently, and known routes
    counts: Tensor
    train: bool
    calls: Counter[bool] = field(default_factory=Counter)  # torch.is_grad_enabled() -> calls
    recorded: list[Tensor] = field(default_factory=list)

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        compute_topk: Any,
    ) -> tuple[Tensor, Tensor]:
        has_grad = torch.is_grad_enabled()
        number = self.calls[has_grad]
        self.calls[has_grad] += 1
        values, own_NK = compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if self.experts is None:
            self.recorded.append(own_NK)
            return values, own_NK
        experts_NK = self.experts[number].long()
        is_known_N = is_known(experts_NK)
        if has_grad == self.train:
            is_other_N = is_known_N & (experts_NK.sort(1).values != own_NK.sort(1).values).any(1)
            self.counts += torch.stack([is_other_N.sum(), is_known_N.sum()])
        chosen_NK = torch.where(is_known_N[:, None], experts_NK, own_NK)
        return scores.gather(1, chosen_NK), chosen_NK


def is_known(experts_XK: Tensor) -> Tensor:
    return (experts_XK != experts_XK[..., :1]).any(-1)


@dataclass
class Pass:
    """The results of one pass over micro-batches, filled in at its end."""

    choices: Choices | None = None  # recorded choices by row; None: not recorded
    # if routes were replayed: the shares of (token, layer) pairs that the trainer would have routed
    # differently, and of pairs without a known route
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass
class RouterReplay:
    """Replays or records the routes of this rank's routers.

    Every rank calls every method, in the same order.
    """

    chunks: Sequence[Any]  # empty if the routers cannot replay
    shape: ModelShape
    layout: Layout
    groups: ProcessGroups
    is_policy: bool  # False: another model, which ignores a batch's choices

    def __post_init__(self) -> None:
        layout = self.layout
        self._layouts = [
            Layout.of(layout.sizes, layout.world, rank) for rank in range(layout.world)
        ]
        stages = self._layouts[:: layout.world // layout.pp.size]
        self._layers_by_stage = [_layers_with_experts(self.shape, stage) for stage in stages]
        self._layers = self._layers_by_stage[layout.pp.rank]
        self._routers: list[Any] = routers_of(self.chunks)
        assert not self.chunks or len(self._routers) == len(self._layers)
        self._dtype = route_dtype(self.shape.experts)

    @contextmanager
    def over(
        self,
        batch: TokenBatch,
        ranks: RowsByRank,
        microbatches: Sequence[Microbatch],
        *,
        train: bool,
        record: bool,
    ) -> Iterator[Pass]:
        """Context of one pass: replays `batch.choices` or, with `record`, records routes instead.

        `microbatches` are this rank's; `ranks` has the rows of all ranks' micro-batches. Yields a
        Pass that is filled in on exit.
        """
        found = Pass()
        if not self.is_policy or not (record or batch.choices):
            yield found
            return
        assert self.chunks, "this trainer cannot replay routes"
        device = microbatches[0].tokens.device
        missing = 0
        by_layer = [None] * len(self._routers)
        if not record:
            fetched = self._fetch(batch, ranks)
            by_microbatch = []
            for microbatch in microbatches:
                experts_LNK, unknown = self._of_microbatch(microbatch, fetched)
                by_microbatch.append(to_device(experts_LNK, device))
                missing += unknown * len(by_layer)
            by_layer = [*zip(*by_microbatch, strict=True)]
        counts = torch.zeros(2, dtype=torch.int64, device=device)
        passes = [LayerRoutes(experts, counts, train) for experts in by_layer]
        for router, layer_routes in zip(self._routers, passes, strict=True):
            router.router_replay = layer_routes
        try:
            yield found
        finally:
            for router in self._routers:
                router.router_replay = None
        count = len(microbatches)
        assert all(
            each.calls[train] == count and each.calls[not train] in (0, count * train)
            for each in passes
        ), "a router missed a micro-batch, or its top-k is fused"
        if record:
            found.choices = self._as_routes(batch, microbatches, passes)
            return
        totals = torch.tensor([*counts.tolist(), missing])
        dist.all_reduce(totals)
        differing, known, unknown = totals.tolist()
        found.metrics = {
            "routing/differs": differing / max(known, 1),
            "routing/missing": unknown / max(known + unknown, 1),
        }

    def _fetch(self, batch: TokenBatch, ranks: RowsByRank) -> dict[int, Tensor]:
        """Fetches this rank's routes from their owners: {row: [stage's layers, L, K]}, on the CPU.

        Raises CheckFailed on every rank if a checksum differs.
        """
        layout = self.layout
        lengths = batch.lengths_N.tolist()
        topk = self.shape.experts_per_token
        dtype = self._dtype

        def num_bytes(part: RowLayers) -> int:
            row, _, layers = part
            return len(layers) * lengths[row] * topk * dtype.itemsize

        incoming = [self._parts(batch, ranks, owner.rank, layout) for owner in self._layouts]
        outgoing = [self._parts(batch, ranks, layout.rank, rank) for rank in self._layouts]
        sent = [torch.empty(0, dtype=torch.uint8)]
        for _, routes, layers in chain.from_iterable(outgoing):
            if routes.experts is not None:
                sent.append(routes.experts[layers].flatten().view(torch.uint8))
        receive_bytes = [sum(map(num_bytes, parts)) for parts in incoming]
        send_bytes = [sum(map(num_bytes, parts)) for parts in outgoing]
        message = torch.empty(sum(receive_bytes), dtype=torch.uint8)
        dist.all_to_all_single(message, torch.cat(sent), receive_bytes, send_bytes)
        fetched = {
            row: torch.zeros(len(self._layers), lengths[row], topk, dtype=dtype)
            for row in chain.from_iterable(ranks[layout.dp.rank])
        }
        parts = [*chain.from_iterable(incoming)]
        received = message.split([*map(num_bytes, parts)])
        wrong = torch.zeros((), dtype=torch.int64)
        for (row, routes, layers), data in zip(parts, received, strict=True):
            experts = data.view(dtype).view(len(layers), lengths[row], topk)
            checksums = torch.tensor([routes.checksums[layer] for layer in layers])
            wrong += (row_checksums(experts) != checksums).sum()
            fetched[row][[self._layers.index(layer) for layer in layers]] = experts
        dist.all_reduce(wrong)
        if wrong:
            raise CheckFailed(
                f"the routes of {int(wrong)} (row, layer) pairs changed on their way to the trainer"
            )
        return fetched

    def _parts(
        self, batch: TokenBatch, ranks: RowsByRank, owner: int, receiver: Layout
    ) -> list[RowLayers]:
        """Returns the rows and layers whose routes `owner` sends to the rank `receiver`."""
        parts = []
        for row in chain.from_iterable(ranks[receiver.dp.rank]):
            routes = batch.choices[row]
            if not routes or owner not in routes.owners:
                continue
            stage = self._layers_by_stage[receiver.pp.rank]
            layers = [layer for layer in stage if routes.owners[layer] == owner]
            if layers:
                parts.append((row, routes, layers))
        return parts

    def _of_microbatch(
        self, microbatch: Microbatch, fetched: dict[int, Tensor]
    ) -> tuple[Tensor, int]:
        """Returns local routes [layers, N, K], and how many tokens have a label but no route."""
        source_N = microbatch.local_source(self.layout.tp)
        is_real_N = source_N >= 0
        experts_LNK = torch.zeros(
            len(self._routers), len(source_N), self.shape.experts_per_token, dtype=self._dtype
        )
        rows = [fetched[row] for row in microbatch.rows.rows]
        experts_LMK = torch.cat([experts_LNK[:, :0], *rows], 1)
        experts_LNK[:, is_real_N] = experts_LMK[:, source_N[is_real_N]]
        ends = cu_seqlens_of(microbatch.lengths)[1:] - 1
        counted_N = is_real_N & ~torch.isin(source_N, ends)
        return experts_LNK, int((counted_N & ~is_known(experts_LNK).all(0)).sum())

    def _as_routes(
        self,
        batch: TokenBatch,
        microbatches: Sequence[Microbatch],
        passes: Sequence[LayerRoutes],
    ) -> Choices:
        """Returns the recorded routes by row; a stage's first tensor and context rank owns them."""
        layout = self.layout
        device = microbatches[0].tokens.device
        rows = [*chain.from_iterable(microbatch.rows.rows for microbatch in microbatches)]
        lengths = [*chain.from_iterable(microbatch.lengths for microbatch in microbatches)]
        experts_LMK = torch.zeros(
            len(passes),
            sum(lengths),
            self.shape.experts_per_token,
            dtype=torch.int32,
            device=device,
        )
        start = 0
        for number, microbatch in enumerate(microbatches):
            source_N = microbatch.local_source(layout.tp)
            is_real_N = source_N >= 0
            position_N = to_device(start + source_N[is_real_N], device)
            is_real_N = to_device(is_real_N, device)
            for layer, layer_routes in enumerate(passes):
                experts_LMK[layer, position_N] = layer_routes.recorded[number][is_real_N].int()
            start += sum(microbatch.lengths)
        for group in (self.groups.tensor, self.groups.context):
            if group.size() > 1:
                dist.all_reduce(experts_LMK, group=group)
        num_layers = sum(map(len, self._layers_by_stage))
        table = torch.zeros(2, batch.num_rows, num_layers, dtype=torch.int64)
        owners, checksums = table
        local = {}
        if layout.tp.first and layout.cp.first:
            parts = experts_LMK.to(self._dtype).cpu().split(lengths, 1)
            for row, part in zip(rows, parts, strict=True):
                local[row] = part.new_zeros(num_layers, *part.shape[1:])
                local[row][self._layers] = part
                owners[row, self._layers] = layout.rank
                checksums[row, self._layers] = row_checksums(part)
        dist.all_reduce(table)
        return tuple(
            Routes(tuple(owners[row].tolist()), tuple(checksums[row].tolist()), local.get(row))
            for row in range(batch.num_rows)
        )


def _layers_with_experts(shape: ModelShape, stage: Layout) -> list[int]:
    """Returns a stage's layers with experts, numbered among all layers with experts."""
    has_experts = [kind.has_experts for kind in shape.layer_kinds]
    layers = chain.from_iterable(stage_layers(shape.layers, stage))
    return [sum(has_experts[:layer]) for layer in layers if has_experts[layer]]
