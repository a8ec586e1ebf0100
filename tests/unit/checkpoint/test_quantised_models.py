"""Quantised models as they are released, tiny and random: every rank has, in a layout that cuts blocks, its slices of
what transformers dequantises, bit for bit; where transformers cannot or is wrong, of products in fp64."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from quantised_folders import KINDS, by_transformers, make_quantised, read_all, stored
from safetensors.torch import load_file
from torch import Tensor

from megarl.checkpoint.hf_folder import load_hf
from megarl.commands.conversion import run_convert
from megarl.layout import Layout, Parallel
from megarl.models.formats import BlockFormat
from megarl.models.registry import hf_shapes, megatron_table, read_model
from megarl.models.shards import slices_of
from megarl.types import CheckFailed
from megarl.weights.encode.quantize import Storage
from megarl.weights.sync.execute import strided_view


def by_products(parts: Mapping[str, dict[str, Tensor]], fmt: BlockFormat) -> dict[str, Tensor]:
    """FP8 blocks: element (r, c) times scale (r // 128, c // 128), in fp64."""
    tensors = {}
    for name, pieces in parts.items():
        values, scales = pieces[""].double(), pieces[fmt.scale].double()
        rows, columns = (torch.arange(size) // 128 for size in values.shape)
        tensors[name] = (values * scales[rows][:, columns]).float()
    return tensors


@pytest.mark.parametrize("kind", KINDS)
def test_every_rank_has_its_slices(tmp_path: Path, kind: str) -> None:
    folder, fmt, parts = make_quantised(kind, tmp_path)
    # transformers refuses 576 rows, and takes 192 rows for two blocks of 96
    exact = kind == "deepseek_v3-fp8"
    dtype = torch.float32 if exact else torch.bfloat16
    expected = (
        load_file(folder / "model.safetensors") | by_products(parts, fmt)
        if exact
        else by_transformers(kind, folder)
    )
    shape = read_model(folder)
    table = megatron_table(shape, spec="local", padded_vocab=80)
    for tensor, expert in ((1, 1), (2, 2) if shape.experts else (2, 1)):
        for rank in range(2 if tensor == 2 else 1):
            layout = Layout.of(Parallel(tensor=tensor, expert=expert), tensor, rank)
            slices = slices_of(table, shape, layout)
            sizes: dict[str, int] = {}
            for part in slices:
                end = (
                    part.offset
                    + sum((n - 1) * s for n, s in zip(part.shape, part.strides, strict=True))
                    + 1
                )
                sizes[part.param] = max(sizes.get(part.param, 0), end)
            parameters = {name: torch.zeros(size, dtype=dtype) for name, size in sizes.items()}
            load_hf(parameters, slices, folder)
            for part in slices:
                full = expected[part.name].to(dtype).view(hf_shapes(shape)[part.name])
                if len(part.shape) > full.dim():
                    full = full.unflatten(-1, (-1, 2))
                mine = strided_view(parameters[part.param], part)
                region = tuple(
                    slice(start, start + size)
                    for start, size in zip(part.start, part.shape, strict=True)
                )
                assert torch.equal(mine, full[region]), f"rank {rank} of {tensor}: {part}"
    assert len(parts) >= 4


def config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.startswith("qwen3-")])
def test_converted_to_megatron_and_back(tmp_path: Path, kind: str) -> None:
    """In bf16 the elements times their scales, without a quantization_config; in its own format the same elements."""
    folder, fmt, parts = make_quantised(kind, tmp_path)
    options: dict[str, Any] = {"config": folder, "file_bytes": 100_000, "interactive": False}
    run_convert(folder, tmp_path / "megatron", "megatron", Parallel(), **options)
    run_convert(tmp_path / "megatron", tmp_path / "bf16", "hf", Parallel(), **options)
    run_convert(
        tmp_path / "megatron", tmp_path / "same", "hf", Parallel(), **options, export_format="same"
    )
    before, plain, same = (stored(path) for path in (folder, tmp_path / "bf16", tmp_path / "same"))
    assert "quantization_config" not in config(tmp_path / "bf16")
    assert config(tmp_path / "same") == config(folder)
    shapes = hf_shapes(read_model(folder))
    assert {name: tuple(x.shape) for name, x in plain.items()} == shapes
    assert before.keys() == same.keys() and len(list((tmp_path / "same").glob("*.safetensors"))) > 1
    for name, x in same.items():
        assert (x.dtype, x.shape) == (before[name].dtype, before[name].shape), name
    for name in parts:
        scale, values = same[name + fmt.scale].float(), same[name + fmt.values]
        assert torch.equal(values.view(torch.uint8), before[name + fmt.values].view(torch.uint8)), (
            name
        )
        torch.testing.assert_close(scale, before[name + fmt.scale].float(), rtol=2**-7, atol=0)
    for name, exact in read_all(folder).items():
        assert torch.equal(exact, plain[name]), name
        torch.testing.assert_close(read_all(tmp_path / "same")[name], exact, rtol=2**-6, atol=0)
    with pytest.raises(ValueError, match=r"megatron has no \*.safetensors"):
        run_convert(
            tmp_path / "megatron",
            tmp_path / "x",
            "hf",
            Parallel(),
            **options | {"config": None},
            export_format="same",
        )


def test_a_fault_in_the_written_scales_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, *_ = make_quantised("deepseek_v3-fp8", tmp_path)
    options: dict[str, Any] = {"config": folder, "file_bytes": 1 << 30, "interactive": False}
    encode = Storage.encode

    def faulty(self: Storage, name: str, tensor: Tensor) -> dict[str, Tensor]:
        parts = encode(self, name, tensor)
        if name == "model.layers.1.self_attn.o_proj.weight":
            parts[f"{name}_scale_inv"][0, 0] *= 2
        return parts

    monkeypatch.setattr(Storage, "encode", faulty)
    with pytest.raises(
        CheckFailed, match=r"model.layers.1.self_attn.o_proj.weight differ from the source"
    ):
        run_convert(folder, tmp_path / "same", "hf", Parallel(), **options, export_format="same")
