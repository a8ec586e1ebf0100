"""The floor of parity, measured by a trainer of its own: rounding stays below it, faults do not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_trainer import build, make_batch

from megarl.parity import gate as parity
from megarl.parity.gate import measure_logprobs
from megarl.parity.statistics import FORMAT_EPS, LOG_SOFTMAX_ERROR, MAX_EXCESS, Excess, Quantiles
from megarl.parity.sublayers import rounding_errors
from megarl.trainer.heads import VocabularyHead
from megarl.trainer.trainer import Trainer

pytestmark = pytest.mark.usefixtures("one_rank")


def measured(trainer: Trainer, engine_T: torch.Tensor, **changes: Any) -> float:
    batch = replace(make_batch(num_rows=16), **changes)
    found = measure_logprobs(trainer, batch)
    return Excess(Quantiles.of(found.logprobs_K - engine_T[batch.mask]), found.floor).statistic


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_rounding_is_below_the_bound_and_faults_are_above(
    family: str, dtype: str, tmp_path: Path
) -> None:
    trainer = build(
        tmp_path,
        {"family": family, "hidden": 64, "experts": 4 * (family == "qwen3_moe")},
        dtype=dtype,
    )
    batch = make_batch(num_rows=16)
    with rounding_errors(trainer, FORMAT_EPS[dtype], draw=99):
        healthy_T = trainer.forward(batch).logprobs_T
    exact_T = trainer.forward(batch).logprobs_T
    assert healthy_T is not None and exact_T is not None and not healthy_T.equal(exact_T)
    assert measured(trainer, healthy_T) < 0.5 * MAX_EXCESS
    assert measured(trainer, exact_T) == 0, (
        "hooks are removed, and a forward pass repeats to the last bit"
    )
    assert measured(trainer, exact_T + LOG_SOFTMAX_ERROR) < 0.5, (
        "an engine whose exp is approximate, on a CPU"
    )
    assert measured(trainer, healthy_T, temperature=0.9) > 2 * MAX_EXCESS
    norm = next(
        x
        for name, x in trainer.parameters_by_name().items()
        if name.endswith("final_layernorm.weight")
    )
    with torch.no_grad():
        norm.mul_(1.05)
    assert measured(trainer, healthy_T) > 2 * MAX_EXCESS
    trainer.close()


def test_rounded_logits_of_a_bf16_engine_are_below_the_bound(tmp_path: Path) -> None:
    """Logits of 16 to 32, as of SmolLM2, are off by up to 0.06 nats once they are bf16, which planted errors of
    sublayers do not cause where all logits have a large part in common.
    """
    trainer = build(tmp_path, {"hidden": 64, "tied": False}, dtype="bf16")
    with torch.no_grad():
        for name, parameter in trainer.parameters_by_name().items():
            if name.endswith(("word_embeddings.weight", "output_layer.weight")):
                parameter.add_(1.0 if "word" in name else 0.4)
    batch, head = make_batch(num_rows=16), trainer.head
    assert isinstance(head, VocabularyHead)
    trainer.head = replace(head, rounding=1.0)
    rounded_T = trainer.logprobs(batch)
    trainer.head = head
    assert (rounded_T - trainer.logprobs(batch))[batch.mask].abs().max() > 0.05
    assert measured(trainer, rounded_T) < MAX_EXCESS
    assert trainer.head == head and measured(trainer, rounded_T + 0.1) > 2 * MAX_EXCESS
    trainer.close()


@pytest.mark.parametrize(("batches", "draws"), [(0.1, 1), (1.5, 2), (1e9, 4)])
def test_a_large_batch_needs_fewer_draws(
    batches: float, draws: int, tmp_path: Path, monkeypatch: Any
) -> None:
    trainer, batch, calls = build(tmp_path), make_batch(num_rows=4), []
    monkeypatch.setattr(parity, "ENOUGH", int(batch.mask.sum()) * batches)
    forward = trainer.forward
    with monkeypatch.context() as patched:
        patched.setattr(
            trainer,
            "forward",
            lambda batch, **options: (calls.append(1), forward(batch, **options))[1],
        )
        measure_logprobs(trainer, batch)
    assert len(calls) == 1 + draws
    trainer.close()
