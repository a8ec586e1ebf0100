"""Sums over rows against plain loops, by torch's kernels (with a gradient) and numpy's (without)."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from megarl.algorithms.rows import Rows

MASKS = {
    "holes": ([1, 0, 1, 1, 0, 0], [0, 6]),
    "equal across a border": ([1, 1, 1, 0, 0, 1], [0, 2, 4, 6]),
    "empty rows": ([0, 1, 1], [0, 0, 2, 2, 3, 3]),
    "nothing trained": ([0, 0], [0, 1, 2]),
    "no rows": ([], [0]),
    "no positions": ([], [0, 0]),
}


@pytest.mark.parametrize("with_gradient", [False, True])
@pytest.mark.parametrize(("mask", "cu_seqlens"), MASKS.values(), ids=MASKS)
def test_sums_and_spreads_are_plain_loops(
    mask: list[int], cu_seqlens: list[int], with_gradient: bool
) -> None:
    rows = Rows.of(torch.tensor(mask, dtype=torch.bool), torch.tensor(cu_seqlens))
    x_T = (
        torch.where(rows.mask_T, torch.arange(1.0, len(mask) + 1), torch.nan)
        .double()
        .requires_grad_(with_gradient)
    )
    x_N = torch.arange(1.0, len(cu_seqlens)).double().requires_grad_(with_gradient)
    trained = [[t for t in range(*pair) if mask[t]] for pair in pairwise(cu_seqlens)]
    row_of = {t: n for n, row in enumerate(trained) for t in row}

    assert rows.num_tokens_N.tolist() == [len(row) for row in trained]
    assert rows.sum(x_T).tolist() == [sum(t + 1 for t in row) for row in trained]
    assert rows.mean(x_T).tolist() == [
        sum(t + 1 for t in row) / max(len(row), 1) for row in trained
    ]
    assert rows.spread(x_N).tolist() == [row_of.get(t, -1) + 1 for t in range(len(mask))]
    if with_gradient and mask:
        (of_sum,) = torch.autograd.grad(rows.sum(x_T).sum(), x_T)
        (of_spread,) = torch.autograd.grad(rows.spread(x_N).sum(), x_N)
        assert of_sum.tolist() == mask
        assert of_spread.tolist() == [len(row) for row in trained]


def test_half_precision_is_summed_in_fp32_or_as_told() -> None:
    rows = Rows.of(torch.ones(3, dtype=torch.bool), torch.tensor([0, 3]))
    x_T = torch.tensor([1.0, 2**-9, 2**-9], dtype=torch.bfloat16)
    assert rows.sum(x_T).tolist() == [1 + 2**-8]
    assert rows.sum(torch.tensor([1.0, 2**-30, 2**-30]), dtype=torch.float64).tolist() == [
        1 + 2**-29
    ]
