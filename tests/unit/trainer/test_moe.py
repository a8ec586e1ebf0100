"""The routers' terms of the loss: their formulas, and that padding and packing leave them alone."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megarl.layout import Axis
from megarl.trainer.microbatch import pack
from megarl.trainer.moe import RouterRows, balance, mean_square_lse, scores_of

sys.path.insert(0, str(Path(__file__).parents[2] / "dist"))
from trainer_cases import random_batch

CPU, EXPERTS, TOPK = torch.device("cpu"), 6, 2
BATCH = random_batch(num_rows=5)
WEIGHTS = BATCH.mask / BATCH.mask.sum()
LOGITS = torch.randn(BATCH.num_tokens, EXPERTS, generator=torch.Generator().manual_seed(1))


def terms(
    rows: tuple[int, ...],
    *,
    tensor: int = 1,
    context: Axis = Axis(1),  # noqa: B008 (it is frozen)
    more: int = 0,
) -> list[Tensor]:
    """[weight, balance, z] of each row, added up over the tensor ranks, whose counts are put together by hand."""
    microbatch = pack(BATCH, rows, BATCH.mask, tensor=tensor, context=context, device=CPU)
    if more:
        length = microbatch.length + more
        microbatch = pack(
            BATCH, rows, BATCH.mask, tensor=tensor, context=context, device=CPU, length=length
        )
        assert microbatch.length == microbatch.tokens.numel() == length
    padded = torch.full((microbatch.source.numel(), EXPERTS), 30.0)  # padding would show
    is_real = microbatch.source >= 0
    padded[is_real] = LOGITS[microbatch.rows.index[microbatch.source[is_real]]]
    parts = [RouterRows.of(microbatch, WEIGHTS, Axis(tensor, rank), CPU) for rank in range(tensor)]
    whole = RouterRows(
        torch.cat([part.row_N for part in parts]), parts[0].length_R, parts[0].weight_R
    )
    scores = scores_of(padded, "softmax")
    return [
        whole.weight_R,
        balance(scores, whole, topk=TOPK, group=None),
        mean_square_lse(padded, whole),
    ]


def plain(row: int) -> list[float]:
    start, end = BATCH.cu_seqlens[row : row + 2].tolist()
    logits = LOGITS[start:end].double()
    scores, length = logits.softmax(-1), end - start
    chosen = torch.zeros(EXPERTS, dtype=torch.float64)
    for best in scores.topk(TOPK).indices.flatten().tolist():
        chosen[best] += 1
    return [
        float(BATCH.mask[start:end].sum() / BATCH.mask.sum()),
        float((EXPERTS / (TOPK * length) * chosen * scores.mean(0)).sum()),
        float(logits.logsumexp(-1).square().mean()),
    ]


@pytest.mark.parametrize("rows", [(0,), (3, 1), (4, 0, 2, 1, 3)])
@pytest.mark.parametrize(("tensor", "more"), [(1, 0), (2, 0), (4, 8)])
def test_terms_of_a_row_are_its_own(rows: tuple[int, ...], tensor: int, more: int) -> None:
    found = torch.stack(terms(rows, tensor=tensor, more=more), 1)
    assert torch.allclose(found, torch.tensor([plain(row) for row in rows]), rtol=1e-5)


def test_context_ranks_add_up_once_counts_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """z is a sum over tokens; the balance of a chunk needs the counts of the whole row."""
    rows = (2, 0, 4)
    z = sum(terms(rows, context=Axis(2, rank))[2] for rank in range(2))
    assert torch.allclose(z, torch.tensor([plain(row)[2] for row in rows]), rtol=1e-5)
    alone = sum(terms(rows, context=Axis(2, rank))[1] for rank in range(2))
    assert not torch.allclose(alone, torch.tensor([plain(row)[1] for row in rows]), rtol=1e-3)


def test_balanced_is_one() -> None:
    scores = torch.full((12, EXPERTS), 1 / EXPERTS) + 0.001 * torch.eye(EXPERTS).repeat(2, 1)
    rows = RouterRows(torch.zeros(12, dtype=torch.int64), torch.tensor([12.0]), torch.ones(1))
    scores = scores / scores.sum(-1, keepdim=True)
    assert float(balance(scores, rows, topk=1, group=None)) == pytest.approx(1.0, rel=1e-6)


def test_a_micro_batch_as_one_row_is_megatrons_loss() -> None:
    from megatron.core.transformer.moe.moe_utils import switch_load_balancing_loss_func

    microbatch = pack(BATCH, (0, 3), BATCH.mask, tensor=4, context=Axis(1), device=CPU)
    whole = RouterRows.of(microbatch, WEIGHTS, Axis(1), CPU).as_one()
    logits = torch.zeros(microbatch.source.numel(), EXPERTS)
    logits[: microbatch.rows.index.numel()] = LOGITS[microbatch.rows.index]
    real = logits[: microbatch.rows.index.numel()].softmax(-1)
    counts = torch.bincount(real.topk(TOPK).indices.flatten(), minlength=EXPERTS)
    theirs = switch_load_balancing_loss_func(
        probs=real,
        tokens_per_expert=counts,
        total_num_tokens=real.shape[0],
        topk=TOPK,
        num_experts=EXPERTS,
        moe_aux_loss_coeff=1.0,
    )
    ours = balance(logits.softmax(-1), whole, topk=TOPK, group=None)
    assert float(ours) == pytest.approx(float(theirs), rel=1e-6)
    assert float(whole.weight_R) == pytest.approx(plain(0)[0] + plain(3)[0])


def test_sigmoid_scores_add_up_to_one() -> None:
    scores = scores_of(LOGITS, "sigmoid")
    assert torch.allclose(scores.sum(-1), torch.ones(len(LOGITS)))
    assert torch.equal(scores.argmax(-1), LOGITS.argmax(-1))
