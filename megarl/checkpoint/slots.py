"""What Megatron calls a parameter in its distributed checkpoints, from the table alone: neither Megatron nor torch.

    boxes of one rank alone  --slots_of-->  Slot (elements of a parameter <-> rectangle of a checkpoint tensor)

Importing Megatron and building its module on meta takes longer than a small model's conversion. The names are the
same in 0.16 and 0.19, and for its local layers and Transformer Engine's; the tests hold them against Megatron's own
`sharded_state_dict`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

from megarl.models.shape import ModelShape
from megarl.models.shards import ShardSlice

__all__ = ["Slot", "slots_of"]

VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
# Transformer Engine fuses these norms into the linear behind them, and so they are named; not with latent attention
FUSED = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
EXPERT = re.compile(r"\.local_experts\.(\d+)\.")
LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
PARALLEL = re.compile(r"\.(linear_(proj|qkv|q_proj|q_up_proj|kv_up_proj|fc1|fc2)|eh_proj)\.weight$")


@dataclass(frozen=True, slots=True)
class Slot:
    """prod(shape) elements of `param` from `at` are [offset, offset + shape) of checkpoint tensor `key`.

    The first `stacked` axes of the checkpoint tensor count layers and experts: `shape` is 1 there.
    """

    param: str
    at: int
    key: str
    whole: tuple[int, ...]  # shape of the checkpoint tensor
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    stacked: int
    may_be_padded: bool  # rows that pad the vocabulary: as many as the layout that saved it wanted

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def row(self) -> int:
        """Elements of one index of the first axis that can be cut."""
        return prod(self.shape[self.stacked + 1 :])

    def rows(self, first: int, count: int) -> Slot:
        """`count` rows of it from `first`."""
        axis = self.stacked
        offset = (*self.offset[:axis], self.offset[axis] + first, *self.offset[axis + 1 :])
        shape = (*self.shape[:axis], count, *self.shape[axis + 1 :])
        at = self.at + first * self.row
        return Slot(self.param, at, self.key, self.whole, offset, shape, axis, self.may_be_padded)


def slots_of(
    shape: ModelShape, hf_shapes: Mapping[str, tuple[int, ...]], boxes: Iterable[ShardSlice], *, padded_vocab: int
) -> tuple[list[Slot], list[str]]:
    """Every parameter's slots, and the names of Megatron's other state (what Transformer Engine keeps of a linear).

    `boxes`: of one rank alone, under Megatron's local layers.
    """
    sizes: dict[str, int] = {}
    columns: dict[str, int] = {}
    for box in boxes:
        sizes[box.param] = sizes.get(box.param, 0) + box.numel
        if box.param.endswith(".weight") and len(hf_shapes[box.name]) > 1:
            columns[box.param] = min(step for step, n in zip(box.strides, box.shape, strict=True) if step > 1 and n > 1)
    slots, objects = [], []
    for param, numel in sizes.items():
        size = (numel // columns[param], columns[param]) if param in columns else (numel,)
        if param in VOCABULARY:
            size = (padded_vocab, *size[1:])
        found = list(_slots(shape, param, size))
        slots += found
        if PARALLEL.search(param):
            first = found[0]
            number, of = (first.offset[0], first.whole[0]) if first.stacked else (0, 1)
            objects.append(f"{first.key.removesuffix('weight')}_extra_state/shard_{number}_{of}")
    return slots, objects


def _slots(shape: ModelShape, param: str, size: tuple[int, ...]) -> Iterator[Slot]:
    key, number, count = param, 0, 0
    if shape.latent is None:
        for plain, fused in FUSED.items():
            if (dense := key.removesuffix(plain)) != key:
                key = dense + fused
    if found := EXPERT.search(key):
        key, number, count = EXPERT.sub(".experts.", key), int(found[1]), shape.experts
    elif not shape.is_moe and (found := LAYER.match(key)):  # layers are all alike, and stacked
        key, number, count = LAYER.sub("decoder.layers.", key), int(found[1]), shape.layers
    parts = 2 if ".linear_fc1." in param else 1  # gate and up, each split over the tensor ranks on its own
    rows = size[0] // parts
    lead, offset = ((1,), (number,)) if count else ((), ())
    for part in range(parts):
        yield Slot(
            param,
            part * rows * prod(size[1:]),
            key,
            (*((count,) if count else ()), *size),
            (*offset, part * rows, *(0 for _ in size[1:])),
            (*lead, rows, *size[1:]),
            len(lead),
            param in VOCABULARY,
        )
