"""Reads a Hugging Face `config.json`. Errors name the file, the key and the value; null counts as
absent."""

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.models.formats import CONFIG_KEY, BlockFormat, read_format
from megarl.models.shape import LatentSizes, ModelShape, Settings
from megarl.platform.json_text import read_json

SCALED = ("factor", "original_max_position_embeddings")
# rope_type -> required keys
ROPE_KEYS = {
    "default": (),
    "llama3": (*SCALED, "low_freq_factor", "high_freq_factor"),
    "yarn": SCALED,
}
# unsupported keys: those of multimodal models, and those that change logits or whole layers
UNUSUAL = """
    final_logit_softcapping logits_scaling logit_scale output_multiplier_scale lm_head_multiplier
    per_layer_config dual_chunk_attention_config index_topk llama_4_scaling transformers_weights
    text_config vision_config audio_config
"""
DTYPES = "float32 bfloat16 float16 float64"  # as torch names them
# each line lists the names of one setting
SYNONYMS = """
    n_routed_experts num_experts num_local_experts moe_num_experts
    num_experts_per_tok moe_topk moe_k
    num_nextn_predict_layers num_mtp_layers
    rope_type type
"""
ROPES = ("rope_scaling", "rope_parameters")
# yarn's optional keys and their defaults
YARN = {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0}


@dataclass(frozen=True)
class ConfigReader:
    """Checked values of a `config.json`. Every method raises ValueError for a value that it does
    not accept."""

    raw: Settings
    where: str  # the file, for errors

    @property
    def family(self) -> str:
        return str(self.raw.get("model_type"))

    def size(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """Returns an integer of at least `least`."""
        value = self._get(key, default)
        is_valid = type(value) is int and least <= value < 2**31
        return self._checked(key, value, is_valid, f"an integer of at least {least}, below 2**31")

    def count(self, key: str, default: int | None = 0) -> int:
        """Returns an integer of at least 0; null counts as absent, or as 0 without a default."""
        return 0 if self._get(key, default) is None else self.size(key, default, least=0)

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        is_valid = type(value) in (int, float) and 0 < value < math.inf
        return float(self._checked(key, value, is_valid, "a number above 0"))

    def flag(self, key: str, default: bool = False) -> bool:
        value = self._get(key, default)
        return self._checked(key, value, type(value) is bool, "true or false")

    def token_ids(self, key: str) -> tuple[int, ...]:
        value = self._get(key, [])
        ids = value if isinstance(value, list) else [value]
        is_valid = all(type(token) is int and token >= 0 for token in ids)
        self._checked(key, value, is_valid, "a token id, or a list of token ids")
        return tuple(ids)

    def only(self, **supported: Any) -> None:
        """Raises ValueError for any other value of these keys, which transformers or vLLM implement
        and megarl does not."""
        for key, only in supported.items():
            value = self.raw.get(key)
            if value is not None and value != only:
                raise self.unsupported(key, value, only)

    def only_neutral(self, *keys: str) -> None:
        """Raises ValueError for these keys and those in UNUSUAL, unless their value is null, false,
        empty or a scale of 1."""
        for key in (*UNUSUAL.split(), *keys):
            value = self.raw.get(key)
            if value and (value != 1 or value is True):
                raise self.error(
                    f"{key}={json.dumps(value)[:80]} is not supported for {self.family}; the model "
                    "must be a text model, not quantised in another format, whose logits are the "
                    "last hidden state times the output layer"
                )

    def no_window(self) -> None:
        """Raises ValueError for a sliding window, which vLLM applies even where transformers does
        not."""
        window = self.count("sliding_window")
        if 0 < window < self.size("max_position_embeddings", 4096):
            raise self.unsupported("sliding_window", window, None)

    def block_format(self) -> BlockFormat | None:
        """Returns the block format of the weights, or None if they are not quantised. Raises
        ValueError for an unsupported format."""
        values = self._get(CONFIG_KEY, {})
        if values == {}:
            return None
        try:
            return read_format(values)
        except ValueError as error:
            problem = str(error)
        except (KeyError, TypeError, AttributeError) as error:
            problem = f"{json.dumps(values)[:80]} is invalid ({error!r})"
        raise self.error(f"{CONFIG_KEY}: {problem}; use a bf16 copy of the model")

    def error(self, text: str) -> ValueError:
        return ValueError(f"{self.where}: {text}")

    def unsupported(
        self,
        key: str,
        value: Any,
        supported: Any,
    ) -> ValueError:
        return self.error(
            f"{key}={json.dumps(value)} is not supported for {self.family}; "
            f"supported: {json.dumps(supported)}"
        )

    def rope(
        self,
        *,
        theta: float = 1e4,
        fraction: float = 0.0,
        mscale: bool = False,
        kinds: Collection[str] = ROPE_KEYS,
    ) -> Settings:
        """Returns ModelShape's `rope_theta`, `rotary_fraction` and `rope_scaling`.

        theta, fraction: the family's defaults; a family with `fraction` 0 rotates whole heads only
        mscale: if the family has yarn's `mscale` and `mscale_all_dim`; kinds: its `rope_type`s
        """
        key = "rope_parameters" if self.raw.get("rope_parameters") else "rope_scaling"
        if all(map(self.raw.get, ROPES)):
            options: Any = {"theta": theta, "fraction": fraction, "mscale": mscale, "kinds": kinds}
            alone = [ConfigReader({**self.raw, other: None}, self.where) for other in ROPES]
            if alone[0].rope(**options) != alone[1].rope(**options):
                self._refuse_both(*ROPES)
        values = self._get(key, {})
        self._checked(key, values, isinstance(values, Mapping), "an object, or null")
        inner = ConfigReader(values, f"{self.where}: {key}")
        kind = inner._get("rope_type", "default")
        if kind not in kinds:
            raise self.error(
                f"rope_type={kind!r} is not supported for {self.family}; "
                f"supported: {', '.join(kinds)}"
            )
        required = ROPE_KEYS[kind]
        known = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *required}
        if kind == "yarn":
            known |= {*YARN, "truncate"}
        for name, value in values.items():
            if name not in known and value is not None:
                raise inner.error(
                    f"{name}={json.dumps(value)} is not supported with rope_type={kind}"
                )
        rotated = inner.number(
            "partial_rotary_factor", self.number("partial_rotary_factor", fraction or 1.0)
        )
        if rotated != 1 and (not fraction or kind == "yarn"):
            raise self.error(
                f"partial_rotary_factor={rotated} with rope_type={kind} is not supported for "
                f"{self.family}"
            )
        factors = (values.get("mscale"), values.get("mscale_all_dim"))
        if not (mscale and all(factors)) and (factors[1] or factors[0] not in (None, 1)):
            raise inner.error(
                f"mscale and mscale_all_dim are {factors}, which transformers and vLLM read "
                f"differently for {self.family}; set both as it was trained, or remove them"
            )
        base = inner.number("rope_theta", self.number("rope_theta", theta))
        scaling: Settings = {}
        if required:
            scaling = {"rope_type": kind} | {name: inner.number(name) for name in required}
            self.only(**{SCALED[1]: scaling[SCALED[1]]})  # transformers prefers it
        if kind == "yarn":
            scaling |= {name: float(inner._get(name, default)) for name, default in YARN.items()}
            scaling["truncate"] = inner.flag("truncate", True)
        return {"rope_theta": base, "rotary_fraction": rotated, "rope_scaling": scaling}

    def _get(self, key: str, default: Any) -> Any:
        lines = map(str.split, SYNONYMS.splitlines())
        names = next((names for names in lines if key in names), [key])
        if default is None and self.raw.keys().isdisjoint(names):
            raise ValueError(f"{self.where} has no {key!r}; choose a folder with a complete one")
        present = [name for name in names if self.raw.get(name) is not None]
        for name in present[1:]:
            if self.raw[name] != self.raw[present[0]]:
                self._refuse_both(present[0], name)
        if not present:
            return default
        return self.raw[present[0]]

    def _refuse_both(self, key: str, other: str) -> None:
        raise self.error(
            f"{key}={json.dumps(self.raw[key])} and {other}={json.dumps(self.raw[other])} set the "
            "same thing differently; remove one"
        )

    def _checked(
        self,
        key: str,
        value: Any,
        is_valid: bool,
        wanted: str,
    ) -> Any:
        if not is_valid:
            raise self.error(f"{key}={json.dumps(value)[:80]} is invalid; it must be {wanted}")
        return value


def read_config(file: Path) -> ConfigReader:
    """Reads a JSON object; a file that does not exist counts as empty. Raises ValueError if the
    file contains anything else."""
    raw: Any = {}
    try:
        if file.is_file():
            raw = read_json(file)
    except ValueError as error:
        raise ValueError(f"{error}; correct it, or choose another model") from None
    if not isinstance(raw, dict):
        raise ValueError(
            f"{file} contains a {type(raw).__name__}, not an object; choose a Hugging Face model"
        )
    return ConfigReader(raw, str(file))


def read_decoder(
    config: ConfigReader,
    *,
    head_dim: int = 0,
    latent: LatentSizes | None = None,
    rope: Settings | None = None,
    layer_types: Sequence[str] = ("full_attention",),
    **fields: Any,
) -> ModelShape:
    """Reads the shape of a common decoder: pre-norm, with SwiGLU. `fields`: further fields of
    ModelShape.

    head_dim: the family's default; 0: hidden / heads
    rope: the result of `config.rope`, if the family calls it with options
    layer_types: the supported pattern, which repeats
    """
    config.only(hidden_act="silu", mlp_bias=False, is_causal=True)
    config.only_neutral()
    config.block_format()
    for key in ("dtype", "torch_dtype"):
        dtype = config.raw.get(key)
        if dtype is not None and dtype not in DTYPES.split():
            raise config.unsupported(key, dtype, DTYPES)
    for layer, kind in enumerate(config.raw.get("layer_types") or []):
        supported = layer_types[layer % len(layer_types)]
        if kind != supported:
            raise config.unsupported(f"layer_types[{layer}]", kind, supported)
    return ModelShape(
        **read_sizes(config, head_dim=head_dim, latent=latent),
        **(rope or config.rope()),
        rms_eps=config.number("rms_norm_eps"),
        **fields,
    )


def read_sizes(config: ConfigReader, *, head_dim: int = 0, latent: LatentSizes | None) -> Settings:
    """Reads the fields of ModelShape whose keys are the same in all families."""
    hidden = config.size("hidden_size")
    heads = config.size("num_attention_heads")
    if latent:
        kv_heads = heads
        head_dim = latent.qk_nope_head_dim + latent.qk_rope_head_dim
    else:
        if not head_dim and config.raw.get("head_dim") is None and hidden % heads:
            raise config.error(
                f"hidden_size={hidden} is not divisible by num_attention_heads={heads}; "
                "set head_dim"
            )
        kv_heads = config.size("num_key_value_heads", heads)
        head_dim = config.size("head_dim", head_dim or hidden // heads)
    if heads % kv_heads:
        raise config.error(
            f"num_attention_heads={heads} is not divisible by num_key_value_heads={kv_heads}"
        )
    return {
        "family": config.family,
        "layers": config.size("num_hidden_layers"),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate": config.size("intermediate_size"),
        "vocab": config.size("vocab_size"),
        "tied": config.flag("tie_word_embeddings"),
        "max_position": config.size("max_position_embeddings", 4096),
        "latent": latent,
        "eos": config.token_ids("eos_token_id"),
    }


def read_latent(config: ConfigReader) -> LatentSizes:
    sizes = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    return LatentSizes(config.count("q_lora_rank"), *map(config.size, sizes))
