"""GPU kernels that the host launches in a weight sync, and times that it waits for the GPU, counted without one.

    python -m benchmarks.launches [CASE ...]       (without a case: all)

One rank publishes a real model in a real layout on tensors without data. Every operation on them is a launch, except
views and allocations. Operations on lists count the kernels that PyTorch 2.13 starts for them
(aten/src/ATen/native/cuda/MultiTensorApply.cuh, Shape.cu). Not counted: opening vLLM's layers and processing them for
its kernels, which is work per layer, and the transport's own operations. The host waits once a round for the
transport, and whenever it reads from the device.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megarl.config.launch import fleet_of
from megarl.config.load import load_config
from megarl.config.schema import Config
from megarl.config.validate import model_shape
from megarl.models.engine import engine_table
from megarl.models.registry import hf_shapes, megatron_table, padded_vocab
from megarl.models.shards import ShardSlice, slices_of
from megarl.platform.device import DTYPES
from megarl.weights.plan.from_config import plan_of
from megarl.weights.plan.plan import Message
from megarl.weights.sync.copies import copy_and_verify
from megarl.weights.sync.execute import MemoryReceiver, split_message
from megarl.weights.sync.publish import Publisher, WeightFormat, WeightSender
from megarl.weights.sync.transports import Transport

__all__ = ["CASES", "Launches", "measure"]

ROOT = Path(__file__).resolve().parents[1]
CASES = {
    "Qwen3-8B on 8": ("examples/math_8gpu/math_8gpu.yaml", "qwen3_8b"),
    "Qwen3-30B-A3B on 8": ("configs/gpu/qwen3_30b_a3b_8gpu.yaml", "qwen3_30b_a3b"),
    "Qwen3-235B-A22B on 64": ("configs/gpu/qwen3_235b_a22b_64gpu.yaml", "qwen3_235b_a22b"),
}
META = torch.device("meta")
aten = torch.ops.aten
ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
KERNELS = {"constant_pad_nd": 2, "cumsum": 2}  # of an operation that starts more than one
TENSORS, BLOCKS = 64, 320  # of a launch over two lists, at most
CHUNK = 65536  # elements of a block
CAT, CAT_STRIDED = 128, 64  # tensors that one launch of cat copies


class Launches(TorchDispatchMode):
    """Counts launches by operator, and reads of the device by the host, which read zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        name = func.overloadpacket.__name__
        if func is aten._local_scalar_dense.default:
            self.waits["item"] += 1
            return 0
        if func is aten.nonzero.default:
            self.waits["nonzero"] += 1
            return torch.empty(0, args[0].dim(), dtype=torch.int64)
        tensors = [x for x in tree_leaves((args, given)) if isinstance(x, Tensor)]
        result = func(*args, **given)
        devices = {x.device.type for x in (*tensors, *tree_leaves(result)) if isinstance(x, Tensor)}
        if "meta" not in devices or name in ALLOCATIONS or func.is_view or name == "detach":
            return result
        if name == "_to_copy" and len(devices) > 1 and not given.get("non_blocking"):
            self.waits["copy"] += 1
        self.launches[name] += self._kernels(name, args)
        return result

    def _kernels(self, name: str, args: Any) -> int:
        if name.startswith("_foreach_"):
            lists = [items for items in args if isinstance(items, (list, tuple))]
            lists = [items for items in lists if isinstance(items[0], Tensor)]
            return _foreach_kernels(lists)
        if name in ("cat", "stack"):
            dense = all(x.is_contiguous() for x in args[0])
            return -(-len(args[0]) // (CAT if dense else CAT_STRIDED))
        return KERNELS.get(name, 1)


def _foreach_kernels(lists: Sequence[Sequence[Tensor]]) -> int:
    """One per tensor, unless all tensors of a list have one dtype, and are dense with the strides of the other list's."""
    for items in lists:
        if len({x.dtype for x in items}) > 1 or not all(x.is_contiguous() for x in items):
            return len(items)
    for pair in zip(*lists, strict=True):
        if len({(x.shape, x.stride()) for x in pair}) > 1:
            return len(lists[0])
    count, tensors, blocks = 0, 0, 0
    for x in lists[0]:
        tensors += 1
        chunks = -(-x.numel() // CHUNK)
        while blocks + chunks >= BLOCKS:
            chunks -= BLOCKS - blocks
            count += 1
            tensors, blocks = min(1, chunks), 0
        blocks += chunks
        if tensors == TENSORS:
            count, tensors, blocks = count + 1, 0, 0
    return count + (blocks > 0)


@contextmanager
def counted() -> Iterator[Launches]:
    """Also sees `tolist`, which is no operator, and moves from the host by torch.tensor."""
    plain_tolist, plain_tensor = Tensor.tolist, torch.tensor

    def tolist(self: Tensor) -> Any:
        if self.device != META:
            return plain_tolist(self)
        mode.waits["tolist"] += 1
        return plain_tolist(torch.zeros(self.shape, dtype=self.dtype, device="cpu"))

    def tensor(data: Any, *args: Any, device: Any = None, **options: Any) -> Tensor:
        if device is not None and torch.device(device) == META:
            mode.waits["torch.tensor"] += 1
        return plain_tensor(data, *args, device=device, **options)

    Tensor.tolist, torch.tensor = tolist, tensor  # type: ignore[method-assign]
    try:
        with Launches() as mode:
            yield mode
    finally:
        Tensor.tolist, torch.tensor = plain_tolist, plain_tensor  # type: ignore[method-assign]


class Alone(Transport):
    """A rank among peers that send nothing and agree with everything."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world, self.rounds = rank, world, 0

    def start(self, outgoing: Any, incoming: Any) -> Any:
        self.rounds += bool(outgoing or incoming)
        return lambda: None


class OnDevice(MemoryReceiver):
    """Writes into memory on the device, as vLLM's layers are."""

    def write(self, message: Message, flat: Tensor) -> Tensor:
        into = [transfer.destination for transfer in message.transfers]
        for part in into:
            self.loaded[part.name] += part.numel
        parts = [part for _, part in split_message(message, flat)]
        return copy_and_verify(flat, parts, list(map(self._view, into)))


def room(slices: Sequence[ShardSlice], dtype: torch.dtype) -> dict[str, Tensor]:
    sizes: dict[str, int] = {}
    for part in slices:
        last = sum((n - 1) * stride for n, stride in zip(part.shape, part.strides, strict=True))
        sizes[part.param] = max(sizes.get(part.param, 0), part.offset + last + 1)
    return {name: torch.empty(size, dtype=dtype, device=META) for name, size in sizes.items()}


def publisher_of(config: Config, rank: int) -> Publisher:
    """Of one rank of a colocated fleet; its placement is proven."""
    shape, fleet = model_shape(config), fleet_of(config)
    padded = padded_vocab(shape.vocab, fleet.parallel.tensor)
    dtype = DTYPES[config.train.dtype]
    slices = slices_of(
        megatron_table(shape, spec="te", padded_vocab=padded), shape, fleet.trainer_layout(rank)
    )
    parameters = room(slices, dtype)
    table = slices_of(engine_table(shape), shape, fleet.engine_layout(rank))
    made = Publisher(
        plan_of(config, shape, fleet),
        WeightSender(slices, lambda: parameters),
        OnDevice(table, room(table, dtype), dtype, META),
        Alone(rank, fleet.world),
        WeightFormat(hf_shapes(shape), dtype),
        is_atomic=False,
    )
    made._is_proven = True
    return made


def measure(case: str, *overrides: str, rank: int = 0) -> dict[str, Any]:
    """Pieces that a rank packs and writes in a sync, and what the host does for them."""
    file, model = CASES[case]
    config = load_config(ROOT / file, [f"model.path={ROOT}/configs/models/{model}", *overrides])
    publisher = publisher_of(config, rank)
    pieces = Counter(packed=0, written=0)
    for message in publisher.executor.messages:
        pieces["packed"] += len(message.transfers) * (message.sender == rank)
        pieces["written"] += len(message.transfers) * (message.receiver == rank)
    transport: Any = publisher.transport
    with counted() as mode:
        publisher.publish(version=1)
    waits = Counter(rounds=transport.rounds) + mode.waits
    return {"pieces": pieces, "launches": mode.launches, "waits": waits}


def show(case: str) -> None:
    found = measure(case)
    pieces, launches, waits = found["pieces"], found["launches"], found["waits"]
    print(
        f"{case}: {pieces['packed']:,} pieces packed, {pieces['written']:,} written; {launches.total():,} launches "
        f"({launches.total() / pieces.total():.2f} a piece), the host waits {waits.total():,} times"
    )
    for name, counts in (("launches", launches), ("waits", waits)):
        listed = ", ".join(f"{what} {count:,}" for what, count in counts.most_common())
        print(f"    {name}: {listed}")


if __name__ == "__main__":
    for name in sys.argv[1:] or CASES:
        show(name)
