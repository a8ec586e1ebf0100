"""Qwen3: Llama's layers, with query and key norms, and a head size of 128."""

from megarl.models import blocks
from megarl.models.config_json import ConfigReader, read_decoder
from megarl.models.shape import Family, ModelShape


def read(config: ConfigReader) -> ModelShape:
    config.only(attention_bias=False, use_sliding_window=False)
    return read_decoder(config, head_dim=128, qk_norm=True)


FAMILIES = {"qwen3": Family("Qwen3ForCausalLM", read, blocks.dense_table)}
