"""Weights into a live engine, layer by layer: at most a layer or two exist twice, and kernels keep their addresses.

    empty --begin--> writing --seal--> sealed --finish(version)--> ready --begin--> ...
      ^-------------------- abort, from any state --------------------'

A layer is opened when its first piece arrives (checkpoint form, this rank's shard), written piece by piece, and
closed when its last element has arrived: re-processed, then copied into the tensors the kernels know. Only a
ready engine is given prompts. vLLM 0.32's own reload leaves two faults, silent but for the log-probs: a tied
head keeps the pack of its old weights, and the CPU MoE kernel keeps its old pre-pack; both are repaired in `_close`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload import layerwise
from vllm.model_executor.model_loader.reload.meta import materialize_layer, restore_layer_on_meta
from vllm.model_executor.model_loader.reload.utils import get_layer_params_buffers

from megarl.models.shards import ShardSlice
from megarl.rollout.loader_trace import Fill, Recording
from megarl.types import CheckFailed
from megarl.weights.checksum import copy_and_verify, positional_checksum
from megarl.weights.fp32_views import view_fp32_as_16bit
from megarl.weights.plan import Message, View

__all__ = ["LayerReceiver", "State"]

State = Literal["empty", "writing", "sealed", "ready"]
PROCESSED = "_already_called_process_weights_after_loading"


class LayerReceiver:
    """publish.Receiver. `reset_cache` drops what the engine remembers of old weights.

    `fp32`: HF tensors that the trainer sends in fp32 whatever `dtype` is, as words of it.
    """

    def __init__(
        self,
        model: nn.Module,
        recording: Recording,
        dtype: torch.dtype,
        reset_cache: Callable[[], object],
        fp32: frozenset[str] = frozenset(),
    ) -> None:
        self.boxes = view_fp32_as_16bit(recording.boxes, fp32, dtype.itemsize)
        self._fp32 = fp32
        self.state: State = "empty"
        self.version: int | None = None
        self._model = model
        self._modules = dict(model.named_modules())
        self._aliases = recording.aliases
        self._dtype = dtype
        self._reset_cache = reset_cache
        self._total: dict[str, int] = defaultdict(int)  # elements each module waits for
        self._fills: dict[str, list[Fill]] = defaultdict(list)
        for box in self.boxes:
            self._total[_split(box.param)[0]] += box.numel
        self._sums: list[Tensor] = []  # of every box, while places are to be proven
        self._boxes: dict[str, list[tuple[int, ShardSlice]]] = defaultdict(list)  # of each module
        for number, box in enumerate(self.boxes):
            self._boxes[_split(box.param)[0]].append((number, box))
        for fill in recording.fills:
            self._fills[_split(fill.param)[0]].append(fill)
        self._left: dict[str, int] = {}
        self._loaded: dict[str, int] = defaultdict(int)  # elements received of each HF tensor

    def begin(self, *, places: bool) -> None:
        self.abort()
        self.state = "writing"
        self._sums = [torch.zeros((), dtype=torch.int64)] * len(self.boxes) if places else []
        self._left = dict(self._total)
        self._loaded.clear()

    @torch.no_grad()
    def write(self, message: Message, flat: Tensor) -> Tensor:
        """`flat` [numel] goes where the message's pieces say; how many of them read back otherwise."""
        assert self.state == "writing", f"write in state {self.state}"
        wrong, at = torch.zeros((), dtype=torch.int64, device=flat.device), 0
        for piece in message.pieces:
            module, _ = _split(piece.destination.param)
            layer = self._modules[module]
            if not self._is_open(layer):
                self._open(module)
            view = self._view(layer, piece.name, piece.shape, piece.destination)
            # read back before the layer closes: packed bytes compare with nothing
            wrong += copy_and_verify(flat[at : at + piece.numel].view(piece.shape), view)
            at += piece.numel
            self._loaded[piece.name] += piece.numel
            self._left[module] -= piece.numel
            if not self._left[module]:
                self._close(module)
        return wrong

    @torch.no_grad()
    def seal(self) -> Mapping[str, int]:
        """Raises CheckFailed when a layer still waits for elements."""
        assert self.state == "writing", f"seal in state {self.state}"
        waiting = {module: left for module, left in self._left.items() if left}
        if waiting:
            shown = ", ".join(
                f"{module} ({left} of {self._total[module]} elements)" for module, left in waiting.items()
            )
            raise CheckFailed(f"layers still wait for weights: {shown}")
        for layer in self._modules.values():
            if is_deferred_attention_layer(layer):
                layer.process_weights_after_loading(self._dtype)  # type: ignore[operator]
        self._reset_cache()
        self.state = "sealed"
        return dict(self._loaded)

    def places(self) -> Tensor:
        assert self.state == "sealed" and self._sums, f"places in state {self.state}"
        return torch.stack(self._sums)

    def finish(self, version: int) -> None:
        assert self.state == "sealed", f"finish in state {self.state}"
        self.state, self.version = "ready", version

    def abort(self) -> None:
        """No version from here on. Open layers get their kernel tensors back; closed ones hold new weights."""
        self.state, self.version = "empty", None
        for module in self._total:
            layer = self._modules[module]
            if self._is_open(layer):
                info = layerwise.get_layerwise_info(layer)
                layerwise._place_kernel_tensors(layer, info)
                info.reset()

    def _view(self, layer: nn.Module, name: str, shape: tuple[int, ...], into: View | ShardSlice) -> Tensor:
        data = getattr(layer, _split(into.param)[1]).data
        if name in self._fp32:
            if data.dtype != torch.float32:
                raise CheckFailed(f"the engine keeps {name} in {data.dtype}, the trainer in fp32")
            data = data.view(self._dtype)
        return data.as_strided(shape, into.strides, data.storage_offset() + into.offset)

    def _is_open(self, layer: nn.Module) -> bool:
        return layerwise.get_layerwise_info(layer).kernel_tensors is not None

    def _open(self, module: str) -> None:
        layer = self._modules[module]
        info = layerwise.get_layerwise_info(layer)
        info.kernel_tensors = get_layer_params_buffers(layer)
        info.kernel_non_persistent_buffers = set(layer._non_persistent_buffers_set)
        restore_layer_on_meta(layer, info)
        materialize_layer(layer, info)
        for fill in self._fills[module]:
            _fill(layer, fill)

    def _close(self, module: str) -> None:
        layer = self._modules[module]
        info = layerwise.get_layerwise_info(layer)
        for number, box in self._boxes[module] if self._sums else ():
            self._sums[number] = positional_checksum(self._view(layer, box.name, box.shape, box), box.start)
        _process(layer, info.restore_device)
        layerwise._copy_and_restore_kernel_tensors(layer, info)
        info.reset()
        for name in self._aliases.get(module, ()):
            # a tied head shares the embedding's parameter but multiplies with its own pack of it
            _process(self._modules[name], info.restore_device)


def _process(layer: nn.Module, device: torch.device) -> None:
    """What vLLM does to a layer once its weights are in: pack, shuffle, quantize."""
    found = getattr(layer, "quant_method", None)
    if not isinstance(found, QuantizeMethodBase):
        return
    method: Any = found
    if hasattr(layer, PROCESSED):
        delattr(layer, PROCESSED)
    kernel = getattr(method, "moe_kernel", None)
    with device:
        method.process_weights_after_loading(layer)
        if kernel is not None and method.moe_kernel is kernel and next(layer.parameters()).device.type == "cpu":
            # vLLM 0.32 re-packs experts only when it builds the kernel (its PR 40390), not on an update
            kernel.fused_experts.process_weights_after_loading(layer)
    if hasattr(layer, "update_param_tp_status"):
        layer.update_param_tp_status()  # type: ignore[operator]


def _split(param: str) -> tuple[str, str]:
    module, _, leaf = param.rpartition(".")
    return module, leaf


def _fill(layer: nn.Module, fill: Fill) -> None:
    data = getattr(layer, _split(fill.param)[1]).data
    data.as_strided(fill.shape, fill.strides, data.storage_offset() + fill.offset).fill_(fill.value)
