"""Offloads the trainer's memory between phases; tensors are restored bit for bit.

    on the device during   forward, backward   weights, gradients, activations
                           optimizer step      weights, gradients, optimizer state
                           sync                weights
                           rollout             nothing

Optimizer state is on the device only for the step, never together with activations. Tensors keep their identity: only
their storages are copied to one flat host buffer, which is pinned on a GPU, and freed. On a CPU, which copies too, only
freed gradients save memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.tensor_parallel.random import HAVE_TE
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megarl.checkpoint.rank_state import parts_of
from megarl.platform.device import host_bytes


def recompute(settings: TransformerConfig, granularity: str, modules: Sequence[str]) -> None:
    """Configures which activations are recomputed: of every layer ("full"), or of the named modules ("selective").
    Raises ValueError for modules that Megatron-Core cannot recompute, or that this model does not have."""
    if granularity == "none":
        return
    if granularity == "full":
        settings.recompute_granularity, settings.recompute_method, settings.recompute_num_layers = (
            "full",
            "uniform",
            1,
        )
        return
    known = ["core_attn", "mlp"]
    known += ["moe"] if settings.num_moe_experts else []
    known += ["shared_experts"] if settings.moe_shared_expert_intermediate_size else []
    if (
        HAVE_TE
    ):  # these three drop an output and keep its inputs, by way of Transformer Engine's state
        known += ["layernorm"]
        known += ["moe_act"] if settings.moe_grouped_gemm else []
        known += ["mla_up_proj"] if settings.multi_latent_attention else []
    if unknown := [module for module in modules if module not in known]:
        raise ValueError(
            f"train.recompute_modules={list(modules)}: {unknown[0]} is unavailable; choose from {', '.join(known)}"
        )
    settings.recompute_granularity, settings.recompute_modules = "selective", list(modules)


class HostBuffer:
    """One flat host buffer, kept from one use to the next; pinned if the tensors are on a GPU."""

    _bytes = torch.empty(0)

    def beside(self, tensors: Iterable[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Returns each storage of `tensors` once, as [bytes] uint8, with its place in the buffer."""
        unique = {x.untyped_storage().data_ptr(): x for x in tensors if x.numel()}.values()
        flats, sizes = (
            [flat_storage(x) for x in unique],
            [x.untyped_storage().nbytes() for x in unique],
        )
        if len(self._bytes) != sum(sizes):
            self._bytes = host_bytes(sum(sizes), flats[0].device)
        return list(zip(flats, self._bytes.split(sizes), strict=True))


class Memory:
    """Moves weights, gradients and optimizer state between device and host. All methods are idempotent."""

    def __init__(self, chunks: Sequence[DistributedDataParallel], offload: Collection[str]) -> None:
        """`offload`: of gradients, optimizer, weights."""
        wrapped: Sequence[Any] = chunks
        self._buffers: list[Any] = [
            b for chunk in wrapped for b in chunk.buffers + chunk.expert_parallel_buffers
        ]
        self._frozen = [
            x for chunk in wrapped for x in chunk.parameters() if not x.requires_grad
        ]  # in no buffer
        self.optimizer: MegatronOptimizer | None = (
            None  # set later: the gradients are freed before it is built
        )
        self._hosts = {kind: HostBuffer() for kind in offload}
        self._freed: list[Tensor] = []  # gradient buffers
        self._away: dict[str, list[tuple[Tensor, Tensor]]] = {}
        self.free_gradients()

    def onload_gradients(self) -> None:
        """Before the backward pass: reallocate and zero the gradient buffers, and offload the optimizer state."""
        self._store_optimizer()
        for flat in self._freed:
            flat.untyped_storage().resize_(len(flat))
            flat.zero_()
        self._freed = []

    def free_gradients(self) -> None:
        """After the optimizer's step: a checkpoint does not read them."""
        if "gradients" in self._hosts and not self._freed:
            self._freed = [flat_storage(buffer.grad_data) for buffer in self._buffers]
            for flat in self._freed:
                flat.untyped_storage().resize_(0)

    def onload_optimizer(self) -> None:
        """Before the optimizer step, and before a checkpoint."""
        self._onload("optimizer")

    def offload_training_state(self) -> None:
        """Offload optimizer state and free gradients; keep the weights."""
        self._store_optimizer()
        self.free_gradients()
        torch.cuda.empty_cache()  # the engine allocates outside of torch's pool

    def offload_all(self) -> None:
        """Offload the weights too."""
        self.offload_training_state()
        self._offload("weights", [*(buffer.param_data for buffer in self._buffers), *self._frozen])
        torch.cuda.empty_cache()

    def onload_weights(self) -> None:
        self._onload("weights")

    def onload_all(self) -> None:
        """Copy back what a checkpoint or an export reads: weights and optimizer state."""
        self.onload_weights()
        self.onload_optimizer()

    def _store_optimizer(self) -> None:
        """The moments, and in bf16 the fp32 main weights (in fp32 they are the model's weights)."""
        # a rank may have no expert state
        parts = [
            part
            for part in parts_of(self.optimizer)
            if getattr(part, "optimizer", None) is not None
        ]
        mains = [
            x
            for part in parts
            if part.config.bf16
            for g in part.optimizer.param_groups
            for x in g["params"]
        ]
        states = [state for part in parts for state in part.optimizer.state.values()]
        self._offload(
            "optimizer",
            mains + [x for state in states for name, x in state.items() if name != "step"],
        )

    @torch.no_grad()
    def _offload(self, kind: str, tensors: Iterable[Tensor]) -> None:
        if kind in self._hosts and not self._away.get(kind):
            self._away[kind] = self._hosts[kind].beside(tensors)
            for there, here in self._away[kind]:
                here.copy_(there, non_blocking=True)
                there.untyped_storage().resize_(0)  # in the order of the stream

    @torch.no_grad()
    def _onload(self, kind: str) -> None:
        for there, here in self._away.pop(kind, ()):
            there.untyped_storage().resize_(len(there))
            there.copy_(here, non_blocking=True)


def flat_storage(x: Tensor) -> Tensor:
    """Returns the whole storage of `x` as [bytes] uint8."""
    return x.new_empty(0, dtype=torch.uint8).set_(x.untyped_storage())  # pyright: ignore[reportArgumentType]
