"""No key of a config.json that transformers applies is read as if it were not there."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from megarl.config.model import Create
from megarl.config.random_model import hf_config
from megarl.models.registry import FAMILIES, parse_model

IDS = torch.arange(3, 27)[None]
# sizes that every table has, and what is of outputs or of the loader
LEFT_OUT = {
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "return_dict",
    "dtype",
    "architectures",
}
MORE: dict[str, Any] = {
    "per_layer_config": {"1": {"rms_norm_eps": 0.5}},
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_theta": 500.0,
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
    "original_max_position_embeddings": 8,
    "partial_rotary_factor": 0.25,
    "num_local_experts": 2,
    "num_experts": 2,
    "sliding_window": 8,
}


def build(raw: dict[str, Any]) -> Any:
    import transformers

    values = dict(raw)
    config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


def others(key: str, value: Any) -> list[Any]:
    """Values of a key that are not the one it has."""
    more = [MORE[key]] if key in MORE else []
    match value:
        case bool():
            return [not value]
        case int():
            return [*more, value + 1, max(1, value // 2)]
        case float():
            return [*more, 2 * value + 0.5]
        case str():
            return ["gelu"]
        case None:
            return more or [True, 2, 0.5]
    return more


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.architecture])
def test_what_transformers_applies_is_read_or_refused(name: str) -> None:
    family = FAMILIES[name]
    sizes = {
        "hidden": 64,
        "head_dim": 32,
        "vocab": 67,
        "kv_heads": 4 if name == "deepseek_v3" else 2,
    }
    raw = hf_config(Create(family=name, experts=4 if family.is_moe else 0, **sizes))
    shape = parse_model(raw, "config.json")
    model = build(raw)
    state = model.state_dict()
    keys = {field.name for field in dataclasses.fields(type(model.config))} | MORE.keys()
    with torch.no_grad():
        expected = model(IDS).logits
        for key in sorted(keys - LEFT_OUT):
            for value in others(key, raw.get(key, getattr(model.config, key, None))):
                changed = raw | {key: value}
                try:
                    read = parse_model(changed, "config.json")
                except ValueError:
                    continue
                if (
                    dataclasses.replace(read, eos=shape.eos, max_position=shape.max_position)
                    != shape
                ):
                    continue
                try:
                    other = build(changed)
                except Exception:  # noqa: BLE001 (transformers refuses it)
                    continue
                if key in ("head_dim", "num_key_value_heads") and read.latent:
                    continue  # vLLM reads neither, transformers cannot use another value
                other.load_state_dict(state)
                assert torch.allclose(other(IDS).logits, expected, atol=1e-5), f"{key}={value}"


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("llama", {"qkv_bias": True}),
        ("llama", {"logit_scale": 0.5}),
        ("qwen2", {"qk_norm": True}),
        ("qwen3", {"is_causal": False}),
        ("qwen2", {"dual_chunk_attention_config": {"chunk_size": 8192}}),
        ("deepseek_v3", {"index_topk": 2048}),
        ("deepseek_v3", {"llama_4_scaling": {"beta": 0.1}}),
        ("glm4_moe", {"sliding_window": 128}),
    ],
)
def test_what_only_vllm_applies_is_refused(name: str, values: dict[str, Any]) -> None:
    raw = hf_config(Create(family=name, experts=4 if FAMILIES[name].is_moe else 0))
    (key,) = values
    with pytest.raises(ValueError, match=rf"^config\.json: {key}=.* is not supported for {name}"):
        parse_model(raw | values, "config.json")
