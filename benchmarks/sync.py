"""A weight sync between gloo ranks on this machine: shard to shard, against full tensors gathered on every rank.

    setup: ranks are started once, each with its shards, an engine's memory and a Publisher     call: one sync, timed

Both contenders run the same Publisher, with its checksums, over the same transport. The baseline does what most
systems do, in its kindest form: every rank receives every tensor whole (planned, in buckets, no collective a tensor)
and then copies the slices that its engine keeps. What is compared is what lies in the engines afterwards.

What verification costs is shown by the same sync with nothing checked: no checksum of a bucket, nothing read back.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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
from megarl.models.registry import hf_shapes, megatron_slices, parse_model
from megarl.models.shape import ModelShape
from megarl.models.shards import ShardSlice
from megarl.weights import execute
from megarl.weights.checksum import copy_and_verify, positional_checksum
from megarl.weights.plan import Message
from megarl.weights.publish import Publisher
from megarl.weights.transports.collective import Collective
from megarl.weights.transports.inprocess import InProcess

__all__ = ["CASES", "Memory", "gathered", "sharded"]

TRAINER, ENGINE = Parallel(tensor=2, pipeline=2), 2  # ranks of one replica of the engine
BUCKET_BYTES = 4 << 20
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


@dataclass
class Memory:
    """publish.Receiver over plain memory, for any boxes."""

    boxes: Sequence[ShardSlice]
    dtype: torch.dtype = torch.float32
    is_checked: bool = True
    memory: dict[str, Tensor] = field(init=False)
    version: int | None = None
    begun: list[bool] = field(default_factory=list)  # of each sync: were places to be proven
    _loaded: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.memory = room_for(self.boxes, self.dtype)

    def begin(self, *, places: bool) -> None:
        self._loaded, self.version = {}, None
        self.begun.append(places)

    def write(self, message: Message, flat: Tensor) -> Tensor:
        wrong, at = torch.zeros((), dtype=torch.int64), 0
        for piece in message.pieces:
            into = piece.destination
            here = self.memory[into.param].as_strided(piece.shape, into.strides, into.offset)
            part = flat[at : at + piece.numel].view(piece.shape)
            if self.is_checked:
                wrong += copy_and_verify(part, here)
            else:
                here.copy_(part)
            self._loaded[piece.name] = self._loaded.get(piece.name, 0) + piece.numel
            at += piece.numel
        return wrong

    def seal(self) -> Mapping[str, int]:
        return self._loaded

    def places(self) -> Tensor:
        return torch.stack([positional_checksum(view(self.memory, box), box.start) for box in self.boxes])

    def finish(self, version: int) -> None:
        self.version = version

    def abort(self) -> None:
        self.version = None


def room_for(boxes: Sequence[ShardSlice], dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Memory for what boxes say; what no box covers is NaN, so that sending it would show."""
    sizes: dict[str, int] = {}
    for box in boxes:
        last = sum((n - 1) * stride for n, stride in zip(box.shape, box.strides, strict=True))
        sizes[box.param] = max(sizes.get(box.param, 0), box.offset + last + 1)
    return {name: torch.full((size,), torch.nan).to(dtype) for name, size in sizes.items()}


def view(memory: Mapping[str, Tensor], box: ShardSlice) -> Tensor:
    return memory[box.param].as_strided(box.shape, box.strides, box.offset)


def held(shape: ModelShape, parallel: Parallel, world: int, rank: int) -> list[ShardSlice]:
    padded = -(-shape.vocab // (8 * parallel.tensor)) * 8 * parallel.tensor
    return megatron_slices(shape, Layout.of(parallel, world, rank), style="local", padded_vocab=padded)


class _Ranks:
    """Processes that wait for a word to sync, and end with this one."""

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
        return Outcome(np.array([kept for *_, kept in seen]), max(seconds for seconds, *_ in seen), figures)


def _rank(rank: int, world: int, port: int, model: str, gather: bool, is_checked: bool, pipe: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    shape = parse_model(hf_config(Create.model_validate(MODELS[model])), "model.create")
    shapes = hf_shapes(shape)
    trainer, tensor = (TRAINER, ENGINE) if world > 1 else (Parallel(), 1)
    if not is_checked:
        execute.checksum = lambda flat: torch.zeros((), dtype=torch.int64)
    sources = [held(shape, trainer, world, r) for r in range(world)]
    generator = torch.Generator().manual_seed(0)
    parameters = room_for(sources[rank])
    for name, size in shapes.items():
        whole = torch.randn(size, generator=generator)
        for box in sources[rank]:
            if box.name == name:
                view(parameters, box).copy_(_slice(whole, box))
    slices = Parallel(tensor=tensor, expert_tensor=tensor)  # as vLLM: every rank keeps a slice of every expert
    engine = Memory(held(shape, slices, tensor, rank % tensor), is_checked=is_checked)
    receiver = engine
    if gather:
        receiver = Memory(
            [ShardSlice(name, (0,) * len(size), size, name, 0, _strides(size)) for name, size in shapes.items()]
        )
    publisher = Publisher.connect(
        sources=sources,
        expected=shapes,
        parameters=lambda: parameters,
        receiver=receiver,
        ranks_per_replica=1 if gather else tensor,
        transport=Collective() if world > 1 else InProcess(),
        dtype=torch.float32,
        bucket_bytes=BUCKET_BYTES,
    )
    publisher.publish(version=0)  # the first proves places, which later ones do not
    moved, messages = publisher.plan.bytes_received, len(publisher.plan.messages)
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
            for box in engine.boxes:
                view(engine.memory, box).copy_(_slice(receiver.memory[box.name].view(shapes[box.name]), box))
        seconds = time.perf_counter() - began
        kept = sum(float(view(engine.memory, box).double().abs().sum()) for box in engine.boxes)
        pipe.send((seconds, moved, messages, kept))


def _slice(whole: Tensor, box: ShardSlice) -> Tensor:
    return whole[tuple(slice(a, a + n) for a, n in zip(box.start, box.shape, strict=True))]


def _strides(size: tuple[int, ...]) -> tuple[int, ...]:
    return torch.empty(size, device="meta").stride()
