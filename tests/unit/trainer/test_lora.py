"""Adapters on modules that have only the weights of a table, in every family, layer spec and layout: no model runs."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from megarl.config.random_model import hf_config
from megarl.config.schema import Create, Lora
from megarl.layout import Layout, Parallel
from megarl.models.lora import PREFIX, adapter_table
from megarl.models.registry import FAMILIES, megatron_table, padded_vocab, parse_model
from megarl.models.shape import ModelShape
from megarl.models.shards import ShardSlice, shapes_of, slices_of
from megarl.trainer.lora import Adapters, LayerAdapter, Merged

SIZES = {
    "layers": 3,
    "hidden": 64,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 32,
    "vocab": 67,
    "tokenizer": "none",
}
RANK, ALPHA = 3, 5.0


def shape_of(family: str) -> ModelShape:
    experts = {"experts": 4} if FAMILIES[family].is_moe else {}
    return parse_model(hf_config(Create(family=family, **SIZES, **experts)), "test")  # type: ignore[arg-type]


def view(x: Tensor, part: ShardSlice) -> Tensor:
    return x.detach().as_strided(part.shape, part.strides, x.storage_offset() + part.offset)


def cut(whole: Tensor, part: ShardSlice) -> Tensor:
    if len(part.shape) > whole.dim():
        whole = whole.unflatten(-1, (-1, 2))
    return whole[tuple(slice(a, a + n) for a, n in zip(part.start, part.shape, strict=True))]


def chunk_of(slices: list[ShardSlice], tensors: Mapping[str, Tensor]) -> Any:
    """A module tree with the parameters that the slices name."""
    sizes: dict[str, int] = {}
    rows: dict[str, int] = {}
    for part in slices:
        last = sum((n - 1) * stride for n, stride in zip(part.shape, part.strides, strict=True))
        sizes[part.param] = max(sizes.get(part.param, 0), part.offset + last + 1)
        rows[part.param] = part.strides[0] if len(part.shape) == 2 else 0
    chunk: Any = torch.nn.Module()
    chunk.config, chunk.pre_process = SimpleNamespace(recompute_granularity=None), True
    for name, size in sizes.items():
        module, *inner = chunk, *name.split(".")[:-1]
        for each in inner:
            if not hasattr(module, each):
                module.add_module(each, torch.nn.Module())
            module = getattr(module, each)
        flat = torch.zeros(size)
        for part in slices:
            if part.param == name:
                view(flat, part).copy_(cut(tensors[part.name], part))
        x = flat.view(-1, rows[name]) if rows[name] > 1 else flat
        module.register_parameter(name.rpartition(".")[2], torch.nn.Parameter(x))
    return chunk


@pytest.mark.parametrize("spec", ["local", "te"])
@pytest.mark.parametrize(
    "family", ["qwen3", "qwen2", "qwen3_moe", "deepseek_v3", "glm4_moe", "mixtral", "gpt_oss"]
)
def test_merged_weights_are_those_of_each_projection(family: str, spec: Any) -> None:
    """W + alpha / rank * B A of Hugging Face's projections, wherever a layout puts them."""
    shape, generator = shape_of(family), torch.Generator().manual_seed(0)
    lora = Lora(rank=RANK, alpha=ALPHA)
    for parallel in (Parallel(), Parallel(tensor=2, expert=2), Parallel(tensor=2, expert_tensor=2)):
        table = megatron_table(
            shape, spec=spec, padded_vocab=padded_vocab(shape.vocab, parallel.tensor)
        )
        adapters = adapter_table(table, lora.targets, RANK)
        sizes, of_adapters = shapes_of(table, shape), shapes_of(adapters, shape)
        tensors = {
            name: torch.randn(size, generator=generator)
            for name, size in (sizes | of_adapters).items()
        }
        merged = dict(tensors)
        for name in (name for name in of_adapters if ".lora_A." in name):
            weight = name.removeprefix(PREFIX).replace(".lora_A", "")
            merged[weight] = (
                tensors[weight]
                + ALPHA / RANK * tensors[name.replace("lora_A", "lora_B")] @ tensors[name]
            )
        world = parallel.tensor
        for rank in range(world):
            layout = Layout.of(parallel, world, rank)
            slices = slices_of(table, shape, layout)
            chunk = chunk_of(slices, tensors)
            groups: Any = SimpleNamespace(expert_tensor=None)
            found = Adapters([chunk], table, shape, layout, lora, groups=groups, seed=0)
            for part in found.tensors.slices:
                view(found.parameters[part.param], part).copy_(cut(tensors[part.name], part))
            weights = {name: x for name, x in chunk.named_parameters() if "lora_" not in name}
            result = Merged(weights, found.layers)
            for part in slices:
                torch.testing.assert_close(
                    view(result[part.param], part), cut(merged[part.name], part)
                )
            assert {part.name for part in found.tensors.slices} <= of_adapters.keys()
            assert not any(x.requires_grad for x in weights.values())
    assert any(".experts." in name for name in of_adapters) == (
        shape.is_moe and family != "gpt_oss"
    )


def test_adapters_are_added_in_fp32_and_rounded_once() -> None:
    """bf16 has 8 bits: a product of rank 8 rounded before it is added would be off by an ulp or more."""
    random = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64).bfloat16()

    weight, a, b = draw(16, 12), Parameter(draw(8, 12)), Parameter(draw(16, 8))
    rows = torch.arange(16)
    layer = LayerAdapter(a, b, rows, torch.zeros_like(rows), 16, 0.3, torch.nn.Identity())
    exact = weight.double() + 0.3 * (b.double() @ a.double())
    # of two roundings, fp32 in between: beside half of bf16's ulp, what nine fp32 sums can lose
    ulp = torch.exp2(exact.abs().log2().floor() - 7)
    assert ((layer.merged(weight).double() - exact).abs() <= 0.5 * ulp + 2**-18).all()
