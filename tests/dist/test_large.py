"""The large models without a GPU: tables against transformers' and Megatron's own modules at full size, on meta.

Layers of a kind are alike, and so are ranks that differ in their place along tensor or experts only: Megatron's
modules are built for each stage at the ends of the tensor and expert axes, and the engine's ranks are taken for one
layer of each kind.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
import torch
import transformers
from transformers.core_model_loading import revert_weight_conversion

from megarl.config.launch import fleet_of
from megarl.config.load import load_config
from megarl.layout import Layout, Parallel
from megarl.models.engine import engine_table
from megarl.models.registry import hf_shapes, megatron_table, padded_vocab, read_model
from megarl.models.shards import slices_of
from megarl.weights.plan.plan import find_gaps

pytestmark = pytest.mark.long
CONFIGS = Path(__file__).resolve().parents[2] / "configs"
NAMES = ("gpt_oss_120b", "llama_3_1_405b", "glm_4_5", "qwen3_235b_a22b", "deepseek_v3", "kimi_k2")
TRIED = ("gpt_oss_120b", "glm_4_5", "kimi_k2")  # on every change
BUILT = ("deepseek_v3",)  # on every change: latent attention, dense layers, shared experts


def load_model(name: str):
    """(name, sizes of the model, the fleet of its config)"""
    fleet = fleet_of(load_config(CONFIGS / f"{name}.yaml"))
    return name, read_model(CONFIGS / "models" / name), fleet


@pytest.fixture(
    scope="module",
    params=[pytest.param(n, marks=() if n in TRIED else pytest.mark.exhaustive) for n in NAMES],
)
def model(request):
    return load_model(request.param)


def test_names_and_shapes_are_those_of_transformers(model) -> None:
    name, shape, _ = model
    raw = json.loads((CONFIGS / "models" / name / "config.json").read_text())
    kind = {"kimi_k2": "deepseek_v3"}.get(raw["model_type"], raw["model_type"])
    config = transformers.AutoConfig.for_model(
        kind, **{key: raw[key] for key in raw if key != "model_type"}
    )
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(config)
    saved = revert_weight_conversion(theirs, theirs.state_dict())
    assert {name: tuple(tensor.shape) for name, tensor in saved.items()} == hf_shapes(shape)


def built(name: str, *args: str) -> dict[str, dict[str, list[int]]]:
    """{rank: {parameter: shape}}"""
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("meta_ranks.py"))]
    done = subprocess.run(
        [*command, str(CONFIGS / "models" / name), *args],
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.rpartition("RANKS ")[2])


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in BUILT else pytest.mark.exhaustive) for n in NAMES],
)
def test_parameters_are_those_of_megatron(name: str) -> None:
    _, shape, fleet = load_model(name)
    sizes = {axis: getattr(fleet.parallel, axis) for axis in ("tensor", "pipeline", "expert")}
    ranks = built(name, json.dumps(sizes), str(fleet.trainers))
    assert (
        len({fleet.trainer_layout(int(rank)).pp.rank for rank in ranks}) == fleet.parallel.pipeline
    )
    for rank, parameters in ranks.items():
        boxes = slices_of(
            megatron_table(
                shape, spec="local", padded_vocab=padded_vocab(shape.vocab, fleet.parallel.tensor)
            ),
            shape,
            fleet.trainer_layout(int(rank)),
        )
        held: dict[str, int] = {}
        for box in boxes:
            held[box.param] = held.get(box.param, 0) + box.numel
            *rows, row = parameters[box.param]
            assert not rows or all(
                stride in (0, 1) or stride % row == 0 for stride in box.strides
            ), (box, rows, row)
        assert held.keys() == parameters.keys()
        for param, numel in held.items():
            padding = (
                8 * parameters[param][-1] if param.startswith(("embedding", "output_layer")) else 0
            )
            assert 0 <= prod(parameters[param]) - numel <= padding * fleet.parallel.tensor, param


def test_layers_of_multi_token_prediction_have_a_table() -> None:
    shape = read_model(CONFIGS / "models" / "deepseek_v3")
    shape = replace(shape, layers=max(1, len(shape.kinds)))
    layout = Layout.of(Parallel(), 1, 0)
    boxes = slices_of(
        megatron_table(shape, spec="local", padded_vocab=shape.vocab), shape, layout, mtp=True
    )
    (found,) = built("deepseek_v3", "mtp").values()
    found = {
        name.replace("mtp_model_layer", "transformer_layer"): size for name, size in found.items()
    }  # 0.19's name
    assert {box.param for box in boxes} == found.keys()
    shared = (
        "embed_tokens",
        "shared_head.head",
    )  # the checkpoint repeats the embedding and the head there
    for param, size in found.items():
        held = [
            box
            for box in boxes
            if box.param == param
            and not (".layers." in box.name and box.name.split(".", 3)[3].startswith(shared))
        ]
        assert sum(box.numel for box in held) == prod(size), param


def test_trainer_ranks_together_hold_every_element_once(model) -> None:
    _, shape, fleet = model
    padded = padded_vocab(shape.vocab, fleet.parallel.tensor)
    ranks = [
        slices_of(
            megatron_table(shape, spec="te", padded_vocab=padded), shape, fleet.trainer_layout(r)
        )
        for r in range(fleet.trainers)
    ]
    assert find_gaps(hf_shapes(shape), ranks) == []


def test_engine_ranks_together_keep_every_element_once(model) -> None:
    _, shape, fleet = model
    shape = replace(shape, layers=max(1, len(shape.kinds)))  # the others are like the last
    layouts = [
        fleet.engine_layout(fleet.first_receiver + rank) for rank in range(fleet.ranks_per_replica)
    ]
    assert (
        find_gaps(
            hf_shapes(shape), [slices_of(engine_table(shape), shape, layout) for layout in layouts]
        )
        == []
    )
