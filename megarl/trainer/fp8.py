"""FP8 training: Transformer Engine's settings on a GPU, or an emulation that rounds in plain torch.

    y = x w^T    dx = dy w    dw = dy^T x     each operand is rounded to FP8 before its product

    recipe       x         w          dy        tokens, in dw   scales            formats
    blockwise    1 x 128   128 x 128  1 x 128   128             powers of two     e4m3
    mxfp8        1 x 32    1 x 32     1 x 32    32              powers of two     e4m3
    tensorwise   tensor    tensor     tensor    tensor          largest / max     e4m3; e5m2 for dy
    delayed      like tensorwise, but with the largest magnitude of earlier updates

Emulated products are computed in fp32 and returned in the input's dtype. Attention, norms, routers,
embeddings and the head are not rounded. Transformer Engine takes delayed scales from earlier
micro-batches. The emulation takes them from earlier updates, so that results do not depend on how a
batch is split, and passes without gradient change no scale.

Layouts agree up to the rounding of FP8, not bit for bit: blocks along the tokens depend on how rows
are packed, and tensor-parallel ranks scale their own shards. (Transformer Engine does the same; it
reduces only the maximum of tensors that sequence parallelism splits.) Ranks share delayed scales.
"""

from collections.abc import Sequence
from dataclasses import dataclass
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

from megarl.config.precision import Fp8, Precision, is_in_fp8
from megarl.trainer.layers import ReplicatedLinear
from megarl.weights.encode.quantize import Block, block_amax, fp8_scales, from_fp8, to_fp8

# recipe -> divisor of the number of tokens in a micro-batch
MULTIPLES = {None: 1, "blockwise": 128, "mxfp8": 32, "tensorwise": 16, "delayed": 16}
CAPABILITIES = {"blockwise": (9, 0), "mxfp8": (10, 0), "tensorwise": (8, 9), "delayed": (8, 9)}
HISTORY = 1024  # number of earlier updates that a delayed scale covers
# operands of a layer's products: x, w and dy
INPUT = 0
WEIGHT = 1
GRADIENT = 2
E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
ROUNDED_LAYERS = (ColumnParallelLinear, RowParallelLinear, ReplicatedLinear)


@dataclass(frozen=True)
class Rounding:
    """Rounding by current scales: block sizes, powers of two or not, and format of gradients."""

    # block length of activations and gradients along the summed dimension; 0: whole tensor
    length: int
    weight: Block
    power_of_2: bool = True
    gradients: torch.dtype = E4M3

    def round(self, x: Tensor, operand: int, *, transposed: bool = False) -> Tensor:
        """Returns an operand [rows, columns] rounded to FP8, as fp32.

        The product sums over the operand's columns or, with `transposed`, over its rows.
        """
        if not x.numel():
            return x.float()
        if operand == GRADIENT and self.gradients == E5M2:
            return _rounded(x, x.abs().amax().float(), E5M2)
        rows, columns = self.weight if operand == WEIGHT else (min(1, self.length), self.length)
        block = (columns, rows) if transposed else (rows, columns)
        scales = fp8_scales(block_amax(x, block), power_of_2=self.power_of_2)
        return from_fp8(to_fp8(x, scales, block), scales, block, torch.float32)


class Delayed:
    """Rounding of one layer's operands by delayed scales.

    An operand is scaled by its largest magnitude in earlier updates.
    """

    def __init__(self) -> None:
        self.largest = torch.zeros(3)  # [operand]: largest magnitude in this update so far
        self.history = torch.zeros(HISTORY, 3)  # [update, operand], latest first; 0: none

    def round(self, x: Tensor, operand: int, *, transposed: bool = False) -> Tensor:
        """Returns an operand rounded to FP8, as fp32; a gradient is observed first."""
        dtype = E4M3
        if operand == GRADIENT:
            self.observe(operand, x)
            dtype = E5M2
        largest = self.history[:, operand].amax()
        if not largest and x.numel():  # the first update
            largest = x.abs().amax().float()
        return _rounded(x, largest, dtype)

    def observe(self, operand: int, x: Tensor) -> None:
        if x.numel():
            largest = x.detach().abs().amax().float()
            self.largest[operand] = torch.maximum(self.largest[operand], largest)


def _rounded(x: Tensor, largest: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounds `x` to `dtype`, scaled so that `largest` is the format's maximum; returns fp32.

    Larger magnitudes are clamped.
    """
    limit = torch.finfo(dtype).max
    scale = largest.clamp(min=1e-30) / limit
    return (x.float() / scale).clamp_(-limit, limit).to(dtype).float() * scale


RECIPES = {
    "blockwise": Rounding(128, (128, 128)),
    "mxfp8": Rounding(32, (1, 32)),
    "tensorwise": Rounding(0, (0, 0), power_of_2=False, gradients=E5M2),
}


class _Product(torch.autograd.Function):
    """Computes x w^T and its gradients, each from rounded operands."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_NK: Tensor,
        rounding: Rounding | Delayed,
    ) -> Tensor:
        ctx.save_for_backward(x, weight_NK)
        ctx.rounding = rounding
        y_TN = rounding.round(x.flatten(0, -2), INPUT) @ rounding.round(weight_NK, WEIGHT).T
        return y_TN.to(x.dtype).view(*x.shape[:-1], len(weight_NK))  # an expert may have no tokens

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None]:
        rounding = ctx.rounding
        x, weight_NK = ctx.saved_tensors
        dy_TN = gradients[0].flatten(0, -2)
        rounded_TN = rounding.round(dy_TN, GRADIENT)
        dx_TK = rounded_TN @ rounding.round(weight_NK, WEIGHT, transposed=True)
        dx = dx_TK.to(x.dtype).view(x.shape)
        if not ctx.needs_input_grad[1]:  # frozen, with LoRA
            return dx, None, None
        dy_TN = rounding.round(dy_TN, GRADIENT, transposed=True)
        dw_NK = dy_TN.T @ rounding.round(x.flatten(0, -2), INPUT, transposed=True)
        return dx, dw_NK.to(weight_NK.dtype), None


def _forward(
    rounding: Rounding | Delayed,
    *,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    allreduce_dgrad: bool = False,
    sequence_parallel: bool = False,
    tp_group: Any = None,
    **_unused: Any,  # options of fused kernels
) -> Tensor:
    """Replaces `_forward_impl` of ROUNDED_LAYERS.

    It gathers the input of a column-parallel layer; the backward pass reduces its gradient.
    """
    if sequence_parallel:
        input = gather_from_sequence_parallel_region(input, group=tp_group)
    elif allreduce_dgrad:
        input = copy_to_tensor_model_parallel_region(input, group=tp_group)
    if isinstance(rounding, Delayed) and torch.is_grad_enabled():
        rounding.observe(INPUT, input)
        rounding.observe(WEIGHT, weight)
    output = _Product.apply(input, weight, rounding)
    return output if bias is None else output + bias


class Emulation:
    """Patches the decoder's linear layers to round like the recipe, if fp8.emulate is set."""

    def __init__(
        self,
        chunks: Sequence[GPTModel],
        precision: Precision,
        group: dist.ProcessGroup,
    ) -> None:
        """`group`: the ranks of this pipeline stage, whose layers share delayed scales."""
        self._group = group
        self._delayed = []
        self._weights = []  # (parameter in FP8, its rounding)
        fp8 = precision.fp8
        if fp8 is None or not fp8.emulate:
            return
        for chunk in chunks:
            layers: Any = chunk.get_submodule("decoder.layers")
            for layer in layers:
                if not is_in_fp8(layer.layer_number - 1, layer.config.num_layers, fp8):
                    continue
                for module in layer.modules():
                    if isinstance(module, ROUNDED_LAYERS):
                        self._patch(module, fp8)

    def _patch(self, module: Any, fp8: Fp8) -> None:
        rounding = RECIPES.get(fp8.recipe) or Delayed()
        module._forward_impl = partial(_forward, rounding)
        if not isinstance(rounding, Delayed):
            if fp8.params:
                self._weights.append((module.weight, rounding))
            return
        self._delayed.append(rounding)

        def set_extra_state(history: Tensor | None) -> None:
            if history is not None:
                rounding.history.copy_(history)

        # Megatron saves it in checkpoints, like Transformer Engine's extra state
        module.get_extra_state = lambda: rounding.history
        module.set_extra_state = set_extra_state

    @torch.no_grad()
    def after_update(self) -> None:
        """Rounds parameters in FP8, and starts the next update of delayed scales.

        The optimizer keeps fp32 main weights of these parameters. Call it on every rank after each
        optimizer step, and once after the optimizer is built.
        """
        for weight, rounding in self._weights:
            # exact in bf16: blockwise scales are powers of two
            weight.copy_(rounding.round(weight, WEIGHT))
        if not self._delayed:
            return
        largest = torch.stack([each.largest for each in self._delayed]).nan_to_num(0.0, 0.0, 0.0)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._group)
        for each, row in zip(self._delayed, largest, strict=True):
            if row.any():
                each.history.copy_(torch.cat([row[None], each.history[:-1]]))
            each.largest.zero_()


def megatron_settings(precision: Precision, device: torch.device) -> dict[str, Any]:
    """Returns TransformerConfig's fields for Transformer Engine's FP8 kernels; none on a CPU.

    Only the recipe `delayed` has been run on a GPU. Raises ValueError if the GPU has no kernels for
    the recipe.
    """
    fp8 = precision.fp8
    if fp8 is None or device.type != "cuda":
        return {}
    recipe = fp8.recipe
    capability = torch.cuda.get_device_capability(device)
    needed = CAPABILITIES[recipe]
    if capability < needed:
        usable = [name for name, least in CAPABILITIES.items() if least <= capability]
        raise ValueError(
            f"precision.fp8.recipe={recipe} needs a GPU of compute capability "
            f"{needed[0]}.{needed[1]}, but this one has {capability[0]}.{capability[1]}; "
            f"recipes for it: {', '.join(usable) or 'none'}"
        )
    settings = {
        "fp8_recipe": recipe,
        "fp8": "e4m3" if MULTIPLES[recipe] > 16 else "hybrid",
    }
    if fp8.first_last_bf16:
        settings |= {
            "first_last_layers_bf16": True,
            "num_layers_at_start_in_bf16": fp8.first_last_bf16,
            "num_layers_at_end_in_bf16": fp8.first_last_bf16,
        }
    if recipe == "delayed":  # Transformer Engine's defaults
        settings |= {"fp8_amax_history_len": HISTORY, "fp8_amax_compute_algo": "max"}
    return settings
