"""Which tensors a rank saves, and which elements of them it reads."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.checkpoint.rank_state import _owners, _read_elements
from megarl.models.shards import ShardSlice
from megarl.weights.sync.execute import strided_view


class Folder:
    """A tensor, with the interface of MegatronFolder."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def copy(self, box: ShardSlice, parameter: torch.Tensor) -> None:
        place = tuple(slice(at, at + size) for at, size in zip(box.start, box.shape, strict=True))
        strided_view(parameter, box).copy_(self.tensor[place])


@pytest.mark.parametrize("shape", [(7,), (1,), (4, 5), (1, 4, 5), (2, 3, 4), (1, 1, 6)])
def test_a_range_of_elements_is_read(shape: tuple[int, ...]) -> None:
    whole = torch.randn([size + 4 for size in shape])
    elements = whole[tuple(slice(3, 3 + size) for size in shape)].flatten()
    strides = elements.view(shape).stride()
    box = ShardSlice("tensor", (3,) * len(shape), shape, "param", 99, strides)
    folder: Any = Folder(whole)
    for first in range(elements.numel()):
        for last in range(first + 1, elements.numel() + 1):
            piece = torch.empty(last - first)
            _read_elements(folder, box, first, piece)
            assert torch.equal(piece, elements[first:last])


@dataclass(frozen=True, eq=False)
class _Stored:
    box: SimpleNamespace
    parts: dict[int, None]


@pytest.mark.parametrize(
    ("tensors", "owners"),
    [
        ([(10, [0]), (10, [1])], [0, 1]),
        ([(10, [0]), (4, [0, 1]), (10, [1]), (6, [0, 1])], [0, 1, 1, 0]),
        ([(99, [0, 1, 2, 3]), (5, [0])], [1, 0]),
    ],
)
def test_a_tensor_belongs_to_one_of_its_ranks(
    tensors: list[tuple[int, list[int]]], owners: list[int]
) -> None:
    stored: list[Any] = [
        _Stored(SimpleNamespace(numel=numel), dict.fromkeys(ranks)) for numel, ranks in tensors
    ]
    found = _owners(stored)
    assert [found[each] for each in stored] == owners
