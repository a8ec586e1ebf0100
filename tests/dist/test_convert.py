"""Megatron-Core loads what `megarl convert` writes, in any layout, and what it saves converts back bit for bit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from trainer_cases import save_model

from megarl.commands.conversion import run_convert
from megarl.layout import Parallel
from megarl.models.registry import hf_shapes, read_model

pytestmark = pytest.mark.long  # four ranks that build two actors a model
MODELS = ("qwen3", "deepseek_v3@3", "gpt_oss")  # tied; experts, with prediction; biases and sinks
RANKS = Path(__file__).with_name("convert_ranks.py")


def add_prediction(folder: Path) -> None:
    """Layers of multi-token prediction, where the family has them: converted, and not in the actor's way."""
    values = json.loads((folder / "config.json").read_text())
    if "num_nextn_predict_layers" not in values:
        return
    (folder / "config.json").write_text(json.dumps(values | {"num_nextn_predict_layers": 1}))
    shape, tensors = read_model(folder), load_file(folder / "model.safetensors")
    extra = {
        name: torch.randn(size)
        for name, size in hf_shapes(shape, mtp=True).items()
        if name not in tensors
    }
    assert len(extra) > 10
    save_file(tensors | extra, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("convert")
    for model in MODELS:
        add_prediction(save_model(model, folder))
        sizes = Parallel(tensor=2, pipeline=2)  # files are cut so; loading is not bound to it
        options = {"config": None, "file_bytes": 1 << 30, "interactive": False}
        run_convert(folder / model, folder / f"{model}-megatron", "megatron", sizes, **options)
    command = [
        sys.executable,
        "-W",
        "ignore",
        str(RANKS),
        str(folder / "results.json"),
        str(folder),
        *MODELS,
    ]
    subprocess.run(command, check=True, timeout=500)
    return folder


@pytest.mark.parametrize("model", MODELS)
def test_loaded_over_ranks_it_is_the_model(folder, model):
    seen = json.loads((folder / "results.json").read_text())[model]
    assert seen["count"] and not seen["differ"], seen["differ"]
    assert seen["error"] < 1e-4, "log-probs of transformers' model"


@pytest.mark.parametrize("model", MODELS)
def test_what_megatron_saves_converts_back(folder, model):
    options = {"config": folder / model, "file_bytes": 1 << 30, "interactive": False}
    said = run_convert(
        folder / f"{model}-saved", folder / f"{model}-back", "hf", Parallel(), **options
    )
    before, after = (
        load_file(folder / name / "model.safetensors") for name in (model, f"{model}-back")
    )
    assert ("multi-token prediction" in said) == (before.keys() != after.keys())
    assert after.keys() == hf_shapes(read_model(folder / model)).keys()
    for name in after:
        tensor = before[name]
        assert tensor.dtype == after[name].dtype and torch.equal(tensor, after[name]), name
