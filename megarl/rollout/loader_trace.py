"""Where the engine keeps each HF tensor, read off its own loaders: they run once, on meta, and every copy is recorded.

    model on meta + names and shapes of the checkpoint  --load_weights under a recorder-->  boxes, fills, aliases

Views of one tensor share a storage, so a `copy_` says by offset, size and stride which rectangle of which HF
tensor goes to which elements of which parameter. Nothing is allocated, nothing is copied, and a loader that
computes (transposes into new memory, scales, casts) instead of copying is refused by name. Uses vLLM's private
reload machinery (vLLM 0.32): this module and receiver.py are the only ones that know it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.model_loader.reload import layerwise
from vllm.model_executor.model_loader.reload.meta import restore_layer_on_meta
from vllm.model_executor.model_loader.reload.utils import get_layer_params_buffers

from megarl.models.shards import ShardSlice
from megarl.types import CheckFailed

__all__ = ["Fill", "Recording", "record"]


@dataclass(frozen=True, slots=True)
class Fill:
    """Elements of `param` that no HF tensor reaches (vocabulary padding) and the loader sets to `value`."""

    param: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    value: float


@dataclass(frozen=True, slots=True)
class Recording:
    boxes: tuple[ShardSlice, ...]  # in the order of the model's parameters
    fills: tuple[Fill, ...]
    aliases: Mapping[
        str, tuple[str, ...]
    ]  # module -> modules that share its parameter and are never loaded (tied heads)


@torch.no_grad()
def record(model: nn.Module, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> Recording:
    """`shapes`: every tensor of the checkpoint. The model is left as it was.

    Raises CheckFailed when a parameter is not covered by exact rectangles of HF tensors.
    """
    shared = _shared_parameters(model)
    kept = _put_on_meta(model)
    try:
        sources = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()}
        recorder = _Recorder(sources, dict(model.named_parameters()))
        with recorder:
            model.load_weights(iter(sources.items()))  # type: ignore[operator]
        numels = {name: parameter.numel() for name, parameter in model.named_parameters()}
    finally:
        _put_back(kept)
    order = {name: position for position, name in enumerate(numels)}
    boxes = tuple(sorted(recorder.boxes, key=lambda box: (order[box.param], box.offset)))
    aliases = _aliases(shared, {_module(box.param) for box in boxes})
    _refuse_uncovered(numels, boxes, recorder.fills, aliases)
    return Recording(boxes, tuple(recorder.fills), aliases)


def _shared_parameters(model: nn.Module) -> list[list[str]]:
    """Modules that hold one and the same parameter, by groups."""
    groups: dict[int, list[str]] = defaultdict(list)
    for name, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                groups[id(parameter)].append(name)
    return [names for names in groups.values() if len(names) > 1]


def _aliases(shared: list[list[str]], loaded: set[str]) -> dict[str, tuple[str, ...]]:
    found = {}
    for names in shared:
        owners = [name for name in names if name in loaded]
        if len(owners) == 1:
            found[owners[0]] = tuple(name for name in names if name not in loaded)
    return found


def _put_on_meta(model: nn.Module) -> list[tuple[nn.Module, Any]]:
    """Every layer in checkpoint form without memory; what `_put_back` needs."""
    kept = []
    for layer in model.modules():
        info = layerwise.get_layerwise_info(layer)
        assert not info.can_load(), f"{type(layer).__name__} is in the middle of a reload"
        info.kernel_tensors = get_layer_params_buffers(layer)
        info.kernel_non_persistent_buffers = set(layer._non_persistent_buffers_set)
        restore_layer_on_meta(layer, info)
        kept.append((layer, info))
    return kept


def _put_back(kept: list[tuple[nn.Module, Any]]) -> None:
    for layer, info in kept:
        layerwise._place_kernel_tensors(layer, info)
        info.reset()


class _Recorder(TorchDispatchMode):
    """Records copies and fills into parameters instead of doing them."""

    def __init__(self, sources: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.boxes: list[ShardSlice] = []
        self.fills: list[Fill] = []
        self._sources = {_storage(tensor): (name, tensor) for name, tensor in sources.items()}
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}  # storage -> a whole copy, the part of a source that it is
        self._emptied: set[int] = set()  # sources that the loader sets to zero before it copies them
        self._parameters = {_storage(tensor): (name, tensor) for name, tensor in parameters.items()}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        target = args[0] if args and isinstance(args[0], Tensor) else None
        if target is not None and _storage(target) in self._parameters:
            if name == "copy_":
                self._copy(target, args[1])
                return target
            if name in ("fill_", "zero_"):
                self._fill(target, 0.0 if name == "zero_" else float(args[1]))
                return target
        if name.endswith("_") and target is not None and self._is_loaded(target):
            _, whole = self._sources.get(_storage(target), ("", None))
            if name != "zero_" or whole is None or target.shape != whole.shape:
                raise self._computed(name, target)
            self._emptied.add(_storage(target))  # by the ranks that are not to add it
            return target
        result = func(*args, **(kwargs or {}))
        if name == "clone" and target is not None and _storage(target) in self._sources:
            self._copies[_storage(result)] = (result, target)
            return result
        touched = [a for a in args if isinstance(a, Tensor) and self._is_loaded(a)]
        if touched and isinstance(result, Tensor) and not self._is_loaded(result):
            raise self._computed(name, touched[0])
        return result

    def _is_loaded(self, tensor: Tensor) -> bool:
        return _storage(tensor) in self._sources or _storage(tensor) in self._copies

    def _computed(self, name: str, tensor: Tensor) -> CheckFailed:
        _, tensor = self._copies.get(_storage(tensor), (tensor, tensor))
        source = self._sources[_storage(tensor)][0]
        return CheckFailed(
            f"the engine's loader computes {name} on {source} instead of copying it: cannot be sent in shards"
        )

    def _copy(self, target: Tensor, value: Tensor) -> None:
        param, whole = self._parameters[_storage(target)]
        copy, part = self._copies.get(_storage(value), (None, value))
        if copy is not None and value.shape == copy.shape and value.stride() == copy.stride():
            value = part  # transposed, say, and made contiguous
        if _storage(value) in self._emptied:
            self._fill(target, 0.0)
            return
        found = self._sources.get(_storage(value))
        if found is None or value.shape != target.shape:
            raise CheckFailed(f"the engine's loader writes {param} from something that is not a part of one HF tensor")
        name, source = found
        where = _rectangle(source, value, target)
        if where is None:
            raise CheckFailed(f"the engine's loader takes elements of {name} for {param} that are not a rectangle")
        start, shape, strides = where
        self.boxes.append(ShardSlice(name, start, shape, param, _offset(target, whole), strides))

    def _fill(self, target: Tensor, value: float) -> None:
        if not target.numel():
            return
        param, whole = self._parameters[_storage(target)]
        offset = _offset(target, whole)
        self.fills.append(Fill(param, offset, tuple(target.shape), tuple(target.stride()), value))


def _offset(view: Tensor, whole: Tensor) -> int:
    return int(view.storage_offset()) - int(whole.storage_offset())


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _rectangle(
    source: Tensor, value: Tensor, target: Tensor
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]] | None:
    """The view `value` in dims of the contiguous `source`: (start, shape, strides in `target`); None: no rectangle."""
    rest, start = value.storage_offset(), []
    for stride in source.stride():
        start.append(rest // stride)
        rest %= stride
    shape, strides = [1] * source.dim(), [0] * source.dim()
    for size, step, into in zip(value.shape, value.stride(), target.stride(), strict=True):
        if size == 1:
            continue
        fits = (d for d in range(source.dim()) if source.stride(d) == step and source.shape[d] > 1 and shape[d] == 1)
        dim = next(fits, None)
        if dim is None or start[dim] + size > source.shape[dim]:
            return None
        shape[dim], strides[dim] = size, into
    return tuple(start), tuple(shape), tuple(strides)


def _module(param: str) -> str:
    return param.rpartition(".")[0]


def _refuse_uncovered(
    numels: Mapping[str, int], boxes: tuple[ShardSlice, ...], fills: list[Fill], aliases: Mapping[str, tuple[str, ...]]
) -> None:
    covered: dict[str, int] = defaultdict(int)
    for box in boxes:
        covered[box.param] += box.numel
    for fill in fills:
        covered[fill.param] += prod(fill.shape)
    aliased = {name for names in aliases.values() for name in names}
    for param, numel in numels.items():
        if covered[param] != numel and _module(param) not in aliased:
            raise CheckFailed(f"the engine's loader fills {covered[param]} of {numel} elements of {param}")
