"""One rank of a launch without engines: what a sync moves, in which order, and what it says of ranks that fail.

    python transport_ranks.py FOLDER      (under RANK, WORLD_SIZE, ...)

Both sides are plain memory: the "engine" keeps the parameters of another Megatron layout. Leaves
FOLDER/rank_<r>.json with what it saw; the last rank dies in the middle of the last sync.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.sync import Memory, room_for, view
from benchmarks.sync import held as held_boxes
from megarl.config.random_model import hf_config
from megarl.config.schema import Create
from megarl.layout import Parallel
from megarl.models.registry import hf_shapes, parse_model
from megarl.models.shards import ShardSlice
from megarl.types import CheckFailed
from megarl.weights.publish import Publisher
from megarl.weights.quantize import BlockScales, quantise, quantise_shards
from megarl.weights.transports.collective import Collective

MOE = {"family": "qwen3_moe", "tied": False, "experts": 4, "moe_intermediate": 16}
CREATE = Create(layers=4, hidden=32, heads=4, kv_heads=2, vocab=67, **MOE)
SHAPE = parse_model(hf_config(CREATE), "model.create")
SHAPES = hf_shapes(SHAPE)
BUCKET = 8 << 10  # bytes; the embedding and a head are larger, a round of experts is exactly full
PAIRS = {  # trainer, engine's tensor ranks
    "tp2 pp2 -> tp2": (Parallel(tensor=2, pipeline=2), 2),
    "pp4 -> tp1": (Parallel(pipeline=4), 1),
    "tp2 ep2 -> tp2": (Parallel(tensor=2, expert=2), 2),
    "ep4 -> tp1": (Parallel(expert=4), 1),
    "tp2 ep4 etp1 -> tp2": (Parallel(tensor=2, expert=4, expert_tensor=1), 2),
    "pp2 -> tp2": (Parallel(pipeline=2), 2),
}
NODES = "pp4 -> tp1, nodes of 2 ranks"


def boxes(parallel: Parallel, world: int, rank: int) -> list[ShardSlice]:
    return held_boxes(SHAPE, parallel, world, rank)


def weights(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(size, generator=generator) for name, size in SHAPES.items()}


def slice_of(full: Mapping[str, Tensor], box: ShardSlice) -> Tensor:
    return full[box.name][tuple(slice(a, a + n) for a, n in zip(box.start, box.shape, strict=True))]


class Recorded(Collective):
    """Notes every transfer in the order it is started."""

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.trace: list[list[list[int]]] = []  # [round][transfer] -> source, destination, bytes
        self.dies_in: int | None = None
        self.sleeps_before_call = 0.0
        self.flips: tuple[int, int] | None = None  # (source, destination): a bit of the first bucket between them

    def barrier(self, what: str) -> None:
        time.sleep(self.sleeps_before_call)
        super().barrier(what)

    def start(self, outgoing, incoming):
        if self.dies_in == len(self.trace):
            os._exit(9)
        self.trace.append(
            [[self.rank, peer, flat.nbytes] for peer, flat in sorted(outgoing.items())]
            + [[peer, self.rank, flat.nbytes] for peer, flat in sorted(incoming.items())]
        )
        wait = super().start(outgoing, incoming)

        def flip() -> None:
            wait()
            for peer, flat in incoming.items():
                if self.flips == (peer, self.rank):
                    flat.view(torch.uint8)[5] ^= 16
                    self.flips = None

        return flip


class Case:
    def __init__(
        self,
        parallel: Parallel,
        tensor: int,
        transport: Recorded,
        full: Mapping[str, Tensor],
        *,
        ranks_per_node: int | None = None,
        is_staged: bool = True,
    ) -> None:
        world, rank = transport.world, transport.rank
        sources = [boxes(parallel, world, r) for r in range(world)]
        self.held = room_for(sources[rank])
        for box in sources[rank]:
            view(self.held, box).copy_(slice_of(full, box))
        self.mine, self.full, self.transport = sources[rank], full, transport
        self.engine = Memory(boxes(Parallel(tensor=tensor), tensor, rank % tensor))
        self.publisher = Publisher.connect(
            sources=sources,
            expected=SHAPES,
            parameters=lambda: self.held,
            receiver=self.engine,
            ranks_per_replica=tensor,
            transport=transport,
            dtype=torch.float32,
            bucket_bytes=BUCKET,
            ranks_per_node=ranks_per_node,
            is_staged=is_staged,
        )
        self.ranks_per_node = ranks_per_node or world

    def is_held(self, full: Mapping[str, Tensor]) -> bool:
        return all(torch.equal(view(self.engine.memory, box), slice_of(full, box)) for box in self.engine.boxes)

    def seen(self) -> dict:
        """One sync."""
        began = time.perf_counter()
        report = self.publisher.publish(version=7)
        rank = self.transport.rank
        assert self.is_held(self.full)
        return {
            "seconds": time.perf_counter() - began,
            "trace": self.transport.trace,
            "plan": [
                [[m.source, m.destination, 4 * m.numel] for m in round_ if m.source != m.destination]
                for round_ in self.publisher.plan.rounds
            ],
            "kept": sum(box.numel * 4 for box in self.engine.boxes),
            "local": sum(4 * m.numel for m in self.publisher.plan.messages if m.source == m.destination == rank),
            "largest": max(4 * m.numel for m in self.publisher.plan.messages),
            "largest row": max(4 * (size[1] if len(size) > 1 else 1) for size in SHAPES.values()),
            "version": self.engine.version,
            "received": report.bytes_received,
            "over the network": sum(
                4 * m.numel
                for m in self.publisher.plan.messages
                if m.source // self.ranks_per_node != m.destination // self.ranks_per_node
            ),
        }


def quantised(full: Mapping[str, Tensor]) -> dict:
    """Linear weights in bf16, then in FP8 with blocks that shard borders cut: bytes of both, and whose bits arrived."""
    transport, block, moved = Recorded(), 24, {}
    names = {name: SHAPES[name] for name in SHAPES if "_proj." in name}
    world, rank, parallel, tensor = transport.world, transport.rank, Parallel(tensor=2, expert=2), 2
    sources = [[box for box in boxes(parallel, world, r) if box.name in names] for r in range(world)]
    bf16 = {name: full[name].bfloat16() for name in names}
    held = room_for(sources[rank], torch.bfloat16)
    for box in sources[rank]:
        view(held, box).copy_(slice_of(bf16, box))
    scales = BlockScales.agree(names, sources[rank], held, transport, block)
    shards = quantise_shards(sources[rank], held, scales)
    theirs = [box for box in boxes(Parallel(tensor=tensor), tensor, rank % tensor) if box.name in names]
    for parameters, dtype in ((held, torch.bfloat16), (shards, torch.float8_e4m3fn)):
        engine = Memory(theirs, dtype)
        publisher = Publisher.connect(
            sources=sources,
            expected=names,
            parameters=lambda parameters=parameters: parameters,
            receiver=engine,
            ranks_per_replica=tensor,
            transport=transport,
            dtype=dtype,
            bucket_bytes=BUCKET,
        )
        moved[str(dtype)] = publisher.publish(version=1).bytes_received
    wrong = 0
    for name in names:
        whole, scale = quantise(bf16[name], block)
        wrong += not torch.equal(scale, scales.scales[name])
        for box in theirs:
            if box.name == name:
                same = view(engine.memory, box).view(torch.uint8) == slice_of({name: whole}, box).view(torch.uint8)
                wrong += int((~same).sum())
    return {"moved": moved, "wrong": wrong}


def refused(call) -> str:
    try:
        call()
    except CheckFailed as error:
        return str(error)
    return ""


def misrouted(case: Case) -> None:
    """The plan writes two slices of one tensor in each other's place; every bucket arrives as it was sent."""

    plan = case.publisher.plan
    pieces = [(m, piece) for m in plan.messages for piece in m.pieces]
    (one_in, one), (other_in, other) = next(
        (x, y)
        for i, x in enumerate(pieces)
        for y in pieces[:i]
        if x[0].destination == y[0].destination and x[1].name == y[1].name and x[1].shape == y[1].shape
    )
    changed = {
        id(one): replace(one, destination=other.destination),
        id(other): replace(other, destination=one.destination),
    }
    rounds = tuple(
        tuple(replace(m, pieces=tuple(changed.get(id(piece), piece) for piece in m.pieces)) for m in round_)
        for round_ in plan.rounds
    )
    assert one_in.destination == other_in.destination
    case.publisher.rounds.plan = replace(plan, rounds=rounds)


def torn_forward(full: Mapping[str, Tensor]) -> dict:
    """What rank 2 copies on to rank 3 of its node changes on that way; then it does not."""
    case = Case(*PAIRS["pp4 -> tp1"], Recorded(), full, ranks_per_node=2)
    case.publisher.publish(version=1)
    new = weights(4)
    for box in case.mine:
        view(case.held, box).copy_(slice_of(new, box))
    forwards = [m for m in case.publisher.plan.messages if all(piece.is_relay for piece in m.pieces)]
    assert {(m.source, m.destination) for m in forwards} == {(0, 1), (1, 0), (2, 3), (3, 2)}
    first = next(m for m in case.publisher.plan.messages if (m.source, m.destination) == (2, 3))
    case.transport.flips = (2, 3)
    seen: dict = {"said": refused(lambda: case.publisher.publish(version=2)), "bucket": str(first)}
    seen |= {"is forward": first.is_relay, "version": case.engine.version, "old": case.is_held(full)}
    case.transport.flips = None
    case.publisher.publish(version=3)
    return seen | {"healed": case.is_held(new)}


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank, full = dist.get_rank(), weights(3)
    seen: dict = {"pairs": {}}
    for name, (parallel, tensor) in PAIRS.items():
        seen["pairs"][name] = Case(parallel, tensor, Recorded(), full).seen()

    for staged in (True, False):
        seen["pairs"][f"{NODES} staged={staged}"] = Case(
            *PAIRS["pp4 -> tp1"], Recorded(), full, ranks_per_node=2, is_staged=staged
        ).seen()
    seen["torn on its second way"] = torn_forward(full)
    seen["fp8"] = quantised(full)

    case = Case(Parallel(tensor=2), 1, Recorded(), full)
    misrouted(case)
    seen["misrouted"] = refused(lambda: case.publisher.publish(version=8))
    seen["after misrouted"] = case.engine.version

    case = Case(Parallel(tensor=2), 1, Recorded(timeout_s=1.0), full)
    case.publisher.publish(version=1)
    case.transport.sleeps_before_call = 2.0 if rank == 2 else 0.0
    began = time.perf_counter()
    seen["late"] = refused(lambda: case.publisher.publish(version=2))
    seen["late seconds"], seen["after late"] = time.perf_counter() - began, case.engine.version

    dist.barrier()
    case = Case(Parallel(tensor=2), 1, Recorded(), full)
    case.publisher.publish(version=1)
    with patch("megarl.weights.publish.free_host_bytes", lambda: 1000 if rank == 1 else 1 << 40):
        seen["no room"] = refused(lambda: case.publisher.publish(version=2))
    seen["after no room"] = case.engine.version

    case = Case(Parallel(tensor=2, pipeline=2), 2, Recorded(timeout_s=5.0), full)
    case.publisher.publish(version=1)
    seen["proven"] = sum(case.engine.begun)
    (folder / f"rank_{rank}.json").write_text(json.dumps(seen))
    case.transport.trace.clear()
    if rank == 3:
        case.transport.dies_in = 2
    began = time.perf_counter()
    seen["dead"] = refused(lambda: case.publisher.publish(version=2))
    seen["dead seconds"], seen["after dead"] = time.perf_counter() - began, case.engine.version
    seen["held after dead"] = case.is_held(full)
    seen["call after dead"] = refused(lambda: case.publisher.publish(version=3))
    (folder / f"rank_{rank}.json").write_text(json.dumps(seen))
    (folder / f"done_{rank}").touch()
    while rank == 0 and len(list(folder.glob("done_*"))) < 3:  # ranks meet in its store
        time.sleep(0.05)
    os._exit(0)  # the world is broken: nothing to close


if __name__ == "__main__":
    main(Path(sys.argv[1]))
