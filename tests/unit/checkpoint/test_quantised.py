"""Folders of quantised weights: every slice is read as if the whole tensor had been dequantised first."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from megarl.checkpoint import hf_folder
from megarl.checkpoint.hf_folder import HfFolder
from megarl.models.formats import FORMATS, BlockFormat
from megarl.models.shards import ShardSlice
from megarl.weights.encode.quantize import dequantize, quantize
from megarl.weights.sync.execute import strided_view

FP8: dict[str, Any] = {"type": "float", "num_bits": 8, "symmetric": True}
CONFIGS: dict[str, dict[str, Any]] = {
    "fp8_block": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "fp8_channel": FP8 | {"strategy": "channel", "format": "float-quantized"},
    "fp8_tensor": FP8 | {"strategy": "tensor", "format": "float-quantized"},
    "mxfp4_pack": FP8 | {"num_bits": 4, "strategy": "group", "group_size": 32, "format": "mxfp4-pack-quantized"},
    "nvfp4": FP8 | {"num_bits": 4, "strategy": "tensor_group", "group_size": 16, "format": "nvfp4-pack-quantized"},
    "int4_group": FP8 | {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 32,
                         "format": "pack-quantized"},
    "mxfp4": {"quant_method": "mxfp4"},
}  # fmt: skip


def config_of(name: str) -> dict[str, Any]:
    raw = CONFIGS[name]
    if "quant_method" in raw:
        return raw
    groups = {
        "group_0": {
            "targets": ["Linear"],
            "weights": {k: v for k, v in raw.items() if k != "format"},
        }
    }
    return {"quant_method": "compressed-tensors", "format": raw["format"], "config_groups": groups}


def write(folder: Path, fmt: BlockFormat, tensors: dict[str, Tensor], **plain: Tensor) -> None:
    stored = {
        name + suffix: part
        for name, w in tensors.items()
        for suffix, part in quantize(w, fmt).items()
    }
    save_file(stored | plain, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": config_of(fmt.name)}))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", CONFIGS)
def test_slices(
    tmp_path: Path, name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows and columns that begin anywhere, as one block or as many, into strided memory, of a matrix and of a stack of
    matrices; gpt-oss's inputs come first, and its outputs as pairs."""
    fmt, generator = FORMATS[name], torch.Generator().manual_seed(0)
    w, stack = (torch.randn(size, generator=generator) for size in ((300, 352), (3, 352, 320)))
    if fmt.is_transposed:
        stack, w = stack.transpose(1, 2).contiguous(), w.T.contiguous()
    write(tmp_path, fmt, {"w": w} if name == "fp8_tensor" else {"w": w, "stack": stack})
    folder = HfFolder(tmp_path)
    for whole, label in ((w, "w"), (stack, "stack")):
        if label not in folder.storage.names:
            continue
        parts = quantize(whole, fmt)
        shape = whole.transpose(-1, -2).shape if fmt.is_transposed else whole.shape
        exact = dequantize(parts, fmt, shape, dtype)
        exact = exact.transpose(-1, -2) if fmt.is_transposed else exact
        rows, columns = whole.shape[-2:]
        cases = (
            (0, rows, 0, columns),
            (96, 131, 0, columns),
            (127, 200, 32, 97),
            (rows - 1, rows, 1, 2),
            (0, 5, 130, 150),
        )
        for limit in (1 << 23, 4000):
            monkeypatch.setattr(hf_folder, "BLOCK_BYTES", limit)
            for top, bottom, left, right in cases:
                size = (bottom - top, right - left)
                index = (2,) if label == "stack" else ()
                start, full = (*index, top, left), ((1, *size) if index else size)
                parameter = torch.full((2 * size[0] * size[1],), 7.0, dtype=dtype)
                # transposed, every second element
                strides = (0, 2, 2 * size[0]) if index else (2, 2 * size[0])
                box = ShardSlice(label, start, full, "p", 1, strides)
                folder.copy(box, parameter)
                expected = exact[(*index, slice(top, bottom), slice(left, right))]
                assert torch.equal(strided_view(parameter, box).view(size), expected)
                assert (parameter[::2] == 7).all()
                if fmt.is_transposed and index and left % 2 == right % 2 == 0:
                    pairs = (1, size[0], size[1] // 2, 2)
                    box = ShardSlice(
                        label,
                        (2, top, left // 2, 0),
                        pairs,
                        "p",
                        0,
                        (0, 1, size[0], right * size[0]),
                    )
                    parameter = torch.zeros(2 * right * size[0], dtype=dtype)
                    folder.copy(box, parameter)
                    assert torch.equal(strided_view(parameter, box).reshape(size), expected)


def test_folder_is_checked_by_its_stored_tensors(tmp_path: Path) -> None:
    plain = {
        "norm": torch.ones(4),
        "w.input_scale": torch.ones(()),
        "m.rotary_emb.inv_freq": torch.ones(2),
    }
    write(tmp_path, FORMATS["fp8_block"], {"w": torch.ones(200, 300)}, **plain)
    folder = HfFolder(tmp_path)
    shapes = {"w": (200, 300), "norm": (4,)}
    folder.check(shapes)
    assert folder.dtype("w") == torch.bfloat16 and folder.dtype("norm") == torch.float32
    with pytest.raises(
        ValueError, match=r"w has shape \(200, 300\), but config.json requires \(200, 301\)"
    ):
        folder.check(shapes | {"w": (200, 301)})
    with pytest.raises(
        ValueError, match=r"w_scale_inv has shape \(2, 3\), but config.json requires \(1, 3\)"
    ):
        wide = replace(FORMATS["fp8_block"], block=(256, 128))
        folder.storage = replace(folder.storage, format=wide)
        folder.check(shapes)
