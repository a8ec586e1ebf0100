"""Rows split zig-zag, and what each chunk of queries sees."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megarl.layout import Axis
from megarl.trainer import context_parallel
from megarl.trainer.context_parallel import local_positions, row_multiple


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_position_is_held_once_and_work_is_equal(size: int) -> None:
    lengths = [row_multiple(size) * chunks for chunks in (3, 1, 5)]
    held = [local_positions(lengths, Axis(size, rank)) for rank in range(size)]
    assert torch.cat(held).sort().values.tolist() == list(range(sum(lengths)))
    in_row = torch.cat([torch.arange(length) for length in lengths])
    seen = [int((in_row[mine] + 1).sum()) for mine in held]  # pairs of query and key
    assert max(seen) == min(seen)


def test_the_split_is_megatrons() -> None:
    """Its rotary embedding takes angles for what it believes a rank holds of a packed row."""
    from megatron.core.models.common.embeddings.rope_utils import _get_thd_freqs_on_this_cp_rank

    angles = torch.arange(24.0)
    for rank in range(3):
        theirs = _get_thd_freqs_on_this_cp_rank(rank, 3, torch.zeros(8, 1), angles)
        assert theirs.tolist() == local_positions([24], Axis(3, rank)).tolist()


class Ranks:
    """Stands for the process group of context rank `rank`: what the others hold is known here."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("lengths", [(12, 36, 24, 12), (12,)])
def test_attention_of_the_chunks_is_that_of_whole_rows(
    monkeypatch: pytest.MonkeyPatch, size: int, lengths: tuple[int, ...]
) -> None:
    """All ranks in turn, each handed what the collective would bring; value heads narrower, two query heads a key's."""
    torch.manual_seed(0)
    total, scale = sum(lengths), 0.3
    query, key, value = (torch.randn(total, heads, dim) for heads, dim in ((4, 8), (2, 8), (2, 6)))
    expected = torch.cat(
        [
            scaled_dot_product_attention(
                *(x.transpose(0, 1)[None] for x in row),
                is_causal=True,
                scale=scale,
                enable_gqa=True,
            )[0].transpose(0, 1)
            for row in zip(*(x.split(lengths) for x in (query, key, value)), strict=True)
        ]
    ).flatten(1)

    def score(q: Tensor, k: Tensor, v: Tensor, back_RLK: Tensor) -> Tensor:
        seen = (back_RLK >= 0)[:, None]
        return scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=True)

    held = [local_positions(lengths, Axis(size, rank)) for rank in range(size)]
    both = torch.cat([key, value], -1)[torch.cat(held)]
    monkeypatch.setattr(
        context_parallel, "gather_from_sequence_parallel_region", lambda _mine, group: both
    )
    for rank, mine in enumerate(held):
        monkeypatch.setattr(context_parallel.dist, "get_rank", lambda _group, rank=rank: rank)
        found = context_parallel.attend(
            query[mine], key[mine], value[mine], lengths, Ranks(size), score
        )  # pyright: ignore[reportArgumentType]
        assert torch.allclose(found, expected[mine], atol=1e-6)
