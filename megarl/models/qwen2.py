"""Qwen2 and 2.5: Llama's layers, with query, key and value biases."""

from megarl.models import blocks
from megarl.models.config_json import ConfigReader, read_decoder
from megarl.models.shape import Family, ModelShape


def read(config: ConfigReader) -> ModelShape:
    config.only(use_sliding_window=False, qk_norm=False)
    return read_decoder(config, qkv_bias=True)


FAMILIES = {"qwen2": Family("Qwen2ForCausalLM", read, blocks.dense_table)}
