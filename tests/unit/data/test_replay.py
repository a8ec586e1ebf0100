"""The share of earlier rankings is exact, drawn without replacement, and the same after a resume."""

from __future__ import annotations

import json
from collections import Counter
from fractions import Fraction

import pytest
import torch

from megarl.data.preferences import History, Ranking, ranking_batch, rankings
from megarl.types import Group, Prompt, Sample


def ranking(number: int) -> Ranking:
    row = (torch.tensor([number, 1]), torch.tensor([False, True]))
    return Ranking((row, row), (1.0, 0.0))


def numbers(found: list[Ranking]) -> list[int]:
    return [int(part.rows[0][0][0]) for part in found]


@pytest.mark.parametrize("share", [0.0, 0.1, 0.25, 0.7])
@pytest.mark.parametrize("fresh", [1, 4, 9, 10, 63, 90])
def test_the_share_of_a_batch_is_exact(share: float, fresh: int) -> None:
    replay = History(share, 1000, seed=3, rankings=[*map(ranking, range(500))])
    mixed = numbers(replay.mixed([ranking(1000 + n) for n in range(fresh)], "2/0"))
    assert mixed[:fresh] == [*range(1000, 1000 + fresh)]
    old = mixed[fresh:]
    least = next(count for count in range(500) if count >= Fraction(str(share)) * (fresh + count))
    assert len(old) == len(set(old)) == least and max(old, default=0) < 500


def test_each_update_draws_its_own_and_a_resumed_run_the_same() -> None:
    replay = History(0.5, 1000, seed=3, rankings=[*map(ranking, range(100))])
    again = History(0.5, 1000, seed=3)
    again.restore(json.loads(json.dumps(replay.state())))
    fresh = [ranking(1000)] * 20
    one, other = (numbers(replay.mixed(fresh, key)) for key in ("2/0", "2/1"))
    assert one == numbers(again.mixed(fresh, "2/0")) != other
    assert one != numbers(History(0.5, 1000, seed=4, rankings=replay.rankings).mixed(fresh, "2/0"))
    drawn = Counter(n for key in range(400) for n in numbers(replay.mixed(fresh, str(key)))[20:])
    assert (
        set(drawn) == set(range(100)) and max(drawn.values()) < 130 and min(drawn.values()) > 40
    ), "uniform: 80 each"


def test_the_history_begins_empty_and_keeps_the_newest() -> None:
    replay = History(0.5, 3, seed=0)
    assert numbers(replay.mixed([ranking(7)] * 4, "0/0")) == [7] * 4
    replay.add([ranking(1), ranking(2)])
    assert len(replay.mixed([ranking(7)] * 4, "0/0")) == 6, "all there is"
    replay.add([ranking(3), ranking(4)])
    assert numbers(replay.rankings) == [2, 3, 4]


def group(*rewards: float | None) -> Group:
    trainable = torch.tensor([False, True, True])
    samples = tuple(
        Sample(
            0,
            n,
            torch.tensor([50, n, n]),
            trainable,
            torch.zeros(3),
            trainable.int(),
            "stop",
            reward=reward,
        )
        for n, reward in enumerate(rewards)
    )
    return Group(Prompt(0, (50,), ""), samples)


def test_samples_are_ranked_by_reward() -> None:
    groups = [group(0.5, 0.5), group(1.0, 0.0, 1.0, 0.0), group(0.25, 0.875)]
    every, ends = rankings(groups), rankings(groups, "best_worst")
    assert [part.labels for part in every] == [(1.0, 0.0, 1.0, 0.0), (0.25, 0.875)]
    assert [part.labels for part in ends] == [(1.0, 0.0), (0.875, 0.25)]
    assert [[int(row[0][1]) for row in part.rows] for part in ends] == [[0, 1], [1, 0]], (
        "the first of equal ones"
    )
    batch = ranking_batch(every)
    assert batch.group.tolist() == [0, 0, 0, 0, 1, 1] and batch.cu_seqlens.tolist() == [
        0,
        3,
        6,
        9,
        12,
        15,
        18,
    ]
    assert batch.pairs.tolist() == [[0, 1], [0, 3], [2, 1], [2, 3], [5, 4]]
    assert batch.mask.tolist() == [True, True, False] * 6
