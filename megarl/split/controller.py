"""The controller of the split topology: runs stages.rl.train with remote implementations of roles.

prompts, rewards, collate, objective, telemetry     local, as on every rank of a colocated run
learner, checks, checkpoint   --calls--> TrainerRanks (trainer_rank.py): all ranks, same order
rollouts                      --calls--> Engines (engines.py): replicas generate independently
weights                       --calls--> both, which share a process group without the controller

publish   waits until all trainer ranks and engine workers have verified the weights; only then do
          engines accept prompts
update    waits for the slowest rank; the gate refuses on all ranks or on none
"""

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from secrets import token_hex
from typing import Any

import ray
import torch

from megarl.config.schema import Config
from megarl.data.ledger import Ledger
from megarl.data.tokenizer import stop_token_ids
from megarl.layout import Fleet
from megarl.parity.gate import ParityChecks
from megarl.platform.env import Env
from megarl.processes.exit_codes import CurrentPhase
from megarl.rewards.scorer import make_scorer
from megarl.roles import Gate, Prompts
from megarl.rollout.overlap import AsyncRollouts, BetweenRequests
from megarl.rollout.vllm.async_engine import Reply, SyncGroup
from megarl.run.checkpoints import saved
from megarl.run.context import RankContext, rank_telemetry
from megarl.run.data import make_prompts, make_rollouts
from megarl.run.models import make_objective
from megarl.run.phases import TimedPhases
from megarl.run.sync import make_checks
from megarl.split.engines import EngineLost, Engines
from megarl.split.ray_actors import GRACE_S, POLL_S, Place, RankLost, TrainerRanks
from megarl.split.ray_cluster import Cluster
from megarl.split.services import SyncService
from megarl.split.stopped_processes import Watch
from megarl.split.trainer_rank import TrainerRank
from megarl.stages.rl import make_run, train
from megarl.types import (
    CheckFailed,
    ObjectiveState,
    PublishReport,
    ScoredBatch,
    StepReport,
    TokenScores,
    TrainBatch,
)
from megarl.weights.sync.transports.collective import end_barrier


@dataclass(frozen=True)
class RemoteTrainer:
    """Implements roles.Learner and roles.Checkpoint by calls to the trainer's ranks.

    The gate on these ranks has no engine, so an error only guesses the cause of a difference. A
    colocated `megarl check --parity` finds it.
    """

    ranks: TrainerRank
    prompts: Prompts  # its state is saved with the ranks' checkpoints

    def score(self, batch: TrainBatch) -> TokenScores:
        return self.ranks.score(batch)

    def update(self, batch: ScoredBatch, *, gate: Gate) -> StepReport:
        """Updates the policy. `gate` is ignored: the ranks apply their own gate before their
        first optimizer step.
        """
        return self.ranks.update(batch)

    def maybe_save(self, step: int, state: ObjectiveState, *, last: bool = False) -> None:
        self.ranks.maybe_save(step, state, self.prompts.state(), last)

    def save(self) -> None:
        self.ranks.save()

    def finish(self) -> None:
        self.ranks.finish()

    def hold(self) -> None:
        raise AssertionError("no stage of the split topology changes what is saved")


@dataclass
class RemoteWeights:
    """Implements roles.Weights: pauses engines, transfers weights, runs the probe, and commits.

    Trainer ranks and engine workers run the transfer plan; this process only calls them.
    """

    config: Config
    ranks: TrainerRanks
    engines: Engines
    checks: ParityChecks
    store: str
    ranks_per_node: int
    version: int = 0
    group: str = ""  # name of the current sync group
    barriers: int = 0  # number of barriers that the group has passed

    def announce(self, version: int) -> None:
        """Records the version of the trainer's weights, which `republish` uses."""
        self.version = version

    def publish(self, *, version: int) -> PublishReport:
        """Publishes the trainer's weights to all engines; repeats the sync if an engine is lost.

        Raises CheckFailed if verification fails, or if more engines are lost than
        launch.max_restarts allows.
        """
        self.announce(version)
        self.engines.is_syncing = True
        try:
            return self.engines.retry_on_loss(partial(self._publish, version))
        finally:
            self.engines.is_syncing = False

    def republish(self) -> None:
        self.publish(version=self.version)

    def _publish(self, version: int) -> PublishReport:
        self.engines.wait_started()
        replicas = self.engines.replicas
        if not all(replica.is_joined for replica in replicas):
            self.group = f"sync-{token_hex(4)}"
            self.barriers = 0
            config = self.config.model_dump_json()
            group = asdict(SyncGroup(self.store, self.group, config, self.ranks_per_node))
            self._on_all(lambda side: side.join(group))
            self.barriers = 1
        for replica in replicas:
            replica.is_joined = True
            replica.is_ready = False
        is_due, replies = self._on_all(lambda side: side.transfer(version))
        self.barriers += 1
        if is_due or self.checks.always or any(reply["prove"] for reply in replies):
            try:
                for replica in replicas:
                    replica.service.open(version)
                self.checks.check()
            except CheckFailed:
                self._on_all(lambda side: side.end(version, False))
                raise
        report, _ = self._on_all(lambda side: side.end(version, True))
        for replica in replicas:
            replica.is_ready = True
        return report

    def _on_all(self, ask: Callable[[SyncService], object]) -> tuple[Any, list[Reply]]:
        """Calls all trainer ranks and all engines; returns (rank 0's value, workers' replies).

        If an engine is lost, raises EngineLost, because errors of its peers are consequences.
        Otherwise raises CheckFailed for a refusal of the trainer's ranks or an error of a worker.
        """
        waiting = {replica.begin(ask): replica for replica in self.engines.replicas}
        replies = []
        lost = None
        refusal = None
        value = None

        def look(timeout_s: float | None = 0.0) -> None:
            nonlocal lost
            if not waiting:
                return
            ended, _ = ray.wait(list(waiting), timeout=timeout_s)
            for ref in ended:
                replica = waiting.pop(ref)
                try:
                    replies.extend(replica.value(ref) or [])
                except EngineLost as error:
                    lost = lost or error
                    self._end_barrier(f"engine {replica.number}")

        try:
            value = self.ranks.wait(self.ranks.begin(ask), look)
        except CheckFailed as error:
            refusal = error
        except RankLost as error:
            self._end_barrier("a rank of the trainer")
            # the failure may be a consequence of a lost engine: wait for its report
            deadline = time.monotonic() + GRACE_S * (not error.is_gone)
            while waiting and not lost and time.monotonic() < deadline:
                look(POLL_S)
            if lost is None or error.is_gone:
                raise
        while waiting:
            look(None)
        cause = lost or refusal
        if cause:
            raise cause
        for reply in replies:
            if "error" in reply:
                raise CheckFailed(reply["error"])
        return value, replies

    def _end_barrier(self, absent: str) -> None:
        """Releases the participants blocked in a sync barrier; `absent` names the lost one."""
        timeout = timedelta(seconds=self.config.launch.timeout_s)
        for number in (self.barriers, self.barriers + 1):
            end_barrier(self.store, self.group, number, absent, timeout)


def train_split(config: Config, cluster: Cluster, fleet: Fleet, phase: CurrentPhase) -> None:
    """Starts engines and trainer ranks, and runs the loop.

    If a trainer rank dies, restarts all of them and resumes from the last checkpoint.
    """
    rank = RankContext.of(config, Env(), torch.device("cpu"), phase, fleet.trainer_layout(0))
    watch = Watch(config.launch.timeout_s, ray.get_runtime_context().get_node_id())
    logs = config.run_dir / "logs"
    parts = cluster.parts
    gpus = fleet.ranks_per_replica // parts
    place = Place(cluster, watch, fleet.trainers, gpus, logs, parts)
    stop = stop_token_ids(rank.tokenizer, config.rollout.stop)
    engines = Engines(config, rank.model_folder, stop, place)
    engines.is_stopping = lambda: phase.is_stopping
    engines.start()
    with ExitStack() as stack:
        stack.callback(engines.end)
        stack.callback(watch.end)
        while True:
            ranks = None
            try:
                first = Place(cluster, watch, 0, 1, logs)
                ranks = TrainerRanks.start(config, first, fleet.trainers, cluster.store)
                _train(rank, ranks, engines, cluster, fleet)
                return
            except RankLost as lost:
                if not lost.is_gone:
                    raise
                engines.count_restart(lost.failure)
            finally:
                if ranks:
                    ranks.end()
            engines.reset_for_new_trainer()


def _train(
    rank: RankContext, ranks: TrainerRanks, engines: Engines, cluster: Cluster, fleet: Fleet
) -> None:
    """Runs the loop from the start or from a checkpoint."""
    # `rank` is the controller's context, not one of the trainer's ranks
    config = rank.config
    ledger = Ledger(make_prompts(rank))
    start, state, cursor = ranks.service.restore()
    if start:
        ledger.restore(cursor)
    engines.retry_on_loss(engines.wait_started)
    ranks.meanwhile = engines.poll_while_training
    gather = engines.place.watch.gather_gpus
    gather({})  # starts the monitors
    with rank_telemetry(rank, start, world_size=fleet.world, gather=gather) as telemetry:
        phases = TimedPhases(telemetry, rank.device, (), None, rank.phase)
        scorer = make_scorer(
            config.rewards, decode=rank.tokenizer.decode, answer=config.task.answer
        )
        overlap = AsyncRollouts(engines, scorer, phases.part, engines.is_stopping)
        checks = make_checks(rank, ranks.service.measure, engines.replicas)
        per_node = fleet.world if cluster.is_local else fleet.ranks_per_node
        weights = RemoteWeights(config, ranks, engines, checks, cluster.store, per_node)
        engines.recover = weights.republish
        between = BetweenRequests(weights, overlap.drain, weights.announce)
        trainer = RemoteTrainer(ranks.service, ledger)
        run = make_run(rank, overlap, ledger, telemetry, start, state)(
            rollouts=replace(
                make_rollouts(rank, overlap, ledger),
                begin_round=overlap.begin,
                max_staleness=config.rollout.max_staleness,
                last_step=config.train.steps,
            ),
            learner=trainer,
            objective=make_objective(config),
            weights=weights if config.rollout.update_in_flight else between,
            gate=checks.parity,
            phases=phases,
            checkpoint=trainer,
        )
        with saved((), trainer):
            train(run)
    ranks.service.export()
    ranks.service.close()
