"""Writes weights into a live engine, layer by layer: only a layer or two exist twice.

    empty --begin--> writing --seal--> sealed --finish(version)--> ready --begin--> ...
      ^-------------------- abort, from any state --------------------'

A layer is opened when its first transfer arrives (in checkpoint form, this rank's shard) and closed
when its last element is written: it is processed as after loading, then copied into the tensors
that kernels use, whose addresses stay the same. Only a ready engine accepts prompts. vLLM 0.32's
reload has two bugs that are visible only in log-probs: a tied head keeps its old packed weights,
and the CPU MoE kernel keeps its old pre-pack; `_close` repairs both.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.attention.attention import set_default_quant_scales
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload import layerwise
from vllm.model_executor.model_loader.reload.meta import materialize_layer
from vllm.platforms import current_platform

from megarl.models.shards import ShardSlice, recounted
from megarl.rollout.vllm.loader_trace import (
    module_of,
    put_on_meta,
    restore_kernel_tensors,
    trace_loader,
)
from megarl.types import CheckFailed
from megarl.weights.encode.quantize import DTYPES
from megarl.weights.plan.plan import Message
from megarl.weights.sync.checksum import positional_checksum
from megarl.weights.sync.copies import copy_and_verify
from megarl.weights.sync.execute import split_message, strided_view
from megarl.weights.sync.publish import WeightFormat

LoaderState = Literal["empty", "writing", "sealed", "ready"]
PROCESSED = "_already_called_process_weights_after_loading"


class LayerReceiver:
    """publish.WeightReceiver. `reset_cache` drops the engine's prefix cache of old weights."""

    request = None  # vLLM's, of an adapter

    def __init__(
        self, model: nn.Module, weights: WeightFormat, reset_cache: Callable[[], object]
    ) -> None:
        reset_cache_scales(model)
        trace = trace_loader(model, weights.shapes, weights.dtype)
        self.slices = weights.moved_slices(trace.slices)
        self._aliases = trace.aliases
        self.device = next(model.parameters()).device
        self.dtype = weights.dtype
        self.state: LoaderState = "empty"
        self.version: int | None = None
        self._modules = dict(model.named_modules())
        self._weights = weights
        self._reset_cache = reset_cache
        self._sums = []  # positional checksum of every slice, if placement is checked
        # module -> numbered slices
        self._slices = defaultdict(list)
        self._fills = defaultdict(list)  # module -> LoaderTrace.fills
        self._numel = Counter()  # module -> its number of elements
        self._left = Counter()  # module -> elements that have not arrived
        self._loaded = Counter()  # HF tensor -> elements received
        for number, part in enumerate(self.slices):
            module = module_of(part.param)
            self._slices[module].append((number, part))
            self._numel[module] += part.numel
        for part, value in trace.fills:
            self._fills[module_of(part.param)].append((part, value))

    def begin(self, *, check_placement: bool) -> None:
        self.abort()
        self.state = "writing"
        zero = torch.zeros((), dtype=torch.int64, device=self.device)
        self._sums = [zero] * (len(self.slices) * check_placement)
        self._left = self._numel.copy()
        self._loaded.clear()

    @torch.no_grad()
    def write(self, message: Message, flat: Tensor) -> Tensor:
        assert self.state == "writing", f"write() in state {self.state}"
        modules = {}
        parts = []
        views = []
        for transfer, part in split_message(message, flat):
            into = transfer.destination
            module = module_of(into.param)
            modules[module] = None
            if not self._is_open(self._modules[module]):
                self._open(module)
            view = self._view(into)
            if view.dtype != part.dtype:
                part = part.view(self._weights.dtype)
            parts.append(part)
            views.append(view)
            self._loaded[into.name] += into.numel
            self._left[module] -= into.numel
        # read back before layers close: packed bytes cannot be compared
        wrong = copy_and_verify(flat, parts, views)
        for module in modules:
            if not self._left[module]:
                self._close(module)
        return wrong

    @torch.no_grad()
    def seal(self) -> Mapping[str, int]:
        assert self.state == "writing", f"seal() in state {self.state}"
        missing = [
            f"{module} ({left} of {self._numel[module]} elements)"
            for module, left in self._left.items()
            if left
        ]
        if missing:
            raise CheckFailed(f"layers are still missing weights: {', '.join(missing)}")
        for layer in self._modules.values():
            if is_deferred_attention_layer(layer):
                layer.process_weights_after_loading(self._weights.dtype)  # type: ignore[operator]
        self._reset_cache()
        self.state = "sealed"
        return dict(self._loaded)

    def positional_checksums(self) -> Tensor:
        assert self.state == "sealed" and self._sums, (
            f"positional_checksums() in state {self.state}"
        )
        return torch.stack(self._sums)

    def finish(self, version: int) -> None:
        assert self.state == "sealed", f"finish() in state {self.state}"
        self.state = "ready"
        self.version = version

    def abort(self) -> None:
        """Drops the version, restores the kernel tensors of open layers; closed ones stay new."""
        self.state = "empty"
        self.version = None
        for module in self._numel:
            layer = self._modules[module]
            if self._is_open(layer):
                restore_kernel_tensors(layer)

    def _view(self, part: ShardSlice) -> Tensor:
        """Views a slice in the dtype that moves, or in the parameter's own where it is wider."""
        parameter = self._parameter(part)
        name = part.name
        weights = self._weights
        expected = weights.dtype_of(name)
        if name in weights.storage.names:
            expected = DTYPES[weights.storage.format.item]
        if parameter.dtype == expected:
            return strided_view(parameter, part, weights.unit)
        if name in weights.sizes.others:
            raise CheckFailed(
                f"the engine keeps {name} in {parameter.dtype}, but it moves in {expected}"
            )
        sizes = weights.sizes
        return strided_view(parameter, recounted(part, sizes.unit, sizes.usual))

    def _parameter(self, part: ShardSlice) -> Tensor:
        module, _, leaf = part.param.rpartition(".")
        return getattr(self._modules[module], leaf)

    def _is_open(self, layer: nn.Module) -> bool:
        return layerwise.get_layerwise_info(layer).kernel_tensors is not None

    def _open(self, module: str) -> None:
        layer = self._modules[module]
        put_on_meta(layer)
        materialize_layer(layer, layerwise.get_layerwise_info(layer))
        for part, value in self._fills[module]:
            strided_view(self._parameter(part), part).fill_(value)

    def _close(self, module: str) -> None:
        layer = self._modules[module]
        info = layerwise.get_layerwise_info(layer)
        if self._sums:
            for number, part in self._slices[module]:
                view = self._view(part)
                if view.dtype != self._weights.unit:  # as it was sent
                    view = view.to(self._weights.dtype).view(self._weights.unit)
                self._sums[number] = positional_checksum(view, part.start)
        _process(layer, info.restore_device)
        layerwise._copy_and_restore_kernel_tensors(layer, info)
        info.reset()
        for name in self._aliases.get(module, ()):
            # a tied head shares the embedding's parameter but multiplies by its own packed copy
            _process(self._modules[name], info.restore_device)


def _process(layer: nn.Module, device: torch.device) -> None:
    """Processes a layer as vLLM does after loading: pack, shuffle, quantize."""
    if not isinstance(getattr(layer, "quant_method", None), QuantizeMethodBase):
        return
    method: Any = layer.quant_method
    if hasattr(layer, PROCESSED):
        delattr(layer, PROCESSED)
    kernel = getattr(method, "moe_kernel", None)
    config = getattr(method, "moe_quant_config", None)
    with device:
        method.process_weights_after_loading(layer)
        if kernel and not current_platform.is_cpu():
            # those that CUDA graphs call; new ones would keep the open layer's tensors
            method.moe_kernel = kernel
            method.moe_quant_config = config
        elif kernel and method.moe_kernel is kernel:
            # vLLM 0.32 re-packs experts only when it builds the kernel, not on an update (PR 40390)
            kernel.fused_experts.process_weights_after_loading(layer)
    if hasattr(layer, "update_param_tp_status"):
        layer.update_param_tp_status()  # type: ignore[operator]


def reset_cache_scales(model: nn.Module) -> None:
    """Sets the scales of the KV cache to 1, as vLLM does when it loads a model from files.

    Its dummy loader leaves random scales in a model with FP8 weights, and no sync moves them.
    """
    for module in model.modules():
        if hasattr(module, "_k_scale"):
            set_default_quant_scales(module)
