"""Quantised models as they are released, tiny and random: every rank has, in a layout that cuts blocks, its slices of
what transformers dequantises, bit for bit; where transformers cannot or is wrong, of products in fp64."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from quantised_folders import KINDS, make_quantised
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, FineGrainedFP8Config, Mxfp4Config

from megarl.checkpoint.hf_folder import load_hf, view
from megarl.layout import Layout, Parallel
from megarl.models.formats import BlockFormat
from megarl.models.registry import hf_shapes, megatron_table, read_model
from megarl.models.shards import slices_of

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
                tensors |= {f"{prefix}.{expert}.gate_proj.weight": gate, f"{prefix}.{expert}.up_proj.weight": up}
            else:
                tensors[f"{prefix}.{expert}.down_proj.weight"] = matrix
    return tensors


def by_products(parts: Mapping[str, dict[str, Tensor]], fmt: BlockFormat) -> dict[str, Tensor]:
    """FP8 blocks: element (r, c) times scale (r // 128, c // 128), in fp64."""
    tensors = {}
    for name, stored in parts.items():
        values, scales = stored[""].double(), stored[fmt.scale].double()
        rows, columns = (torch.arange(size) // 128 for size in values.shape)
        tensors[name] = (values * scales[rows][:, columns]).float()
    return tensors


@pytest.mark.parametrize("kind", KINDS)
def test_every_rank_has_its_slices(tmp_path: Path, kind: str) -> None:
    folder, fmt, parts = make_quantised(kind, tmp_path)
    exact = kind == "deepseek_v3-fp8"  # transformers refuses 576 rows, and takes 192 rows for two blocks of 96
    dtype = torch.float32 if exact else torch.bfloat16
    expected = (
        load_file(folder / "model.safetensors") | by_products(parts, fmt) if exact else by_transformers(kind, folder)
    )
    shape = read_model(folder)
    table = megatron_table(shape, spec="local", padded_vocab=80)
    for tensor, expert in ((1, 1), (2, 2) if shape.experts else (2, 1)):
        for rank in range(2 if tensor == 2 else 1):
            layout = Layout.of(Parallel(tensor=tensor, expert=expert), tensor, rank)
            slices = slices_of(table, shape, layout)
            sizes: dict[str, int] = {}
            for part in slices:
                end = part.offset + sum((n - 1) * s for n, s in zip(part.shape, part.strides, strict=True)) + 1
                sizes[part.param] = max(sizes.get(part.param, 0), end)
            parameters = {name: torch.zeros(size, dtype=dtype) for name, size in sizes.items()}
            load_hf(parameters, slices, folder)
            for part in slices:
                full = expected[part.name].to(dtype).view(hf_shapes(shape)[part.name])
                if len(part.shape) > full.dim():
                    full = full.unflatten(-1, (-1, 2))
                mine = view(parameters[part.param], part)
                region = tuple(slice(start, start + size) for start, size in zip(part.start, part.shape, strict=True))
                assert torch.equal(mine, full[region]), f"rank {rank} of {tensor}: {part}"
    assert len(parts) >= 4
