"""The engine replicas of the split topology, as the controller sees them: roles.AsyncSampler.

submit --a prompt's requests to one replica--> EngineActor ... poll: a call is open at every replica, and returns
                                                              the samples that are finished, packed
a replica is lost --> its requests go to the others, from their beginning; it starts again in its bundle, and gets
                      no prompt before a verified sync (controller.py); with no other left, that sync is made now
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
import torch
from ray.exceptions import RayError
from torch import Tensor

from megarl.config.schema import Config
from megarl.launch import ray_actors
from megarl.launch.exit_codes import REFUSED, USER, Failure
from megarl.launch.ray_actors import POLL_S, EngineActor, Place, RankLost, end_family, value_of
from megarl.rollout.exchange import deal, unpack
from megarl.types import CheckFailed, Request, Sample, Terminated

Key = tuple[int, int]  # prompt id, sample index


class EngineLost(Exception):
    """A replica has failed, or one of its processes has ended."""

    def __init__(self, replica: Replica, failure: Failure, is_gone: bool) -> None:
        super().__init__(failure.message)
        self.replica, self.failure, self.is_gone = replica, failure, is_gone  # its actor


@dataclass
class Replica:
    """One replica; parity.ScoringEngine."""

    number: int
    actor: Any = None
    starting: Any = None  # the call that starts it; None: it has started
    node: str = ""
    family: tuple[list[int], list[str]] = ((), ())  # type: ignore[assignment] # processes and segments of shared memory
    max_model_len: int = 0
    is_joined: bool = False  # to the sync group
    is_ready: bool = False  # it serves a verified version
    poll: Any = None  # the open call
    requests: dict[Key, Request] = field(default_factory=dict)  # those that it is to return
    is_asleep = False

    def begin(self, method: str, *values: Any) -> Any:
        return self.actor.call.remote(method, *values)

    def value(self, ref: Any) -> Any:
        """Waits for a call. Raises EngineLost if the replica is lost, what it raised if it only refuses."""
        try:
            return value_of(ref, f"engine {self.number}")
        except RankLost as lost:
            kind = {USER: ValueError, REFUSED: CheckFailed}.get(lost.failure.code)
            if kind is None:
                raise EngineLost(self, lost.failure, lost.is_gone) from None
            raise kind(lost.failure.message) from None

    def call(self, method: str, *values: Any) -> Any:
        return self.value(self.begin(method, *values))

    def complete(self, prompts: Sequence[Sequence[int]], *, max_tokens: int) -> list[Tensor]:
        return self.call("complete", [list(prompt) for prompt in prompts], max_tokens)

    def score(self, rows: Iterable[Tensor]) -> list[Tensor]:
        return self.call("score", [row.tolist() for row in rows])


@dataclass
class Engines:
    config: Config
    folder: Path  # of the model
    stop_token_ids: Sequence[int]
    place: Place
    replicas: list[Replica] = field(default_factory=list)
    is_stopping: Callable[[], bool] = lambda: False
    recover: Callable[[], None] = lambda: None  # starts, syncs and verifies the lost ones
    restarts: int = 0  # so far
    orphans: list[Request] = field(default_factory=list)  # of lost replicas
    is_syncing: bool = False  # replicas that are lost are the sync's to replace
    _early: list[Sample] = field(default_factory=list)  # for the next `poll`
    _fault: Exception | None = None  # for it, too
    _is_glancing: bool = False  # the trainer works, so that nothing can be synced

    def start(self) -> None:
        """Starts all of them; `wait_started` waits."""
        self.replicas = [self._start(number) for number in range(self.config.rollout.replicas or 1)]

    def _start(self, number: int) -> Replica:
        actor, text = self.place.start(EngineActor, number), self.config.model_dump_json()
        return Replica(number, actor, actor.start.remote(text, str(self.folder), list(self.stop_token_ids)))

    def wait_started(self) -> None:
        """Raises EngineLost if one cannot start, NodeGone if its node is."""
        for replica in self.replicas:
            self._wait_started(replica)

    def revive(self) -> None:
        """As wait_started, but restarts replicas that are killed meanwhile."""
        while True:
            try:
                return self.wait_started()
            except EngineLost as lost:
                if not lost.is_gone and not self.restarts:  # it cannot start
                    raise
                self.lose(lost)

    def _wait_started(self, replica: Replica) -> None:
        if replica.starting is None:
            return
        try:
            ((replica.node, _, pid),) = self.place.cluster.placed([replica.actor])
        except RayError as error:
            gone = ray_actors.lost(error, f"engine {replica.number}")
            raise EngineLost(replica, gone.failure, gone.is_gone) from None
        self.place.watch.add(f"engine {replica.number}", replica.node, pid)
        pids, segments, replica.max_model_len = replica.value(replica.starting)
        replica.family, replica.starting = (pids, segments), None

    # sampling

    def submit(self, requests: Sequence[Request]) -> None:
        """roles.AsyncSampler."""
        ready = [replica for replica in self.replicas if replica.is_ready]
        if not ready and not self.restarts:
            raise CheckFailed("no engine has verified weights; publish them first")
        if not ready:  # all are lost
            self.orphans += requests
        for replica, share in zip(ready, deal(requests, len(ready)) if ready else (), strict=True):
            replica.requests |= {(request.prompt.prompt_id, request.index): request for request in share}
            try:
                if share:
                    replica.call("submit", share)
                replica.poll = replica.poll or replica.begin("poll")
            except EngineLost as lost:
                self.lose(lost)
        if self.orphans:
            self._rehouse()

    def poll(self, timeout_s: float | None = None) -> list[Sample]:
        """roles.AsyncSampler."""
        while self.running():
            if self.is_stopping():
                raise Terminated("stopped by SIGTERM")
            if self._fault:
                raise self._fault
            if self.orphans:
                self._rehouse()
            early, self._early = self._early, []
            if early:
                return early
            polls = {replica.poll: replica for replica in self.replicas if replica.poll is not None}
            done, _ = ray.wait(list(polls), num_returns=1, timeout=POLL_S if timeout_s is None else timeout_s)
            samples = [sample for poll in done for sample in self._take(polls[poll])]
            if self.orphans:
                self._rehouse()
            if samples or timeout_s is not None:
                return samples
        return []

    def glance(self) -> None:
        """Called while the trainer works: restarts lost replicas and moves their requests to others."""
        polls = {replica.poll: replica for replica in self.replicas if replica.poll is not None}
        if self.is_syncing or self._fault or not polls:
            return
        self._is_glancing = True
        try:
            for poll in ray.wait(list(polls), num_returns=len(polls), timeout=0)[0]:
                self._early += self._take(polls[poll])
            if self.orphans:
                self._rehouse()
        except (ValueError, CheckFailed) as error:  # what the trainer does now is completed
            self._fault = error
        finally:
            self._is_glancing = False

    def _take(self, replica: Replica) -> list[Sample]:
        """Of its open poll, which has ended; none if the replica is lost."""
        try:
            samples = unpack(torch.tensor(replica.value(replica.poll)))
            replica.poll = replica.begin("poll")
        except EngineLost as lost:
            self.lose(lost)
            return []
        for sample in samples:
            replica.requests.pop((sample.prompt_id, sample.index))
        return samples

    def running(self) -> int:
        """roles.AsyncSampler."""
        return len(self._early) + len(self.orphans) + sum(len(replica.requests) for replica in self.replicas)

    # replicas that are lost

    def count_restart(self, failure: Failure) -> None:
        """Raises CheckFailed if something was restarted too often."""
        self.restarts += 1
        limit = self.config.launch.max_restarts
        if self.restarts > limit:
            self.place.cluster.expect_nodes()  # what a whole node takes along may be more
            raise CheckFailed(f"{failure.message}; launch.max_restarts={limit} are used up")
        print(f"megarl: {failure.message}; restart {self.restarts} of {limit}", file=sys.stderr, flush=True)

    def lose(self, lost: EngineLost) -> None:
        """Ends what is left of a replica and starts it again; its requests are for `adopt`."""
        if self.replicas[lost.replica.number] is not lost.replica:  # done already
            return
        self.count_restart(lost.failure)
        number = lost.replica.number
        self.orphans += self.replicas[number].requests.values()
        self._end(self.replicas[number])
        self.replicas[number] = self._start(number)

    def adopt(self) -> None:
        """Gives the requests of lost replicas to others."""
        orphans, self.orphans = self.orphans, []
        if orphans:
            self.submit(orphans)

    def _rehouse(self) -> None:
        if not any(replica.is_ready for replica in self.replicas):
            if self._is_glancing:
                return
            self.recover()
        self.adopt()

    def leave_ranks(self) -> None:
        """After the trainer's ranks have ended: drops all requests, and accepts none before the next sync."""
        for number in range(len(self.replicas)):
            while not self._is_dropped(self.replicas[number]):
                pass
        self._early.clear()
        self.orphans.clear()

    def _is_dropped(self, replica: Replica) -> bool:
        """False: it was lost instead."""
        replica.is_joined = replica.is_ready = False
        try:
            self._wait_started(replica)
            replica.call("drop")
            replica.requests.clear()
            if replica.poll is not None:
                replica.value(replica.poll)  # samples of before
                replica.poll = None
        except EngineLost as lost:
            self.lose(lost)
            return False
        return True

    def _end(self, replica: Replica) -> None:
        ray.kill(replica.actor)
        if replica.node:
            end_family(replica.node, *replica.family)

    def end(self) -> None:
        for replica in self.replicas:
            self._end(replica)
