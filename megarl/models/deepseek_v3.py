"""DeepSeek-V3 and Kimi-K2: latent attention, leading dense layers, shared experts, a sigmoid router
with an fp32 bias."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from megarl.models import blocks
from megarl.models.config_json import YARN, ConfigReader, read_decoder, read_latent
from megarl.models.shape import DENSE, EXPERTS, Family, ModelShape, Router, Settings
from megarl.models.shards import (
    HF,
    MC,
    LayerSpec,
    Replicated,
    Rule,
    Rules,
    ShardDim0,
    ShardDim1,
    Stack,
    Table,
)


def read(config: ConfigReader) -> ModelShape:
    config.only(attention_bias=False, rope_interleave=True)
    rope = config.rope(kinds=("default", "yarn"), mscale=True)
    if not rope["rope_scaling"].get("truncate", True):
        raise config.unsupported("truncate", False, True)
    return read_decoder(config, latent=read_latent(config), rope=rope, **read_experts(config))


def read_experts(config: ConfigReader) -> Settings:
    """Reads the fields of ModelShape for experts. Raises ValueError if a key is missing whose
    default differs between transformers and vLLM."""
    config.no_window()
    config.only(moe_layer_freq=1, scoring_func="sigmoid", topk_method="noaux_tc")
    width = config.size("moe_intermediate_size")
    layers = config.size("num_hidden_layers")
    num_dense = min(layers, config.count("first_k_dense_replace", None))
    return {
        "experts": config.size("n_routed_experts"),
        "experts_per_token": config.size("num_experts_per_tok"),
        "moe_intermediate": width,
        "shared_intermediate": width * config.count("n_shared_experts", None),
        "kinds": (*[DENSE] * num_dense, EXPERTS),
        "router": Router(
            score_function="sigmoid",
            norm_topk_prob=config.flag("norm_topk_prob", True),
            expert_bias=True,
            groups=config.size("n_group"),
            groups_per_token=config.size("topk_group"),
            scale=config.number("routed_scaling_factor"),
        ),
        "mtp_layers": config.count("num_nextn_predict_layers"),
    }


def moe_table(
    attention: Callable[[ModelShape, LayerSpec], Iterator[Rule]],
    shape: ModelShape,
    spec: LayerSpec,
    padded_vocab: int,
) -> Table:
    rules = tuple(attention(shape, spec))
    experts = (*blocks.expert_mlp(shape), *blocks.experts(shape, spec))
    return blocks.decoder_table(
        shape,
        padded_vocab,
        layers={EXPERTS: rules + experts, DENSE: rules + blocks.dense_mlp(shape, spec)},
        mtp=prediction(shape, padded_vocab),
        bits={f"{HF}mlp.gate.e_score_correction_bias": 32},
    )


def latent_attention(shape: ModelShape, spec: LayerSpec) -> Iterator[Rule]:
    """Yields the rules of latent attention, whose down projections are replicated in both layer
    specs."""
    latent = shape.latent
    assert latent is not None
    q_norm = "q_layernorm.weight"
    kv_norm = "kv_layernorm.weight"
    if spec == "te":
        q_norm = "linear_q_up_proj.layer_norm_weight"
        kv_norm = "linear_kv_up_proj.layer_norm_weight"
    hf = f"{HF}self_attn."
    mc = f"{MC}self_attention."
    hidden = shape.hidden
    queries = shape.heads * shape.head_dim
    yield Replicated(f"{HF}input_layernorm.weight", f"{MC}input_layernorm.weight", (hidden,))
    rank = latent.q_lora_rank
    if rank:
        yield Replicated(f"{hf}q_a_proj.weight", f"{mc}linear_q_down_proj.weight", (rank, hidden))
        yield Replicated(f"{hf}q_a_layernorm.weight", mc + q_norm, (rank,))
        yield ShardDim0(f"{hf}q_b_proj.weight", f"{mc}linear_q_up_proj.weight", (queries, rank))
    else:
        yield ShardDim0(f"{hf}q_proj.weight", f"{mc}linear_q_proj.weight", (queries, hidden))
    rank = latent.kv_lora_rank
    down = (rank + latent.qk_rope_head_dim, hidden)
    up = (shape.heads * (latent.qk_nope_head_dim + latent.v_head_dim), rank)
    yield Replicated(f"{hf}kv_a_proj_with_mqa.weight", f"{mc}linear_kv_down_proj.weight", down)
    yield Replicated(f"{hf}kv_a_layernorm.weight", mc + kv_norm, (rank,))
    yield ShardDim0(f"{hf}kv_b_proj.weight", f"{mc}linear_kv_up_proj.weight", up)
    out = (hidden, shape.heads * latent.v_head_dim)
    yield ShardDim1(f"{hf}o_proj.weight", f"{mc}linear_proj.weight", out)


def prediction(shape: ModelShape, padded_vocab: int) -> Rules:
    """Returns the rules of multi-token prediction, except those of its transformer layer. Embedding
    and head are shared with the model."""
    mtp = "mtp.layers.{layer}."
    norm = (shape.hidden,)
    vocab = (shape.vocab, shape.hidden)
    return (
        Replicated(f"{HF}enorm.weight", f"{mtp}enorm.weight", norm),
        Replicated(f"{HF}hnorm.weight", f"{mtp}hnorm.weight", norm),
        ShardDim0(f"{HF}eh_proj.weight", f"{mtp}eh_proj.weight", (shape.hidden, 2 * shape.hidden)),
        Replicated(f"{HF}shared_head.norm.weight", f"{mtp}final_layernorm.weight", norm),
        ShardDim0(
            f"{HF}embed_tokens.weight", "embedding.word_embeddings.weight", vocab, padded_vocab
        ),
        ShardDim0(f"{HF}shared_head.head.weight", "output_layer.weight", vocab, padded_vocab),
    )


def engine(shape: ModelShape, table: Table) -> Table:
    """Returns vLLM's table, in which the two down projections are fused and replicated."""
    latent = shape.latent
    assert latent is not None
    if not latent.q_lora_rank:
        return table
    names = (f"{HF}self_attn.q_a_proj.weight", f"{HF}self_attn.kv_a_proj_with_mqa.weight")
    param = f"{HF}self_attn.fused_qkv_a_proj.weight"
    rows = (latent.q_lora_rank, latent.kv_lora_rank + latent.qk_rope_head_dim)
    fused = Stack(names, param, rows, (shape.hidden,), max_shards=(1, 1))

    def fuse(rules: Rules) -> Rules:
        return (*(rule for rule in rules if rule.shapes().keys().isdisjoint(names)), fused)

    return table.map_layers(fuse)


def megatron(shape: ModelShape) -> Settings:
    """Returns settings of Megatron's MLATransformerConfig."""
    latent = shape.latent
    scaling = shape.rope_scaling
    assert latent is not None
    settings: Settings = {
        "q_lora_rank": latent.q_lora_rank or None,
        "kv_lora_rank": latent.kv_lora_rank,
        "qk_head_dim": latent.qk_nope_head_dim,
        "qk_pos_emb_head_dim": latent.qk_rope_head_dim,
        "v_head_dim": latent.v_head_dim,
        "qk_layernorm": True,
        "softmax_scale": None,  # Megatron's default, which includes yarn's factor
        "rotary_base": shape.rope_theta,
        "rope_type": "rope",
    }
    if scaling:
        settings |= {
            "rope_type": "yarn",
            "rotary_scaling_factor": scaling["factor"],
            "original_max_position_embeddings": int(scaling["original_max_position_embeddings"]),
        }
        settings |= {key: scaling[key] for key in YARN}
    return settings


def random_config(values: Settings, experts: int, width: int) -> Settings:
    return random_experts(values, experts, width) | {
        "num_key_value_heads": values["num_attention_heads"],
        "q_lora_rank": values["hidden_size"] // 2,
        # this and the next size are the only ones that vLLM's latent attention supports on a CPU
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": values["head_dim"],
        "v_head_dim": values["head_dim"],
        "head_dim": 64,
        "rope_interleave": True,
    }


def random_experts(values: Settings, experts: int, width: int) -> Settings:
    return {
        "moe_intermediate_size": width,
        "n_routed_experts": experts,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",  # vLLM loads the router's bias only with this method
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": 0,
    }


FAMILY = Family(
    "DeepseekV3ForCausalLM",
    read,
    partial(moe_table, latent_attention),
    megatron,
    engine,
    is_moe=True,
    random_config=random_config,
)
# Kimi-K2 is the same model; transformers does not know its model_type
FAMILIES = {"deepseek_v3": FAMILY, "kimi_k2": replace(FAMILY, architecture="")}
