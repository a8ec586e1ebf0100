"""GLM-4.5: grouped-query attention that rotates half of each head, and DeepSeek-V3's experts."""

from megarl.models import blocks, deepseek_v3
from megarl.models.config_json import ConfigReader, read_decoder
from megarl.models.shape import Family, ModelShape, Settings
from megarl.models.shards import LayerSpec, Table


def read(config: ConfigReader) -> ModelShape:
    return read_decoder(
        config,
        rope=config.rope(fraction=0.5),
        qkv_bias=config.flag("attention_bias"),
        qk_norm=config.flag("use_qk_norm"),
        **deepseek_v3.read_experts(config),
    )


def table(shape: ModelShape, spec: LayerSpec, padded_vocab: int) -> Table:
    return deepseek_v3.moe_table(shape, spec, padded_vocab, tuple(blocks.attention(shape, spec)))


def random_config(values: Settings, experts: int, width: int) -> Settings:
    return deepseek_v3.random_experts(values, experts, width) | {
        "attention_bias": True,
        "use_qk_norm": True,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
    }


FAMILIES = {
    "glm4_moe": Family("Glm4MoeForCausalLM", read, table, is_moe=True, random_config=random_config)
}
