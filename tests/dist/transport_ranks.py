"""One rank of a launch without engines: what a sync moves, in which order, and what it says of ranks that fail.

    python transport_ranks.py FOLDER      (under RANK, WORLD_SIZE, ...)

Both sides are plain memory: the "engine" keeps what vLLM's table says. Leaves FOLDER/rank_<r>.json with what it saw;
the last rank dies in the middle of the last sync.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.sync import Memory, room_for, slice_of, view
from megarl.config.random_model import hf_config
from megarl.config.schema import Create
from megarl.layout import Fleet, Parallel
from megarl.models.engine import engine_table
from megarl.models.registry import hf_shapes, megatron_table, padded_vocab, parse_model
from megarl.models.shards import slices_of
from megarl.types import CheckFailed
from megarl.weights.plan.plan import plan_transfers
from megarl.weights.sync.publish import Publisher, WeightFormat, WeightSender
from megarl.weights.sync.transports.collective import Collective

MOE = {"family": "qwen3_moe", "tied": False, "experts": 4, "moe_intermediate": 16}
CREATE = Create(layers=4, hidden=32, heads=4, kv_heads=2, vocab=67, **MOE)
SHAPE = parse_model(hf_config(CREATE), "model.create")
SHAPES = hf_shapes(SHAPE)
WEIGHTS = WeightFormat(SHAPES, torch.float32)
ROUND = 8 << 10  # bytes; the embedding and a head are larger


def colocated(engine: int, *, ranks_per_node: int = 4, **parallel: int) -> Fleet:
    return Fleet(
        Parallel(**parallel),
        4,
        tensor=engine,
        ranks_per_replica=engine,
        replicas=4 // engine,
        ranks_per_node=ranks_per_node,
        is_split=False,
    )


def split(engine: int, *, ranks_per_node: int = 4, **parallel: int) -> Fleet:
    """Ranks 0 and 1 send, ranks 2 and 3 receive."""
    return Fleet(
        Parallel(**parallel),
        2,
        tensor=engine,
        ranks_per_replica=engine,
        replicas=2 // engine,
        ranks_per_node=ranks_per_node,
    )


FLEETS = {
    "tp2 pp2 -> tp2": colocated(2, tensor=2, pipeline=2),
    "pp4 -> tp1": colocated(1, pipeline=4),
    "tp2 ep2 -> tp2": colocated(2, tensor=2, expert=2, expert_tensor=2),
    "ep4 -> tp1": colocated(1, expert=4),
    "tp2 ep4 etp1 -> tp2": colocated(2, tensor=2, expert=4, expert_tensor=1),
    "pp2 -> tp2": colocated(2, pipeline=2),
    "tp2 | tp2": split(2, tensor=2),
    "pp2 | tp1": split(1, pipeline=2),
    "ep2 | tp1, nodes of 2 ranks": split(1, expert=2, ranks_per_node=2),
}
NODES = "pp4 -> tp1, nodes of 2 ranks"
ON_NODES = colocated(1, pipeline=4, ranks_per_node=2)


def weights(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(size, generator=generator) for name, size in SHAPES.items()}


class Recorded(Collective):
    """Notes every transfer in the order it is started."""

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.trace: list[list[list[int]]] = []  # [round][message] -> sender, receiver, bytes
        self.dies_in: int | None = None
        self.sleeps_before_barrier = 0.0
        # (round, sender, receiver): a bit of that message
        self.flips: tuple[int, int, int] | None = None

    def barrier(self, what: str, timeout: timedelta | None = None) -> None:
        time.sleep(self.sleeps_before_barrier)
        super().barrier(what, timeout)

    def start(self, outgoing, incoming):
        round_ = len(self.trace)
        if self.dies_in == round_:
            os._exit(9)
        self.trace.append(
            [[self.rank, peer, flat.nbytes] for peer, flat in sorted(outgoing.items())]
            + [[peer, self.rank, flat.nbytes] for peer, flat in sorted(incoming.items())]
        )
        wait = super().start(outgoing, incoming)

        def flip() -> None:
            wait()
            for peer, flat in incoming.items():
                if self.flips == (round_, peer, self.rank):
                    flat.view(torch.uint8)[5] ^= 16

        return flip


class Case:
    def __init__(
        self,
        fleet: Fleet,
        transport: Recorded,
        full: Mapping[str, Tensor],
        *,
        is_atomic: bool = True,
    ) -> None:
        rank = transport.rank
        self.fleet, self.full, self.transport = fleet, full, transport
        self.sender = self.engine = None
        padded = padded_vocab(SHAPE.vocab, fleet.parallel.tensor)
        if rank < fleet.trainers:
            slices = slices_of(
                megatron_table(SHAPE, spec="local", padded_vocab=padded),
                SHAPE,
                fleet.trainer_layout(rank),
            )
            self.parameters = room_for(slices)
            self.sender = WeightSender(slices, lambda: self.parameters)
            self.fill(full)
        if rank >= fleet.first_receiver:
            self.engine = Memory(slices_of(engine_table(SHAPE), SHAPE, fleet.engine_layout(rank)))
        self.publisher = Publisher(
            plan_transfers(
                SHAPE, fleet, padded_vocab=padded, itemsize=4, round_bytes=ROUND, spec="local"
            ),
            self.sender,
            self.engine,
            transport,
            WEIGHTS,
            table=self.engine.slices if self.engine else None,
            is_atomic=is_atomic,
        )

    def fill(self, full: Mapping[str, Tensor]) -> None:
        """New weights for the trainer."""
        for part in self.sender.slices if self.sender else ():
            view(self.parameters, part).copy_(slice_of(full, part))

    def holds(self, full: Mapping[str, Tensor]) -> bool:
        slices = self.engine.slices if self.engine else ()
        return all(
            torch.equal(view(self.engine.memory, part), slice_of(full, part)) for part in slices
        )

    @property
    def version(self) -> int | None:
        return self.engine.version if self.engine else None

    def seen(self) -> dict:
        """One sync."""
        began = time.perf_counter()
        report = self.publisher.publish(version=7)
        rank, plan, per_node = self.transport.rank, self.publisher.plan, self.fleet.ranks_per_node
        assert self.holds(self.full)
        columns = (plan.message_sender, plan.message_receiver, plan.message_bytes)
        messages = np.stack(columns, 1).tolist()
        rounds: list[list] = [[] for _ in range(plan.num_rounds)]
        for number, message in zip(plan.message_round.tolist(), messages, strict=True):
            if message[0] != message[1]:
                rounds[number].append(list(message))
        return {
            "seconds": time.perf_counter() - began,
            "trace": self.transport.trace,
            "plan": rounds,
            "kept": sum(part.numel * 4 for part in self.engine.slices) if self.engine else 0,
            "local": sum(size for sender, receiver, size in messages if sender == receiver == rank),
            "largest": max(size for _, _, size in messages),
            "version": self.version,
            "received": report.bytes_received,
            "over the network": sum(
                size for a, b, size in messages if a // per_node != b // per_node
            ),
        }


def refused(call) -> str:
    try:
        call()
    except CheckFailed as error:
        return str(error)
    return ""


def misroute(case: Case) -> None:
    """Two slices of one tensor are written in each other's place; every message arrives as it was sent."""
    executor, rank = case.publisher.executor, case.transport.rank
    arriving = [t for m in executor.messages if m.receiver == rank for t in m.transfers]
    pairs = ((x, y) for i, x in enumerate(arriving) for y in arriving[:i])
    one, other = next(
        (x, y)
        for x, y in pairs
        if (x.source.name, x.source.shape) == (y.source.name, y.source.shape)
    )
    swapped = {
        id(one): replace(one, destination=other.destination),
        id(other): replace(other, destination=one.destination),
    }
    executor.rounds = tuple(
        tuple(
            replace(m, transfers=tuple(swapped.get(id(t), t) for t in m.transfers))
            for m in messages
        )
        for messages in executor.rounds
    )


def torn_relay(full: Mapping[str, Tensor]) -> dict:
    """What rank 2 relays to rank 3 of its node changes on that way; then it does not."""
    case = Case(ON_NODES, Recorded(), full)
    case.publisher.publish(version=1)
    new = weights(4)
    case.fill(new)
    received = [m for messages in case.publisher.plan.lower(3) for m in messages if m.receiver == 3]
    relay = next(m for m in received if m.sender == 2 and m.is_relay)
    case.transport.trace.clear()
    case.transport.flips = (relay.round, 2, 3)
    seen: dict = {
        "error": refused(lambda: case.publisher.publish(version=2)),
        "message": str(relay),
    }
    seen |= {"version": case.version, "old": case.holds(full)}
    case.transport.flips = None
    case.publisher.publish(version=3)
    return seen | {"healed": case.holds(new)}


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank, full = dist.get_rank(), weights(3)
    seen: dict = {"pairs": {}}
    for name, fleet in FLEETS.items():
        seen["pairs"][name] = Case(fleet, Recorded(), full).seen()
    for atomic in (True, False):
        seen["pairs"][f"{NODES} atomic={atomic}"] = Case(
            ON_NODES, Recorded(), full, is_atomic=atomic
        ).seen()
    seen["torn relay"] = torn_relay(full)

    to_each = colocated(1, tensor=2)
    case = Case(to_each, Recorded(), full)
    misroute(case)
    seen["misrouted"] = refused(lambda: case.publisher.publish(version=8))
    seen["after misrouted"] = case.version

    case = Case(to_each, Recorded(timeout_s=1.0), full)
    case.publisher.publish(version=1)
    case.transport.sleeps_before_barrier = 2.0 if rank == 2 else 0.0
    began = time.perf_counter()
    seen["late"] = refused(lambda: case.publisher.publish(version=2))
    seen["late seconds"], seen["after late"] = time.perf_counter() - began, case.version

    dist.barrier()
    case = Case(to_each, Recorded(), full)
    case.publisher.publish(version=1)
    with patch(
        "megarl.weights.sync.execute.free_host_bytes", lambda: 1000 if rank == 1 else 1 << 40
    ):
        seen["no room"] = refused(lambda: case.publisher.publish(version=2))
    seen["after no room"] = case.version

    case = Case(split(2, tensor=2), Recorded(), full)
    case.publisher.publish(version=1)
    if rank == 0:
        del case.parameters["decoder.final_layernorm.weight"]
    seen["missing in split"] = refused(lambda: case.publisher.publish(version=2))
    seen["after missing in split"] = case.version

    case = Case(colocated(2, tensor=2, pipeline=2), Recorded(timeout_s=5.0), full)
    case.publisher.publish(version=1)
    seen["proven"] = sum(case.engine.begun)
    (folder / f"rank_{rank}.json").write_text(json.dumps(seen))
    case.transport.trace.clear()
    if rank == 3:
        case.transport.dies_in = 2
    began = time.perf_counter()
    seen["dead"] = refused(lambda: case.publisher.publish(version=2))
    seen["dead seconds"], seen["after dead"] = time.perf_counter() - began, case.version
    seen["holds after dead"] = case.holds(full)
    seen["barrier after dead"] = refused(lambda: case.publisher.publish(version=3))
    (folder / f"rank_{rank}.json").write_text(json.dumps(seen))
    (folder / f"done_{rank}").touch()
    while rank == 0 and len(list(folder.glob("done_*"))) < 3:  # ranks meet in its store
        time.sleep(0.05)
    os._exit(0)  # the world is broken: nothing to close


if __name__ == "__main__":
    main(Path(sys.argv[1]))
