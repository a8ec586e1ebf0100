"""Traces where the engine stores each HF tensor: its loaders run once, on meta tensors.

    model on meta + names and shapes of the checkpoint
      --load_weights under a tracer--> slices, fills, aliases

Views of one tensor share a storage, so the offset, size and stride of a `copy_` show which
rectangle of which HF tensor goes to which elements of which parameter. Nothing is allocated or
copied. A loader that computes (scales, casts) instead of copying is an error. Only this file and
weight_loader.py use vLLM's private reload machinery (vLLM 0.32).
"""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.model_executor.model_loader.reload import layerwise
from vllm.model_executor.model_loader.reload.meta import restore_layer_on_meta
from vllm.model_executor.model_loader.reload.utils import get_layer_params_buffers

from megarl.models.shape import Shape
from megarl.models.shards import ShardSlice
from megarl.types import CheckFailed


@dataclass(frozen=True)
class LoaderTrace:
    slices: tuple[ShardSlice, ...]  # in the order of the model's parameters
    # elements of no HF tensor (vocabulary padding), set to this value
    fills: tuple[tuple[ShardSlice, float], ...]
    # module -> modules that share its parameter but are not loaded: tied heads
    aliases: Mapping[str, tuple[str, ...]]


@torch.no_grad()
def trace_loader(model: nn.Module, shapes: Mapping[str, Shape], dtype: torch.dtype) -> LoaderTrace:
    """Runs the loaders of `model` with every tensor in `shapes`; restores the model.

    Raises CheckFailed if a parameter is not covered by exact rectangles of HF tensors.
    """
    modules_by_parameter = defaultdict(list)
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            modules_by_parameter[id(parameter)].append(name)
    layers = list(model.modules())
    assert not any(layerwise.get_layerwise_info(layer).can_load() for layer in layers), (
        "a reload is under way"
    )
    for layer in layers:
        put_on_meta(layer)
    try:
        sources = {
            name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()
        }
        tracer = _Tracer(sources, dict(model.named_parameters()))
        with tracer:
            model.load_weights(iter(sources.items()))  # type: ignore[operator]
        numels = {name: parameter.numel() for name, parameter in model.named_parameters()}
    finally:
        for layer in layers:
            restore_kernel_tensors(layer)
    order = {name: position for position, name in enumerate(numels)}
    slices = sorted(tracer.slices, key=lambda part: (order[part.param], part.offset))
    loaded = {module_of(part.param) for part in slices}
    aliases = {}
    for names in modules_by_parameter.values():
        owners = loaded.intersection(names)
        if len(owners) == 1 < len(names):
            owner = owners.pop()
            aliases[owner] = tuple(name for name in names if name != owner)
    # with FP8 weights vLLM also looks for scales of the KV cache; without any it uses 1
    exempt = set(chain.from_iterable(aliases.values()))
    exempt |= {
        name
        for name, module in model.named_modules()
        if isinstance(getattr(module, "quant_method", None), BaseKVCacheMethod)
    }
    covered = Counter()  # elements, by parameter
    for part in chain(slices, (part for part, _ in tracer.fills)):
        covered[part.param] += part.numel
    for param, numel in numels.items():
        if covered[param] != numel and module_of(param) not in exempt:
            raise CheckFailed(
                f"the engine's loader fills only {covered[param]} of {numel} elements of {param}"
            )
    return LoaderTrace(tuple(slices), tuple(tracer.fills), aliases)


def module_of(param: str) -> str:
    return param.rpartition(".")[0]


def put_on_meta(layer: nn.Module) -> None:
    """Puts a layer into checkpoint form, on the meta device."""
    info = layerwise.get_layerwise_info(layer)
    info.kernel_tensors = get_layer_params_buffers(layer)
    info.kernel_non_persistent_buffers = set(layer._non_persistent_buffers_set)
    restore_layer_on_meta(layer, info)


def restore_kernel_tensors(layer: nn.Module) -> None:
    """Undoes `put_on_meta`."""
    info = layerwise.get_layerwise_info(layer)
    layerwise._place_kernel_tensors(layer, info)
    info.reset()


class _Tracer(TorchDispatchMode):
    """Records copies and fills into parameters instead of executing them."""

    def __init__(self, sources: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.slices = []
        self.fills = []
        self._sources = {_storage(tensor): (name, tensor) for name, tensor in sources.items()}
        self._clones = {}  # storage -> clone, part of the source
        # storages of sources that the loader sets to zero before it copies them
        self._zeroed = set()
        self._parameters = {_storage(tensor): (name, tensor) for name, tensor in parameters.items()}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Any = None,
    ) -> Any:
        name = func.overloadpacket.__name__
        if not args or not isinstance(args[0], Tensor):
            return self._run(func, args, kwargs)
        target = args[0]
        storage = _storage(target)
        if storage in self._parameters and name in ("copy_", "fill_", "zero_"):
            if name == "copy_":
                self._copy(target, args[1])
            else:
                self._fill(*args)
            return target
        if name.endswith("_") and self._is_source(target):
            _, whole = self._sources.get(storage, ("", None))
            if name != "zero_" or whole is None or target.shape != whole.shape:
                raise self._computed(name, target)
            self._zeroed.add(storage)  # on ranks that must not add it
            return target
        if name == "clone" and storage in self._sources:
            result = func(*args, **(kwargs or {}))
            self._clones[_storage(result)] = (result, target)
            return result
        return self._run(func, args, kwargs)

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Runs an operation. Raises CheckFailed if it computes a new tensor from a source."""
        name = func.overloadpacket.__name__
        result = func(*args, **(kwargs or {}))
        touched = [a for a in args if isinstance(a, Tensor) and self._is_source(a)]
        if touched and isinstance(result, Tensor) and not self._is_source(result):
            raise self._computed(name, touched[0])
        return result

    def _is_source(self, tensor: Tensor) -> bool:
        return _storage(tensor) in self._sources or _storage(tensor) in self._clones

    def _computed(self, operation: str, tensor: Tensor) -> CheckFailed:
        _, tensor = self._clones.get(_storage(tensor), (tensor, tensor))
        return CheckFailed(
            f"the engine's loader applies {operation} to {self._sources[_storage(tensor)][0]} "
            "instead of copying it, so it cannot be sent in shards"
        )

    def _copy(self, target: Tensor, value: Tensor) -> None:
        param, whole = self._parameters[_storage(target)]
        clone, part = self._clones.get(_storage(value), (None, value))
        if clone is not None and value.shape == clone.shape and value.stride() == clone.stride():
            value = part  # for example a transposed tensor made contiguous
        if _storage(value) in self._zeroed:
            self._fill(target, 0.0)
            return
        name, source = self._sources.get(_storage(value), ("", None))
        if source is None or value.shape != target.shape:
            raise CheckFailed(
                f"the engine's loader fills {param} with data that is not part of one HF tensor"
            )
        rectangle = _rectangle(source, value, target)
        if not rectangle:
            raise CheckFailed(
                f"the engine's loader fills {param} with elements of {name} that form no rectangle"
            )
        start, shape, strides = rectangle
        self.slices.append(ShardSlice(name, start, shape, param, _offset(target, whole), strides))

    def _fill(self, target: Tensor, value: float = 0.0) -> None:
        if not target.numel():
            return
        param, whole = self._parameters[_storage(target)]
        start = (0,) * target.dim()
        shape = tuple(target.shape)
        part = ShardSlice("", start, shape, param, _offset(target, whole), target.stride())
        self.fills.append((part, float(value)))


def _offset(view: Tensor, whole: Tensor) -> int:
    return int(view.storage_offset()) - int(whole.storage_offset())


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _rectangle(source: Tensor, value: Tensor, target: Tensor) -> tuple[Shape, Shape, Shape] | None:
    """Returns (start, shape, strides in `target`) of the view `value` of a contiguous `source`.

    None if it is no rectangle.
    """
    offset = value.storage_offset()
    start = []
    for stride in source.stride():
        start.append(offset // stride)
        offset %= stride
    shape = [1] * source.dim()
    strides = [0] * source.dim()
    for size, step, target_step in zip(value.shape, value.stride(), target.stride(), strict=True):
        if size == 1:
            continue
        for dim, whole in enumerate(source.shape):
            if source.stride(dim) == step and whole > 1 and shape[dim] == 1:
                break
        else:
            return None
        if start[dim] + size > source.shape[dim]:
            return None
        shape[dim] = size
        strides[dim] = target_step
    return tuple(start), tuple(shape), tuple(strides)
