"""Stand-ins for cuDNN's attention, row by row, for rotary embeddings, and for context parallelism.

The forward pass keeps the log of the softmax's sum. The backward pass computes from it and from the
output, as the kernel does: with context parallelism both are those of all ranks.

Shapes: M queries and N keys of a row, H heads, G key-value groups, D and E widths of keys and values.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from te_standin.compiled import CALLS, stands_in


def _format(layout: Any, *, keys: bool = False) -> str:
    """Returns thd, sbhd or bshd, of "NVTE_THD_THD_THD", "NVTE_SBH3D" or "NVTE_SBHD_BSHD_BSHD"."""
    parts = layout.name.removeprefix("NVTE_").split("_")
    return parts[-1 if keys else 0].translate({ord("3"): None, ord("2"): None}).lower()


def _rows(x: Tensor, kind: str, cu_seqlens: Tensor, padded: Tensor | None) -> list[Tensor]:
    """Returns a view [L, heads, width] of each row of a packed or padded tensor."""
    lengths = cu_seqlens.diff().tolist()
    if kind == "thd":
        starts = (cu_seqlens if padded is None else padded).tolist()
        return [x[start : start + n] for start, n in zip(starts, lengths, strict=False)]
    by_row = x.unbind(1 if kind == "sbhd" else 0)
    return [row[:n] for row, n in zip(by_row, lengths, strict=True)]


def _rows_of(
    layout: Any, cu: tuple[Any, Any, Any, Any], queries: list[Tensor], keys: list[Tensor]
) -> Iterator[tuple[Tensor, ...]]:
    """Yields each row's views of the tensors that are indexed like the queries and like the keys."""
    cu_q, cu_kv, padded_q, padded_kv = cu
    parts = [_rows(x, _format(layout), cu_q, padded_q) for x in queries]
    parts += [_rows(x, _format(layout, keys=True), cu_kv, padded_kv) for x in keys]
    return (row for row in zip(*parts, strict=True) if len(row[0]))


def _scores(q_MHD: Tensor, k_NGD: Tensor, mask: Any, window: Any, scale: float) -> Tensor:
    """Returns [H, M, N] fp32, -inf where a key is hidden."""
    k_NHD = k_NGD.repeat_interleave(q_MHD.shape[1] // k_NGD.shape[1], 1)
    scores = (q_MHD.float().transpose(0, 1) @ k_NHD.float().permute(1, 2, 0)) * scale
    m, n = scores.shape[-2:]
    last = n - m if "BOTTOM_RIGHT" in mask.name else 0
    distance_MN = torch.arange(m)[:, None] + last - torch.arange(n)
    is_causal = "CAUSAL" in mask.name
    hidden = distance_MN < 0 if is_causal else torch.zeros(m, n, dtype=torch.bool)
    left, right = window or (-1, -1)
    if left >= 0:
        hidden |= distance_MN > left
    if right >= 0 and not is_causal:
        hidden |= distance_MN < -right
    return scores.masked_fill(hidden, -math.inf)


def _statistics(q: Tensor, layout: Any) -> Tensor:
    """Returns a tensor for the log-sum-exp, in cuDNN's layout: [T, H, 1], or [B, H, L, 1]."""
    kind = _format(layout)
    if kind == "thd":
        return torch.full((*q.shape[:-1], 1), -math.inf)
    length, rows = q.shape[:2] if kind == "sbhd" else (q.shape[1], q.shape[0])
    return torch.full((rows, q.shape[-2], length, 1), -math.inf)


def _like_queries(statistics: Tensor, layout: Any) -> Tensor:
    """Returns a view of the statistics with the dimensions in the queries' order."""
    kind = _format(layout)
    if kind == "thd":
        return statistics
    return statistics.permute((2, 0, 1, 3) if kind == "sbhd" else (0, 2, 1, 3))


@stands_in
def fused_attn_fwd(max_q, max_kv, is_training, scale, dropout, fast_zero_fill, layout, o_format, scale_inv_format,
                   bias_type, mask, softmax, window, bottom_right, cu_q, cu_kv, q, k, v, fake_dtype, padded_q, padded_kv,
                   page_k, page_v, s_quantizer, o_quantizer, bias, offset, generator, elements, max_logit,
                   graph):  # fmt: skip
    assert not (dropout and is_training) and not max_logit
    assert bias is page_k is s_quantizer is o_quantizer is None
    CALLS[f"attention {layout.name} {mask.name}"] += 1
    q, k, v = (x.detach() for x in (q, k, v))
    out = q.new_zeros(*q.shape[:-1], v.shape[-1])  # padding tokens give 0
    statistics = _statistics(q, layout)
    sink = offset
    if softmax.name == "NVTE_OFF_BY_ONE_SOFTMAX":
        sink = torch.zeros(1, q.shape[-2])
    cu = (cu_q, cu_kv, padded_q, padded_kv)
    queries = [q, out, _like_queries(statistics, layout)]
    for row_q, row_out, row_lse, row_k, row_v in _rows_of(layout, cu, queries, [k, v]):
        scores = _scores(row_q, row_k, mask, window, scale)
        lse = scores.logsumexp(-1, keepdim=True)
        if sink is not None:
            lse = torch.logaddexp(lse, sink.detach().float().view(-1, 1, 1))
        values = row_v.repeat_interleave(row_q.shape[1] // row_v.shape[1], 1).transpose(0, 1)
        weights = (scores - lse).exp().to(values.dtype)
        row_out.copy_((weights @ values).transpose(0, 1))
        row_lse.copy_(lse.transpose(0, 1))
    random_state = torch.zeros(2, dtype=torch.int64)
    return [out, statistics, random_state, *([] if offset is None else [offset])]


@stands_in
def fused_attn_bwd(max_q, max_kv, scale, dropout, fast_zero_fill, layout, o_format, do_format, dqkv_layout,
                   scale_inv_format, do_scale_inv_format, bias_type, mask, softmax, window, bottom_right, deterministic,
                   cu_q, cu_kv, q, k, v, o, d_o, fake_dtype, aux, padded_q, padded_kv, s_quantizer, dp_quantizer,
                   dqkv_quantizer, graph):  # fmt: skip
    statistics, _random_state, *offsets = aux
    q, k, v = (x.detach() for x in (q, k, v))
    o, d_o = (x.detach().view(*q.shape[:-1], v.shape[-1]) for x in (o, d_o))
    dq, dk, dv = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    d_offsets = [torch.zeros_like(x, dtype=torch.float32) for x in offsets]
    cu = (cu_q, cu_kv, padded_q, padded_kv)
    queries = [q, o, d_o, dq, _like_queries(statistics, layout)]
    for row in _rows_of(layout, cu, queries, [k, v, dk, dv]):
        row_q, row_o, row_do, row_dq, row_lse, row_k, row_v, row_dk, row_dv = row
        groups = row_k.shape[1]
        times = row_q.shape[1] // groups
        lse = row_lse.transpose(0, 1).float()
        grad_HME = row_do.transpose(0, 1).float()
        weights = (_scores(row_q, row_k, mask, window, scale) - lse).exp()
        keys = row_k.float().repeat_interleave(times, 1).transpose(0, 1)
        values = row_v.float().repeat_interleave(times, 1).transpose(0, 1)
        delta = (grad_HME * row_o.transpose(0, 1).float()).sum(-1, keepdim=True)
        d_scores = weights * (grad_HME @ values.transpose(1, 2) - delta)
        row_dq.copy_((d_scores @ keys * scale).transpose(0, 1))
        d_keys = d_scores.transpose(1, 2) @ row_q.transpose(0, 1).float() * scale
        d_values = weights.to(v.dtype).float().transpose(1, 2) @ grad_HME
        for target, of_heads in ((row_dk, d_keys), (row_dv, d_values)):
            target.copy_(of_heads.unflatten(0, (groups, times)).sum(1).transpose(0, 1))
        for offset, d_offset in zip(offsets, d_offsets, strict=True):
            sink = (offset.float().view(-1, 1, 1) - lse).exp()
            d_offset -= (sink * delta).sum((1, 2)).view(d_offset.shape)
    d_offset = d_offsets[0].to(offsets[0].dtype) if offsets else None
    return [dq, dk, dv, None, d_offset]


# --- rotary embeddings ---


def _rotate(x, freqs, starts, kind, interleaved, cu_seqlens, cp_size, cp_rank, sign):
    name = kind.name.removeprefix("NVTE_")
    assert not interleaved and starts is None and (cp_size == 1 or name == "THD")
    width = freqs.shape[-1]
    angles_LD = freqs.view(-1, width).float()
    out = x.clone()

    def turned(part: Tensor, angles: Tensor) -> Tensor:
        """Rotates [L, ..., width], pairing the first half of the width with the second."""
        wide = part.float()
        partner = torch.cat([-wide[..., width // 2 :], wide[..., : width // 2]], -1)
        angles = angles.view(len(angles), *[1] * (part.dim() - 2), width)
        return (wide * angles.cos() + sign * partner * angles.sin()).to(x.dtype)

    if name != "THD":
        first = x[..., :width] if name == "SBHD" else x[..., :width].transpose(0, 1)
        first = turned(first, angles_LD[: len(first)])
        out[..., :width] = first if name == "SBHD" else first.transpose(0, 1)
        return out
    bounds = (cu_seqlens // cp_size).tolist()
    for start, end in itertools.pairwise(bounds):
        angles = angles_LD[: end - start]
        if cp_size > 1:  # chunks cp_rank and 2 cp_size - 1 - cp_rank of the row
            chunk = (end - start) // 2
            last = (2 * cp_size - 1 - cp_rank) * chunk
            mine = angles_LD[cp_rank * chunk : (cp_rank + 1) * chunk]
            angles = torch.cat([mine, angles_LD[last : last + chunk]])
        out[start:end, ..., :width] = turned(x[start:end, ..., :width], angles)
    return out


@stands_in
def fused_rope_forward(x, freqs, starts, kind, interleaved, cu_seqlens, cp_size, cp_rank):
    return _rotate(x, freqs, starts, kind, interleaved, cu_seqlens, cp_size, cp_rank, 1)


@stands_in
def fused_rope_backward(dy, freqs, starts, kind, interleaved, cu_seqlens, cp_size, cp_rank):
    return _rotate(dy, freqs, starts, kind, interleaved, cu_seqlens, cp_size, cp_rank, -1)


# --- context parallelism: a rank has two chunks of equal length of each row ---


def _halves(cu_seqlens: Tensor) -> list[tuple[slice, slice, slice]]:
    """Returns, for each row, its first and second half, and its place in a tensor of halves."""
    bounds = cu_seqlens.tolist()
    halves = []
    for start, end in itertools.pairwise(bounds):
        middle = (start + end) // 2
        half = slice(start // 2, start // 2 + (end - start) // 2)
        halves.append((slice(start, middle), slice(middle, end), half))
    return halves


@stands_in
def thd_read_half_tensor(x, cu_seqlens, half):
    return torch.cat([x[row[half]] for row in _halves(cu_seqlens)])


@stands_in
def thd_read_second_half_lse(lse, cu_seqlens, packed, length):
    assert packed
    out = lse.new_zeros(lse.shape[0], length)
    for _, second, half in _halves(cu_seqlens):
        out[:, half] = lse[:, second]
    return out


@stands_in
def thd_second_half_lse_correction(lse, lse_step, cu_seqlens, packed):
    assert packed
    for _, second, half in _halves(cu_seqlens):
        lse[:, second] = torch.logaddexp(lse[:, second], lse_step[:, half])


@stands_in
def thd_out_correction(out, out_step, old, new, step, cu_seqlens, only_second, packed):
    """Rescales `out` [T, H, E], a softmax over some keys, and adds that over the step's keys."""
    assert packed
    out = out.view(-1, *out.shape[-2:])
    out_step = out_step.view(-1, *out_step.shape[-2:])
    for first, second, half in _halves(cu_seqlens):
        here = second if only_second else slice(first.start, second.stop)
        there = half if only_second else here
        before = (old[:, here] - new[:, here]).exp().t()[..., None]
        added = (step[:, there] - new[:, here]).exp().t()[..., None]
        out[here] = (out[here].float() * before + out_step[there].float() * added).to(out.dtype)


@stands_in
def thd_grad_correction(grad, step, cu_seqlens, first_op, second_op):
    """`none`, `zero`, `copy` or `add` for each half; `step` may have one half of each row only."""
    is_half = {first_op, second_op} & {"none", "zero"}
    for first, second, half in _halves(cu_seqlens):
        for here, operation in ((first, first_op), (second, second_op)):
            there = half if is_half else here
            if operation == "zero":
                grad[here] = 0
            elif operation == "copy":
                grad[here] = step[there]
            elif operation == "add":
                grad[here] += step[there]


def exchange(rank, send, send_dst, recv, recv_src, group, batch):
    """Replaces flash_attn_p2p_communicate, whose sends and receives hang on gloo in the backward pass."""
    parts = [torch.empty_like(send) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, send.contiguous(), group)
    recv.copy_(parts[dist.get_group_rank(group, recv_src)])
    return []
