"""`megarl check CONFIG --precision`: lists each module's precision in the trainer and the engine.

Each line of the table is a module, by its Hugging Face name, and the layers in which it has these
formats.
"""

import re
from collections.abc import Sequence

from megarl.config.precision import Fp8, is_in_fp8, rollout_format
from megarl.config.schema import Config
from megarl.data.ledger import ranges_of
from megarl.models.engine import linear_shapes
from megarl.models.registry import fp32_tensors, hf_shapes
from megarl.models.shape import ModelShape

HEADER = ("module", "layers", "trainer", "engine")
OUTSIDE = -1  # layer index of modules outside the transformer layers


def describe_precision(config: Config, shape: ModelShape) -> str:
    """Returns the table as text, without the engine's column in stages without rollouts."""
    fp8 = config.precision.fp8
    engine_format = rollout_format(config, shape)
    dtype = config.train.dtype
    fp32 = fp32_tensors(shape)
    linear = linear_shapes(shape)
    layers = {}  # (module, trainer's format, engine's format) -> layer indices
    for name in hf_shapes(shape):
        layer = OUTSIDE
        number = re.search(r"layers\.(\d+)\.", name)
        if number:
            layer = int(number[1])
        trained = dtype
        if name in fp32:
            trained = "fp32"
        sampled = trained
        if name in linear:
            if fp8 and is_in_fp8(layer, shape.layers, fp8):
                trained = _recipe(fp8, dtype)
            if engine_format:
                rows, columns = engine_format.block
                sampled = f"FP8, a scale per {rows} x {columns}"
        if name.removesuffix(".weight").endswith((".gate", ".router")):
            trained = "fp32 products"
        module = re.sub(r"\.\d+\.", ".*.", name).removeprefix("model.")
        numbers = layers.setdefault((module, trained, sampled), [])
        if layer not in numbers:
            numbers.append(layer)
    table: list[tuple[str, ...]] = [HEADER]
    for (module, trained, sampled), numbers in layers.items():
        table.append((module, _ranges(numbers), trained, sampled))
    if not config.stage_spec.needs_engine:
        table = [row[:-1] for row in table]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in table)


def _recipe(fp8: Fp8, dtype: str) -> str:
    """Describes the FP8 format of the trainer's linear layers."""
    emulated = ""
    if fp8.emulate:
        emulated = ", emulated"
    weights = dtype
    if fp8.params:
        weights = "FP8"
    return f"FP8 {fp8.recipe}{emulated}, weights {weights}"


def _ranges(numbers: Sequence[int]) -> str:
    """Formats layer indices: [0, 1, 2, 5] -> "0-2, 5"; [OUTSIDE] -> "-"."""
    if numbers == [OUTSIDE]:
        return "-"
    ranges = ("-".join(map(str, dict.fromkeys(ends))) for ends in ranges_of(numbers))
    return ", ".join(ranges)
