"""Llama 2 and 3."""

from megarl.models import blocks
from megarl.models.config_json import ConfigReader, read_decoder
from megarl.models.shape import Family, ModelShape


def read(config: ConfigReader) -> ModelShape:
    config.only(attention_bias=False, qkv_bias=False)
    config.no_window()
    return read_decoder(config)


FAMILIES = {"llama": Family("LlamaForCausalLM", read, blocks.dense_table)}
