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
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any

import ray
import torch

from megarl.config.load import run_dir
from megarl.config.schema import Config
from megarl.data.collate import collate
from megarl.data.tokenizer import stop_token_ids
from megarl.launch.build import Rank, make_objective, make_prompts, saved
from megarl.launch.cluster import Cluster
from megarl.launch.engines import EngineLost, Engines, Replica
from megarl.launch.exit_codes import CurrentPhase
from megarl.launch.parity import MOE_PROBE_PROMPTS, PROBE_PROMPTS, PROBE_TOKENS, Measured, ParityChecks
from megarl.launch.phases import TimedPhases
from megarl.launch.ray_actors import GRACE_S, POLL_S, Place, RankLost, TrainerRanks
from megarl.launch.run_rl import evaluation_of, make_rollouts
from megarl.launch.watch import Watch
from megarl.platform.env import Env, is_interactive
from megarl.rewards.scorer import make_scorer
from megarl.roles import Gate, Prompts
from megarl.rollout.async_engine import SyncGroup
from megarl.rollout.overlap import BetweenRequests, Overlap
from megarl.stages.rl import RlRun, train
from megarl.telemetry.ledger import LEDGER, Ledger
from megarl.telemetry.log import Telemetry
from megarl.types import CheckFailed, ObjectiveState, PublishReport, ScoredBatch, StepReport, TokenScores, TrainBatch
from megarl.weights.fleet import Fleet
from megarl.weights.transports import InProcess
from megarl.weights.transports.collective import end_barrier


@dataclass(frozen=True)
class RemoteLearner:
    """roles.Learner."""

    ranks: TrainerRanks

    def score(self, batch: TrainBatch) -> TokenScores:
        return self.ranks.call("score", batch)

    def update(self, batch: ScoredBatch, *, gate: Gate) -> StepReport:
        """`gate` is RankChecks.parity: the ranks' own, between their backward pass and the optimizer's step."""
        return self.ranks.call("update", batch)


class RankChecks:
    """roles.Checks, whose gate runs where the trainer's log-probs are. It needs no engine: the batch has the engine's
    log-probs. A refusal guesses the cause from the distribution of differences; to find it, the engine must score
    again: `megarl check --parity` with launch.topology=colocated."""

    def parity(self, batch: ScoredBatch) -> Mapping[str, float]:
        raise AssertionError("the gate runs on the trainer's ranks")


@dataclass(frozen=True)
class RemoteCheckpoint:
    """roles.Checkpoint: written by the ranks, with the controller's states."""

    ranks: TrainerRanks
    prompts: Prompts

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
    name: str  # of this run's sync groups
    ranks_per_node: int
    version: int = 0
    group: str = ""  # the current one's name
    barriers: int = 0  # that were met in it
    numbers: Iterator[int] = field(default_factory=count)

    def announce(self, version: int) -> None:
        """The trainer's weights are of this version from now on: so is what a lost engine is given."""
        self.version = version

    def publish(self, *, version: int) -> PublishReport:
        """Raises CheckFailed if the ranks refuse, or if engines are lost more often than they may be restarted."""
        self.announce(version)
        self.engines.is_syncing = True
        try:
            while True:
                try:
                    report = self._publish(version)
                    break
                except EngineLost as lost:
                    self.engines.lose(lost)
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
            self._join(replicas)
        for replica in replicas:
            replica.is_ready = False
        proofs = self._on_all("transfer", version)
        self.barriers += 1
        if any(proofs) or self.checks.always:
            try:
                for replica in replicas:
                    replica.call("open", version)
                self.checks.check()
            except CheckFailed:
                self._on_all("end", version, False)
                raise
        report = self._on_all("end", version, True, returns=True)
        for replica in replicas:
            replica.is_ready = True
        return report

    def _join(self, replicas: list[Replica]) -> None:
        self.group = f"{self.name}/{next(self.numbers)}"
        self.barriers = 0
        group = SyncGroup(self.store, self.group, self.config.model_dump_json(), self.ranks_per_node)
        calls = [(replica, replica.begin("join", asdict(group))) for replica in replicas]
        self._finish(calls, self.ranks.begin("join", group))
        self.barriers = 1
        for replica in replicas:
            replica.is_joined = True

    def _on_all(self, method: str, *values: Any, returns: bool = False) -> Any:
        """Returns whether the probe is due, on each side; or with `returns`, what rank 0 returned."""
        calls = [(replica, replica.begin(method, *values)) for replica in self.engines.replicas]
        value, replies = self._finish(calls, self.ranks.begin(method, *values))
        return value if returns else [value, *(reply.get("prove", False) for reply in replies)]

    def _finish(self, calls: list[tuple[Replica, Any]], trained: list[Any]) -> tuple[Any, list[dict[str, Any]]]:
        """Waits for both sides. An engine that is lost is the cause of what the others report."""
        replies, lost, refusal, value = list[dict[str, Any]](), None, None, None
        waiting = {ref: replica for replica, ref in calls}

        def take(ref: Any) -> None:
            nonlocal lost
            replica = waiting.pop(ref)
            try:
                replies.extend(replica.value(ref) or [])
            except EngineLost as error:
                lost = lost or error
                self._end_barrier(f"engine {replica.number}")

        def look(timeout_s: float = 0.0) -> None:
            for ref in ray.wait(list(waiting), num_returns=1, timeout=timeout_s)[0] if waiting else ():
                take(ref)

        try:
            value = self.ranks.wait(trained, look)
        except CheckFailed as error:
            refusal = error
        except RankLost as error:
            self._end_barrier("a rank of the trainer")
            deadline = time.monotonic() + GRACE_S * (not error.is_gone)  # for what it may be a consequence of
            while waiting and not lost and time.monotonic() < deadline:
                look(POLL_S)
            if lost is None or error.is_gone:
                raise
        for ref in list(waiting):
            take(ref)
        if lost:
            raise lost
        if refusal:
            raise refusal
        if errors := [reply["error"] for reply in replies if "error" in reply]:
            raise CheckFailed(errors[0])
        return value, replies

    def _end_barrier(self, absent: str) -> None:
        """For those that wait for one that is lost: at the beginning of a sync, or to find out who is left of it."""
        timeout = timedelta(seconds=self.config.launch.timeout_s)
        for number in (self.barriers, self.barriers + 1):
            end_barrier(self.store, self.group, number, absent, timeout)


@dataclass
class Controller:
    """The parts of a run, once its processes have started."""

    rank: Rank  # of no world: what the controller needs of one
    cluster: Cluster
    fleet: Fleet
    engines: Engines
    watch: Watch
    job: str
    numbers: Iterator[int] = field(default_factory=count)  # of the groups of ranks, and of the sync groups

    @classmethod
    def start(cls, config: Config, cluster: Cluster, fleet: Fleet, phase: CurrentPhase) -> Controller:
        """Starts the engines, and does not wait for them."""
        rank = Rank.of(config, Env(), torch.device("cpu"), phase, fleet.trainer_layout(0))
        watch = Watch(config.launch.timeout_s)
        place = Place.of(cluster, watch, fleet.trainers, fleet.ranks_per_replica, run_dir(config) / "logs")
        engines = Engines(config, rank.model_folder, stop_token_ids(rank.tokenizer, config.rollout.stop), place)
        engines.is_stopping = lambda: phase.is_stopping
        engines.start()
        return cls(rank, cluster, fleet, engines, watch, ray.get_runtime_context().get_job_id())

    def start_ranks(self) -> TrainerRanks:
        place = Place.of(self.cluster, self.watch, 0, 1, run_dir(self.rank.config) / "logs")
        name = f"{self.job}/{next(self.numbers)}/trainer"
        return TrainerRanks.start(self.rank.config, place, self.fleet.trainers, self.cluster.store, name)

    def weights(self, ranks: TrainerRanks) -> RemoteWeights:
        cluster, fleet = self.cluster, self.fleet
        per_node = fleet.world if cluster.is_local else fleet.ranks_per_node
        checks = _probe(self.rank, ranks, self.engines)
        sync = (cluster.store, f"{self.job}/{next(self.numbers)}/sync", per_node)
        weights = RemoteWeights(self.rank.config, ranks, self.engines, checks, *sync)
        self.engines.recover = weights.republish
        return weights

    def run(self, ranks: TrainerRanks) -> None:
        """Runs the loop from the start or from a checkpoint."""
        rank, config, phase = self.rank, self.rank.config, self.rank.phase
        ledger, objective = Ledger(make_prompts(rank)), make_objective(config)
        start, state, cursor = ranks.call("restore")
        if start:
            ledger.restore(cursor)
        self.engines.revive()
        ranks.meanwhile = self.engines.glance
        facts = {"world_size": self.fleet.world, "layout": str(rank.layout)}
        with closing(Telemetry(config, start=start, interactive=is_interactive(), facts=facts)) as telemetry:
            staleness, steps = config.rollout.max_staleness, config.train.steps
            ledger.open(run_dir(config) / LEDGER, step=start, max_staleness=staleness)
            phases = TimedPhases(telemetry.span, telemetry.add, rank.device, (), None, phase)
            scorer = make_scorer(config.rewards, decode=rank.tokenizer.decode, answer=config.task.answer)
            overlap, weights = Overlap(self.engines, scorer, phases.part, self.engines.is_stopping), self.weights(ranks)
            between = BetweenRequests(weights, overlap.drain, weights.announce)
            ahead = {"begin": overlap.begin, "max_staleness": staleness, "last_step": steps}
            checkpoint, is_masked = RemoteCheckpoint(ranks, ledger), config.algorithm.truncated == "mask"
            run = RlRun(
                prompts=ledger,
                rollouts=make_rollouts(rank, overlap, ledger, **ahead),
                collate=partial(collate, temperature=config.rollout.temperature, mask_truncated=is_masked),
                learner=RemoteLearner(ranks),
                objective=objective,
                weights=weights if config.rollout.update_in_flight else between,
                evaluation=evaluation_of(rank, overlap, start, evaluated=telemetry.evaluated),
                checks=RankChecks(),
                phases=phases,
                checkpoint=checkpoint,
                telemetry=telemetry,
                state=state,
                steps=steps,
                prompts_per_step=config.train.prompts_per_step,
                start=start,
            )
            with saved((), checkpoint):
                train(run)
        ranks.call("export")
        ranks.call("close")


def train_split(config: Config, cluster: Cluster, fleet: Fleet, phase: CurrentPhase) -> None:
    """Starts engines and ranks, and runs the loop; after the death of a rank, again from the last checkpoint."""
    with ExitStack() as stack:
        controller = Controller.start(config, cluster, fleet, phase)
        stack.callback(controller.engines.end)
        stack.callback(controller.watch.end)
        while True:
            ranks = None
            try:
                ranks = controller.start_ranks()
                controller.run(ranks)
                return
            except RankLost as lost:
                if not lost.is_gone:
                    raise
                controller.engines.count_restart(lost.failure)
            finally:
                if ranks:
                    ranks.end()
            controller.engines.leave_ranks()


def _probe(rank: Rank, ranks: TrainerRanks, engines: Engines) -> ParityChecks:
    """Compares the trainer with every replica."""
    config = rank.config
    added = max(1, min(PROBE_TOKENS, config.rollout.max_tokens - 1))
    longest = engines.replicas[0].max_model_len - 1 - added

    def measure(batch: Any) -> Measured:
        return ranks.call("measure", batch)

    prompts = make_prompts(rank).take(MOE_PROBE_PROMPTS if rank.shape.is_moe else PROBE_PROMPTS)
    return ParityChecks(
        InProcess(),
        measure,
        engines.replicas,
        [prompt.tokens[-longest:] for prompt in prompts],
        added,
        max_diff=config.checks.max_logprob_diff,
        always=config.checks.probe == "always" or config.rollout.max_staleness > 0,
        is_moe=rank.shape.is_moe,
    )
