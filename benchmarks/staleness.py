"""What `rollout.max_staleness` gains: the real loop and schedule, over engines and a trainer that only take time.

    python -m benchmarks.staleness        a table, from a simulated clock; the seed is fixed

The engines have a number of slots; responses have heavy-tailed lengths (Pareto, cut at the limit), a token a unit of
time. `Clock` simulates time; `RealClock` sleeps, with a thread for each slot, to see that the simulation is right.
"""

from __future__ import annotations

import math
import queue
import random
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megarl.config.run_dir import LEDGER
from megarl.data.ledger import Ledger
from megarl.rollout.overlap import AsyncRollouts, BetweenRequests
from megarl.rollout.schedule import Rollouts
from megarl.stages.rl import RlRun, train
from megarl.types import Prompt, PublishReport, Request, Rollout, Sample, StepReport, UpdateReport

PROMPT = (1, 2)


@dataclass(frozen=True)
class Job:
    steps: int = 12
    prompts_per_step: int = 8
    samples_per_prompt: int = 4
    slots: int = 16  # requests that the engines run at a time
    train_s: float = 60.0
    sync_s: float = 2.0
    typical: float = 10.0  # the shortest response, in tokens and units of time
    alpha: float = 1.3  # of the Pareto distribution: the mean of what is not cut is alpha / (alpha - 1) as long
    limit: int = 200
    filtered: bool = False  # groups of equal rewards are replaced
    seed: int = 0

    def seconds(self, request: Request) -> float:
        """A request takes this long on its slot, whatever else runs."""
        drawn = random.Random(f"{self.seed}/{request.seed}").random()
        return min(self.typical * (1 - drawn) ** (-1 / self.alpha), self.limit)


class Clock:
    def __init__(self) -> None:
        self.now = self.late = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class RealClock:
    """A unit of the simulation's time takes `scale` seconds."""

    def __init__(self, scale: float) -> None:
        self.scale, self._start = scale, time.monotonic()
        # by how much the machine has overslept, beside other work: no time of the schedule
        self.late = 0.0

    @property
    def now(self) -> float:
        return (time.monotonic() - self._start) / self.scale

    def sleep(self, seconds: float) -> None:
        began = time.monotonic()
        time.sleep(seconds * self.scale)
        self.late += (time.monotonic() - began) / self.scale - seconds


@dataclass
class Running:
    request: Request
    seconds: float
    left: float
    spans: list[tuple[int, float]]  # a version, and the progress from which on it sampled

    def sample(self) -> Sample:
        tokens = math.ceil(self.seconds)
        ends = [math.floor(progress) for _, progress in self.spans[1:]] + [tokens]
        starts = [0, *ends[:-1]]
        versions = [-1] * len(PROMPT)
        for (version, _), start, end in zip(self.spans, starts, ends, strict=True):
            versions += [version] * (end - start)
        length = len(PROMPT) + tokens
        request, drawn = self.request, random.Random(self.request.seed)
        return Sample(
            request.prompt.prompt_id,
            request.index,
            tokens=torch.tensor([*PROMPT, *(drawn.randrange(67) for _ in range(tokens))]),
            trainable=torch.arange(length) >= len(PROMPT),
            rollout_logprobs=torch.zeros(length),
            versions=torch.tensor(versions, dtype=torch.int32),
            finish="stop",
        )


class Engines:
    """roles.Sampler and roles.Weights, in simulated time."""

    def __init__(self, job: Job, clock: Clock) -> None:
        self.job, self.clock = job, clock
        self.queue: deque[Request] = deque()
        self.slots: list[Running] = []
        self.done: list[Sample] = []
        self.version, self.last, self.alive = -1, 0.0, 0

    def submit(self, requests: Sequence[Request]) -> None:
        self._advance(self.clock.now)
        self.queue += requests
        self.alive += len(requests)

    def poll(self, timeout_s: float | None = None) -> list[Sample]:
        self._advance(self.clock.now)
        if timeout_s is None and not self.done:
            self._fill()
            self.clock.sleep(min(one.left for one in self.slots))
            self._advance(self.clock.now)
        done, self.done = self.done, []
        self.alive -= len(done)
        return done

    def running(self) -> int:
        return self.alive

    def publish(self, *, version: int) -> PublishReport:
        self._advance(self.clock.now)
        self.clock.sleep(self.job.sync_s)
        self.version, self.last = version, self.clock.now  # paused: nothing has been sampled
        for one in self.slots:
            one.spans.append((version, one.seconds - one.left))
        return PublishReport(version, 0, 0, 0, True, self.job.sync_s)

    def _fill(self) -> None:
        while self.queue and len(self.slots) < self.job.slots:
            seconds = self.job.seconds(request := self.queue.popleft())
            self.slots.append(Running(request, seconds, seconds, [(self.version, 0.0)]))

    def _advance(self, now: float) -> None:
        self._fill()
        while self.slots and self.last < now:
            took = min(now - self.last, *(one.left for one in self.slots))
            self.last += took
            for one in self.slots:
                one.left -= took
            self.done += [one.sample() for one in self.slots if one.left <= 1e-9]
            self.slots = [one for one in self.slots if one.left > 1e-9]
            self._fill()
        self.last = now


class ThreadedEngines:
    """The same in real time: a thread for each slot sleeps as long as its request takes."""

    def __init__(self, job: Job, clock: RealClock) -> None:
        self.job, self.clock, self.version, self.alive = job, clock, -1, 0
        self.queue: queue.Queue[Request | None] = queue.Queue()
        self.done: queue.Queue[Sample] = queue.Queue()
        self.is_paused, self.change = False, threading.Condition()
        self.threads = [threading.Thread(target=self._work, daemon=True) for _ in range(job.slots)]
        for thread in self.threads:
            thread.start()

    def submit(self, requests: Sequence[Request]) -> None:
        self.alive += len(requests)
        for request in requests:
            self.queue.put(request)

    def poll(self, timeout_s: float | None = None) -> list[Sample]:
        done = [self.done.get()] if timeout_s is None else []
        while not self.done.empty():
            done.append(self.done.get())
        self.alive -= len(done)
        return done

    def running(self) -> int:
        return self.alive

    def publish(self, *, version: int) -> PublishReport:
        with self.change:
            self.is_paused = True
            self.change.notify_all()
        self.clock.sleep(self.job.sync_s)
        with self.change:
            self.version, self.is_paused = version, False
            self.change.notify_all()
        return PublishReport(version, 0, 0, 0, True, self.job.sync_s)

    def close(self) -> None:
        for _ in self.threads:
            self.queue.put(None)

    def _work(self) -> None:
        while request := self.queue.get():
            seconds = self.job.seconds(request)
            with self.change:
                self.change.wait_for(lambda: not self.is_paused)
                one = Running(request, seconds, seconds, [(self.version, 0.0)])
                while one.left > 0:
                    began = self.clock.now
                    self.change.wait_for(lambda: self.is_paused, one.left * self.clock.scale)
                    one.left -= min(self.clock.now - began, one.left)
                    if self.is_paused and one.left > 0:
                        self.change.wait_for(lambda: not self.is_paused)
                        one.spans.append((self.version, seconds - one.left))
            self.done.put(one.sample())


@dataclass
class Stream:
    """roles.Prompts without end."""

    position: int = 0
    kept: dict[str, float] = field(default_factory=dict)

    def observe(self, groups: Any) -> None:
        pass

    def take(self, count: int) -> list[Prompt]:
        self.position += count
        return [
            Prompt(number, PROMPT, "") for number in range(self.position - count, self.position)
        ]

    def put_back(self, prompts: Sequence[Prompt]) -> None:
        if prompts:
            self.position = prompts[0].prompt_id

    def state(self) -> dict[str, Any]:
        return {"position": self.position, "kept": dict(self.kept)}

    def restore(self, state: Any) -> None:
        self.position, self.kept = state["position"], dict(state["kept"])


class Scoring:
    """roles.Rewards and roles.Scoring: a reward that depends on the tokens, with little spread in one group of four."""

    def start(self, prompts: Sequence[Prompt]) -> Scoring:
        return self

    def add(self, samples: Sequence[Sample]) -> None:
        return

    def results(self, samples: Sequence[Sample]) -> list[Sample]:
        scored = []
        for sample in samples:
            reward = 0.5 if sample.prompt_id % 4 == 0 else float(sample.tokens[-1] % 2)
            scored.append(Sample(**vars(sample) | {"reward": reward}))
        return scored


@dataclass
class Result:
    seconds: float
    events: list[str]  # of the loop, in order
    rollouts: list[Rollout]
    ledger: Path
    generated: list[int]  # prompts, in the order in which their samples came back


class Idle:
    """The other roles, of which only the update of the learner takes time."""

    def __init__(self, job: Job, clock: Clock | RealClock, result: Result) -> None:
        self.job, self.clock, self.result = job, clock, result

    def score(self, batch: Any) -> None:
        return

    def advantages(self, batch: Any, scores: Any, state: Any) -> tuple[Any, Any]:
        return batch, state

    def after_updates(self, batch: Any, update: Any, state: Any) -> Any:
        return state

    def update(self, batch: Any, *, gate: Any) -> StepReport:
        self.result.events.append("train")
        self.clock.sleep(self.job.train_s)
        return StepReport((UpdateReport(0.0, 1.0, 0.0, skipped=False),))

    def parity(self, batch: Any) -> dict[str, float]:
        return {}

    def rollout(self) -> AbstractContextManager[None]:
        return nullcontext()

    train = save = sync = rollout

    def maybe_save(self, step: int, state: Any) -> None:
        return

    def maybe_run(self, step: int) -> None:
        return

    def step(self, step: int) -> AbstractContextManager[Any]:
        return nullcontext(
            lambda rollout, update, sync, scored: self.result.rollouts.append(rollout)
        )


def play(
    job: Job,
    max_staleness: int,
    folder: Path,
    *,
    in_flight: bool = True,
    scale: float | None = None,  # None: simulated
    schedule: Callable[..., Rollouts] = Rollouts,
    overlap: Callable[..., AsyncRollouts] = AsyncRollouts,
) -> Result:
    """Runs `job` with this bound."""
    clock = Clock() if scale is None else RealClock(scale)
    engines = Engines(job, clock) if isinstance(clock, Clock) else ThreadedEngines(job, clock)
    over, ledger = overlap(engines, Scoring()), Ledger(Stream())
    ledger.open(folder / LEDGER, step=0, max_staleness=max_staleness)
    result = Result(0.0, [], [], folder, [])
    idle: Any = Idle(job, clock, result)

    def begin(requests: Sequence[Request], *, version: int) -> Any:
        result.events.append(f"begin {requests[0].prompt.prompt_id} with version {version}")
        result.generated += {request.prompt.prompt_id: 0 for request in requests}
        return over.begin(requests, version=version)

    rollouts = schedule(
        over,
        samples_per_prompt=job.samples_per_prompt,
        temperature=1.0,
        run_seed=job.seed,
        filter_zero_std=job.filtered,
        max_staleness=max_staleness,
        begin_round=begin,
        last_step=job.steps,
        ledger=ledger,
    )
    run = RlRun(
        ledger, rollouts, collate=list, learner=idle, objective=idle, evaluation=idle, gate=idle.parity, phases=idle,
        weights=engines if in_flight else BetweenRequests(engines, over.drain), checkpoint=idle, telemetry=idle,
        state=idle, steps=job.steps, prompts_per_step=job.prompts_per_step,
    )  # fmt: skip
    train(run)
    result.seconds = clock.now - clock.late
    if isinstance(engines, ThreadedEngines):
        engines.close()
    return result


def main() -> None:
    job = Job(steps=100)
    print(__doc__.split("\n")[0])
    print(f"seed {job.seed}, {job}")
    print(
        f"{'max_staleness':>14} {'update':>18} {'time a step':>12} {'against 0':>10} {'mean staleness':>15}"
    )
    once = None
    for k, in_flight in ((0, True), (1, True), (2, True), (4, True), (1, False), (2, False)):
        with tempfile.TemporaryDirectory() as folder:
            result = play(job, k, Path(folder), in_flight=in_flight)
        once = once or result.seconds
        behind = [
            float((step - s.versions[s.trainable]).float().mean())
            for step, rollout in enumerate(result.rollouts)
            for group in rollout.groups
            for s in group.samples
        ]
        how = "-" if not k else "in flight" if in_flight else "between requests"
        mean = sum(behind) / len(behind)
        print(
            f"{k:>14} {how:>18} {result.seconds / job.steps:>12.1f} {once / result.seconds:>9.2f}x {mean:>15.2f}"
        )


if __name__ == "__main__":
    main()
