"""Tables: HF names and shapes are transformers' own, and all ranks together have every element."""

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

from megarl.layout import Axis, Layout, Parallel
from megarl.models.registry import FAMILIES, hf_shapes, megatron_table, read_model
from megarl.models.shards import Qkv, slices_of

DENSE = [
    (Parallel(), 1),
    (Parallel(tensor=2), 2),
    (Parallel(pipeline=2), 2),
    (Parallel(tensor=2, pipeline=2), 8),
]
SPARSE = [
    (Parallel(expert=2), 2),
    (Parallel(tensor=2, expert_tensor=2), 2),
    (Parallel(tensor=2, expert=2), 4),
    (Parallel(tensor=2, pipeline=2, expert=2, expert_tensor=2), 8),
]


SIZES = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 2,
    "n_group": 2,
}
LATENT = {"kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
OWN = {
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "mixtral": {"num_local_experts": 4},
    "deepseek_v3": {
        **ROUTED,
        **LATENT,
        "q_lora_rank": 8,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
    },
    "glm4_moe": {**ROUTED, "first_k_dense_replace": 2, "use_qk_norm": True, "attention_bias": True},
    "gpt_oss": {"num_local_experts": 4},
}
CASES = {
    f"{family}-{tied}": (family, tied, {})
    for family in FAMILIES
    if FAMILIES[family].architecture
    for tied in (False, True)
}
CASES |= {
    "deepseek_v3-plain query": ("deepseek_v3", False, {"q_lora_rank": None}),
    "glm4_moe-plain": ("glm4_moe", False, {"use_qk_norm": False, "attention_bias": False}),
}


@pytest.fixture(scope="module", params=CASES)
def saved(request, tmp_path_factory):
    """A random transformers model on disk."""
    family, tied, own = CASES[request.param]
    config = AutoConfig.for_model(
        family,
        **SIZES | OWN.get(family, {}) | own,
        hidden_size=32,
        intermediate_size=48,
        vocab_size=67,
        tie_word_embeddings=tied,
        pad_token_id=0,
    )
    folder = tmp_path_factory.mktemp(family)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def test_names_and_shapes_are_those_of_the_checkpoint(saved):
    with safe_open(saved / "model.safetensors", "np") as file:
        found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert hf_shapes(read_model(saved)) == found


@pytest.mark.parametrize(("parallel", "world"), DENSE + SPARSE, ids=str)
def test_all_ranks_together_hold_every_element(saved, parallel, world):
    shape = read_model(saved)
    if not shape.is_moe:  # expert axes mean nothing to it
        parallel = replace(parallel, expert=1, expert_tensor=1)
    held = {name: np.zeros(size, int) for name, size in hf_shapes(shape).items()}
    for rank in range(world):
        local = Counter()
        for part in slices_of(
            megatron_table(shape, spec="local", padded_vocab=68),
            shape,
            Layout.of(parallel, world, rank),
        ):
            whole = held[part.name]
            if len(part.shape) > whole.ndim:
                whole = whole.reshape(*whole.shape[:-1], -1, 2)
            whole[tuple(slice(s, s + n) for s, n in zip(part.start, part.shape, strict=True))] += 1
            last = part.offset + sum(
                (n - 1) * s for n, s in zip(part.shape, part.strides, strict=True)
            )
            local[part.param] = max(local[part.param], last + 1)
        for param, extent in local.items():
            if "word_embeddings" not in param and "output_layer" not in param:
                elements = sum(
                    part.numel
                    for part in slices_of(
                        megatron_table(shape, spec="local", padded_vocab=68),
                        shape,
                        Layout.of(parallel, world, rank),
                    )
                    if part.param == param
                )
                assert extent == elements, f"{param}: slices leave holes or overlap"
    assert all((count > 0).all() for count in held.values())


def test_a_group_is_its_queries_then_its_key_then_its_value():
    rule = Qkv(("q", "k", "v"), "qkv", heads=4, kv_heads=2, head_dim=3, rest=())
    both = [(part.name, part.start, part.shape, part.offset) for part in rule.slices(Axis(1))]
    first = [("q", (0,), (6,), 0), ("k", (0,), (3,), 6), ("v", (0,), (3,), 9)]
    second = [("q", (6,), (6,), 12), ("k", (3,), (3,), 18), ("v", (3,), (3,), 21)]
    assert both == first + second
    on_rank_1 = [
        (part.name, part.start, part.shape, part.offset + 12) for part in rule.slices(Axis(2, 1))
    ]
    assert on_rank_1 == second


def test_an_unsupported_family_is_refused_with_the_supported_ones(saved, tmp_path):
    raw = json.loads((saved / "config.json").read_text()) | {"model_type": "gpt_neox"}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(
        ValueError, match=r"model_type='gpt_neox' is not supported; supported: llama, qwen2"
    ):
        read_model(tmp_path)


def test_a_family_without_a_table_is_neither_planned_nor_converted(saved):
    shape = replace(read_model(saved), family="mistral", bridge=saved)
    assert hf_shapes(shape).keys() >= {"model.norm.weight"}, "names and shapes are the folder's own"
    with pytest.raises(
        ValueError, match=r"mistral has no table: .* `megarl convert` do not support it"
    ):
        slices_of(
            megatron_table(shape, spec="local", padded_vocab=68), shape, Layout.of(Parallel(), 1, 0)
        )
