"""One short table per family. Adding a family: a table here, its line in TABLES, its name in config.model.FAMILIES."""

from __future__ import annotations

from collections.abc import Callable

from megarl.layout import Layout
from megarl.models import deepseek_v3, dense, glm4_moe, gpt_oss, mixtral, qwen3_moe
from megarl.models.headers import header_shapes
from megarl.models.shape import FAMILIES, ModelShape
from megarl.models.shards import ShardSlice, Style, Table, shapes_of, slices_of

__all__ = ["TABLES", "fp32_tensors", "hf_shapes", "megatron_slices", "megatron_table", "padded_vocab"]

TABLES: dict[str, Callable[[ModelShape, Style, int], Table]] = {
    "llama": dense.table,
    "qwen2": dense.table,
    "qwen3": dense.table,
    "qwen3_moe": qwen3_moe.table,
    "mixtral": mixtral.table,
    "deepseek_v3": deepseek_v3.table,
    "kimi_k2": deepseek_v3.table,
    "glm4_moe": glm4_moe.table,
    "gpt_oss": gpt_oss.table,
}
_CORRECTIONS = ("correction_bias", "expert_bias")  # of routers, which Megatron and vLLM keep in fp32
assert set(TABLES) == set(FAMILIES), "every family that config.model accepts needs a table"


def megatron_table(shape: ModelShape, *, style: Style, padded_vocab: int) -> Table:
    """Raises ValueError for a family that has none."""
    if shape.bridge is not None:
        raise ValueError(
            f"{shape.family} has no table: where its weights lie is known only to a run that has built it with "
            "Megatron-Bridge, so they can be trained and synced, but neither planned nor converted"
        )
    return TABLES[shape.family](shape, style, padded_vocab)


def padded_vocab(vocab: int, tensor: int) -> int:
    """Embedding rows over all `tensor` ranks of the trainer: GEMMs like multiples of 8 on each."""
    multiple = 8 * tensor
    return -(-vocab // multiple) * multiple


def hf_shapes(shape: ModelShape, *, mtp: bool = False) -> dict[str, tuple[int, ...]]:
    """Names and full shapes of the HF checkpoint's tensors; a tied lm_head is not among them.

    `mtp`: with the layers of multi-token prediction, which neither the actor nor the engine builds. Without a table:
    whatever the folder holds, such layers too.
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
    """Where this rank's Megatron parameters hold each HF tensor.

    `padded_vocab` is the number of embedding rows over all tensor ranks, padding included.
    """
    return slices_of(megatron_table(shape, style=style, padded_vocab=padded_vocab), shape, layout, mtp=mtp)
