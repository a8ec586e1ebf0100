"""Placement is proven from what both sides hold, whatever the plan did; a wrong place is refused by name."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megarl.models.shards import ShardSlice
from megarl.types import CheckFailed
from megarl.weights.sync.execute import MemoryReceiver
from megarl.weights.sync.placement import check_placement, sums_by_tensor
from megarl.weights.sync.transports import Transport

SHAPES = {"a": (6, 4), "b": (5,)}
TRAINER = [
    ShardSlice("a", (0, 0), (6, 2), "left", 0, (2, 1)),
    ShardSlice("a", (0, 2), (6, 2), "right", 0, (2, 1)),
    ShardSlice("b", (0,), (5,), "b", 0, (1,)),
]
ENGINE = [
    ShardSlice("a", (0, 0), (3, 4), "weight", 0, (4, 1)),
    ShardSlice("a", (3, 0), (3, 4), "weight", 12, (4, 1)),
    ShardSlice("b", (0,), (5,), "bias", 0, (1,)),
]


def compare(trainer=TRAINER, engine=ENGINE, change=lambda parameters, memory: None) -> None:
    whole = {"a": torch.randn(6, 4), "b": torch.randn(5)}
    parameters = {
        "left": whole["a"][:, :2].clone(),
        "right": whole["a"][:, 2:].clone(),
        "b": whole["b"].clone(),
    }
    memory = {"weight": whole["a"].clone(), "bias": whole["b"].clone()}
    change(parameters, memory)
    sent, received = (
        sums_by_tensor(
            SHAPES, slices, MemoryReceiver(slices, where, torch.float32).positional_checksums()
        )
        for slices, where in ((trainer, parameters), (engine, memory))
    )
    check_placement(Transport(), SHAPES, [[0]], sent, received)


def test_slices_in_their_place_pass():
    compare()


def test_copies_of_a_tensor_pass_when_they_are_equal():
    compare(trainer=[*TRAINER, *TRAINER, *TRAINER])
    compare(trainer=[*TRAINER, *TRAINER[:2]], engine=[*ENGINE, ENGINE[2]])


@pytest.mark.parametrize(
    ("fault", "tensor"),
    [
        (
            {"change": lambda p, m: m["weight"].copy_(m["weight"][[1, 0, 2, 3, 4, 5]])},
            "a",
        ),  # rows swapped
        ({"change": lambda p, m: m["weight"].copy_(m["weight"].roll(3, 0))}, "a"),  # parts swapped
        ({"change": lambda p, m: m["bias"].neg_()}, "b"),
        ({"change": lambda p, m: p["left"][0].add_(1)}, "a"),
        ({"engine": [ENGINE[0], ENGINE[0], ENGINE[2]]}, "a"),  # one part twice and the other never
        ({"engine": [replace(ENGINE[0], shape=(2, 4)), *ENGINE[1:]]}, "a"),  # a row is missing
        ({"engine": ENGINE[:2]}, "b"),
        ({"trainer": TRAINER[:2]}, "b"),
        ({"trainer": [*TRAINER, TRAINER[0]]}, "a"),  # a copy of one part only
    ],
)
def test_a_slice_in_the_wrong_place_is_refused(fault, tensor):
    with pytest.raises(
        CheckFailed,
        match=f"wrong place, although every message arrived intact: {tensor} in the engine on",
    ):
        compare(**fault)


def test_a_replica_of_the_trainer_that_differs_is_refused():
    other = [replace(part, param=f"other {part.param}") for part in TRAINER]

    def diverge(parameters, memory):
        parameters |= {f"other {name}": value.clone() for name, value in parameters.items()}
        parameters["other b"][2] += 1e-3

    compare(
        trainer=[*TRAINER, *other],
        change=lambda p, m: p.update({f"other {n}": v for n, v in p.items()}),
    )
    with pytest.raises(
        CheckFailed, match=r"b in the engine on rank 0; .*trainer replicas have different weights"
    ):
        compare(trainer=[*TRAINER, *other], change=diverge)
