"""The policy as a LoRA adapter in the engine: base weights move once, later only the adapters.

    messages -> whole A and B of every projection, on the host
      --seal--> vLLM's LoRA slot --> read back and compared

vLLM wraps the layers that it adapts, so their base weights are traced and written through
`unwrapped` modules. A request names the adapter that is in the slot; vLLM never reads one from a
file (vLLM 0.32).
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest

from megarl.models.lora import AdapterFormat, module_name, peft_names
from megarl.models.shards import Slices, whole_tensor
from megarl.rollout.vllm.loader_trace import module_of
from megarl.rollout.vllm.weight_loader import LayerReceiver
from megarl.types import CheckFailed
from megarl.weights.sync.execute import MemoryReceiver

NUMBER = 1  # vLLM's id of the adapter
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # values of max_lora_rank that vLLM accepts


def engine_options(adapters: AdapterFormat) -> dict[str, Any]:
    """Returns arguments of vLLM's LLM."""
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": next(size for size in RANKS if size >= adapters.rank),
        "lora_target_modules": adapters.targets,
    }


@contextmanager
def unwrapped(model: nn.Module) -> Iterator[None]:
    """Gives the model its own layers instead of vLLM's wrappers, within the context."""
    wrappers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, BaseLayerWithLoRA)
    }
    for name, wrapper in wrappers.items():
        model.set_submodule(name, wrapper.base_layer)
    try:
        yield
    finally:
        for name, wrapper in wrappers.items():
            model.set_submodule(name, wrapper)


class AdapterReceiver(MemoryReceiver):
    """publish.WeightReceiver of the adapters; the base weights, of `base`, come first."""

    request = LoRARequest("policy", NUMBER, "none")

    def __init__(
        self,
        model: nn.Module,
        base: LayerReceiver,
        adapters: AdapterFormat,
        reset_cache: Callable[[], object],
    ) -> None:
        slices = [whole_tensor(name, shape) for name, shape in adapters.shapes.items()]
        tensors = {
            name: torch.empty(shape, dtype=base.dtype, device="cpu")
            for name, shape in adapters.shapes.items()
        }
        super().__init__(slices, tensors, base.dtype, base.device)
        self.base = base
        self._state = "empty"
        self._format = adapters
        self._reset_cache = reset_cache
        self._model: Any = model
        self._parts = defaultdict(list)  # module -> slices of the base weights that it adapts
        for part in base.slices:
            if part.name.endswith(".weight") and module_name(part.name) in adapters.targets:
                self._parts[module_of(part.param)].append(part)
        bound = set()
        for parts in self._parts.values():
            for part in parts:
                bound.update(peft_names(part.name))
        unbound = sorted(adapters.shapes.keys() - bound)
        unbound += sorted(self._parts.keys() - self._model.lora_manager.modules.keys())
        if unbound:
            raise CheckFailed(f"vLLM cannot adapt {unbound[0]} of this model; set lora.sync=merged")

    @property
    def state(self) -> str:
        """State as of LayerReceiver; without base weights, the adapters are of no use."""
        if self.base.state != "ready":
            return "empty"
        return self._state

    def begin(self, *, check_placement: bool) -> None:
        assert self.base.state == "ready", "the base weights come first"
        self._state = "writing"
        super().begin(check_placement=check_placement)

    @torch.no_grad()
    def seal(self) -> Mapping[str, int]:
        """Puts the adapters into vLLM's slot. Raises CheckFailed if it then holds others."""
        manager = self._model.lora_manager
        helper = PEFTHelper(
            r=self._format.rank,
            lora_alpha=self._format.alpha,  # type: ignore[arg-type]
            target_modules=self._format.targets,
        )
        # vLLM scales B in place
        tensors = {name: tensor.clone() for name, tensor in self.memory.items()}
        adapter = LoRAModel.from_lora_tensors(
            NUMBER, tensors, helper, device="cpu", dtype=self.base.dtype
        )
        manager.remove_adapter(NUMBER)
        manager.add_adapter(adapter)
        manager.activate_adapter(NUMBER)
        for module, parts in self._parts.items():
            self._compare(module, parts)
        self._reset_cache()
        self._state = "sealed"
        return super().seal()

    def finish(self, version: int) -> None:
        super().finish(version)
        self._state = "ready"

    def abort(self) -> None:
        super().abort()
        self._state = "empty"

    def _compare(self, module: str, parts: Slices) -> None:
        """Compares the slot of a layer with this rank's part of the adapters, bit for bit."""
        wrapper = self._model.lora_manager.modules[module]
        rank = self._format.rank
        for number, part in enumerate(parts):
            row, column = part.start
            rows, columns = part.shape
            held_a = wrapper.lora_a_stacked[number][0, 0, :rank, :columns].cpu()
            held_b = wrapper.lora_b_stacked[number][0, 0, :rows, :rank].cpu()
            a, b = map(self.memory.get, peft_names(part.name))
            if a is None or b is None:
                is_equal = not held_b.any()
            else:
                b = b[row : row + rows] * (self._format.alpha / rank)
                is_equal = held_a.equal(a[:, column : column + columns]) and held_b.equal(b)
            if not is_equal:
                raise CheckFailed(
                    f"the engine's adapter of {part.name} differs from the one that was sent"
                )
