"""Mixtral: Llama's attention, and experts with a softmax router in every layer. The names of expert
tensors differ from other families'."""

from functools import partial

from megarl.models import blocks
from megarl.models.config_json import ConfigReader, read_decoder
from megarl.models.shape import Family, ModelShape, Settings

NAMES = blocks.ExpertNames(block="block_sparse_moe.", gate="w1", up="w3", down="w2")


def read(config: ConfigReader) -> ModelShape:
    config.only(attention_bias=False)
    config.no_window()
    return read_decoder(
        config,
        rope=config.rope(theta=1e6),
        experts=config.size("num_local_experts"),
        experts_per_token=config.size("num_experts_per_tok"),
        moe_intermediate=config.size("intermediate_size"),
    )


def random_config(values: Settings, experts: int, width: int) -> Settings:
    return {"num_local_experts": experts, "intermediate_size": width, "sliding_window": None}


FAMILIES = {
    "mixtral": Family(
        "MixtralForCausalLM",
        read,
        partial(blocks.moe_table, names=NAMES),
        is_moe=True,
        random_config=random_config,
    )
}
