"""Offloads the trainer's memory between phases; tensors are restored bit for bit.

    on the device during   forward, backward   weights, gradients, activations
                           optimizer step      weights, gradients, optimizer state
                           sync                weights
                           rollout             nothing

Optimizer state is on the device only for the step, so never together with activations. On a CPU, where host and
device are the same, the copies are made too, but only freed gradients save memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.tensor_parallel.random import HAVE_TE
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


def recompute(settings: TransformerConfig, granularity: str, modules: Sequence[str]) -> None:
    """Configure the recomputation of activations: of every layer ("full"), or of the named modules ("selective").

    Raises ValueError for modules that Megatron-Core cannot recompute, or that this model does not have.
    """
    if granularity == "none":
        return
    if granularity == "full":
        settings.recompute_granularity, settings.recompute_method, settings.recompute_num_layers = "full", "uniform", 1
        return
    known = ["core_attn", "mlp"]
    known += ["moe"] if settings.num_moe_experts else []
    known += ["shared_experts"] if settings.moe_shared_expert_intermediate_size else []
    if HAVE_TE:  # these three drop an output and keep its inputs, by way of Transformer Engine's state
        known += ["layernorm"]
        known += ["moe_act"] if settings.moe_grouped_gemm else []
        known += ["mla_up_proj"] if settings.multi_latent_attention else []
    if unknown := [module for module in modules if module not in known]:
        raise ValueError(
            f"train.recompute_modules={list(modules)}: {unknown[0]} is unavailable; choose from {', '.join(known)}"
        )
    settings.recompute_granularity, settings.recompute_modules = "selective", list(modules)


class Memory:
    """Moves weights, gradients and optimizer state between device and host. All methods are idempotent."""

    def __init__(
        self,
        chunks: Sequence[DistributedDataParallel],
        optimizer: MegatronOptimizer,
        *,
        offload: Collection[str],  # of gradients, optimizer, weights
        device: torch.device,
    ) -> None:
        wrapped: Sequence[Any] = chunks
        self._buffers: list[Any] = [b for chunk in wrapped for b in chunk.buffers + chunk.expert_parallel_buffers]
        self._optimizer = optimizer
        self._offload = frozenset(offload)
        self._device = device
        self._optimizer_on_device = True
        self._gradient_bytes: list[int] = []  # of each buffer, while freed
        self._weights: list[Tensor] = []  # host copies of each buffer, while offloaded

    def onload_gradients(self) -> None:
        """Before the backward pass: reallocate and zero the gradient buffers, and offload the optimizer state."""
        self._store_optimizer()
        for buffer, size in zip(self._buffers, self._gradient_bytes, strict=False):
            buffer.grad_data.untyped_storage().resize_(size)
            buffer.grad_data.zero_()
        self._gradient_bytes = []

    def onload_optimizer(self) -> None:
        """Before the optimizer step, and before a checkpoint."""
        self._move_optimizer(self._device, on_device=True)

    def offload_training_state(self) -> None:
        """Offload optimizer state and free gradients; keep the weights."""
        self._store_optimizer()
        if "gradients" in self._offload and not self._gradient_bytes:
            self._gradient_bytes = [_free(buffer.grad_data) for buffer in self._buffers]
        self._empty_cache()

    def offload_all(self) -> None:
        """Offload the weights too."""
        self.offload_training_state()
        if "weights" in self._offload and not self._weights:
            self._weights = [buffer.param_data.to("cpu", copy=True) for buffer in self._buffers]
            for buffer in self._buffers:
                _free(buffer.param_data)
        self._empty_cache()

    def onload_weights(self) -> None:
        """Copy the weights back to the device."""
        for buffer, host in zip(self._buffers, self._weights, strict=False):
            buffer.param_data.untyped_storage().resize_(host.untyped_storage().nbytes())
            buffer.param_data.copy_(host)
        self._weights = []

    def onload_all(self) -> None:
        """Copy back what a checkpoint or an export reads: weights and optimizer state."""
        self.onload_weights()
        self.onload_optimizer()

    def _store_optimizer(self) -> None:
        if "optimizer" in self._offload:
            self._move_optimizer(torch.device("cpu"), on_device=False)

    @torch.no_grad()
    def _move_optimizer(self, device: torch.device, *, on_device: bool) -> None:
        """Move the moments, and in bf16 the fp32 main weights (in fp32 they are the model's weights)."""
        if self._optimizer_on_device == on_device:
            return
        self._optimizer_on_device = on_device
        for part in _parts(self._optimizer):
            if part.config.bf16:
                for group in part.optimizer.param_groups:
                    for main in group["params"]:
                        main.data = main.data.to(device, copy=True)
            for state in part.optimizer.state.values():
                for name, value in state.items():
                    if name != "step":
                        state[name] = value.to(device, copy=True)

    def _empty_cache(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # the engine allocates outside of torch's pool


def _parts(optimizer: MegatronOptimizer) -> Iterator[Any]:
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if getattr(part, "optimizer", None) is not None:  # a rank may have no expert state
            yield part


def _free(tensor: Tensor) -> int:
    """Free the tensor's storage and return its bytes; views become valid again when the storage is resized back."""
    size = tensor.untyped_storage().nbytes()
    tensor.untyped_storage().resize_(0)
    return size
