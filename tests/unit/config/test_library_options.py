"""Options for vLLM and Megatron: fields of their dataclasses, refused where they would break a guarantee."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from megarl.config import library_options
from megarl.config.library_options import LIBRARIES, check_library_options
from megarl.config.load import parse_config

ENGINE, MEGATRON = LIBRARIES
ASYNC = {"enable_log_requests"}  # a field of AsyncEngineArgs, in the same file


def check(key: str, **options: object) -> list[str]:
    section, name = key.split(".")
    return list(check_library_options(parse_config({section: {name: options}})))


@pytest.mark.parametrize(
    ("key", "options"),
    [
        (
            ENGINE,
            {"max_num_seqs": 64, "max_num_batched_tokens": 8192, "enable_prefix_caching": False},
        ),
        (
            ENGINE,
            {
                "attention_backend": "FLASH_ATTN",
                "compilation_config": {"level": 3},
                "unsafe": False,
            },
        ),
        (
            MEGATRON,
            {"apply_rope_fusion": False, "overlap_grad_reduce": False, "bucket_size": 10_000_000},
        ),
        (MEGATRON, {}),
    ],
)
def test_what_changes_only_the_speed_passes(key, options):
    assert check(key, **options) == []


@pytest.mark.parametrize(
    ("key", "name", "value", "guarantee"),
    [
        (ENGINE, "seed", 1, "every layout samples the same tokens"),
        (ENGINE, "speculative_config", {}, "every layout samples the same tokens"),
        (
            ENGINE,
            "logprobs_mode",
            "raw_logprobs",
            "log-probs are those of the distribution that was sampled",
        ),
        (ENGINE, "dtype", "float16", "the engine computes the trainer's log-probs"),
        (ENGINE, "kv_cache_dtype", "fp8", "the engine computes the trainer's log-probs"),
        (ENGINE, "load_format", "auto", "every sync is verified"),
        (ENGINE, "tensor_parallel_size", 2, "the config's own key"),
        (ENGINE, "enable_eplb", True, "EPLB moves experts"),
        (ENGINE, "pipeline_parallel_size", 2, "no pipeline in a trainer's process"),
        (ENGINE, "nnodes", 2, "the plan of the sync"),
        (ENGINE, "skip_tokenizer_init", False, "the engine computes the trainer's log-probs"),
        (ENGINE, "enforce_eager", True, "the config's own key"),
        (MEGATRON, "tensor_model_parallel_size", 2, "the config's own key"),
        (MEGATRON, "recompute_granularity", "full", "the config's own key"),
        (MEGATRON, "params_dtype", "bf16", "the precision"),
        (MEGATRON, "hidden_dropout", 0.1, "a forward pass repeats"),
        (MEGATRON, "overlap_param_gather", True, "a sync reads whole weights"),
        (
            MEGATRON,
            "calculate_per_token_loss",
            False,
            "its gradient the same however tokens are divided",
        ),
        (MEGATRON, "num_layers", 3, "the model is that of config.json"),
    ],
)
def test_what_would_break_a_guarantee_names_it(key, name, value, guarantee):
    with pytest.raises(ValueError, match=guarantee) as error:
        check(key, **{name: value})
    assert f"{key}.{name}={value}" in str(error.value) and f"{key}.unsafe=true" in str(error.value)
    assert "\n" not in str(error.value)
    (warning,) = check(key, **{name: value}, unsafe=True)
    assert guarantee in warning


@pytest.mark.parametrize(
    ("key", "name", "near"),
    [(ENGINE, "max_num_seq", "max_num_seqs"), (MEGATRON, "apply_rop_fusion", "apply_rope_fusion")],
)
def test_a_misspelt_option_is_an_error_even_if_unsafe(key, name, near):
    with pytest.raises(ValueError, match=f"{name} is not a field of .*; did you mean {near}"):
        check(key, **{name: 1}, unsafe=True)


@pytest.mark.long  # importing vLLM
def test_fields_are_those_of_vllm():
    """Read from the source, they are what importing the library gives."""
    from vllm import EngineArgs

    assert {x.name for x in fields(EngineArgs)} == set(
        library_options._fields(*LIBRARIES[ENGINE][:2])
    ) - ASYNC


def named(key: str) -> set[str]:
    """The options of `key` that are refused."""
    return set(" ".join(LIBRARIES[key][3].values()).split())


def test_what_megarl_sets_itself_is_refused():
    """Of the engine's settings, but for the three that a CPU needs."""
    package = Path(library_options.__file__).parents[1]
    engine = package.joinpath("rollout/vllm/arguments.py").read_text()
    settings = engine.split("settings: dict")[1].split("}\n")[0]
    ours = set(re.findall(r'^ *"(\w+)": ', settings, re.MULTILINE))
    assert len(ours) > 10
    assert ours - named(ENGINE) == {
        "block_size", "kv_cache_memory_bytes", "enable_chunked_prefill",
    }  # fmt: skip
    trainer = package.joinpath("trainer/megatron_config.py").read_text()
    ours = set(re.findall(r'"(\w+)"(?:: |\] = )', trainer.partition("INIT_METHODS = ")[2]))
    assert len(ours) > 40
    assert ours - named(MEGATRON) == {
        "apply_rope_fusion", "moe_permute_fusion", "moe_router_fusion", "moe_shared_expert_overlap",
        "bias_activation_fusion", "bias_dropout_fusion", "deallocate_pipeline_outputs",
    } | {"silu", "quick_gelu"}  # fmt: skip


def test_without_the_library_only_names_are_trusted(monkeypatch):
    monkeypatch.setattr(library_options, "find_spec", lambda _name: None)
    monkeypatch.setattr(library_options, "_fields", library_options._fields.__wrapped__)
    assert check(ENGINE, max_num_seqs=1) == []
    with pytest.raises(ValueError, match="same tokens"):
        check(ENGINE, seed=1)
