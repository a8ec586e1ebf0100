"""The transformer layer, as a Megatron spec: Transformer Engine's on a GPU, a local one on a CPU.

This file adds what Megatron's local spec lacks: a norm that supports sequence parallelism, core
attention within packed rows, and latent attention with complete gradients under tensor parallelism.

Shapes: T tokens of all rows end to end, H heads of this tensor rank, G key/value heads, D head_dim
of query and key, E of value.
"""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import RowParallelLinear, set_tensor_model_parallel_attributes
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention

from megarl.models.shape import LayerKind
from megarl.trainer.context_parallel import attend, attend_stacks
from megarl.trainer.moe import BalancedRouter


class RMSNorm(Module):
    """RMSNorm in fp32; the weight is marked as replicated over the sequence-parallel ranks."""

    def __init__(
        self,
        config: TransformerConfig,
        hidden_size: int,
        eps: float = 1e-5,
        **_unused: Any,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = _replicated(torch.ones(hidden_size, dtype=config.params_dtype), config)

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * rms_norm(x.float(), x.shape[-1:], eps=self.eps).to(x.dtype)


def _replicated(weight: Tensor, config: TransformerConfig) -> Parameter:
    """Returns a parameter whose gradient Megatron sums over the sequence-parallel ranks."""
    parameter: Any = Parameter(weight)
    parameter.sequence_parallel = config.sequence_parallel
    return parameter


class PackedAttention(Module):
    """Causal attention within each row of a packed query [T, H, D], key [T, G, D], value [T, G, E].

    Rows of similar length are padded and share one call. Padding comes last, so the causal mask
    hides it.
    """

    def __init__(
        self,
        config: TransformerConfig,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        **_unused: Any,
    ) -> None:
        super().__init__()
        self.scale = softmax_scale  # None: 1 / sqrt(D)
        self.context = None
        if pg_collection is not None and pg_collection.cp.size() > 1:
            self.context = pg_collection.cp

    def forward(
        self,
        query: Tensor,  # [T, H, D]
        key: Tensor,  # [T, G, D]
        value: Tensor,  # [T, G, E]
        attention_mask: Tensor | None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **_unused: Any,
    ) -> Tensor:  # [T, H * E]
        assert packed_seq_params is not None and attention_bias is None, (
            "supports only packed rows without a bias"
        )
        stacks = getattr(packed_seq_params, "stacks", None)  # set by SharedRows
        if stacks:
            return attend_stacks(query, key, value, stacks, self._attend)
        lengths = packed_seq_params.cu_seqlens_q.diff().tolist()
        return attend(query, key, value, lengths, self.context, self._attend)

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        distance_RLK: Tensor | None,
    ) -> Tensor:
        """Computes causal attention; a `RowAttention`."""
        mask = None if distance_RLK is None else (distance_RLK >= 0)[:, None]
        return scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )


class SinkAttention(PackedAttention):
    """Attention of gpt-oss: the softmax has one extra, learned logit per head, the sink.

    Every other layer uses a sliding window.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        **options: Any,
    ) -> None:
        super().__init__(config, **options)
        heads = config.num_attention_heads // config.tensor_model_parallel_size
        self.softmax_offset = Parameter(torch.empty(heads, dtype=config.params_dtype))
        assert config.window_size is not None and isinstance(config.window_attn_skip_freq, int)
        self.window = None
        if layer_number % config.window_attn_skip_freq:
            self.window = config.window_size[0] + 1  # tokens, including the query's own

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: Any = (),
        metadata: Any = None,
    ) -> dict[str, Any]:
        """Shards the sinks over tensor ranks.

        Megatron's default would save rank 0's as the whole tensor.
        """
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True), prefix, {"softmax_offset": 0}, sharded_offsets
        )

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        distance_RLK: Tensor | None,
    ) -> Tensor:
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        v = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
        scores_RHLL = (q @ k.transpose(-1, -2)).float() * (self.scale or q.shape[-1] ** -0.5)
        if distance_RLK is None:
            position_L = torch.arange(q.shape[2], device=q.device)
            distance_RLK = (position_L[:, None] - position_L)[None]
        hidden = (distance_RLK < 0) | (distance_RLK >= (self.window or k.shape[2]))
        scores_RHLL = scores_RHLL.masked_fill(hidden[:, None], -torch.inf)
        sinks = self.softmax_offset.float()[None, :, None, None].expand(*scores_RHLL.shape[:3], 1)
        weights_RHLL = torch.cat([scores_RHLL, sinks], -1).softmax(-1)[..., :-1]
        return weights_RHLL.to(v.dtype) @ v


class SpecifiedLatentAttention(MLASelfAttention):
    """Megatron's latent attention, with exactly the norms of its spec.

    Megatron-Core 0.19.2 would add a norm before the projection of uncompressed queries, where
    DeepSeek models have none.
    """

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        return vars(submodules)


class LatentAttention(SpecifiedLatentAttention):
    """Megatron's latent attention, with down projections replicated on every tensor rank.

    Transformer Engine's spec does the same. Megatron's local spec splits them, so the gradient of
    the key that all heads share misses the heads of other ranks (0.16.1, 0.19.2).
    """

    def __init__(self, config: MLATransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = ReplicatedLinear(config, config.q_lora_rank)
        self.linear_kv_down_proj = ReplicatedLinear(
            config, config.kv_lora_rank + config.qk_pos_emb_head_dim
        )


class ReplicatedLinear(Module):
    """A linear layer without bias, replicated over tensor ranks.

    It computes this rank's part of the sequence and returns (output, None), like Megatron's layers.
    """

    def __init__(self, config: TransformerConfig, size: int) -> None:
        super().__init__()
        weight = torch.empty(size, config.hidden_size, dtype=config.params_dtype)
        self.weight = _replicated(weight, config)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return self._forward_impl(input=x, weight=self.weight), None

    _forward_impl = staticmethod(linear)  # trainer/fp8.py replaces it, as in Megatron's layers


class _ExpertOutput(RowParallelLinear):
    """Works around three bugs of expert biases in Megatron's local spec (0.16.1, 0.19.2).

    The bias is added in place to the output; if nothing is reduced, autograd takes the output for a
    view of the input (hence the clone). The bias is marked as sequence parallel, so its gradient is
    reduced twice. It is not marked as tensor parallel, so only the first rank counts it in the
    gradient norm.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        bias: Any = self.bias
        set_tensor_model_parallel_attributes(bias, True, 0, 1)
        bias.sequence_parallel = False

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        output, bias = super().forward(input_)
        return output.clone(), bias


def block_spec(
    config: TransformerConfig,
    kinds: Sequence[LayerKind],
    *,
    use_te: bool,
) -> TransformerBlockSubmodules:
    """Returns the spec of the layers of one model chunk."""
    norm: Any = RMSNorm
    if use_te:
        from megatron.core.extensions.transformer_engine import TENorm

        norm = TENorm
    specs = {kind: _layer_spec(config, kind, use_te=use_te) for kind in set(kinds)}
    for kind, spec in specs.items():
        if kind.has_experts:
            _submodules(_submodules(spec).mlp).router = BalancedRouter
    return TransformerBlockSubmodules(layer_specs=[specs[kind] for kind in kinds], layer_norm=norm)


def _layer_spec(
    config: TransformerConfig,
    kind: LayerKind,
    *,
    use_te: bool,
) -> ModuleSpec:
    options = {
        "num_experts": config.num_moe_experts if kind.has_experts else None,
        "qk_layernorm": config.qk_layernorm,
        "multi_latent_attention": config.multi_latent_attention,
    }
    if use_te:
        layer = get_gpt_layer_with_transformer_engine_spec(
            moe_grouped_gemm=config.moe_grouped_gemm, **options
        )
        if config.multi_latent_attention:
            _submodules(layer).self_attention.module = SpecifiedLatentAttention
        return layer
    layer = get_gpt_layer_local_spec(normalization="RMSNorm", **options)
    parts: Any = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    attention = parts.self_attention.submodules
    has_sinks = config.softmax_type == "learnable"
    attention.core_attention = SinkAttention if has_sinks else PackedAttention
    if config.multi_latent_attention:
        parts.self_attention.module = LatentAttention
        attention.q_layernorm = attention.kv_layernorm = RMSNorm
    elif config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    if kind.has_experts and config.add_bias_linear:
        _submodules(_submodules(parts.mlp).experts).linear_fc2 = _ExpertOutput
    return layer


def _submodules(spec: Any) -> Any:
    """Returns the submodules of a ModuleSpec, or of the `partial` that megatron-core 0.19 uses."""
    return spec.submodules if isinstance(spec, ModuleSpec) else spec.keywords["submodules"]
