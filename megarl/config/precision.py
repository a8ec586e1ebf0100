"""Section `precision`: FP8 training, and the checks of FP8 in trainer and engine."""

from typing import Literal

from pydantic import NonNegativeInt

from megarl.config.section import Config, Section, refuse
from megarl.models.engine import engine_format
from megarl.models.formats import ENGINE_FORMATS, BlockFormat
from megarl.models.shape import ModelShape
from megarl.platform.env import has_bf16_products


class Fp8(Section):
    """FP8 training (megarl.trainer.fp8): matrix products of linear layers, forward and backward."""

    recipe: Literal["blockwise", "tensorwise", "mxfp8", "delayed"] = "blockwise"
    """Scaling recipe of Transformer Engine."""
    params: bool = False
    """Rounds parameters to FP8 after each update; main weights are fp32. Only with `emulate`."""
    first_last_bf16: NonNegativeInt = 0
    """Number of layers at each end of the model that stay in train.dtype."""
    emulate: bool = False
    """Emulates the rounding of the recipe in plain torch, on a CPU."""


class Precision(Section):
    """Precision of the trainer's matrix products; everything else is in train.dtype."""

    fp8: Fp8 | None = None
    """FP8 training; null: off."""

    @property
    def recipe(self) -> str | None:
        return self.fp8.recipe if self.fp8 else None


def is_in_fp8(layer: int, layers: int, fp8: Fp8) -> bool:
    """Returns True if the linear layers of transformer layer `layer` (of `layers`) use FP8."""
    return fp8.first_last_bf16 <= layer < layers - fp8.first_last_bf16


def rollout_format(config: Config, shape: ModelShape) -> BlockFormat | None:
    """Returns the block format of the engine's linear layers; None if they have the trainer's
    dtype. Raises ValueError if `engine_format` does.
    """
    rollout = config.rollout
    if rollout.quantization == "none":
        return None
    return engine_format(rollout.quantization, shape, rollout.tensor, rollout.expert)


def check_rollout_format(config: Config, shape: ModelShape, gpus: int) -> None:
    """Raises ValueError if vLLM has no FP8 kernel for this device and dtype, or if its shards would
    split blocks that share a scale.
    """
    rollout = config.rollout
    dtype = config.train.dtype
    if rollout.quantization != "none" and dtype != "bf16":
        raise ValueError(
            f"rollout.quantization=fp8 computes in bf16, not in train.dtype={dtype}; "
            "set train.dtype=bf16"
        )
    fmt = rollout_format(config, shape)
    if fmt is None:
        return
    rows, _ = fmt.block
    usual, _ = ENGINE_FORMATS[rollout.quantization][0].block
    refuse(
        (
            gpus and rows != usual,
            f"rollout.quantization=fp8 needs blocks of {rows} rows for {shape.family} with "
            f"rollout.tensor={rollout.tensor}, but a GPU's kernels take {usual}; lower "
            "rollout.tensor, or set quantization=none",
        ),
        (
            not gpus and not has_bf16_products(),
            "rollout.quantization=fp8 on a CPU needs one with AVX512-BF16 or AMX; set it to none",
        ),
    )


def check_products(config: Config, shape: ModelShape, gpus: int) -> None:
    """Raises ValueError for FP8 training that this machine, recipe or model does not support."""
    fp8 = config.precision.fp8
    if fp8 is None:
        return
    where = f"precision.fp8.recipe={fp8.recipe}"
    ends = fp8.first_last_bf16
    first_last = f"precision.fp8.first_last_bf16={ends}"
    is_delayed = fp8.recipe == "delayed"
    dtype = config.train.dtype
    refuse(
        (
            not gpus and not fp8.emulate,
            f"{where} needs a GPU with FP8 and Transformer Engine, and this machine has none; set "
            "precision.fp8.emulate=true to round as it does",
        ),
        (
            gpus and fp8.emulate,
            "precision.fp8.emulate=true is for a CPU, and this machine has GPUs; remove it",
        ),
        (
            fp8.params and not fp8.emulate,
            "precision.fp8.params=true is for emulation: Transformer Engine's parameters have not "
            "been tried; leave it at false",
        ),
        (
            fp8.params and dtype != "bf16",
            f"precision.fp8.params=true needs main weights in fp32, not train.dtype={dtype}; set "
            "it to bf16",
        ),
        (
            fp8.params and fp8.recipe != "blockwise",
            f"{where} with params=true cannot be emulated: forward and backward round weights by "
            "other blocks; use blockwise",
        ),
        (gpus and dtype != "bf16", f"{where} needs train.dtype=bf16 on a GPU, not {dtype}; set it"),
        (
            2 * ends >= shape.layers,
            f"{first_last} leaves none of the {shape.layers} layers in FP8; lower it",
        ),
        (
            fp8.emulate and is_delayed and shape.latent,
            f"{where} cannot be emulated for {shape.family}: projections of latent attention do "
            "not save their scales; use tensorwise",
        ),
        (
            ends and is_delayed,
            f"{first_last} with recipe=delayed is not supported by Megatron-Core; set it to 0",
        ),
    )
