"""gpt-oss in bf16: attention sinks, sliding windows, biases everywhere, a clamped SwiGLU.

The checkpoint stores a layer's experts in one tensor, input dim first, with gate and up interleaved
in the last dim."""

from dataclasses import replace
from functools import partial

from megarl.models import blocks
from megarl.models.config_json import ConfigReader, read_decoder
from megarl.models.shape import EXPERTS, Family, ModelShape, Router, Settings
from megarl.models.shards import (
    HF,
    InterleavedGateUp,
    LayerSpec,
    Replicated,
    Rule,
    Table,
    Transposed,
    is_expert,
)

NAMES = blocks.ExpertNames(router="router")


def read(config: ConfigReader) -> ModelShape:
    config.only(attention_bias=True)
    config.only(rms_norm_eps=1e-5, swiglu_limit=7.0, swiglu_alpha=1.702)  # constants in vLLM
    return read_decoder(
        config,
        head_dim=64,
        layer_types=("sliding_attention", "full_attention"),
        rope=config.rope(theta=150000.0, kinds=("yarn",)),
        qkv_bias=True,
        out_bias=True,
        sinks=True,
        sliding_window=config.size("sliding_window", 128),
        swiglu_limit=config.number("swiglu_limit", 7.0),
        experts=config.size("num_local_experts"),
        experts_per_token=config.size("num_experts_per_tok"),
        moe_intermediate=config.size("intermediate_size"),
        router=Router(linear_bias=True),
    )


def table(shape: ModelShape, spec: LayerSpec, padded_vocab: int) -> Table:
    hf = f"{HF}mlp.experts."
    hidden = shape.hidden
    width = shape.moe_intermediate
    param = partial(blocks.expert_param, spec)
    experts = (
        InterleavedGateUp(f"{hf}gate_up_proj", param("linear_fc1", "weight"), (hidden, 2 * width)),
        InterleavedGateUp(f"{hf}gate_up_proj_bias", param("linear_fc1", "bias"), (2 * width,)),
        Transposed(f"{hf}down_proj", param("linear_fc2", "weight"), (width, hidden)),
        Replicated(f"{hf}down_proj_bias", param("linear_fc2", "bias"), (hidden,)),
    )
    rules = (*blocks.attention(shape, spec), *blocks.expert_mlp(shape, NAMES), *experts)
    return blocks.decoder_table(shape, padded_vocab, layers={EXPERTS: rules})


def engine(shape: ModelShape, table: Table) -> Table:
    """Returns vLLM's table: some parameters have other names, gate and up are interleaved, and only
    the first rank stores the down projection's bias."""

    def edited(rule: Rule) -> Rule:
        if isinstance(rule, InterleavedGateUp):
            return replace(rule, alternating=True)
        if is_expert(rule) and isinstance(rule, Replicated):
            return replace(rule, is_first_only=True)
        return replace(rule, param=rule.param.replace(".self_attn.", ".attn."))

    embedding = (replace(rule, param="model.embedding.weight") for rule in table.embedding)
    return replace(table.map_layers(partial(map, edited)), embedding=tuple(embedding))


def megatron(shape: ModelShape) -> Settings:
    return {
        "activation_func": "quick_gelu",
        "glu_linear_offset": 1.0,
        "activation_func_clamp_value": shape.swiglu_limit,
        "softmax_type": "learnable",
        "window_size": (shape.sliding_window - 1, 0),
        "window_attn_skip_freq": 2,
    }


def random_config(values: Settings, experts: int, width: int) -> Settings:
    rope = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": -(-values["max_position_embeddings"] // 4),
        "truncate": False,
    }
    return {
        "attention_bias": True,
        "sliding_window": 16,
        "swiglu_limit": 7.0,
        "rms_norm_eps": 1e-5,
        "num_local_experts": experts,
        "intermediate_size": width,
        "rope_parameters": rope,
    }


FAMILIES = {
    "gpt_oss": Family(
        "GptOssForCausalLM", read, table, megatron, engine, is_moe=True, random_config=random_config
    )
}
