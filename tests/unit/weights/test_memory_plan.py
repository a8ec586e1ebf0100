"""The plan of memory: its arithmetic by hand, what it refuses, and remedies that pass."""

from __future__ import annotations

import json
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from megarl.config.device_memory import activations
from megarl.config.load import load_config, parse_config, resolved_yaml
from megarl.config.schema import Config
from megarl.config.validate import model_shape
from megarl.layout import Layout
from megarl.weights.plan.from_config import plan_weights
from megarl.weights.plan.memory import check_memory, describe_memory, plan_memory
from megarl.weights.plan.memory_phases import PHASES
from megarl.weights.plan.memory_sizes import GPUS, training_state

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
TRAINER = [
    "weights",
    "gradients",
    "optimizer",
    "activations",
    "logits",
    "staged",
    "engine",
    "not_tensors",
]
ENGINE = ["weights", "kv_cache", "graphs", "staged", "not_tensors"]
SHIPPED = {
    "gpu/qwen3_30b_a3b_8gpu.yaml": "qwen3_30b_a3b",
    "gpu/qwen3_235b_a22b_64gpu.yaml": "qwen3_235b_a22b",
    "qwen3_235b_a22b.yaml": "qwen3_235b_a22b",
    "gpt_oss_120b.yaml": "gpt_oss_120b",
    "glm_4_5.yaml": "glm_4_5",
    "llama_3_1_405b.yaml": "llama_3_1_405b",
    "deepseek_v3.yaml": "deepseek_v3",
    "kimi_k2.yaml": "kimi_k2",
}
BASE: dict[str, Any] = {
    "parallel": {"tensor": 2},
    "rollout": {"tensor": 2, "sleep_level": 2, "max_prompt_tokens": 1024, "max_tokens": 8192},
    "train": {"recompute": "full", "offload": ["gradients", "optimizer"], "updates_per_step": 4},
    "launch": {"processes": 8, "gpu": "h100"},
}


def shipped(file: str, *overrides: str) -> Config:
    return load_config(CONFIGS / file, [f"model.path={CONFIGS}/models/{SHIPPED[file]}", *overrides])


def config_of(model: str, **changes: dict[str, Any]) -> Config:
    values = {section: dict(settings) for section, settings in BASE.items()}
    for section, settings in changes.items():
        values[section] = values.get(section, {}) | settings
    return parse_config({"model": {"path": str(CONFIGS / "models" / model)}, **values})


@pytest.mark.parametrize("file", SHIPPED)
def test_shipped_configs_fit_the_gpu_that_they_name(file: str) -> None:
    config = shipped(file)
    plan = plan_memory(config, gpu=config.launch.gpu or "h100")
    assert not plan.problems, str(plan.problems[0])
    values = json.loads(json.dumps(plan.as_json()))
    assert values["fits"] and values["problems"] == []
    assert values.keys() == {
        "gpu",
        "gpu_bytes",
        "fits",
        "largest",
        "trainer",
        "engine",
        "host",
        "problems",
    }
    for side, names in (("trainer", TRAINER), ("engine", ENGINE)):
        for name, phase in values[side]["phases"].items():
            assert name in PHASES.split()
            assert [*phase["components"]] == names
            assert sum(phase["components"].values()) == phase["peak_bytes"] <= plan.gpu.bytes
    largest = values["largest"]
    peak = values[largest["side"]]["phases"][largest["phase"]]
    assert peak["rank"] == largest["rank"]
    assert values["engine"]["kv"]["waves"] >= 1
    assert (
        f"{peak['peak_bytes'] / 1e9:.1f} of the {plan.gpu.bytes / 1e9:.1f} GB"
        in describe_memory(plan)
    )


def test_sequences_of_the_64_gpus() -> None:
    kv = plan_memory(shipped("gpu/qwen3_235b_a22b_64gpu.yaml")).kv
    assert kv["sequence_tokens"] == 9216 and kv["sequences"] >= 1000 and kv["waves"] == 1


def test_state_of_a_rank_worked_by_hand() -> None:
    """Qwen3-30B-A3B, tensor 2, expert 8 of 8 ranks: experts have no data ranks, the rest has 4."""
    config = shipped("gpu/qwen3_30b_a3b_8gpu.yaml")
    shape = model_shape(config)
    state = training_state(config, shape, Layout.of(config.parallel.sizes, 8, 0))
    experts = 48 * 16 * 3 * 2048 * 768
    layer = 2 * 2048 + 2 * 128 + 128 * 2048 + 2048 * (32 + 2 * 4) * 128 // 2 + 2048 * 32 * 128 // 2
    others = 48 * layer + 2048 + 2 * 2048 * 151936 // 2
    assert others % 512 == experts % 128 == 0
    number = experts + others
    assert (state.weights, state.gradients) == (2 * number, 4 * number)
    assert state.optimizer == 12 * (experts + others // 4)
    engine = plan_memory(config).engine["rollout"].components
    # tensor 4: each rank has one of the four key-value heads, and a quarter of the vocabulary
    attention = 2048 * (8 + 2) * 128 + 2048 * 8 * 128
    layer = 2 * 2048 + 2 * 128 + 128 * 2048 + attention + 128 * 3 * 2048 * 192
    assert engine["weights"] == 2 * (48 * layer + 2048 + 2 * 2048 * 151936 // 4)


def test_activations_worked_by_hand() -> None:
    """Full recompute keeps the inputs of the layers, once for each micro-batch in flight."""
    config = shipped("gpu/qwen3_235b_a22b_64gpu.yaml")
    shape = model_shape(config)
    first = activations(config, shape, Layout.of(config.parallel.sizes, 64, 0))
    layer = 12 * 4096 + 4 * 64 * 128 + 4 * 4 * 128 + 8 * (4 * 4096 + 6 * 1536)
    assert first.layers == 4 * 24 * 2 * 4096 * 16384 // 4 + 2 * (16384 * layer // 4)
    assert first.logits == 0


@pytest.mark.parametrize("file", SHIPPED)
def test_a_sync_adds_no_more_than_planned(file: str) -> None:
    """Against the plan of the transfers, which takes seconds."""
    config = shipped(file)
    extra = plan_weights(config)[1]["peak_extra_bytes"]
    peak = plan_memory(config, gpu=config.launch.gpu or "h100").engine["sync"].components["staged"]
    assert extra <= peak
    if config.rollout.sleep_level == 2:  # nothing is staged
        assert peak < 2.5 * extra


WRONG: dict[str, tuple[str, dict[str, dict[str, Any]], set[tuple[str, str, str]]]] = {
    # what is changed of BASE, and problems that are found
    "trainer built twice": (
        "qwen3_8b",
        {
            "parallel": {"tensor": 1},
            "rollout": {"tensor": 1},
            "train": {"offload": ["optimizer"]},
            "launch": {"processes": 1},
        },
        {("trainer", "startup", "optimizer")},
    ),
    "optimizer state": (
        "qwen3_30b_a3b",
        {"parallel": {"tensor": 2, "expert": 4}, "launch": {"processes": 4}},
        {("trainer", "update", "optimizer"), ("trainer", "save", "optimizer")},
    ),
    "activations": (
        "qwen3_8b",
        {"train": {"recompute": "none", "max_tokens_per_microbatch": 32768}},
        {("trainer", "update", "activations")},
    ),
    "rows too long": (
        "qwen3_8b",
        {
            "rollout": {"max_tokens": 31000, "gpu_memory_utilization": 0.8},
            "train": {"recompute": "none"},
        },
        {("trainer", "update", "activations")},
    ),
    "engine beside the trainer": (
        "qwen3_8b",
        {"rollout": {"sleep_level": 0, "gpu_memory_utilization": 0.9}},
        {("trainer", "update", "engine")},
    ),
    "log-probs in large batches": (
        "qwen3_8b",
        {"train": {"max_tokens_per_logprob_batch": 2_000_000}},
        {("trainer", "logprobs", "activations")},
    ),
    "nothing is offloaded": (
        "qwen3_30b_a3b",
        {"parallel": {"expert": 8}, "train": {"offload": []}},
        {("engine", "rollout", "weights")},
    ),
    "engine's weights": (
        "qwen3_235b_a22b",
        {"parallel": {"tensor": 4, "pipeline": 4, "expert": 16}, "launch": {"processes": 64}},
        {("engine", "rollout", "weights")},
    ),
    "no room for a sequence": (
        "qwen3_8b",
        {"rollout": {"gpu_memory_utilization": 0.31}},
        {("engine", "rollout", "kv_cache")},
    ),
    "sync in large rounds": (
        "qwen3_8b",
        {"sync": {"round_bytes": 30 << 30}},
        {("trainer", "sync", "staged")},
    ),
    "weights of trainer and engine": (
        "qwen3_235b_a22b",
        {
            "parallel": {"tensor": 4, "pipeline": 4, "expert": 8},
            "rollout": {"tensor": 8, "gpu_memory_utilization": 0.95},
            "train": {"offload": ["gradients", "optimizer", "weights"]},
            "launch": {"processes": 64},
        },
        {("trainer", "update", "optimizer"), ("trainer", "sync", "engine")},
    ),
    "a critic": (
        "qwen3_30b_a3b",
        {"parallel": {"expert": 8}, "algorithm": {"preset": "ppo"}},
        {("trainer", "update", "optimizer")},
    ),
    "separate engines": (
        "qwen3_235b_a22b",
        {
            "parallel": {"tensor": 4, "pipeline": 8, "expert": 16},
            "rollout": {"tensor": 8, "sleep_level": 0},
            "train": {"offload": []},
            "launch": {"topology": "split", "processes": 128},
        },
        {("engine", "rollout", "weights")},
    ),
    "a probe's pass": (
        "qwen3_235b_a22b",
        {
            "parallel": {"tensor": 4, "pipeline": 4, "expert": 16},
            "rollout": {"tensor": 8, "gpu_memory_utilization": 0.95},
            "train": {
                "offload": ["gradients", "optimizer", "weights"],
                "max_tokens_per_logprob_batch": 262144,
            },
            "launch": {"processes": 64},
        },
        {("trainer", "probe", "engine")},
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused_with_a_remedy_that_fits(name: str) -> None:
    model, changes, expected = WRONG[name]
    config = config_of(model, **changes)
    plan = plan_memory(config)
    found = {(x.side, x.phase, x.component) for x in plan.problems}
    assert expected <= found
    assert not plan.as_json()["fits"]
    assert all(x.bytes > x.limit for x in plan.problems)
    [remedy] = {x.remedy for x in plan.problems}
    assert remedy, "none was found"
    with pytest.raises(ValueError, match=rf"set {remedy[0].split('=')[0]}=") as refused:
        check_memory(config, config.launch.processes or 0, "")
    print(refused.value)
    mended = with_overrides(config, remedy)
    assert not plan_memory(mended).problems
    for left_out in remedy:  # all of it is needed
        others = [override for override in remedy if override != left_out]
        with suppress(ValueError):  # sizes that contradict each other
            assert plan_memory(with_overrides(config, others)).problems


def with_overrides(config: Config, overrides: Any) -> Config:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "c.yaml"
        file.write_text(resolved_yaml(config))
        return load_config(file, list(overrides))


def test_the_gpu_is_named_or_found() -> None:
    config = config_of("qwen3_8b", launch={"gpu": None})
    assert check_memory(config, 8, "") == "not checked: no GPU here, and launch.gpu is null"
    assert "the memory of NVIDIA L40S is not known" in check_memory(config, 8, "NVIDIA L40S")
    assert "of the 150.1 GB of each H200" in check_memory(config, 8, "NVIDIA H200")
    named = config_of("qwen3_8b", launch={"gpu": "h100"})
    assert "of the 84.9 GB of each H100" in check_memory(named, 8, "NVIDIA H200")
    for gpu in ("", "NVIDIA H100 80GB HBM3"):
        with pytest.raises(
            ValueError, match=r"16 processes .* need launch.gpu, .* h100, h200, b200"
        ):
            check_memory(config, 16, gpu)


def test_a_larger_gpu_fits_more() -> None:
    sizes = [plan_memory(config_of("qwen3_8b"), gpu=name).kv["sequences"] for name in GPUS]
    assert sizes == sorted(sizes) and sizes[0] < sizes[1]
