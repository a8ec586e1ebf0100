"""The plan of a large sync from tables alone: no boxes of ranks, no engine, no weights, minutes of Python avoided.

    table x table --bundles--> what one layer moves between coordinates --repeated over layers and experts--> rows

All layers of a kind have the same geometry, so it is cut once; numpy repeats it. A row is what one GPU sends to
another for one unit (a tensor of a layer, or one expert), and `Flows.pieces` says of which elements it consists.

A region that several GPUs of a node keep is sent to one of them and copied on within the node a round later. Who sends
is the least busy of those who can. The order of rounds (order.py) is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megarl.layout import Layout, stage_layers
from megarl.models.engine import engine_table
from megarl.models.registry import megatron_table
from megarl.models.shape import ModelShape
from megarl.models.shards import ShardSlice, of_expert
from megarl.weights.cuts import Bundle, cut_rules, pitches
from megarl.weights.dealer import Dealer, Fleet, Ints, engine_layout_of
from megarl.weights.order import EMBEDDING, HEAD, Rows, assign_rounds
from megarl.weights.plan import Piece, make_piece

__all__ = ["Fleet", "Flows", "plan_flows"]


@dataclass(frozen=True)
class Flows:
    """One row a transfer. `layer` is negative for embedding and head, `expert` -1 for none."""

    fleet: Fleet
    shape: ModelShape
    bundles: tuple[Bundle, ...]
    pitches: Mapping[str, int]  # elements of one expert in a parameter that may hold several
    bundle: Ints
    layer: Ints
    expert: Ints
    source: Ints  # GPU
    destination: Ints  # GPU; of a forwarded row `source` is an engine's GPU too
    round: Ints
    num_bytes: Ints
    is_relay: Ints  # of bools

    @property
    def num_rounds(self) -> int:
        return int(self.round.max()) + 1

    def pieces(self, rows: Sequence[int]) -> Iterator[Piece]:
        """What these rows consist of. A forwarded row is read where the engine's GPU received it."""
        fleet, filled = self.fleet, self._fill
        for row in rows:
            bundle, is_relay = self.bundles[int(self.bundle[row])], bool(self.is_relay[row])
            layer, expert, sender = int(self.layer[row]), int(self.expert[row]), int(self.source[row])
            giver = engine_layout_of(fleet, sender - fleet.first) if is_relay else fleet.source(sender)
            taker = engine_layout_of(fleet, int(self.destination[row]) - fleet.first)
            for cut in bundle.cuts:
                source = filled(cut.destination if is_relay else cut.source, giver, layer, expert)
                destination = filled(cut.destination, taker, layer, expert)
                start, shape = cut.start, cut.shape
                if len(source.shape) > len(shape):  # the tensor holds all experts
                    start, shape = (expert, *start), (1, *shape)
                yield make_piece(source.name, start, shape, source, destination)

    def _fill(self, box: ShardSlice, layout: Layout, layer: int, expert: int) -> ShardSlice:
        """The box with its names filled in, for a layer and an expert (-1: none) on one rank."""
        chunks = stage_layers(self.shape.layers, layout)
        number = next((n for n, layers in enumerate(chunks) if layer in layers), 0 if layer == EMBEDDING else -1)
        here, chunk = layer - chunks[number].start, f"chunk{number % len(chunks)}." if len(chunks) > 1 else ""
        local = expert
        if expert >= 0:
            local = expert % (self.shape.experts // layout.ep.size)
            box = of_expert(box, local, expert, self.pitches[box.param])
        name = box.name.format(layer=layer, expert=expert)
        return replace(box, name=name, param=chunk + box.param.format(layer=here, expert=local))


def plan_flows(
    shape: ModelShape, fleet: Fleet, *, padded_vocab: int, itemsize: int = 2, bucket_bytes: int = 512 << 20
) -> Flows:
    """Every element every engine GPU keeps, from whom, and in which round.

    Raises ValueError naming the tensor when the two tables do not hold the same elements.
    """
    source = megatron_table(shape, style="te", padded_vocab=padded_vocab)
    destination, engine = engine_table(shape), engine_layout_of(fleet, 0)
    dealer = Dealer(shape, fleet)
    bundles: list[Bundle] = []
    sizes: dict[str, int] = {}

    def cut(section: str, sizes: tuple[int, int]) -> list[Bundle]:
        rules = (getattr(source, section), getattr(destination, section))
        is_expert = section == "expert"
        return cut_rules(*rules, sizes, itemsize=itemsize, fp32=source.fp32, is_expert=is_expert)

    dense, leading = (fleet.parallel.tensor, fleet.tensor), shape.dense_layers
    layers = {"dense": range(leading), "layer": range(leading, shape.layers), "embedding": [EMBEDDING], "head": [HEAD]}
    for section, numbers in layers.items():
        if numbers:
            found = cut(section, dense)
            dealer.deal(found, len(bundles), numbers)
            bundles += found
    if shape.is_moe:
        found = cut("expert", (fleet.parallel.expert_tensor, engine.etp.size))
        sizes = pitches(source.expert, fleet.parallel.expert_tensor) | pitches(destination.expert, engine.etp.size)
        dealer.deal_experts(found, len(bundles), layers["layer"])
        bundles += found
    rows = dealer.rows()
    num_bytes = np.array([bundle.num_bytes for bundle in bundles])[rows["bundle"]]
    # in a layer: its tensors, then its experts in rows, one of each expert-parallel rank
    each = shape.experts // fleet.parallel.expert or 1
    first = max(bundle.unit for bundle in bundles) + 1
    units = np.array([bundle.unit for bundle in bundles])[rows["bundle"]]
    units = np.where(rows["expert"] >= 0, first + rows["expert"] % each, units)
    group = dealer.group_of_gpu[rows["destination"]]
    rounds = assign_rounds(
        Rows(group, rows["layer"], units, num_bytes),
        dealer.layers_of_stages,
        receivers=dealer.group_size,
        senders=fleet.trainers // fleet.parallel.pipeline,
        bucket_bytes=bucket_bytes,
    )
    return Flows(fleet, shape, tuple(bundles), sizes, **rows, round=rounds + rows["is_relay"], num_bytes=num_bytes)
