"""The engine's side of every family: where a rank of vLLM 0.32 stores each HF tensor.

vLLM uses Hugging Face's names and Megatron's splits, and fuses some tensors, so its table is
derived from Megatron's; `Family.engine` handles the exceptions. At startup, the trace of vLLM's
loaders is checked (`shards.first_mismatch`)."""

from dataclasses import replace
from functools import partial

from megarl.models.registry import FAMILIES, megatron_table
from megarl.models.shape import ModelShape
from megarl.models.shards import Qkv, Rule, Stack, Table, is_expert

VOCAB_MULTIPLE = 64  # of vLLM's padded vocabulary, for any number of ranks


def engine_table(shape: ModelShape) -> Table:
    """Raises ValueError for a family without a table."""
    padded_vocab = -(-shape.vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    table = megatron_table(shape, padded_vocab=padded_vocab)
    derived = Table(
        embedding=tuple(map(_derived, table.embedding)),
        layers=table.map_layers(partial(map, _derived)).layers,
        head=tuple(map(_derived, table.head)),
    )
    return FAMILIES[shape.family].engine(shape, derived)


def _derived(rule: Rule) -> Rule:
    """Returns the rule for the same tensors in vLLM, whose parameter is named after the tensor or
    tensors it fuses."""
    if is_expert(rule):
        return _derived_expert(rule)
    if isinstance(rule, Qkv):
        rows = tuple(size[0] for size in rule.shapes().values())
        param = rule.hf[0].replace(".q_proj.", ".qkv_proj.")
        return Stack(rule.hf, param, rows, rule.rest, max_shards=(0, rule.kv_heads, rule.kv_heads))
    name, *fused = rule.shapes()
    if fused:
        name = name.replace(".gate_proj.", ".gate_up_proj.")
    return replace(rule, param=name)


def _derived_expert(rule: Rule) -> Rule:
    """Returns the rule for the same tensors of all experts of the rank, which vLLM stacks in one
    parameter."""
    name = next(iter(rule.shapes()))
    weight = "w13" if "linear_fc1" in rule.param else "w2"
    block = name.partition("experts.")[0]
    kind = rule.param.rpartition(".")[2]
    return replace(rule, param=f"{block}experts.routed_experts.{weight}_{kind}")
