"""A family whose layers alternate is one file and one line: everything else asks for the kind of a layer."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import alternating
import pytest
import torch
from alternating import WIDE
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parents[2] / "dist"))
sys.path.insert(0, str(Path(__file__).parents[1] / "weights"))
from test_plan import QWEN, check_execution, plan_of, slices_of_fleet, split
from trainer_cases import MODELS, load_model, oracle_logprobs, random_batch, save_model

from megarl.commands.conversion import run_convert
from megarl.config.model import check_model
from megarl.config.schema import Config, Train
from megarl.config.train import check_train
from megarl.layout import Layout, Parallel
from megarl.models.engine import engine_table, linear_shapes
from megarl.models.lora import adapter_table
from megarl.models.registry import FAMILIES, fp32_tensors, hf_shapes, megatron_table, read_model
from megarl.models.shape import DENSE, EXPERTS, LayerKind, ModelShape
from megarl.models.shards import shapes_of
from megarl.trainer.model import shares_prefixes
from megarl.trainer.router_replay import _layers_with_experts
from megarl.trainer.trainer import Trainer

LAYERS = 4
ALONE = Layout.of(Parallel(), 1, 0)
SMALL = replace(QWEN, family="alternating", layers=7, kinds=(DENSE, EXPERTS, WIDE) * 3)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "alternating", alternating.FAMILIES["alternating"])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What transformers saves, as its own family."""
    kind, arguments = MODELS["qwen3_moe"]
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(MODELS, "in_turn", (kind, arguments | {"decoder_sparse_step": 2}))
        return save_model(f"in_turn@{LAYERS}", tmp_path_factory.mktemp("model"))


@pytest.fixture
def folder(saved: Path) -> Path:
    """The same, as one of the made-up family."""
    copy = saved.with_name("alternating")
    if not copy.exists():
        copy.mkdir()
        config = json.loads((saved / "config.json").read_text()) | {"model_type": "alternating"}
        (copy / "config.json").write_text(json.dumps(config))
        (copy / "model.safetensors").hardlink_to(saved / "model.safetensors")
    return copy


def test_its_tensors_are_those_of_the_folder(folder: Path) -> None:
    shape = read_model(folder)
    assert [kind.name for kind in shape.layer_kinds] == ["dense", "experts"] * 2
    tensors = load_file(folder / "model.safetensors")
    assert hf_shapes(shape) == {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    of_experts = {int(name.split(".")[2]) for name in tensors if ".experts." in name}
    assert of_experts == {1, 3}


def test_a_conversion_gives_the_folder_back(folder: Path, tmp_path: Path) -> None:
    options = {"config": None, "file_bytes": 1 << 30, "interactive": False}
    sizes = Parallel(tensor=2, pipeline=2, expert=2)
    run_convert(folder, tmp_path / "megatron", "megatron", sizes, **options)
    run_convert(tmp_path / "megatron", tmp_path / "hf", "hf", Parallel(), **options)
    before = load_file(folder / "model.safetensors")
    after: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "hf").glob("*.safetensors"):
        after |= load_file(file)
    assert before.keys() == after.keys()
    assert all(after[name].equal(tensor) for name, tensor in before.items())


@pytest.mark.parametrize(
    "fleet",
    [
        split(Parallel(tensor=2, pipeline=2, expert=2), 4, 2, 2, 4),
        split(Parallel(pipeline=2, virtual_pipeline=2, expert=2), 4, 1, 1, 2, expert=4),
    ],
    ids=["tensor", "experts over the replica"],
)
def test_every_element_arrives_once(fleet) -> None:
    """With three kinds, whose experts have two widths."""
    for round_bytes in (100, 1 << 20):
        check_execution(plan_of(SMALL, fleet, round_bytes), SMALL, *slices_of_fleet(SMALL, fleet))


def test_routers_are_numbered_among_the_layers_that_have_one() -> None:
    stages = [Layout.of(Parallel(pipeline=2), 2, rank) for rank in range(2)]
    assert [_layers_with_experts(SMALL, stage) for stage in stages] == [[0, 1], [2, 3]]


def test_adapters_scales_and_fp32_tensors_are_those_of_each_kind(folder: Path) -> None:
    shape = read_model(folder)
    adapters = shapes_of(adapter_table(megatron_table(shape), ["down_proj"], 4), shape)
    modules = {name.partition("layers.")[2].split(".lora_")[0] for name in adapters}
    experts = range(shape.experts)
    expected = {f"{layer}.mlp.experts.{n}.down_proj" for layer in (1, 3) for n in experts}
    assert modules == expected | {"0.mlp.down_proj", "2.mlp.down_proj"}
    linear = linear_shapes(shape)
    scaled = {name.partition("layers.")[2] for name in linear if "down_proj" in name}
    assert {name.removesuffix(".weight") for name in scaled} == modules

    def with_fp32(shape: ModelShape, *arguments):
        bits = {"model.layers.{layer}.mlp.gate.weight": 32}
        return replace(alternating.table(shape, *arguments), bits=bits)

    with pytest.MonkeyPatch.context() as patched:
        family = replace(FAMILIES["alternating"], table=with_fp32)
        patched.setitem(FAMILIES, "alternating", family)
        assert fp32_tensors(shape) == {f"model.layers.{layer}.mlp.gate.weight" for layer in (1, 3)}


def test_a_table_that_lacks_a_kind_is_refused(folder: Path, monkeypatch) -> None:
    """Planted in the family's table, and in what is derived for the engine."""
    shape = read_model(folder)
    family = FAMILIES["alternating"]
    lacking = (
        r"^layer 1 of alternating is of kind experts, but the family's table has rules for "
        r"dense, wide only; add them$"
    )

    def without_experts(table):
        layers = {kind: rules for kind, rules in table.layers.items() if kind != EXPERTS}
        return replace(table, layers=layers)

    def table(*arguments):
        return without_experts(family.table(*arguments))

    def engine(shape, table):
        return without_experts(table)

    fleet = split(Parallel(), 1, 1, 1, 2)
    small = replace(SMALL, kinds=(DENSE, EXPERTS))
    monkeypatch.setitem(FAMILIES, "alternating", replace(family, engine=engine))
    hf_shapes(shape)
    with pytest.raises(ValueError, match=lacking):
        plan_of(small, fleet)
    monkeypatch.setitem(FAMILIES, "alternating", replace(family, table=table))
    with pytest.raises(ValueError, match=lacking):
        plan_of(small, fleet)
    with pytest.raises(ValueError, match=lacking):
        hf_shapes(shape)
    with pytest.raises(ValueError, match=lacking):
        shapes_of(engine_table(shape), shape)


def test_layers_that_are_no_attention_share_no_prefixes_and_need_whole_rows() -> None:
    dense = replace(QWEN, family="qwen3", experts=0)
    recurrent = replace(dense, kinds=(LayerKind("recurrent", is_attention=False), DENSE))
    assert shares_prefixes(dense, ALONE, use_te=False)
    assert not shares_prefixes(recurrent, ALONE, use_te=False)
    assert not shares_prefixes(SMALL, ALONE, use_te=False)
    config = Config.model_validate({"parallel": {"context": 2}})
    check_train(config, dense, 0)
    with pytest.raises(ValueError, match=r"parallel\.context=2, but qwen3 has layers that need"):
        check_train(config, recurrent, 0)


def test_the_width_of_dense_layers_is_checked_where_there_are_some() -> None:
    config = Config.model_validate({"parallel": {"tensor": 2}, "rollout": {"tensor": 2}})
    check_model(config, replace(SMALL, intermediate=5, kinds=(EXPERTS,)))
    with pytest.raises(ValueError, match=r"intermediate=5 is not divisible by parallel\.tensor=2"):
        check_model(config, replace(SMALL, intermediate=5))


@pytest.mark.usefixtures("one_rank")  # until the module ends: the last test
def test_the_trainer_loads_it_and_agrees_with_transformers(saved: Path, folder: Path) -> None:
    settings = {"dtype": "fp32", "max_tokens_per_microbatch": 48}
    trainer = Trainer.build(
        read_model(folder),
        ALONE,
        train=Train.model_validate(settings),
        folder=folder,
        device=torch.device("cpu"),
    )
    batch = random_batch(num_rows=6)
    with torch.no_grad():
        expected = oracle_logprobs(load_model(saved), batch)
    torch.testing.assert_close(trainer.logprobs(batch), expected, rtol=0, atol=2e-5)
    choices = trainer.forward(batch, record=True).choices
    assert {len(row.owners) for row in choices} == {2}, "a router in two of four layers"
    trainer.close()
