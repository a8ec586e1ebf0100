"""Generating while training: bounds, nothing lost or discarded, the same as one after the other where it must be."""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from benchmarks.staleness import Clock, Engines, Job, Result, Scoring, Stream, play
from megarl.rollout.overlap import AsyncRollouts, OpenRound
from megarl.rollout.schedule import Rollouts
from megarl.telemetry.audit import audit
from megarl.types import CheckFailed, Prompt, Request, Sample, Terminated

JOB = Job(steps=8, prompts_per_step=4, samples_per_prompt=3, slots=6)
jobs = st.builds(
    Job,
    steps=st.integers(1, 7),
    prompts_per_step=st.integers(1, 5),
    samples_per_prompt=st.integers(2, 3),
    slots=st.integers(1, 12),
    train_s=st.sampled_from([0.0, 20.0, 200.0]),
    alpha=st.sampled_from([0.7, 1.3]),
    filtered=st.booleans(),
    seed=st.integers(0, 999),
)


def trained_samples(result: Result) -> list[tuple[int, Sample]]:
    return [
        (step, s)
        for step, rollout in enumerate(result.rollouts)
        for g in rollout.groups
        for s in g.samples
    ]


def unbalanced(result: Result) -> str:
    """From what the engines have returned and the loop has trained: trained = generated - filtered - carried over."""
    report = audit(result.ledger)
    trained = Counter(
        group.prompt.prompt_id for rollout in result.rollouts for group in rollout.groups
    )
    left = Counter(
        number
        for number, state in report.states.items()
        if state.startswith(("filtered", "carried"))
    )
    generated = Counter(dict.fromkeys(result.generated, 1))
    return "; ".join(report.problems) or (
        "" if trained == generated - left else f"{trained} {generated} {left}"
    )


@example(job=JOB, bound=2, in_flight=False)
@given(job=jobs, bound=st.integers(0, 3), in_flight=st.booleans())
def test_every_token_is_within_the_bound_and_every_prompt_is_accounted_for(
    tmp_path_factory: pytest.TempPathFactory, job: Job, bound: int, in_flight: bool
) -> None:
    result = play(job, bound, tmp_path_factory.mktemp("run"), in_flight=in_flight)
    assert not unbalanced(result)
    assert len(result.rollouts) == job.steps
    for step, sample in trained_samples(result):
        versions = sample.versions[sample.trainable]
        assert step - bound <= int(versions.min()) and int(versions.max()) <= step
        assert (versions.diff() >= 0).all()
        assert in_flight or versions.unique().numel() == 1
    if not job.filtered:
        ids = [group.prompt.prompt_id for rollout in result.rollouts for group in rollout.groups]
        assert ids == list(range(job.steps * job.prompts_per_step)), (
            "in order, however long each takes"
        )


@given(jobs)
def test_without_staleness_it_is_one_after_the_other(
    tmp_path_factory: pytest.TempPathFactory, job: Job
) -> None:
    """Bit for bit the rollouts of a function that generates when it is called."""
    overlapped = play(job, 0, tmp_path_factory.mktemp("run")).rollouts
    engines, stream, scoring = Engines(job, Clock()), Stream(), Scoring()

    def generate(requests: list[Request], *, version: int) -> list[Sample]:
        engines.publish(version=version)
        engines.submit(requests)
        samples: list[Sample] = []
        while engines.running():
            samples += engines.poll()
        return scoring.results(sorted(samples, key=lambda sample: (sample.prompt_id, sample.index)))

    settings = {
        "samples_per_prompt": job.samples_per_prompt,
        "temperature": 1.0,
        "run_seed": job.seed,
        "filter_zero_std": job.filtered,
    }
    rollouts = Rollouts(generate, **settings)
    for version, other in enumerate(overlapped):
        alone = rollouts.collect(stream, job.prompts_per_step, version=version)
        assert (alone.digest, alone.counts) == (other.digest, other.counts)
        pairs = zip(alone.groups, other.groups, strict=True)
        assert all(
            (a.versions == b.versions).all()
            for x, y in pairs
            for a, b in zip(x.samples, y.samples, strict=True)
        )


def test_batches_are_the_same_at_every_bound(tmp_path: Path) -> None:
    """Only the versions differ: what is slow is not trained on later, let alone less often."""
    digests = []
    for bound in range(4):
        (folder := tmp_path / str(bound)).mkdir()
        digests.append([rollout.digest for rollout in play(JOB, bound, folder).rollouts])
    assert all(other == digests[0] for other in digests)


class Impatient(AsyncRollouts):
    """Returns a round once three quarters of its prompts are complete, and forgets the others."""

    def begin(self, requests, *, version):
        started = super().begin(requests, version=version)
        return Cut(
            started.missing,
            started.scoring,
            started.overlap,
            started.samples,
            len(requests) * 3 // 4,
        )


class Cut(OpenRound):
    def __init__(self, missing, scoring, overlap, samples, enough) -> None:
        super().__init__(missing, scoring, overlap, samples)
        object.__setattr__(self, "enough", enough)

    def result(self):
        while len(self.samples) < self.enough:
            self.overlap.fetch(None)
        missing = {prompt_id for prompt_id, _ in self.missing}
        return self.scoring.results(
            [sample for sample in self.samples if sample.prompt_id not in missing]
        )


def test_a_schedule_that_discards_what_is_slow_is_caught(tmp_path: Path) -> None:
    (tmp_path / "fair").mkdir()
    fair, impatient = play(JOB, 1, tmp_path / "fair"), play(JOB, 1, tmp_path, overlap=Impatient)
    assert not unbalanced(fair) and unbalanced(impatient)
    assert "dropped/not_scored" in str(audit(tmp_path)), "the ledger has them too"
    long, short = (
        statistics.fmean(len(s.tokens) for _, s in trained_samples(one))
        for one in (fair, impatient)
    )
    assert short < 0.8 * long, "such batches are biased to short answers"


class Hasty(Rollouts):
    """Begins batches a version too early."""

    def collect(self, prompts, count, *, version):
        self.max_staleness, bound = self.max_staleness + 1, self.max_staleness
        try:
            return super().collect(prompts, count, version=version)
        finally:
            self.max_staleness = bound


def test_a_token_that_is_too_old_is_refused(tmp_path: Path) -> None:
    """By the schedule, and where it does not look, by the audit."""
    result = play(JOB, 0, tmp_path, schedule=Hasty)
    assert any("max_staleness" in problem for problem in audit(tmp_path).problems)
    assert result.rollouts
    rollouts = Rollouts(
        lambda requests, version: [], samples_per_prompt=1, temperature=1.0, run_seed=0
    )
    rollouts.generate = lambda requests, version: [
        replace(sample, versions=sample.versions - (sample.versions >= 0).int())
        for sample in Scoring().results([sample_of(request, version) for request in requests])
    ]
    with pytest.raises(CheckFailed, match="step 3 has tokens of version 2, but max_staleness=0"):
        rollouts.collect(Stream(), 2, version=3)


def sample_of(request: Request, version: int) -> Sample:
    engines = Engines(JOB, Clock())
    engines.publish(version=version)
    engines.submit([request])
    return engines.poll()[0]


def test_what_staleness_gains(tmp_path: Path) -> None:
    """As the clock says: a step takes as long as its parts, then as the longer of them."""
    seconds = {}
    for bound, in_flight in [(0, True), (1, True), (2, True), (1, False), (2, False)]:
        (folder := tmp_path / f"{bound}{in_flight}").mkdir()
        seconds[bound, in_flight] = play(
            replace(JOB, steps=30), bound, folder, in_flight=in_flight
        ).seconds
    once = seconds[0, True]
    assert once > 1.3 * seconds[1, True] > 1.3 * seconds[2, True], seconds
    assert once > seconds[1, False] >= seconds[1, True], (
        "between requests, a sync waits for the slowest"
    )
    assert seconds[2, True] >= 30 * (JOB.train_s + JOB.sync_s), "no faster than the trainer"
    even = replace(JOB, steps=30, typical=30.0, limit=30, slots=12, train_s=30.0, sync_s=0.0)
    alone, overlapped = (play(even, bound, tmp_path).seconds for bound in (0, 1))
    assert (alone, overlapped) == (30 * 60.0, 30 + 30 * 30.0)


@pytest.mark.parametrize("bound", [0, 1, 2])
def test_real_time_is_that_of_the_clock(tmp_path: Path, bound: int) -> None:
    """The same loop with threads that sleep: the same events, in the same order, and within 10% the same time."""
    job = replace(JOB, steps=5, train_s=80.0, sync_s=4.0)
    expected = play(job, bound, tmp_path)
    runs = [play(job, bound, tmp_path, scale=0.006) for _ in range(3)]
    assert all(run.events == expected.events for run in runs)
    assert all(trained_ids(run) == trained_ids(expected) for run in runs)
    assert statistics.median(run.seconds for run in runs) == pytest.approx(
        expected.seconds, rel=0.1
    )


def trained_ids(result: Result) -> list[list[int]]:
    return [[group.prompt.prompt_id for group in rollout.groups] for rollout in result.rollouts]


def test_an_evaluation_while_others_are_on_their_way() -> None:
    """Its prompts have the ids of training prompts."""
    engines = Engines(JOB, Clock())
    engines.publish(version=4)
    over = AsyncRollouts(engines, Scoring())
    requests = [
        Request(Prompt(number, (1, 2), ""), index, 7 * number + index, 1.0)
        for number in (0, 3)
        for index in (0, 1)
    ]
    started = over.begin(requests, version=4)
    held_out = over(requests[1:], version=4)
    assert [(s.prompt_id, s.index) for s in held_out] == [(0, 1), (3, 0), (3, 1)]
    assert [(s.prompt_id, s.index) for s in started.result()] == [(0, 0), (0, 1), (3, 0), (3, 1)]
    over.begin(requests, version=4)
    over.drain()
    assert not engines.running()
    over = AsyncRollouts(engines, Scoring(), is_stopping=lambda: True)
    with pytest.raises(Terminated):
        over(requests, version=4)


def test_spans_of_versions(tmp_path: Path) -> None:
    """A response that goes on under new weights has the old version up to where it was."""
    job = replace(
        JOB, steps=3, prompts_per_step=1, samples_per_prompt=1, typical=100.0, limit=100, train_s=60
    )
    result = play(job, 1, tmp_path)
    spans = [sample.versions[sample.trainable] for _, sample in trained_samples(result)]
    counts = [[int((versions == version).sum()) for version in range(3)] for versions in spans]
    assert counts == [[100, 0, 0], [100, 0, 0], [0, 60, 40]]
    assert all((b >= a) for versions in spans for a, b in pairwise(versions.tolist()))
