"""Stand-ins for FP8 in blocks, tiles of 1 x 128 or 128 x 128 with one scale each, and with one scale for a tensor.

The arithmetic is written after Transformer Engine's rules, not read from its CUDA sources: a scale is the format's
maximum divided by the tile's largest magnitude, rounded down to a power of two if the recipe says so.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from te_standin.compiled import stands_in, torch_dtype

TILE = 128
SIGN_AND_EXPONENT = ~0x7FFFFF


def _tiles(x: Tensor, quantizer: Any) -> tuple[Tensor, Tensor]:
    """Returns the bytes of [M, K] and the inverse scale of each tile."""
    dtype = torch_dtype(quantizer.dtype)
    largest = torch.finfo(dtype).max
    height = 1 if quantizer.block_scaling_dim == 1 else TILE
    m, k = x.shape
    padded = F.pad(x.float(), (0, -k % TILE, 0, -m % height))
    tiles = padded.view(len(padded) // height, height, padded.shape[1] // TILE, TILE)
    amax = tiles.abs().amax((1, 3)).clamp_min(quantizer.amax_epsilon)
    scale = torch.where(amax > 0, largest / amax, torch.ones_like(amax))
    scale = scale.clamp_max(torch.finfo(torch.float32).max)
    if quantizer.force_pow_2_scales:
        scale = (scale.view(torch.int32) & SIGN_AND_EXPONENT).view(torch.float32)
    values = (tiles * scale[:, None, :, None]).clamp(-largest, largest).view(padded.shape)
    return values[:m, :k].to(dtype).view(torch.uint8).contiguous(), 1 / scale


def _scales(scale_inv: Tensor, quantizer: Any, shape: tuple[int, int]) -> Tensor:
    """Returns the inverse scales as the kernels read them: padded, of rows transposed."""
    if quantizer.block_scaling_dim == 1:
        scale_inv = scale_inv.t()
    padded = scale_inv.new_zeros(shape)
    padded[: scale_inv.shape[0], : scale_inv.shape[1]] = scale_inv
    return padded


def _quantized(x: Tensor, quantizer: Any) -> dict[str, Tensor | None]:
    """Returns data and scales, row-wise and column-wise; None where they are not used."""
    x = x.detach()
    shape = tuple(x.shape)
    matrix = x.reshape(-1, shape[-1])
    found: dict[str, Tensor | None] = {}
    for name, source, is_used, data_shape in (
        ("rowwise", matrix, quantizer.rowwise_usage, shape),
        (
            "columnwise",
            matrix.t(),
            quantizer.columnwise_usage,
            quantizer.get_columnwise_shape(shape),
        ),
    ):
        data = None
        scale_inv = None
        if is_used:
            scale_shape = quantizer.get_scale_shape(shape, name == "columnwise")
            data = source.to(torch.uint8)
            scale_inv = torch.zeros(scale_shape)
            if x.numel():
                data, scale_inv = _tiles(source, quantizer)
                scale_inv = _scales(scale_inv, quantizer, scale_shape)
            data = data.view(data_shape)
        found |= {f"{name}_data": data, f"{name}_scale_inv": scale_inv}
    return found


def _block_tensor(
    quantizer: Any, tensors: dict[str, Any], shape: tuple[int, ...], dtype: torch.dtype
) -> Any:
    from transformer_engine.pytorch import Float8BlockwiseQTensor, Float8BlockwiseQTensorStorage

    options = tensors | {
        "fp8_dtype": quantizer.dtype,
        "quantizer": quantizer,
        "is_2D_scaled": quantizer.block_scaling_dim == 2,
        "fake_dtype": dtype,
    }
    if quantizer.internal:
        return Float8BlockwiseQTensorStorage(**options)
    cpu = torch.device("cpu")
    return Float8BlockwiseQTensor(**options, shape=shape, dtype=dtype, device=cpu)


def _current_scaling(x: Tensor, quantizer: Any) -> Any:
    """Returns a tensor with one scale, the format's maximum divided by the largest magnitude."""
    from transformer_engine.pytorch import Float8Tensor
    from transformer_engine.pytorch.tensor.storage.float8_tensor_storage import Float8TensorStorage

    dtype = torch_dtype(quantizer.dtype)
    largest = torch.finfo(dtype).max
    amax = x.detach().abs().amax().float() if x.numel() else torch.zeros(())
    if quantizer.with_amax_reduction:
        dist.all_reduce(amax, dist.ReduceOp.MAX, quantizer.amax_reduction_group)
    scale = largest / amax.clamp_min(max(quantizer.amax_epsilon, 1e-30))
    data = (x.detach().float() * scale).clamp(-largest, largest).to(dtype).view(torch.uint8)
    options = {
        "data": data,
        "fp8_scale_inv": (1 / scale).view(1),
        "fp8_dtype": quantizer.dtype,
        "quantizer": quantizer,
        "fake_dtype": x.dtype,
    }
    if quantizer.columnwise_usage:
        options["data_transpose"] = fp8_transpose(data, quantizer.dtype)
    if quantizer.internal:
        return Float8TensorStorage(**options)
    return Float8Tensor(**options, shape=tuple(x.shape), dtype=x.dtype, device=x.device)


@stands_in
def quantize(x, quantizer, out=None, noop_flag=None):
    if type(quantizer).__name__ == "Float8CurrentScalingQuantizer":
        made = _current_scaling(x, quantizer)
        return made if out is None else out.copy_from_storage(made)
    if type(quantizer).__name__ != "Float8BlockQuantizer":
        raise NotImplementedError(f"{type(quantizer).__name__} has no stand-in")
    assert noop_flag is None
    tensors = _quantized(x, quantizer)
    if out is None:
        return _block_tensor(quantizer, tensors, tuple(x.shape), x.dtype)
    for name, tensor in tensors.items():
        if tensor is not None:
            getattr(out, f"_{name}").copy_(tensor)
    return out


@stands_in
def create_empty_quantized_tensor(quantizer, shape, dtype, device, pin_memory):
    """Sequence parallelism gathers quantised activations into it."""
    tensors = dict.fromkeys(
        f"{name}_{part}" for name in ("rowwise", "columnwise") for part in ("data", "scale_inv")
    )
    for name, (size, kind) in quantizer.inner_tensor_specs(tuple(shape)).items():
        tensors[name.removeprefix("_")] = torch.empty(size, dtype=kind)
    return _block_tensor(quantizer, tensors, tuple(shape), dtype)


@stands_in
def bgrad_quantize(x, quantizer):
    bias_grad = x.reshape(-1, x.shape[-1]).float().sum(0).to(x.dtype)
    return bias_grad, quantize(x, quantizer)


@stands_in
def split_quantize(x, splits, quantizers, disable_bulk_allocation=False):
    parts = x.split([int(n) for n in splits])
    return [quantize(part, each) for part, each in zip(parts, quantizers, strict=True)]


@stands_in
def fp8_transpose(x, kind, out=None):
    moved = x.reshape(-1, x.shape[-1]).t().contiguous().view(x.shape[-1], *x.shape[:-1])
    return moved if out is None else out.copy_(moved)


@stands_in
def swap_first_dims(x, out=None):
    moved = x.transpose(0, 1).contiguous()
    return moved if out is None else out.copy_(moved)


def _copy_rows(x: Tensor, out: Tensor, lengths: Any, targets: Any) -> None:
    """Copies consecutive groups of rows; those that a longer target leaves over are 0."""
    start = 0
    target = 0
    for length, size in zip(lengths, targets, strict=True):
        num = min(length, size)
        out[target : target + num] = x[start : start + num]
        out[target + num : target + size] = 0
        start += length
        target += size


@stands_in
def fused_multi_row_padding(x, out, lengths, padded):
    _copy_rows(x, out, lengths, padded)


@stands_in
def fused_multi_row_unpadding(x, out, padded, lengths):
    _copy_rows(x, out, padded, lengths)
