"""ModelShape and layout -> Megatron's TransformerConfig: what a family is, in Megatron's words.

A model with latent attention gets an MLATransformerConfig. Gradients are sums: nothing in Megatron divides them.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal

import torch
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor

from megarl.layout import Axis, Layout, stage_layers
from megarl.models.shape import Latent, ModelShape
from megarl.trainer.rope import yarn_factor

__all__ = ["Dispatcher", "router_settings", "run_settings", "transformer_config"]

Dispatcher = Literal["alltoall", "allgather"]


def transformer_config(
    shape: ModelShape, layout: Layout, *, dtype: torch.dtype, dispatcher: Dispatcher, use_te: bool
) -> TransformerConfig:
    """Megatron's settings for this model and layout."""
    kind, more = TransformerConfig, _gpt_oss_settings(shape) if shape.sinks else {}
    if shape.latent is not None:
        kind, more = MLATransformerConfig, _latent_settings(shape, shape.latent)
    return kind(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.intermediate,
        normalization="RMSNorm",
        layernorm_epsilon=shape.rms_eps,
        qk_layernorm=shape.qk_norm or shape.latent is not None,
        gated_linear_unit=True,
        activation_func=quick_gelu if shape.swiglu_limit else torch.nn.functional.silu,
        add_bias_linear=shape.out_bias,
        add_qkv_bias=shape.qkv_bias,
        softmax_scale=_softmax_scale(shape),
        **(_moe_settings(shape, use_te=use_te) if shape.is_moe else {}),
        **run_settings(shape.layers, layout, dtype=dtype, dispatcher=dispatcher, use_te=use_te),
        **more,
    )


def run_settings(
    layers: int, layout: Layout, *, dtype: torch.dtype, dispatcher: Dispatcher, use_te: bool
) -> dict[str, Any]:
    """What is ours to say of any model: the layout, the numerics, and that nothing is drawn."""
    return {
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "tensor_model_parallel_size": layout.tp.size,
        "pipeline_model_parallel_size": layout.pp.size,
        "pipeline_model_parallel_layout": _pipeline_layout(layers, layout),
        "context_parallel_size": layout.cp.size,
        "expert_model_parallel_size": layout.ep.size,
        "expert_tensor_parallel_size": layout.etp.size,
        "sequence_parallel": layout.tp.size > 1,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        # Packed micro-batches differ in length. Not with virtual stages: of two ranks each is the other's next and
        # previous, and lengths sent ahead in both directions would be taken for one another. Nor with the allgather
        # dispatcher, which gathers as many tokens from every expert rank.
        "variable_seq_lengths": layout.vpp.size == 1 and dispatcher == "alltoall",
        "overlap_p2p_comm": layout.vpp.size > 1,  # which also gives each direction a group of its own
        "batch_p2p_comm": layout.vpp.size == 1,
        "moe_token_dispatcher_type": dispatcher,  # dense models too: Megatron checks it before it looks for experts
        "calculate_per_token_loss": True,
        # Every parameter is loaded, so nothing is drawn; but to "initialise" is also what marks a parameter as split
        # over the tensor ranks, and without the mark the gradient norm leaves it out on all of them but the first.
        "perform_initialization": True,
        "init_method": _leave,
        "output_layer_init_method": _leave,
        "embedding_init_method": _leave,
        "bias_activation_fusion": use_te,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
    }


def _moe_settings(shape: ModelShape, *, use_te: bool) -> dict[str, Any]:
    router = shape.router
    settings: dict[str, Any] = {
        "num_moe_experts": shape.experts,
        "moe_layer_freq": [int(layer >= shape.dense_layers) for layer in range(shape.layers)],
        "moe_ffn_hidden_size": shape.moe_intermediate,
        "moe_shared_expert_intermediate_size": shape.shared_intermediate or None,
        "moe_router_topk": shape.experts_per_token,
        # softmax over the chosen experts is the renormalised softmax over all
        "moe_router_pre_softmax": not router.renormalise,
        "moe_router_score_function": router.scores,
        "moe_router_topk_scaling_factor": None if router.scale == 1 else router.scale,
        **router_settings(use_te=use_te),
    }
    if router.corrected:
        settings["moe_router_enable_expert_bias"] = True
    if router.groups > 1:
        settings |= {
            "moe_router_num_groups": router.groups,
            "moe_router_group_topk": router.groups_per_token,
        }
    return settings


def router_settings(*, use_te: bool) -> dict[str, Any]:
    """What is ours to say of any router: a policy's is not balanced behind its back."""
    return {
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_bias_update_rate": 0.0,  # the bias that balanced pre-training stays what it was
        "moe_grouped_gemm": use_te,
    }


def _latent_settings(shape: ModelShape, latent: Latent) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "q_lora_rank": latent.q_rank or None,
        "kv_lora_rank": latent.kv_rank,
        "qk_head_dim": latent.nope,
        "qk_pos_emb_head_dim": latent.rope,
        "v_head_dim": latent.value,
        "rotary_base": shape.rope_theta,
        "rope_type": "rope",
    }
    scaling = shape.rope_scaling
    if not scaling:
        return settings
    # without the two, Hugging Face's factor on cosine and sine is that of mscale 1
    scales = (scaling["mscale"], scaling["mscale_all_dim"])
    mscale, mscale_all_dim = scales if all(scales) else (1.0, 0.0)
    return settings | {
        "rope_type": "yarn",
        "rotary_scaling_factor": scaling["factor"],
        "original_max_position_embeddings": int(scaling["original_max_position_embeddings"]),
        "beta_fast": scaling["beta_fast"],
        "beta_slow": scaling["beta_slow"],
        "mscale": mscale,
        "mscale_all_dim": mscale_all_dim,
    }


def _softmax_scale(shape: ModelShape) -> float | None:
    """Yarn's factor on cosine and sine, of query and key, where Megatron does not know it; None: Megatron's own."""
    factor = 1.0 if shape.latent else yarn_factor(shape)
    return None if factor == 1 else factor**2 / math.sqrt(shape.head_dim)


def _gpt_oss_settings(shape: ModelShape) -> dict[str, Any]:
    return {
        "glu_linear_offset": 1.0,
        "activation_func_clamp_value": shape.swiglu_limit,
        "softmax_type": "learnable",
        "window_size": (shape.sliding_window - 1, 0),
        "window_attn_skip_freq": 2,
    }


def _leave(weight: Tensor) -> Tensor:
    return weight


def _pipeline_layout(layers: int, layout: Layout) -> list[list[str]] | None:
    """What each chunk of the pipeline holds, in their order; Megatron's own rule knows even stages only."""
    if layout.pp.size == 1:
        return None
    stages = [stage_layers(layers, replace(layout, pp=Axis(layout.pp.size, p))) for p in range(layout.pp.size)]
    chunks = [["decoder"] * len(stage[v]) for v in range(layout.vpp.size) for stage in stages]
    chunks[0].insert(0, "embedding")
    chunks[-1].append("loss")
    return chunks
