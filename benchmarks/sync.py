"""A weight sync between gloo ranks on this machine: shard to shard, against full tensors gathered on every rank.

    setup: ranks are started once, each with its shards, an engine's memory and a Publisher     call: one sync, timed

Both contenders run the same Publisher, with its checksums, over the same transport. The baseline does what most
systems do, in its kindest form: every rank receives every tensor whole (planned, in messages, no collective per tensor)
and then copies the slices that its engine keeps. What is compared is what lies in the engines afterwards.

What verification costs is shown by the same sync with nothing checked: no checksums of messages, nothing read back.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from benchmarks.frame import Case, Contender, Outcome
from megarl.config.random_model import hf_config
from megarl.config.schema import Create
from megarl.layout import Layout, Parallel
from megarl.models.registry import hf_shapes, megatron_table, parse_model
from megarl.models.shape import ModelShape
from megarl.models.shards import ShardSlice, slices_of
from megarl.weights.sync import execute
from megarl.weights.sync.copies import copy_all
from megarl.weights.sync.publish import Publisher, WeightFormat, WeightSender, plan_slices
from megarl.weights.sync.transports import Transport
from megarl.weights.sync.transports.collective import Collective

__all__ = ["CASES", "Memory", "gathered", "room_for", "sharded", "slice_of", "view"]

TRAINER, ENGINE = Parallel(tensor=2, pipeline=2), 2  # ranks of one replica of the engine
ROUND_BYTES = 4 << 20
MODELS = {
    "dense": {"family": "qwen3", "tied": True, "layers": 4, "hidden": 512, "heads": 8, "kv_heads": 4, "vocab": 8192},
    "experts": {"family": "qwen3_moe", "tied": False, "layers": 4, "hidden": 256, "heads": 4, "kv_heads": 2,
                "vocab": 4096, "experts": 16, "moe_intermediate": 128, "experts_per_token": 2},
}  # fmt: skip

CASES = tuple(
    Case(
        f"sync {model} tp2 pp2 -> tp2 x {world // ENGINE}, {world} ranks",
        (
            Contender("megarl, shard to shard", "benchmarks.sync:sharded"),
            Contender("full tensors on every rank", "benchmarks.sync:gathered"),
        ),
        {"world": world, "model": model},
        at_least=1.0,
    )
    for model in MODELS
    for world in (4, 8)
) + tuple(
    Case(
        f"checks of a sync, {model}, {'in process' if world == 1 else f'{world} ranks'}",
        (
            Contender("megarl, shard to shard", "benchmarks.sync:sharded"),
            Contender("megarl, nothing checked", "benchmarks.sync:sharded", {"is_checked": False}),
        ),
        {"world": world, "model": model},
    )
    for model in MODELS
    for world in (1, 4)
)


def sharded(world: int, model: str, is_checked: bool = True) -> Callable[[], Outcome]:
    return _Ranks(world, model, gather=False, is_checked=is_checked).sync


def gathered(world: int, model: str) -> Callable[[], Outcome]:
    return _Ranks(world, model, gather=True, is_checked=True).sync


class Memory(execute.MemoryReceiver):
    """A receiver with memory of its own, for any slices."""

    def __init__(self, slices: Sequence[ShardSlice], dtype: torch.dtype = torch.float32) -> None:
        super().__init__(slices, room_for(slices, dtype), dtype)
        self.begun: list[bool] = []  # of each sync: whether placement was to be checked

    def begin(self, *, check_placement: bool) -> None:
        super().begin(check_placement=check_placement)
        self.begun.append(check_placement)


def copy_unchecked(flat: Tensor, parts: list[Tensor], into: list[Tensor]) -> Tensor:
    copy_all(into, parts)
    return torch.zeros((), dtype=torch.bool)


def room_for(slices: Sequence[ShardSlice], dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Memory that the slices describe; what none covers is NaN, so that sending it would show."""
    sizes: dict[str, int] = {}
    for part in slices:
        last = sum((n - 1) * stride for n, stride in zip(part.shape, part.strides, strict=True))
        sizes[part.param] = max(sizes.get(part.param, 0), part.offset + last + 1)
    return {name: torch.full((size,), torch.nan).to(dtype) for name, size in sizes.items()}


def view(memory: Mapping[str, Tensor], part: ShardSlice) -> Tensor:
    return memory[part.param].as_strided(part.shape, part.strides, part.offset)


def slices_of_rank(
    shape: ModelShape, parallel: Parallel, world: int, rank: int
) -> list[ShardSlice]:
    padded = -(-shape.vocab // (8 * parallel.tensor)) * 8 * parallel.tensor
    return slices_of(
        megatron_table(shape, spec="local", padded_vocab=padded),
        shape,
        Layout.of(parallel, world, rank),
    )


class _Ranks:
    """Processes that sync when asked to, and end with this one."""

    def __init__(self, world: int, model: str, *, gather: bool, is_checked: bool) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        context = mp.get_context("spawn")
        self._pipes: list[Connection] = []
        for rank in range(world):
            ours, theirs = context.Pipe()
            arguments = (rank, world, port, model, gather, is_checked, theirs)
            process = context.Process(target=_rank, args=arguments, daemon=True)
            process.start()
            self._pipes.append(ours)
        self._receive()  # all are ready

    def _receive(self) -> list[tuple[float, int, int, float]]:
        return [pipe.recv() for pipe in self._pipes]

    def sync(self) -> Outcome:
        for pipe in self._pipes:
            pipe.send("sync")
        seen = self._receive()
        figures = {"MB moved": seen[0][1] / 1e6, "messages": float(seen[0][2])}
        return Outcome(
            np.array([kept for *_, kept in seen]), max(seconds for seconds, *_ in seen), figures
        )


def _rank(
    rank: int, world: int, port: int, model: str, gather: bool, is_checked: bool, pipe: Connection
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world
    )
    shape = parse_model(hf_config(Create.model_validate(MODELS[model])), "model.create")
    shapes = hf_shapes(shape)
    trainer, tensor = (TRAINER, ENGINE) if world > 1 else (Parallel(), 1)
    if not is_checked:
        execute.checksums = lambda flats: torch.zeros(len(flats), dtype=torch.int64)
        execute.copy_and_verify = copy_unchecked
    sources = [slices_of_rank(shape, trainer, world, r) for r in range(world)]
    generator = torch.Generator().manual_seed(0)
    parameters = room_for(sources[rank])
    full = {name: torch.randn(size, generator=generator) for name, size in shapes.items()}
    for part in sources[rank]:
        view(parameters, part).copy_(slice_of(full, part))
    # as vLLM: every rank keeps a slice of every expert
    slices = Parallel(tensor=tensor, expert_tensor=tensor)
    destinations = [slices_of_rank(shape, slices, tensor, r % tensor) for r in range(world)]
    engine = receiver = Memory(destinations[rank])
    if gather:
        whole = [
            ShardSlice(name, (0,) * len(size), size, name, 0, _strides(size))
            for name, size in shapes.items()
        ]
        destinations, receiver = [whole] * world, Memory(whole)
    replica = 1 if gather else tensor
    weights = WeightFormat(shapes, torch.float32)
    plan = plan_slices(
        weights, sources, destinations, ranks_per_replica=replica, round_bytes=ROUND_BYTES
    )
    sender = WeightSender(sources[rank], lambda: parameters)
    transport = Collective() if world > 1 else Transport()
    publisher = Publisher(plan, sender, receiver, transport, weights)
    publisher.publish(version=0)  # the first checks placement, which later ones do not
    moved, messages = publisher.plan.bytes_received, len(publisher.plan.message_bytes)
    pipe.send((0.0, moved, messages, 0.0))
    while True:
        try:
            pipe.recv()
        except EOFError:
            return
        dist.barrier()
        began = time.perf_counter()
        publisher.publish(version=1)
        if gather:
            tensors = {name: receiver.memory[name].view(size) for name, size in shapes.items()}
            for part in engine.slices:
                view(engine.memory, part).copy_(slice_of(tensors, part))
        seconds = time.perf_counter() - began
        kept = sum(float(view(engine.memory, part).double().abs().sum()) for part in engine.slices)
        pipe.send((seconds, moved, messages, kept))


def slice_of(full: Mapping[str, Tensor], part: ShardSlice) -> Tensor:
    return full[part.name][
        tuple(slice(a, a + n) for a, n in zip(part.start, part.shape, strict=True))
    ]


def _strides(size: tuple[int, ...]) -> tuple[int, ...]:
    return torch.empty(size, device="meta").stride()
