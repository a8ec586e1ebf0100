"""Requests, and what is refused for every sampler alike."""

from __future__ import annotations

import pytest
import torch

from megarl.rollout.sampling import check_new, check_version, request_seed, unsampled
from megarl.types import CheckFailed, Prompt, Request


def request(prompt_id: int, index: int = 0, prefix: list[int] | None = None) -> Request:
    earlier = None if prefix is None else torch.tensor(prefix)
    return Request(Prompt(prompt_id, (5, 6), ""), index, 1, 1.0, earlier)


def test_a_request_runs_once() -> None:
    check_new([request(1), request(1, 1)], [(2, 0)])
    for requests, running in (([request(1)], [(1, 0)]), ([request(1), request(1)], [])):
        with pytest.raises(ValueError, match="sample 0 of prompt 1 was submitted twice"):
            check_new(requests, running)


def test_turns_have_seeds_of_their_own() -> None:
    seeds = [request_seed(7, 3, 1, 0, turn) for turn in range(3)]
    assert seeds[0] == request_seed(7, 3, 1, 0) and len(set(seeds)) == 3


def test_earlier_turns_are_part_of_the_prompt() -> None:
    assert request(1, prefix=[7, 8]).tokens == [5, 6, 7, 8]
    sample = unsampled(request(1, 4, prefix=[7, 8]))
    assert (sample.key, sample.finish, sample.tokens.tolist()) == ((1, 4), "abort", [5, 6, 7, 8])
    assert not sample.trainable.any() and sample.versions.tolist() == [-1] * 4


def test_samples_of_other_weights_are_refused() -> None:
    sample = unsampled(request(1))
    check_version([sample], 9)
    sample.trainable[1] = True
    sample.versions[1] = 8
    check_version([sample], 8)
    for version in (7, 9):
        with pytest.raises(CheckFailed, match=f"weights of version 8, not {version}"):
            check_version([sample], version)
