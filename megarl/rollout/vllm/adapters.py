"""The policy as a LoRA adapter in the engine: base weights move once, later syncs move the adapters only.

    messages -> whole A and B of every projection, on the host --seal--> vLLM's LoRA slot --read back, compared

vLLM wraps the layers that it adapts, so their base weights are traced and written through `unwrapped` modules. A
request names the adapter that is in the slot; vLLM never reads one from a file (vLLM 0.32).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest

from megarl.models.lora import PREFIX, AdapterFormat, adapter_names, module_name
from megarl.models.shards import ShardSlice, whole_tensor
from megarl.rollout.loader_trace import module_of
from megarl.rollout.weight_loader import LayerReceiver
from megarl.types import CheckFailed
from megarl.weights.execute import MemoryReceiver

NUMBER = 1  # of the adapter
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM has room for


def engine_options(adapters: AdapterFormat) -> dict[str, Any]:
    """Arguments of vLLM's LLM."""
    room = next(size for size in RANKS if size >= adapters.rank)
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": room,
        "lora_target_modules": adapters.targets,
    }


@contextmanager
def unwrapped(model: nn.Module) -> Iterator[None]:
    """Within the context, the model has its own layers instead of vLLM's wrappers."""
    wrappers = [(name, x) for name, x in model.named_modules() if isinstance(x, BaseLayerWithLoRA)]
    places = [
        (model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], x)
        for name, x in wrappers
    ]
    for parent, leaf, wrapper in places:
        setattr(parent, leaf, wrapper.base_layer)
    try:
        yield
    finally:
        for parent, leaf, wrapper in places:
            setattr(parent, leaf, wrapper)


class AdapterReceiver:
    """publish.WeightReceiver of the adapters. `base` receives the base weights, which must have a version before."""

    request = LoRARequest("policy", NUMBER, "none")

    def __init__(
        self,
        model: nn.Module,
        base: LayerReceiver,
        adapters: AdapterFormat,
        reset_cache: Callable[[], object],
    ) -> None:
        self.base, self.device, self._state = base, base.device, "empty"
        self.tensors = {
            name: torch.empty(shape, dtype=base.dtype, device="cpu")
            for name, shape in adapters.shapes.items()
        }
        self.slices: Sequence[ShardSlice] = [
            whole_tensor(name, shape) for name, shape in adapters.shapes.items()
        ]
        self._memory = MemoryReceiver(self.slices, self.tensors, base.dtype, base.device)
        self.write, self.positional_checksums = (
            self._memory.write,
            self._memory.positional_checksums,
        )
        self._format, self._reset_cache = adapters, reset_cache
        self._model: Any = model
        self._parts: dict[str, list[ShardSlice]] = defaultdict(list)  # of base weights, by module
        for part in base.slices:
            if part.name.endswith(".weight") and module_name(part.name) in adapters.targets:
                self._parts[module_of(part.param)].append(part)
        bound = {
            name for parts in self._parts.values() for part in parts for name in _names(part.name)
        }
        unbound = sorted(adapters.shapes.keys() - bound) or sorted(
            module for module in self._parts if module not in self._model.lora_manager.modules
        )
        if unbound:
            raise CheckFailed(f"vLLM cannot adapt {unbound[0]} of this model; set lora.sync=merged")

    @property
    def state(self) -> str:
        """As of LayerReceiver; without base weights, the adapters are of no use."""
        return self._state if self.base.state == "ready" else "empty"

    @property
    def version(self) -> int | None:
        return self._memory.version

    def begin(self, *, check_placement: bool) -> None:
        assert self.base.state == "ready", "the base weights come first"
        self._state = "writing"
        self._memory.begin(check_placement=check_placement)

    @torch.no_grad()
    def seal(self) -> Mapping[str, int]:
        """Puts the adapters into vLLM's slot. Raises CheckFailed if it then holds others."""
        manager, dtype = self._model.lora_manager, self.base.dtype
        helper = PEFTHelper(
            r=self._format.rank, lora_alpha=self._format.alpha, target_modules=self._format.targets
        )  # type: ignore[arg-type]
        tensors = {
            name: tensor.clone() for name, tensor in self.tensors.items()
        }  # vLLM scales B in place
        manager.remove_adapter(NUMBER)
        manager.add_adapter(
            LoRAModel.from_lora_tensors(NUMBER, tensors, helper, device="cpu", dtype=dtype)
        )
        manager.activate_adapter(NUMBER)
        for module, parts in self._parts.items():
            self._compare(module, parts)
        self._reset_cache()
        self._state = "sealed"
        return self._memory.seal()

    def finish(self, version: int) -> None:
        self._memory.finish(version)
        self._state = "ready"

    def abort(self) -> None:
        self._memory.abort()
        self._state = "empty"

    def _compare(self, module: str, parts: Sequence[ShardSlice]) -> None:
        """Compares what the slot of a layer holds with this rank's part of the adapters, bit for bit."""
        wrapper, rank = self._model.lora_manager.modules[module], self._format.rank
        for number, part in enumerate(parts):
            (row, column), (rows, columns) = part.start, part.shape
            held_a = wrapper.lora_a_stacked[number][0, 0, :rank, :columns].cpu()
            held_b = wrapper.lora_b_stacked[number][0, 0, :rows, :rank].cpu()
            a, b = (self.tensors.get(name) for name in _names(part.name))
            if a is None or b is None:
                is_equal = not held_b.any()
            else:
                b = b[row : row + rows] * (self._format.alpha / rank)
                is_equal = held_a.equal(a[:, column : column + columns]) and held_b.equal(b)
            if not is_equal:
                raise CheckFailed(
                    f"the engine's adapter of {part.name} differs from the one that was sent"
                )


def _names(weight: str) -> tuple[str, str]:
    a, b = adapter_names(weight)
    return f"{PREFIX}{a}.weight", f"{PREFIX}{b}.weight"
