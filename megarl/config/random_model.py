"""`model.create` as the two Hugging Face JSON files it will be written as: pure data, no weights, no torch.

The tokenizer's vocabulary lives here too, because the size of the model's vocabulary follows from it.
"""

from __future__ import annotations

import string
from typing import Any

from megarl.config.schema import Create

__all__ = ["BOS", "EOS", "PAD", "SPECIAL", "UNK", "characters", "generation_config", "hf_config"]

SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>", "<|system|>", "<|user|>", "<|assistant|>")
PAD, BOS, EOS, UNK = range(4)

# Most useful first: a vocabulary smaller than this keeps arithmetic and lower-case words, the rest reads as <unk>
_CHARACTERS = (
    string.digits
    + " \n"
    + "+-*/=().,:?!'\"%$<>[]"
    + string.ascii_lowercase
    + string.ascii_uppercase
    + "".join(sorted(set(string.punctuation) - set("+-*/=().,:?!'\"%$<>[]")))
    + "\t"
)

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
}
SIGMOID = ("deepseek_v3", "glm4_moe")  # routers; these families begin with a layer without experts
MOE = ("qwen3_moe", "mixtral", "gpt_oss", *SIGMOID)


def characters(create: Create) -> tuple[str, ...]:
    """The tokens of the character tokenizer: special ones, phrases, characters; cut to `create.vocab`."""
    return (*SPECIAL, *create.phrases, *_CHARACTERS)[: create.vocab]


def hf_config(create: Create) -> dict[str, Any]:
    """The config.json of a made model.

    Raises ValueError when its sizes do not fit together.
    """
    _check_sizes(create)
    values: dict[str, Any] = {
        "architectures": [ARCHITECTURES[create.family]],
        "model_type": create.family,
        "hidden_act": "silu",
        "hidden_size": create.hidden,
        "intermediate_size": create.intermediate or 3 * create.hidden,
        "num_hidden_layers": create.layers,
        "num_attention_heads": create.heads,
        "num_key_value_heads": create.kv_heads,
        "head_dim": _head_dim(create),
        "max_position_embeddings": create.max_position,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "rope_theta": 10000.0,  # transformers < 5 reads it here
        "attention_bias": False,
        "tie_word_embeddings": create.tied,
        "vocab_size": create.vocab or len(characters(create)),
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "initializer_range": 0.02,
        "dtype": "float32",
        "use_cache": True,
    }
    return values | (_experts(create) if create.experts else {})


def _experts(create: Create) -> dict[str, Any]:
    width = create.moe_intermediate or create.hidden
    chosen = {"num_experts_per_tok": create.experts_per_token, "router_aux_loss_coef": 0.0}
    if create.family == "mixtral":
        return chosen | {"num_local_experts": create.experts, "intermediate_size": width, "sliding_window": None}
    if create.family == "gpt_oss":
        rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0}
        rope |= {"original_max_position_embeddings": -(-create.max_position // 4), "truncate": False}
        own = {"attention_bias": True, "sliding_window": 16, "swiglu_limit": 7.0, "rms_norm_eps": 1e-5}
        width = {"num_local_experts": create.experts, "intermediate_size": width}
        return chosen | own | width | {"rope_parameters": rope}
    chosen["moe_intermediate_size"] = width
    if create.family not in SIGMOID:
        return chosen | {
            "num_experts": create.experts,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    chosen |= {
        "n_routed_experts": create.experts,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",  # vLLM reads a correction bias with this method only
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": 0,
    }
    if create.family == "glm4_moe":
        rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
        return chosen | {"attention_bias": True, "use_qk_norm": True, "rope_parameters": rope}
    return chosen | {
        "num_key_value_heads": create.heads,
        "q_lora_rank": create.hidden // 2,
        "kv_lora_rank": 512,  # with the next, the one size vLLM's latent attention takes on a CPU
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": _head_dim(create),
        "v_head_dim": _head_dim(create),
        "head_dim": 64,
        "rope_interleave": True,
    }


def generation_config() -> dict[str, Any]:
    return {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD, "do_sample": True}


def _head_dim(create: Create) -> int:
    return create.head_dim or create.hidden // create.heads


def _check_sizes(create: Create) -> None:
    if create.head_dim is None and create.hidden % create.heads:
        raise ValueError(
            f"model.create: hidden={create.hidden} is not divisible by heads={create.heads}; "
            "change one, or give head_dim"
        )
    head_dim = _head_dim(create)
    if head_dim % 2:
        raise ValueError(f"model.create: head_dim={head_dim} is odd, which rotary positions cannot use; make it even")
    if create.heads % create.kv_heads:
        raise ValueError(
            f"model.create: heads={create.heads} is not divisible by kv_heads={create.kv_heads}; change one"
        )
    is_moe = create.family in MOE
    if is_moe != (create.experts > 0):
        remedy = "give model.create.experts" if is_moe else f"set family to one of {', '.join(MOE)}, or experts: 0"
        raise ValueError(f"model.create: family={create.family} with experts={create.experts}; {remedy}")
    if is_moe and create.experts_per_token > create.experts:
        raise ValueError(
            f"model.create: experts_per_token={create.experts_per_token} exceeds experts={create.experts}; lower it"
        )
    if create.family in SIGMOID and create.layers < 2:
        raise ValueError(f"model.create: family={create.family} begins with a layer without experts; give layers: 2")
    least = len(SPECIAL) + len(create.phrases) + 1
    if create.vocab is not None and create.vocab < least:
        raise ValueError(f"model.create: vocab={create.vocab} leaves no room for text; use at least {least}")
