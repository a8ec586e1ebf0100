"""Offloads the trainer's memory between phases; tensors are restored bit for bit.

    on the device during   forward, backward   weights, gradients, activations
                           optimizer step      weights, gradients, optimizer state
                           sync                weights
                           rollout             nothing

Optimizer state is on the device only for the step, not together with activations; with
`keeps_optimizer`, it stays from a step's first update to its last. Tensors keep their identity:
only their storages are copied to one flat host buffer, which is pinned on a GPU, and freed. On a
CPU, tensors are copied in the same way, but only freed gradients save memory.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.tensor_parallel.random import HAVE_TE
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megarl.checkpoint.rank_state import OPTIMIZER_STATES, parts_of
from megarl.platform.device import host_bytes


def recompute(settings: TransformerConfig, granularity: str, modules: Sequence[str]) -> None:
    """Configures which activations are recomputed.

    "full" recomputes every layer, "selective" the named modules. Raises ValueError for modules that
    Megatron-Core cannot recompute, or that this model does not have.
    """
    if granularity == "none":
        return
    if granularity == "full":
        settings.recompute_granularity = "full"
        settings.recompute_method = "uniform"
        settings.recompute_num_layers = 1
        return
    is_available = {
        "core_attn": True,
        "mlp": True,
        "moe": settings.num_moe_experts,
        "shared_experts": settings.moe_shared_expert_intermediate_size,
        # these three drop an output and keep its inputs, which needs Transformer Engine's state
        "layernorm": HAVE_TE,
        "moe_act": HAVE_TE and settings.moe_grouped_gemm,
        "mla_up_proj": HAVE_TE and settings.multi_latent_attention,
    }
    for module in modules:
        if not is_available.get(module):
            known = ", ".join(name for name, available in is_available.items() if available)
            raise ValueError(
                f"train.recompute_modules={list(modules)}: {module} is unavailable; "
                f"choose from {known}"
            )
    settings.recompute_granularity = "selective"
    settings.recompute_modules = list(modules)


class HostBuffer:
    """A flat host buffer that is reused; pinned if the tensors are on a GPU."""

    _bytes = torch.empty(0)

    def with_storages(self, tensors: Iterable[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Returns each storage of `tensors` once, and its part of the buffer: [bytes] uint8."""
        unique = {x.untyped_storage()._cdata: x for x in tensors if x.numel()}
        flats = [flat_storage(x) for x in unique.values()]
        sizes = [len(flat) for flat in flats]
        if len(self._bytes) != sum(sizes):
            self._bytes = host_bytes(sum(sizes), flats[0].device)
        return list(zip(flats, self._bytes.split(sizes), strict=True))


class Memory:
    """Moves weights, gradients and optimizer state between device and host; idempotent."""

    def __init__(self, chunks: Sequence[Any], offload: Collection[str]) -> None:
        """`chunks`: DistributedDataParallel; `offload`: any of gradients, optimizer, weights."""
        self._buffers = []
        self._frozen = []  # frozen parameters, which are in no DDP buffer
        for chunk in chunks:
            self._buffers += [*chunk.buffers, *chunk.expert_parallel_buffers]
            self._frozen += [x for x in chunk.parameters() if not x.requires_grad]
        # set later, because the gradients are freed before it is built
        self.optimizer: MegatronOptimizer | None = None
        self._hosts = {kind: HostBuffer() for kind in offload}
        self._freed = []  # storages of gradient buffers
        self._away = {}
        self.keeps_optimizer = False  # True: the optimizer state moves once a step, not per update
        self.free_gradients()

    def onload_gradients(self) -> None:
        """Reallocates and zeroes the gradient buffers, and offloads the optimizer state.

        Call it before the backward pass.
        """
        if not self.keeps_optimizer:
            self._store_optimizer()
        for flat in self._freed:
            flat.untyped_storage().resize_(len(flat))
            flat.zero_()
        self._freed = []

    def free_gradients(self) -> None:
        """Frees the gradient buffers after the step; a checkpoint does not read them."""
        if "gradients" in self._hosts and not self._freed:
            self._freed = [flat_storage(buffer.grad_data) for buffer in self._buffers]
            for flat in self._freed:
                flat.untyped_storage().resize_(0)

    def onload_optimizer(self) -> None:
        """Copies the optimizer state back; call it before the optimizer step or a checkpoint."""
        self._onload("optimizer")

    def offload_training_state(self) -> None:
        """Offloads optimizer state and frees gradients; keeps the weights."""
        self._store_optimizer()
        self.free_gradients()
        torch.cuda.empty_cache()  # the engine allocates outside of torch's pool

    def offload_all(self) -> None:
        """Offloads the training state and the weights."""
        self.offload_training_state()
        self._offload("weights", [*(buffer.param_data for buffer in self._buffers), *self._frozen])
        torch.cuda.empty_cache()

    def onload_weights(self) -> None:
        self._onload("weights")

    def onload_all(self) -> None:
        """Copies weights and optimizer state back, for a checkpoint or an export."""
        self.onload_weights()
        self.onload_optimizer()

    def bytes_off_device(self) -> int:
        """Returns the bytes of weights, gradients and optimizer state that an update brings back.

        Call it after `offload_training_state`. Moments count even before the first step.
        """
        total = sum(map(len, self._freed)) + sum(
            len(there) for there, _ in self._away.get("weights", ())
        )
        for part in parts_of(self.optimizer):
            copies = len(OPTIMIZER_STATES[part.config.optimizer]) + part.config.bf16
            total += 4 * copies * sum(x.numel() for x in part.get_parameters())
        return total

    def _store_optimizer(self) -> None:
        """Offloads the optimizer's moments and, in bf16, its fp32 main weights.

        In fp32, the model's weights are the main weights.
        """
        tensors = []
        for part in parts_of(self.optimizer):
            optimizer = getattr(part, "optimizer", None)
            if optimizer is None:  # a rank may have no expert state
                continue
            if part.config.bf16:
                for group in optimizer.param_groups:
                    tensors += group["params"]
            for state in optimizer.state.values():
                tensors += [x for name, x in state.items() if name != "step"]
        self._offload("optimizer", tensors)

    @torch.no_grad()
    def _offload(self, kind: str, tensors: Iterable[Tensor]) -> None:
        if kind in self._hosts and not self._away.get(kind):
            self._away[kind] = self._hosts[kind].with_storages(tensors)
            for there, here in self._away[kind]:
                here.copy_(there, non_blocking=True)
                there.untyped_storage().resize_(0)  # reuse is ordered after the copy, on the stream

    @torch.no_grad()
    def _onload(self, kind: str) -> None:
        for there, here in self._away.pop(kind, ()):
            there.untyped_storage().resize_(len(there))
            there.copy_(here, non_blocking=True)


def flat_storage(x: Tensor) -> Tensor:
    """Returns the whole storage of `x` as [bytes] uint8."""
    return x.new_empty(0, dtype=torch.uint8).set_(x.untyped_storage())
