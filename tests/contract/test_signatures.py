"""Every call of megarl into its GPU packages fits the signatures that the pinned wheels have (wheels.py)."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from calls import PROVIDES, check, from_text, uses
from wheels import pins

from megarl.config.random_model import hf_config
from megarl.config.schema import Create
from megarl.layout import Layout, Parallel
from megarl.models.registry import FAMILIES, parse_model, read_model
from megarl.trainer import megatron_config

ROOT = Path(__file__).resolve().parents[2]
RECORDED = json.loads(Path(__file__).with_name("signatures.json").read_text())
SOURCES = {
    f"megarl/{x.relative_to(ROOT / 'megarl')}": x.read_text()
    for x in sorted((ROOT / "megarl").rglob("*.py"))
}
USES = uses(SOURCES)
CONFIG = "megatron.core.transformer.transformer_config"


def test_every_call_fits():
    problems = check(USES, RECORDED)
    assert not problems, "\n".join(["record what is new by tests/contract/wheels.py", *problems])


@pytest.mark.parametrize(
    ("path", "old", "new", "message"),
    [
        (
            "megatron.core.optimizer.get_megatron_optimizer",
            "use_gloo_process_groups",
            "use_gloo",
            "unexpected keyword",
        ),
        (
            "megatron.core.optimizer.OptimizerConfig",
            "optimizer_cpu_offload=",
            "cpu_offload=",
            "unexpected keyword",
        ),
        (
            "megatron.core.models.gpt.GPTModel",
            "config,",
            "config, tokenizer,",
            "missing a required argument",
        ),
        (
            "megatron.core.tensor_parallel.RowParallelLinear().forward",
            "input_",
            "x, name=...",
            "unexpected keyword",
        ),
        (
            "megatron.core.pipeline_parallel.schedules.forward_backward_no_pipelining",
            "model,",
            "",
            "unexpected keyword",
        ),
        (
            "vllm.EngineArgs",
            "enable_sleep_mode",
            "sleep_mode",
            "unexpected keyword argument 'enable_sleep_mode'",
        ),
        ("vllm.LLM().sleep", "level", "depth", "unexpected keyword argument 'level'"),
        ("vllm.LLM().apply_model", "func", "", "too many positional"),
    ],
)
def test_a_change_of_a_package_is_seen(path, old, new, message):
    changed = copy.deepcopy(RECORDED)
    for entry in changed:
        if path in entry["signatures"]:
            assert old in entry["signatures"][path]
            entry["signatures"][path] = entry["signatures"][path].replace(old, new)
    problems = check(USES, changed)
    assert problems and all(message in problem for problem in problems)


@pytest.mark.parametrize(
    "path", ["vllm.SamplingParams", "megatron.core.optimizer.MegatronOptimizer().prepare_grads"]
)
def test_a_name_that_is_gone_is_seen(path):
    changed = copy.deepcopy(RECORDED)
    for entry in changed:
        entry["signatures"].pop(path, None)
    assert any(
        f"{path}: is not in the recorded packages" in problem for problem in check(USES, changed)
    )


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        (
            "rollout/vllm/engine.py",
            "wake_up(tags=",
            "wake_up(parts=",
            "unexpected keyword argument 'parts'",
        ),
        (
            "rollout/vllm/arguments.py",
            "prompt_logprobs=0",
            "prompts_logprobs=0",
            "unexpected keyword argument",
        ),
        (
            "trainer/optimizer.py",
            '"pin_cpu_grads"',
            '"pin_grads"',
            "unexpected keyword argument 'pin_grads'",
        ),
        (
            "trainer/optimizer.py",
            "chunk.zero_grad_buffer()",
            "chunk.zero_grads()",
            "is not in the recorded packages",
        ),
        (
            "trainer/optimizer.py",
            "part.get_parameters()",
            "part.parameters()",
            "is not in the recorded packages",
        ),
        (
            "trainer/optimizer.py",
            "part.get_main_grads",
            "part.main_grads",
            "is not in the recorded packages",
        ),
        (
            "trainer/layers.py",
            '"qk_layernorm": config',
            '"qk_norm": config',
            "unexpected keyword argument 'qk_norm'",
        ),
        (
            "trainer/layers.py",
            "super().forward(input_)",
            "super().forward()",
            "missing a required argument: 'input_'",
        ),
        (
            "trainer/parallel_groups.py",
            "seed, force_reset_rng",
            "force_reset_rng",
            "missing a required argument",
        ),
        (
            "rollout/vllm/loader_trace.py",
            "_place_kernel_tensors(layer, ",
            "_place_kernel_tensors(",
            "missing a required",
        ),
    ],
)
def test_a_mistake_of_ours_is_named_with_its_line(file, old, new, message):
    path = f"megarl/{file}"
    assert SOURCES[path].count(old) == 1
    problems = check(uses({path: SOURCES[path].replace(old, new)}), RECORDED)
    assert problems
    assert all(f"{path}:" in problem and message in problem for problem in problems)


@pytest.mark.parametrize("family", FAMILIES)
def test_settings_of_every_family_are_fields(family, monkeypatch):
    """They are assembled from several functions, so they are taken as they are on a GPU."""
    for name in ("TransformerConfig", "MLATransformerConfig"):
        monkeypatch.setattr(megatron_config, name, lambda name=name, **settings: (name, settings))
    create = {"family": family, "experts": 4 if FAMILIES[family].is_moe else 0, "tied": False}
    config = hf_config(Create.model_validate(create)) if FAMILIES[family].architecture else None
    shape = parse_model(config, family) if config else read_model(ROOT / "configs/models" / family)
    name, settings = megatron_config.transformer_config(  # type: ignore[misc]
        shape,
        Layout.of(Parallel(tensor=2), 2, 0),
        dtype=torch.bfloat16,
        dispatcher="alltoall",
        use_te=True,
    )
    for entry in RECORDED:
        if entry["package"] == "megatron-core":
            fused = dict.fromkeys(megatron_config.KERNELS, True)
            from_text(entry["signatures"][f"{CONFIG}.{name}"]).bind(**(settings | fused))
            ddp = "megatron.core.distributed.DistributedDataParallelConfig"
            from_text(entry["signatures"][ddp]).bind(overlap_grad_reduce=True, bucket_size=1)


def test_recorded_versions_are_those_that_are_pinned():
    pinned = pins((ROOT / "pyproject.toml").read_text())
    for entry in RECORDED:
        for python in entry["python"].split():
            found = [x for x, of in pinned if (x.name, of) == (entry["package"], python)]
            assert found, f"{entry['package']} is not installed with Python {python}"
            for requirement in found:
                assert requirement.specifier.contains(entry["version"]), (
                    f"{requirement}: {entry['version']} is recorded"
                )
    assert {entry["package"] for entry in RECORDED} <= PROVIDES.keys()
    assert all(len(entry["sha256"]) == 64 and entry["wheel"].endswith(".whl") for entry in RECORDED)
