"""`quantization_config` of released models, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from megarl.models.formats import FORMATS, BlockFormat, read_format

DEEPSEEK = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
KIMI_WEIGHTS: dict[str, Any] = {
    "actorder": None, "block_structure": None, "dynamic": False, "group_size": 32, "num_bits": 4, "observer": "minmax",
    "observer_kwargs": {}, "strategy": "group", "symmetric": True, "type": "int",
}  # fmt: skip
FP8_WEIGHTS = KIMI_WEIGHTS | {
    "num_bits": 8,
    "type": "float",
    "group_size": None,
    "strategy": "channel",
}
NVFP4_WEIGHTS = FP8_WEIGHTS | {"num_bits": 4, "strategy": "tensor_group", "group_size": 16}


def compressed(
    weights: dict[str, Any], stored_as: str = "pack-quantized", **others: Any
) -> dict[str, Any]:
    group = {
        "input_activations": None,
        "output_activations": None,
        "targets": ["Linear"],
        "weights": weights,
    }
    top = {
        "quant_method": "compressed-tensors",
        "format": stored_as,
        "config_groups": {"group_0": group},
    }
    return (
        top
        | {"ignore": ["lm_head", "re:.*self_attn.*"], "quantization_status": "compressed"}
        | others
    )


def size(fmt: BlockFormat) -> tuple[str, tuple[int, int]]:
    return fmt.name, fmt.block


@pytest.mark.parametrize(
    ("raw", "expected", "parts"),
    [
        (DEEPSEEK, ("fp8_block", (128, 128)), {"": (576, 7168), "_scale_inv": (5, 56)}),
        (compressed(KIMI_WEIGHTS), ("int4_group", (1, 32)), {"_packed": (576, 896), "_scale": (576, 224)}),
        (compressed(KIMI_WEIGHTS | {"group_size": 128}), ("int4_group", (1, 128)), {"_scale": (576, 56)}),
        (compressed(KIMI_WEIGHTS | {"strategy": "channel", "group_size": None}), ("int4_group", (1, 0)),
         {"_scale": (576, 1)}),
        (compressed(FP8_WEIGHTS, "float-quantized"), ("fp8_channel", (1, 0)), {"": (576, 7168), "_scale": (576, 1)}),
        (compressed(FP8_WEIGHTS | {"strategy": "tensor"}, "naive-quantized"), ("fp8_tensor", (0, 0)), {"_scale": (1,)}),
        (compressed(FP8_WEIGHTS | {"strategy": "block", "block_structure": [128, 128]}, "float-quantized"),
         ("fp8_block", (128, 128)), {"_scale": (5, 56)}),
        (compressed(NVFP4_WEIGHTS, "nvfp4-pack-quantized"), ("nvfp4", (1, 16)),
         {"_packed": (576, 3584), "_scale": (576, 448), "_global_scale": (1,)}),
        (compressed(FP8_WEIGHTS | {"num_bits": 4, "strategy": "group", "group_size": 32}, "mxfp4-pack-quantized"),
         ("mxfp4_pack", (1, 32)), {"_packed": (576, 3584), "_scale": (576, 224)}),
    ],
)  # fmt: skip
def test_released_models(
    raw: dict[str, Any], expected: Any, parts: dict[str, tuple[int, ...]]
) -> None:
    fmt = read_format(raw)
    assert size(fmt) == expected
    stored = {suffix: shape for suffix, (_, shape) in fmt.parts((576, 7168)).items()}
    assert stored.items() >= parts.items()


def test_powers_of_two() -> None:
    """DeepSeek-V3.1."""
    assert read_format(DEEPSEEK | {"scale_fmt": "ue8m0"}) == replace(
        FORMATS["fp8_block"], power_of_2=True
    )


def test_gpt_oss() -> None:
    """One layer of gpt-oss-20b: 32 experts, 2880 inputs, 5760 rows of gate and up."""
    fmt = read_format(
        {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    )
    assert fmt is FORMATS["mxfp4"]
    assert fmt.parts((32, 2880, 5760)) == {
        "_blocks": ("U8", (32, 5760, 90, 16)),
        "_scales": ("U8", (32, 5760, 90)),
    }


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"quant_method": "awq", "bits": 4}, '"awq" is not supported; supported: "fp8" or "mxfp4" or "comp'),
        ({}, "quant_method=null is not supported"),
        (DEEPSEEK | {"fmt": "e5m2"}, 'fmt="e5m2" is not supported'),
        (DEEPSEEK | {"scale_fmt": "e4m3"}, 'scale_fmt="e4m3" is not supported'),
        (DEEPSEEK | {"weight_block_size": [128]}, r"weight_block_size=\[128\] is invalid"),
        (DEEPSEEK | {"weight_block_size": [0, 128]}, r"weight_block_size=\[0, 128\] is invalid"),
        (compressed(KIMI_WEIGHTS | {"symmetric": False}), "symmetric=false is not supported; supported: true"),
        (compressed(KIMI_WEIGHTS | {"actorder": "group"}), 'actorder="group" is not supported'),
        (compressed(KIMI_WEIGHTS | {"num_bits": 8}), "int8 group pack-quantized, group_size=32 are not supported"),
        (compressed(KIMI_WEIGHTS | {"group_size": 12}), "int4 group pack-quantized, group_size=12 are not"),
        (compressed(KIMI_WEIGHTS, "marlin-24"), "int4 group marlin-24"),
        (compressed(KIMI_WEIGHTS, sparsity_config={"format": "sparse-24-bitmask"}), "format='sparse-24-bit"),
        (compressed(KIMI_WEIGHTS, transform_config={"R1": {}}), "transform_config="),
        (compressed(KIMI_WEIGHTS, config_groups={}), "config_groups has 0 ways"),
        (compressed(KIMI_WEIGHTS, config_groups={"a": {"weights": KIMI_WEIGHTS}, "b": {"weights": FP8_WEIGHTS}}),
         "config_groups has 2 ways"),
    ],
)  # fmt: skip
def test_refused(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_format(json.loads(json.dumps(raw)))


@pytest.mark.parametrize("key", ["zero_point_scheme", "codebook"])
def test_a_key_that_is_not_known_is_refused(key: str) -> None:
    """Formats grow; null, false and empty values are those of a format without the key."""
    for off in (None, False, {}, []):
        assert read_format(DEEPSEEK | {key: off}) == read_format(DEEPSEEK)
        assert read_format(compressed(KIMI_WEIGHTS | {key: off})).name == "int4_group"
    for raw in (DEEPSEEK | {key: "x"}, compressed(KIMI_WEIGHTS | {key: "x"})):
        with pytest.raises(ValueError, match=f'{key}="x" is not supported'):
            read_format(raw)
