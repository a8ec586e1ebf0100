"""Packing rows into a micro-batch."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from megarl.data.collate import token_batch
from megarl.layout import Axis
from megarl.models.registry import padded_vocab
from megarl.trainer.microbatch import pack

sys.path.insert(0, str(Path(__file__).parents[2] / "dist"))
from trainer_cases import random_batch

CPU = torch.device("cpu")


@pytest.mark.parametrize("multiple", [1, 2, 4])
@pytest.mark.parametrize("rows", [(), (2,), (3, 0, 2)])
def test_rows_then_one_dummy_row(rows: tuple[int, ...], multiple: int) -> None:
    batch = random_batch(num_rows=4)
    micro = pack(batch, rows, batch.mask, tensor=multiple, context=Axis(1), device=CPU)
    spans = [slice(*batch.cu_seqlens[row : row + 2].tolist()) for row in rows]
    real = torch.cat([batch.tokens[span] for span in spans] or [batch.tokens[:0]])
    total = micro.tokens.numel()
    assert total % multiple == 0 and 0 < total < real.numel() + multiple + (not rows)
    assert torch.equal(micro.tokens[0, : real.numel()], real)
    assert torch.equal(batch.tokens[micro.rows.index], real)
    lengths = [span.stop - span.start for span in spans]
    assert micro.rows.cu_seqlens.diff().tolist() == lengths
    dummy = [total - real.numel()] if total > real.numel() else []
    assert micro.packed.cu_seqlens_q.diff().tolist() == lengths + dummy
    assert micro.positions[0].tolist() == [at for length in lengths + dummy for at in range(length)]
    assert torch.equal(micro.labels, batch.labels[micro.rows.index][batch.mask[micro.rows.index]])
    assert micro.read.numel() == micro.rows.mask.sum() and micro.rows.mask.numel() == real.numel()


@pytest.mark.parametrize("multiple", [1, 4])
def test_shared_prefixes_are_computed_once(multiple: int) -> None:
    rows = [[5, 6, 7, 8], [5, 6, 9], [5, 6, 7, 8], [5, 4, 4], [5, 4, 4, 4]]
    batch = token_batch(
        [(torch.tensor(row), torch.arange(len(row)) >= 2) for row in rows], temperature=1.0
    )
    micro = pack(
        batch, range(5), batch.mask, tensor=multiple, context=Axis(1), device=CPU, share=True
    )
    assert (
        micro.tokens[0].tolist()[:8] == [6, 7, 8, 9, 5, 4, 4, 4]
        and micro.tokens.numel() == -(-8 // multiple) * multiple
    )
    assert micro.positions[0].tolist()[:8] == [1, 2, 3, 2, 0, 1, 2, 3]
    assert micro.read.tolist() == [0, 1, 0, 0, 1, 5, 5, 6]
    assert torch.equal(micro.read_rows, batch.mask.nonzero().flatten()) and torch.equal(
        micro.labels, batch.labels[batch.mask]
    )


def test_padded_vocab() -> None:
    for tensor in (1, 2, 4, 8):
        rows = padded_vocab(67, tensor)
        assert rows >= 67 and rows % (8 * tensor) == 0
    assert padded_vocab(64, 2) == 64
