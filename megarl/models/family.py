"""What a model family is: a record of its functions, which its own file keeps together.

To add one, copy the file of a family like it, and give `registry.FAMILIES` its line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megarl.models.config_json import ConfigReader
from megarl.models.shape import ModelShape
from megarl.models.shards import Style, Table

__all__ = ["Family"]


@dataclass(frozen=True, slots=True)
class Family:
    """One `model_type`. Its functions take and return plain data.

    architecture: the class in transformers; empty where transformers has none, so that no random model can be made
    read: its config.json; raises ValueError for a setting that transformers or vLLM would follow and megarl would not
    table: where Megatron's parameters hold the tensors of its checkpoint, given the layer spec and padded vocabulary
    megatron: TransformerConfig's settings beyond those that follow from the shape; `activation_func` by its name
    engine: changes to the vLLM table that `engine.py` derives from `table`
    random_config: its own keys in the config.json of a small random model, given the common ones (`hf_config`) and the
        number and width of experts
    """

    architecture: str
    read: Callable[[ConfigReader], ModelShape]
    table: Callable[[ModelShape, Style, int], Table]
    megatron: Callable[[ModelShape], dict[str, Any]] = lambda shape: {}
    engine: Callable[[ModelShape, Table], Table] = lambda shape, table: table
    is_moe: bool = False
    random_config: Callable[[Mapping[str, Any], int, int], dict[str, Any]] = lambda values, experts, width: {}
