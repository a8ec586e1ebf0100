"""What does not go together with adapters is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from megarl.config.load import parse_config
from megarl.config.validate import check_config
from megarl.models.lora import peft_config
from megarl.models.shards import Table
from megarl.platform.env import Env

MOE = {"family": "qwen3_moe", "experts": 4}
MLA = {"family": "deepseek_v3", "experts": 4, "head_dim": 64}


def check(lora: dict[str, Any], create: dict[str, Any] | None = None, **sections: Any) -> None:
    check_config(parse_config({"model": {"create": create or {}}, "lora": lora, **sections}), Env())


@pytest.mark.parametrize(
    ("lora", "create", "sections", "parts"),
    [
        (
            {"targets": ["q_prj"]},
            {},
            {},
            ["lora.targets: q_prj", "choose from down_proj, gate_proj, k_proj"],
        ),
        ({"targets": ["q_proj", "gate"]}, MOE, {}, ["gate is no linear layer that can be adapted"]),
        ({"targets": ["lm_head", "embed_tokens"]}, {}, {}, ["lm_head, embed_tokens"]),
        (
            {"targets": ["gate_proj"]},
            {"family": "gpt_oss", "experts": 4},
            {},
            ["k_proj, o_proj, q_proj, v_proj"],
        ),
        ({"dropout": 0.1}, {}, {}, ["lora.dropout=0.1", "set it to 0"]),
        ({}, {}, {"stage": "reward_model"}, ["stage: reward_model", "remove lora"]),
        ({}, {}, {"algorithm": {"preset": "ppo"}}, ["algorithm.advantage=gae"]),
        (
            {"sync": "adapter"},
            MOE,
            {},
            ["down_proj, gate_proj, up_proj of experts", "lora.sync=merged"],
        ),
        ({"sync": "adapter"}, MLA, {}, ["of experts", "lora.sync=merged"]),
        (
            {"sync": "adapter", "targets": ["o_proj"]},
            MLA,
            {},
            ["latent attention", "lora.sync=merged"],
        ),
        ({"sync": "adapter", "rank": 600}, {}, {}, ["lora.rank=600", "512"]),
        ({"sync": "adapter"}, {}, {"rollout": {"sleep_level": 2}}, ["rollout.sleep_level=2"]),
        (
            {},
            MLA,
            {"moe": {"bias_update_rate": 0.1}},
            ["moe.bias_update_rate=0.1 changes the base"],
        ),
        (
            {"sync": "adapter"},
            {},
            {"launch": {"topology": "split"}},
            ["split moves whole weights", "lora.sync=merged"],
        ),
        (
            {},
            {},
            {"rollout": {"quantization": "fp8"}, "train": {"dtype": "bf16"}},
            ["rollout.quantization=fp8", "none"],
        ),
        ({"path": "nowhere"}, {}, {}, ["lora.path=nowhere has no adapter_config.json"]),
        ({"sync": "both"}, {}, {}, ["lora.sync", "merged", "adapter"]),
        ({"rank": 0}, {}, {}, ["lora.rank"]),
    ],
)
def test_refusals(
    lora: dict[str, Any], create: dict[str, Any], sections: dict[str, Any], parts: list[str]
) -> None:
    with pytest.raises((ValueError, FileNotFoundError)) as refused:
        check(lora, create, **sections)
    assert all(part in str(refused.value) for part in parts), refused.value


@pytest.mark.parametrize(
    ("lora", "create", "sections"),
    [
        ({}, {}, {}),
        ({}, MOE, {}),
        ({"sync": "adapter", "rank": 5}, {}, {}),
        ({"sync": "adapter", "targets": ["q_proj", "v_proj"]}, MOE, {}),
        ({"dropout": 0.1}, {}, {"stage": "sft"}),
        ({}, {}, {"launch": {"topology": "split"}}),
        ({}, MOE, {"rollout": {"router_replay": "engine"}}),
        ({"sync": "adapter"}, {}, {"precision": {"fp8": {"emulate": True}}}),
        ({"targets": ["w1"]}, {"family": "mixtral", "experts": 4}, {}),
    ],
)
def test_allowed(lora: dict[str, Any], create: dict[str, Any], sections: dict[str, Any]) -> None:
    check(lora, create, **sections)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"r": 8}, "lora.rank=4, but the adapter"),
        ({"lora_alpha": 16}, "lora.alpha=8, but the adapter"),
        ({"use_dora": True}, "use_dora=True is not supported"),
        ({"bias": "all"}, "bias=all is not supported"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"r": None}, "adapter_config.json: r=null is invalid"),
    ],
)
def test_an_adapter_to_begin_with_must_fit(
    tmp_path: Path, change: dict[str, Any], part: str
) -> None:
    config = peft_config("base", Table((), {}, ()), rank=4, alpha=8.0, dropout=0.0)
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    shapes = {"lora_A": (4, 128), "lora_B": (128, 4)}
    tensors = {
        f"base_model.model.model.layers.{layer}.self_attn.q_proj.{part}.weight": np.zeros(shape)
        for layer in range(2)
        for part, shape in shapes.items()
    }
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    check({"rank": 4, "alpha": 8.0, "targets": ["q_proj"], "path": str(tmp_path)})
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | change))
    with pytest.raises(ValueError) as refused:
        check({"rank": 4, "alpha": 8.0, "targets": ["q_proj"], "path": str(tmp_path)})
    assert part in str(refused.value)
