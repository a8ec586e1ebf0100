"""Translates ModelShape and layout to Megatron's TransformerConfig or MLATransformerConfig."""

import importlib
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megarl.layout import Axis, Layout, stage_layers
from megarl.models.registry import FAMILIES
from megarl.models.shape import ModelShape, Settings
from megarl.trainer.parallel_groups import megatron_sizes
from megarl.trainer.rope import yarn_factor

Dispatcher = Literal["alltoall", "allgather"]
# setting -> the name that it needs in megatron.core.extensions.transformer_engine
KERNELS = {
    "apply_rope_fusion": "fused_apply_rotary_pos_emb_thd",
    "moe_permute_fusion": "fused_permute_with_probs",
    "moe_router_fusion": "fused_topk_with_score_function",
    "moe_shared_expert_overlap": "TELinear",
}
INIT_METHODS = ("init_method", "output_layer_init_method", "embedding_init_method")
ACTIVATIONS = {"silu": torch.nn.functional.silu, "quick_gelu": quick_gelu}


def transformer_config(
    shape: ModelShape,
    layout: Layout,
    *,
    dtype: torch.dtype,
    dispatcher: Dispatcher,
    use_te: bool,
) -> TransformerConfig:
    """Returns Megatron's settings for this model and layout."""
    factor = yarn_factor(shape)
    settings = {
        "num_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_query_groups": shape.kv_heads,
        "kv_channels": shape.head_dim,
        "ffn_hidden_size": shape.intermediate,
        "normalization": "RMSNorm",
        "layernorm_epsilon": shape.rms_eps,
        "qk_layernorm": shape.qk_norm,
        "gated_linear_unit": True,
        "activation_func": "silu",
        "add_bias_linear": shape.out_bias,
        "add_qkv_bias": shape.qkv_bias,
    }
    if factor != 1:
        # includes the square of YaRN's factor on cosine and sine, which Megatron does not apply
        settings["softmax_scale"] = factor**2 / math.sqrt(shape.head_dim)
    if shape.is_moe:
        settings |= _moe_settings(shape, use_te=use_te)
    settings |= run_settings(shape.layers, layout, dtype, dispatcher, use_te)
    settings |= FAMILIES[shape.family].megatron(shape)
    settings["activation_func"] = ACTIVATIONS[settings["activation_func"]]
    return MLATransformerConfig(**settings) if shape.latent else TransformerConfig(**settings)


def te_kernels() -> frozenset[str]:
    """Returns the settings of KERNELS that this Transformer Engine can fuse or overlap."""
    te = vars(importlib.import_module("megatron.core.extensions.transformer_engine"))
    return frozenset(name for name, kernel in KERNELS.items() if te.get(kernel) is not None)


def fusions(config: Any, kernels: frozenset[str]) -> dict[str, bool]:
    """Returns {setting: True if a model with this config can use it} for fused kernels and overlap.

    Fused rotary embeddings are experimental for latent attention; those of megatron-core 0.16.1
    ignore interleaving and scaled cosines.
    """
    is_moe = bool(config.num_moe_experts)
    is_rope = getattr(config, "position_embedding_type", "rope") == "rope"
    is_recomputed = "shared_experts" in (config.recompute_modules or ())
    is_all_to_all = config.moe_token_dispatcher_type == "alltoall"
    has_shared = is_moe and config.moe_shared_expert_intermediate_size
    suits = {
        "apply_rope_fusion": is_rope
        and not config.multi_latent_attention
        and not config.rotary_interleaved,
        "moe_permute_fusion": is_moe,
        "moe_router_fusion": is_moe,
        "moe_shared_expert_overlap": has_shared and is_all_to_all and not is_recomputed,
    }
    return {name: name in kernels and bool(is_suitable) for name, is_suitable in suits.items()}


def run_settings(
    layers: int,
    layout: Layout,
    dtype: torch.dtype,
    dispatcher: Dispatcher,
    use_te: bool,
) -> Settings:
    """Returns the settings of every model: layout, numerics, and no random initialisation."""
    return {
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        **megatron_sizes(layout),
        "pipeline_model_parallel_layout": _pipeline_layout(layers, layout),
        "sequence_parallel": layout.tp.size > 1,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        # Packed micro-batches differ in length, with two exceptions. With virtual stages, two
        # pipeline ranks are both next and previous to each other, so lengths sent ahead in both
        # directions could be mixed up. The allgather dispatcher gathers equally many tokens from
        # every expert rank.
        "variable_seq_lengths": layout.vpp.size == 1 and dispatcher == "alltoall",
        "overlap_p2p_comm": layout.vpp.size > 1,  # also creates a process group per direction
        "batch_p2p_comm": layout.vpp.size == 1,
        "moe_token_dispatcher_type": dispatcher,  # dense models too: Megatron checks theirs
        "calculate_per_token_loss": True,
        # Every parameter is loaded, so the init methods do nothing. But initialisation also marks
        # parameters as split over tensor ranks; without the mark, the gradient norm counts them on
        # the first rank only.
        "perform_initialization": True,
        **dict.fromkeys(INIT_METHODS, torch.nn.Identity()),
        "bias_activation_fusion": use_te,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
        # With overlapped sends Megatron frees an output at once, which gloo may still be reading.
        "deallocate_pipeline_outputs": layout.pp.size > 1 and (use_te or layout.vpp.size == 1),
    }


def _moe_settings(shape: ModelShape, *, use_te: bool) -> Settings:
    router = shape.router
    settings = {
        "num_moe_experts": shape.experts,
        "moe_layer_freq": [int(kind.has_experts) for kind in shape.layer_kinds],
        "moe_ffn_hidden_size": shape.moe_intermediate,
        "moe_shared_expert_intermediate_size": shape.shared_intermediate or None,
        "moe_router_topk": shape.experts_per_token,
        # the softmax over the chosen experts equals the renormalised softmax over all
        "moe_router_pre_softmax": not router.norm_topk_prob,
        "moe_router_score_function": router.score_function,
        "moe_router_topk_scaling_factor": None if router.scale == 1 else router.scale,
        "moe_router_enable_expert_bias": router.expert_bias,
        **router_settings(use_te=use_te),
    }
    if router.groups > 1:
        settings["moe_router_num_groups"] = router.groups
        settings["moe_router_group_topk"] = router.groups_per_token
    return settings


def router_settings(*, use_te: bool) -> Settings:
    """Returns the settings of every router: fp32, without Megatron's own balancing terms."""
    return {
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_bias_update_rate": 0.0,  # the pre-trained bias does not change
        "moe_grouped_gemm": use_te,
    }


def _pipeline_layout(layers: int, layout: Layout) -> list[list[str]] | None:
    """Returns the layers of each chunk of the pipeline, in order.

    Megatron's default needs stages of equal size.
    """
    size = layout.pp.size
    if size == 1:
        return None
    stages = [stage_layers(layers, replace(layout, pp=Axis(size, x))) for x in range(size)]
    chunks = []
    for chunks_of_stages in zip(*stages, strict=True):
        chunks += [["decoder"] * len(chunk) for chunk in chunks_of_stages]
    chunks[0].insert(0, "embedding")
    chunks[-1].append("loss")
    return chunks


def split_options(
    options: Mapping[str, Any],
    device: torch.device,
) -> tuple[Settings, Settings]:
    """Splits options into fields of TransformerConfig and of DistributedDataParallelConfig.

    `transformer_impl`, the implementation of the layers, is by default "transformer_engine" on a
    GPU and "local" on a CPU.
    """
    default = "transformer_engine" if device.type == "cuda" else "local"
    reduction = {"transformer_impl": default, **options}
    reduction.pop("unsafe", None)
    names = [name for name in reduction if hasattr(MLATransformerConfig, name)]
    return {name: reduction.pop(name) for name in names}, reduction
