"""Random Hugging Face folders whose weights are quantised as released models are."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    CompressedTensorsConfig,
    FineGrainedFP8Config,
    Mxfp4Config,
)

from megarl.checkpoint.hf_folder import HfFolder
from megarl.commands.random_model import create_model
from megarl.config.schema import Create
from megarl.models.formats import BlockFormat, read_format
from megarl.models.registry import hf_shapes, read_model
from megarl.models.shards import whole_tensor
from megarl.weights.encode.quantize import quantize

FP8_BLOCKS = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
FP8: dict[str, Any] = {"type": "float", "num_bits": 8, "symmetric": True, "dynamic": False}


def compressed(stored_as: str, *ignored: str, **weights: Any) -> dict[str, Any]:
    """compressed-tensors' config of one way to store the weights of linear layers."""
    group = {
        "targets": ["Linear"],
        "weights": FP8 | weights,
        "input_activations": None,
        "format": stored_as,
    }
    top = {
        "quant_method": "compressed-tensors",
        "format": stored_as,
        "quantization_status": "compressed",
    }
    return top | {"config_groups": {"group_0": group}, "ignore": ["lm_head", *ignored]}


MOE = {"experts": 4, "vocab": 67, "tied": False}
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
    origin = create_model(
        Create(layers=2, heads=4, kv_heads=2, head_dim=32, **create), root / "models"
    )
    folder = root / kind
    shutil.copytree(origin, folder)
    values = json.loads((folder / "config.json").read_text()) | {
        "quantization_config": quantization
    }
    (folder / "config.json").write_text(json.dumps(values))
    fmt = read_format(quantization)
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


def stored(folder: Path) -> dict[str, Tensor]:
    return {name: x for file in folder.glob("*.safetensors") for name, x in load_file(file).items()}


def read_all(folder: Path) -> dict[str, Tensor]:
    """The quantised tensors as megarl dequantises them, matrix by matrix, in bf16."""
    source, tensors = HfFolder(folder), {}
    shapes = hf_shapes(read_model(folder))
    for name in source.storage.names:
        *lead, rows, columns = shapes[name]
        tensors[name] = torch.zeros(shapes[name], dtype=torch.bfloat16)
        for index in range(lead[0]) if lead else (0,):
            part = whole_tensor(name, (*(1 for _ in lead), rows, columns))
            part = replace(
                part, start=(*(index for _ in lead), 0, 0), offset=index * rows * columns
            )
            source.copy(part, tensors[name])
    return tensors


CONFIGS = {"fp8": FineGrainedFP8Config, "mxfp4": Mxfp4Config}


def by_transformers(kind: str, folder: Path) -> dict[str, Tensor]:
    """By the checkpoint's names; transformers stacks experts, and gate and up."""
    config = CONFIGS.get(kind.split("-")[1], CompressedTensorsConfig)
    if kind == "qwen3-mxfp4":
        config = CompressedTensorsConfig
    with torch.compiler.set_stance("force_eager"):
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, quantization_config=config(dequantize=True)
        )
    tensors = model.state_dict()
    for name in [name for name in tensors if ".experts." in name and "gpt_oss" not in kind]:
        stacked, prefix = tensors.pop(name), name.rsplit(".", 1)[0]
        for expert, matrix in enumerate(stacked):
            if name.endswith("gate_up_proj"):
                gate, up = matrix.chunk(2)
                tensors |= {
                    f"{prefix}.{expert}.gate_proj.weight": gate,
                    f"{prefix}.{expert}.up_proj.weight": up,
                }
            else:
                tensors[f"{prefix}.{expert}.down_proj.weight"] = matrix
    return tensors
