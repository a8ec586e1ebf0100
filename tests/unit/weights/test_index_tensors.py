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
from megarl.models.shards import Qkv, Replicated, Rule, ShardDim0, ShardDim1, ShardSlice, Stack, Transposed
from megarl.weights.index_tensors import IndexTensors, slices_from_indices

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
    codes, seen = IndexTensors(SIZES, torch.device("cpu")), []
    for codes.is_second in (False, True):
        seen.append(convert(codes))
    return slices_from_indices("param", *seen, codes, padded="vocab" in codes.first)


def by_boxes(boxes: list[ShardSlice], numel: int) -> Callable[[IndexTensors], Tensor]:
    def convert(codes: IndexTensors) -> Tensor:
        flat = torch.zeros(numel, dtype=torch.float64)
        for box in boxes:
            part = codes[box.name][tuple(slice(a, a + n) for a, n in zip(box.start, box.shape, strict=True))]
            flat.as_strided(box.shape, box.strides, box.offset).copy_(part)
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
        (Transposed("o", "param", 6, 8), 24),
    ],
    ids=lambda value: type(value).__name__,
)
def test_boxes_are_found_again(rule: Rule, numel: int) -> None:
    boxes = list(rule.boxes(SECOND))
    assert sorted(landed(by_boxes(boxes, numel)), key=str) == sorted(boxes, key=str)


def test_rows_that_alternate_are_as_many_boxes() -> None:
    """Exact, if not short: a family whose gate and up alternate."""
    boxes = landed(lambda codes: torch.stack([codes["gate"], codes["up"]], 1).flatten(0, 1))
    assert {(box.name, box.shape, box.strides, box.offset) for box in boxes} == {
        ("gate", (10, 6), (12, 1), 0),
        ("up", (10, 6), (12, 1), 6),
    }


@pytest.mark.parametrize(
    ("convert", "said"),
    [
        (lambda codes: codes["norm"] + 1, "param is computed from norm"),
        (lambda codes: codes["norm"] * 2, "param is computed from norm"),
        (lambda codes: (codes["norm"] + codes["norm"].roll(2)) / 2, "param is computed from norm"),
        (lambda codes: torch.cat([codes["q"][:4], codes["k"] + codes["v"]]), "param is computed from q and k and v"),
        (lambda codes: codes["gate"].bfloat16().double(), "param is computed from gate"),
        (lambda codes: codes["gate"].float(), "is not the same twice"),
        (lambda codes: codes["gate"][: 9 + codes.is_second], "is not the same twice"),
        (lambda codes: codes["gate"].roll(int(codes.is_second), 0), "param is computed from gate"),
        (lambda codes: torch.cat([codes["k"], codes["k"][:1]]), "param holds an element of k twice"),
        (lambda codes: torch.cat([codes["k"], torch.zeros(1, 6)]), "6 elements of param come from no element of k"),
    ],
)
def test_more_than_a_placement_is_refused(convert: Callable[[IndexTensors], Tensor], said: str) -> None:
    with pytest.raises(ValueError) as caught:
        landed(convert)
    assert said in str(caught.value)


def test_a_swapped_row_and_a_missing_one_are_seen() -> None:
    swapped = landed(lambda codes: codes["gate"][torch.tensor([1, 0, *range(2, 10)])])
    assert {(box.start, box.shape, box.offset) for box in swapped} == {
        ((0, 0), (1, 6), 6),
        ((1, 0), (2, 6), 0),
        ((3, 0), (7, 6), 18),
    }
    assert sum(box.numel for box in landed(lambda codes: codes["gate"][1:])) == 54  # the plan finds the gap


def test_names_and_shapes_are_read_from_headers(tmp_path: Path) -> None:
    def write(file: str, header: str) -> None:
        (tmp_path / file).write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(48))

    with pytest.raises(ValueError, match=r"holds no \*\.safetensors"):
        header_shapes(tmp_path)
    one, other = (
        {name: {"dtype": "U8", "shape": list(SIZES[name]), "data_offsets": [0, prod(SIZES[name])]}}
        for name in ("q", "norm")
    )
    write("a.safetensors", json.dumps({"__metadata__": {"format": "pt"}} | one))
    write("b.safetensors", json.dumps(other))
    assert header_shapes(tmp_path) == {"q": (8, 6), "norm": (6,)}
    header_shapes.cache_clear()
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"norm": "b.safetensors"}}))
    assert header_shapes(tmp_path) == {"norm": (6,)}
    header_shapes.cache_clear()
    write("b.safetensors", "{")
    with pytest.raises(ValueError, match=r"b\.safetensors cannot be read"):
        header_shapes(tmp_path)
