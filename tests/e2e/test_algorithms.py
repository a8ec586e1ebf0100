"""Every preset and option in the whole loop, with the real Megatron-Core and the real vLLM; curves of what is learnt.

pytest tests/e2e/test_algorithms.py -m exhaustive --curves DIR     keeps DIR/learning.png and DIR/learning.json
"""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from algorithm_ranks import LEARNING, OPTIONS, RESUMED, SPREAD
from start_ranks import run_ranks

from megarl.config.presets import PRESETS

pytestmark = pytest.mark.long
HERE = Path(__file__).parent
Rows = list[dict[str, Any]]


def run_cases(folder: Path, which: str, *, ranks: int = 1) -> dict[str, Rows]:
    run_ranks(HERE / "algorithm_ranks.py", ranks, str(folder), which, timeout_s=540)
    return {
        file.parent.name: [json.loads(line) for line in file.read_text().splitlines()]
        for file in folder.glob("*/metrics.jsonl")
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Rows]:
    return run_cases(tmp_path_factory.mktemp("options"), "options")


@pytest.fixture(scope="module")
def curves(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[str, list[float]]:
    """[case] -> mean reward of each step; drawn and kept where --curves says."""
    folder = tmp_path_factory.mktemp("learning")
    runs = run_cases(folder, "learning")
    curves = {name: [row["reward/mean"] for row in rows] for name, rows in runs.items()}
    seconds = {name: sum(row["time/step"] for row in rows) for name, rows in runs.items()}
    draw(curves, seconds, Path(request.config.getoption("--curves") or folder))
    return curves


def draw(curves: dict[str, list[float]], seconds: dict[str, float], folder: Path) -> None:
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "learning.json").write_text(
        json.dumps({"reward": curves, "seconds": seconds}, indent=1) + "\n"
    )
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name in LEARNING:
        axes.plot(curves[name], label=f"{name} ({seconds[name]:.0f} s)", linewidth=1.6)
    axes.set(
        xlabel="step",
        ylabel="share of even tokens",
        ylim=(0.4, 1.02),
        title="Two CPU cores, a random model",
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    figure.savefig(folder / "learning.png", dpi=130)


# --- learning -----------------------------------------------------------------------------------------------------


def assert_learnt(curve: list[float]) -> None:
    """From chance to nearly always. A mean of 64 responses wavers by 0.015; nothing learnt would stay at a half."""
    start, end = sum(curve[:2]) / 2, sum(curve[-3:]) / 3
    print(f"{start:.2f} -> {end:.2f}")
    assert 0.4 < start < 0.6 and end > 0.9, curve


def test_it_learns(runs: dict[str, Rows]) -> None:
    assert_learnt([row["reward/mean"] for row in runs["learns"]])


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", LEARNING)
def test_every_estimator_learns(curves: dict[str, list[float]], name: str) -> None:
    assert_learnt(curves[name])


# --- presets ------------------------------------------------------------------------------------------------------


REWARDED = [name for name in PRESETS if name != "distill"]  # which has no reward


@pytest.mark.parametrize("name", REWARDED)
def test_every_preset_trains(runs: dict[str, Rows], name: str) -> None:
    rows = runs[name]
    assert len(rows) == 2 and all(
        row["updates"] == 2 and row["update/skipped"] == 0 for row in rows
    )
    for row in rows:
        assert math.isfinite(row["loss"]) and 1e-3 < row["grad_norm"] < 1e3, row
        assert row["reward/std"] > 0.05 and row["kl/old"] > 1e-6 and row["weights/verified"]
    reference = {"grpo_paper", "rloo", "reinforce_pp", "reinforce_pp_baseline", "remax", "ppo"}
    assert (rows[1]["kl/ref"] is not None) == (name in reference)
    if name in reference:
        assert rows[1]["kl/ref"] > rows[0]["kl/ref"] > 0
        assert rows[0]["kl/coef"] == PRESETS[name]["kl"]["coef"]


def test_no_two_presets_are_the_same(runs: dict[str, Rows]) -> None:
    """They start from the same samples, and none is another under another name."""
    assert (
        len({runs[name][0]["reward/megarl.rewards.rules:even_fraction/mean"] for name in REWARDED})
        == 1
    )
    first = {name: runs[name][0]["grad_norm"] for name in PRESETS}
    assert first.pop("ppo") == pytest.approx(first["reinforce_pp"], rel=1e-6), (
        "its critic's values are still 0"
    )
    assert runs["ppo"][1]["grad_norm"] != pytest.approx(
        runs["reinforce_pp"][1]["grad_norm"], rel=1e-6
    )
    norms = sorted(first.values())
    assert all(above / below > 1 + 1e-6 for below, above in pairwise(norms)), norms


def test_marks_of_presets(runs: dict[str, Rows]) -> None:
    assert all(
        row["value/loss"] > 0 and row["value/lr"] == 9e-6 and row["value/skipped"] == 0
        for row in runs["ppo"]
    )
    assert (
        runs["ppo"][0]["value/mean"] == 0 != runs["ppo"][1]["value/mean"]
        and "value/loss" not in runs["grpo"][0]
    )
    assert all(row["reward/baseline"] > 0 for row in runs["remax"])
    assert "reward/baseline" not in runs["grpo"][0]
    dapo = runs["dapo"][0]
    assert dapo["reward/overlong/mean"] < 0 and "groups/filtered" in dapo
    even = dapo["reward/megarl.rewards.rules:even_fraction/mean"]
    assert dapo["reward/mean"] == pytest.approx(even + dapo["reward/overlong/mean"])
    for name in (
        "grpo",
        "grpo_paper",
        "dapo",
        "dr_grpo",
        "gspo",
        "rloo",
        "reinforce_pp",
        "reinforce_pp_baseline",
    ):
        assert runs[name][0]["clip_frac"] > 0.01, (
            f"the second update of {name} meets the rollout's log-probs"
        )
    assert runs["gspo"][0]["clip_frac"] > runs["grpo"][0]["clip_frac"], (
        "the narrow bounds of a row's ratio"
    )


# --- options ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*OPTIONS, "distill", "distill_top_k"])
def test_every_option_trains(runs: dict[str, Rows], name: str) -> None:
    assert len(runs[name]) == (4 if name in (*RESUMED, "hostile") else 2)
    measured = [row["loss"] for row in runs[name] if not row.get("rollout/empty")]
    assert measured and all(map(math.isfinite, measured))


def test_the_divergence_over_top_tokens_is_the_loss(runs: dict[str, Rows]) -> None:
    for row, sampled in zip(runs["distill_top_k"], runs["distill"][:2], strict=True):
        assert (
            row["kl/teacher_top_k"] == pytest.approx(row["loss"], rel=1e-6)
            and row["kl/teacher"] > 0
        )
        assert row["grad_norm"] > 1e-3 and row["grad_norm"] != pytest.approx(
            sampled["grad_norm"], rel=1e-3
        )


def test_selected_tokens_are_treated_apart(runs: dict[str, Rows]) -> None:
    none, some = runs["clip_cov_no_share"][0], runs["clip_cov"][0]
    assert none["loss"] != pytest.approx(some["loss"], rel=1e-3)
    assert none["grad_norm"] != pytest.approx(some["grad_norm"], rel=1e-3)
    assert runs["kl_cov"][0]["loss"] != pytest.approx(none["loss"], rel=1e-3)


def test_bypass_changes_nothing_where_engine_and_trainer_agree(runs: dict[str, Rows]) -> None:
    """In fp32 they do; counted twice, the gap would still be small, so the unit test plants a large one."""
    for row, same in zip(runs["bypass"], runs["grpo"], strict=True):
        assert row["grad_norm"] == pytest.approx(same["grad_norm"], rel=1e-4)


def test_opsm_drops_tokens_and_says_so(runs: dict[str, Rows]) -> None:
    assert runs["opsm"][0]["correction/clipped"] > 0.01 and runs["opsm"][0]["correction/weight"] < 1
    assert runs["grpo"][0]["correction/clipped"] == 0 and runs["grpo"][0][
        "correction/ess"
    ] == pytest.approx(1)


def test_entropy_rises_with_its_bonus(runs: dict[str, Rows]) -> None:
    assert runs["entropy"][1]["entropy"] > runs["grpo"][1]["entropy"] + 0.02


def test_truncated_responses_are_masked_or_penalised(runs: dict[str, Rows]) -> None:
    for name in ("mask", "penalise"):
        assert 0.1 < runs[name][0]["length/truncated_frac"] < 1
    penalised = runs["penalise"][0]
    assert (
        penalised["reward/mean"] < penalised["reward/megarl.rewards.rules:even_fraction/mean"] - 1
    )
    assert runs["mask"][0]["groups/filtered"] > 0, "groups with fewer than two whole responses"


def test_flat_groups_are_refilled_and_counted(runs: dict[str, Rows]) -> None:
    with_, without = runs["filtered"][0], runs["unfiltered"][0]
    assert with_["groups/filtered"] > 0 and 1 <= with_["rollout/refills"] <= 2
    assert with_["reward/frac_zero_std"] > 0, "measured before any is filtered"
    assert (
        without["reward/frac_zero_std"] > 0
        and without["groups/filtered"] == without["rollout/refills"] == 0
    )
    for step, row in enumerate(runs["all_flat"]):
        assert (row["reward/frac_zero_std"], row["groups/kept_flat"], row["groups/filtered"]) == (
            1,
            8,
            8,
        )
        assert row["loss"] == row["grad_norm"] == 0
        assert row["rollout/refills"] == (step == 0), (
            "the next step asks for all that it may at once"
        )


def test_hostile_rewards_are_counted_and_the_run_goes_on(runs: dict[str, Rows]) -> None:
    bounds, empty, huge, kind = runs["hostile"]
    assert (
        bounds["reward/algorithm_rewards:hostile/nan"] > 0 and bounds["reward/total/overflow"] > 0
    )
    assert (
        bounds["samples/count"] + bounds["samples/dropped"] == 64 and bounds["update/skipped"] == 0
    )
    assert empty["reward/algorithm_rewards:hostile/error"] == empty["samples/dropped"] == 64
    assert (empty["rollout/empty"], empty["groups/empty"], empty["update/skipped"]) == (1, 8, 1)
    assert empty["loss"] is None, "nothing was measured"
    assert huge["update/skipped"] == huge["updates"] == 2 and math.isfinite(huge["loss"])
    assert (
        kind["update/skipped"] == 0 and 1e-3 < kind["grad_norm"] < 1e3 and kind["weights/verified"]
    )


def test_steps_and_an_outcome_beside_them(runs: dict[str, Rows]) -> None:
    alone, both = runs["process"][0], runs["process_and_outcome"][0]
    assert alone["reward/mean"] == pytest.approx(alone["reward/process/mean"])
    assert both["reward/mean"] == pytest.approx(both["reward/algorithm_rewards:coarse/mean"])
    assert alone["grad_norm"] != pytest.approx(both["grad_norm"], rel=1e-3)


@pytest.mark.exhaustive
def test_two_ranks_say_the_same_as_one(runs: dict[str, Rows], tmp_path: Path) -> None:
    """Greedy samples, refills, step rewards and selections come to every rank alike.

    After an update weights differ by rounding, so once in a while another token is sampled: then the second step trains
    on other samples, and says nothing.
    """
    same_samples = 0
    for name, rows in run_cases(tmp_path, "spread", ranks=2).items():
        for step, tolerance in ((0, 1e-5), (1, 1e-3)):
            here, one = rows[step], runs[name][step]
            if step == 0 or here["rollout/digest"] == one["rollout/digest"]:
                same_samples += step
                for key in ("loss", "grad_norm", "reward/mean"):
                    assert here[key] == pytest.approx(one[key], rel=tolerance, abs=1e-6), (
                        f"{name} step {step} {key}"
                    )
            assert step or here["rollout/digest"] == one["rollout/digest"], name
    assert same_samples > len(SPREAD) // 2
    assert set(SPREAD) <= {folder.name for folder in tmp_path.iterdir()}


@pytest.mark.parametrize("name", RESUMED)
def test_the_objectives_state_is_resumed(runs: dict[str, Rows], name: str) -> None:
    """Coefficient and reward statistics go on as if nothing had happened."""
    whole, resumed = runs[name], runs[f"{name}_resumed"]
    assert [row["step"] for row in resumed] == [2, 3]
    if name != "distill":
        coefs = [row["kl/coef"] for row in whole]
        assert coefs[0] == 0.1 and len(set(coefs)) == 4, "adapted at every step"
    for key in (
        "kl/teacher" if name == "distill" else "kl/coef",
        "loss",
        "grad_norm",
        "rollout/digest",
    ):
        assert [row[key] for row in resumed] == [row[key] for row in whole[2:]], key
