"""The whole loop with LoRA, real Megatron-Core and real vLLM: adapters merged before a sync, or synced as such."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from quantised_folders import make_quantised
from start_ranks import run_ranks

from megarl.telemetry.audit import audit

pytestmark = pytest.mark.long
ROOT = Path(__file__).resolve().parents[2]
RANKS = Path(__file__).with_name("lora_ranks.py")


def launch(folder: Path, *arguments: str) -> Path:
    run_ranks(RANKS, 2, str(folder), *arguments, timeout_s=540)
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return launch(tmp_path_factory.mktemp("lora"))


def rows(folder: Path, case: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / case / "metrics.jsonl").read_text().splitlines()]


def check(folder: Path, case: str) -> list[dict[str, Any]]:
    """The engine samples from what is trained, and the reference is the base."""
    found = rows(folder, case)
    assert len(found) == 3 and all(row["weights/verified"] for row in found)
    assert max(row["logprob_diff/max"] for row in found) < 1e-5, (
        "to the trainer, so 2e-5 from one way to the other"
    )
    assert found[0]["kl/ref"] == 0 and found[-1]["kl/ref"] > 1e-3, "the adapters are not 0"
    assert min(row["grad_norm"] for row in found) > 1e-4
    return found


def same(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> None:
    for step, (a, b) in enumerate(zip(one, other, strict=True)):
        assert a["rollout/digest"] == b["rollout/digest"], step
        for key in ("loss", "grad_norm"):
            assert a[key] == pytest.approx(b[key], rel=1e-3 if step else 1e-5, abs=1e-6), (
                step,
                key,
            )


def test_merged_and_adapter_sample_the_same(runs: Path) -> None:
    same(check(runs, "tiny_dense-merged"), check(runs, "tiny_dense-adapter"))


def test_a_sync_of_adapters_moves_their_bytes_only(runs: Path) -> None:
    syncs = json.loads((runs / "syncs.json").read_text())
    for case in ("tiny_dense-adapter", "tiny_moe-adapter"):
        for row in rows(runs, case):
            assert row["weights/bytes"] == 2 * syncs[case]["adapter_bytes"], (
                "every engine has all adapters"
            )
    whole = rows(runs, "tiny_dense-merged")[0]["weights/bytes"]
    assert whole > 2 * syncs["tiny_dense-merged"]["adapter_bytes"]


def test_a_run_begins_with_adapters_and_asks_for_the_same_prompts_again(runs: Path) -> None:
    """The engine has the base without them, and forgets what it has computed of a prompt with others."""
    found = rows(runs, "tiny_dense-continued")
    assert max(row["logprob_diff/max"] for row in found) < 1e-5 and found[0]["kl/ref"] > 1e-3
    assert (
        found[2]["rollout/prompt_tokens_computed"]
        == found[1]["rollout/prompt_tokens_computed"]
        > 4 * 65
    )


def test_adapters_beside_experts_whose_routes_are_replayed(runs: Path) -> None:
    found = check(runs, "tiny_moe-adapter")
    assert all(row["routing/missing"] == 0 for row in found)


@pytest.mark.parametrize("case", ["tiny_dense-merged", "tiny_dense-adapter", "tiny_moe-adapter"])
def test_the_ledger_balances(runs: Path, case: str) -> None:
    report = audit(runs / case)
    assert not report.problems and set(report.states.values()) == {"trained"}, report


def test_a_run_leaves_a_peft_folder(runs: Path) -> None:
    folder = runs / "tiny_dense-adapter" / "adapter"
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], len(config["target_modules"])) == (5, 10, 7)
    assert sorted(file.name for file in folder.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]


@pytest.mark.exhaustive
def test_layouts(tmp_path: Path) -> None:
    launch(tmp_path, "more")
    same(check(tmp_path, "tiny_dense-merged_pp2"), check(tmp_path, "tiny_dense-adapter_tp2"))
    same(check(tmp_path, "tiny_moe-merged_attention"), check(tmp_path, "tiny_moe-adapter"))
    same(check(tmp_path, "tiny_moe-merged_all"), check(tmp_path, "tiny_moe-merged_all_dp"))
    same(check(tmp_path, "tiny_moe-merged_all"), check(tmp_path, "tiny_moe-merged_all_replay"))


def train(config: str, folder: Path, name: str, *overrides: str) -> list[dict[str, Any]]:
    values = [
        f"run.dir={folder}",
        f"run.name={name}",
        "train.steps=3",
        "checkpoint.every=0",
        *overrides,
    ]
    command = [sys.executable, "-m", "megarl.cli", "train", f"configs/{config}.yaml", *values]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    return rows(folder, name)


@pytest.mark.exhaustive
def test_a_quantised_base_is_sampled_with_its_adapters(tmp_path: Path) -> None:
    """In bf16; the parity gate has refused nothing."""
    folder, *_ = make_quantised("qwen3_moe-fp8", tmp_path)
    values = ("model.create=null", f"model.path={folder}", "train.dtype=bf16", "train.lr=1e-2")
    common = (*values, "lora={rank: 4, alpha: 8, targets: [q_proj, o_proj]}")
    export = "checkpoint={every: 0, export_hf: end, export_format: same}"
    for sync in ("merged", "adapter"):
        found = train("tiny_moe", tmp_path, sync, *common, f"lora.sync={sync}", export)
        assert len(found) == 3 and all(row["weights/verified"] for row in found)
        assert (tmp_path / sync / "hf/config.json").is_file() and (
            tmp_path / sync / "adapter"
        ).is_dir()


@pytest.mark.exhaustive  # Ray starts
def test_the_split_topology_gets_merged_weights(tmp_path: Path) -> None:
    common = (
        "launch.processes=1",
        "train.prompts_per_step=4",
        "rollout.samples_per_prompt=4",
        "train.lr=2e-2",
    )
    common += ("rollout.cpu_kv_cache_gb=0.1", "lora={rank: 4, alpha: 8}", "algorithm.kl.coef=0.01")
    colocated = train("tiny_dense", tmp_path, "colocated", *common)
    same(colocated, train("tiny_dense", tmp_path, "split", *common, "launch.topology=split"))
    assert colocated[-1]["kl/ref"] > 1e-4
