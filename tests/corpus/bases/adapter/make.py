"""The weights of an adapter of rank 8 of all linear layers of configs/tiny_dense.yaml, all 0."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from megarl.config.load import load_config
from megarl.config.validate import model_shape
from megarl.models.lora import WEIGHTS, adapter_table
from megarl.models.registry import megatron_table
from megarl.models.shards import shapes_of

CONFIG = Path(__file__).resolve().parents[4] / "configs" / "tiny_dense.yaml"


def make(folder: Path) -> None:
    shape = model_shape(load_config(CONFIG, []))
    table = adapter_table(megatron_table(shape), ["all-linear"], 8)
    (folder / "adapter").mkdir()
    tensors = {name: np.zeros(size, np.float32) for name, size in shapes_of(table, shape).items()}
    save_file(tensors, folder / "adapter" / WEIGHTS)
