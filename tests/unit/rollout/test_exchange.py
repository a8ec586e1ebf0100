"""What travels between ranks arrives as it was."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import pytest
import torch
from ray import cloudpickle
from samplers import AtOnce

from megarl.layout import Axis
from megarl.rollout.exchange import Exchange, deal, pack, unpack
from megarl.types import CheckFailed, Prompt, Routes, Sample, Terminated, TokenBatch, TokenScores


def sample(prompt_id: int, index: int, length: int, **changes) -> Sample:
    values = {
        "prompt_id": prompt_id,
        "index": index,
        "tokens": torch.arange(length) + 2**40,
        "trainable": torch.arange(length) % 2 == 0,
        "rollout_logprobs": torch.randn(length) * 1e-7,
        "versions": torch.arange(length, dtype=torch.int32) + 2**30,
        "finish": "length",
    }
    return Sample(**values | changes)


def equal(one: Sample, other: Sample) -> bool:
    for field in fields(Sample):
        a, b = getattr(one, field.name), getattr(other, field.name)
        same = torch.equal(a, b) and a.dtype == b.dtype if isinstance(a, torch.Tensor) else a == b
        if not same:
            return False
    return True


def test_round_trip_is_exact():
    samples = [
        sample(5, 0, 7, text="naïve ∑ \n", reward=1 / 3, rewards={"accuracy": 0.1, "format": 1.0}),
        sample(5, 1, 0, finish="abort"),
        sample(
            6,
            0,
            1,
            step_rewards=((2, 0.5), (9, -1.25)),
            extra={"dropped": "reward/accuracy/error"},
            finish="stop",
        ),
    ]
    back = unpack(pack(samples))
    assert len(back) == 3 and all(map(equal, samples, back))
    assert unpack(pack([])) == []


def test_reward_that_is_not_a_number_survives():
    (back,) = unpack(pack([sample(0, 0, 2, reward=math.inf)]))
    assert back.reward == math.inf


def draw(request, **changes) -> Sample:
    versions = torch.full((3,), 4).int()
    return sample(request.prompt.prompt_id, request.index, 3, versions=versions, **changes)


class Doubles:
    def start(self, prompts):
        self.added = []
        return self

    def add(self, samples):
        self.added = [*self.added, *samples]

    def results(self, samples):
        assert {s.key for s in samples} == {s.key for s in self.added}
        return [replace(s, reward=2.0 * s.index) for s in samples]


class Request:
    def __init__(self, prompt_id: int, index: int, length: int = 1) -> None:
        self.prompt, self.index, self.seed, self.temperature = (
            Prompt(prompt_id, (1,) * length, ""),
            index,
            0,
            1.0,
        )
        self.key = (prompt_id, index)


def alone(sampler, rewards) -> Exchange:
    return Exchange(sampler, rewards, replica=Axis(1), member=Axis(1))


def test_one_process_sorts_and_scores():
    requests = [Request(p, i) for p in (7, 3) for i in (1, 0)]
    got = alone(AtOnce(draw), Doubles())(requests, 4)
    assert [(s.prompt_id, s.index, s.reward) for s in got] == [
        (3, 0, 0.0),
        (3, 1, 2.0),
        (7, 0, 0.0),
        (7, 1, 2.0),
    ]


def test_routes_stay_where_they_were_sampled():
    """The rank that sampled keeps the experts; what goes round names it, and has their checksums."""
    routes = Routes((3, 3), (5, -(2**60)), torch.ones(2, 3, 8, dtype=torch.uint8))
    (back,) = unpack(pack([sample(1, 0, 3, choices=routes)]))
    assert back.choices == Routes((3, 3), (5, -(2**60)))
    assert pack([sample(1, 0, 3, choices=routes)]).numel() < pack([sample(1, 0, 3)]).numel() + 40

    captures = AtOnce(lambda request: draw(request, choices=routes))
    got = alone(captures, Doubles())([Request(3, 0), Request(3, 1)], 4)
    assert all(each.choices is routes for each in got)


@pytest.mark.parametrize(
    "error, kind",
    [
        (CheckFailed("stale"), CheckFailed),
        (KeyError("x"), RuntimeError),
        (Terminated("stale"), Terminated),
    ],
)
def test_errors_keep_their_kind(error, kind):
    class Fails(AtOnce):
        def submit(self, requests):
            raise error

    with pytest.raises(
        RuntimeError, match=r"rank 0 could not sample: .*(stale|KeyError)"
    ) as caught:
        alone(Fails(draw), Doubles())([Request(0, 0)], 0)
    assert caught.type is kind


def test_rewards_that_sigterm_may_have_ended_are_not_used():
    with pytest.raises(Terminated):
        replace(alone(AtOnce(draw), Doubles()), is_stopping=lambda: True)([Request(0, 0)], 4)


@pytest.mark.parametrize(
    (
        "lengths",
        "samples",
        "replicas",
        "shares",
    ),  # prompt tokens; prompts of each replica, and how many requests
    [
        ([5, 5, 5, 5], 2, 2, [({0, 2}, 4), ({1, 3}, 4)]),
        ([9, 1, 8, 2], 2, 2, [({0, 1}, 4), ({2, 3}, 4)]),
        ([5, 5, 5], 4, 2, [({0, 2}, 8), ({1}, 4)]),
        ([5, 5], 4, 4, [({0}, 2), ({0}, 2), ({1}, 2), ({1}, 2)]),
        ([5, 5], 1, 4, [({0}, 1), ({1}, 1), (set(), 0), (set(), 0)]),
        ([], 1, 2, [(set(), 0), (set(), 0)]),
    ],
)
def test_a_prompts_samples_share_a_replica_and_no_replica_is_idle(
    lengths, samples, replicas, shares
):
    requests = [Request(p, i, length) for p, length in enumerate(lengths) for i in range(samples)]
    dealt = deal(requests, replicas)
    assert [({r.prompt.prompt_id for r in share}, len(share)) for share in dealt] == shares
    assert sorted((r.prompt.prompt_id, r.index) for share in dealt for r in share) == [
        (r.prompt.prompt_id, r.index) for r in requests
    ]


def test_a_batch_crosses_processes_of_ray_as_it_was() -> None:
    rows = torch.arange(12).view(3, 4)
    mask = torch.tensor([True, False, True])
    batch = TokenBatch(
        tokens=rows[:, 1],
        labels=torch.tensor([2**40, 0, 1]),
        mask=mask,
        cu_seqlens=torch.tensor([0, 3]),
        temperature=1 / 3,
    )
    scores = TokenScores(
        torch.randn(3) * 1e-7, None, teacher_top_logprobs=torch.tensor([[-math.inf, 0.5]] * 3)
    )
    for value in (batch, replace(batch, labels=batch.mask), scores):  # two may share memory
        shared = []  # these would be read-only, in Ray's object store
        back = cloudpickle.loads(
            cloudpickle.dumps(value, protocol=5, buffer_callback=shared.append)
        )
        assert not shared, "each process has tensors of its own, which it may write"
        assert type(back) is type(value)
        for field in fields(value):
            a, b = getattr(value, field.name), getattr(back, field.name)
            if isinstance(a, torch.Tensor):
                assert torch.equal(a, b) and a.dtype == b.dtype, field.name
                assert b.data_ptr() % 8 == 0, "it is aligned"
            else:
                assert a == b, field.name
