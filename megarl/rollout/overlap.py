"""Rounds of requests that the engines of a split run work on while the trainer trains.

    begin(requests) --submit--> engines --poll--> scoring of the round --all are back--> its samples, scored

Finished samples are fetched whenever anyone asks whether a round is done, and their rewards start then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

from megarl.roles import AsyncSampler, Rewards, Scoring, Weights
from megarl.types import PublishReport, Request, Sample, Terminated

Key = tuple[int, int]  # of a request: its prompt's id and its index


@dataclass(frozen=True)
class OpenRound:
    """schedule.Round."""

    missing: set[Key]
    scoring: Scoring
    overlap: Overlap
    samples: list[Sample] = field(default_factory=list)

    def is_done(self) -> bool:
        self.overlap.fetch(0.0)
        return not self.missing

    def result(self) -> list[Sample]:
        while self.missing:
            self.overlap.fetch(None)
        with self.overlap.span("reward"):  # what generation has not hidden
            samples = self.scoring.results(
                sorted(self.samples, key=lambda sample: (sample.prompt_id, sample.index))
            )
        if self.overlap.is_stopping():  # SIGTERM may have ended a reward's processes, too
            raise Terminated("stopped by SIGTERM")
        return samples


@dataclass
class Overlap:
    """Called as schedule.Generate, it waits for its samples; `begin` does not."""

    sampler: AsyncSampler
    rewards: Rewards
    span: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext()
    is_stopping: Callable[[], bool] = lambda: False
    _rounds: dict[Key, OpenRound] = field(default_factory=dict)  # of each request that is not back

    def begin(self, requests: Sequence[Request], *, version: int) -> OpenRound:
        """`version` is that of the engines, which stamp the tokens themselves."""
        keys = {(request.prompt.prompt_id, request.index) for request in requests}
        prompts = {request.prompt.prompt_id: request.prompt for request in requests}
        assert not keys & self._rounds.keys(), "a request is known by its prompt and index"
        started = OpenRound(keys, self.rewards.start(list(prompts.values())), self)
        self._rounds |= dict.fromkeys(keys, started)
        self.sampler.submit(requests)
        return started

    def __call__(self, requests: Sequence[Request], version: int) -> list[Sample]:
        """For an evaluation, whose prompts have the ids of others that may be on their way: here they are negative."""
        own = [
            replace(r, prompt=replace(r.prompt, prompt_id=-1 - r.prompt.prompt_id))
            for r in requests
        ]
        samples = [
            replace(s, prompt_id=-1 - s.prompt_id)
            for s in self.begin(own, version=version).result()
        ]
        return sorted(samples, key=lambda sample: (sample.prompt_id, sample.index))

    def drain(self) -> None:
        """Waits until nothing is being sampled."""
        while self.sampler.running():
            self.fetch(None)

    def fetch(self, timeout_s: float | None) -> None:
        """Waits for a sample, at most this long (None: as long as it takes)."""
        for sample in self.sampler.poll(timeout_s):
            key = sample.prompt_id, sample.index
            round_ = self._rounds.pop(key)
            round_.missing.discard(key)
            round_.samples.append(sample)
            round_.scoring.add([sample])


@dataclass(frozen=True)
class BetweenRequests:
    """roles.Weights that change only when no request is being sampled, so that a sample has one version."""

    weights: Weights
    drain: Callable[[], None]
    announce: Callable[[int], None] = lambda version: (
        None
    )  # before draining, in which a lost engine may get weights

    def publish(self, *, version: int) -> PublishReport:
        self.announce(version)
        self.drain()
        return self.weights.publish(version=version)
