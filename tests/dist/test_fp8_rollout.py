"""Real engines in FP8 blocks, synced live from trainers that cut these blocks, against transformers in bf16."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from start_ranks import run_ranks

RANKS = Path(__file__).with_name("fp8_rollout_ranks.py")


def check(folder: Path, world: int, models: dict[str, int]) -> None:
    run_ranks(RANKS, world, str(folder), *(f"{name}:{tensor}" for name, tensor in models.items()))
    for rank in range(world):
        for name, seen in json.loads((folder / f"rank_{rank}.json").read_text()).items():
            figures = {key: value for key, value in seen.items() if key != "logprobs"}
            print(rank, name, figures)
            # both are rounding of bf16
            assert max(seen["fp8"].values()) < 1.5 * seen["bf16"], figures
            assert seen["changed"] < 1.5 * seen["bf16"] and seen["stale"] > 50 * seen["bf16"], (
                figures
            )
            assert seen["quantising"] > 3 * seen["bf16"], (
                "the reference must have the quantised weights"
            )
            first, *others = seen["logprobs"].values()
            assert all(found == first for found in others), (
                "whichever layout sent them, the weights are the same"
            )
            assert len({*seen["bytes"].values()}) == 1
            share = next(iter(seen["bytes"].values())) / seen["bf16 bytes"]
            assert 0.5 < share < 0.56, figures  # the embedding of this tiny model stays in bf16
            assert world == 1 or "weight_scale_inv in the engine" in seen["not reduced"], figures


needs_amx = pytest.mark.skipif(
    not torch.cpu._is_amx_tile_supported(),
    reason="vLLM's FP8 kernels on a CPU require AMX tiles (Sapphire Rapids or newer)",
)


@needs_amx
def test_an_engine_in_fp8_has_the_trainers_quantised_weights(tmp_path):
    check(tmp_path, 1, {"dense": 1})


@needs_amx
@pytest.mark.long
def test_dense_and_experts_from_layouts_that_cut_blocks(tmp_path):
    check(tmp_path, 2, {"dense": 1, "experts": 1, "halves": 2, "experts_halves": 2})


def test_vllm_still_needs_the_patch():
    """megarl.patches.vllm.FP8_LINEAR can be deleted once this fails on a CPU without AMX."""
    from vllm import _custom_ops
    from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUFp8BlockScaledMMKernel

    has_amx = torch.cpu._is_amx_tile_supported()
    assert CPUFp8BlockScaledMMKernel.is_supported()[0] == has_amx
    assert _custom_ops._supports_cpu_fp8_w8a16 or not torch.cpu._is_avx512_bf16_supported()


ROOT = Path(__file__).resolve().parents[2]
WIDE = "{family: qwen3, layers: 3, hidden: 128, heads: 4, kv_heads: 2, vocab: 67, tokenizer: none, tied: true}"


def megarl(*arguments: str) -> str:
    command = [sys.executable, "-m", "megarl.cli", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@needs_amx
@pytest.mark.long
def test_a_run_samples_and_trains_in_fp8(tmp_path):
    """Tensor parallelism cuts blocks; parity holds before every update, with the quantiser's share in its floor."""
    fp8 = [
        "rollout.quantization=fp8",
        "precision.fp8={recipe: blockwise, emulate: true}",
        "parallel.tensor=2",
    ]
    common = [
        "train.dtype=bf16",
        f"model.create={WIDE}",
        f"run.dir={tmp_path}",
        "train.steps=3",
        "checks.probe=always",
    ]
    megarl("train", "configs/tiny_dense.yaml", *common, *fp8, "algorithm.correction=tis")
    rows = [
        json.loads(line)
        for line in (tmp_path / "tiny_dense" / "metrics.jsonl").read_text().splitlines()
    ]
    assert len(rows) == 3 and all(row["weights/verified"] for row in rows)
    assert all(0 < row["logprob_diff/statistic"] <= row["logprob_diff/limit"] for row in rows), rows
    assert all(row["logprob_diff/mean"] > 1e-3 and row["grad_norm"] > 1e-3 for row in rows), rows


@pytest.mark.long
def test_layouts_of_emulated_training_agree_to_its_rounding(tmp_path):
    fp8 = "precision.fp8={recipe: blockwise, emulate: true}"
    wide = ["model.create.hidden=256", "model.create.head_dim=64", "model.create.kv_heads=4"]
    options = ["configs/tiny_dense.yaml", f"run.dir={tmp_path}", *wide, fp8]
    shown = megarl("check", *options, "--layouts", "1", "tp2")
    assert shown.count("agrees") == 2, shown
