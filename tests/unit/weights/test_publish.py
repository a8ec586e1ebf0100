"""A publisher in one process: what it refuses, in which words, and which version the engine is left with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from benchmarks.sync import Memory, room_for, slice_of, view
from megarl.config.random_model import hf_config
from megarl.config.schema import Create
from megarl.layout import Fleet, Parallel
from megarl.models.engine import engine_table
from megarl.models.registry import (
    fp32_tensors,
    hf_shapes,
    megatron_table,
    padded_vocab,
    parse_model,
)
from megarl.models.shape import ModelShape
from megarl.models.shards import ShardSlice, slices_of
from megarl.types import CheckFailed
from megarl.weights.plan.plan import plan_transfers
from megarl.weights.sync.publish import Publisher, WeightFormat, WeightSender
from megarl.weights.sync.transports import Transport

SIZES = {"family": "qwen3", "layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "vocab": 67}
SHAPE = parse_model(hf_config(Create.model_validate(SIZES)), "model.create")
SHAPES, FLEET = (
    hf_shapes(SHAPE),
    Fleet(Parallel(), 1, tensor=1, ranks_per_replica=1, replicas=1, is_split=False),
)
PADDED = padded_vocab(SHAPE.vocab, 1)
KEEPS, REFUSES = (
    "The engine keeps its previous version",
    "The engine refuses prompts until a sync succeeds",
)


class Engine(Memory):
    """Spoils what it does when told to."""

    spoil: Callable[[dict[str, torch.Tensor]], object] | None = None  # the memory, after a write
    raises = False
    wrong = 0  # transfers of a message reported to read back differently
    forgets: str | None = None  # a tensor it says it never received

    def write(self, message, flat):
        if self.raises:
            raise RuntimeError("out of memory")
        return super().write(message, flat) + self.wrong

    def seal(self):
        if self.spoil:
            self.spoil(self.memory)
        return {name: numel for name, numel in super().seal().items() if name != self.forgets}


class Job:
    def __init__(self, *, table=None, probe=None, is_atomic: bool = True) -> None:
        slices = slices_of(
            megatron_table(SHAPE, spec="local", padded_vocab=PADDED), SHAPE, FLEET.trainer_layout(0)
        )
        self.full = {name: torch.randn(size) for name, size in SHAPES.items()}
        self.parameters = room_for(slices)
        for part in slices:
            view(self.parameters, part).copy_(slice_of(self.full, part))
        self.engine = Engine(slices_of(engine_table(SHAPE), SHAPE, FLEET.engine_layout(0)))
        self.publisher = Publisher(
            plan_transfers(
                SHAPE, FLEET, padded_vocab=PADDED, itemsize=4, round_bytes=4096, spec="local"
            ),
            WeightSender(slices, lambda: self.parameters),
            self.engine,
            Transport(),
            WeightFormat(SHAPES, torch.float32),
            table=self.engine.slices if table is None else table,
            probe=probe,
            is_atomic=is_atomic,
        )

    def refused(self, version: int) -> str:
        with pytest.raises(CheckFailed) as caught:
            self.publisher.publish(version=version)
        return str(caught.value)


@pytest.mark.parametrize("is_atomic", [True, False])
def test_the_engine_holds_the_trainers_weights(is_atomic):
    job = Job(is_atomic=is_atomic)
    report = job.publisher.publish(version=3)
    assert report.verified and report.version == job.engine.version == 3
    assert report.bytes_received == 0 and report.bytes_kept == sum(
        4 * part.numel for part in job.engine.slices
    )
    assert all(
        torch.equal(view(job.engine.memory, part), slice_of(job.full, part))
        for part in job.engine.slices
    )
    job.publisher.publish(version=4)
    assert job.engine.begun == [True, False], "placement is checked in the first sync"


def test_frozen_weights_are_published_once_before_the_adapters():
    base, adapters = Job(), Job()
    adapters.publisher.base = base.publisher
    reports = [adapters.publisher.publish(version=version) for version in (1, 2)]
    assert [report.num_tensors for report in reports] == [2 * len(SHAPES), len(SHAPES)]
    assert reports[0].bytes_kept == 2 * reports[1].bytes_kept
    assert (base.engine.version, adapters.engine.version) == (1, 2)


def _unpaired(part: ShardSlice, shape: ModelShape) -> ShardSlice:
    """As a loader is traced: the table sees the last dim of gate_up_proj as pairs."""
    if len(part.shape) == len(hf_shapes(shape)[part.name]):
        return part
    *start, first, _ = part.start
    *size, half, _ = part.shape
    return replace(
        part,
        start=(*start, 2 * first),
        shape=(*size, 2 * half),
        strides=(*part.strides[:-2], part.strides[-1]),
    )


@pytest.mark.parametrize("family", ["gpt_oss", "glm4_moe", "deepseek_v3"])
def test_pairs_and_tensors_that_stay_fp32_arrive_bit_for_bit(family):
    """gpt-oss lets gate and up alternate; corrections of routers are fp32 among bf16 weights."""
    create = Create.model_validate(
        SIZES | {"family": family, "experts": 4, "tied": False, "moe_intermediate": 32}
    )
    shape = parse_model(hf_config(create), "model.create")
    weights = WeightFormat(hf_shapes(shape), torch.bfloat16, fp32_tensors(shape))
    full = {
        name: torch.randn(size).to(weights.dtype_of(name)) for name, size in weights.shapes.items()
    }
    slices = slices_of(
        megatron_table(shape, spec="local", padded_vocab=PADDED), shape, FLEET.trainer_layout(0)
    )
    parameters = room_for(slices, torch.bfloat16)
    parameters |= room_for([part for part in slices if part.name in weights.fp32])
    for part in slices:
        paired = len(part.shape) > full[part.name].dim()
        whole = full[part.name].unflatten(-1, (-1, 2)) if paired else full[part.name]
        view(parameters, part).copy_(slice_of({part.name: whole}, part))
    table = slices_of(engine_table(shape), shape, FLEET.engine_layout(0))
    engine = Memory(
        weights.moved_slices([_unpaired(part, shape) for part in table]), torch.bfloat16
    )
    plan = plan_transfers(
        shape, FLEET, padded_vocab=PADDED, itemsize=2, round_bytes=4096, spec="local"
    )
    sender = WeightSender(slices, lambda: parameters)
    publisher = Publisher(plan, sender, engine, Transport(), weights, table=table)
    publisher.publish(version=1)
    moved = {name: tensor.view(torch.bfloat16).view(torch.int16) for name, tensor in full.items()}
    memory = {name: tensor.view(torch.int16) for name, tensor in engine.memory.items()}
    assert weights.fp32 or family == "gpt_oss"
    assert all(torch.equal(view(memory, part), slice_of(moved, part)) for part in engine.slices)


def _rename(job: Job) -> None:
    job.parameters["other"] = job.parameters.pop("decoder.final_layernorm.weight")


def _widen(job: Job) -> None:
    job.parameters["decoder.final_layernorm.weight"] = job.parameters[
        "decoder.final_layernorm.weight"
    ].double()


def _shorten(job: Job) -> None:
    job.parameters["decoder.final_layernorm.weight"] = job.parameters[
        "decoder.final_layernorm.weight"
    ][:-1]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (_rename, "the trainer has no parameter decoder.final_layernorm.weight"),
        (
            _widen,
            "has 32 elements of torch.float64, contiguous; the plan reads 32 contiguous elements of torch.float32",
        ),
        (_shorten, "has 31 elements of torch.float32, contiguous; the plan reads 32 contiguous"),
    ],
)
def test_before_the_first_write_the_engine_keeps_its_version(fault, message):
    job = Job()
    job.publisher.publish(version=1)
    fault(job)
    refusal = job.refused(2)
    assert message in refusal and refusal.endswith(KEEPS)
    assert job.engine.version == 1


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"raises": True}, "(round 1), rank 0 -> rank 0: model."),
        ({"raises": True}, "RuntimeError: out of memory"),
        ({"wrong": 1}, "messages differ when read back after writing: message 1 of"),
        (
            {"forgets": "model.norm.weight"},
            "loaded tensors differ from the expected ones: model.norm.weight",
        ),
    ],
)
def test_after_the_first_write_it_has_none_until_a_sync_succeeds(fault, message):
    job = Job()
    job.publisher.publish(version=1)
    for name, value in fault.items():
        setattr(job.engine, name, value)
    refusal = job.refused(2)
    assert message in refusal and refusal.endswith(REFUSES)
    assert job.engine.version is None
    for name in fault:
        delattr(job.engine, name)
    job.publisher.publish(version=3)
    assert job.engine.version == 3


def test_a_spoilt_memory_is_seen_by_the_placement_check():
    job = Job()
    job.engine.spoil = lambda memory: memory["model.norm.weight"].copy_(
        memory["model.norm.weight"].flip(0)
    )
    assert (
        "slices of weights are in the wrong place" in (refusal := job.refused(1))
        and "model.norm.weight" in refusal
    )
    assert job.engine.version is None


@pytest.mark.parametrize("always", [False, True])
def test_a_probe_that_is_off_is_refused_and_asked_again(always):
    class Probe:
        asked, fault = 0, "differs"
        always: bool

        def check(self) -> None:
            self.asked += 1
            if self.fault:
                raise CheckFailed(self.fault)

    probe = Probe()
    probe.always = always
    job = Job(probe=probe)
    assert job.refused(1) == f"differs. {REFUSES}" and job.engine.version is None
    probe.fault = ""
    for version in (2, 3):
        job.publisher.publish(version=version)
    assert probe.asked == 2 + always


def test_an_engine_that_is_laid_out_differently_from_its_table_is_refused_by_tensor():
    table = slices_of(engine_table(SHAPE), SHAPE, FLEET.engine_layout(0))
    moved = [
        replace(part, offset=part.offset + (part.name == "model.norm.weight")) for part in table
    ]
    with pytest.raises(
        CheckFailed,
        match=r"rank 0: the engine's .* model\.norm\.weight .*lays out weights differently",
    ):
        Job(table=moved)
