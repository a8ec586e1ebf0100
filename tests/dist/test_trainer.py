"""The trainer in many layouts on four gloo ranks, against transformers and torch's own AdamW. One launch for all."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


def launch(folder: Path, *checks: str) -> dict[str, Any]:
    """What all checks found, or those that are named."""
    results = folder / "results.json"
    command = [sys.executable, "-W", "ignore", HERE / "trainer_ranks.py", results, *checks]
    done = subprocess.run(command, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(results.read_text())


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found = launch(tmp_path_factory.mktemp("trainer"))
    assert len(found["layouts"]) == 13
    return found


@pytest.fixture(scope="module")
def more(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found = launch(tmp_path_factory.mktemp("more"), "more_layouts")
    assert len(found["more_layouts"]) == 8
    return {"layouts": found["more_layouts"]}


@pytest.fixture(
    params=["found", pytest.param("more", marks=[pytest.mark.long, pytest.mark.exhaustive])]
)
def layouts(request: pytest.FixtureRequest) -> dict[str, Any]:
    return request.getfixturevalue(request.param)


def each(found: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [(f"{case['model']} {case['parallel']}", case) for case in found["layouts"]]


def test_logprobs_and_entropy_are_those_of_transformers(layouts: dict[str, Any]) -> None:
    for name, case in each(layouts):
        assert case["logprob_error"] < 1e-5, name
        ours, theirs = case["entropy"]
        assert ours == pytest.approx(theirs, abs=1e-5), name


def test_updates_are_those_of_plain_torch_in_every_layout(layouts: dict[str, Any]) -> None:
    for name, case in each(layouts):
        for step, tolerance in ((0, 1e-5), (1, 1e-3)):
            (loss, norm), (true_loss, true_norm) = case["steps"][step], case["oracle"][step]
            assert true_norm > 1e-3, f"{name}: nothing to compare"
            assert loss == pytest.approx(true_loss, rel=tolerance, abs=tolerance / 10), (
                f"{name}, step {step}"
            )
            assert norm == pytest.approx(true_norm, rel=tolerance), f"{name}, step {step}"


def test_clipping_is_by_the_norm_of_the_whole_model(found: dict[str, Any]) -> None:
    for case in found["clipping"]:
        assert case["oracle"][0][1] > 1, "more than ten times the bound"
        for step, tolerance in ((0, 1e-5), (1, 1e-4)):
            assert case["steps"][step] == pytest.approx(
                case["oracle"][step], rel=tolerance, abs=1e-6
            ), case["parallel"]
        assert case["steps"][0][0] != pytest.approx(case["steps"][1][0], rel=1e-2), "the step shows"


def test_the_routers_bias_follows_the_tokens_of_all_ranks(found: dict[str, Any]) -> None:
    expected, moved = found["router_bias"][::2], found["router_bias"][1::2]
    assert expected and all(any(step) for step in expected)
    assert moved == [pytest.approx(steps, abs=1e-7) for steps in expected]


def test_layouts_of_a_model_agree(layouts: dict[str, Any]) -> None:
    first: dict[str, Any] = {}
    for name, case in each(layouts):
        one = first.setdefault(case["model"], case)["steps"]
        for step, tolerance in ((0, 1e-6), (1, 1e-5)):
            # a loss is the sum of terms of about 1 that nearly cancel
            assert case["steps"][step] == pytest.approx(
                one[step], rel=tolerance, abs=tolerance / 10
            ), name


def test_replicas_of_a_parameter_are_bit_equal(layouts: dict[str, Any]) -> None:
    for name, case in each(layouts):
        assert not case["replicas_differ"], name


def test_result_is_independent_of_microbatching(found: dict[str, Any]) -> None:
    sizes = found["microbatches"]
    for one, other in (("large", "small"), ("few_rows", "few_rows_pipeline")):
        for (loss, norm), (other_loss, other_norm) in zip(sizes[one], sizes[other], strict=True):
            assert norm > 1e-3
            assert loss == pytest.approx(other_loss, rel=1e-5, abs=1e-6)
            assert norm == pytest.approx(other_norm, rel=1e-5)


def test_experts_without_tokens_hold_up_no_rank_in_fp8(found: dict[str, Any]) -> None:
    for recipe, (norm, tokens) in found["fp8_without_tokens"].items():
        assert 0 < norm < 100 and all(fewest == 0 for fewest, _ in tokens), (recipe, tokens)
    assert any(total == 0 for _, total in found["fp8_without_tokens"]["blockwise"][1])


def test_bf16_keeps_the_loaded_weights_at_lr_zero(found: dict[str, Any]) -> None:
    bf16 = found["bf16"]
    assert bf16["kept"] and bf16["moved"] and not bf16["replicas_differ"]
    assert bf16["grad_norm"] == pytest.approx(found["layouts"][0]["steps"][0][1], rel=0.05)
    assert bf16["logprob_error"] < 0.05


def test_reference_stays_while_the_policy_moves(found: dict[str, Any]) -> None:
    reference = found["reference"]
    assert reference["policy_moved"] > 0.1
    assert reference["reference_moved"] == 0.0
    assert reference["weights_kept_by_logprobs"]
    assert reference["kl"][0] == 0.0 and reference["kl"][1] > 0.01


def test_a_teacher_beside_the_policy_is_the_same_in_every_layout(found: dict[str, Any]) -> None:
    assert len(found["teacher"]) == 4 and found["teacher"][0]["steps"][0][2] > 0.1
    for case in found["teacher"]:
        is_top_k = case["top_k"] is not None
        first = found["teacher"][2 if is_top_k else 0]["steps"]
        assert not is_top_k or case["top_k"][0] == pytest.approx(case["top_k"][1], rel=1e-5), case[
            "parallel"
        ]
        assert case["error"] < 1e-5 and not case["replicas_differ"], case["parallel"]
        for step, tolerance in ((0, 1e-5), (1, 1e-4)):
            assert case["steps"][step] == pytest.approx(
                first[step], rel=tolerance, abs=tolerance
            ), case["parallel"]


def test_a_gradient_that_is_not_finite_changes_nothing(found: dict[str, Any]) -> None:
    skip = found["skip"]
    assert skip["skipped"] and skip["kept"]
    skipped, loss, norm = skip["after"]
    clean = next(case for _, case in each(found) if case["model"] == "qwen3_moe")["steps"][0]
    assert not skipped
    assert [loss, norm] == pytest.approx(clean, rel=1e-6)


def test_several_updates_a_step_and_the_schedule(found: dict[str, Any]) -> None:
    updates = found["updates"]
    assert updates["lrs"] == [pytest.approx([lr, lr]) for lr in (0.01, 0.02)], (
        "a warm-up of three steps"
    )
    assert updates["clip_frac"][1] > 0, "the policy moved within the step"
    assert updates["sft"] == sorted(updates["sft"], reverse=True), "SFT learns"
    assert updates["sft"][0] == pytest.approx(updates["sft_expected"], rel=1e-6)


def test_tokens_selected_are_the_same_in_every_layout(found: dict[str, Any]) -> None:
    selection = found["selection"]
    for loss in ("kl_cov", "clip_cov"):
        one, other = (steps for name, steps in selection.items() if name.startswith(loss))
        assert one[0][1] > 1e-3
        for step, tolerance in ((0, 1e-5), (1, 1e-3)):
            assert other[step] == pytest.approx(one[step], rel=tolerance, abs=1e-6), (
                f"{loss}, update {step}"
            )


def test_a_batch_without_a_trained_token_changes_nothing(found: dict[str, Any]) -> None:
    assert found["nothing"] == {"skipped": [True, True], "kept": True, "moves": True}


def test_groups_are_connected_before_the_engine_measures_memory(found: dict[str, Any]) -> None:
    assert len(found["connected"]) >= 12
    assert set(found["connected"]) == {1}


def test_collectives_that_gloo_refuses(found: dict[str, Any]) -> None:
    collectives = found["collectives"]
    assert collectives["host"]
    assert collectives["gathered"] == [
        [float(rank)] * size for rank, size in enumerate((1, 2, 3, 4))
    ]
    assert collectives["scattered"] == [4 * 1 + 0 + 1 + 2 + 3]
    assert collectives["exchanged"] == [0.0, 1.0, 2.0, 3.0]
    assert "invalid tensor size" in collectives["gloo"], (
        "gloo learnt it: drop the emulation from patches/megatron.py"
    )
