"""FP8 blocks of the engine's linear layers: which weights have them, and where their scales are. No
torch.

    rule of X.weight --with_scales--> that rule, and one of X.weight_scale_inv: a number per block

Embeddings, head, norms, routers and biases stay as they are. vLLM splits scales as it splits
weights, so none of its ranks may have part of a block (`fp8_format`). A trainer's rank has all
scales of its tensors (weights/encode/blocks.py)."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain

from megarl.layout import Axis
from megarl.models.engine import engine_table
from megarl.models.formats import FORMATS, BlockFormat
from megarl.models.lora import linears
from megarl.models.registry import hf_shapes, megatron_table
from megarl.models.shape import ModelShape, Settings, Shape
from megarl.models.shards import (
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

SCALE = FORMATS["fp8_block"].scale
ROWS = (128, 64, 32)  # of a block; vLLM's kernels for GPUs and for experts need 128


def with_scales(table: Table, fmt: BlockFormat, *, is_whole: bool = False) -> Table:
    """Returns the table with rules for scales; `is_whole`: each rank has all scales of a tensor."""

    def scales(rules: Rules) -> Rules:
        return tuple(chain.from_iterable(_scales(rule, fmt, is_whole) for rule in rules))

    names = set(chain.from_iterable(rule.shapes() for rule in scales(table.layer_rules)))
    return replace(
        table.map_layers(lambda rules: rules + scales(rules)),
        fp8=frozenset(name.removesuffix(SCALE) for name in names),
        fp32=table.fp32 | names,
    )


def _scales(rule: Rule, fmt: BlockFormat, is_whole: bool) -> Iterator[Rule]:
    """Yields the rules of a rule's scales: none unless its weights have FP8 blocks."""
    if not linears(rule):
        return
    if is_whole:
        for name, shape in rule.shapes().items():
            param = f"{rule.param}.{name.split('.')[-2]}{SCALE}"
            yield Replicated(name + SCALE, param, fmt.grid(*shape))
    elif isinstance(rule, Stack):
        grids = [fmt.grid(*shape) for shape in rule.shapes().values()]
        names = tuple(name + SCALE for name in rule.hf)
        rows = tuple(grid[0] for grid in grids)
        yield Stack(names, rule.param + SCALE, rows, grids[0][1:], rule.max_shards)
    else:
        assert isinstance(rule, Replicated | ShardDim0 | ShardDim1)
        yield replace(
            rule,
            hf=rule.hf + SCALE,
            param=rule.param + SCALE,
            shape=fmt.grid(*rule.shape),
        )


def scale_shapes(shape: ModelShape, fmt: BlockFormat) -> dict[str, Shape]:
    """Returns the scales of all weights that the engine keeps in FP8 blocks, as HF tensors."""
    table = with_scales(megatron_table(shape), fmt, is_whole=True)
    return {name: size for name, size in shapes_of(table, shape).items() if name.endswith(SCALE)}


def quantization_config(shape: ModelShape, fmt: BlockFormat) -> Settings:
    """Returns what the config.json of a model in this format has."""
    scales = scale_shapes(shape, fmt)
    others = [
        name.removesuffix(".weight")
        for name, size in hf_shapes(shape).items()
        if len(size) == 2 and name + SCALE not in scales
    ]
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": list(fmt.block),
        "modules_to_not_convert": ["lm_head", *others],
    }


def fp8_format(shape: ModelShape, tensor: int, expert: int = 1) -> BlockFormat:
    """Returns the format with the largest blocks that no rank of an engine cuts. Raises ValueError
    naming a weight."""
    if shape.bridge is not None or shape.swiglu_limit:
        raise ValueError(
            f"rollout.quantization=fp8 does not support {shape.family}; set it to none"
        )
    rows = ROWS[:1] if shape.is_moe else ROWS
    formats = [replace(FORMATS["fp8_block"], block=(size, 128)) for size in rows]
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
    raise ValueError(f"rollout.quantization=fp8 with rollout.tensor={tensor}: {problem}; {remedy}")


def _cut_weight(
    shape: ModelShape,
    fmt: BlockFormat,
    tensor: int,
    expert: int,
) -> str | None:
    """Describes a weight of which an engine's rank would keep part of a block, or stack one within
    a block."""
    table = engine_table(shape)
    for rule in filter(linears, table.layer_rules):
        ranks = 1 if is_expert(rule) and expert > 1 else tensor
        parts = list(rule.slices(Axis(ranks)))
        for part in parts:
            problem = None
            rows, columns = part.shape
            whole = rule.shapes()[part.name]
            # the rest of the last tensor's block is unused
            is_last = part is parts[-1] and part.shape == whole
            if rows % fmt.block[0] and not is_last:
                problem = f"{rows} rows"
            if columns % fmt.block[1] and (columns < whole[1] or is_expert(rule)):
                problem = f"{columns} columns"
            if problem:
                return (
                    f"a rank has {problem} of {part.name.format(layer='*', expert='*')}, "
                    f"which are no whole blocks of {fmt.block[0]} x 128"
                )
    return None
