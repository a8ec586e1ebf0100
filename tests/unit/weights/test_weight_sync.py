"""`megarl plan --weights`: figures of the plan that is executed, its floor, and its picture."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megarl import cli
from megarl.config.launch import fleet_of
from megarl.config.load import load_config, parse_config
from megarl.config.schema import Config
from megarl.config.validate import model_shape
from megarl.layout import Fleet, Parallel
from megarl.models.registry import padded_vocab
from megarl.telemetry.plan_figure import draw_plan
from megarl.weights.plan.cost import LINKS, Links, estimate_cost
from megarl.weights.plan.from_config import plan_weights, write_messages
from megarl.weights.plan.plan import plan_recorded, plan_transfers
from tests.unit.weights.test_plan import whole

CONFIGS = Path(__file__).resolve().parents[3] / "configs"


def large(name: str, *overrides: str) -> Config:
    return load_config(
        CONFIGS / f"{name}.yaml", [f"model.path={CONFIGS}/models/{name}", *overrides]
    )


def colocated(name: str, world: int) -> Config:
    return large(
        name, "launch.topology=colocated", f"launch.processes={world}", "rollout.replicas=null"
    )


# of models whose configs share GPUs: trainer, ranks of an engine, engines
SPLIT = {
    "deepseek_v3": ({"pipeline": 16, "expert": 16}, 256, 32, 1),
    "kimi_k2": ({"pipeline": 16, "expert": 16}, 256, 16, 8),
    "glm_4_5": ({"tensor": 2, "pipeline": 8, "expert": 16}, 128, 16, 4),
    "llama_3_1_405b": ({"tensor": 8, "pipeline": 8}, 128, 16, 4),
}


def separate(name: str) -> Config:
    """A layout on separate GPUs: the config's, or one with engines of tensor ranks."""
    if name not in SPLIT:
        return large(name)
    parallel, processes, tensor, replicas = SPLIT[name]
    values = {
        "model": {"path": str(CONFIGS / "models" / name)},
        "parallel": parallel,
        "rollout": {"tensor": tensor, "replicas": replicas},
        "launch": {"topology": "split", "processes": processes},
    }
    return parse_config(values)


def check(figures: dict[str, object], within: tuple[float, float]) -> None:
    """Times the floor, without the time of a message and with it."""
    plain, whole_time = (
        figures[f"{kind}_seconds"] / figures["floor_seconds"] for kind in ("transfer", "predicted")
    )  # type: ignore[operator]
    assert 1.0 <= plain <= within[0] and plain <= whole_time <= within[1], (plain, whole_time)
    assert figures["plan_seconds"] < 60 and figures["busiest_link_over_mean"] < 1.15  # type: ignore[operator]


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
    _, figures = plan_weights(separate(name))
    assert figures["model_bytes"] / 2 == pytest.approx(parameters, rel=0.01)
    assert (
        figures["bytes_received"]
        == figures["bytes_kept"]
        >= figures["engine"]["replicas"] * figures["model_bytes"]
    )
    check(figures, within=(1.1, 1.2))
    assert figures["largest_message_bytes"] <= figures["round_bytes"]
    assert sum(figures["bytes_in_of_engine_rank"]) == figures["bytes_received"]
    assert np.sum(figures["bytes_between"]) == figures["bytes_kept"]
    assert json.loads(json.dumps(figures)) == figures


@pytest.mark.parametrize("name", ["glm_4_5", "llama_3_1_405b", "deepseek_v3", "kimi_k2"])
def test_configs_that_share_gpus(name: str) -> None:
    """Engines with experts over several nodes."""
    _, figures = plan_weights(large(name))
    assert figures["topology"] == "colocated"
    assert 1.0 <= figures["predicted_over_floor"] <= 1.3
    assert figures["bytes_received"] < figures["bytes_kept"]


def test_large_model_colocated() -> None:
    plan, figures = plan_weights(colocated("gpt_oss_120b", 64))
    check(figures, within=(1.3, 1.6))
    layer_bytes = figures["model_bytes"] / figures["engine"]["tensor"] / 36
    assert figures["peak_extra_bytes"] < 3 * figures["round_bytes"] + 3 * layer_bytes, (
        "too many layers are open at once"
    )
    moved = plan.message_sender != plan.message_receiver
    for ranks in (plan.message_sender, plan.message_receiver):
        load = np.bincount(plan.message_round[moved] * 64 + ranks[moved], plan.message_bytes[moved])
        assert load.max() <= figures["round_bytes"]


SMALL_FLEETS = {  # of 16 layers: with little to relay and much, more receivers than senders and fewer
    "colocated, a stage on each node": (True, 16, 8, Parallel(tensor=4, pipeline=2, expert=8)),
    "colocated, two replicas on a node": (True, 32, 4, Parallel(tensor=2, pipeline=4, expert=8)),
    "colocated, one stage": (True, 32, 4, Parallel(tensor=2, expert=32)),
    "split, a node has more ranks than a stage": (
        False,
        16,
        4,
        Parallel(tensor=4, pipeline=4, expert=4),
    ),
    "split, few senders": (False, 8, 8, Parallel(tensor=2, pipeline=4, expert=2)),
}


@pytest.mark.parametrize("name", SMALL_FLEETS)
def test_links_stay_busy_on_small_fleets(name: str) -> None:
    is_colocated, trainers, tensor, parallel = SMALL_FLEETS[name]
    shape = replace(model_shape(large("qwen3_235b_a22b")), layers=16)
    replicas = (trainers if is_colocated else 32) // tensor
    fleet = Fleet(parallel, trainers, tensor, tensor, replicas, is_split=not is_colocated)
    padded = padded_vocab(shape.vocab, parallel.tensor)
    plan = plan_transfers(shape, fleet, padded_vocab=padded, itemsize=2, round_bytes=512 << 20)
    cost = estimate_cost(plan, fleet, LINKS["h100"])
    assert 1.0 <= cost.transfer_seconds / cost.floor_seconds < 1.3
    assert cost.predicted_seconds / cost.floor_seconds < 1.6


def test_processes_per_node_and_split_ranks() -> None:
    config = large("qwen3_235b_a22b", "launch.processes_per_node=4")
    fleet = fleet_of(config, ranks_per_node=8)
    assert (fleet.ranks_per_node, fleet.first_receiver, fleet.world) == (4, 128, 256)
    assert fleet_of(large("qwen3_235b_a22b")).ranks_per_node == 8
    assert fleet_of(large("qwen3_235b_a22b"), ranks_per_node=2).ranks_per_node == 2


def test_cost_of_a_plan_worked_by_hand() -> None:
    """Two nodes of two ranks; rank 0 holds four tensors of 64 bytes, ranks 2 and 3 keep all of them."""
    tensors = [whole(f"t{index}") for index in range(4)]
    plan = plan_recorded(
        [tensors, [], [], []],
        [[], [], tensors, tensors],
        itemsize=4,
        round_bytes=1 << 20,
        ranks_per_node=2,
    )
    fleet = Fleet(Parallel(), 2, tensor=1, ranks_per_replica=1, replicas=2, ranks_per_node=2)
    cost = estimate_cost(plan, fleet, Links(network=64.0, nvlink=640.0))
    # round 0: two tensors to each over the network; round 1: each relays its two to the other
    assert (plan.num_rounds, cost.num_messages) == (2, 4)
    assert cost.bytes_out.tolist() == [256, 0, 128, 128] and cost.bytes_in.tolist() == [
        0,
        0,
        256,
        256,
    ]
    assert (plan.bytes_kept, plan.bytes_received, plan.bytes_relayed) == (512, 512, 256)
    assert cost.transfer_seconds == pytest.approx(256 / 64 + 128 / 640)
    assert cost.predicted_seconds - cost.transfer_seconds == pytest.approx((2 + 2) * 1e-5)
    # into the node 256 bytes by two cards, out of the two trainers 256 bytes, 256 to a rank over NVLink
    assert cost.floor_seconds == pytest.approx(max(256 / 128, 256 / 128, 256 / 640))
    assert cost.busiest_link_over_mean == 1.0
    assert cost.largest_message_bytes == 128 and cost.staged_bytes == 256
    # rank 2 in round 0: 128 bytes arrive, 128 to be relayed are packed; four tensors are open at no time, but two are
    assert cost.peak_extra_bytes == 256 + 128


def test_messages_file_lists_what_crosses_ranks(tmp_path: Path) -> None:
    text = "model: {create: {family: qwen3_moe, experts: 4, tied: false, layers: 4}}\nparallel: {pipeline: 2, expert: 2}\n"
    (tmp_path / "c.yaml").write_text(
        text + "rollout: {tensor: 2}\nlaunch: {processes: 4, processes_per_node: 2}\n"
    )
    plan, figures = plan_weights(load_config(tmp_path / "c.yaml", ["sync.round_bytes=4096"]))
    write_messages(plan, tmp_path / "messages.jsonl")
    listed = [json.loads(line) for line in (tmp_path / "messages.jsonl").read_text().splitlines()]
    lowered = [
        [message.round, message.sender, message.receiver, plan.itemsize * message.numel]
        for rank in range(4)
        for messages in plan.lower(rank)
        for message in messages
        if message.sender == rank != message.receiver
    ]
    assert listed == sorted(lowered) and len(listed) == figures["num_messages"] > 10
    assert sum(line[3] for line in listed) == figures["bytes_received"]


def test_nothing_is_staged_where_no_version_is_kept(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("model: {create: {}}\nlaunch: {processes: 2}\n")
    for override, is_staged in (
        ("rollout.sleep_level=1", True),
        ("rollout.sleep_level=2", False),
        ("sync.atomic=false", False),
    ):
        config = load_config(tmp_path / "c.yaml", [override, "parallel.tensor=2"])
        assert bool(plan_weights(config)[1]["staged_bytes"]) == is_staged, override


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(
        "model: {create: {family: qwen3_moe, experts: 4, tied: false, layers: 4}}\n"
        "parallel: {pipeline: 2, expert: 2}\n"
        "launch: {topology: split, processes: 4}\nrollout: {tensor: 2, replicas: 3}\n"
    )
    _, figures = plan_weights(load_config(tmp_path / "c.yaml"))
    draw_plan(figures).savefig(tmp_path / "plan.svg")
    text = (tmp_path / "plan.svg").read_text()
    for label in ("stage 1: 2 x", "replica 2: 2 x", "pp2 ep2 dp2 on 4 GPUs to 3 x tp2"):
        assert label in text, label


def test_a_figure_of_an_unknown_format_is_refused(tmp_path: Path, capsys) -> None:
    (tmp_path / "c.yaml").write_text("model: {create: {}}\n")
    arguments = ["plan", str(tmp_path / "c.yaml"), "--weights", "--figure"]
    assert cli.main([*arguments, "plan.abc"]) == 2
    assert "--figure plan.abc must be a .png or .svg file" in capsys.readouterr().err
    assert cli.main([*arguments, str(tmp_path / "plan.png")]) == 0
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_engine_layout_spreads_experts_over_all_ranks() -> None:
    at = Fleet(Parallel(), 8, 2, 8, 1, expert=8, is_split=False).engine_layout(5)
    assert (at.tp.size, at.tp.rank, at.ep.size, at.ep.rank, at.etp.size) == (2, 1, 8, 5, 1)


def test_fp8_moves_half_the_bytes() -> None:
    """A byte an element, a number per 16,384 of them, and in bf16 the embedding, the head, norms and routers."""
    shares = []
    for quantization in ("none", "fp8"):
        config = large("deepseek_v3", "rollout.tensor=16", f"rollout.quantization={quantization}")
        _, figures = plan_weights(config)
        shares.append((figures["bytes_kept"], figures["bytes_received"], figures["model_bytes"]))
    (kept, received, size), (kept_fp8, received_fp8, size_fp8) = shares
    assert 0.5 < kept_fp8 / kept < 0.505 and 0.5 < received_fp8 / received < 0.505
    assert size_fp8 == size, "the model is the trainer's"


def test_blocks_that_a_rank_would_cut_are_refused_with_what_would_do() -> None:
    with pytest.raises(
        ValueError,
        match=r"192 rows of .*experts\.\*\.gate_proj.* choose rollout.tensor from 1, 2, 4$",
    ):
        plan_weights(large("qwen3_235b_a22b", "rollout.tensor=8", "rollout.quantization=fp8"))
