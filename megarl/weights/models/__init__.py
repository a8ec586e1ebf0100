"""One short table per family. Adding a family: a table here, its line in TABLES, its name in config.model.FAMILIES."""

from __future__ import annotations

from collections.abc import Callable

from megarl.config.model import FAMILIES, ModelShape
from megarl.layout import Layout
from megarl.weights.mapping import Box, Style, Table, boxes_of, shapes_of
from megarl.weights.models import dense, qwen3_moe

__all__ = ["TABLES", "hf_shapes", "megatron_boxes"]

TABLES: dict[str, Callable[[ModelShape, Style, int], Table]] = {
    "llama": dense.table,
    "qwen2": dense.table,
    "qwen3": dense.table,
    "qwen3_moe": qwen3_moe.table,
}
assert set(TABLES) == set(FAMILIES), "every family that config.model accepts needs a table"


def hf_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Names and full shapes of the HF checkpoint's tensors; a tied lm_head is not among them."""
    return shapes_of(TABLES[shape.family](shape, "local", shape.vocab), shape)


def megatron_boxes(shape: ModelShape, layout: Layout, *, style: Style, padded_vocab: int) -> list[Box]:
    """Where this rank's Megatron parameters hold each HF tensor.

    `padded_vocab` is the number of embedding rows over all tensor ranks, padding included.
    """
    return boxes_of(TABLES[shape.family](shape, style, padded_vocab), shape, layout)
