"""A Megatron distributed checkpoint's weights into this rank's part of the model, whatever layout saved them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject
from torch import nn

__all__ = ["load_weights"]


def load_weights(chunks: Iterable[nn.Module], folder: Path) -> None:
    """Fill this rank's chunks of the pipeline from a checkpoint, whatever layout saved it. All ranks call it.

    Raises ValueError when the checkpoint is another model's.
    """
    for chunk in chunks:
        sharded = {
            name: entry
            for name, entry in chunk.sharded_state_dict().items()  # type: ignore[operator]
            if not isinstance(entry, ShardedObject)  # no weights: what Transformer Engine remembers of FP8 scales
        }
        try:
            loaded: Any = dist_checkpointing.load(sharded, str(folder))
        except Exception as error:  # Megatron and torch have a class of their own for each way to fail
            raise ValueError(f"{folder} cannot be loaded into this model ({error}); is it another model's?") from error
        tensors = dict(chunk.named_parameters()) | dict(chunk.named_buffers())  # a buffer: a router's correction bias
        for name, tensor in tensors.items():
            if name in loaded:
                tensor.data.copy_(loaded[name])
