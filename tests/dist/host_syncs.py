"""Where a pass over micro-batches makes the host wait for the device: reads of device tensors, and blocking copies.

python host_syncs.py [LOSS]      two lists for 4 micro-batches: inside Megatron's schedule, and before or after it

A CPU stands for a GPU and its host: "cpu:0" is the device, "cpu" the host. A tensor is on the device if it was copied
or made there, or computed from one that is. On a GPU each of these waits for every kernel launched so far: reading a
number (`item`, `tolist`), an output whose shape depends on values (`nonzero`, a boolean index), and a copy between
pageable memory and the device that is not `non_blocking`. What only the CPU's layers do (LOCAL) is not counted.
"""

from __future__ import annotations

import sys
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import megarl

aten = torch.ops.aten
DEVICE, HOST = torch.device("cpu", 0), torch.device("cpu")
DYNAMIC = (
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.repeat_interleave.Tensor,
)
INDEXING = (
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
)
LOCAL = (
    "trainer/layers.py",
    "trainer/context_parallel.py",
    "embeddings/rope_utils.py",
    "moe/experts.py",
)
ROOTS = (
    f"{Path(megarl.__file__).parent}/",
    "/megatron/core/",
)  # a clone may be in a folder of that name


class HostSyncs(TorchDispatchMode):
    """Counts them by kind and place."""

    def __init__(self) -> None:
        super().__init__()
        self._device: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.found: Counter[str] = Counter()

    def tag(self, tensor: Tensor) -> None:
        self._device[tensor.untyped_storage()._cdata] = weakref.ref(tensor.untyped_storage())

    def on_device(self, tensor: Tensor) -> bool:
        known = self._device.get(tensor.untyped_storage()._cdata)
        return known is not None and known() is not None

    def count(self, kind: str) -> None:
        places = [
            f"{frame.filename.split(root)[-1]}: {frame.line}"
            for frame in traceback.extract_stack()
            for root in ROOTS
            if root in frame.filename and "patches/megatron" not in frame.filename
        ]
        place = places[-1] if places else "torch"
        if not any(name in place for name in LOCAL):
            self.found[f"{kind} {place}"] += 1

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        tensors = [x for x in tree_leaves((args, given)) if isinstance(x, Tensor)]
        is_there = [self.on_device(x) for x in tensors]
        target = given.get("device")
        result = func(*args, **given)
        lands = any(is_there) if target is None else torch.device(target) == DEVICE
        if func is aten._local_scalar_dense.default and any(is_there):
            self.count("read")
        elif (func in DYNAMIC and any(is_there)) or (
            func in INDEXING and is_there[0] and self._syncs(tensors[1:])
        ):
            self.count(f"shape ({func.__name__})")
        elif func is aten._to_copy.default and target is not None and lands != any(is_there):
            self._copy(given.get("non_blocking", False))
        elif func is aten.copy_.default and is_there[0] != is_there[-1] and tensors[-1].dim():
            lands = is_there[0]
            self._copy(args[2] if len(args) > 2 else False)
        if lands:
            for tensor in tree_leaves(result):
                if isinstance(tensor, Tensor):
                    self.tag(tensor)
        return result

    def _copy(self, non_blocking: bool) -> None:
        if not non_blocking:
            self.count("copy")

    def _syncs(self, indices: list[Tensor]) -> bool:
        return any(
            x.dtype == torch.bool or (not x.is_floating_point() and not self.on_device(x))
            for x in indices
        )


@contextmanager
def host_syncs() -> Iterator[HostSyncs]:
    """Also sees the methods that read memory without an operator."""
    plain_tensor, tolist, numpy = torch.tensor, Tensor.tolist, Tensor.numpy

    def tensor(data: Any, *args: Any, device: Any = None, **options: Any) -> Tensor:
        made = plain_tensor(data, *args, device=device, **options)
        if device is not None and torch.device(device) == DEVICE:
            mode.tag(made)
            mode.count("copy")
        return made

    def reading(method: Callable) -> Callable:
        def read(self: Tensor, *args: Any, **options: Any) -> Any:
            if mode.on_device(self):
                mode.count("read")
            return method(self, *args, **options)

        return read

    torch.tensor, Tensor.tolist, Tensor.numpy = tensor, reading(tolist), reading(numpy)  # type: ignore[method-assign]
    try:
        with HostSyncs() as mode:
            yield mode
    finally:
        torch.tensor, Tensor.tolist, Tensor.numpy = plain_tensor, tolist, numpy  # type: ignore[method-assign]


def measure(
    folder: Path, *, num_rows: int, experts: int = 0, **algorithm: Any
) -> tuple[Counter[str], Counter[str]]:
    """Returns what one step with a micro-batch per row does inside the schedule, and outside of it."""
    from trainer_cases import Policy, random_batch

    from megarl.commands.random_model import create_model
    from megarl.config.schema import Config, Create
    from megarl.trainer import trainer as module

    sizes = {
        "layers": 2,
        "hidden": 32,
        "heads": 2,
        "kv_heads": 2,
        "head_dim": 16,
        "vocab": 67,
        "tokenizer": "none",
    }
    if experts:
        sizes |= {"family": "qwen3_moe", "experts": experts, "moe_intermediate": 32}
    model = create_model(Create.model_validate(sizes), folder)
    train = {"dtype": "fp32", "max_tokens_per_microbatch": 1}  # rows that exceed it are alone
    moe = {"aux_loss": 1e-3} if experts else {}
    policy = Policy.build(
        Config.model_validate({"train": train, "algorithm": algorithm, "moe": moe}),
        model,
        device=DEVICE,
    )
    scored = policy.score(random_batch(num_rows=num_rows))
    inside: Counter[str] = Counter()
    plain = module.forward_backward

    def counted(*args: Any, **options: Any) -> None:
        before = Counter(mode.found)
        plain(*args, **options)
        inside.update(mode.found - before)

    module.forward_backward = counted
    try:
        with host_syncs() as mode:
            for chunk in policy.trainer.model:
                parameters = list(chunk.parameters())
                for tensor in (
                    *parameters,
                    *chunk.module.buffers(),
                    *(x.main_grad for x in parameters),
                ):
                    mode.tag(tensor)
            policy.trainer.forward(scored)
            policy.update(scored)
    finally:
        module.forward_backward = plain
        policy.trainer.close()
    return inside, mode.found - inside


def main(loss: str = "ppo_clip", experts: str = "0") -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with TemporaryDirectory() as folder:
        inside, outside = measure(Path(folder), num_rows=4, experts=int(experts), loss=loss)
    for name, found in (("inside the schedule", inside), ("outside", outside)):
        print(f"{name}: {found.total()}")
        for place, count in found.most_common():
            print(f"{count:6} {place}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
