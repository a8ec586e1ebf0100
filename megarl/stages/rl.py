"""The RL loop: sample with the engine, score, update, publish.

    trainer, engine --> publisher, exchange of samples, learner --> RlRun --> train --> export

`train` depends on roles (roles.py), never on a backend. The same function runs on every rank of a
colocated job and in the controller of a split one. `run` builds a colocated rank.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from megarl.algorithms.objective import Objective
from megarl.checkpoint.state import Further
from megarl.config.run_dir import LEDGER
from megarl.data.collate import collate
from megarl.data.ledger import Ledger
from megarl.platform.device import peak_gb
from megarl.roles import (
    Checkpoint,
    Evaluation,
    Gate,
    Learner,
    Phases,
    Prompts,
    Rollouts,
    Telemetry,
    Weights,
)
from megarl.rollout.schedule import Generate
from megarl.rollout.vllm.engine import Engine
from megarl.run.checkpoints import export, make_checkpoints, saved
from megarl.run.context import RankContext, rank_telemetry
from megarl.run.data import make_exchange, make_prompts, make_rollouts
from megarl.run.engine import make_engine
from megarl.run.memory import place_optimizer_state
from megarl.run.models import (
    RewardModel,
    check_weights,
    make_learner,
    make_objective,
    make_reward_model,
    make_trainer,
)
from megarl.run.phases import TimedPhases
from megarl.run.sync import parity_checks, rank_publisher
from megarl.stages.evaluation import evaluation_of
from megarl.trainer import actor_critic
from megarl.trainer.actor_critic import policy_of
from megarl.trainer.learner import SelectingLearner, SelectRows
from megarl.trainer.trainer import Trainer
from megarl.types import Group, ObjectiveState, TrainBatch


@dataclass
class RlRun:
    """The components of a run. `start` is the number of steps already done."""

    prompts: Prompts
    rollouts: Rollouts
    collate: Callable[[Sequence[Group]], TrainBatch]
    learner: Learner
    objective: Objective
    weights: Weights
    evaluation: Evaluation
    gate: Gate
    phases: Phases
    checkpoint: Checkpoint
    telemetry: Telemetry
    state: ObjectiveState
    steps: int
    prompts_per_step: int
    start: int = 0


def train(run: RlRun) -> None:
    with run.phases.sync():
        run.weights.publish(version=run.start)  # detect a broken transport before the first rollout
    run.evaluation.maybe_run(run.start)
    for step in range(run.start, run.steps):
        with run.telemetry.step(step) as record:
            with run.phases.rollout():
                rollout = run.rollouts.collect(run.prompts, run.prompts_per_step, version=step)
            batch = run.collate(rollout.groups)
            with run.phases.train():
                scores = run.learner.score(batch)  # log-probs etc. that the objective needs
                scored, run.state = run.objective.advantages(batch, scores, run.state)
                # the gate acts before the first optimizer step
                update = run.learner.update(scored, gate=run.gate)
                run.state = run.objective.after_updates(scored, update, run.state)
                run.rollouts.trained(step, update)
            with run.phases.save():
                run.checkpoint.maybe_save(step + 1, run.state)
            with run.phases.sync():
                sync = run.weights.publish(version=step + 1)
            record(rollout, update, sync, scored)
        run.evaluation.maybe_run(step + 1)


def run(rank: RankContext) -> None:
    """Runs stage rl on this rank."""
    export(rank, train_policy(rank))


def train_policy(
    rank: RankContext,
    start_engine: Callable[[RankContext], Engine] = make_engine,
    objective: Objective | None = None,  # None: built from the config
    select: SelectRows | None = None,  # returns the rows to train on; None: all rows
    *,
    loop: Callable[[RlRun], None] = train,
    further: Callable[[actor_critic.Learner, RewardModel | None], Further] = lambda *_: Further(),
) -> Trainer:
    """Builds a colocated rank, runs `loop` from the start or a checkpoint, and returns the policy.

    `further` returns additional state for the checkpoints. To save device memory, the trainer is
    offloaded before the engine starts, and the engine sleeps until the first sync.
    """
    config = rank.config
    trainer = make_trainer(rank)
    ledger = Ledger(make_prompts(rank))
    objective = objective or make_objective(config)
    learner = make_learner(rank, trainer, objective)  # before restoring: copies the reference
    reward_model = make_reward_model(rank, trainer)
    checkpoint = make_checkpoints(
        rank,
        trainer,
        ledger,
        objective.initial_state(),
        learner,
        further(learner, reward_model),
    )
    start, state = checkpoint.restore(config.checkpoint.resume)
    for trained in learner.trainers:
        check_weights(rank, trained)
        trained.memory.offload_all()
    engine = start_engine(rank)
    engine.sleep()
    place_optimizer_state(rank, learner.trainers)
    with rank_telemetry(rank, start) as telemetry:
        telemetry.add({"memory/startup/peak_gb": peak_gb(rank.device)})
        phases = TimedPhases(telemetry, rank.device, learner.trainers, engine, rank.phase)
        exchange = make_exchange(rank, engine, phases.part, reward_model)
        parity = parity_checks(rank, trainer, engine)
        weights = rank_publisher(rank, trainer, engine, parity)
        weights.span = phases.part
        policy_of(learner).span = phases.part
        updated = SelectingLearner(learner, select) if select is not None else learner
        run = make_run(rank, exchange, ledger, telemetry, start, state)(
            rollouts=make_rollouts(rank, exchange, ledger),
            learner=updated,
            objective=objective,
            weights=weights,
            gate=parity.parity,
            phases=phases,
            checkpoint=checkpoint,
        )
        with saved(learner.trainers, checkpoint, engine.sleep):
            loop(run)
    trainer.memory.onload_all()
    return trainer


def make_run(
    rank: RankContext,
    generate: Generate,
    ledger: Ledger,
    telemetry: Telemetry,
    start: int,
    state: ObjectiveState,
) -> partial[RlRun]:
    """Returns a partial RlRun with the components common to both topologies; the caller adds the
    remaining roles.

    `start` is the number of steps already done. On rank 0, opens the ledger.
    """
    config = rank.config
    if rank.env.is_main:
        ledger.open(config.run_dir / LEDGER, step=start, max_staleness=config.rollout.max_staleness)
    return partial(
        RlRun,
        prompts=ledger,
        collate=partial(
            collate,
            temperature=config.rollout.temperature,
            mask_truncated=config.algorithm.truncated == "mask",
        ),
        evaluation=evaluation_of(rank, generate, start, telemetry.evaluated),
        telemetry=telemetry,
        state=state,
        steps=config.train.steps,
        prompts_per_step=config.train.prompts_per_step,
        start=start,
    )
