"""A model family as a record of functions. To add one, copy the file of a similar family, and add it to
`registry.MODULES`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megarl.models.config_json import ConfigReader
from megarl.models.shape import ModelShape
from megarl.models.shards import LayerSpec, Table


@dataclass(frozen=True, slots=True)
class Family:
    """One `model_type`. Its functions take and return plain data.

    architecture: the class in transformers; if empty, there is none, and random models are not available
    read: reads config.json; raises ValueError for settings that transformers or vLLM implement and megarl does not
    table: maps the checkpoint's tensors to Megatron's parameters, for a layer spec and a padded vocabulary
    megatron: TransformerConfig's settings beyond those that follow from the shape; `activation_func` by its name
    engine: changes the vLLM table that `engine.py` derives from `table`
    random_config: the family's keys in the config.json of a random model, from the common keys (`hf_config`) and the
        number and width of experts
    """

    architecture: str
    read: Callable[[ConfigReader], ModelShape]
    table: Callable[[ModelShape, LayerSpec, int], Table]
    megatron: Callable[[ModelShape], dict[str, Any]] = lambda shape: {}
    engine: Callable[[ModelShape, Table], Table] = lambda shape, table: table
    is_moe: bool = False
    random_config: Callable[[Mapping[str, Any], int, int], dict[str, Any]] = lambda values, experts, width: {}
