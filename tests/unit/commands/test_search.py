"""Layouts that fit, and predicted steps beside published ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megarl.cli import main
from megarl.commands.search import predict_peers, search_layouts
from megarl.config.load import load_config
from megarl.config.schema import Config
from megarl.weights.plan.memory import plan_memory

CONFIGS = Path(__file__).parents[3] / "configs"
LONG = ("rollout.max_tokens=4096", "train.prompts_per_step=64", "rollout.samples_per_prompt=16")


def config_of(model: str, *overrides: str) -> Config:
    return load_config(
        CONFIGS / "quickstart.yaml",
        [*OVERRIDES, f"model.path={CONFIGS}/models/{model}", *overrides],
    )


OVERRIDES = (
    "model.create=null",
    "launch.processes=8",
    "launch.gpu=h100",
    "train.dtype=bf16",
    "stage=rl",
)


@pytest.mark.parametrize("model", ["deepseek_v3", "qwen3_235b_a22b", "qwen3_30b_a3b"])
def test_published_steps_are_predicted_within_a_factor_of_two(model: str) -> None:
    peers = predict_peers(config_of(model), gpu="h100")
    assert peers
    for peer in peers:
        assert 0.5 < peer["step_seconds"] / peer["published_step_seconds"] < 2, peer
    published = sorted(peers, key=lambda peer: peer["published_step_seconds"])
    assert published == sorted(peers, key=lambda peer: peer["step_seconds"])


def test_what_is_found_fits_and_is_in_order() -> None:
    config = config_of("qwen3_30b_a3b", *LONG)
    rows = search_layouts(config, gpus=8, gpu="h100")
    times = [row.step_seconds for row in rows]
    assert times == sorted(times) and len({tuple(row.overrides) for row in rows}) == len(rows) > 3
    for row in rows:
        plan = plan_memory(config_of("qwen3_30b_a3b", *LONG, *row.overrides), gpu="h100")
        assert not plan.problems and plan.largest[2].peak_bytes == row.peak_bytes


def test_separate_gpus_are_divided() -> None:
    split = ("launch.topology=split", "rollout.replicas=1", *LONG)
    best = search_layouts(config_of("qwen3_30b_a3b", *split), gpus=32, gpu="h200")[0]
    found = config_of("qwen3_30b_a3b", *split, *best.overrides)
    engines = (found.rollout.replicas or 0) * found.rollout.ranks_per_replica
    assert (found.launch.processes or 0) + engines == 32


def test_nothing_fits() -> None:
    with pytest.raises(ValueError, match="no layout of deepseek_v3 fits 16 H100: use more GPUs"):
        search_layouts(config_of("deepseek_v3"), gpus=16, gpu="h100")


def test_the_command_writes_a_config_that_passes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "found.yaml"
    model = f"model.path={CONFIGS}/models/qwen3_30b_a3b"
    command = [
        "plan",
        str(CONFIGS / "quickstart.yaml"),
        *OVERRIDES,
        model,
        *LONG,
        "--search",
        "--gpus=8",
    ]
    assert main([*command, "--json", f"--write={file}"]) == 0
    shown: Any = json.loads(capsys.readouterr().out)
    assert list(shown) == ["model", "gpus", "gpu", "seconds", "rows", "peers"]
    keys = ["overrides", "step_seconds", "parts", "peak_bytes", "kv_sequences", "why"]
    assert list(shown["rows"][0]) == keys
    assert list(shown["rows"][0]["parts"]) == ["generate", "logprobs", "update", "sync"]
    assert main(["plan", str(file)]) == 0
    assert main([*command[:2], "--gpus=8"]) == 2
