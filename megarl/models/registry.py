"""The families by `model_type`, and the functions that return a model's shape and table.

A family is one file and one line in MODULES; `bridge.py` reads any other `model_type`.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from megarl.models.bridge import read_bridged
from megarl.models.config_json import ConfigReader
from megarl.models.family import Family
from megarl.models.headers import header_shapes
from megarl.models.shape import ModelShape
from megarl.models.shards import LayerSpec, Table, shapes_of
from megarl.platform.json_text import parse_json

MODULES = (
    "llama",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "mixtral",
    "deepseek_v3",
    "glm4_moe",
    "gpt_oss",
)
MAX_EXPERTS = 200_000  # layers x experts: the names of their tensors fit in memory
FAMILIES: dict[str, Family] = {
    name: family for module in MODULES for name, family in import_module(f"megarl.models.{module}").FAMILIES.items()
}


def read_model(path: str | Path) -> ModelShape:
    """Reads `path`/config.json. Raises FileNotFoundError or ValueError with the offending values and a remedy."""
    folder = Path(path)
    file = folder / "config.json"
    if not file.is_file():
        problem = "has no config.json" if folder.is_dir() else "is not a directory"
        remedy = "set it to the folder of a Hugging Face model, or to an id on the hub such as Qwen/Qwen3-8B"
        raise FileNotFoundError(f"model.path={path} {problem}; {remedy}")
    try:
        raw = parse_json(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"{file} is not JSON ({error}); correct it, or choose another model") from None
    return parse_model(raw, str(file), folder)


def parse_model(raw: Any, where: str, folder: Path | None = None) -> ModelShape:
    """Returns the shape that a parsed config.json describes; errors refer to the file as `where`.

    A family without a table needs the model's `folder`.
    """
    if not isinstance(raw, Mapping):
        raise ValueError(f"{where} contains a {type(raw).__name__}, not an object; choose a Hugging Face model")
    config = ConfigReader(raw, where)
    if config.family in FAMILIES:
        shape = FAMILIES[config.family].read(config)
    else:
        shape = read_bridged(config, folder, ", ".join(FAMILIES))
    if (count := (shape.layers + shape.mtp_layers) * max(1, shape.experts)) > MAX_EXPERTS:
        sizes = f"{shape.layers} layers, {shape.mtp_layers} of multi-token prediction, and {shape.experts} experts"
        raise config.error(f"{sizes} a layer are {count} in all, and at most {MAX_EXPERTS} are supported")
    return shape


def megatron_table(shape: ModelShape, *, spec: LayerSpec, padded_vocab: int) -> Table:
    """Raises ValueError for a family without a table."""
    if shape.bridge is not None:
        raise ValueError(
            f"{shape.family} has no table: Megatron-Bridge lays out its weights when a run builds the model, so it can "
            "be trained and synced, but `megarl plan` and `megarl convert` do not support it"
        )
    return FAMILIES[shape.family].table(shape, spec, padded_vocab)


def padded_vocab(vocab: int, tensor: int) -> int:
    """Returns the embedding rows over all `tensor` ranks of the trainer: a multiple of 8 per rank, for GEMMs."""
    multiple = 8 * tensor
    return -(-vocab // multiple) * multiple


def hf_shapes(shape: ModelShape, *, mtp: bool = False) -> dict[str, tuple[int, ...]]:
    """Returns the names and full shapes of the HF checkpoint's tensors, without a tied lm_head.

    `mtp` adds the layers of multi-token prediction, which neither the trainer nor the engine builds. Without a table,
    returns all tensors of the folder.
    """
    if shape.bridge is not None:
        return header_shapes(shape.bridge)
    return shapes_of(megatron_table(shape, spec="local", padded_vocab=shape.vocab), shape, mtp=mtp)


def fp32_tensors(shape: ModelShape) -> frozenset[str]:
    """Returns the HF tensors that Megatron and vLLM both keep in fp32, whatever the training dtype is."""
    if shape.bridge is not None:
        biases = ("correction_bias", "expert_bias")  # of routers
        return frozenset(name for name in header_shapes(shape.bridge) if name.endswith(biases))
    templates = megatron_table(shape, spec="local", padded_vocab=shape.vocab).fp32
    layers = range(shape.dense_layers, shape.layers + shape.mtp_layers)
    return frozenset(name.format(layer=layer) for name in templates for layer in layers)
