"""The floor of parity, measured by a trainer of its own: rounding stays below it, faults do not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_trainer import build, make_batch

from megarl.algorithms.parity import FORMAT_EPS, MAX_EXCESS, Excess, excess
from megarl.launch.parity import measure_excess
from megarl.trainer.rounding import rounding_errors
from megarl.trainer.trainer import Trainer

pytestmark = pytest.mark.usefixtures("one_rank")


def measured(trainer: Trainer, engine_T: torch.Tensor, **changes: Any) -> float:
    batch = replace(make_batch(num_rows=16), **changes)
    fields = {name: getattr(batch, name) for name in ("tokens", "labels", "mask", "cu_seqlens", "temperature")}
    rollout: Any = SimpleNamespace(**fields, num_rows=batch.num_rows, num_tokens=batch.num_tokens)
    rollout.rollout_logprobs = engine_T
    return measure_excess(trainer, rollout).statistic


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_rounding_is_below_the_bound_and_faults_are_above(family: str, dtype: str, tmp_path: Path) -> None:
    trainer = build(tmp_path, {"family": family, "hidden": 64, "experts": 4 * (family == "qwen3_moe")}, dtype=dtype)
    batch = make_batch(num_rows=16)
    with rounding_errors(trainer.model, FORMAT_EPS[dtype], seed=99):
        healthy_T = trainer.forward(batch).logprobs_T
    exact_T = trainer.forward(batch).logprobs_T
    assert healthy_T is not None and exact_T is not None and not healthy_T.equal(exact_T)
    assert measured(trainer, healthy_T) < 0.5 * MAX_EXCESS
    assert measured(trainer, exact_T) == 0, "hooks are removed, and a forward pass repeats to the last bit"
    assert measured(trainer, healthy_T, temperature=0.9) > 2 * MAX_EXCESS
    norm = next(x for name, x in trainer.parameters_by_name().items() if name.endswith("final_layernorm.weight"))
    with torch.no_grad():
        norm.mul_(1.05)
    assert measured(trainer, healthy_T) > 2 * MAX_EXCESS
    trainer.close()


def test_by_hand() -> None:
    engine_T, noise_DT = -2 - torch.tensor([0.1, -0.2, 0.3, torch.nan, 9.0]), torch.full((2, 5), 0.1)
    batch: Any = SimpleNamespace(mask=torch.tensor([1, 1, 1, 1, 0]).bool(), rollout_logprobs=engine_T)
    found = excess(batch, torch.full((5,), -2.0), noise_DT)
    floor = 0.1 * 2**0.5 + 2**-22 * 2.0
    assert (found.median, found.floor_median, found.floor_p90) == pytest.approx((0.3, floor, floor))
    assert found.statistic == float("inf"), "NaN is as far off as can be"
    assert Excess(0.3, 0.2, 0.1, 0.1).statistic == pytest.approx(9) == Excess(0.2, 0.3, 0.1, 0.1).statistic
