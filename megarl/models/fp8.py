"""FP8 blocks of the engine's linear layers: which weights have them, and where their scales are. No torch.

    rule of X.weight --with_scales--> the same rule, and one of X.weight_scale_inv: a number per block

Embeddings, head, norms, routers and biases stay as they are. vLLM splits scales as it splits weights, so none of its
ranks may have part of a block (`fp8_format`). A trainer's rank has all scales of its tensors (weights/fp8.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from megarl.layout import Axis
from megarl.models.engine import engine_table
from megarl.models.formats import FORMATS, BlockFormat
from megarl.models.registry import hf_shapes, megatron_table
from megarl.models.shape import ModelShape
from megarl.models.shards import Replicated, Rule, ShardDim0, ShardDim1, Stack, Table, shapes_of

SCALE = FORMATS["fp8_block"].scale
ROWS = (128, 64, 32)  # of a block; vLLM's kernels for GPUs and for experts need 128


def with_scales(table: Table, fmt: BlockFormat, *, is_whole: bool = False) -> Table:
    """Returns the table with rules for scales; `is_whole`: each rank has all scales of a tensor."""

    def extended(rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
        return (
            *rules,
            *(scales for rule in filter(_is_fp8, rules) for scales in _scales(rule, fmt, is_whole)),
        )

    groups = {name: extended(getattr(table, name)) for name in ("layer", "dense", "expert")}
    names = [
        name
        for rules in groups.values()
        for rule in rules
        for name in rule.shapes()
        if name.endswith(SCALE)
    ]
    weights = frozenset(name.removesuffix(SCALE) for name in names)
    return replace(table, **groups, fp8=weights, fp32=table.fp32.union(names))


def _is_fp8(rule: Rule) -> bool:
    """Whether a rule's tensors are weights of linear layers; not a router's, whose near-ties need precision."""
    return all(
        len(shape) == 2
        and name.endswith(".weight")
        and name.split(".")[-2] not in ("gate", "router")
        for name, shape in rule.shapes().items()
    )


def _scales(rule: Rule, fmt: BlockFormat, is_whole: bool) -> Iterator[Rule]:
    if is_whole:
        for name, shape in rule.shapes().items():
            yield Replicated(
                name + SCALE, f"{rule.param}.{name.split('.')[-2]}{SCALE}", fmt.grid(*shape)
            )
    elif isinstance(rule, Stack):
        grids = [fmt.grid(*shape) for shape in rule.shapes().values()]
        names, rows = tuple(name + SCALE for name in rule.hf), tuple(grid[0] for grid in grids)
        yield Stack(names, rule.param + SCALE, rows, grids[0][1:], rule.max_shards)
    else:
        assert isinstance(rule, Replicated | ShardDim0 | ShardDim1)
        yield replace(
            rule, hf=rule.hf + SCALE, param=rule.param + SCALE, shape=fmt.grid(*rule.shape)
        )


def scale_shapes(shape: ModelShape, fmt: BlockFormat) -> dict[str, tuple[int, ...]]:
    """Returns the scales of all weights that the engine keeps in FP8 blocks, as HF tensors."""
    table = with_scales(megatron_table(shape), fmt, is_whole=True)
    return {name: size for name, size in shapes_of(table, shape).items() if name.endswith(SCALE)}


def quantization_config(shape: ModelShape, fmt: BlockFormat) -> dict[str, Any]:
    """Returns what the config.json of a model in this format has."""
    scales = scale_shapes(shape, fmt)
    kept = [
        name
        for name, size in hf_shapes(shape).items()
        if len(size) == 2 and name + SCALE not in scales
    ]
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": list(fmt.block),
        "modules_to_not_convert": ["lm_head", *(name.removesuffix(".weight") for name in kept)],
    }


def fp8_format(shape: ModelShape, tensor: int, expert: int = 1) -> BlockFormat:
    """Returns the format with the largest blocks that no rank of an engine cuts. Raises ValueError naming a weight."""
    if shape.bridge is not None or shape.swiglu_limit:
        raise ValueError(
            f"rollout.quantization=fp8 does not support {shape.family}; set it to none"
        )
    formats = [
        replace(FORMATS["fp8_block"], block=(rows, 128))
        for rows in ROWS[: 1 if shape.is_moe else None]
    ]
    for fmt in formats:
        if not (problem := _cut_weight(shape, fmt, tensor, expert)):
            return fmt
    others = [size for size in range(1, shape.heads + 1) if shape.heads % size == 0]
    fits = [size for size in others if not _cut_weight(shape, formats[-1], size, expert)]
    remedy = (
        f"choose rollout.tensor from {', '.join(map(str, fits))}"
        if fits
        else "set rollout.quantization=none"
    )
    raise ValueError(f"rollout.quantization=fp8 with rollout.tensor={tensor}: {problem}; {remedy}")


def _cut_weight(shape: ModelShape, fmt: BlockFormat, tensor: int, expert: int) -> str | None:
    """Describes a weight of which an engine's rank would keep part of a block, or stack one within a block."""
    table = engine_table(shape)
    for rules, size in (
        (table.layer, tensor),
        (table.dense, tensor),
        (table.expert, 1 if expert > 1 else tensor),
    ):
        for rule in filter(_is_fp8, rules):
            parts, whole = list(rule.slices(Axis(size))), rule.shapes()
            for number, part in enumerate(parts):
                rows, columns = part.shape
                is_last = (
                    number == len(parts) - 1 and part.shape == whole[part.name]
                )  # the rest of a block is unused
                problem = f"{rows} rows" if rows % fmt.block[0] and not is_last else None
                if columns % fmt.block[1] and (
                    columns < whole[part.name][1] or rules is table.expert
                ):
                    problem = f"{columns} columns"
                if problem:
                    name = part.name.replace("{layer}", "*").replace("{expert}", "*")
                    return f"a rank has {problem} of {name}, which are no whole blocks of {fmt.block[0]} x 128"
    return None
