"""GLM-4.5: grouped-query attention with RoPE on half of each head, and DeepSeek-V3's experts."""

from functools import partial

from megarl.models import blocks, deepseek_v3
from megarl.models.config_json import ConfigReader, read_decoder
from megarl.models.shape import Family, ModelShape, Settings


def read(config: ConfigReader) -> ModelShape:
    return read_decoder(
        config,
        rope=config.rope(fraction=0.5),
        qkv_bias=config.flag("attention_bias"),
        qk_norm=config.flag("use_qk_norm"),
        **deepseek_v3.read_experts(config),
    )


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
    "glm4_moe": Family(
        "Glm4MoeForCausalLM",
        read,
        partial(deepseek_v3.moe_table, blocks.attention),
        is_moe=True,
        random_config=random_config,
    )
}
