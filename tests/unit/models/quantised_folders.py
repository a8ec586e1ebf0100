"""Random Hugging Face folders whose weights are quantised as released models are."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from megarl.config.schema import Create
from megarl.launch.random_model import create_model
from megarl.models.formats import BlockFormat, read_quantization
from megarl.weights.quantize import quantize

FP8_BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
FP8: dict[str, Any] = {"type": "float", "num_bits": 8, "symmetric": True, "dynamic": False}


def compressed(stored_as: str, *ignored: str, **weights: Any) -> dict[str, Any]:
    """compressed-tensors' config of one way to store the weights of linear layers."""
    group = {"targets": ["Linear"], "weights": FP8 | weights, "input_activations": None, "format": stored_as}
    top = {"quant_method": "compressed-tensors", "format": stored_as, "quantization_status": "compressed"}
    return top | {"config_groups": {"group_0": group}, "ignore": ["lm_head", *ignored]}


MOE = {"experts": 4, "vocab": 67, "max_position": 256, "tied": False}
# hidden 160 and 192 are not multiples of 128, nor are the 576 rows of DeepSeek-V3's kv_a_proj_with_mqa
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "deepseek_v3-fp8": ({"family": "deepseek_v3", "hidden": 160, "moe_intermediate": 192, **MOE}, FP8_BLOCKS),
    "deepseek_v3-int4": (
        {"family": "deepseek_v3", "hidden": 160, "moe_intermediate": 192, **MOE},
        compressed("pack-quantized", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp.(gate|up|down)_proj.*",
                   type="int", num_bits=4, strategy="group", group_size=32),
    ),
    "gpt_oss-mxfp4": (
        {"family": "gpt_oss", "hidden": 160, "moe_intermediate": 192, **MOE},
        {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router",
                                                             "model.embed_tokens", "lm_head"]},
    ),
    "qwen3_moe-channel": (
        {"family": "qwen3_moe", "hidden": 160, "moe_intermediate": 192, **MOE},
        compressed("float-quantized", "re:.*mlp.gate$", strategy="channel"),
    ),
    "qwen3_moe-fp8": ({"family": "qwen3_moe", "hidden": 256, "moe_intermediate": 128, **MOE}, FP8_BLOCKS),
    "qwen3-tensor": ({"family": "qwen3", "hidden": 160, "vocab": 67}, compressed("float-quantized", strategy="tensor")),
    "qwen3-nvfp4": (
        {"family": "qwen3", "hidden": 160, "vocab": 67},
        compressed("nvfp4-pack-quantized", num_bits=4, strategy="tensor_group", group_size=16),
    ),
    "qwen3-mxfp4": (
        {"family": "qwen3", "hidden": 160, "vocab": 67},
        compressed("mxfp4-pack-quantized", num_bits=4, strategy="group", group_size=32),
    ),
}  # fmt: skip
PLAIN = ("embed_tokens", "lm_head", "mlp.gate.weight", "norm", "bias", "router", "sinks")


def is_quantised(name: str, kind: str) -> bool:
    if kind == "deepseek_v3-int4":
        return ".experts." in name
    if kind == "gpt_oss-mxfp4":
        return name.endswith(("gate_up_proj", "down_proj"))
    return not any(word in name for word in PLAIN)


def make_quantised(kind: str, root: Path) -> tuple[Path, BlockFormat, dict[str, dict[str, Tensor]]]:
    """Returns the folder, the format of its weights, and by tensor the stored tensors of each, by suffix."""
    create, quantization = KINDS[kind]
    origin = create_model(Create(layers=2, heads=4, kv_heads=2, head_dim=32, **create), root / "models")
    folder = root / kind
    shutil.copytree(origin, folder)
    values = json.loads((folder / "config.json").read_text()) | {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(values))
    fmt = read_quantization(quantization)
    if fmt.element == "e4m3" and fmt.scale == "_scale":  # as released models of compressed-tensors
        fmt = replace(fmt, scale_dtype="BF16")
    stored: dict[str, Tensor] = {}
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if is_quantised(name, kind):
            parts[name] = quantize(tensor, fmt)
            stored |= {name + suffix: part for suffix, part in parts[name].items()}
        else:
            stored[name] = tensor if name.endswith("e_score_correction_bias") else tensor.bfloat16()
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return folder, fmt, parts
