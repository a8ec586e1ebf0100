"""What an engine in FP8 blocks receives is the quantised checkpoint, whatever layout cut the blocks."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from benchmarks.sync import Memory, room_for, slice_of, view
from megarl.config.random_model import hf_config
from megarl.config.schema import Create
from megarl.layout import Fleet, Layout, Parallel
from megarl.models.engine import (
    engine_format,
    engine_table,
    format_config,
    linear_shapes,
    with_scales,
)
from megarl.models.formats import FORMATS
from megarl.models.registry import (
    fp32_tensors,
    hf_shapes,
    megatron_table,
    padded_vocab,
    parse_model,
)
from megarl.models.shards import slices_of, whole_tensor
from megarl.types import CheckFailed
from megarl.weights.encode.blocks import BlockEncoder
from megarl.weights.encode.quantize import dequantize, quantize
from megarl.weights.plan.plan import plan_transfers
from megarl.weights.sync.execute import PlanExecutor, split_message
from megarl.weights.sync.publish import Publisher, WeightFormat
from megarl.weights.sync.transports import Transport

DENSE = {
    "family": "qwen3",
    "layers": 2,
    "hidden": 192,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 32,
    "vocab": 67,
}
EXPERTS = {
    "family": "qwen3_moe", "layers": 2, "hidden": 128, "heads": 4, "kv_heads": 4, "vocab": 67, "experts": 4,
    "moe_intermediate": 128, "tied": False,
}  # fmt: skip
LATENT = EXPERTS | {"family": "deepseek_v3", "hidden": 256, "layers": 3, "moe_intermediate": 256}


def shape_of(sizes):
    return parse_model(hf_config(Create.model_validate(sizes)), "model.create")


def full_weights(weights):
    """A checkpoint in bf16, with blocks of very different magnitude, one of zeros."""
    generator = torch.Generator().manual_seed(0)
    full = {}
    for name, size in weights.shapes.items():
        if not name.endswith(weights.storage.format.scale):
            magnitude = 10 ** torch.empty(size[0], *(1 for _ in size[1:])).uniform_(
                -6, 2, generator=generator
            )
            full[name] = (magnitude * torch.randn(size, generator=generator)).to(
                weights.dtype_of(name)
            )
    next(full[name] for name in weights.storage.names)[:128, :128] = 0
    return full


class World:
    """Trainer ranks as threads, which meet where their quantisers reduce."""

    def __init__(self, sizes, parallel: Parallel, world: int, tensor: int, name="fp8") -> None:
        self.shape = shape_of(sizes)
        self.fmt = FORMATS[name] if name in FORMATS else engine_format(name, self.shape, tensor)
        self.fleet = Fleet(
            parallel,
            world,
            tensor=tensor,
            ranks_per_replica=tensor,
            replicas=world // tensor,
            ranks_per_node=world,
            is_split=False,
        )
        self.padded = padded_vocab(self.shape.vocab, parallel.tensor)
        plain = WeightFormat(hf_shapes(self.shape), torch.bfloat16, fp32_tensors(self.shape))
        self.weights = plain.in_blocks(self.fmt, linear_shapes(self.shape))
        self.full = full_weights(self.weights)
        self.quantised = {}  # values have the name of the weight
        for name in self.weights.storage.names:
            parts = quantize(self.full[name], self.fmt)
            self.quantised[name] = parts[self.fmt.values]
            self.quantised[name + self.fmt.scale] = parts[self.fmt.scale]
        table = megatron_table(self.shape, spec="local", padded_vocab=self.padded)
        self.table = with_scales(table, self.fmt, is_whole=True)
        self.layouts = [Layout.of(parallel, world, rank) for rank in range(world)]
        self.meeting, self.given = threading.Barrier(world), [torch.empty(0)] * world

    def encoder(self, rank: int) -> tuple[BlockEncoder, dict[str, torch.Tensor]]:
        slices, layout = slices_of(self.table, self.shape, self.layouts[rank]), self.layouts[rank]
        stored = [part for part in slices if part.name in self.full]
        parameters = room_for(stored, torch.bfloat16)
        parameters |= room_for([part for part in stored if part.name in self.weights.fp32])
        for part in stored:
            view(parameters, part).copy_(slice_of(self.full, part))

        def reduce_max(values, is_expert):
            axes = ("pp", "ep", "edp") if is_expert else ("pp", "dp", "cp")
            self.given[rank] = values.clone()
            self.meeting.wait()
            peers = [
                r
                for r, x in enumerate(self.layouts)
                if all(getattr(x, a) == getattr(layout, a) for a in axes)
            ]
            values.copy_(torch.stack([self.given[peer] for peer in peers]).amax(0))
            self.meeting.wait()

        return BlockEncoder(slices, self.fmt, reduce_max), parameters


ODD = (
    "k_proj.weight: rows of 33 elements from 0 on, of 4 bits each, do not fill units of 8 bits; "
    "choose a format of 8 bits, or rollout.quantization=none"
)
LAYOUTS = [
    (DENSE, Parallel(), 1, 1),
    (DENSE, Parallel(tensor=2), 2, 1),  # k_proj: 32 rows on each rank, o_proj: 64 columns
    (DENSE, Parallel(tensor=2, pipeline=2), 4, 1),
    (EXPERTS, Parallel(tensor=2, expert_tensor=2), 2, 1),  # experts: 64 rows and columns
    (EXPERTS, Parallel(tensor=2, expert=2, expert_tensor=1), 4, 1),
    (EXPERTS, Parallel(tensor=2, pipeline=2, expert_tensor=2), 4, 1),
    (LATENT, Parallel(tensor=2, expert_tensor=2), 2, 2),
]


@pytest.mark.parametrize("name", ["fp8", "mxfp4_pack", "int4_group"])
@pytest.mark.parametrize(("sizes", "parallel", "world", "tensor"), LAYOUTS)
def test_every_engine_has_the_quantised_checkpoint(sizes, parallel, world, tensor, name):
    job = World(sizes, parallel, world, tensor, name)
    options = {
        "padded_vocab": job.padded,
        "itemsize": 2,
        "round_bytes": 1 << 16,
        "spec": "local",
        "fmt": job.fmt,
    }
    plan = plan_transfers(job.shape, job.fleet, **options)
    moved = {
        name: tensor.contiguous().view(torch.uint8)
        for name, tensor in (job.full | job.quantised).items()
    }
    table = engine_table(job.shape, job.fmt)
    kept = [
        job.weights.moved_slices(slices_of(table, job.shape, job.fleet.engine_layout(rank)))
        for rank in range(world)
    ]
    memories = [room_for(slices, torch.uint8) for slices in kept]

    def send(rank: int) -> None:
        encoder, parameters = job.encoder(rank)
        transport = Transport()
        transport.rank = rank
        executor = PlanExecutor(plan, transport, torch.uint8, torch.device("cpu"), encoder)
        held = encoder.measure(parameters)
        for message in executor.messages:
            if message.sender == rank:
                for transfer, part in split_message(message, executor.pack(message, held)):
                    to = transfer.destination
                    memories[message.receiver][to.param].as_strided(
                        to.shape, to.strides, to.offset
                    ).copy_(part)

    with ThreadPoolExecutor(world) as pool:
        list(pool.map(send, range(world)))
    for slices, memory in zip(kept, memories, strict=True):
        wrong = [
            part.name
            for part in slices
            if not torch.equal(view(memory, part), slice_of(moved, part))
        ]
        assert not wrong, wrong
    assert plan.bytes_kept == sum(part.numel for slices in kept for part in slices)


def test_a_trainer_seen_through_the_encoder_has_the_engines_weights_and_gets_its_own_back():
    job = World(DENSE, Parallel(), 1, 1)
    encoder, parameters = job.encoder(0)
    before = {name: tensor.clone() for name, tensor in parameters.items()}
    with encoder.applied(parameters):
        for part in slices_of(job.table, job.shape, job.layouts[0]):
            if part.name in job.full:
                parts = {
                    suffix: job.quantised.get(part.name + suffix) for suffix in ("", job.fmt.scale)
                }
                whole = job.full[part.name]
                if part.name in job.weights.storage.names:
                    whole = dequantize(parts, job.fmt, whole.shape, torch.bfloat16)
                assert torch.equal(view(parameters, part), slice_of({part.name: whole}, part)), (
                    part.name
                )
    assert all(torch.equal(parameters[name], tensor) for name, tensor in before.items())


def test_a_sync_in_fp8_is_verified_and_a_wrong_scale_is_noticed():
    job = World(DENSE, Parallel(), 1, 1)
    encoder, parameters = job.encoder(0)
    table = slices_of(engine_table(job.shape, job.fmt), job.shape, job.fleet.engine_layout(0))
    engine = Memory(job.weights.moved_slices(table), torch.uint8)
    options = {
        "padded_vocab": job.padded,
        "itemsize": 2,
        "round_bytes": 1 << 16,
        "spec": "local",
        "fmt": job.fmt,
    }
    publisher = Publisher(
        plan_transfers(job.shape, job.fleet, **options),
        encoder.sender(lambda: parameters),
        engine,
        Transport(),
        job.weights,
        table=table,
    )
    report = publisher.publish(version=1)
    half = sum(torch.Size(size).numel() for size in hf_shapes(job.shape).values())
    assert report.verified and report.num_tensors == len(job.weights.shapes)
    assert half < report.bytes_kept < 1.2 * half  # most of it a byte an element
    publisher._is_proven, engine.seal = (
        False,
        _spoil(engine, next(name for name in engine.memory if job.fmt.scale in name)),
    )
    with pytest.raises(CheckFailed, match=r"wrong place.*weight_scale_inv"):
        publisher.publish(version=2)


def test_elements_that_do_not_fill_bytes_are_refused_by_name():
    """k_proj has 33 inputs of 4 bits."""
    weights = WeightFormat({"k_proj.weight": (4, 33), "norm.weight": (33,)}, torch.bfloat16)
    weights = weights.in_blocks(FORMATS["mxfp4_pack"], {"k_proj.weight": (4, 33)})
    with pytest.raises(ValueError, match=ODD):
        weights.moved_shapes()
    half = replace(whole_tensor("k_proj.weight", (4, 32)), shape=(4, 16), start=(0, 3))
    with pytest.raises(
        ValueError, match=r"k_proj.weight: rows of 16 elements from 3 on, of 4 bits"
    ):
        weights.moved_slices([half])
    even = WeightFormat({"k_proj.weight": (4, 34)}, torch.bfloat16)
    even = even.in_blocks(FORMATS["mxfp4_pack"], {"k_proj.weight": (4, 34)})
    assert even.moved_shapes() == {"k_proj.weight": (4, 17), "k_proj.weight_scale": (4, 2)}


def test_a_plan_refuses_elements_that_do_not_fill_bytes():
    shape = replace(shape_of(DENSE), intermediate=129)
    fleet = Fleet(
        Parallel(), 1, tensor=1, ranks_per_replica=1, replicas=1, ranks_per_node=1, is_split=False
    )
    options = {"padded_vocab": 80, "itemsize": 2, "round_bytes": 1 << 16, "spec": "local"}
    with pytest.raises(ValueError, match=r"down_proj.weight: rows of 129 elements from 0 on, of 4"):
        plan_transfers(shape, fleet, fmt=FORMATS["mxfp4_pack"], **options)
    assert plan_transfers(shape, fleet, fmt=FORMATS["fp8_block"], **options).bytes_kept


def _spoil(engine, name):
    def seal():
        engine.memory[name][3] ^= 1
        return engine.loaded

    return seal


def test_modules_that_stay_as_they_are_are_listed():
    assert format_config(shape_of(EXPERTS), FORMATS["fp8_block"])["modules_to_not_convert"] == [
        "lm_head", "model.embed_tokens", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate", "lm_head",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("sizes", "tensor", "message"),
    [
        (
            DENSE,
            2,
            "has 64 columns of model.layers.*.self_attn.o_proj.weight.*choose rollout.tensor from 1$",
        ),
        (
            EXPERTS | {"kv_heads": 2},
            1,
            "has 64 rows of .*k_proj.weight.*set rollout.quantization=none",
        ),
        (LATENT, 4, "columns of .*choose rollout.tensor from 1, 2$"),
        (DENSE | {"intermediate": 80}, 1, "80 rows of model.layers.*.mlp.gate_proj"),
        (EXPERTS | {"family": "gpt_oss", "head_dim": 64}, 1, "does not support gpt_oss"),
    ],
)
def test_blocks_that_a_rank_would_cut_are_refused(sizes, tensor, message):
    with pytest.raises(ValueError, match=message):
        engine_format("fp8", shape_of(sizes), tensor)
