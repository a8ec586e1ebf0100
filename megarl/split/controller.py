"""The controller of the split topology: it runs stages.rl.train with roles that are elsewhere. No rank, no engine here.

prompts, rewards, collate, objective, telemetry     in this process, as on every rank of a colocated run
learner, checks, checkpoint     --calls--> TrainerRanks (split_rank.py): all ranks at once, in one order
rollouts                        --calls--> Engines (engines.py): replicas that generate on their own
weights                         --calls--> both: they share a process group, which this process is not part of

publish   waits for all ranks and workers to have verified what they received; then prompts are accepted
update    waits for the slowest rank; the gate refuses on all ranks, or on none
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from secrets import token_hex
from typing import Any

import ray
import torch

from megarl.config.load import run_dir
from megarl.config.schema import Config
from megarl.data.tokenizer import stop_token_ids
from megarl.launch.build import Rank, make_objective, make_prompts, rank_telemetry, saved
from megarl.launch.cluster import Cluster
from megarl.launch.engines import EngineLost, Engines
from megarl.launch.exit_codes import CurrentPhase
from megarl.launch.parity import ParityChecks, make_checks
from megarl.launch.phases import TimedPhases
from megarl.launch.ray_actors import GRACE_S, POLL_S, Place, RankLost, TrainerRanks
from megarl.launch.run_rl import make_rollouts, make_run
from megarl.launch.watch import Watch
from megarl.platform.env import Env
from megarl.rewards.scorer import make_scorer
from megarl.roles import Gate, Prompts
from megarl.rollout.async_engine import SyncGroup
from megarl.rollout.overlap import BetweenRequests, Overlap
from megarl.stages.rl import train
from megarl.telemetry.ledger import Ledger
from megarl.types import (
    CheckFailed,
    ObjectiveState,
    PublishReport,
    ScoredBatch,
    StepReport,
    TokenScores,
    TrainBatch,
)
from megarl.weights.fleet import Fleet
from megarl.weights.transports.collective import end_barrier


@dataclass(frozen=True)
class RemoteTrainer:
    """roles.Learner, Checks and Checkpoint, on the trainer's ranks.

    Their gate has no engine, so a refusal guesses the cause; colocated, `megarl check --parity` finds it.
    """

    ranks: TrainerRanks
    prompts: Prompts  # saved with the ranks' states

    def score(self, batch: TrainBatch) -> TokenScores:
        return self.ranks.call("score", batch)

    def update(self, batch: ScoredBatch, *, gate: Gate) -> StepReport:
        """`gate` is `parity`: the ranks' own, between their backward pass and the optimizer's step."""
        return self.ranks.call("update", batch)

    def parity(self, batch: ScoredBatch) -> Mapping[str, float]:
        raise AssertionError("the gate runs on the trainer's ranks")

    def maybe_save(self, step: int, state: ObjectiveState, *, last: bool = False) -> None:
        self.ranks.call("maybe_save", step, state, self.prompts.state(), last)

    def save(self) -> None:
        self.ranks.call("save")

    def finish(self) -> None:
        self.ranks.call("finish")

    def hold(self) -> None:
        raise AssertionError("no stage of the split topology changes what is saved")


@dataclass
class RemoteWeights:
    """roles.Weights: pauses the engines, runs the plan on ranks and workers, probes, stamps the version, resumes."""

    config: Config
    ranks: TrainerRanks
    engines: Engines
    checks: ParityChecks
    store: str
    ranks_per_node: int
    version: int = 0
    group: str = ""  # the current one's name
    barriers: int = 0  # that were met in it

    def announce(self, version: int) -> None:
        """The trainer's weights are of this version from now on: so is what a lost engine is given."""
        self.version = version

    def publish(self, *, version: int) -> PublishReport:
        """Raises CheckFailed if the ranks refuse, or if engines are lost more often than they may be restarted."""
        self.announce(version)
        self.engines.is_syncing = True
        try:
            report = self.engines.survive(partial(self._publish, version))
        finally:
            self.engines.is_syncing = False
        self.engines.adopt()
        return report

    def republish(self) -> None:
        self.publish(version=self.version)

    def _publish(self, version: int) -> PublishReport:
        self.engines.wait_started()
        replicas = self.engines.replicas
        if not all(replica.is_joined for replica in replicas):
            self.group, self.barriers = f"sync-{token_hex(4)}", 0
            group = SyncGroup(
                self.store, self.group, self.config.model_dump_json(), self.ranks_per_node
            )
            self._on_all("join", asdict(group))
            self.barriers = 1
        for replica in replicas:
            replica.is_joined, replica.is_ready = True, False
        is_due, replies = self._on_all("transfer", version)
        self.barriers += 1
        if is_due or self.checks.always or any(reply["prove"] for reply in replies):
            try:
                for replica in replicas:
                    replica.call("open", version)
                self.checks.check()
            except CheckFailed:
                self._on_all("end", version, False)
                raise
        report, _ = self._on_all("end", version, True)
        for replica in replicas:
            replica.is_ready = True
        return report

    def _on_all(self, method: str, *values: Any) -> tuple[Any, list[dict[str, Any]]]:
        """Calls both sides; returns the values of rank 0 and the workers. A lost engine explains what others report."""
        waiting = {replica.begin(method, *values): replica for replica in self.engines.replicas}
        replies, lost, refusal, value = list[dict[str, Any]](), None, None, None

        def look(timeout_s: float | None = 0.0) -> None:
            nonlocal lost
            for ref in (
                ray.wait(list(waiting), num_returns=1, timeout=timeout_s)[0] if waiting else ()
            ):
                replica = waiting.pop(ref)
                try:
                    replies.extend(replica.value(ref) or [])
                except EngineLost as error:
                    lost = lost or error
                    self._end_barrier(f"engine {replica.number}")

        try:
            value = self.ranks.wait(self.ranks.begin(method, *values), look)
        except CheckFailed as error:
            refusal = error
        except RankLost as error:
            self._end_barrier("a rank of the trainer")
            deadline = time.monotonic() + GRACE_S * (
                not error.is_gone
            )  # for what it may be a consequence of
            while waiting and not lost and time.monotonic() < deadline:
                look(POLL_S)
            if lost is None or error.is_gone:
                raise
        while waiting:
            look(None)
        if cause := lost or refusal:
            raise cause
        if errors := [reply["error"] for reply in replies if "error" in reply]:
            raise CheckFailed(errors[0])
        return value, replies

    def _end_barrier(self, absent: str) -> None:
        """For those that wait for one that is lost: at the beginning of a sync, or to find out who is left of it."""
        for number in (self.barriers, self.barriers + 1):
            end_barrier(
                self.store,
                self.group,
                number,
                absent,
                timedelta(seconds=self.config.launch.timeout_s),
            )


def train_split(config: Config, cluster: Cluster, fleet: Fleet, phase: CurrentPhase) -> None:
    """Starts engines and ranks, and runs the loop; after the death of a rank, again from the last checkpoint."""
    rank = Rank.of(config, Env(), torch.device("cpu"), phase, fleet.trainer_layout(0))
    watch, logs = Watch(config.launch.timeout_s), run_dir(config) / "logs"
    place = Place(cluster, watch, fleet.trainers, fleet.ranks_per_replica, logs)
    engines = Engines(
        config, rank.model_folder, stop_token_ids(rank.tokenizer, config.rollout.stop), place
    )
    engines.is_stopping = lambda: phase.is_stopping
    engines.start()
    with ExitStack() as stack:
        stack.callback(engines.end)
        stack.callback(watch.end)
        while True:
            ranks = None
            try:
                ranks = TrainerRanks.start(
                    config, Place(cluster, watch, 0, 1, logs), fleet.trainers, cluster.store
                )
                _train(rank, ranks, engines, cluster, fleet)
                return
            except RankLost as lost:
                if not lost.is_gone:
                    raise
                engines.count_restart(lost.failure)
            finally:
                if ranks:
                    ranks.end()
            engines.leave_ranks()


def _train(
    rank: Rank, ranks: TrainerRanks, engines: Engines, cluster: Cluster, fleet: Fleet
) -> None:
    """Runs the loop from the start or from a checkpoint."""
    config, ledger = (
        rank.config,
        Ledger(make_prompts(rank)),
    )  # `rank` is of no world: what the controller needs of one
    start, state, cursor = ranks.call("restore")
    if start:
        ledger.restore(cursor)
    engines.survive(engines.wait_started)
    ranks.meanwhile = engines.glance
    with rank_telemetry(rank, start, world_size=fleet.world) as telemetry:
        phases = TimedPhases(telemetry.span, telemetry.add, rank.device, (), None, rank.phase)
        scorer = make_scorer(
            config.rewards, decode=rank.tokenizer.decode, answer=config.task.answer
        )
        overlap = Overlap(engines, scorer, phases.part, engines.is_stopping)
        ahead = {"max_staleness": config.rollout.max_staleness, "last_step": config.train.steps}
        checks = make_checks(rank, partial(ranks.call, "measure"), engines.replicas)
        per_node = fleet.world if cluster.is_local else fleet.ranks_per_node
        weights = RemoteWeights(config, ranks, engines, checks, cluster.store, per_node)
        engines.recover = weights.republish
        between, trainer = (
            BetweenRequests(weights, overlap.drain, weights.announce),
            RemoteTrainer(ranks, ledger),
        )
        run = make_run(
            rank,
            overlap,
            ledger,
            telemetry,
            (start, state),
            rollouts=make_rollouts(rank, overlap, ledger, begin=overlap.begin, **ahead),
            learner=trainer,
            objective=make_objective(config),
            weights=weights if config.rollout.update_in_flight else between,
            checks=trainer,
            phases=phases,
            checkpoint=trainer,
        )
        with saved((), trainer):
            train(run)
    ranks.call("export")
    ranks.call("close")
