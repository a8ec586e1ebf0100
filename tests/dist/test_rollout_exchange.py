"""Four ranks, two replicas: everybody ends with the same samples, and nobody waits for a rank that failed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from start_ranks import run_ranks


@pytest.fixture(scope="module")
def seen(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("exchange")
    run_ranks(Path(__file__).with_name("exchange_ranks.py"), 4, str(folder), timeout_s=120)
    return [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(4)]


def test_all_ranks_hold_the_same_sorted_samples(seen):
    assert all(rank["samples"] == seen[0]["samples"] for rank in seen)
    assert [(p, i) for p, i, *_ in seen[0]["samples"]] == [
        (p, i) for p in range(3) for i in range(3)
    ]
    for prompt_id, index, tokens, _, reward in seen[0]["samples"]:
        assert tokens == [0, prompt_id] + [index] * (1 + prompt_id) and reward == prompt_id


def test_each_replica_samples_its_share_and_its_first_rank_scores(seen):
    """Of three prompts, whole ones."""
    assert [rank["sampled"] for rank in seen] == [6, 6, 3, 3]
    assert [rank["scored"] for rank in seen] == [6, 0, 3, 0]


def test_failures_reach_every_rank(seen):
    for rank in seen:
        assert (
            rank["broken"] == "RuntimeError: rank 2 could not sample: OSError: the scorer is gone"
        )
        assert rank["drifted"].startswith(
            "CheckFailed: ranks 2..3 of an engine replica sampled different tokens"
        )
        assert rank["after"] == 1


def test_a_replica_may_be_later_than_collectives_wait(seen):
    assert [rank["slow"] for rank in seen] == [9] * 4
