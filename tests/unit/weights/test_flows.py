"""Plans from tables: executed element by element on small fleets, and their figures for the large models."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megarl.config.load import load_config
from megarl.layout import Layout, Parallel
from megarl.models import engine
from megarl.models.engine import engine_layout, engine_slices
from megarl.models.registry import hf_shapes, megatron_slices
from megarl.models.shape import Latent, ModelShape, Router
from megarl.models.shards import Rows, ShardSlice
from megarl.planner.cost import LINKS, cost
from megarl.planner.weight_sync import plan_weights
from megarl.telemetry.plan_figure import draw_flows
from megarl.weights.dealer import Fleet
from megarl.weights.flows import Flows, plan_flows
from megarl.weights.plan import make_plan

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
SIZES = dict(hidden=4, heads=4, kv_heads=2, head_dim=2, intermediate=4, vocab=11, rms_eps=1e-6, rope_theta=1e4)  # noqa: C408
QWEN = ModelShape(
    family="qwen3_moe", layers=3, tied=False, qkv_bias=False, qk_norm=True, max_position=64, experts=4,
    experts_per_token=2, moe_intermediate=4, **SIZES,
)  # fmt: skip
DEEPSEEK = replace(
    QWEN, family="deepseek_v3", layers=5, kv_heads=4, head_dim=3, qk_norm=False, dense_layers=2, shared_intermediate=4,
    latent=Latent(q_rank=3, kv_rank=3, nope=2, rope=1, value=2), router=Router(scores="sigmoid", corrected=True),
)  # fmt: skip
DENSE = replace(QWEN, family="qwen2", tied=True, qkv_bias=True, qk_norm=False, experts=0)
GPT_OSS = replace(
    QWEN, family="gpt_oss", qkv_bias=True, qk_norm=False, out_bias=True, sinks=True, router=Router(biased=True)
)
FLEETS = {
    "two replicas on a node": (QWEN, Fleet(Parallel(pipeline=2, expert=2), 4, tensor=2, replicas=2, node=4)),
    "key-values repeated": (QWEN, Fleet(Parallel(tensor=2, expert=2), 4, tensor=4, replicas=1, node=2)),
    "engine's experts": (QWEN, Fleet(Parallel(expert=2), 4, tensor=1, expert=4, replicas=1, node=2)),
    "colocated": (QWEN, Fleet(Parallel(tensor=2, pipeline=2), 4, tensor=2, replicas=2, node=2, is_split=False)),
    "experts over tensor": (
        QWEN,
        Fleet(Parallel(tensor=2, expert_tensor=2), 4, tensor=2, replicas=1, is_split=False, node=1),
    ),
    "virtual stages": (
        replace(QWEN, layers=5),
        Fleet(Parallel(pipeline=2, virtual_pipeline=2), 2, tensor=1, replicas=2, node=1),
    ),
    "latent, uneven": (DEEPSEEK, Fleet(Parallel(tensor=2, pipeline=2, expert=4), 8, tensor=2, replicas=3, node=2)),
    "latent, whole query": (
        replace(DEEPSEEK, latent=replace(DEEPSEEK.latent, q_rank=0)),
        Fleet(Parallel(pipeline=2), 2, tensor=4, replicas=1, node=2),
    ),
    "dense, tied": (DENSE, Fleet(Parallel(tensor=2, pipeline=2), 4, tensor=4, replicas=1, node=4, is_split=False)),
    "gpt-oss": (GPT_OSS, Fleet(Parallel(pipeline=2, expert=2), 4, tensor=2, replicas=2, node=2)),
}


def boxes(shape: ModelShape, fleet: Fleet) -> tuple[list[list[ShardSlice]], list[list[ShardSlice]]]:
    sources = [
        megatron_slices(shape, fleet.source(rank), style="te", padded_vocab=16) for rank in range(fleet.trainers)
    ]
    layouts = [
        engine_layout(tensor=fleet.tensor, expert=fleet.expert, rank=r % fleet.replica_size)
        for r in range(fleet.receivers)
    ]
    return sources, [engine_slices(shape, layout) for layout in layouts]


def elements(shape, strides, offset) -> np.ndarray:
    return offset + sum(
        np.arange(n).reshape([-1] + [1] * (len(shape) - 1 - i)) * s
        for i, (n, s) in enumerate(zip(shape, strides, strict=True))
    )


class Memory(dict):
    """(GPU, parameter) -> which element of which tensor lies at each element; -1: nothing yet."""

    def __init__(self, ids: dict[str, np.ndarray]) -> None:
        self.ids = ids

    def at(self, gpu: int, param: str) -> np.ndarray:
        return self.setdefault((gpu, param), np.full(4096, -1))

    def fill(self, gpu: int, held: list[ShardSlice]) -> None:
        for box in held:
            whole = self.ids[box.name]
            if len(box.shape) > whole.ndim:
                whole = whole.reshape(*whole.shape[:-1], -1, 2)
            part = whole[tuple(slice(a, a + n) for a, n in zip(box.start, box.shape, strict=True))]
            self.at(gpu, box.param)[elements(box.shape, box.strides, box.offset)] = part


def run(flows: Flows, sources: list[list[ShardSlice]], ids: dict[str, np.ndarray]) -> Memory:
    trainer, engines = Memory(ids), Memory(ids)
    for rank, held in enumerate(sources):
        trainer.fill(rank, held)
    for row in np.argsort(flows.round, kind="stable"):
        source, destination = int(flows.source[row]), int(flows.destination[row])
        for piece in flows.pieces([row]):
            memory = engines if flows.is_relay[row] else trainer
            taken = memory.at(source, piece.source.param)[
                elements(piece.shape, piece.source.strides, piece.source.offset)
            ]
            assert (taken >= 0).all(), f"{piece.name} is copied on before it arrives, or read where it is not"
            into = elements(piece.shape, piece.destination.strides, piece.destination.offset)
            kept = engines.at(destination, piece.destination.param)
            assert (kept[into] < 0).all(), f"{piece.name} is written twice"
            kept[into] = taken
    return engines


@pytest.mark.parametrize("name", FLEETS)
def test_every_element_arrives_once(name: str) -> None:
    shape, fleet = FLEETS[name]
    flows = plan_flows(shape, fleet, padded_vocab=16, bucket_bytes=200)
    counts = {tensor: int(np.prod(size)) for tensor, size in hf_shapes(shape).items()}
    first = dict(zip(counts, np.cumsum([0, *counts.values()]), strict=False))
    ids = {tensor: first[tensor] + np.arange(counts[tensor]).reshape(size) for tensor, size in hf_shapes(shape).items()}
    sources, destinations = boxes(shape, fleet)
    expected = Memory(ids)
    for rank, kept in enumerate(destinations):
        expected.fill(fleet.first + rank, kept)
    landed = run(flows, sources, ids)
    assert landed.keys() == expected.keys()
    for key, held in expected.items():
        assert (landed[key] == held).all(), key


@pytest.mark.parametrize("name", FLEETS)
def test_bytes_are_those_of_the_plan_that_is_executed(name: str) -> None:
    """make_plan works from every rank's boxes, plan_flows from tables: the same bytes cross nodes and stay in them."""
    shape, fleet = FLEETS[name]
    shape = replace(shape, router=replace(shape.router, corrected=False))  # make_plan knows one size of element
    sources, destinations = boxes(shape, fleet)
    gap: list[list[ShardSlice]] = [[] for _ in range(fleet.first)]
    pad: list[list[ShardSlice]] = [[] for _ in range(fleet.gpus - fleet.trainers)]
    plan = make_plan(
        [*sources, *pad], [*gap, *destinations], itemsize=2, bucket_bytes=1 << 20, ranks_per_node=fleet.node
    )
    flows = plan_flows(shape, fleet, padded_vocab=16)
    found = cost(flows, LINKS["h100"], 1)
    assert (found.bytes_kept, found.bytes_received) == (plan.bytes_kept, plan.bytes_received)
    pieces = [(m.source, m.destination, 2 * p.numel, p.is_relay) for m in plan.messages for p in m.pieces]
    executed = np.array(pieces).T
    planned = np.array([flows.source, flows.destination, flows.num_bytes, flows.is_relay])
    sums = []
    for source, destination, num_bytes, is_relay in (executed, planned):
        is_near, moved = source // fleet.node == destination // fleet.node, source != destination
        assert is_near[is_relay > 0].all()
        ways = (~is_near, is_near & moved, is_relay > 0)
        sums.append([int(num_bytes[way].sum()) for way in ways])
        sums[-1].append(int(np.bincount(source[~is_near], weights=num_bytes[~is_near], minlength=1).max()))
    assert sums[0][:3] == sums[1][:3], "over the network, within nodes, copied on"
    assert abs(sums[0][3] - sums[1][3]) <= max(flows.num_bytes.max(), executed[2].max()), "of the busiest sender"


def test_a_table_that_lacks_a_tensor_is_named(monkeypatch) -> None:
    whole = engine.engine_table
    extra = Rows("model.more.weight", "more", (4, 4))
    monkeypatch.setattr("megarl.weights.flows.engine_table", lambda s: replace(whole(s), head=(*whole(s).head, extra)))
    with pytest.raises(ValueError, match=r"model.more.weight: the engine keeps 8 elements of it, the trainer holds 0"):
        plan_flows(QWEN, FLEETS["colocated"][1], padded_vocab=16)


def test_what_a_node_shares_crosses_the_network_once() -> None:
    shape, fleet = FLEETS["two replicas on a node"]
    flows = plan_flows(shape, fleet, padded_vocab=16)
    far = flows.source // fleet.node != flows.destination // fleet.node
    model = sum(int(np.prod(size)) for size in hf_shapes(shape).values())
    assert flows.num_bytes[far].sum() == 2 * model, "two replicas on one node: one copy"


def published(name: str, parameters: float, *marks: pytest.MarkDecorator) -> object:
    return pytest.param(name, parameters, id=name, marks=marks)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [  # as published, without multi-token prediction
        published("deepseek_v3", 671e9),
        published("gpt_oss_120b", 117e9),
        published("qwen3_235b_a22b", 235e9, pytest.mark.long),
        published("kimi_k2", 1.03e12, pytest.mark.long),
        published("glm_4_5", 355e9, pytest.mark.long),
        published("llama_3_1_405b", 405e9, pytest.mark.long),
    ],
)
def test_large_models(name: str, parameters: float) -> None:
    plan = plan_weights(load_config(CONFIGS / f"{name}.yaml", [f"model.path={CONFIGS}/models/{name}"]))
    assert plan["model_bytes"] / 2 == pytest.approx(parameters, rel=0.01)
    assert plan["plan_seconds"] < 60
    assert plan["bytes_received"] == plan["bytes_kept"] >= plan["engine"]["replicas"] * plan["model_bytes"]
    assert plan["floor_seconds"] < plan["predicted_seconds"] < 1.3 * plan["floor_seconds"]
    assert plan["busiest_link_over_mean"] < 1.15
    assert plan["largest_message_bytes"] <= 2 * plan["bucket_bytes"]
    assert sum(plan["bytes_in_of_engine_rank"]) == plan["bytes_received"]
    assert json.loads(json.dumps(plan)) == plan


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(
        "model: {create: {family: qwen3_moe, experts: 4, tied: false, layers: 4}}\n"
        "parallel: {pipeline: 2, expert: 2}\n"
        "launch: {topology: split, processes: 4}\nrollout: {tensor: 2, replicas: 3}\n"
    )
    plan = plan_weights(load_config(tmp_path / "c.yaml"))
    draw_flows(plan, tmp_path / "flows.svg")
    text = (tmp_path / "flows.svg").read_text()
    for said in ("stage 1: 2 x", "replica 2: 2 x", "pp2 ep2 dp2 on 4 GPUs to 3 x tp2"):
        assert said in text, said
    with pytest.raises(ValueError, match=r"a picture is a \.png or a \.svg"):
        draw_flows(plan, tmp_path / "flows.gif")


def test_engine_layout_spreads_experts_over_all_ranks() -> None:
    at = engine_layout(tensor=2, expert=8, rank=5)
    assert (at.tp.size, at.tp.rank, at.ep.size, at.ep.rank, at.etp.size) == (2, 1, 8, 5, 1)
    assert isinstance(at, Layout)
