"""Qwen3-MoE: Qwen3's attention, and experts with a softmax router in every layer."""

from megarl.models import blocks
from megarl.models.config_json import ConfigReader, read_decoder
from megarl.models.shape import Family, ModelShape, Router, Settings


def read(config: ConfigReader) -> ModelShape:
    config.only(
        attention_bias=False, use_sliding_window=False, decoder_sparse_step=1, mlp_only_layers=[]
    )
    return read_decoder(
        config,
        qk_norm=True,
        experts=config.size("num_experts"),
        experts_per_token=config.size("num_experts_per_tok"),
        moe_intermediate=config.size("moe_intermediate_size"),
        router=Router(norm_topk_prob=config.flag("norm_topk_prob")),
    )


def random_config(values: Settings, experts: int, width: int) -> Settings:
    return {
        "moe_intermediate_size": width,
        "num_experts": experts,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


FAMILIES = {
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM", read, blocks.moe_table, is_moe=True, random_config=random_config
    )
}
