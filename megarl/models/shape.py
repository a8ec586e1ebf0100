"""A Hugging Face `config.json`, read into the few numbers the rest of megarl needs. No torch here."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megarl.platform.env import is_installed

__all__ = ["FAMILIES", "ModelShape", "read_model"]

# by model_type; each has a table in megarl/models
FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "deepseek_v3", "kimi_k2", "glm4_moe", "gpt_oss")
LATENT = ("deepseek_v3", "kimi_k2")  # attention through a latent: Kimi-K2 is DeepSeek-V3's architecture
SIGMOID = (*LATENT, "glm4_moe")  # routers: DeepSeek-V3's, with a bias that only chooses
STRETCHED = ("factor", "original_max_position_embeddings")  # of both rules that stretch rope
LLAMA3 = (*STRETCHED, "low_freq_factor", "high_freq_factor")
YARN = {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 0.0, "mscale_all_dim": 0.0}  # and what is left out means
THETA = {"gpt_oss": 150000.0, "mixtral": 1e6}  # where config.json gives none; 10000 of the others
# What transformers or vLLM would obey and the tables do not: key -> (the one value allowed, of which families)
FIXED: dict[str, tuple[Any, tuple[str, ...]]] = {
    "hidden_act": ("silu", FAMILIES),
    "mlp_bias": (False, FAMILIES),
    "attention_bias": (False, ("llama", "qwen3", "qwen3_moe", "mixtral", *LATENT)),
    "use_sliding_window": (False, ("qwen2", "qwen3", "qwen3_moe")),
    "decoder_sparse_step": (1, ("qwen3_moe",)),
    "mlp_only_layers": ([], ("qwen3_moe",)),
    "moe_layer_freq": (1, SIGMOID),
    "scoring_func": ("sigmoid", SIGMOID),
    "topk_method": ("noaux_tc", SIGMOID),
    "rope_interleave": (True, LATENT),
    "rms_norm_eps": (1e-5, ("gpt_oss",)),  # this and the next are written into vLLM
    "swiglu_limit": (7.0, ("gpt_oss",)),
    "swiglu_alpha": (1.702, ("gpt_oss",)),
}


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention: queries and key-values go through narrow projections. Ranks, and sizes of a head."""

    q_rank: int  # 0: queries are projected directly
    kv_rank: int
    nope: int  # of query and key, without positions
    rope: int  # of query and key, with positions; a token has one such key for all heads
    value: int


@dataclass(frozen=True, slots=True)
class Router:
    """How a token chooses its experts."""

    scores: str = "softmax"  # or sigmoid
    renormalise: bool = True  # weights of the chosen add up to one
    corrected: bool = False  # a bias per expert, fp32, added to the scores for choosing only
    biased: bool = False  # a bias of the linear itself
    groups: int = 1  # of experts; a token chooses groups_per_token of them first
    groups_per_token: int = 1
    scale: float = 1.0  # of the routed experts' output


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a decoder-only transformer, under Hugging Face's meaning. Without a table: nothing but sizes."""

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
    rope_scaling: Mapping[str, Any] = field(default_factory=dict)  # {}, llama3's or yarn's
    rotary_fraction: float = 1.0  # of head_dim that carries positions
    out_bias: bool = False  # of o_proj
    sinks: bool = False  # a learnt logit per head that takes attention away
    sliding_window: int = 0  # tokens, of layers 0, 2, 4, ...; 0: none
    latent: Latent | None = None
    experts: int = 0
    experts_per_token: int = 0
    moe_intermediate: int = 0
    shared_intermediate: int = 0  # of all shared experts together
    dense_layers: int = 0  # leading layers without experts
    router: Router = Router()
    swiglu_limit: float = 0.0  # 0: plain SwiGLU; else gpt-oss's clamped one
    mtp_layers: int = 0  # multi-token prediction, in the checkpoint behind the last layer
    eos: tuple[int, ...] = ()
    bridge: Path | None = None  # the model's folder, where the family has no table and Megatron-Bridge stands in

    @property
    def is_moe(self) -> bool:
        return self.experts > 0

    @property
    def norm_topk_prob(self) -> bool:
        return self.router.renormalise


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
    return parse_model(raw, str(file), folder)


def parse_model(raw: Any, where: str, folder: Path | None = None) -> ModelShape:
    """`raw` is a parsed config.json; `where` names it in errors. Without its `folder` a family needs a table."""
    if not isinstance(raw, Mapping):
        raise ValueError(f"{where} holds a {type(raw).__name__}, not an object; name a Hugging Face model")
    family = raw.get("model_type")
    if family not in FAMILIES:
        return _bridged(_Values(raw, where), folder)
    _refuse_unsupported(raw, where)
    values = _Values(raw, where)
    hidden, heads = values.size("hidden_size"), values.size("num_attention_heads")
    latent = _latent(values) if family in LATENT else None
    rope = values.rope()
    return ModelShape(
        family=family,
        layers=values.size("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=heads if latent else values.size("num_key_value_heads", heads),
        head_dim=latent.nope + latent.rope if latent else _head_dim(values, family, hidden, heads),
        intermediate=values.size("intermediate_size"),
        vocab=values.size("vocab_size"),
        tied=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=family == "qwen2" or bool(raw.get("attention_bias", family == "gpt_oss")),
        qk_norm=family.startswith("qwen3") or (family == "glm4_moe" and bool(raw.get("use_qk_norm"))),
        rms_eps=values.number("rms_norm_eps"),
        rope_theta=rope.pop("rope_theta"),
        rotary_fraction=rope.pop("partial_rotary_factor"),
        max_position=values.size("max_position_embeddings", 4096),
        rope_scaling=rope,
        out_bias=family == "gpt_oss",
        sinks=family == "gpt_oss",
        sliding_window=values.size("sliding_window", 128) if family == "gpt_oss" else 0,
        latent=latent,
        swiglu_limit=values.number("swiglu_limit", 7.0) if family == "gpt_oss" else 0.0,
        mtp_layers=values.count("num_nextn_predict_layers", values.count("num_mtp_layers")) if family in SIGMOID else 0,
        eos=values.token_ids("eos_token_id"),
        **(_experts(values, family) if family in EXPERTS else {}),
    )


BRIDGE = ("megatron.bridge", "transformer_engine")  # what stands in for a table, and what it needs
NOT_BRIDGED = (  # what would change log-probs behind the last hidden state, where the actor's own head makes them;
    "final_logit_softcapping", "logits_scaling", "logit_scale", "output_multiplier_scale", "lm_head_multiplier",
    "text_config", "vision_config", "audio_config", "is_encoder_decoder",  # and what is no text model
)  # fmt: skip


def _bridged(values: _Values, folder: Path | None) -> ModelShape:
    """A family without a table: Megatron-Bridge builds and converts it, where it is installed."""
    raw, where, family = values.raw, values.where, values.raw.get("model_type")
    if missing := [name for name in BRIDGE if folder is None or not is_installed(name)]:
        lacking = f" (missing: {', '.join(missing)})" if folder else ", and name a folder with its weights"
        raise ValueError(
            f"{where}: model_type={family!r} is not supported; supported: {', '.join(FAMILIES)}. Add a table "
            "(CONTRIBUTING.md, 'Adding a model family'), or install Megatron-Bridge and Transformer Engine" + lacking
        )
    _refuse_quantised(raw, where)
    for key in NOT_BRIDGED:
        if (value := raw.get(key)) and (value is True or value != 1):  # a scale of one is none
            raise ValueError(
                f"{where}: {key}={json.dumps(value)[:80]} is not supported for {family}; without a table only text "
                "models are, whose logits are the last hidden state times the output layer"
            )
    hidden, heads = values.size("hidden_size"), values.size("num_attention_heads")
    latent = _latent(values) if raw.get("kv_lora_rank") else None
    experts = values.first("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return ModelShape(
        family=str(family),
        layers=values.size("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=heads if latent else values.size("num_key_value_heads", heads),
        head_dim=latent.nope + latent.rope if latent else _head_dim(values, "", hidden, heads),
        intermediate=values.size("intermediate_size"),
        vocab=values.size("vocab_size"),
        tied=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=False,  # this and the next three are Bridge's to say
        qk_norm=False,
        rms_eps=0.0,
        rope_theta=0.0,
        max_position=values.size("max_position_embeddings", 4096),
        latent=latent,
        experts=experts,
        experts_per_token=values.first("num_experts_per_tok", "moe_topk", "moe_k") if experts else 0,
        moe_intermediate=values.first("moe_intermediate_size", "intermediate_size") if experts else 0,
        mtp_layers=values.first("num_nextn_predict_layers", "num_mtp_layers"),
        eos=values.token_ids("eos_token_id"),
        bridge=folder,
    )


EXPERTS = {  # family -> the keys that may hold the number of experts
    "qwen3_moe": ("num_experts", "num_local_experts"),
    "mixtral": ("num_local_experts",),
    "gpt_oss": ("num_local_experts", "num_experts"),
    **dict.fromkeys(SIGMOID, ("n_routed_experts",)),
}


def _experts(values: _Values, family: str) -> dict[str, Any]:
    raw, keys = values.raw, EXPERTS[family]
    own = "moe_intermediate_size" if "moe_intermediate_size" in raw or family in ("qwen3_moe", *SIGMOID) else ""
    width = values.size(own or "intermediate_size")
    found: dict[str, Any] = {
        "experts": values.size(next((key for key in keys if raw.get(key) is not None), keys[0])),
        "experts_per_token": values.size("num_experts_per_tok"),
        "moe_intermediate": width,
    }
    if family not in SIGMOID:
        renormalise = family != "qwen3_moe" or bool(raw.get("norm_topk_prob", False))
        return found | {"router": Router(renormalise=renormalise, biased=family == "gpt_oss")}
    return found | {
        "shared_intermediate": width * values.count("n_shared_experts", None),
        "dense_layers": values.count("first_k_dense_replace", None),
        "router": Router(
            scores="sigmoid",
            renormalise=bool(raw.get("norm_topk_prob", True)),
            corrected=True,
            groups=values.size("n_group"),
            groups_per_token=values.size("topk_group"),
            scale=values.number("routed_scaling_factor"),
        ),
    }


def _latent(values: _Values) -> Latent:
    return Latent(
        q_rank=values.count("q_lora_rank"),
        kv_rank=values.size("kv_lora_rank"),
        nope=values.size("qk_nope_head_dim"),
        rope=values.size("qk_rope_head_dim"),
        value=values.size("v_head_dim"),
    )


def _head_dim(values: _Values, family: str, hidden: int, heads: int) -> int:
    usual = 128 if family.startswith("qwen3") else 64 if family == "gpt_oss" else 0
    if values.raw.get("head_dim") is None and not usual and hidden % heads:
        raise ValueError(
            f"{values.where}: hidden_size={hidden} is not divisible by num_attention_heads={heads}; give head_dim"
        )
    return values.size("head_dim", usual or hidden // heads)


def _refuse_unsupported(raw: Mapping[str, Any], where: str) -> None:
    """A key that would be obeyed elsewhere and ignored here; null counts as not given."""
    family = raw["model_type"]
    for key, (only, families) in FIXED.items():
        value = raw.get(key)
        if family in families and value is not None and value != only:
            raise ValueError(
                f"{where}: {key}={json.dumps(value)} is not supported for {family}; supported: {json.dumps(only)}"
            )
    _refuse_quantised(raw, where)
    if family == "gpt_oss" and raw.get("attention_bias") is False:
        raise ValueError(f"{where}: attention_bias=false is not supported for gpt_oss; supported: true")
    if family == "mixtral" and raw.get("sliding_window"):
        raise ValueError(f"{where}: sliding_window is not supported for mixtral; set it to null")
    layers, kinds = raw.get("layer_types") or [], ("full_attention", "full_attention")
    if family == "gpt_oss":
        kinds = ("sliding_attention", "full_attention")
    for layer, kind in enumerate(layers):
        if kind != kinds[layer % 2]:
            raise ValueError(
                f"{where}: layer_types[{layer}]={kind!r} is not supported for {family}; supported: {kinds[layer % 2]}"
            )


def _refuse_quantised(raw: Mapping[str, Any], where: str) -> None:
    if raw.get("quantization_config"):
        raise ValueError(
            f"{where}: quantization_config={json.dumps(raw['quantization_config'])[:80]} is not supported; name a copy "
            "of the model with bf16 weights, and without that key"
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

    def count(self, key: str, default: int | None = 0) -> int:
        value = self._given(key, default)
        value = 0 if value is None else value
        if not _is_whole(value) or value < 0:
            raise self._refused(key, value, "a whole number, or null")
        return value

    def first(self, *keys: str) -> int:
        """Of the first of them that is given; 0: none is."""
        return next((self.count(key) for key in keys if self.raw.get(key) is not None), 0)

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
        """{"rope_theta", "partial_rotary_factor"}, and the scaling where there is one (llama3's or yarn's)."""
        key = "rope_parameters" if self.raw.get("rope_parameters") else "rope_scaling"
        given = self._given(key, {})
        if not isinstance(given, Mapping):
            raise self._refused(key, given, "an object, or null")
        family = self.raw["model_type"]
        theta = self.number("rope_theta", THETA.get(family, 10000.0))
        fraction = self.number("partial_rotary_factor", 0.5 if family == "glm4_moe" else 1.0)
        inner = _Values(given, f"{self.where}: {key}")
        kind = given.get("rope_type", given.get("type", "default"))
        rope: dict[str, Any] = {
            "rope_theta": inner.number("rope_theta", theta),
            "partial_rotary_factor": inner.number("partial_rotary_factor", fraction),
        }
        known = {"default": (), "llama3": LLAMA3, "yarn": (*STRETCHED, *YARN, "truncate")}
        if kind not in known:
            raise ValueError(f"{self.where}: rope_type={kind!r} is not supported; supported: {', '.join(known)}")
        self._refuse_rope(inner, rope, kind, known[kind])
        if kind == "default":
            return rope
        if kind == "llama3":
            return rope | {"rope_type": kind} | {name: inner.number(name) for name in LLAMA3}
        sizes = {name: inner.number(name) for name in STRETCHED}
        rest = {name: float(given.get(name) or usual) for name, usual in YARN.items()}
        return rope | {"rope_type": kind} | sizes | rest | {"truncate": bool(given.get("truncate", True))}

    def _refuse_rope(self, inner: _Values, rope: Mapping[str, Any], kind: str, known: Sequence[str]) -> None:
        """What would turn queries and keys otherwise than the actor does."""
        family, own = self.raw["model_type"], {"rope_type", "type", "rope_theta", "partial_rotary_factor", *known}
        for key, value in inner.raw.items():
            if key not in own and value is not None:
                raise ValueError(f"{inner.where}: {key}={json.dumps(value)} is not supported with rope_type={kind}")
        if (fraction := rope["partial_rotary_factor"]) != 1 and (family != "glm4_moe" or kind == "yarn"):
            raise ValueError(
                f"{self.where}: partial_rotary_factor={fraction} with rope_type={kind} is not supported for {family}"
            )
        if family == "gpt_oss" and kind != "yarn":
            raise ValueError(f"{self.where}: rope_type={kind!r} is not supported for gpt_oss; supported: yarn")
        if family in LATENT and (kind == "llama3" or inner.raw.get("truncate") is False):
            raise ValueError(f"{inner.where}: llama3's rule and truncate=false are not supported for {family}")
        if family not in LATENT and (inner.raw.get("mscale") or inner.raw.get("mscale_all_dim")):
            raise ValueError(f"{inner.where}: mscale and mscale_all_dim are not supported for {family}; remove them")

    def _given(self, key: str, default: Any) -> Any:
        value = self.raw.get(key)
        if value is None and default is None and key not in self.raw:
            raise ValueError(f"{self.where} has no {key!r}; name a folder with a whole config.json")
        return default if value is None else value

    def _refused(self, key: str, value: Any, wanted: str) -> ValueError:
        return ValueError(f"{self.where}: {key}={json.dumps(value)} is refused; it must be {wanted}")


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
