"""Families without a table: what Megatron-Bridge's conversion was seen to do is right, and is all a run needs.

Where Megatron-Bridge is installed and no GPU is, with Megatron's own layers, and with Transformer Engine's, whose
compiled part te_standin/ stands in for.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from test_te import FILES
from test_trainer import each

from megarl.platform.env import is_installed

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        not is_installed("megatron.bridge"), reason="Megatron-Bridge is not installed"
    ),
    pytest.mark.skipif(not FILES.is_dir(), reason="Transformer Engine's files are not installed"),
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="the stand-in would hide the real Transformer Engine"
    ),
]
needs_vllm = pytest.mark.skipif(not is_installed("vllm"), reason="vLLM is not installed")
CHECKS = (
    "tables",
    "faults",
    "refused",
    "families",
    "families_on_te",
    "bf16",
    *(["engines"] if is_installed("vllm") else []),
)


def environment(*first: Path) -> dict[str, str]:
    paths = [
        *first,
        FILES,
        ROOT / "tests",
        HERE,
        ROOT,
        *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)),
    ]
    return os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    results = tmp_path_factory.mktemp("bridge") / "results.json"
    command = [sys.executable, "-W", "ignore", HERE / "bridge_ranks.py", results, *CHECKS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580, env=environment())
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(results.read_text())


def test_what_was_recorded_is_what_our_tables_say(found: dict[str, Any]) -> None:
    assert len(found["tables"]) == 14
    assert not any(found["tables"].values()), found["tables"]


def test_a_fault_in_the_conversion_is_seen(found: dict[str, Any]) -> None:
    """Planted in Bridge's own: rows that are swapped, a norm that is computed, a tensor that has no rule."""
    assert (
        "decoder.final_layernorm.weight is computed from model.norm.weight"
        in found["faults"]["computed"]
    )
    assert "o_proj.weight" in found["faults"]["swapped"]
    assert "decoder.final_layernorm.weight" in found["faults"]["no rule"]


def test_logprobs_and_updates_are_those_of_transformers(found: dict[str, Any]) -> None:
    """With Megatron's local layers, and with those of Transformer Engine."""
    cases = found["families"] + found["families_on_te"]
    for name, case in each({"layouts": cases}):
        assert case["logprob_error"] < 1e-4, name
        for step, tolerance in ((0, 1e-5), (1, 1e-3)):
            assert case["steps"][step] == pytest.approx(
                case["oracle"][step], rel=tolerance, abs=tolerance / 10
            ), name
        assert not case["replicas_differ"], name


def test_checkpoints_come_back_bit_for_bit(found: dict[str, Any]) -> None:
    for name, case in each({"layouts": found["families"]}):
        assert case["seen"] == [], name
    assert found["bf16"] == []


@needs_vllm
def test_engines_hold_what_was_trained(found: dict[str, Any]) -> None:
    for case in found["engines"]:
        assert max(case["errors"]) < 1e-4 and min(case["stale"]) > 1e-2, case
        tensors, kept, received = case["sizes"]
        assert tensors > 20 and 0 < received < kept, case


def test_families_that_a_cpu_cannot_build_are_refused(found: dict[str, Any]) -> None:
    assert (
        "olmoe has its own layer spec, which only Transformer Engine supports"
        in found["refused"]["olmoe@2"]
    )
    assert (
        "'olmo2' has no table, and Megatron-Bridge does not support it"
        in found["refused"]["olmo2@2"]
    )


@needs_vllm
@pytest.mark.exhaustive
def test_the_whole_loop(tmp_path: Path) -> None:
    sys.path.insert(0, str(HERE))
    from trainer_cases import save_model

    model, run = save_model("mistral", tmp_path), tmp_path / "loop"
    command = [
        *(
            sys.executable,
            "-m",
            "megarl.cli",
            "train",
            ROOT / "configs" / "tiny_dense.yaml",
            f"model.path={model}",
        ),
        *(f"run.dir={tmp_path}", "run.name=loop", "train.steps=2", "train.prompts_per_step=4"),
        *("rollout.samples_per_prompt=4", "parallel.tensor=2", "checkpoint.export_hf=end"),
    ]
    paths = environment(ROOT / "tests/te_standin/at_start")
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=580, env=paths, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr[-4000:]
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [step["weights/version"] for step in steps] == [1, 2] and all(
        step["weights/verified"] for step in steps
    )
    assert (
        max(step["logprob_diff/max"] for step in steps)
        < 1e-4
        < min(step["grad_norm"] for step in steps)
    )
    assert (run / "hf" / "model.safetensors").is_file() and (run / "report.html").is_file()
