"""One rank of a launch that syncs weights for several configs and notes every message it really sends and receives.

    python message_ranks.py FOLDER      (under RANK, WORLD_SIZE, ...)

FOLDER/cases.json: {name: [CONFIG, key=value ...]}; leaves FOLDER/rank_<r>.json: {name: {"sent": [[round, sender,
receiver, bytes] ...], "received": the same, "wrong": tensors that the engine's memory does not hold}}. Messages are
noted as they are handed to the transport. Both sides are plain memory.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.sync import Memory, room_for, slice_of, view
from megarl.config.launch import fleet_of
from megarl.config.load import load_config
from megarl.config.validate import model_shape
from megarl.models.engine import engine_table
from megarl.models.registry import hf_shapes, megatron_table, padded_vocab
from megarl.models.shards import slices_of
from megarl.weights.plan.from_config import plan_of
from megarl.weights.sync.publish import Publisher, WeightFormat, WeightSender
from megarl.weights.sync.transports.collective import Collective


class Recorded(Collective):
    """Notes what it is given, round by round."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[int, int, int, int]] = []
        self.received: list[tuple[int, int, int, int]] = []
        self._round = 0

    def start(self, outgoing, incoming):
        self.sent += [
            (self._round, self.rank, peer, flat.nbytes) for peer, flat in outgoing.items()
        ]
        self.received += [
            (self._round, peer, self.rank, flat.nbytes) for peer, flat in incoming.items()
        ]
        self._round += 1
        return super().start(outgoing, incoming)


def sync(arguments: list[str]) -> dict:
    config = load_config(arguments[0], arguments[1:])
    shape, fleet, transport = model_shape(config), fleet_of(config), Recorded()
    weights, rank = WeightFormat(hf_shapes(shape), torch.float32), transport.rank
    assert transport.world == fleet.world
    generator = torch.Generator().manual_seed(0)
    full = {name: torch.randn(size, generator=generator) for name, size in weights.shapes.items()}
    sender = _sender(shape, fleet, rank, full) if rank < fleet.trainers else None
    receiver = table = None
    if rank >= fleet.first_receiver:
        table = slices_of(engine_table(shape), shape, fleet.engine_layout(rank))
        receiver = Memory(table)
    publisher = Publisher(
        plan_of(config, shape, fleet, spec="local"),
        sender,
        receiver,
        transport,
        weights,
        table=table,
    )
    publisher.publish(version=1)
    wrong = [
        part.name
        for part in table or ()
        if not torch.equal(view(receiver.memory, part), slice_of(full, part))
    ]
    return {"sent": transport.sent, "received": transport.received, "wrong": wrong}


def _sender(shape, fleet, rank: int, full: Mapping[str, torch.Tensor]) -> WeightSender:
    padded = padded_vocab(shape.vocab, fleet.parallel.tensor)
    slices = slices_of(
        megatron_table(shape, spec="local", padded_vocab=padded), shape, fleet.trainer_layout(rank)
    )
    parameters = room_for(slices)
    for part in slices:
        view(parameters, part).copy_(slice_of(full, part))
    return WeightSender(slices, lambda: parameters)


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    cases = json.loads((folder / "cases.json").read_text())
    seen = {name: sync(arguments) for name, arguments in cases.items()}
    (folder / f"rank_{dist.get_rank()}.json").write_text(json.dumps(seen))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
