"""The families by `model_type`, and what the rest of megarl asks of a model: its shape, tables and slices.

A family is one file and its line in FAMILIES. One without is read by `bridge.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.layout import Layout
from megarl.models import (
    deepseek_v3,
    glm4_moe,
    gpt_oss,
    llama,
    mixtral,
    qwen2,
    qwen3,
    qwen3_moe,
)
from megarl.models.bridge import read_untabled
from megarl.models.config_json import ConfigReader
from megarl.models.family import Family
from megarl.models.headers import header_shapes
from megarl.models.shape import ModelShape
from megarl.models.shards import ShardSlice, Style, Table, shapes_of, slices_of

__all__ = [
    "FAMILIES", "fp32_tensors", "hf_shapes", "megatron_slices", "megatron_table", "padded_vocab", "parse_model",
    "read_model",
]  # fmt: skip

FAMILIES: dict[str, Family] = {
    "llama": llama.FAMILY,
    "qwen2": qwen2.FAMILY,
    "qwen3": qwen3.FAMILY,
    "qwen3_moe": qwen3_moe.FAMILY,
    "mixtral": mixtral.FAMILY,
    "deepseek_v3": deepseek_v3.FAMILY,
    "kimi_k2": deepseek_v3.KIMI_K2,
    "glm4_moe": glm4_moe.FAMILY,
    "gpt_oss": gpt_oss.FAMILY,
}
_CORRECTIONS = ("correction_bias", "expert_bias")  # of routers, which Megatron and vLLM keep in fp32


def read_model(path: str | Path) -> ModelShape:
    """Reads `path`/config.json.

    Raises FileNotFoundError or ValueError with the values and the remedy.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise FileNotFoundError(f"model.path={path} is not a directory; name a folder that holds a Hugging Face model")
    file = folder / "config.json"
    if not file.is_file():
        raise FileNotFoundError(
            f"model.path={path} holds no config.json; name a folder that holds a Hugging Face model"
        )
    try:
        raw = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is not JSON ({error}); mend it, or name another model") from None
    return parse_model(raw, str(file), folder)


def parse_model(raw: Any, where: str, folder: Path | None = None) -> ModelShape:
    """The shape that a parsed config.json describes; `where` names it in errors. Without its `folder` a family needs
    a table."""
    if not isinstance(raw, Mapping):
        raise ValueError(f"{where} holds a {type(raw).__name__}, not an object; name a Hugging Face model")
    config = ConfigReader(raw, where)
    if config.family in FAMILIES:
        return FAMILIES[config.family].read(config)
    return read_untabled(config, folder, ", ".join(FAMILIES))


def megatron_table(shape: ModelShape, *, style: Style, padded_vocab: int) -> Table:
    """Raises ValueError for a family that has none."""
    if shape.bridge is not None:
        raise ValueError(
            f"{shape.family} has no table: where its weights lie is known only to a run that has built it with "
            "Megatron-Bridge, so they can be trained and synced, but neither planned nor converted"
        )
    return FAMILIES[shape.family].table(shape, style, padded_vocab)


def padded_vocab(vocab: int, tensor: int) -> int:
    """Embedding rows over all `tensor` ranks of the trainer: GEMMs like multiples of 8 on each."""
    multiple = 8 * tensor
    return -(-vocab // multiple) * multiple


def hf_shapes(shape: ModelShape, *, mtp: bool = False) -> dict[str, tuple[int, ...]]:
    """Names and full shapes of the HF checkpoint's tensors; a tied lm_head is not among them.

    `mtp`: with the layers of multi-token prediction, which neither the trainer nor the engine builds. Without a table:
    all tensors in the folder, those layers included.
    """
    if shape.bridge is not None:
        return header_shapes(shape.bridge)
    return shapes_of(megatron_table(shape, style="local", padded_vocab=shape.vocab), shape, mtp=mtp)


def fp32_tensors(shape: ModelShape) -> frozenset[str]:
    """HF tensors that are fp32 on both sides, whatever the training dtype is. Without a table: by their names."""
    if shape.bridge is not None:
        return frozenset(name for name in header_shapes(shape.bridge) if name.endswith(_CORRECTIONS))
    templates = megatron_table(shape, style="local", padded_vocab=shape.vocab).fp32
    layers = range(shape.dense_layers, shape.layers + shape.mtp_layers)
    return frozenset(name.format(layer=layer) for name in templates for layer in layers)


def megatron_slices(
    shape: ModelShape, layout: Layout, *, style: Style, padded_vocab: int, mtp: bool = False
) -> list[ShardSlice]:
    """Where this rank's Megatron parameters have each HF tensor.

    `padded_vocab` is the number of embedding rows over all tensor ranks, padding included.
    """
    return slices_of(megatron_table(shape, style=style, padded_vocab=padded_vocab), shape, layout, mtp=mtp)
