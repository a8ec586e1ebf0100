"""Which tensors a rank saves, and which elements of them it reads."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.checkpoint.rank_state import _cut, _owners
from megarl.models.shards import ShardSlice
from megarl.weights.sync.execute import strided_view


@pytest.mark.parametrize("shape", [(7,), (1,), (4, 5), (1, 4, 5), (2, 3, 4), (1, 1, 6)])
def test_a_range_of_elements_is_cut_into_whole_rows_and_parts_of_rows(
    shape: tuple[int, ...],
) -> None:
    elements = torch.arange(torch.Size(shape).numel()).view(shape)
    box = ShardSlice("tensor", (3,) * len(shape), shape, "param", 0, elements.stride())
    for first in range(elements.numel()):
        for last in range(first + 1, elements.numel() + 1):
            cuts = list(_cut(box, first, last))
            assert torch.cat(
                [strided_view(elements, cut).flatten() for cut in cuts]
            ).tolist() == list(range(first, last))
            for cut in cuts:  # what is read from the checkpoint
                place = tuple(
                    slice(at - 3, at - 3 + size)
                    for at, size in zip(cut.start, cut.shape, strict=True)
                )
                assert torch.equal(elements[place], strided_view(elements, cut))
            assert len(cuts) < 2 * len(shape)


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
