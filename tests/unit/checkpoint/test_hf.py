"""An export holds every tensor bit for bit, in files under the limit, and replaces the folder only when whole."""

import json

import pytest
import torch
from safetensors.torch import load_file
from two_devices import there, two_devices

from megarl.checkpoint.hf_files import copy_model_files, export_hf
from megarl.commands.random_model import create_model
from megarl.config.schema import Create
from megarl.layout import Layout, Parallel
from megarl.models.registry import fp32_tensors, hf_shapes, megatron_table, read_model
from megarl.models.shards import slices_of
from megarl.types import CheckFailed
from megarl.weights.sync.publish import WeightFormat
from megarl.weights.sync.transports import Transport

SIZES = {"experts": 4, "hidden": 32, "moe_intermediate": 16, "vocab": 67, "tied": False}


@pytest.fixture(scope="module")
def origin(tmp_path_factory):
    return create_model(Create(family="qwen3_moe", **SIZES), tmp_path_factory.mktemp("models"))


def parameters_of(origin, slices, dtype=torch.float32, fp32=frozenset()):
    """A trainer's parameters, filled from the checkpoint through the slices."""
    tensors = load_file(origin / "model.safetensors")
    sizes = {}
    for part in slices:
        last = (
            part.offset
            + sum((n - 1) * s for n, s in zip(part.shape, part.strides, strict=True))
            + 1
        )
        sizes[part.param] = max(sizes.get(part.param, 0), last)
    wide = {part.param for part in slices if part.name in fp32}
    held = {
        name: torch.zeros(size, dtype=torch.float32 if name in wide else dtype)
        for name, size in sizes.items()
    }
    for part in slices:
        values = tensors[part.name][
            tuple(slice(s, s + n) for s, n in zip(part.start, part.shape, strict=True))
        ]
        held[part.param].as_strided(part.shape, part.strides, part.offset).copy_(values)
    return held


def export(
    origin,
    folder,
    *,
    drop=None,
    dtype=torch.float32,
    fp32=frozenset(),
    place=lambda x: x,
    **options,
):
    shape = read_model(origin)
    slices = slices_of(
        megatron_table(shape, spec="local", padded_vocab=68), shape, Layout.of(Parallel(), 1, 0)
    )
    held = {name: place(x) for name, x in parameters_of(origin, slices, dtype, fp32).items()}
    slices = [part for part in slices if part.name != drop]
    export_hf(
        folder,
        origin=origin,
        weights=WeightFormat(hf_shapes(shape), dtype, fp32),
        sources=[slices],
        parameters=lambda: held,
        transport=Transport(),
        **options,
    )


def test_one_file_is_the_checkpoint_again(origin, tmp_path):
    export(origin, tmp_path / "hf")
    before, after = (
        load_file(origin / "model.safetensors"),
        load_file(tmp_path / "hf" / "model.safetensors"),
    )
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert (tmp_path / "hf" / "tokenizer.json").exists()


def test_files_of_config_and_tokenizer_are_copied(tmp_path):
    copied = [
        "config.json",
        "chat_template.jinja",
        "tokenizer.model",
        "qwen.tiktoken",
        "merges.txt",
        "code.py",
    ]
    others = [
        "model.safetensors",
        "model.safetensors.index.json",
        "metadata.json",
        "pytorch_model.bin",
        "README.md",
    ]
    (tmp_path / "to").mkdir()
    for name in copied + others:
        (tmp_path / name).touch()
    copy_model_files(tmp_path, tmp_path / "to")
    assert sorted(file.name for file in (tmp_path / "to").iterdir()) == sorted(copied)


def test_parameters_on_another_device_are_exported_from_there(origin, tmp_path):
    with two_devices():
        export(origin, tmp_path / "hf", place=there)
    before, after = (
        load_file(origin / "model.safetensors"),
        load_file(tmp_path / "hf" / "model.safetensors"),
    )
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_tensor_that_stays_fp32_does_so_among_bf16_ones(tmp_path):
    origin = create_model(Create(family="glm4_moe", **SIZES), tmp_path)
    fp32 = fp32_tensors(read_model(origin))
    export(origin, tmp_path / "hf", dtype=torch.bfloat16, fp32=fp32, file_bytes=1024)
    before, found = load_file(origin / "model.safetensors"), {}
    for file in (tmp_path / "hf").glob("*.safetensors"):
        found |= load_file(file)
    assert fp32 == {"model.layers.1.mlp.gate.e_score_correction_bias"}
    assert {name for name, x in found.items() if x.dtype == torch.float32} == fp32
    assert all(torch.equal(x, before[name].to(x.dtype)) for name, x in found.items())
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in found.values())


def test_a_wide_parameter_that_should_not_be_is_refused(tmp_path, origin):
    with pytest.raises(
        CheckFailed, match=r"has .* torch.bfloat16, contiguous; the plan reads .* torch.float32"
    ):
        narrow = {"model.norm.weight"}
        shape = read_model(origin)
        slices = slices_of(
            megatron_table(shape, spec="local", padded_vocab=68), shape, Layout.of(Parallel(), 1, 0)
        )
        held = parameters_of(origin, slices, torch.bfloat16)
        export_hf(
            tmp_path / "hf",
            origin=origin,
            weights=WeightFormat(hf_shapes(shape), torch.bfloat16, frozenset(narrow)),
            sources=[slices],
            parameters=lambda: held,
            transport=Transport(),
        )


def test_many_files_have_an_index_and_a_limit(origin, tmp_path):
    export(origin, tmp_path / "hf", file_bytes=16 * 1024)
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    before, found = load_file(origin / "model.safetensors"), {}
    for file in sorted((tmp_path / "hf").glob("*.safetensors")):
        held = load_file(file)
        assert len(held) == 1 or sum(x.nbytes for x in held.values()) <= 16 * 1024
        assert all(index["weight_map"][name] == file.name for name in held)
        found |= held
    assert len(index["weight_map"]) == len(before)
    assert all(torch.equal(before[name], found[name]) for name in before)


def test_a_missing_tensor_leaves_the_old_folder(origin, tmp_path):
    export(origin, tmp_path / "hf")
    with pytest.raises(CheckFailed, match=r"model\.norm\.weight"):
        export(origin, tmp_path / "hf", drop="model.norm.weight")
    assert (tmp_path / "hf" / "model.safetensors").exists()
