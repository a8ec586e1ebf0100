"""Placements are read off values; whatever is more than a placement is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from math import prod
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megarl.layout import Axis
from megarl.models.headers import header_shapes
from megarl.models.shards import (
    Qkv,
    Replicated,
    Rule,
    ShardDim0,
    ShardDim1,
    ShardSlice,
    Stack,
    Transposed,
)
from megarl.weights.index_tensors import IndexTensors, moved_slices

SIZES = {
    "q": (8, 6),
    "k": (4, 6),
    "v": (4, 6),
    "gate": (10, 6),
    "up": (10, 6),
    "o": (6, 8),
    "norm": (6,),
    "vocab": (7, 3),
}
SECOND = Axis(2, 1)


def landed(convert: Callable[[IndexTensors], Tensor]) -> list[ShardSlice]:
    tensors, seen = IndexTensors(SIZES, torch.device("cpu")), []
    for tensors.is_second in (False, True):
        seen.append(convert(tensors))
    return moved_slices("param", *seen, tensors, padded="vocab" in tensors.first)


def by_slices(slices: list[ShardSlice], numel: int) -> Callable[[IndexTensors], Tensor]:
    def convert(tensors: IndexTensors) -> Tensor:
        flat = torch.zeros(numel, dtype=torch.float64)
        for part in slices:
            where = tuple(slice(a, a + n) for a, n in zip(part.start, part.shape, strict=True))
            flat.as_strided(part.shape, part.strides, part.offset).copy_(tensors[part.name][where])
        return flat

    return convert


@pytest.mark.parametrize(
    ("rule", "numel"),
    [
        (Replicated("norm", "param", (6,)), 6),
        (ShardDim0("vocab", "param", (7, 3), padded=8), 12),  # 3 of 4 rows of this rank
        (ShardDim1("o", "param", (6, 8)), 24),
        (Stack(("gate", "up"), "param", (10, 10), (6,)), 60),
        (Qkv(("q", "k", "v"), "param", heads=4, kv_heads=2, head_dim=2, rest=(6,)), 48),
        (Transposed("o", "param", (6, 8)), 24),
    ],
    ids=lambda value: type(value).__name__,
)
def test_slices_are_found_again(rule: Rule, numel: int) -> None:
    slices = list(rule.slices(SECOND))
    assert sorted(landed(by_slices(slices, numel)), key=str) == sorted(slices, key=str)


def test_rows_that_alternate_are_as_many_slices() -> None:
    """Exact, if not short: a family whose gate and up alternate."""
    slices = landed(lambda tensors: torch.stack([tensors["gate"], tensors["up"]], 1).flatten(0, 1))
    assert {(part.name, part.shape, part.strides, part.offset) for part in slices} == {
        ("gate", (10, 6), (12, 1), 0),
        ("up", (10, 6), (12, 1), 6),
    }


@pytest.mark.parametrize(
    ("convert", "message"),
    [
        (lambda tensors: tensors["norm"] + 1, "param is computed from norm"),
        (lambda tensors: tensors["norm"] * 2, "param is computed from norm"),
        (
            lambda tensors: (tensors["norm"] + tensors["norm"].roll(2)) / 2,
            "param is computed from norm",
        ),
        (
            lambda x: torch.cat([x["q"][:4], x["k"] + x["v"]]),
            "param is computed from q and k and v",
        ),
        (lambda tensors: tensors["gate"].bfloat16().double(), "param is computed from gate"),
        (lambda tensors: tensors["gate"].float(), "two runs of its conversion"),
        (lambda tensors: tensors["gate"][: 9 + tensors.is_second], "two runs of its conversion"),
        (
            lambda tensors: tensors["gate"].roll(int(tensors.is_second), 0),
            "param is computed from gate",
        ),
        (
            lambda tensors: torch.cat([tensors["k"], tensors["k"][:1]]),
            "param holds an element of k twice",
        ),
        (
            lambda tensors: torch.cat([tensors["k"], torch.zeros(1, 6)]),
            "6 elements of param have no source in k",
        ),
    ],
)
def test_more_than_a_placement_is_refused(
    convert: Callable[[IndexTensors], Tensor], message: str
) -> None:
    with pytest.raises(ValueError) as caught:
        landed(convert)
    assert message in str(caught.value)


def test_a_swapped_row_and_a_missing_one_are_seen() -> None:
    swapped = landed(lambda tensors: tensors["gate"][torch.tensor([1, 0, *range(2, 10)])])
    assert {(part.start, part.shape, part.offset) for part in swapped} == {
        ((0, 0), (1, 6), 6),
        ((1, 0), (2, 6), 0),
        ((3, 0), (7, 6), 18),
    }
    # the plan finds the gap
    assert sum(part.numel for part in landed(lambda tensors: tensors["gate"][1:])) == 54


def test_names_and_shapes_are_read_from_headers(tmp_path: Path) -> None:
    def write(file: str, header: str, size: int = 48) -> None:
        (tmp_path / file).write_bytes(
            len(header).to_bytes(8, "little") + header.encode() + bytes(size)
        )

    with pytest.raises(ValueError, match=r"has no \*\.safetensors"):
        header_shapes(tmp_path)
    one, other = (
        {name: {"dtype": "U8", "shape": list(SIZES[name]), "data_offsets": [0, prod(SIZES[name])]}}
        for name in ("q", "norm")
    )
    write("a.safetensors", json.dumps({"__metadata__": {"format": "pt"}} | one))
    write("b.safetensors", json.dumps(other), 6)
    assert header_shapes(tmp_path) == {"q": (8, 6), "norm": (6,)}
    header_shapes.cache_clear()
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"norm": "b.safetensors"}})
    )
    assert header_shapes(tmp_path) == {"norm": (6,)}
    header_shapes.cache_clear()
    write("b.safetensors", "{")
    with pytest.raises(ValueError, match=r"b\.safetensors cannot be read"):
        header_shapes(tmp_path)
