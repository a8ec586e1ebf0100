"""Reward models in two-rank layouts are those of one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch.distributed as dist
from reward_ranks import CASES, LAYOUTS, measure, save
from start_ranks import run_ranks

HERE = Path(__file__).parent


@pytest.mark.long
def test_layouts_are_one_process(tmp_path: Path) -> None:
    save(tmp_path)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    alone = {model: measure(tmp_path, model, {}) for model in CASES}
    dist.destroy_process_group()
    run_ranks(HERE / "reward_ranks.py", 2, str(tmp_path), str(tmp_path / "results.json"))
    found = json.loads((tmp_path / "results.json").read_text())
    for model, one in alone.items():
        assert len(one["updates"]) == 4 and min(norm for _, norm, _ in one["updates"]) > 1e-3
        for parallel, other in zip(LAYOUTS, found[model], strict=True):
            where = f"{model} {parallel}"
            for number, ((loss, norm, metrics), theirs) in enumerate(
                zip(one["updates"], other["updates"], strict=True)
            ):
                tolerance = 1e-5 if number == 0 else 1e-3
                assert theirs[0] == pytest.approx(loss, rel=tolerance), f"{where}, update {number}"
                assert theirs[1] == pytest.approx(norm, rel=tolerance), f"{where}, update {number}"
                assert theirs[2] == pytest.approx(metrics, rel=tolerance, abs=1e-4), (
                    f"{where}, update {number}"
                )
            assert other["right"] == one["right"], where
            assert other["scores"] == pytest.approx(one["scores"], rel=1e-3, abs=1e-4), where
