"""LoRA in many layouts on four gloo ranks, against transformers and torch's own AdamW. One launch for all."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.long
HERE = Path(__file__).parent


def launch(folder: Path, *checks: str) -> dict[str, Any]:
    results = folder / "results.json"
    command = [sys.executable, "-W", "ignore", HERE / "lora_ranks.py", results, *checks]
    done = subprocess.run(command, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(results.read_text())


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return launch(tmp_path_factory.mktemp("lora"), "layouts", "start", "resume")


@pytest.fixture(scope="module")
def more(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return {"layouts": launch(tmp_path_factory.mktemp("more"), "more_layouts")["more_layouts"]}


@pytest.fixture(params=["found", pytest.param("more", marks=pytest.mark.exhaustive)])
def layouts(request: pytest.FixtureRequest) -> list[tuple[str, dict[str, Any]]]:
    return [
        (f"{x['model']} {x['parallel']}", x)
        for x in request.getfixturevalue(request.param)["layouts"]
    ]


def test_updates_are_those_of_plain_torch_in_every_layout(
    layouts: list[tuple[str, dict[str, Any]]],
) -> None:
    for name, case in layouts:
        for step, tolerance in ((0, 1e-5), (1, 1e-3)):
            (loss, norm), (true_loss, true_norm) = case["steps"][step], case["oracle"][step]
            assert true_norm > 1e-2, f"{name}: nothing to compare"
            assert loss == pytest.approx(true_loss, rel=tolerance), f"{name}, step {step}"
            assert norm == pytest.approx(true_norm, rel=tolerance), f"{name}, step {step}"


def test_merged_weights_are_the_adapters_and_the_base_never_changes(
    layouts: list[tuple[str, dict[str, Any]]],
) -> None:
    for name, case in layouts:
        assert case["merged"] < 2e-5 < 0.1 < case["moved"], name
        assert case["base_same"], name
        assert case["differ"] == [], name


def test_only_adapters_have_gradients_and_optimizer_state(
    layouts: list[tuple[str, dict[str, Any]]],
) -> None:
    for name, case in layouts:
        memory = case["memory"]
        padding = 256 * 64  # of Megatron's buffers
        assert memory["adapters"] <= memory["gradients"] <= memory["adapters"] + padding, name
        assert memory["state"] <= 2 * memory["adapters"], name


def test_adapters_begin_as_the_base_model_and_equal_in_every_layout(found: dict[str, Any]) -> None:
    start = found["start"]
    assert start["same"] and start["b_is_zero"]
    assert all(0.4 < std < 0.7 for std in start["a_std"]), (
        "uniform within 1 / sqrt(in): 1 / sqrt(3)"
    )
    assert start["recomputed"] == pytest.approx([start["recomputed"][0]] * 3, rel=1e-6)


def test_training_resumes_bit_for_bit_and_in_other_layouts(found: dict[str, Any]) -> None:
    resumed = found["resume"]
    assert resumed["went_on"]
    assert (
        "its frozen weights are others: model.embed_tokens.weight; resume with"
        in resumed["other_base"]
    )
    # 2 layers x (4 + 4 experts x 3) projections x A, B x weights, main weights (fp32: the same), moments
    assert resumed["tensors"] == [2 * 16 * 2 * 4] * 2
