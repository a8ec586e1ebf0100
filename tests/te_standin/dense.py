"""Stand-ins for matrix products, norms and the optimizer's kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from te_standin.compiled import CALLS, stands_in, torch_dtype


def matrix(operand: Any, columnwise: bool) -> Tensor:
    """Returns an operand of a product; of FP8, the copy that the kernel would read, as fp32.

    The column-wise copy is stored transposed and scaled along the other dimension.
    """
    if isinstance(operand, Tensor) and type(operand) in (Tensor, torch.nn.Parameter):
        return operand.detach()
    from transformer_engine.pytorch.tensor.storage.float8_blockwise_tensor_storage import (
        Float8BlockwiseQTensorStorage,
    )
    from transformer_engine.pytorch.tensor.storage.float8_tensor_storage import Float8TensorStorage

    if isinstance(operand, Float8TensorStorage):  # one scale, in any direction
        CALLS["FP8 operand, one scale"] += 1
        data = operand._data if operand._data is not None else operand._transpose.movedim(0, -1)
        return data.view(torch_dtype(operand._fp8_dtype)).float() * operand._scale_inv
    assert isinstance(operand, Float8BlockwiseQTensorStorage), type(operand)
    name = "columnwise" if columnwise else "rowwise"
    other = "rowwise" if columnwise else "columnwise"
    tensors = operand.get_metadata()
    assert tensors[f"{name}_data"] is not None, f"the product reads {name}_data, which is not there"
    CALLS[f"FP8 operand, {name}"] += 1
    tensors |= {f"{other}_data": None, f"{other}_scale_inv": None, "fake_dtype": torch.float32}
    return Float8BlockwiseQTensorStorage(**tensors).dequantize()


def _product(A: Any, transa: bool, B: Any, transb: bool, dtype: torch.dtype) -> Tensor:
    """Returns B A as cuBLAS computes it from column-major operands: summed in fp32, rounded once."""
    a = matrix(A, columnwise=not transa)
    b = matrix(B, columnwise=transb)
    leading = b.shape[:-1]
    a = a.reshape(-1, a.shape[-1])
    b = b.reshape(-1, b.shape[-1])
    if not a.dtype == b.dtype == dtype:
        a = a.float()
        b = b.float()
    y = (b.t() if transb else b) @ (a.t() if transa else a)
    y = y.to(dtype)
    return y if transb else y.view(*leading, y.shape[-1])


def _write(y: Tensor, out: Tensor | None, accumulate: bool) -> Tensor:
    if out is None:
        return y
    y = y.view(out.shape)
    return out.add_(y) if accumulate else out.copy_(y)


@stands_in
def generic_gemm(A, transa, B, transb, out, quantizer, out_dtype, bias, bias_type, gelu, gelu_in, grad, workspace,
                 workspace_size, accumulate, split, *, comm_overlap=None, comm_type=None, extra_output=None,
                 bulk_overlap=False, alpha=1.0, beta=None):  # fmt: skip
    assert not gelu and comm_overlap is None and alpha in (None, 1.0)
    operand_dtype = A.dtype if isinstance(A, Tensor) else A._dtype
    dtype = out.dtype if out is not None else torch_dtype(out_dtype, operand_dtype)
    if accumulate and out.dtype != operand_dtype:
        CALLS["product added to a gradient of another dtype"] += 1
    y = _write(_product(A, transa, B, transb, dtype), out, accumulate)
    bias_grad = None
    if bias is not None and grad:
        gradient = matrix(B, columnwise=transb)
        bias_grad = gradient.reshape(-1, gradient.shape[-1]).float().sum(0).to(bias.dtype)
    elif bias is not None:
        y = y.add_(bias.to(y.dtype)) if out is not None else y + bias.to(y.dtype)
    return (y if quantizer is None else quantizer(y)), bias_grad, None, extra_output


@stands_in
def te_general_grouped_gemm(A, transa, B, transb, out, out_dtype, m_splits, bias, bias_dtype, single, gelu_in, grad,
                            workspaces, workspace_size, accumulate, split, *_rest):  # fmt: skip
    outs = list(out[0].split([int(n) for n in m_splits])) if single else list(out)
    for a, b, y, b_bias in zip(A, B, outs, bias, strict=True):
        if 0 in (*a.size(), *b.size()):
            CALLS["grouped product of an expert without tokens"] += 1
            if not accumulate:
                y.zero_()
            if grad:
                b_bias.zero_()
            continue
        _write(_product(a, transa, b, transb, y.dtype), y, accumulate)
        if b_bias.numel() and grad:
            b_bias.copy_(matrix(b, columnwise=transb).float().sum(0))
        elif b_bias.numel():
            y.add_(b_bias)
    return bias


# --- norms: y is quantised if the next product is in FP8 ---


def _gain(weight: Tensor, zero_centered: bool) -> Tensor:
    return weight.detach().float() + (1 if zero_centered else 0)


def _output(y: Tensor, out: Any, quantizer: Any) -> Any:
    if quantizer is None:
        return y if out is None else out.copy_(y)
    if out is None:
        return quantizer(y)
    quantizer.update_quantized(y, out)
    return out


@stands_in
def rmsnorm_fwd(x, weight, eps, out, quantizer, otype, sm_margin, zero_centered):
    wide = x.detach().float()
    rsigma = (wide.square().mean(-1) + eps).rsqrt()
    y = wide * rsigma[..., None] * _gain(weight, zero_centered)
    return _output(y.to(torch_dtype(otype, x.dtype)), out, quantizer), None, rsigma.flatten()


@stands_in
def rmsnorm_bwd(dz, x, rsigma, weight, sm_margin, zero_centered):
    rsigma = rsigma.view(*x.shape[:-1], 1)
    dz = dz.detach().reshape(x.shape).float()
    normal = x.detach().float() * rsigma
    inner = dz * _gain(weight, zero_centered)
    dx = rsigma * (inner - normal * (inner * normal).mean(-1, keepdim=True))
    return dx.to(x.dtype), (dz * normal).flatten(0, -2).sum(0).to(weight.dtype)


# --- optimizer: FusedAdam's kernels on lists of tensors ---


@stands_in
def multi_tensor_adam(
    chunk, overflow, lists, lr, beta1, beta2, eps, step, mode, bias_correction, weight_decay
):
    assert mode == 1, "decoupled weight decay"
    correction1 = 1 - beta1**step if bias_correction else 1
    correction2 = 1 - beta2**step if bias_correction else 1
    for gradient, parameter, mean, square in zip(*lists, strict=True):
        g = gradient.float()
        p = parameter.float()
        mean.mul_(beta1).add_(g, alpha=1 - beta1)
        square.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        update = (mean / correction1) / ((square / correction2).sqrt() + eps)
        parameter.copy_(p - lr * (update + weight_decay * p))


@stands_in
def multi_tensor_scale(chunk, overflow, lists, scale):
    for source, target in zip(*lists, strict=True):
        target.copy_(source * scale)


@stands_in
def multi_tensor_l2norm(chunk, overflow, lists, per_tensor=False):
    norms = torch.stack([x.float().norm() for x in lists[0]]) if lists[0] else torch.zeros(1)
    return norms.norm().view(1), norms if per_tensor else torch.zeros(0)
