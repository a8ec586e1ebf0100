"""A Hugging Face `config.json`, read into the few numbers the rest of megarl needs. No torch here."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["FAMILIES", "ModelShape", "read_model"]

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")  # each has a table in megarl/weights/models
LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")  # of its rope


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
        raise ValueError(f"{file} is not JSON ({error}); mend it, or name another model") from None
    return parse_model(raw, str(file))


def parse_model(raw: Any, where: str) -> ModelShape:
    """`raw` is a parsed config.json; `where` names it in errors."""
    if not isinstance(raw, Mapping):
        raise ValueError(f"{where} holds a {type(raw).__name__}, not an object; name a Hugging Face model")
    family = raw.get("model_type")
    if family not in FAMILIES:
        raise ValueError(f"{where}: model_type={family!r} is not supported; supported: {', '.join(FAMILIES)}")
    _refuse_unsupported(raw, where)
    values = _Values(raw, where)
    hidden, heads = values.size("hidden_size"), values.size("num_attention_heads")
    if raw.get("head_dim") is None and not family.startswith("qwen3") and hidden % heads:
        raise ValueError(
            f"{where}: hidden_size={hidden} is not divisible by num_attention_heads={heads}; give head_dim"
        )
    is_moe, experts = family == "qwen3_moe", "num_experts"
    if raw.get(experts) is None and "num_local_experts" in raw:
        experts = "num_local_experts"
    rope = values.rope()
    return ModelShape(
        family=family,
        layers=values.size("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=values.size("num_key_value_heads", heads),
        head_dim=values.size("head_dim", 128 if family.startswith("qwen3") else hidden // heads),
        intermediate=values.size("intermediate_size"),
        vocab=values.size("vocab_size"),
        tied=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=family == "qwen2",
        qk_norm=family.startswith("qwen3"),
        rms_eps=values.number("rms_norm_eps", 1e-6),
        rope_theta=rope.pop("rope_theta"),
        max_position=values.size("max_position_embeddings", 4096),
        rope_scaling=rope,
        experts=values.size(experts) if is_moe else 0,
        experts_per_token=values.size("num_experts_per_tok") if is_moe else 0,
        moe_intermediate=values.size("moe_intermediate_size") if is_moe else 0,
        norm_topk_prob=bool(raw.get("norm_topk_prob", False)),
        eos=values.token_ids("eos_token_id"),
    )


def _refuse_unsupported(raw: Mapping[str, Any], where: str) -> None:
    for key in ("attention_bias", "mlp_bias"):
        if raw.get(key):
            raise ValueError(f"{where}: {key}=true is not supported; only qwen2's own bias is")
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"{where}: hidden_act={raw['hidden_act']!r} is not supported; supported: silu")
    if raw.get("sliding_window") and raw.get("use_sliding_window"):
        raise ValueError(f"{where}: use_sliding_window is not supported; set it to false")
    if raw["model_type"] == "qwen3_moe" and (
        raw.get("mlp_only_layers") or raw.get("decoder_sparse_step") not in (None, 1)
    ):
        raise ValueError(
            f"{where}: dense layers among the experts (mlp_only_layers, decoder_sparse_step) are not supported"
        )


@dataclass(frozen=True, slots=True)
class _Values:
    """A config.json, whose every value is refused by file, key and value; null counts as not given."""

    raw: Mapping[str, Any]
    where: str

    def size(self, key: str, default: int | None = None) -> int:
        value = self._given(key, default)
        if not _is_whole(value) or value < 1:
            raise self._refused(key, value, "a whole number of at least 1")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._given(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self._refused(key, value, "a number above 0")
        return float(value)

    def token_ids(self, key: str) -> tuple[int, ...]:
        value = self._given(key, [])
        ids = value if isinstance(value, list) else [value]
        if not all(_is_whole(token) and token >= 0 for token in ids):
            raise self._refused(key, value, "a token's id, or a list of them")
        return tuple(ids)

    def rope(self) -> dict[str, Any]:
        """{"rope_theta"}, and the scaling where there is one (llama3's only)."""
        key = "rope_parameters" if self.raw.get("rope_parameters") else "rope_scaling"
        given = self._given(key, {})
        if not isinstance(given, Mapping):
            raise self._refused(key, given, "an object, or null")
        theta = self.number("rope_theta", 10000.0)
        inner = _Values(given, f"{self.where}: {key}")
        kind = given.get("rope_type", given.get("type", "default"))
        rope: dict[str, Any] = {"rope_theta": inner.number("rope_theta", theta)}
        if kind == "default":
            return rope
        if kind != "llama3":
            raise ValueError(f"{self.where}: rope_type={kind!r} is not supported; supported: default, llama3")
        return rope | {"rope_type": kind} | {name: inner.number(name) for name in LLAMA3}

    def _given(self, key: str, default: Any) -> Any:
        value = self.raw.get(key)
        if value is None and default is None and key not in self.raw:
            raise ValueError(f"{self.where} has no {key!r}; name a folder with a whole config.json")
        return default if value is None else value

    def _refused(self, key: str, value: Any, wanted: str) -> ValueError:
        return ValueError(f"{self.where}: {key}={json.dumps(value)} is refused; it must be {wanted}")


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
