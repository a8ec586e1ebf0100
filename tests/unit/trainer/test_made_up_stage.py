"""A stage that megarl does not have: a head of its own, and a loss over pairs of rows. Nothing in trainer/ knows it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tiny_trainer import build, make_batch
from torch.nn.functional import logsigmoid

from megarl.data.packing import plan_microbatches
from megarl.trainer.heads import RewardHead
from megarl.types import MicrobatchRows, TokenBatch, TokenLosses, TokenOutputs

pytestmark = pytest.mark.usefixtures("one_rank")
SCALE = 3.0


@dataclass(frozen=True, slots=True)
class BoundedHead(RewardHead):
    """A score between -3 and 3."""

    def read(self, model, hidden_SH, labels_S, options) -> TokenOutputs:
        linear = model.get_submodule("value_head")
        return TokenOutputs(
            values_T=SCALE * torch.tanh(hidden_SH.float() @ linear.weight.float()[0])
        )


def pair_loss(outputs: TokenOutputs, rows: MicrobatchRows) -> TokenLosses:
    """Bradley-Terry: of rows 2k and 2k + 1 the first is preferred; its last token carries the pair's loss."""
    last_N = rows.cu_seqlens[1:] - 1
    margin = outputs.values_T[last_N[::2]] - outputs.values_T[last_N[1::2]]
    loss_T = torch.zeros_like(outputs.values_T).index_put((last_N[::2],), -logsigmoid(margin))
    return TokenLosses(loss_T, {"accuracy": (margin > 0).sum()}, torch.tensor(margin.numel()))


def weights(batch: TokenBatch) -> torch.Tensor:
    last_N = batch.cu_seqlens[1:] - 1
    return torch.zeros(batch.num_tokens, dtype=torch.float64).index_fill(
        0, last_N[::2], 2 / batch.num_rows
    )


def test_pairs_are_learned(tmp_path: Path) -> None:
    batch, units = make_batch(num_rows=12), [row // 2 for row in range(12)]
    losses: dict[int, list[float]] = {}
    for max_tokens in (40, 10_000):
        trainer = build(tmp_path, head=BoundedHead(), lr=3e-3, max_tokens_per_microbatch=max_tokens)
        plan = plan_microbatches(batch, trainer.layout, trainer.train, units=units)
        assert (len(plan.rows[0][0]) > 2) == (max_tokens == 40), "pairs in several micro-batches"
        reports = [trainer.step(batch, plan, pair_loss, weights(batch)) for _ in range(12)]
        losses[max_tokens] = [report.loss for report in reports]
        scores = trainer.forward(batch).values_T[batch.cu_seqlens[1:] - 1]
        assert scores.abs().max() < SCALE and (scores[::2] > scores[1::2]).all()
        assert reports[0].loss == torch.log(torch.tensor(2.0)).item() and reports[-1].metrics == {
            "accuracy": 1.0
        }
        trainer.close()
    torch.testing.assert_close(*(torch.tensor(x) for x in losses.values()), rtol=1e-4, atol=1e-6)
