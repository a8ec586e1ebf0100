"""A Hugging Face `config.json`, read into the few numbers the rest of megarl needs. No torch here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["FAMILIES", "ModelShape", "read_model"]

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")  # each has a table in megarl/weights/models


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a decoder-only transformer, under Hugging Face's meaning."""

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool
    qkv_bias: bool
    qk_norm: bool
    rms_eps: float
    rope_theta: float
    max_position: int
    rope_scaling: Mapping[str, Any] = field(default_factory=dict)  # {} or llama3's
    experts: int = 0
    experts_per_token: int = 0
    moe_intermediate: int = 0
    norm_topk_prob: bool = True
    eos: tuple[int, ...] = ()

    @property
    def is_moe(self) -> bool:
        return self.experts > 0


def read_model(path: str | Path) -> ModelShape:
    """Read `path`/config.json.

    Raises FileNotFoundError or ValueError with the values and the remedy.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise FileNotFoundError(f"model.path={path} is not a directory; name a folder that holds a Hugging Face model")
    file = folder / "config.json"
    if not file.is_file():
        raise FileNotFoundError(
            f"model.path={path} holds no config.json; name a folder that holds a Hugging Face model"
        )
    try:
        raw = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is not JSON ({error})") from None
    return parse_model(raw, str(file))


def parse_model(raw: Mapping[str, Any], where: str) -> ModelShape:
    """`raw` is a parsed config.json; `where` names it in errors."""
    family = raw.get("model_type")
    if family not in FAMILIES:
        raise ValueError(f"{where}: model_type={family!r} is not supported; supported: {', '.join(FAMILIES)}")
    try:
        hidden, heads = int(raw["hidden_size"]), int(raw["num_attention_heads"])
        rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
        theta = float(rope.pop("rope_theta", None) or raw.get("rope_theta", 10000.0))
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind not in ("default", "llama3"):
            raise ValueError(f"{where}: rope_type={kind!r} is not supported; supported: default, llama3")
        eos = raw.get("eos_token_id")
        experts = int(raw.get("num_experts") or raw.get("num_local_experts") or 0) if family == "qwen3_moe" else 0
        for key in ("attention_bias", "mlp_bias"):
            if raw.get(key):
                raise ValueError(f"{where}: {key}=true is not supported; only qwen2's own bias is")
        if raw.get("hidden_act", "silu") != "silu":
            raise ValueError(f"{where}: hidden_act={raw['hidden_act']!r} is not supported; supported: silu")
        if raw.get("sliding_window") and raw.get("use_sliding_window"):
            raise ValueError(f"{where}: use_sliding_window is not supported; set it to false")
        if experts and (raw.get("mlp_only_layers") or int(raw.get("decoder_sparse_step") or 1) != 1):
            raise ValueError(
                f"{where}: dense layers among the experts (mlp_only_layers, decoder_sparse_step) are not supported"
            )
        return ModelShape(
            family=family,
            layers=int(raw["num_hidden_layers"]),
            hidden=hidden,
            heads=heads,
            kv_heads=int(raw.get("num_key_value_heads") or heads),
            head_dim=int(raw.get("head_dim") or (128 if family.startswith("qwen3") else hidden // heads)),
            intermediate=int(raw["intermediate_size"]),
            vocab=int(raw["vocab_size"]),
            tied=bool(raw.get("tie_word_embeddings", False)),
            qkv_bias=family == "qwen2",
            qk_norm=family.startswith("qwen3"),
            rms_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope_theta=theta,
            max_position=int(raw.get("max_position_embeddings", 4096)),
            rope_scaling={} if kind == "default" else rope,
            experts=experts,
            experts_per_token=int(raw.get("num_experts_per_tok") or 0),
            moe_intermediate=int(raw.get("moe_intermediate_size") or 0),
            norm_topk_prob=bool(raw.get("norm_topk_prob", False)),
            eos=tuple(eos) if isinstance(eos, list) else (() if eos is None else (int(eos),)),
        )
    except KeyError as error:
        raise ValueError(f"{where} has no {error.args[0]!r}; it is not a {family} config") from None
