"""Weights into real engines from every source layout: log-probs are the transformers model's, faults are refused.

One launch holds many models and layouts: starting engines is what costs.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
from start_ranks import run_ranks, start_ranks

RANKS = Path(__file__).with_name("sync_ranks.py")
BOUND = 1e-4


FOUR = {"qwen3": 2, "qwen3_moe": 2}  # model -> ranks of an engine
TWO = {"qwen3_moe": 1, "llama": 1, "qwen3": 2}
OTHERS = {
    "qwen2": 2,
    "qwen3_untied_kv1": 2,
    "deepseek_v3": 2,
    "mixtral": 2,
    "glm4_moe": 2,
    "gpt_oss": 2,
}
# with the above: dense, experts and latent attention in engines of one and two ranks, one and two replicas
MORE = [
    (1, {"qwen3": 1, "qwen3_moe": 1, "llama": 1, "deepseek_v3": 1, "gpt_oss": 1}),
    (2, {"qwen3": 1, "llama": 2}),
    (2, {"deepseek_v3": 1, "qwen3_moe": 2}),
    (4, {"deepseek_v3": 2, "llama": 2}),
]


def launch(folder: Path, world: int, models: dict[str, int], *, faults: bool = False) -> list[dict]:
    """With `faults`, some are planted in the first model."""
    cases = [f"{name}:{tensor}" for name, tensor in models.items()]
    cases[0] += ":faults" * faults
    run_ranks(RANKS, world, str(folder), *cases)
    return [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(world)]


@pytest.fixture(scope="module")
def four(tmp_path_factory) -> list[dict]:
    """4 ranks: two replicas."""
    return launch(tmp_path_factory.mktemp("four"), 4, FOUR, faults=True)


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> list[dict]:
    """2 ranks: one replica or two."""
    return launch(tmp_path_factory.mktemp("two"), 2, TWO, faults=True)


def check_model(seen: list[dict], name: str) -> None:
    for rank in seen:
        found = rank[name]
        assert found["before"], "an engine with dummy weights must refuse"
        worst = max(found["errors"].values())
        assert math.isfinite(worst) and worst < BOUND, found["errors"]
        assert found["unchanged"] == 0.0, "a sync of unchanged weights changes no log-prob"
        assert found["stale"] > 100 * BOUND, "the oracle must see that weights changed"
        assert found["old version"], "a version that is not held is refused"
        assert found["tokens"] == seen[0][name]["tokens"], (
            "all replicas draw the same tokens from the same seeds"
        )
        for kept, received in found["bytes"].values():
            assert 0 <= received < kept
        assert len(found["errors"]) >= 3, "three syncs in a row"


def test_turns_aborts_and_what_one_rank_alone_was_told(two):
    """An engine of two ranks, which make the same steps whatever reaches which of them."""
    for seen in (rank["qwen3"]["turns"] for rank in two):
        assert max(seen["errors"]) < BOUND, "of both turns, and of what was sampled before an abort"
        assert all(seen["echo"]) and len(seen["echo"]) == 5
        assert seen["aborted"] == [["abort", 2, 3]] * 2 + [["abort", 0, 3]], seen["aborted"]
        assert seen["rest"] == [[0, 0], [1, 0], [3, 0], [9, 0]], "aborted ones do not come back"
        assert "sample 0 of prompt 0 cannot be aborted" in seen["twice"]
        assert seen["first"] == two[0]["qwen3"]["turns"]["first"] and len(seen["first"]) == 5
        assert seen["strange"] == (
            "sample 0 of prompt 1 was submitted to rank 1 of an engine replica, but not its first "
            "rank, which decides what the replica samples"
        )


@pytest.mark.long
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", FOUR)
def test_four_ranks(four, name):
    check_model(four, name)


@pytest.mark.parametrize("name", TWO)
def test_two_ranks(two, name):
    check_model(two, name)


@pytest.mark.long
def test_other_families(tmp_path):
    seen = launch(tmp_path, 2, OTHERS)
    for name in OTHERS:
        check_model(seen, name)


@pytest.mark.long
@pytest.mark.exhaustive
@pytest.mark.parametrize(("world", "models"), MORE)
def test_more_engines(tmp_path, world, models):
    seen = launch(tmp_path, world, models)
    for name in models:
        check_model(seen, name)


@pytest.mark.long
def test_every_family_syncs_in_bf16(tmp_path):
    """Engines keep some tensors in fp32 (GLM's router), which arrive in bf16."""
    names = sorted({*FOUR, *TWO, *OTHERS})
    run_ranks(RANKS, 1, str(tmp_path), "bf16", *names)
    seen = json.loads((tmp_path / "rank_0.json").read_text())
    assert seen.keys() == set(names)
    for name, found in seen.items():
        assert found["error"] < 0.1 and found["stale"] > 1, (name, found)
        assert found["same"], name


def test_local_bytes_do_not_travel(two):
    assert two[0]["llama"]["bytes"]["dp2"][1] == 0  # each rank trains and samples on all of it
    assert two[0]["llama"]["bytes"]["tp2"][1] > 0
    kept, received = two[0]["qwen3"]["bytes"]["tp2"]
    # the engine shards as the trainer does, but for the vocabulary's padding
    assert received < kept / 10


@pytest.mark.long
@pytest.mark.exhaustive
def test_layouts_covered(four):
    kept, received = four[0]["qwen3"]["bytes"]["tp2 dp2"]
    assert received < kept / 10
    assert {"tp2 dp2", "pp2 dp2", "tp2 pp2"} <= set(four[0]["qwen3"]["bytes"])
    assert len(four[0]["qwen3_moe"]["bytes"]) == 7  # and three with expert parallelism


@pytest.mark.parametrize(
    "launched", ["two", pytest.param("four", marks=[pytest.mark.long, pytest.mark.exhaustive])]
)
def test_faults_are_refused_on_all_ranks_and_can_be_healed(launched, request):
    for rank in request.getfixturevalue(launched):
        faults = rank["faults"]
        for flipped in (
            "flipped",
            "flipped, streamed",
        ):  # which message, of which ranks and tensors
            where = r"arrived corrupted: message \d+ of \d+ \(round \d+\), rank \d -> rank \d: (model|lm_head)"
            assert re.search(where, faults[flipped]), faults[flipped]
        assert "The engine keeps its previous version" in faults["flipped"]
        assert faults["kept"] and all(faults["kept"]), "the same tokens and log-probs as before"
        assert faults["new version"] and faults["healed"] < BOUND and faults["streamed"] < BOUND
        assert "The engine refuses prompts" in faults["flipped, streamed"]
        assert "model.norm.weight (absent)" in faults["missing tensor"]
        assert re.search(
            r"rank \d: the engine's .* model.layers.1.self_attn.v_proj.weight \(", faults["table"]
        )
        assert "rank 0: the trainer has no parameter" in faults["missing parameter"]
        assert "differ from the trainer's by" in faults["probe"]
        for after in ("after flip, streamed", "after missing", "after probe"):
            assert "no verified weights" in faults[after]
        assert faults["recovered"] < BOUND


@pytest.mark.long
def test_the_engine_answers_as_before_when_a_rank_dies_in_the_middle_of_a_sync(tmp_path):
    processes = start_ranks(RANKS, 2, str(tmp_path), "dies", "llama")
    said = [process.communicate(timeout=400)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 9], "\n".join(
        text[-2000:] for text in said
    )
    seen = json.loads((tmp_path / "rank_0.json").read_text())
    assert re.search(
        r"rank 1 did not .* in flight: message \d+ of \d+ .*rank \d -> rank \d: model", seen["said"]
    ), seen
    assert "The engine keeps its previous version" in seen["said"]
    assert seen["same"], "version 1, with the log-probs it had"
