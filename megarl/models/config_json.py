"""Reads a Hugging Face `config.json`. Errors name the file, the key and the value; null counts as absent."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megarl.models.shape import Latent, ModelShape

__all__ = ["ConfigReader", "read_decoder", "read_latent", "read_sizes"]

STRETCHED = ("factor", "original_max_position_embeddings")  # keys of both kinds of scaling
LLAMA3 = (*STRETCHED, "low_freq_factor", "high_freq_factor")
YARN = {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 0.0, "mscale_all_dim": 0.0}  # with their defaults
ROPE_KEYS = {"default": (), "llama3": LLAMA3, "yarn": (*STRETCHED, *YARN, "truncate")}
ROPE_TYPES = tuple(ROPE_KEYS)


@dataclass(frozen=True, slots=True)
class ConfigReader:
    """The values of a `config.json`, checked. Every method raises ValueError for a value it does not accept."""

    raw: Mapping[str, Any]
    where: str  # names the file in errors

    @property
    def family(self) -> str:
        return str(self.raw.get("model_type"))

    def size(self, key: str, default: int | None = None, *, alias: str = "") -> int:
        """At least 1. `alias` is another name of the key, used where only that is present."""
        if self.raw.get(key) is None and self.raw.get(alias) is not None:
            key = alias
        value = self._get(key, default)
        if not _is_int(value) or value < 1:
            raise self._refused(key, value, "a whole number of at least 1")
        return value

    def count(self, key: str, default: int | None = 0) -> int:
        value = self._get(key, default)
        value = 0 if value is None else value
        if not _is_int(value) or value < 0:
            raise self._refused(key, value, "a whole number, or null")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self._refused(key, value, "a number above 0")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        return bool(self.raw.get(key, default))

    def token_ids(self, key: str) -> tuple[int, ...]:
        value = self._get(key, [])
        ids = value if isinstance(value, list) else [value]
        if not all(_is_int(token) and token >= 0 for token in ids):
            raise self._refused(key, value, "a token's id, or a list of them")
        return tuple(ids)

    def only(self, **supported: Any) -> None:
        """Refuses other values of these keys, which transformers or vLLM would follow and megarl would not."""
        for key, value in supported.items():
            if (given := self.raw.get(key)) is not None and given != value:
                raise self.unsupported(key, given, value)

    def only_unquantised(self) -> None:
        if quantised := self.raw.get("quantization_config"):
            shown = json.dumps(quantised)[:80]
            remedy = "name a copy of the model with bf16 weights, and without that key"
            raise self.error(f"quantization_config={shown} is not supported; {remedy}")

    def error(self, text: str) -> ValueError:
        return ValueError(f"{self.where}: {text}")

    def unsupported(self, key: str, value: Any, supported: Any) -> ValueError:
        """The error for a value other than the one that megarl supports."""
        shown = f"{key}={json.dumps(value)}"
        return self.error(f"{shown} is not supported for {self.family}; supported: {json.dumps(supported)}")

    def rope(
        self, *, theta: float = 1e4, fraction: float = 0.0, mscale: bool = False, kinds: Sequence[str] = ROPE_TYPES
    ) -> dict[str, Any]:
        """`rope_theta`, `rotary_fraction` and `rope_scaling` of ModelShape, from `rope_parameters` or `rope_scaling`.

        theta, fraction: the family's defaults; with `fraction` 0 it rotates whole heads only
        mscale: whether it follows yarn's `mscale` and `mscale_all_dim`
        kinds: the `rope_type`s that it supports
        """
        family = self.family
        key = "rope_parameters" if self.raw.get("rope_parameters") else "rope_scaling"
        given = self._get(key, {})
        if not isinstance(given, Mapping):
            raise self._refused(key, given, "an object, or null")
        inner, kind = ConfigReader(given, f"{self.where}: {key}"), given.get("rope_type", given.get("type", "default"))
        if kind not in kinds:
            raise self.error(f"rope_type={kind!r} is not supported for {family}; supported: {', '.join(kinds)}")
        known = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *ROPE_KEYS[kind]}
        for name, value in given.items():
            if name not in known and value is not None:
                raise inner.error(f"{name}={json.dumps(value)} is not supported with rope_type={kind}")
        rotated = inner.number("partial_rotary_factor", self.number("partial_rotary_factor", fraction or 1.0))
        if rotated != 1 and (not fraction or kind == "yarn"):
            raise self.error(f"partial_rotary_factor={rotated} with rope_type={kind} is not supported for {family}")
        if not mscale and (given.get("mscale") or given.get("mscale_all_dim")):
            raise inner.error(f"mscale and mscale_all_dim are not supported for {family}; remove them")
        base = inner.number("rope_theta", self.number("rope_theta", theta))
        return {"rope_theta": base, "rotary_fraction": rotated, "rope_scaling": _scaling(inner, kind)}

    def _get(self, key: str, default: Any) -> Any:
        value = self.raw.get(key)
        if value is None and default is None and key not in self.raw:
            raise ValueError(f"{self.where} has no {key!r}; name a folder with a whole config.json")
        return default if value is None else value

    def _refused(self, key: str, value: Any, wanted: str) -> ValueError:
        return self.error(f"{key}={json.dumps(value)} is refused; it must be {wanted}")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _scaling(config: ConfigReader, kind: str) -> dict[str, Any]:
    if kind == "default":
        return {}
    if kind == "llama3":
        return {"rope_type": kind} | {key: config.number(key) for key in LLAMA3}
    ramp = {key: float(config.raw.get(key) or default) for key, default in YARN.items()}
    stretched = {key: config.number(key) for key in STRETCHED}
    return {"rope_type": kind} | stretched | ramp | {"truncate": config.flag("truncate", True)}


def read_decoder(
    config: ConfigReader,
    *,
    head_dim: int = 0,
    latent: Latent | None = None,
    rope: Mapping[str, Any] | None = None,
    layer_types: Sequence[str] = ("full_attention",),
    **fields: Any,
) -> ModelShape:
    """A pre-norm decoder with SwiGLU, as most families are.

    head_dim: the family's default; 0: hidden / heads
    rope: what `config.rope` returns, where the family gives it options
    layer_types: the supported ones, repeated
    fields: further fields of ModelShape
    """
    config.only(hidden_act="silu", mlp_bias=False)
    config.only_unquantised()
    for layer, kind in enumerate(config.raw.get("layer_types") or []):
        if kind != (supported := layer_types[layer % len(layer_types)]):
            raise config.unsupported(f"layer_types[{layer}]", kind, supported)
    sizes = read_sizes(config, head_dim=head_dim, latent=latent)
    return ModelShape(**sizes, **(rope or config.rope()), rms_eps=config.number("rms_norm_eps"), **fields)


def read_sizes(config: ConfigReader, *, head_dim: int = 0, latent: Latent | None = None) -> dict[str, Any]:
    """The fields of ModelShape under keys that all families share."""
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    if latent:
        head_dim = latent.qk_nope_head_dim + latent.qk_rope_head_dim
    elif not head_dim and config.raw.get("head_dim") is None and hidden % heads:
        raise config.error(f"hidden_size={hidden} is not divisible by num_attention_heads={heads}; give head_dim")
    return {
        "family": config.family,
        "layers": config.size("num_hidden_layers"),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": heads if latent else config.size("num_key_value_heads", heads),
        "head_dim": head_dim if latent else config.size("head_dim", head_dim or hidden // heads),
        "intermediate": config.size("intermediate_size"),
        "vocab": config.size("vocab_size"),
        "tied": config.flag("tie_word_embeddings"),
        "max_position": config.size("max_position_embeddings", 4096),
        "latent": latent,
        "eos": config.token_ids("eos_token_id"),
    }


def read_latent(config: ConfigReader) -> Latent:
    sizes = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    return Latent(config.count("q_lora_rank"), **{key: config.size(key) for key in sizes})
