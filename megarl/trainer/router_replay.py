"""Replays the experts that the engine, or an earlier pass of the trainer, has chosen for each token.

    Routes of a row, on the ranks that own them --fetch: a rank's rows, its stage's layers, verified--> LayerRoutes
    LayerRoutes of a router --in place of its top-k--> experts; their probabilities come from the trainer's own logits

So the router is trained, at fixed routes. Auxiliary losses are those of its own choices, which they are to balance; the
update of its bias counts the tokens that experts really got. A token without a known route is routed by the trainer.
Unlike Megatron's RouterReplay, a global list and a queue, each router has the routes of all micro-batches of one pass.
Shapes: L tokens of a row, M of all rows of a rank, N of a micro-batch on this rank, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.layout import Layout, stage_layers
from megarl.models.shape import ModelShape
from megarl.platform.device import to_device
from megarl.trainer.microbatch import Microbatch
from megarl.trainer.parallel_groups import ProcessGroups
from megarl.types import CheckFailed, Routes, TokenBatch, route_dtype
from megarl.weights.checksum import row_checksums

BatchRoutes = tuple[Routes | None, ...]  # by row
Record = list[Routes] | None  # gets the routes of each row
RowsByRank = Sequence[
    Sequence[Sequence[int]]
]  # the rows of each micro-batch of each data-parallel rank


class LayerRoutes:
    """One router's routes in one pass, in the place of Megatron's RouterReplay. The n-th call in the forward pass, and
    where activations are recomputed, is for the n-th micro-batch: none overtakes another within a model chunk."""

    def __init__(
        self, experts: Sequence[Tensor] | None, device: torch.device, *, train: bool
    ) -> None:
        """`experts`: [N, K] of each micro-batch; None: record the router's own."""
        self._experts, self._counts_at = experts, train
        self.calls = {False: 0, True: 0}  # by whether gradients are enabled
        self.recorded: list[Tensor] = []
        self.counts = torch.zeros(
            2, dtype=torch.int64, device=device
        )  # tokens routed otherwise; with known routes

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        compute_topk: Any,
    ) -> tuple[Tensor, Tensor]:
        has_grad = torch.is_grad_enabled()
        number, self.calls[has_grad] = self.calls[has_grad], self.calls[has_grad] + 1
        values, own_NK = compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if self._experts is None:
            self.recorded.append(own_NK)
            return values, own_NK
        experts_NK = self._experts[number].long()
        is_known_N = is_known(experts_NK)
        if has_grad == self._counts_at:
            is_other_N = is_known_N & (experts_NK.sort(1).values != own_NK.sort(1).values).any(1)
            self.counts += torch.stack([is_other_N.sum(), is_known_N.sum()])
        chosen_NK = torch.where(is_known_N[:, None], experts_NK, own_NK)
        return scores.gather(1, chosen_NK), chosen_NK


def is_known(experts_XK: Tensor) -> Tensor:
    return (experts_XK != experts_XK[..., :1]).any(-1)


class RouterReplay:
    """Of the routers of this rank. Every rank calls every method, in the same order."""

    def __init__(
        self, chunks: Sequence[Any], shape: ModelShape, layout: Layout, groups: ProcessGroups
    ) -> None:
        """`chunks`: none if their routers cannot replay."""
        self._shape, self._layout, self._groups, self.is_possible = (
            shape,
            layout,
            groups,
            bool(chunks),
        )
        self._layouts = [
            Layout.of(layout.sizes, layout.world, rank) for rank in range(layout.world)
        ]
        dense, stages = shape.dense_layers, self._layouts[:: layout.world // layout.pp.size]
        ranges = [stage_layers(shape.layers, stage) for stage in stages]
        self._layers_by_stage = [
            [x - dense for part in stage for x in part if x >= dense] for stage in ranges
        ]
        layers: list[Any] = [layer for chunk in chunks for layer in chunk.module.decoder.layers]
        self._routers: list[Any] = [
            layer.mlp.router for layer in layers if hasattr(layer.mlp, "router")
        ]
        assert not chunks or len(self._routers) == len(self._layers_by_stage[layout.pp.rank])
        self._dtype, self._counts = route_dtype(shape.experts), [0, 0, 0]

    @contextmanager
    def over(
        self,
        batch: TokenBatch,
        ranks: RowsByRank,
        microbatches: Sequence[Microbatch],
        record: Record,
        *,
        train: bool,
    ) -> Iterator[None]:
        """A context for one pass over this rank's `microbatches`, the rows of which `ranks` has for all ranks; with
        `record`, nothing is replayed: it has the routes of each row afterwards."""
        if record is None and not batch.routes:
            yield
            return
        assert self.is_possible, "this trainer cannot replay routes"
        device, missing = microbatches[0].tokens.device, 0
        by_layer: list[Any] = [None] * len(self._routers)
        if record is None:
            fetched = self._fetch(batch, ranks)
            experts, unknown = zip(
                *(self._of_microbatch(each, fetched) for each in microbatches), strict=True
            )
            by_layer = [*zip(*(to_device(x_LNK, device) for x_LNK in experts), strict=True)]
            missing = sum(unknown) * len(by_layer)
        passes = [LayerRoutes(experts, device, train=train) for experts in by_layer]
        for router, layer_routes in zip(self._routers, passes, strict=True):
            router.router_replay = layer_routes
        try:
            yield
        finally:
            for router in self._routers:
                router.router_replay = None
        allowed = [
            {train: len(microbatches), (not train): calls}
            for calls in (0, len(microbatches) * train)
        ]
        assert all(each.calls in allowed for each in passes), (
            "a router missed a micro-batch, or its top-k is fused"
        )
        if record is not None:
            record[:] = self._as_routes(batch, microbatches, passes)
        counts = sum(
            (each.counts for each in passes), torch.zeros(2, dtype=torch.int64, device=device)
        )
        self._counts = [*counts.tolist(), missing]

    def metrics(self) -> dict[str, float]:
        """Returns shares of the (token, layer) pairs of the last pass: those that the trainer would have routed
        otherwise, and those without a known route."""
        counts = torch.tensor(self._counts, dtype=torch.int64)
        dist.all_reduce(counts)
        differing, known, missing = counts.tolist()
        return {
            "routing/differs": differing / max(known, 1),
            "routing/missing": missing / max(known + missing, 1),
        }

    def _fetch(self, batch: TokenBatch, ranks: RowsByRank) -> dict[int, Tensor]:
        """Returns [layers of this stage, L, K] of each row of this rank, on the CPU, from the ranks that own them;
        CheckFailed on every rank if a checksum differs."""
        layout, rows_by_rank = (
            self._layout,
            [[row for rows in parts for row in rows] for parts in ranks],
        )
        lengths, topk, dtype = (
            batch.cu_seqlens.diff().tolist(),
            self._shape.experts_per_token,
            self._dtype,
        )
        here = self._layers_by_stage[layout.pp.rank]
        found = {
            row: torch.zeros(len(here), lengths[row], topk, dtype=dtype)
            for row in rows_by_rank[layout.dp.rank]
        }

        def num_bytes(parts: Sequence[tuple[int, list[int]]]) -> int:
            return sum(len(layers) * lengths[row] for row, layers in parts) * topk * dtype.itemsize

        incoming = [self._parts(batch, rows_by_rank, owner.rank, layout) for owner in self._layouts]
        outgoing = [
            self._parts(batch, rows_by_rank, layout.rank, receiver) for receiver in self._layouts
        ]
        owned = [(batch.routes[row], layers) for parts in outgoing for row, layers in parts]
        sent = [
            x.experts[layers].flatten().view(torch.uint8)
            for x, layers in owned
            if x and x.experts is not None
        ]
        receive_bytes, send_bytes = (
            [num_bytes(parts) for parts in each] for each in (incoming, outgoing)
        )
        message = torch.empty(sum(receive_bytes), dtype=torch.uint8)
        dist.all_to_all_single(message, torch.cat([message[:0], *sent]), receive_bytes, send_bytes)
        parts = [part for each in incoming for part in each]
        wrong = torch.zeros((), dtype=torch.int64)
        for part, received in zip(
            parts, message.split([num_bytes([part]) for part in parts]), strict=True
        ):
            (row, layers), routes = part, batch.routes[part[0]]
            assert routes is not None
            experts = received.view(dtype).view(len(layers), lengths[row], topk)
            wrong += (
                row_checksums(experts) != torch.tensor([routes.checksums[x] for x in layers])
            ).sum()
            found[row][[here.index(layer) for layer in layers]] = experts
        dist.all_reduce(wrong)
        if wrong:
            raise CheckFailed(
                f"the routes of {int(wrong)} (row, layer) pairs changed on their way to the trainer"
            )
        return found

    def _parts(
        self, batch: TokenBatch, rows_by_rank: Sequence[Sequence[int]], owner: int, receiver: Layout
    ) -> list[tuple[int, list[int]]]:
        """Returns what `owner` sends to a rank: rows, and the layers of each."""
        parts, here = [], self._layers_by_stage[receiver.pp.rank]
        for row in rows_by_rank[receiver.dp.rank]:
            routes = batch.routes[row]
            if (
                routes
                and owner in routes.owners
                and (layers := [x for x in here if routes.owners[x] == owner])
            ):
                parts.append((row, layers))
        return parts

    def _of_microbatch(
        self, microbatch: Microbatch, fetched: dict[int, Tensor]
    ) -> tuple[Tensor, int]:
        """Returns [layers, N, K] of this rank's tokens, and how many of them that have a label have no known route."""
        layers, topk = len(self._routers), self._shape.experts_per_token
        rows = [fetched[row] for row in microbatch.rows.rows]
        experts_LMK = torch.cat([torch.zeros(layers, 0, topk, dtype=self._dtype), *rows], 1)
        source_N = self._source(microbatch)
        is_real_N = source_N >= 0
        experts_LNK = torch.zeros(layers, len(source_N), topk, dtype=self._dtype)
        experts_LNK[:, is_real_N] = experts_LMK[:, source_N[is_real_N]]
        ends = torch.tensor(microbatch.lengths, dtype=torch.int64).cumsum(0) - 1
        counted_N = is_real_N & ~torch.isin(source_N, ends)
        return experts_LNK, int((counted_N & ~is_known(experts_LNK).all(0)).sum())

    def _source(self, microbatch: Microbatch) -> Tensor:
        """Returns [N] int64: the positions, among those of the rows, that this rank routes; -1 for padding."""
        return microbatch.source.chunk(self._layout.tp.size)[self._layout.tp.rank]

    def _as_routes(
        self, batch: TokenBatch, microbatches: Sequence[Microbatch], passes: Sequence[LayerRoutes]
    ) -> list[Routes]:
        """Returns the routes of each row, owned by the first tensor and context rank that has it on each stage."""
        layout, device = self._layout, microbatches[0].tokens.device
        lengths = batch.cu_seqlens.diff().tolist()
        rows = [row for microbatch in microbatches for row in microbatch.rows.rows]
        total = sum(lengths[row] for row in rows)
        experts_LMK = torch.zeros(
            len(passes), total, self._shape.experts_per_token, dtype=torch.int32, device=device
        )
        start = 0
        for number, microbatch in enumerate(microbatches):
            source_N = self._source(microbatch)
            is_real_N = source_N >= 0
            position_N, is_real_N = (
                to_device(start + source_N[is_real_N], device),
                to_device(is_real_N, device),
            )
            for layer, layer_routes in enumerate(passes):
                experts_LMK[layer, position_N] = layer_routes.recorded[number][is_real_N].int()
            start += sum(microbatch.lengths)
        for size, group in (
            (layout.tp.size, self._groups.tensor),
            (layout.cp.size, self._groups.context),
        ):
            if size > 1:
                dist.all_reduce(experts_LMK, group=group)
        num_layers, here = (
            self._shape.layers - self._shape.dense_layers,
            self._layers_by_stage[layout.pp.rank],
        )
        table = torch.zeros(2, batch.num_rows, num_layers, dtype=torch.int64)  # owners, checksums
        kept: dict[int, Tensor] = {}
        if layout.tp.first and layout.cp.first:
            parts = experts_LMK.to(self._dtype).cpu().split([lengths[row] for row in rows], 1)
            for row, part in zip(rows, parts, strict=True):
                kept[row] = torch.zeros(num_layers, *part.shape[1:], dtype=self._dtype)
                kept[row][here] = part
                table[0, row, here], table[1, row, here] = layout.rank, row_checksums(part)
        dist.all_reduce(table)
        owners, checksums = table.tolist()
        return [
            Routes(tuple(owners[n]), tuple(checksums[n]), kept.get(n))
            for n in range(batch.num_rows)
        ]
