"""Plans executed element by element: every element of every receiver once, from a rank that holds it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.config.load import load_config
from megarl.layout import Fleet, Layout, Parallel
from megarl.models.engine import engine_table
from megarl.models.registry import fp32_tensors, hf_shapes, megatron_table
from megarl.models.shape import DENSE as DENSE_LAYER
from megarl.models.shape import EXPERTS, LatentSizes, ModelShape, Router
from megarl.models.shards import (
    ElementSizes,
    ShardDim0,
    ShardSlice,
    Table,
    in_units,
    slices_of,
    whole_tensor,
)
from megarl.weights.plan.from_config import plan_weights
from megarl.weights.plan.plan import (
    Message,
    Plan,
    find_gaps,
    plan_recorded,
    plan_transfers,
    relay_buffer,
)

SIZES = dict(  # noqa: C408
    hidden=4,
    heads=4,
    kv_heads=2,
    head_dim=2,
    intermediate=4,
    vocab=11,
    rms_eps=1e-6,
    rope_theta=1e4,
)
QWEN = ModelShape(
    family="qwen3_moe", layers=3, tied=False, qkv_bias=False, qk_norm=True, max_position=64, experts=4,
    experts_per_token=2, moe_intermediate=4, **SIZES,
)  # fmt: skip
DEEPSEEK = replace(
    QWEN, family="deepseek_v3", layers=5, kv_heads=4, head_dim=3, qk_norm=False, kinds=(DENSE_LAYER, DENSE_LAYER, EXPERTS), shared_intermediate=4,
    latent=LatentSizes(3, 3, 2, 1, 2), router=Router(score_function="sigmoid", expert_bias=True),
)  # fmt: skip
DENSE = replace(QWEN, family="qwen2", tied=True, qkv_bias=True, qk_norm=False, experts=0)
GPT_OSS = replace(
    QWEN,
    family="gpt_oss",
    qkv_bias=True,
    qk_norm=False,
    out_bias=True,
    sinks=True,
    router=Router(linear_bias=True),
)


def colocated(
    parallel: Parallel, tensor: int, world: int, ranks_per_node: int, expert: int = 1
) -> Fleet:
    replicas = world // max(tensor, expert)
    return Fleet(
        parallel,
        world,
        tensor,
        max(tensor, expert),
        replicas,
        expert=expert,
        ranks_per_node=ranks_per_node,
        is_split=False,
    )


def split(
    parallel: Parallel,
    trainers: int,
    tensor: int,
    replicas: int,
    ranks_per_node: int,
    expert: int = 1,
) -> Fleet:
    return Fleet(
        parallel,
        trainers,
        tensor,
        max(tensor, expert),
        replicas,
        expert=expert,
        ranks_per_node=ranks_per_node,
    )


FLEETS = {
    "two replicas on a node": (QWEN, split(Parallel(pipeline=2, expert=2), 4, 2, 2, 4)),
    "ranks 0-3 send, 4-7 receive, on one node": (
        QWEN,
        split(Parallel(tensor=2, expert=2), 4, 2, 2, 8),
    ),
    "a node of both": (QWEN, split(Parallel(tensor=2), 2, 2, 2, 4)),
    "key-values repeated": (QWEN, split(Parallel(tensor=2, expert=2), 4, 4, 1, 2)),
    "engine's experts": (QWEN, split(Parallel(expert=2), 4, 1, 1, 2, expert=4)),
    "engine's experts, colocated": (
        QWEN,
        colocated(Parallel(pipeline=2, expert=2), 2, 4, 2, expert=4),
    ),
    "colocated": (QWEN, colocated(Parallel(tensor=2, pipeline=2), 2, 4, 2)),
    "colocated, replicas share nodes": (QWEN, colocated(Parallel(pipeline=2, expert=2), 1, 8, 4)),
    "experts over tensor": (QWEN, colocated(Parallel(tensor=2, expert_tensor=2), 2, 4, 1)),
    "virtual stages": (
        replace(QWEN, layers=5),
        split(Parallel(pipeline=2, virtual_pipeline=2, layers=(1, 2, 1, 1)), 2, 1, 2, 1),
    ),
    "latent, uneven": (DEEPSEEK, split(Parallel(tensor=2, pipeline=2, expert=4), 8, 2, 3, 2)),
    "latent, whole query": (
        replace(DEEPSEEK, latent=replace(DEEPSEEK.latent, q_lora_rank=0)),
        split(Parallel(pipeline=2), 2, 4, 1, 2),
    ),
    "dense, tied": (DENSE, colocated(Parallel(tensor=2, pipeline=2), 4, 4, 4)),
    "tied, whole on each rank": (DENSE, colocated(Parallel(pipeline=2), 1, 4, 2)),
    "gpt-oss": (GPT_OSS, split(Parallel(pipeline=2, expert=2), 4, 2, 2, 2)),
}
ITEMSIZE, FP32_NAMES = 2, fp32_tensors(DEEPSEEK)


def plan_of(shape: ModelShape, fleet: Fleet, round_bytes: int = 200, spec: str = "te") -> Plan:
    return plan_transfers(
        shape,
        fleet,
        padded_vocab=16,
        itemsize=ITEMSIZE,
        round_bytes=round_bytes,
        spec=spec,  # type: ignore[arg-type]
    )


def slices_of_fleet(
    shape: ModelShape, fleet: Fleet
) -> tuple[list[list[ShardSlice]], list[list[ShardSlice]]]:
    """What each rank of the world holds, and keeps."""
    held: list[list[ShardSlice]] = [[] for _ in range(fleet.world)]
    kept: list[list[ShardSlice]] = [[] for _ in range(fleet.world)]
    for rank in range(fleet.trainers):
        held[rank] = slices_of(
            megatron_table(shape, spec="te", padded_vocab=16), shape, fleet.trainer_layout(rank)
        )
    for rank in range(fleet.first_receiver, fleet.first_receiver + fleet.receivers):
        kept[rank] = slices_of(engine_table(shape), shape, fleet.engine_layout(rank))
    return [
        [
            in_units(slices, ElementSizes(8 * ITEMSIZE, dict.fromkeys(fp32_tensors(shape), 32)))
            for slices in side
        ]
        for side in (held, kept)
    ]  # type: ignore[return-value]


def indices(shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> np.ndarray:
    """[shape] where the elements of a view lie."""
    axes = np.ogrid[tuple(slice(0, size) for size in shape)] if shape else []
    return offset + sum(
        (axis * stride for axis, stride in zip(axes, strides, strict=True)),
        np.zeros(shape, dtype=int),
    )


class Memory(dict[str, np.ndarray]):
    """Parameter -> which element of which tensor lies at each element; -1: nothing."""

    def __missing__(self, param: str) -> np.ndarray:
        return self.setdefault(param, np.full(4096, -1))


def number_elements(shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    counts = [prod(shape) for shape in shapes.values()]
    starts = np.cumsum([0, *counts])
    return {
        name: start + np.arange(prod(shape)).reshape(shape)
        for start, (name, shape) in zip(starts, shapes.items(), strict=False)
    }


def fill(numbers: dict[str, np.ndarray], slices: list[ShardSlice]) -> Memory:
    memory = Memory()
    for part in slices:
        whole = numbers[part.name]
        if len(part.shape) > whole.ndim:
            whole = whole.reshape(*whole.shape[:-1], -1, 2)
        region = tuple(
            slice(start, start + size) for start, size in zip(part.start, part.shape, strict=True)
        )
        memory[part.param][indices(part.shape, part.strides, part.offset)] = whole[region]
    return memory


def execute(plan: Plan, trainers: list[Memory]) -> list[Memory]:
    """Each rank packs what its own lowered plan lists, and unpacks what arrives as its own lowered plan lists it."""
    plans = [plan.lower(rank) for rank in range(len(trainers))]
    landed, arrived = [Memory() for _ in trainers], [dict[int, np.ndarray]() for _ in trainers]
    for number in range(plan.num_rounds):
        sent: dict[tuple[int, int], np.ndarray] = {}
        for rank, rounds in enumerate(plans):
            memory = {
                **trainers[rank],
                **{relay_buffer(sender): flat for sender, flat in arrived[rank].items()},
            }
            for message in rounds[number]:
                if message.sender == rank:
                    parts = [
                        memory[t.source.param][
                            indices(t.source.shape, t.source.strides, t.source.offset)
                        ]
                        for t in message.transfers
                    ]
                    sent[rank, message.receiver] = np.concatenate([part.ravel() for part in parts])
                    assert (sent[rank, message.receiver] >= 0).all(), (
                        f"{message} reads what is not there"
                    )
        arrived = [{} for _ in trainers]
        for rank, rounds in enumerate(plans):
            for message in rounds[number]:
                if message.receiver == rank:
                    unpack(message, sent[message.sender, rank], landed[rank])
                    arrived[rank][message.sender] = sent[message.sender, rank]
    return landed


def unpack(message: Message, flat: np.ndarray, memory: Memory) -> None:
    offset = 0
    for transfer in message.transfers:
        part = transfer.destination
        into, kept = indices(part.shape, part.strides, part.offset), memory[part.param]
        assert (kept[into] < 0).all(), f"{part.name} is written twice"
        kept[into] = flat[offset : offset + part.numel].reshape(part.shape)
        offset += part.numel
    assert offset == len(flat) == message.numel


def check_execution(
    plan: Plan, shape: ModelShape, held: list[list[ShardSlice]], kept: list[list[ShardSlice]]
) -> None:
    sizes = ElementSizes(8 * ITEMSIZE, dict.fromkeys(fp32_tensors(shape), 32))
    tensors = [whole_tensor(name, size) for name, size in hf_shapes(shape).items()]
    numbers = number_elements({part.name: part.shape for part in in_units(tensors, sizes)})
    landed = execute(plan, [fill(numbers, slices) for slices in held])
    for rank, expected in enumerate(fill(numbers, slices) for slices in kept):
        assert landed[rank].keys() == expected.keys()
        for param in expected:
            assert (landed[rank][param] == expected[param]).all(), (rank, param)


@pytest.mark.parametrize("name", FLEETS)
@pytest.mark.parametrize("round_bytes", [100, 1 << 20])
def test_every_element_arrives_once(name: str, round_bytes: int) -> None:
    shape, fleet = FLEETS[name]
    check_execution(plan_of(shape, fleet, round_bytes), shape, *slices_of_fleet(shape, fleet))


@pytest.mark.parametrize("name", FLEETS)
def test_tables_and_recorded_slices_give_the_same_bytes(name: str) -> None:
    shape, fleet = FLEETS[name]
    held, kept = slices_of_fleet(shape, fleet)
    table = plan_of(shape, fleet)
    paired = {
        part.name
        for slices in held
        for part in slices
        if len(part.shape) > len(hf_shapes(shape)[part.name])
    }
    assert bool(paired) == (shape.family == "gpt_oss")
    recorded = plan_recorded(
        held, kept, itemsize=ITEMSIZE, round_bytes=200, ranks_per_node=fleet.ranks_per_node
    )
    check_execution(recorded, shape, held, kept)
    for figure in ("bytes_kept", "bytes_received", "bytes_relayed"):
        assert getattr(table, figure) == getattr(recorded, figure), figure
    assert (
        network_bytes(table, fleet)
        == network_bytes(recorded, fleet)
        == lacking_bytes(fleet, held, kept)
    )


def network_bytes(plan: Plan, fleet: Fleet) -> list[int]:
    """Into each node."""
    node = fleet.ranks_per_node
    far = plan.message_sender // node != plan.message_receiver // node
    nodes = -(-fleet.world // node)
    return (
        np.bincount(plan.message_receiver[far] // node, plan.message_bytes[far], nodes)
        .astype(int)
        .tolist()
    )


def lacking_bytes(
    fleet: Fleet, held: list[list[ShardSlice]], kept: list[list[ShardSlice]]
) -> list[int]:
    """What some rank of a node keeps and none of its ranks holds, element by element."""

    def elements(sides: list[list[ShardSlice]], node: int) -> set[tuple[str, int]]:
        found: set[tuple[str, int]] = set()
        for slices in sides[node * fleet.ranks_per_node : (node + 1) * fleet.ranks_per_node]:
            for part in slices:
                axes = np.meshgrid(*map(np.arange, part.shape), indexing="ij")
                index = [axis.ravel() + start for axis, start in zip(axes, part.start, strict=True)]
                found |= {(part.name, *element) for element in np.array(index).T.tolist()}  # type: ignore[misc]
        return found

    nodes = range(-(-fleet.world // fleet.ranks_per_node))
    return [ITEMSIZE * len(elements(kept, node) - elements(held, node)) for node in nodes]


@pytest.mark.parametrize("name", FLEETS)
def test_rounds_keep_to_the_limit(name: str) -> None:
    shape, fleet = FLEETS[name]
    limit = 64
    plan = plan_of(shape, fleet, limit)
    assert plan.num_rounds > 5
    pairs = list(
        zip(plan.message_round.tolist(), plan.message_sender, plan.message_receiver, strict=True)
    )
    assert pairs == sorted(set(pairs)), "one message for each round, sender and receiver, in order"
    for rank in range(fleet.world):
        for messages in plan.lower(rank):
            for end in ("sender", "receiver"):
                moved = [m for m in messages if getattr(m, end) == rank and m.sender != m.receiver]
                transfers = [t.source for m in moved for t in m.transfers]
                rows = {(t.name, t.start) for t in transfers if t.shape[0] == 1 or len(t.shape) < 2}
                fits = ITEMSIZE * sum(t.numel for t in transfers) <= limit
                assert fits or len(rows) == 1, (
                    f"rank {rank}: more than a row, or a row's copies, above the limit"
                )


@pytest.mark.parametrize("name", FLEETS)
def test_messages_agree_on_both_sides(name: str) -> None:
    shape, fleet = FLEETS[name]
    plan = plan_of(shape, fleet)
    by_index: dict[int, Message] = {}
    for rank in range(fleet.world):
        for number, messages in enumerate(plan.lower(rank)):
            assert [message.index for message in messages] == sorted(
                message.index for message in messages
            )
            for message in messages:
                assert rank in (message.sender, message.receiver) and message.round == number
                assert by_index.setdefault(message.index, message) == message
    assert sorted(by_index) == list(range(len(plan.message_bytes)))
    for index, message in by_index.items():
        ends = (plan.message_round[index], plan.message_sender[index], plan.message_receiver[index])
        assert (message.round, message.sender, message.receiver) == ends
        assert ITEMSIZE * message.numel == plan.message_bytes[index]


def test_nothing_moves_between_equal_layouts() -> None:
    plan = plan_of(DENSE, colocated(Parallel(), 1, 4, 2))
    assert plan.bytes_received == 0 and plan.bytes_kept == 4 * 2 * sum(
        map(prod, hf_shapes(DENSE).values())
    )


LAYOUTS = [
    Parallel(), Parallel(tensor=2), Parallel(pipeline=2), Parallel(tensor=2, pipeline=2), Parallel(expert=2),
    Parallel(tensor=2, expert=2), Parallel(tensor=2, expert_tensor=2), Parallel(pipeline=2, expert=2),
]  # fmt: skip


@settings(max_examples=16, deadline=None)
@given(
    st.sampled_from(LAYOUTS),
    st.sampled_from(LAYOUTS),
    st.sampled_from([4, 100, 1 << 20]),
    st.booleans(),
    st.integers(5, 12),
    st.sampled_from([None, 1, 2, 4]),
)
def test_recorded_slices_of_any_two_layouts(
    source: Parallel,
    destination: Parallel,
    round_bytes: int,
    tied: bool,
    vocab: int,
    ranks_per_node: int | None,
) -> None:
    shape = replace(QWEN, tied=tied, vocab=vocab, layers=2)
    held, kept = (
        [
            slices_of(
                megatron_table(
                    shape,
                    spec="local",
                    padded_vocab=-(-vocab // (2 * parallel.tensor)) * 2 * parallel.tensor,
                ),
                shape,
                Layout.of(parallel, 4, rank),
            )
            for rank in range(4)
        ]
        for parallel in (source, destination)
    )
    assert find_gaps(hf_shapes(shape), held) == []
    plan = plan_recorded(
        held, kept, itemsize=ITEMSIZE, round_bytes=round_bytes, ranks_per_node=ranks_per_node
    )
    check_execution(plan, shape, held, kept)
    if source == destination:
        assert plan.bytes_received == 0, "what a rank holds it does not receive"


def whole(name: str, rows: int = 4) -> ShardSlice:
    return ShardSlice(name, (0, 0), (rows, 4), name, 0, (4, 1))


def test_replicas_share_the_sending() -> None:
    """Four ranks hold everything, one more keeps a copy: each sends a share."""
    tensors = [whole(f"t{index}") for index in range(8)]
    plan = plan_recorded([tensors] * 4, [[]] * 4 + [tensors], itemsize=4, round_bytes=1 << 20)
    assert plan.message_bytes.tolist() == [4 * 32] * 4
    assert plan.message_sender.tolist() == [0, 1, 2, 3]


def test_what_a_node_shares_crosses_the_network_once() -> None:
    """Two ranks of one node hold all; four of another keep it: a quarter each, the rest from neighbours."""
    tensors = [whole(f"t{index}", 6) for index in range(4)]
    plan = plan_recorded(
        [tensors] * 2 + [[]] * 6,
        [[]] * 4 + [tensors] * 4,
        itemsize=4,
        round_bytes=4 * 24,
        ranks_per_node=4,
    )
    far = plan.message_sender < 4
    assert np.bincount(plan.message_sender[far], plan.message_bytes[far]).tolist() == [4 * 48] * 2
    assert (
        np.bincount(plan.message_receiver[far], plan.message_bytes[far])[4:].tolist()
        == [4 * 24] * 4
    )
    assert np.bincount(plan.message_receiver, plan.message_bytes)[4:].tolist() == [4 * 96] * 4
    assert np.bincount(plan.message_sender, plan.message_bytes)[4:].tolist() == [4 * 72] * 4, (
        "neighbours share it"
    )
    relays = {
        m.index
        for rank in range(8)
        for messages in plan.lower(rank)
        for m in messages
        if m.is_relay
    }
    assert relays == set(np.flatnonzero(plan.message_sender >= 4).tolist())
    assert plan.bytes_relayed == 4 * 4 * 72


def test_order_follows_the_receiver() -> None:
    tensors = [ShardSlice(name, (0,), (4,), name, 0, (1,)) for name in "abcd"]
    plan = plan_recorded([tensors, []], [[], tensors[::-1]], itemsize=4, round_bytes=16)
    received = [t.source.name for messages in plan.lower(1) for m in messages for t in m.transfers]
    assert list(dict.fromkeys(received)) == list("dcba")


def test_gaps_and_overlaps_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    half = ShardSlice("w", (0, 0), (2, 4), "p", 0, (4, 1))
    with pytest.raises(
        ValueError, match=r"w: the engine keeps 16 elements .* the trainer holds 8 of them"
    ):
        plan_recorded([[half]], [[whole("w")]], itemsize=4, round_bytes=64)
    with pytest.raises(ValueError, match="w: two source rectangles overlap"):
        plan_recorded([[half], [whole("w")]], [[whole("w")], []], itemsize=4, round_bytes=64)
    assert find_gaps({"w": (4, 4), "v": (2,)}, [[half]]) == ["w (8 of 16 elements)", "v (absent)"]
    assert find_gaps({}, [[half]]) == ["w (not a tensor of this model)"]
    extra = ShardDim0("model.more.weight", "more", (4, 4))

    def table(shape: ModelShape, fmt: None, **_: int) -> Table:
        return replace(engine_table(shape), head=(*engine_table(shape).head, extra))

    monkeypatch.setattr("megarl.weights.plan.plan.engine_table", table)
    with pytest.raises(
        ValueError, match=r"model.more.weight: the engine keeps 8 elements .* the trainer holds 0"
    ):
        plan_of(*FLEETS["colocated"])


def test_fingerprint_sees_every_number() -> None:
    def fingerprint(offset: int = 0, round_bytes: int = 1 << 20, itemsize: int = 4) -> str:
        source = [replace(whole("w"), offset=offset)]
        return plan_recorded(
            [source], [[whole("w")]], itemsize=itemsize, round_bytes=round_bytes
        ).fingerprint

    assert fingerprint() == fingerprint()
    assert (
        len({fingerprint(), fingerprint(1), fingerprint(round_bytes=16), fingerprint(itemsize=2)})
        == 4
    )
    tables: list[Callable[[], Plan]] = [
        lambda: plan_of(*FLEETS["colocated"]),
        lambda: plan_of(*FLEETS["colocated"], spec="local"),
        lambda: plan_of(replace(QWEN, layers=4), FLEETS["colocated"][1]),
    ]
    assert len({table().fingerprint for table in tables}) == 3


DATA_RANKS = {  # (model, trainer, engine on other GPUs)
    "experts of two ranks on one": (
        "deepseek_v3",
        "parallel.pipeline=16 parallel.expert=16 launch.processes=256",
        "rollout.tensor=1 rollout.data=32 rollout.expert=32 rollout.replicas=1",
    ),
    "tensor and data": (
        "qwen3_235b_a22b",
        "parallel.tensor=4 parallel.pipeline=8 parallel.expert=16 launch.processes=128",
        "rollout.tensor=4 rollout.data=4 rollout.expert=16 rollout.replicas=8",
    ),
}


@pytest.mark.parametrize("case", DATA_RANKS)
def test_links_are_busy_with_data_ranks(case: str) -> None:
    """Shards of neighbouring data ranks are on the same trainer rank, which would send to one after another."""
    model, *layout = DATA_RANKS[case]
    configs = Path(__file__).parents[3] / "configs"
    overrides = [*" ".join(layout).split(), f"model.path={configs}/models/{model}"]
    overrides += ["launch.topology=split", "rollout.sleep_level=0", "train.offload=[]"]
    _, figures = plan_weights(load_config(configs / f"{model}.yaml", overrides))
    assert 1 < figures["predicted_over_floor"] < 1.3
    assert figures["peak_extra_bytes"] < 9e9, "tensors stay open for as long as before"
