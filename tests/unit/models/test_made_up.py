"""A family is one file and one line in the registry: a made-up one is read, refused, made, loaded and synced."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import made_up
import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided
from safetensors.numpy import load_file

import megarl
from megarl.commands.random_model import create_model
from megarl.config.random_model import hf_config
from megarl.config.schema import Create
from megarl.layout import Layout, Parallel
from megarl.models.engine import engine_table
from megarl.models.registry import FAMILIES, hf_shapes, megatron_table, parse_model, read_model
from megarl.models.shards import LayerSpec, ShardSlice, slices_of

ROOT = Path(__file__).resolve().parents[3]
PADDED = 80  # rows of the embedding on the trainer's side, of 67
CREATE = Create(
    family="made_up",
    layers=4,
    hidden=16,
    heads=4,
    kv_heads=2,
    head_dim=8,
    vocab=67,
    tied=False,
    tokenizer="none",
)
LAYOUTS = [({}, 1), ({"tensor": 2}, 4), ({"pipeline": 2}, 2), ({"tensor": 2, "pipeline": 2}, 4)]
Tensors = dict[str, np.ndarray]


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "made_up", made_up.FAMILIES["made_up"])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return create_model(CREATE, tmp_path)


def test_its_config_is_read_as_qwen3s_and_one_setting_is_refused() -> None:
    values = hf_config(CREATE)
    shape = parse_model(values, "test")
    assert replace(shape, family="qwen3") == parse_model(values | {"model_type": "qwen3"}, "test")
    assert parse_model(values | {"residual_multiplier": 1.0}, "test") == shape
    with pytest.raises(
        ValueError, match=r"residual_multiplier=0\.5 is not supported for made_up; supported: 1\.0"
    ):
        parse_model(values | {"residual_multiplier": 0.5}, "test")


def views(
    slices: list[ShardSlice], tensors: Tensors, parameters: Tensors
) -> list[tuple[np.ndarray, np.ndarray]]:
    """For every slice, where it lies in its tensor and where in its parameter."""
    pairs = []
    for part in slices:
        start = tuple(slice(s, s + n) for s, n in zip(part.start, part.shape, strict=True))
        parameter = parameters[part.param]
        steps = [4 * step for step in part.strides]
        pairs.append(
            (tensors[part.name][start], as_strided(parameter[part.offset :], part.shape, steps))
        )
    return pairs


def empty(slices: list[ShardSlice]) -> Tensors:
    """Flat parameters that hold these slices, full of NaN."""
    ends: dict[str, int] = {}
    for part in slices:
        last = part.offset + sum(
            (n - 1) * step for n, step in zip(part.shape, part.strides, strict=True)
        )
        ends[part.param] = max(ends.get(part.param, 0), last + 1)
    return {name: np.full(end, np.nan, np.float32) for name, end in ends.items()}


def load(slices: list[ShardSlice], tensors: Tensors) -> Tensors:
    parameters = empty(slices)
    for source, destination in views(slices, tensors, parameters):
        destination[:] = source
    return parameters


@pytest.mark.parametrize(("parallel", "world"), LAYOUTS, ids=str)
@pytest.mark.parametrize("spec", ["local", "te"])
def test_every_layout_gives_the_checkpoint_back(
    folder: Path, parallel: dict[str, int], world: int, spec: LayerSpec
) -> None:
    shape, tensors = read_model(folder), load_file(folder / "model.safetensors")
    assert {name: tensor.shape for name, tensor in tensors.items()} == hf_shapes(shape)
    layouts = [Layout.of(Parallel(**parallel), world, rank) for rank in range(world)]
    round_trip(
        tensors,
        [
            slices_of(megatron_table(shape, spec=spec, padded_vocab=PADDED), shape, each)
            for each in layouts
        ],
    )


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_engine_keeps_all_of_it(folder: Path, ranks: int) -> None:
    shape, tensors = read_model(folder), load_file(folder / "model.safetensors")
    sizes = Parallel(tensor=ranks, expert_tensor=ranks)
    round_trip(
        tensors,
        [
            slices_of(engine_table(shape), shape, Layout.of(sizes, ranks, rank))
            for rank in range(ranks)
        ],
    )


def round_trip(tensors: Tensors, ranks: list[list[ShardSlice]]) -> None:
    gathered = {name: np.full_like(tensor, np.nan) for name, tensor in tensors.items()}
    for slices in ranks:
        parameters = load(slices, tensors)
        assert not any(np.isnan(values).any() for values in parameters.values()), (
            "a hole in a parameter"
        )
        for tensor, parameter in views(slices, gathered, parameters):
            tensor[:] = parameter
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(gathered[name], tensor, name)


def test_its_own_tensors_lie_where_megatron_and_vllm_multiply_them(folder: Path) -> None:
    """The second of two tensor ranks, in the first layer of the second stage."""
    shape, tensors = read_model(folder), load_file(folder / "model.safetensors")
    gate, up = np.split(tensors["model.layers.2.mlp.gate_up_proj.weight"], 2)
    gate_up = np.concatenate([gate[24:], up[24:]]).ravel()
    down = tensors["model.layers.2.mlp.down_proj.weight"].T[:, 24:].ravel()

    layout = Layout.of(Parallel(tensor=2, pipeline=2), 4, 3)
    megatron = load(
        slices_of(megatron_table(shape, spec="te", padded_vocab=PADDED), shape, layout), tensors
    )
    np.testing.assert_array_equal(megatron["decoder.layers.0.mlp.linear_fc1.weight"], gate_up)
    np.testing.assert_array_equal(megatron["decoder.layers.0.mlp.linear_fc2.weight"], down)

    layout = Layout.of(Parallel(tensor=2, expert_tensor=2), 2, 1)
    vllm = load(slices_of(engine_table(shape), shape, layout), tensors)
    np.testing.assert_array_equal(vllm["model.layers.2.mlp.gate_up_proj.weight"], gate_up)
    np.testing.assert_array_equal(vllm["model.layers.2.mlp.down_proj.weight"], down)


def test_one_file_and_the_registry_are_all_that_changes(tmp_path: Path) -> None:
    """In a copy of the package, which then plans the sync of a model of this family and checks a run."""
    package = Path(megarl.__file__).parent
    copy = tmp_path / "megarl"
    shutil.copytree(package, copy, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(made_up.__file__, copy / "models")
    registry = copy / "models" / "registry.py"
    registry.write_text(registry.read_text().replace("    qwen3\n", "    qwen3\n    made_up\n", 1))
    difference = ["git", "diff", "--no-index", "--numstat", str(package), str(copy)]
    lines = subprocess.run(difference, capture_output=True, text=True).stdout.splitlines()
    changed = {
        line.rpartition("/")[2].strip("}"): line.split()[:2]
        for line in lines
        if "__pycache__" not in line
    }
    assert changed == {"made_up.py": [str(len(Path(made_up.__file__).read_text().splitlines())), "0"],
                       "registry.py": ["1", "0"]}  # fmt: skip

    config = ROOT / "configs" / "tiny_dense.yaml"
    for command in (
        ["plan", str(config), "--weights", "--json"],
        ["train", str(config), "--dry-run"],
    ):
        done = subprocess.run(
            [sys.executable, "-m", "megarl.cli", *command, "model.create.family=made_up", f"run.dir={tmp_path}/runs"],
            cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0 and "made_up" in done.stdout, done.stderr
