"""The transformer layer, as a Megatron spec: Transformer Engine's on a GPU, Megatron's local one on a CPU.

The local spec lacks two things, which are here: a norm that allows sequence parallelism, and a core
attention that takes packed rows. Shapes: T tokens of all rows end to end, H heads of this tensor rank,
G key/value heads, D head_dim.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

__all__ = ["PackedAttention", "RMSNorm", "block_spec"]


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm in fp32; its weight is marked as replicated over the sequence-parallel ranks."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_unused: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class PackedAttention(torch.nn.Module):
    """Causal attention within each row of a packed [T, H, D] query; key and value are [T, G, D].

    Rows of like length (up to the next power of two) are one padded call: a pad sits behind its row, so
    causality alone keeps it out, and the padding at most doubles the tokens.
    """

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **_unused: Any) -> None:
        super().__init__()
        self.scale = softmax_scale  # None: 1 / sqrt(D)

    def forward(
        self,
        query: Tensor,  # [T, H, D]
        key: Tensor,  # [T, G, D]
        value: Tensor,  # [T, G, D]
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **_unused: Any,
    ) -> Tensor:  # [T, H * D]
        assert packed_seq_params is not None and attention_bias is None, "only packed rows, without a bias"
        parts, places = [], []
        for rows_RL, is_token_RL in _like_lengths(packed_seq_params.cu_seqlens_q.tolist()):
            index = rows_RL.flatten().to(query.device)
            q, k, v = (
                x.index_select(0, index).unflatten(0, rows_RL.shape).transpose(1, 2) for x in (query, key, value)
            )  # [R, H, L, D], [R, G, L, D]
            out = scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=self.scale, enable_gqa=query.shape[1] != key.shape[1]
            )
            kept = is_token_RL.flatten().nonzero().squeeze(-1).to(query.device)
            parts.append(out.transpose(1, 2).flatten(0, 1).index_select(0, kept))
            places.append(index.index_select(0, kept))
        order = torch.argsort(torch.cat(places))
        return torch.cat(parts).index_select(0, order).flatten(1)


def _like_lengths(cu_seqlens: list[int]) -> list[tuple[Tensor, Tensor]]:
    """Token indices [R, L] of the rows of each length class, and which of them are tokens (the rest: pads)."""
    classes: dict[int, list[tuple[int, int]]] = {}
    for start, end in pairwise(cu_seqlens):
        if end > start:
            classes.setdefault((end - start - 1).bit_length(), []).append((start, end))
    groups = []
    for rows in classes.values():
        start, end = torch.tensor(rows).T
        index = start[:, None] + torch.arange(int((end - start).max()))
        is_token = index < end[:, None]
        groups.append((torch.where(is_token, index, start[:, None]), is_token))
    return groups


def block_spec(config: TransformerConfig, *, num_layers: int, use_te: bool) -> TransformerBlockSubmodules:
    """The spec of the `num_layers` layers of one pipeline stage."""
    kind: dict[str, Any] = {
        "num_experts": config.num_moe_experts,
        "moe_grouped_gemm": config.moe_grouped_gemm,
        "qk_layernorm": config.qk_layernorm,
    }
    if use_te:
        from megatron.core.extensions.transformer_engine import TENorm

        norm: Any = TENorm
        layer = get_gpt_layer_with_transformer_engine_spec(**kind)
    else:
        norm = RMSNorm
        layer = _with_own_parts(get_gpt_layer_local_spec(**kind, normalization="RMSNorm"))
    return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=norm)


def _with_own_parts(layer: ModuleSpec) -> ModuleSpec:
    parts: Any = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    attention = parts.self_attention.submodules
    attention.core_attention = PackedAttention
    if attention.q_layernorm is not IdentityOp:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return layer
