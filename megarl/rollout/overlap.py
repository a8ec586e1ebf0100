"""Rounds of requests that a sampler works on: in a split run, while the trainer trains.

    begin(requests) --submit--> sampler --poll--> scoring of the round --all back--> its samples

Finished samples are fetched whenever a caller asks if a round is done. Their rewards start then.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

from megarl.roles import Rewards, Sampler, Scoring, SpanContext, Weights
from megarl.types import PublishReport, Request, Sample, SampleKey, Terminated


@dataclass(frozen=True)
class OpenRound:
    """schedule.Round."""

    missing: set[SampleKey]
    scoring: Scoring
    overlap: "AsyncRollouts"
    samples: list[Sample] = field(default_factory=list)

    def is_done(self) -> bool:
        self.overlap.fetch(0.0)
        return not self.missing

    def result(self) -> list[Sample]:
        while self.missing:
            self.overlap.fetch(None)
        with self.overlap.span("reward"):  # what generation has not hidden
            samples = self.scoring.results(sorted(self.samples, key=lambda sample: sample.key))
        if self.overlap.is_stopping():  # SIGTERM may have ended a reward's processes, too
            raise Terminated("stopped by SIGTERM")
        return samples


@dataclass
class AsyncRollouts:
    """Waits for samples when called as schedule.Generate; `begin` does not wait."""

    sampler: Sampler
    rewards: Rewards
    span: SpanContext = nullcontext
    is_stopping: Callable[[], bool] = lambda: False
    _rounds: dict[SampleKey, OpenRound] = field(default_factory=dict)  # of each open request

    def begin(self, requests: Sequence[Request], *, version: int) -> OpenRound:
        """Submits the requests. `version` is not used: the engines stamp each token with theirs."""
        keys = {request.key for request in requests}
        prompts = {request.prompt.prompt_id: request.prompt for request in requests}
        assert not keys & self._rounds.keys(), "a request is known by its prompt and index"
        started = OpenRound(keys, self.rewards.start(list(prompts.values())), self)
        self._rounds |= dict.fromkeys(keys, started)
        self.sampler.submit(requests)
        return started

    def __call__(self, requests: Sequence[Request], version: int) -> list[Sample]:
        """Samples for an evaluation.

        Its prompts have the ids of others that may be on their way, so ids are negative meanwhile.
        """
        renamed = [
            replace(r, prompt=replace(r.prompt, prompt_id=-1 - r.prompt.prompt_id))
            for r in requests
        ]
        samples = self.begin(renamed, version=version).result()
        restored = [replace(sample, prompt_id=-1 - sample.prompt_id) for sample in samples]
        return sorted(restored, key=lambda sample: sample.key)

    def drain(self) -> None:
        """Waits until nothing is being sampled."""
        while self.sampler.running():
            self.fetch(None)

    def fetch(self, timeout_s: float | None) -> None:
        """Waits for a sample, at most this long (None: as long as it takes)."""
        for sample in self.sampler.poll(timeout_s):
            round_ = self._rounds.pop(sample.key)
            round_.missing.discard(sample.key)
            round_.samples.append(sample)
            round_.scoring.add([sample])


@dataclass(frozen=True)
class BetweenRequests:
    """roles.Weights that change only when nothing is sampled: a sample has a single version."""

    weights: Weights
    drain: Callable[[], None]
    # before draining, in which a lost engine may get weights
    announce: Callable[[int], None] = lambda version: None

    def publish(self, *, version: int) -> PublishReport:
        self.announce(version)
        self.drain()
        return self.weights.publish(version=version)
