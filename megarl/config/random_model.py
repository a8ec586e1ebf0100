"""The config.json of the random model of `model.create`, and the vocabulary of its tokenizer.

Imports no torch.
"""

import string

from megarl.config.model import Create
from megarl.config.section import refuse
from megarl.models.registry import FAMILIES
from megarl.models.shape import Family, Settings

SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>", "<|system|>", "<|user|>", "<|assistant|>")
PAD, BOS, EOS, UNK = range(4)

# most useful characters first: a small vocabulary covers arithmetic and lower-case words; all other
# characters are <unk>
_COMMON = string.digits + " \n+-*/=().,:?!'\"%$<>[]" + string.ascii_letters
_CHARACTERS = _COMMON + "".join(sorted(set(string.punctuation) - set(_COMMON))) + "\t"


def characters(create: Create) -> tuple[str, ...]:
    """Returns the tokens of the character tokenizer (special tokens, phrases, characters),
    truncated to `create.vocab`.
    """
    return (*SPECIAL, *create.phrases, *_CHARACTERS)[: create.vocab]


def hf_config(create: Create) -> Settings:
    """Returns the content of a random model's config.json.

    Raises ValueError for an unknown family or sizes that do not fit together.
    """
    head_dim = create.head_dim or create.hidden // create.heads
    family = _check_sizes(create, head_dim)
    values: Settings = {
        "architectures": [family.architecture],
        "model_type": create.family,
        "hidden_act": "silu",
        "hidden_size": create.hidden,
        "intermediate_size": create.intermediate or 3 * create.hidden,
        "num_hidden_layers": create.layers,
        "num_attention_heads": create.heads,
        "num_key_value_heads": create.kv_heads,
        "head_dim": head_dim,
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
    if family.is_moe:
        values |= {"num_experts_per_tok": create.experts_per_token, "router_aux_loss_coef": 0.0}
    values |= family.random_config(values, create.experts, create.moe_intermediate or create.hidden)
    if create.layers <= (dense := values.get("first_k_dense_replace", 0)):
        raise ValueError(
            f"model.create: layers={create.layers}, but family={create.family} needs {dense + 1} "
            "or more, because the first layer has no experts"
        )
    return values


def _check_sizes(create: Create, head_dim: int) -> Family:
    supported = {name: family for name, family in FAMILIES.items() if family.architecture}
    if create.family not in supported:
        raise ValueError(
            f"model.create: family={create.family} is not supported; use one of "
            f"{', '.join(supported)}"
        )
    family = supported[create.family]
    least = len(SPECIAL) + len(create.phrases) + 1
    heads = create.heads
    experts = create.experts
    chosen = create.experts_per_token
    remainder = create.hidden % heads if create.head_dim is None else 0
    refuse(
        (
            remainder,
            f"hidden={create.hidden} is not divisible by heads={heads}; change one, or "
            "set head_dim",
        ),
        (
            head_dim % 2,
            f"head_dim={head_dim} is odd, but rotary embeddings need it even; change it",
        ),
        (
            family.is_moe != (experts > 0),
            f"family={create.family}, but experts={experts}; set 2 or more for a family of "
            "mixtures of experts, 0 for others",
        ),
        (
            family.is_moe and chosen > experts,
            f"experts_per_token={chosen} exceeds experts={experts}; lower it",
        ),
        (
            (create.vocab or least) < least,
            f"vocab={create.vocab} leaves no room for text; use at least {least}",
        ),
        start="model.create: ",
    )
    return family
