"""`megarl check CONFIG --precision`: the format of each module's weights, or of its products, on both sides."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby

from megarl.config.model_checks import is_in_fp8
from megarl.config.names import ENGINE_STAGES
from megarl.config.schema import Config
from megarl.models.formats import FORMATS
from megarl.models.fp8 import SCALE, scale_shapes
from megarl.models.registry import fp32_tensors, hf_shapes
from megarl.models.shape import ModelShape
from megarl.planner.weight_sync import rollout_format

HEADER = ("module", "layers", "trainer", "engine")


def describe_precision(config: Config, shape: ModelShape) -> str:
    """Returns a table with a line for each kind of module and run of layers that are alike; Hugging Face's names."""
    fp8, fmt, dtype, fp32 = (
        config.precision.fp8,
        rollout_format(config, shape),
        config.train.dtype,
        fp32_tensors(shape),
    )
    linear = {name.removesuffix(SCALE) for name in scale_shapes(shape, FORMATS["fp8_block"])}
    recipe = (
        fp8
        and f"FP8 {fp8.recipe}{', emulated' if fp8.emulate else ''}, weights {'FP8' if fp8.params else dtype}"
    )
    block = fmt and f"FP8, a scale per {fmt.block[0]} x {fmt.block[1]}"
    layers: dict[tuple[str, str, str], dict[int, None]] = {}  # in order, once each
    for name in hf_shapes(shape):
        number = re.search(r"layers\.(\d+)\.", name)
        layer = int(number[1]) if number else -1
        module = re.sub(r"\.\d+\.", ".*.", name).removeprefix("model.")
        is_router = name.removesuffix(".weight").rpartition(".")[2] in ("gate", "router")
        usual = "fp32" if name in fp32 else dtype
        trained = (
            recipe
            if fp8 and recipe and name in linear and is_in_fp8(layer, shape.layers, fp8)
            else usual
        )
        trained = "fp32 products" if is_router else trained
        row = (module, trained, block if block and name in linear else usual)
        layers.setdefault(row, {})[layer] = None
    has_engine = config.stage in ENGINE_STAGES
    rows = [HEADER, *((row[0], _ranges([*numbers]), *row[1:]) for row, numbers in layers.items())]
    rows = [row if has_engine else row[:-1] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(text.ljust(n) for text, n in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def _ranges(numbers: Sequence[int]) -> str:
    """[0, 1, 2, 5] -> "0-2, 5"; [-1], of what is in no layer, -> "-"."""
    pairs = groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    runs = [[number for _, number in run] for _, run in pairs]
    parts = (f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    return ", ".join(parts) if numbers != [-1] else "-"
