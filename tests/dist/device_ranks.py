"""One of two ranks whose parameters, engine and messages are on a second device (two_devices.py), over gloo.

    python device_ranks.py FOLDER      (under RANK, WORLD_SIZE, ...)

Operations on tensors of both devices are refused, as are sums of tensors on the host: on GPUs some ranks would call
NCCL and others gloo. Exits with 0 if what arrived is what was sent.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from samplers import AtOnce
from torch import Tensor
from two_devices import DEVICE, There, there, two_devices

from benchmarks.sync import Memory, room_for, slice_of, view
from megarl.checkpoint.hf_files import export_hf
from megarl.config.random_model import hf_config
from megarl.config.schema import Create
from megarl.layout import Axis, Fleet, Parallel
from megarl.models.engine import engine_table
from megarl.models.registry import hf_shapes, megatron_table, padded_vocab, parse_model
from megarl.models.shards import ShardSlice, slices_of
from megarl.rollout.exchange import Exchange
from megarl.types import Prompt, Request, Sample
from megarl.weights.plan.plan import plan_transfers
from megarl.weights.sync.copies import copy_and_verify
from megarl.weights.sync.execute import split_message, strided_view
from megarl.weights.sync.publish import Publisher, WeightFormat, WeightSender
from megarl.weights.sync.transports.collective import Collective

SIZES = {"family": "qwen3_moe", "layers": 1, "hidden": 32, "heads": 4, "kv_heads": 2, "vocab": 67, "experts": 4,
         "moe_intermediate": 16, "tied": False}  # fmt: skip
CONFIG = hf_config(Create.model_validate(SIZES))
SHAPE = parse_model(CONFIG, "model.create")
SHAPES, PADDED = hf_shapes(SHAPE), padded_vocab(SHAPE.vocab, 2)


class OnDevice(Collective):
    def sum(self, values: Tensor) -> Tensor:
        assert isinstance(values, There), "summed on the host"
        return super().sum(values)


class DeviceMemory(Memory):
    """Is written and read on the device, as the engine's weights are."""

    def __init__(self, slices: list[ShardSlice]) -> None:
        super().__init__(slices)
        self.memory, self.device = (
            {name: there(tensor) for name, tensor in self.memory.items()},
            DEVICE,
        )

    def write(self, message, flat):
        parts, views = [], []
        for transfer, part in split_message(message, flat):
            into = transfer.destination
            parts.append(part)
            views.append(strided_view(self.memory[into.param], into, flat.dtype))
            self.loaded[into.name] += into.numel
        return copy_and_verify(flat, parts, views)


class Staged(Publisher):
    """The device has room for half of what arrives."""

    staged: tuple[int, int] | None = None  # bytes on the device and on the host

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.executor.device_room = lambda: self.executor.bytes_arriving // 2

    def _stage(self, parameters):
        staged = super()._stage(parameters)
        sizes = [
            sum(x.nbytes for x in staged.values() if isinstance(x, There) == on_device)
            for on_device in (1, 0)
        ]
        assert sum(sizes) == self.executor.bytes_arriving
        self.staged = sizes[0], sizes[1]
        return staged


def weights_of(
    fleet: Fleet, rank: int
) -> tuple[dict[str, Tensor], list[ShardSlice], dict[str, Tensor]]:
    """All tensors, this trainer rank's slices, and its parameters on the device."""
    generator = torch.Generator().manual_seed(0)
    full = {name: torch.randn(size, generator=generator) for name, size in SHAPES.items()}
    slices = slices_of(
        megatron_table(SHAPE, spec="local", padded_vocab=PADDED), SHAPE, fleet.trainer_layout(rank)
    )
    parameters = room_for(slices)
    for part in slices:
        view(parameters, part).copy_(slice_of(full, part))
    return full, slices, {name: there(tensor) for name, tensor in parameters.items()}


def publish(kind: str) -> None:
    is_split, rank = kind == "split", dist.get_rank()
    parallel = Parallel() if is_split else Parallel(tensor=2)
    fleet = Fleet(
        parallel,
        trainers=1 if is_split else 2,
        tensor=1,
        ranks_per_replica=1,
        replicas=1 if is_split else 2,
        is_split=is_split,
    )
    full, slices, parameters = weights_of(fleet, 0 if is_split else rank)
    receives, sends = rank >= fleet.first_receiver, rank < fleet.trainers
    table = slices_of(engine_table(SHAPE), SHAPE, fleet.engine_layout(rank)) if receives else None
    engine = DeviceMemory(table) if table else None
    publisher = (Staged if kind == "staged" else Publisher)(
        plan_transfers(
            SHAPE, fleet, padded_vocab=PADDED, itemsize=4, round_bytes=4096, spec="local"
        ),
        WeightSender(slices, lambda: parameters) if sends else None,
        engine,
        OnDevice(),
        WeightFormat(SHAPES, torch.float32),
        table=table,
        is_atomic=kind != "split",
    )
    publisher.publish(version=1)
    assert kind != "staged" or publisher.staged is None, "there is no version to keep yet"
    publisher.publish(version=2)
    assert kind != "staged" or min(publisher.staged) > 0, publisher.staged
    for part in table or ():
        memory = {name: tensor.here for name, tensor in engine.memory.items()}
        assert torch.equal(view(memory, part), slice_of(full, part)), part


def export(folder: Path) -> None:
    fleet = Fleet(Parallel(tensor=2), 2, tensor=1, ranks_per_replica=1, replicas=2, is_split=False)
    full, _, parameters = weights_of(fleet, dist.get_rank())
    sources = [weights_of(fleet, rank)[1] for rank in range(2)]
    (folder / "origin").mkdir(exist_ok=True)
    export_hf(
        folder / "hf",
        origin=folder / "origin",
        weights=WeightFormat(SHAPES, torch.float32),
        sources=sources,
        parameters=lambda: parameters,
        transport=OnDevice(),
        file_bytes=16 * 1024,
    )
    written = {
        name: tensor
        for file in (folder / "hf").glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }
    assert written.keys() == full.keys()
    assert all(torch.equal(full[name], tensor) for name, tensor in written.items())


def draw(request):
    return Sample(
        request.prompt.prompt_id,
        request.index,
        tokens=torch.arange(3),
        trainable=torch.ones(3, dtype=torch.bool),
        rollout_logprobs=torch.full((3,), -0.1),
        versions=torch.full((3,), 3, dtype=torch.int32),
        finish="stop",
    )


class Rewards:
    def start(self, prompts):
        return self

    def add(self, samples):
        pass

    def results(self, samples):
        return [replace(sample, reward=float(sample.prompt_id)) for sample in samples]


def exchange() -> None:
    requests = [
        Request(Prompt(number, (1,), ""), index, 0, 1.0)
        for number in range(2)
        for index in range(2)
    ]
    rank = dist.get_rank()
    before = There.bytes_made
    samples = Exchange(AtOnce(draw), Rewards(), Axis(2, rank), Axis(1))(requests, 3)
    print(f"exchange: {There.bytes_made - before} bytes on the device")
    assert There.bytes_made == before
    assert [(x.prompt_id, x.index, x.reward) for x in samples] == [
        (0, 0, 0),
        (0, 1, 0),
        (1, 0, 1),
        (1, 1, 1),
    ]


def main(folder: Path) -> None:
    dist.init_process_group("cpu:gloo,meta:gloo")
    with two_devices():
        exchange()
        for kind in ("resident", "staged", "split"):
            publish(kind)
        export(folder)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
