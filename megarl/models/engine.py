"""The engine's side of every family: where a rank of vLLM 0.32 stores each HF tensor, and in which
format.

vLLM uses Hugging Face's names and Megatron's splits, and fuses some tensors, so its table is
derived from Megatron's; `Family.engine` handles the exceptions. At startup, the trace of vLLM's
loaders is checked (`shards.first_mismatch`).

In a block format, the weights of linear layers have scales:

    rule of X.weight --with_scales--> that rule, and one of X.weight_scale_inv: a number per block

Embeddings, head, norms, routers and biases are not quantised. vLLM splits scales as it splits
weights, so none of its ranks may have part of a block (`engine_format`). A rank of the trainer has
all scales of its tensors (weights/encode/blocks.py)."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import chain

from megarl.layout import Axis
from megarl.models.formats import ENGINE_FORMATS, BlockFormat
from megarl.models.headers import ITEM_BYTES
from megarl.models.lora import linears
from megarl.models.registry import FAMILIES, hf_shapes, megatron_table
from megarl.models.shape import ModelShape, Settings, ShapesByName
from megarl.models.shards import (
    Qkv,
    Replicated,
    Rule,
    Rules,
    ShardDim0,
    ShardDim1,
    Stack,
    Table,
    is_expert,
    shapes_of,
)

VOCAB_MULTIPLE = 64  # of vLLM's padded vocabulary, for any number of ranks


def engine_table(
    shape: ModelShape, fmt: BlockFormat | None = None, *, tensor: int = 1, expert: int = 1
) -> Table:
    """Returns vLLM's table, with rules for scales if the linear layers are in `fmt`.

    `tensor` and `expert` are the sizes of an engine replica. Raises ValueError for a family without
    a table.
    """
    padded_vocab = -(-shape.vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    table = megatron_table(shape, padded_vocab=padded_vocab)
    derived = Table(
        embedding=tuple(map(_derived, table.embedding)),
        layers=table.map_layers(partial(map, _derived)).layers,
        head=tuple(map(_derived, table.head)),
    )
    derived = FAMILIES[shape.family].engine(shape, derived)
    if shape.latent and expert > tensor > 1:
        derived = derived.map_layers(partial(map, _unsplit_shared))
    return with_scales(derived, fmt) if fmt else derived


def _derived(rule: Rule) -> Rule:
    """Returns the rule for the same tensors in vLLM, which names a parameter after the tensor, or
    after the tensors that it fuses."""
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
    """Returns the rule for the same tensors in vLLM, which stacks a rank's experts in one
    parameter."""
    name = next(iter(rule.shapes()))
    weight = "w13" if "linear_fc1" in rule.param else "w2"
    block = name.partition("experts.")[0]
    kind = rule.param.rpartition(".")[2]
    return replace(rule, param=f"{block}experts.routed_experts.{weight}_{kind}")


def _unsplit_shared(rule: Rule) -> Rule:
    """Returns the rule with shared experts whole on every rank.

    In replicas of several data ranks, vLLM's models with latent attention split a data rank's
    tokens over its tensor ranks (`use_sequence_parallel_moe`), instead of the shared experts.
    """
    if ".shared_experts." not in rule.param:
        return rule
    if isinstance(rule, Stack):
        return replace(rule, max_shards=(1,) * len(rule.hf))
    assert isinstance(rule, ShardDim1)
    return Replicated(rule.hf, rule.param, rule.shape)


def with_scales(table: Table, fmt: BlockFormat, *, is_whole: bool = False) -> Table:
    """Returns the table with rules for scales. `is_whole`: each rank has all scales of a tensor."""

    def scales(rules: Rules) -> Rules:
        return tuple(chain.from_iterable(_scales(rule, fmt, is_whole) for rule in rules))

    bits = dict(table.bits)
    for name in chain.from_iterable(rule.shapes() for rule in scales(table.layer_rules)):
        bits[name] = 8 * ITEM_BYTES[fmt.scale_dtype]
        bits[name.removesuffix(fmt.scale)] = fmt.bits
    return replace(table.map_layers(lambda rules: rules + scales(rules)), bits=bits)


def _scales(rule: Rule, fmt: BlockFormat, is_whole: bool) -> Iterator[Rule]:
    """Yields the rules for the scales of a rule's weights; none if these are not quantised."""
    if not linears(rule):
        return
    grids = {name: fmt.grid(*size) for name, size in rule.shapes().items()}
    param = rule.param + fmt.scale
    if is_whole:
        for name, grid in grids.items():
            whole = f"{rule.param}.{name.split('.')[-2]}{fmt.scale}"
            yield Replicated(name + fmt.scale, whole, grid)
    elif isinstance(rule, Stack):
        names = tuple(name + fmt.scale for name in grids)
        rows, columns = zip(*grids.values(), strict=True)
        yield Stack(names, param, rows, columns[:1], rule.max_shards)
    else:
        assert isinstance(rule, Replicated | ShardDim0 | ShardDim1)
        yield replace(rule, hf=rule.hf + fmt.scale, param=param, shape=grids[rule.hf])


def linear_shapes(shape: ModelShape) -> ShapesByName:
    """Returns the shapes of the HF weights that a block format applies to."""
    table = megatron_table(shape).map_layers(partial(filter, linears))
    return shapes_of(replace(table, embedding=(), head=(), tied=()), shape)


def format_config(shape: ModelShape, fmt: BlockFormat) -> Settings:
    """Returns the `quantization_config` of a model in an FP8 block format."""
    linear = linear_shapes(shape)
    others = [
        name.removesuffix(".weight")
        for name, size in hf_shapes(shape).items()
        if len(size) == 2 and name not in linear
    ]
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": list(fmt.block),
        "modules_to_not_convert": ["lm_head", *others],
    }


def engine_format(name: str, shape: ModelShape, tensor: int, expert: int = 1) -> BlockFormat:
    """Returns the first of ENGINE_FORMATS[name] of which no engine rank has part of a block. Raises
    ValueError, naming a weight and the sizes that would work, if there is none."""
    setting = f"rollout.quantization={name}"
    if shape.bridge is not None or shape.swiglu_limit:
        raise ValueError(f"{setting} does not support {shape.family}; set it to none")
    formats = ENGINE_FORMATS[name]
    if shape.is_moe:
        formats = formats[:1]
    problem = None
    for fmt in formats:
        problem = _cut_weight(shape, fmt, tensor, expert)
        if problem is None:
            return fmt
    divisors = [size for size in range(1, shape.heads + 1) if shape.heads % size == 0]
    fits = [str(size) for size in divisors if not _cut_weight(shape, formats[-1], size, expert)]
    remedy = "set rollout.quantization=none"
    if fits:
        remedy = f"choose rollout.tensor from {', '.join(fits)}"
    raise ValueError(f"{setting} with rollout.tensor={tensor}: {problem}; {remedy}")


def _cut_weight(
    shape: ModelShape,
    fmt: BlockFormat,
    tensor: int,
    expert: int,
) -> str | None:
    """Describes a weight of which an engine rank would store part of a block, or which it would
    stack in the middle of a block; None if there is none."""
    table = engine_table(shape, tensor=tensor, expert=expert)
    for rule in filter(linears, table.layer_rules):
        ranks = 1 if is_expert(rule) and expert > 1 else tensor
        parts = list(rule.slices(Axis(ranks)))
        for part in parts:
            problem = None
            rows, columns = part.shape
            whole = rule.shapes()[part.name]
            # the last tensor may leave the rest of its last block unused
            is_last = part is parts[-1] and part.shape == whole
            if rows % fmt.block[0] and not is_last:
                problem = f"{rows} rows"
            if columns % fmt.block[1] and (columns < whole[1] or is_expert(rule)):
                problem = f"{columns} columns"
            if problem:
                return (
                    f"a rank has {problem} of {part.name.format(layer='*', expert='*')}, "
                    f"which are no whole blocks of {fmt.block[0]} x {fmt.block[1]}"
                )
    return None
