"""The processes of the split topology: a Ray actor for each Megatron rank and each engine replica, and their groups.

    controller --call--> RankActor x W     (a rank; all of them at once)     --> values of rank 0, or why one failed
               --call--> EngineActor x R   (an AsyncLLM; any number of calls) --> the same

A call returns {"value": ...} or {"failure": ...}: what a failure means does not depend on how Ray wraps it.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from megarl.config.schema import Config
from megarl.launch.cluster import Cluster
from megarl.launch.exit_codes import DEFECT, REFUSED, Failure, failure_of, first_failure
from megarl.launch.watch import Watch
from megarl.launch.worker import redirect_output
from megarl.platform.children import Children
from megarl.platform.env import LOOPBACK, Env, get_env, redact, set_env

GRACE_S = 10.0  # for the peers of a failed rank to fail too: the first record gives the cause
POLL_S = 0.5
KILLED = "was killed; out of memory? see its log"


class RankLost(RuntimeError):
    """A trainer rank has failed or ended, and with it the group: nothing more can be asked of it."""

    def __init__(self, failure: Failure, is_gone: bool = False) -> None:
        super().__init__(failure.message)
        self.failure, self.is_gone = failure, is_gone  # its process, not only what it was doing


class _Actor:
    """Imports torch only once the environment is set."""

    def __init__(self, number: int, log: str, environment: Mapping[str, Any]) -> None:
        set_env(**environment)
        redirect_output(Path(log))
        self._number, self._log, self._made = number, Path(log), None

    def place(self) -> tuple[str, list[int], int]:
        """Returns the node, this actor's GPUs there, and its process id."""
        return (
            ray.get_runtime_context().get_node_id(),
            [int(gpu) for gpu in ray.get_gpu_ids()],
            os.getpid(),
        )

    def _failed(self, error: BaseException) -> dict[str, Any]:
        phase = getattr(getattr(self._made, "phase", None), "name", "")
        failure = failure_of(error, self._number, phase=phase, run_dir=self._log.parent.parent)
        print(redact("".join(traceback.format_exception(error))), file=sys.stderr, flush=True)
        return {"failure": failure}


@ray.remote
class RankActor(_Actor):
    def start(self, config: Config, env: Env, store: str, name: str) -> dict[str, Any]:
        try:
            from megarl.launch.split_rank import TrainerRank

            self._number, self._made = env.rank, TrainerRank(config, env, store, name)
            return {"value": None}
        except BaseException as error:  # noqa: BLE001 (every failure becomes a record)
            return self._failed(error)

    def call(self, method: str, *values: Any) -> dict[str, Any]:
        """Batches arrive and leave as flat bytes; only rank 0 returns a value."""
        from megarl.rollout.exchange import pack_batch, unpack_batch

        try:
            value = getattr(self._made, method)(*map(unpack_batch, values))
            return {"value": pack_batch(value) if self._number == 0 else None}
        except BaseException as error:  # noqa: BLE001 (every failure becomes a record)
            return self._failed(error)


@ray.remote
class EngineActor(_Actor):
    async def start(
        self, config: Config, folder: Path, stop_token_ids: Sequence[int]
    ) -> dict[str, Any]:
        """Returns what its end needs, processes and segments of shared memory, and the longest row."""
        try:
            from megarl.rollout.async_engine import AsyncEngine

            made = self._made = await AsyncEngine.start(
                config, folder, stop_token_ids, self._number
            )
            pids, segments = [*made.children.pids, os.getpid()], sorted(made.children.segments)
            return {"value": (pids, segments, made.max_model_len)}
        except BaseException as error:  # noqa: BLE001 (every failure becomes a record)
            return self._failed(error)

    async def call(self, method: str, *values: Any) -> dict[str, Any]:
        try:
            assert self._made is not None
            return {"value": await self._made.call(method, *values)}
        except BaseException as error:  # noqa: BLE001 (every failure becomes a record)
            return self._failed(error)


def value_of(ref: Any, what: str) -> Any:
    """Waits for a call; returns its value. Raises RankLost with its failure."""
    try:
        reply: Any = ray.get(ref)
    except RayError as error:
        raise rank_lost(error, what) from None
    if "failure" in reply:
        raise RankLost(reply["failure"])
    return reply["value"]


def rank_lost(error: RayError, what: str) -> RankLost:
    is_gone = isinstance(error, RayActorError)
    cause = KILLED if is_gone else f"{type(error).__name__}: {error}"
    return RankLost(Failure(-1, DEFECT, f"{what} {cause}"), is_gone)


@dataclass(frozen=True)
class Place:
    """Where a kind of actor runs."""

    cluster: Cluster
    watch: Watch
    first_bundle: int
    gpus: int  # of each actor
    logs: Path

    def start(self, kind: Any, number: int) -> Any:
        cluster = self.cluster
        strategy = PlacementGroupSchedulingStrategy(cluster.placement, self.first_bundle + number)
        gpus = self.gpus * cluster.has_gpus
        options = {
            "num_cpus": 1,
            "num_gpus": gpus,
            "max_restarts": 0,
            "scheduling_strategy": strategy,
        }
        name, calls = ("engine", {"max_concurrency": 1000}) if kind is EngineActor else ("rank", {})
        environment = {
            "OMP_NUM_THREADS": get_env("OMP_NUM_THREADS") or 1,
            "TOKENIZERS_PARALLELISM": "false",
        }
        environment |= LOOPBACK if cluster.is_local else {}  # set before anything heavy is imported
        return kind.options(**options, **calls).remote(
            number, str(self.logs / f"{name}_{number}.log"), environment
        )


@dataclass
class TrainerRanks:
    """All ranks of the trainer; `call` is a collective of them."""

    actors: Sequence[Any]
    meanwhile: Callable[[], object] = lambda: None  # called while ranks are waited for

    @classmethod
    def start(cls, config: Config, place: Place, world: int, store: str) -> TrainerRanks:
        """They meet in `store`. Ranks are numbered node by node. Raises NodeGone if a node is."""
        ranks, name = (
            cls([place.start(RankActor, number) for number in range(world)]),
            f"trainer-{token_hex(4)}",
        )
        with ExitStack() as stack:
            stack.callback(ranks.end)
            try:
                places = place.cluster.placed(ranks.actors)
            except RayError as error:
                raise rank_lost(error, "a rank") from None
            nodes = list(dict.fromkeys(node for node, *_ in places))
            order = sorted(
                range(world),
                key=lambda number: (nodes.index(places[number][0]), places[number][1], number),
            )
            ranks.actors, starts = [ranks.actors[number] for number in order], list[Any]()
            for rank, number in enumerate(order):
                place.watch.add(f"rank {rank}", places[number][0], places[number][2])
                # on a GPU, each sees its own alone, as number 0
                env = Env(rank, world, 0, max(1, world // len(nodes)), has_launcher=True)
                starts.append(ranks.actors[rank].start.remote(config, env, store, name))
            ranks.wait(starts)
            stack.pop_all()
        return ranks

    def call(self, method: str, *values: Any) -> Any:
        """Returns what rank 0 does. Raises CheckFailed if all ranks refuse, RankLost if one fails otherwise."""
        return self.wait(self.begin(method, *values))

    def begin(self, method: str, *values: Any) -> list[Any]:
        from megarl.rollout.exchange import pack_batch

        refs = [ray.put(pack_batch(value)) for value in values]
        return [actor.call.remote(method, *refs) for actor in self.actors]

    def wait(self, refs: Sequence[Any], meanwhile: Callable[[], object] | None = None) -> Any:
        from megarl.rollout.exchange import unpack_batch
        from megarl.types import CheckFailed

        ranks, pending, failures = (
            {ref: rank for rank, ref in enumerate(refs)},
            list(refs),
            list[Failure](),
        )
        value, deadline, gone = None, None, None
        while pending and (deadline is None or time.monotonic() < deadline):
            done, pending = ray.wait(pending, num_returns=1, timeout=POLL_S)
            (meanwhile or self.meanwhile)()
            for ref in done:
                try:
                    returned = value_of(ref, f"rank {ranks[ref]}")
                    value = returned if ranks[ref] == 0 else value
                except RankLost as lost:
                    failures.append(lost.failure)
                    gone = gone or (lost if lost.is_gone else None)
                    deadline = (
                        0.0 if gone else deadline or time.monotonic() + GRACE_S
                    )  # that one is the cause
        if (first := first_failure(failures)) is None:
            return unpack_batch(value)
        if [failure.code for failure in failures] == [REFUSED] * len(refs):
            raise CheckFailed(first.message)
        raise gone or RankLost(first)  # what the peers of one that is gone report is a consequence

    def end(self) -> None:
        for actor in self.actors:
            ray.kill(actor)


def end_family(node: str, pids: Sequence[int], segments: Sequence[str]) -> None:
    """Ends the processes of an engine on its node: they outlive an actor that is killed."""
    strategy: Any = NodeAffinitySchedulingStrategy(node_id=node, soft=False)

    @ray.remote(num_cpus=0, scheduling_strategy=strategy)
    def end() -> None:
        Children(dict.fromkeys(pids, ""), set(segments)).end()

    with suppress(RayError):  # the node is gone
        ray.get(end.remote(), timeout=30)
