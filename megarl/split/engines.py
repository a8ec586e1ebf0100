"""The controller's view of the engine replicas in the split topology; implements roles.Sampler.

submit --each prompt's requests to one replica--> EngineActor
poll   --one open call per replica--------------> returns finished samples
a replica is lost --> its requests restart from their beginning on other replicas; the replica
                      restarts in its placement bundle and gets no prompts before a verified sync
                      (controller.py); if no replica is left, weights are published at once
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import ray
import torch
from ray.exceptions import RayError
from torch import Tensor

from megarl.config.schema import Config
from megarl.processes.exit_codes import DEFECT, REFUSED, USER, Failure, say
from megarl.rollout.exchange import deal, unpack
from megarl.rollout.sampling import check_new, check_running, unsampled
from megarl.split.proxy import Proxy
from megarl.split.ray_actors import (
    KILLED,
    POLL_S,
    EngineActor,
    Place,
    RankLost,
    kill_engine,
    rank_lost,
    value_of,
)
from megarl.split.services import EngineService
from megarl.types import CheckFailed, Request, Sample, SampleKey, Terminated

T = TypeVar("T")


class EngineLost(Exception):
    """Raised if a replica has failed, or one of its processes has ended."""

    def __init__(self, replica: "Replica", lost: RankLost) -> None:
        super().__init__(lost.failure.message)
        self.replica = replica
        self.failure = lost.failure
        self.is_gone = lost.is_gone


@dataclass
class Replica:
    """One engine replica; `complete` and `score` are used by the probe (parity.gate)."""

    number: int
    actor: Any = None
    others: Sequence[Any] = ()  # actors of its other parts, on other nodes
    starting: Any = None  # ref of the call that starts the replica; None once started
    # node, process ids and shared memory segments of each part, for kill_engine
    remains: Sequence[tuple[str, Sequence[int], Sequence[str]]] = ()
    max_model_len: int = 0
    is_joined: bool = False  # member of the sync group
    is_ready: bool = False  # serves a verified version
    poll: Any = None  # ref of the open poll call
    requests: dict[SampleKey, Request] = field(default_factory=dict)  # unfinished requests
    is_asleep = False

    @property
    def service(self) -> EngineService:
        """A proxy of the engine's methods; each call waits for the result, as `value` does."""
        return cast(EngineService, Proxy(lambda *call: self.value(self.actor.call.remote(*call))))

    def begin(self, ask: Callable[[EngineService], object]) -> Any:
        """Starts the call that `ask` makes, and returns its ref; `value` waits for it."""
        return ask(cast(EngineService, Proxy(self.actor.call.remote)))

    def value(self, ref: Any) -> Any:
        """Waits for a call and returns its result.

        Raises EngineLost if the replica is lost, and ValueError or CheckFailed if the replica
        reports a user error or a failed check.
        """
        try:
            return value_of(ref, f"engine {self.number}")
        except RankLost as lost:
            kind = {USER: ValueError, REFUSED: CheckFailed}.get(lost.failure.code)
            if not kind:
                raise EngineLost(self, lost) from None
            raise kind(lost.failure.message) from None

    def complete(self, prompts: Sequence[Sequence[int]], *, max_tokens: int) -> list[Tensor]:
        return self.service.complete(prompts, max_tokens)

    def score(self, rows: Iterable[Tensor]) -> list[Tensor]:
        return self.service.score([row.tolist() for row in rows])


@dataclass
class Engines:
    config: Config
    folder: Path  # model folder
    stop_token_ids: Sequence[int]
    place: Place
    replicas: list[Replica] = field(default_factory=list)
    is_stopping: Callable[[], bool] = lambda: False
    recover: Callable[[], None] = lambda: None  # publishes verified weights to all replicas
    restarts: int = 0  # number of restarts so far
    unassigned: list[Request] = field(default_factory=list)  # new, or from a lost replica
    is_syncing: bool = False  # True during a sync, which itself replaces lost replicas
    _early: list[Sample] = field(default_factory=list)  # samples that the next `poll` returns
    _fault: Exception | None = None  # error that the next `poll` raises

    def start(self) -> None:
        """Starts all replicas without waiting; see `wait_started`."""
        self.replicas = [self._start(number) for number in range(self.config.rollout.replicas or 1)]

    def _start(self, number: int) -> Replica:
        actor, *others = [
            self.place.start(EngineActor, number, part) for part in range(self.place.parts)
        ]
        starting = actor.start.remote(self.config, self.folder, self.stop_token_ids, others)
        return Replica(number, actor, others, starting)

    def wait_started(self) -> None:
        """Waits until all replicas have started.

        Raises EngineLost if a replica cannot start, NodeGone if its node is lost.
        """
        for replica in self.replicas:
            if not replica.starting:
                continue
            name = f"engine {replica.number}"
            actors = [replica.actor, *replica.others]
            try:
                places = self.place.cluster.placed(actors)
            except RayError as error:
                raise EngineLost(replica, rank_lost(error, name)) from None
            for part, (actor, placed) in enumerate(zip(actors, places, strict=True)):
                self.place.watch.add(f"{name} part {part}" if part else name, actor, placed)
            replica.remains, replica.max_model_len = replica.value(replica.starting)
            replica.starting = None

    # sampling

    def submit(self, requests: Sequence[Request]) -> None:
        """See roles.Sampler. The requests of one prompt go to the same replica, unless there are
        fewer prompts than replicas.
        """
        check_new(requests, self._keys())
        if not self.restarts and not any(replica.is_ready for replica in self.replicas):
            raise CheckFailed("no engine has verified weights; publish them first")
        self.unassigned += requests
        self._assign()

    def _assign(self) -> None:
        """Submits unassigned requests to replicas; publishes weights first if no replica is
        ready.
        """
        while self.unassigned:
            ready = [replica for replica in self.replicas if replica.is_ready]
            if not ready:  # all replicas are lost
                self.recover()
                continue
            shares = deal(self.unassigned, len(ready))
            self.unassigned = []
            for replica, share in zip(ready, shares, strict=True):
                for request in share:
                    replica.requests[request.key] = request
                try:
                    if share:
                        replica.service.submit(share)
                    replica.poll = replica.poll or replica.begin(lambda engine: engine.poll())
                except EngineLost as lost:
                    self.replace_replica(lost)

    def poll(self, timeout_s: float | None = None) -> list[Sample]:
        """See roles.Sampler.

        Raises RankLost if a trainer rank has died, because no rank would train on the samples.
        """
        while self.running():
            if self.is_stopping():
                raise Terminated("stopped by SIGTERM")
            if self._fault:
                raise self._fault
            rank = self.place.watch.gone("rank")
            if rank:
                raise RankLost(Failure(-1, DEFECT, f"{rank} {KILLED}"), is_gone=True)
            self._assign()
            samples = self._early or self._receive(POLL_S if timeout_s is None else timeout_s)
            self._early = []
            if samples or timeout_s is not None:
                return samples
        return []

    def poll_while_training(self) -> None:
        """Receives samples, restarts lost replicas, and reassigns their requests.

        Called repeatedly while the controller waits for the trainer's ranks. An error is raised by
        the next `poll`, so that the trainer can complete its call.
        """
        if self.is_syncing or self._fault:
            return
        try:
            self._early += self._receive(0.0)
            if any(replica.is_ready for replica in self.replicas):
                self._assign()
        except (ValueError, CheckFailed) as error:
            self._fault = error

    def _receive(self, timeout_s: float) -> list[Sample]:
        """Returns samples of finished polls; waits up to `timeout_s` for the first."""
        polls = {replica.poll: replica for replica in self.replicas if replica.poll}
        if not polls:
            return []
        count = 1 if timeout_s else len(polls)
        ended, _ = ray.wait(list(polls), num_returns=count, timeout=timeout_s)
        samples = []
        for poll in ended:
            replica = polls[poll]
            try:
                samples += self._returned(replica, replica.value(poll))
                replica.poll = replica.begin(lambda engine: engine.poll())
            except EngineLost as lost:
                self.replace_replica(lost)
        return samples

    def _returned(self, replica: Replica, packed: Any) -> list[Sample]:
        samples = unpack(torch.tensor(packed))
        for sample in samples:
            replica.requests.pop(sample.key)
        return samples

    def abort(self, keys: Sequence[SampleKey]) -> list[Sample]:
        """Aborts requests (see roles.Sampler), including those not yet assigned to a replica."""
        check_running(keys, self._keys())
        samples = []
        for replica in list(self.replicas):
            own = [key for key in keys if key in replica.requests]
            try:
                if own:
                    samples += self._returned(replica, replica.service.abort(own))
            except EngineLost as lost:
                self.replace_replica(lost)
        samples += [unsampled(request) for request in self.unassigned if request.key in keys]
        self.unassigned = [request for request in self.unassigned if request.key not in keys]
        return samples

    def running(self) -> int:
        """Returns the number of requests without a returned sample (see roles.Sampler)."""
        return len(self._keys())

    def _keys(self) -> list[SampleKey]:
        keys = [waiting.key for waiting in (*self.unassigned, *self._early)]
        for replica in self.replicas:
            keys += replica.requests
        return keys

    # lost replicas

    def count_restart(self, failure: Failure) -> None:
        """Counts a restart after `failure`; raises CheckFailed above launch.max_restarts.

        Raises NodeGone instead if a node is lost and not replaced.
        """
        self.restarts += 1
        limit = self.config.launch.max_restarts
        if self.restarts > limit:
            self.place.cluster.expect_nodes()  # what is lost may be a whole node
            raise CheckFailed(f"{failure.message}; launch.max_restarts={limit} are used up")
        say(f"{failure.message}; restart {self.restarts} of {limit}")

    def replace_replica(self, lost: EngineLost) -> None:
        """Kills the remaining processes of a lost replica, restarts it, and marks its requests as
        unassigned. Does nothing if the replica was already replaced.
        """
        number = lost.replica.number
        if self.replicas[number] is not lost.replica:  # already replaced
            return
        self.count_restart(lost.failure)
        self.unassigned += self.replicas[number].requests.values()
        self._end(lost.replica)
        self.replicas[number] = self._start(number)

    def retry_on_loss(self, call: Callable[[], T]) -> T:
        """Calls `call`, replacing lost engines and calling again until none is lost.

        Raises EngineLost if an engine fails in its first start and nothing was restarted before.
        """
        while True:
            try:
                return call()
            except EngineLost as lost:
                if lost.replica.starting and not lost.is_gone and not self.restarts:
                    raise
                self.replace_replica(lost)

    def reset_for_new_trainer(self) -> None:
        """Drops all requests after the trainer's ranks are lost; engines accept none before the
        next sync.
        """
        self.retry_on_loss(self._drop)
        self.unassigned.clear()
        self._early.clear()

    def _drop(self) -> None:
        self.wait_started()
        for replica in self.replicas:
            replica.is_joined = replica.is_ready = False
            replica.service.drop()
            replica.requests.clear()
            if replica.poll:
                replica.value(replica.poll)  # discard samples of dropped requests
                replica.poll = None

    def _end(self, replica: Replica) -> None:
        for actor in (replica.actor, *replica.others):
            ray.kill(actor)
        for part in replica.remains:
            kill_engine(*part)

    def end(self) -> None:
        for replica in self.replicas:
            self._end(replica)
