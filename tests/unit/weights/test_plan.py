"""The planner against brute force: every element of every destination once, from a rank that holds it."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.layout import Layout, Parallel
from megarl.models.registry import hf_shapes, megatron_slices
from megarl.models.shape import ModelShape
from megarl.models.shards import ShardSlice
from megarl.weights.plan import Plan, arrived, find_gaps, make_plan

Memory = dict[tuple[str, int], object]  # (param, element) -> what lies there


def moe(**changes) -> ModelShape:
    sizes = dict(layers=2, hidden=4, heads=4, kv_heads=2, head_dim=2, intermediate=4, vocab=11, tied=False)  # noqa: C408
    return ModelShape(
        family="qwen3_moe", qkv_bias=False, qk_norm=True, rms_eps=1e-6, rope_theta=1e4, max_position=64, experts=4,
        experts_per_token=2, moe_intermediate=4, **sizes | changes,
    )  # fmt: skip


def boxes_of_world(shape: ModelShape, parallel: Parallel, world: int) -> list[list[ShardSlice]]:
    padded = -(-shape.vocab // (2 * parallel.tensor)) * 2 * parallel.tensor
    layouts = [Layout.of(parallel, world, rank) for rank in range(world)]
    return [megatron_slices(shape, layout, style="local", padded_vocab=padded) for layout in layouts]


def elements(box: ShardSlice):
    """(HF index, element of the parameter) of everything in a box."""
    for index in product(*(range(n) for n in box.shape)):
        at = box.offset + sum(i * stride for i, stride in zip(index, box.strides, strict=True))
        yield tuple(s + i for s, i in zip(box.start, index, strict=True)), at


def fill(boxes: list[ShardSlice]) -> Memory:
    return {(box.param, at): (box.name, index) for box in boxes for index, at in elements(box)}


def run(plan: Plan, sources: list[list[ShardSlice]], world: int) -> list[Memory]:
    """Execute a plan element by element; what is copied on is read from the buckets of the round before."""
    memory, landed = [fill(boxes) for boxes in sources], [{} for _ in range(world)]
    before: list[Memory] = [{} for _ in range(world)]
    for round_ in plan.rounds:
        buckets: list[Memory] = [{} for _ in range(world)]
        for message in round_:
            flat = []
            for piece in message.pieces:
                held = before if piece.is_relay else memory
                for index in product(*(range(n) for n in piece.shape)):

                    def at(view, index=index):
                        return view.param, view.offset + sum(i * s for i, s in zip(index, view.strides, strict=True))

                    key = at(piece.destination)
                    assert key not in landed[message.destination], "written twice"
                    landed[message.destination][key] = held[message.source][at(piece.source)]
                    flat.append(landed[message.destination][key])
            buckets[message.destination] |= {(arrived(message.source), i): what for i, what in enumerate(flat)}
        before = buckets
    return landed


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
def test_every_element_arrives_once(source, destination, bucket_bytes, tied, vocab, ranks_per_node):
    shape, world = moe(tied=tied, vocab=vocab), 4
    sources, destinations = boxes_of_world(shape, source, world), boxes_of_world(shape, destination, world)
    assert find_gaps(hf_shapes(shape), sources) == []
    plan = make_plan(sources, destinations, itemsize=2, bucket_bytes=bucket_bytes, ranks_per_node=ranks_per_node)
    assert run(plan, sources, world) == [fill(boxes) for boxes in destinations]
    assert plan.bytes_kept == 2 * sum(box.numel for boxes in destinations for box in boxes)
    if source == destination:
        assert plan.bytes_received == 0, "what a rank holds it does not receive"


@pytest.mark.parametrize(("destination", "ranks_per_node"), [(LAYOUTS[1], None), (LAYOUTS[1], 4), (LAYOUTS[0], 2)])
def test_buckets_keep_to_the_limit(destination, ranks_per_node):
    shape = moe(hidden=16)
    sources, destinations = boxes_of_world(shape, LAYOUTS[3], 4), boxes_of_world(shape, destination, 4)
    limit = 128
    plan = make_plan(sources, destinations, itemsize=4, bucket_bytes=limit, ranks_per_node=ranks_per_node)
    assert len(plan.rounds) > 10
    for round_ in plan.rounds:
        assert len({(m.source, m.destination) for m in round_}) == len(round_), "one message per pair and round"
        for rank in range(4):
            for end in ("source", "destination"):
                moved = [m for m in round_ if getattr(m, end) == rank]
                pieces = [piece for m in moved for piece in m.pieces]
                rows = [piece for piece in pieces if piece.shape[0] == 1]
                assert 4 * sum(piece.numel for piece in pieces) <= limit or len(pieces) == len(rows) == 1


def test_replicas_share_the_sending():
    """Four ranks hold everything, one more keeps a copy: each sends a share."""
    whole = [ShardSlice(f"t{i}", (0, 0), (4, 4), f"p{i}", 0, (4, 1)) for i in range(8)]
    plan = make_plan([whole] * 4 + [[]], [[]] * 4 + [whole], itemsize=4, bucket_bytes=1 << 20)
    sent = [sum(m.numel for m in plan.messages if m.source == rank) for rank in range(4)]
    assert sent == [32, 32, 32, 32]


def test_what_a_node_shares_crosses_the_network_once():
    """Two ranks of one node hold all; four of another keep it: a quarter each, the rest from neighbours."""
    whole = [ShardSlice(f"t{i}", (0, 0), (6, 4), f"p{i}", 0, (4, 1)) for i in range(4)]
    plan = make_plan([whole] * 2 + [[]] * 6, [[]] * 4 + [whole] * 4, itemsize=4, bucket_bytes=4 * 24, ranks_per_node=4)
    far = [m for m in plan.messages if m.source < 4]
    assert [sum(m.numel for m in far if m.source == rank) for rank in range(4)] == [48, 48, 0, 0]
    assert [sum(m.numel for m in far if m.destination == rank) for rank in range(4, 8)] == [24] * 4
    for rank in range(4, 8):
        assert sum(m.numel for m in plan.messages if m.destination == rank) == 96
        assert sum(m.numel for m in plan.messages if m.source == rank) == 72, "neighbours share the copying, too"
    assert all(m.is_relay == (m.source >= 4) for m in plan.messages)


def test_order_follows_the_destination():
    whole = [ShardSlice(name, (0,), (4,), name, 0, (1,)) for name in "abcd"]
    plan = make_plan([whole], [whole[::-1]], itemsize=4, bucket_bytes=16)
    assert [message.pieces[0].name for message in plan.messages] == list("dcba")


def test_gaps_and_overlaps_are_named():
    half = ShardSlice("w", (0, 0), (2, 4), "p", 0, (4, 1))
    whole = ShardSlice("w", (0, 0), (4, 4), "p", 0, (4, 1))
    with pytest.raises(ValueError, match=r"w: rank 0 keeps 16 elements .* the sources hold 8 of them"):
        make_plan([[half]], [[whole]], itemsize=4, bucket_bytes=64)
    with pytest.raises(ValueError, match="w: two source rectangles overlap"):
        make_plan([[half], [whole]], [[whole], []], itemsize=4, bucket_bytes=64)
    assert find_gaps({"w": (4, 4), "v": (2,)}, [[half]]) == ["w (8 of 16 elements)", "v (absent)"]
    assert find_gaps({}, [[half]]) == ["w (not a tensor of this model)"]


def test_fingerprint_sees_every_number():
    def plan(offset: int, bucket_bytes: int = 64) -> Plan:
        source = [ShardSlice("w", (0, 0), (4, 4), "p", offset, (4, 1))]
        return make_plan(
            [source], [[ShardSlice("w", (0, 0), (4, 4), "q", 0, (4, 1))]], itemsize=4, bucket_bytes=bucket_bytes
        )

    assert plan(0).fingerprint == plan(0).fingerprint
    assert len({plan(0).fingerprint, plan(1).fingerprint, plan(0, 16).fingerprint}) == 3
