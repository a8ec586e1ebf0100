"""FP8 training: Transformer Engine's settings on a GPU, or on any device the same rounding in plain torch (emulated).

    y = x w^T    dx = dy w    dw = dy^T x       each operand rounded to FP8 before its product, by blocks of the recipe

    recipe       x         w          dy        along the tokens, in dw   scales            formats
    blockwise    1 x 128   128 x 128  1 x 128   128                       powers of two     e4m3
    mxfp8        1 x 32    1 x 32     1 x 32    32                        powers of two     e4m3
    tensorwise   tensor    tensor     tensor    tensor                    largest / max     e4m3; e5m2 for dy
    delayed      as tensorwise                                         from the largest of earlier updates, as well

Emulated products are computed in fp32 and returned in the input's dtype. Attention, norms, routers, embeddings and the
head are not rounded. Transformer Engine takes delayed scales from earlier micro-batches, here they are of earlier
updates: then it does not matter how a batch is split, and passes without gradient change nothing. Blocks along the
tokens depend on how rows are packed, and tensor-parallel ranks scale their own shards (as in Transformer Engine, which
reduces only the maximum of what sequence parallelism splits), except for delayed scales: layouts agree to the rounding
of FP8, not bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor
from torch.distributed import ProcessGroup

from megarl.config.model_checks import is_in_fp8
from megarl.config.section import Fp8
from megarl.trainer.layers import ReplicatedLinear
from megarl.weights.quantize import Block, block_amax, fp8_scales, from_fp8, to_fp8

MULTIPLES = {
    "blockwise": 128,
    "mxfp8": 32,
    "tensorwise": 16,
    "delayed": 16,
}  # of the tokens of a micro-batch
CAPABILITIES = {"blockwise": (9, 0), "mxfp8": (10, 0), "tensorwise": (8, 9), "delayed": (8, 9)}
BF16_LAYERS = ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
HISTORY = 1024  # updates, for delayed scales
Seam = ColumnParallelLinear | RowParallelLinear | ReplicatedLinear


@dataclass(frozen=True, slots=True)
class Rounding:
    """The blocks of a recipe, whether scales are powers of two, and the format of gradients."""

    length: int  # of a block of activations and gradients, in the direction of the product's sum; 0: the whole tensor
    weight: Block
    power_of_2: bool = True
    gradients: torch.dtype = torch.float8_e4m3fn

    def of_weight(self, weight_NK: Tensor, *, transposed: bool = False) -> Tensor:
        rows, columns = self.weight
        return self._round(
            weight_NK, (columns, rows) if transposed else (rows, columns), torch.float8_e4m3fn
        )

    def of_rows(
        self, x_TK: Tensor, *, along_tokens: bool = False, is_gradient: bool = False
    ) -> Tensor:
        across = min(1, self.length)
        block = (self.length, across) if along_tokens else (across, self.length)
        return self._round(x_TK, block, self.gradients if is_gradient else torch.float8_e4m3fn)

    def _round(self, x: Tensor, block: Block, dtype: torch.dtype) -> Tensor:
        """Returns `x`, rounded, in fp32."""
        if not x.numel():
            return x.float()
        if dtype == torch.float8_e5m2:
            return _rounded(x, x.abs().amax().float(), dtype)
        scales = fp8_scales(block_amax(x, block), power_of_2=self.power_of_2)
        return from_fp8(to_fp8(x, scales, block), scales, block, torch.float32)


@dataclass(slots=True)
class Delayed:
    """Rounding of one layer's x, weight and dy: the scale of each is by its largest magnitude in earlier updates."""

    largest: Tensor = field(default_factory=lambda: torch.zeros(3))  # of this update so far
    history: Tensor = field(
        default_factory=lambda: torch.zeros(HISTORY, 3)
    )  # of the latest updates first; 0: none

    def of_weight(self, weight_NK: Tensor, *, transposed: bool = False) -> Tensor:
        return self._round(weight_NK, 1)

    def of_rows(
        self, x_TK: Tensor, *, along_tokens: bool = False, is_gradient: bool = False
    ) -> Tensor:
        if is_gradient:
            self.observe(2, x_TK)
        return self._round(x_TK, 2 if is_gradient else 0)

    def observe(self, operand: int, x: Tensor) -> None:
        if x.numel():
            self.largest[operand] = torch.maximum(
                self.largest[operand], x.detach().abs().amax().float()
            )

    def _round(self, x: Tensor, operand: int) -> Tensor:
        largest = self.history[:, operand].amax()
        if not largest and x.numel():  # the first update
            largest = x.abs().amax().float()
        return _rounded(x, largest, torch.float8_e5m2 if operand == 2 else torch.float8_e4m3fn)


def _rounded(x: Tensor, largest: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns `x` in fp32, rounded to a format whose largest number stands for `largest`; what is beyond is clamped."""
    limit = torch.finfo(dtype).max
    scale = largest.clamp(min=1e-30) / limit
    return (x.float() / scale).clamp_(-limit, limit).to(dtype).float() * scale


RECIPES = {
    "blockwise": Rounding(128, (128, 128)),
    "mxfp8": Rounding(32, (1, 32)),
    "tensorwise": Rounding(0, (0, 0), power_of_2=False, gradients=torch.float8_e5m2),
}


class _Product(torch.autograd.Function):
    """x w^T with rounded operands, and its gradients with rounded operands."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_NK: Tensor, rounding: Rounding | Delayed) -> Tensor:
        ctx.save_for_backward(x, weight_NK)
        ctx.rounding = rounding
        y_TN = rounding.of_rows(x.flatten(0, -2)) @ rounding.of_weight(weight_NK).T
        return y_TN.to(x.dtype).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None]:
        (x, weight_NK), rounding = ctx.saved_tensors, ctx.rounding
        dy_TN, x_TK = gradients[0].flatten(0, -2), x.flatten(0, -2)
        dx_TK = rounding.of_rows(dy_TN, is_gradient=True) @ rounding.of_weight(
            weight_NK, transposed=True
        )
        if not ctx.needs_input_grad[1]:  # frozen, with LoRA
            return dx_TK.to(x.dtype).view(x.shape), None, None
        dy_TN = rounding.of_rows(dy_TN, along_tokens=True, is_gradient=True)
        dw_NK = dy_TN.T @ rounding.of_rows(x_TK, along_tokens=True)
        return dx_TK.to(x.dtype).view(x.shape), dw_NK.to(weight_NK.dtype), None


def _forward(
    rounding: Rounding | Delayed,
    *,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    allreduce_dgrad: bool = False,
    sequence_parallel: bool = False,
    tp_group: Any = None,
    **_unused: Any,  # of fused kernels
) -> Tensor:
    """What Column- and RowParallelLinear call as `_forward_impl`: it gathers, and its backward pass reduces, the input
    of a column-parallel layer."""
    if sequence_parallel:
        input = gather_from_sequence_parallel_region(input, group=tp_group)
    elif allreduce_dgrad:
        input = copy_to_tensor_model_parallel_region(input, group=tp_group)
    if isinstance(rounding, Delayed) and torch.is_grad_enabled():
        rounding.observe(0, input)
        rounding.observe(1, weight)
    output = _Product.apply(input, weight, rounding)
    assert isinstance(output, Tensor)
    return output if bias is None else output + bias


class Emulation:
    """Makes the linear layers of the decoder round as the recipe does."""

    def __init__(self, chunks: Sequence[GPTModel], fp8: Fp8, group: ProcessGroup) -> None:
        """`group`: the ranks of this pipeline stage, whose layers share delayed scales."""
        self._group, self._delayed = group, list[Delayed]()
        self._weights = list[tuple[Tensor, Rounding]]()  # parameters in FP8
        layers: list[Any] = [
            layer for chunk in chunks for layer in chunk.get_submodule("decoder.layers").children()
        ]
        rounded = [
            layer
            for layer in layers
            if is_in_fp8(layer.layer_number - 1, layer.config.num_layers, fp8)
        ]
        for module in (
            module for layer in rounded for module in layer.modules() if isinstance(module, Seam)
        ):
            self._patch(module, fp8)

    def _patch(self, module: Any, fp8: Fp8) -> None:
        rounding = RECIPES.get(fp8.recipe) or Delayed()
        module._forward_impl = partial(_forward, rounding)
        if isinstance(rounding, Delayed):
            self._delayed.append(rounding)
            module.get_extra_state = lambda: (
                rounding.history
            )  # Megatron saves it as Transformer Engine's
            module.set_extra_state = lambda state: (
                None if state is None else rounding.history.copy_(state)
            )
        elif fp8.params:
            self._weights.append((module.weight, rounding))

    @torch.no_grad()
    def after_update(self) -> None:
        """Rounds the parameters in FP8, whose main weights the optimizer has in fp32; and begins a new update. Call it
        on every rank, also when the optimizer is built."""
        for weight, rounding in self._weights:
            weight.copy_(
                rounding.of_weight(weight)
            )  # exact in bf16: blockwise scales are powers of two
        if self._delayed:
            largest = torch.stack([each.largest for each in self._delayed]).nan_to_num(
                0.0, 0.0, 0.0
            )
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._group)
            for each, row in zip(self._delayed, largest, strict=True):
                if row.any():
                    each.history.copy_(torch.cat([row[None], each.history[:-1]]))
                each.largest.zero_()


def megatron_settings(fp8: Fp8, device: torch.device) -> dict[str, Any]:
    """Returns TransformerConfig's fields for Transformer Engine's kernels (not run on a GPU yet); none on a CPU. Raises
    ValueError if the GPU has no kernels for the recipe."""
    if device.type != "cuda":
        return {}
    found, needed = torch.cuda.get_device_capability(device), CAPABILITIES[fp8.recipe]
    if found < needed:
        names = ", ".join(name for name, least in CAPABILITIES.items() if least <= found)
        raise ValueError(
            f"precision.fp8.recipe={fp8.recipe} needs a GPU of compute capability {needed[0]}.{needed[1]}, but this "
            f"one has {found[0]}.{found[1]}; recipes for it: {names or 'none'}"
        )
    settings: dict[str, Any] = {
        "fp8_recipe": fp8.recipe,
        "fp8": "e4m3" if MULTIPLES[fp8.recipe] > 16 else "hybrid",
    }
    if ends := fp8.first_last_bf16:
        settings |= {"first_last_layers_bf16": True, **dict.fromkeys(BF16_LAYERS, ends)}
    if fp8.recipe == "delayed":  # as in Transformer Engine
        settings |= {"fp8_amax_history_len": HISTORY, "fp8_amax_compute_algo": "max"}
    return settings
