"""Builds and runs an RlRun on one rank; and `megarl eval` and `megarl check --parity`.

engine, trainer --> publisher between them, exchange of samples, learner --> RlRun --> train --> export
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache, partial

from megarl.algorithms.objective import Objective
from megarl.algorithms.parity import MAX_EXCESS
from megarl.config.load import run_dir
from megarl.config.schema import Config, Task
from megarl.data.collate import collate
from megarl.data.tasks import eval_task
from megarl.launch.build import Rank, export, make_checkpoints, make_prompts, make_trainer, open_rank, rank_telemetry
from megarl.launch.exit_codes import CurrentPhase
from megarl.launch.parity import ParityGate, measure_excess, parity_bound, probe_tokens, score_rows
from megarl.launch.phases import TimedPhases
from megarl.layout import Axis
from megarl.models.engine import engine_table
from megarl.models.registry import fp32_tensors, hf_shapes
from megarl.models.shards import slices_of
from megarl.planner.weight_sync import fleet_of, plan_of
from megarl.platform.device import DTYPES
from megarl.platform.env import Env
from megarl.rewards.scorer import make_scorer
from megarl.rollout.engine import Engine
from megarl.rollout.exchange import Exchange
from megarl.rollout.reward_shaping import Shaping
from megarl.rollout.schedule import Rollouts, has_spread
from megarl.stages.evaluation import Evaluation, ProblemSet
from megarl.stages.rl import RlRun, train
from megarl.trainer.learner import PolicyLearner
from megarl.trainer.trainer import Trainer
from megarl.types import CheckFailed, Prompt, Sample
from megarl.weights.publish import Probe, Publisher, WeightFormat, WeightSender, plan_slices

PARITY_PROMPTS = 8
Span = Callable[[str], AbstractContextManager[None]]


def run_rl(config: Config, env: Env, phase: CurrentPhase) -> None:
    """Runs `megarl train` of stage rl on this rank."""
    with open_rank(config, env, phase) as rank:
        export(rank, train_policy(rank, make_engine(rank)))


def run_eval(config: Config, env: Env, phase: CurrentPhase) -> None:
    """Runs `megarl eval` on this rank: held-out problems, sampled greedily and at the rollout temperature."""
    with open_rank(config, env, phase) as rank:
        engine = make_engine(rank)
        _publisher(rank, make_trainer(rank), engine).publish(version=0)
        evaluation = _evaluation(rank, _exchange(rank, engine), every=1)
        evaluation.forget(0)
        evaluation.run(0)


def run_parity(config: Config, env: Env, phase: CurrentPhase) -> None:
    """Runs `megarl check --parity` on this rank. Raises CheckFailed if rounding does not explain the differences."""
    checks = config.checks.model_copy(update={"max_logprob_diff": math.inf})  # the verdict is given here
    with open_rank(config.model_copy(update={"checks": checks}), env, phase) as rank:
        engine, trainer = make_engine(rank), make_trainer(rank)
        _publisher(rank, trainer, engine).publish(version=0)
        exchange = replace(_exchange(rank, engine), rewards=_Unscored())
        rollout = replace(_rollouts(rank, exchange), keep=None).collect(make_prompts(rank), PARITY_PROMPTS, version=0)
        batch = collate(rollout.groups, temperature=config.rollout.temperature)
        found = measure_excess(trainer, batch)
        if env.is_main:
            print(f"{int(batch.mask.sum())} sampled tokens, {config.train.dtype}; |trainer - engine| in nats")
            print(f"measured   median {found.median:<10.3g} 90% below {found.p90:.3g}")
            print(f"floor      median {found.floor_median:<10.3g} 90% below {found.floor_p90:.3g}")
            print(f"statistic  {found.statistic:.3g}, at most {MAX_EXCESS:g} from rounding", flush=True)
        if found.statistic > MAX_EXCESS:
            raise CheckFailed(
                f"trainer and engine differ by more than rounding explains: statistic {found.statistic:.3g}, at most "
                f"{MAX_EXCESS:g}"
            )


class _Unscored:
    """roles.Rewards, without any."""

    def score(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> list[Sample]:
        return [replace(sample, reward=0.0) for sample in samples]


def train_policy(rank: Rank, engine: Engine) -> Trainer:
    """Run the loop from the start, or from a checkpoint, to the last step; returns the trained policy."""
    config, trainer, prompts = rank.config, make_trainer(rank), make_prompts(rank)
    objective = Objective(config.algorithm, config.rollout.max_tokens)
    learner = PolicyLearner.of(trainer, objective, seed=config.run.seed)  # its reference is the model before any step
    checkpoint = make_checkpoints(rank, trainer, prompts, objective.initial_state())
    start, state = checkpoint.restore(config.checkpoint.resume)
    with rank_telemetry(rank, start) as telemetry:
        span, exchange = telemetry.span, _exchange(rank, engine, telemetry.span)
        evaluation = _evaluation(rank, exchange, every=config.eval.every)
        evaluation.forget(start)
        is_masked = config.algorithm.truncated == "mask"
        run = RlRun(
            prompts=prompts,
            rollouts=_rollouts(rank, exchange),
            collate=partial(collate, temperature=config.rollout.temperature, mask_truncated=is_masked),
            learner=replace(learner, span=span),
            objective=objective,
            weights=_publisher(rank, trainer, engine),
            evaluation=evaluation,
            checks=ParityGate(parity_bound(config), rank.shape.is_moe),
            phases=TimedPhases(span, telemetry.add, rank.device.torch, trainer.memory, engine, rank.phase),
            checkpoint=checkpoint,
            telemetry=telemetry,
            state=state,
            steps=config.train.steps,
            prompts_per_step=config.train.prompts_per_step,
            start=start,
        )
        try:
            train(run)
        except CheckFailed:  # raised on every rank: save the progress so far
            trainer.memory.onload_all()
            checkpoint.save()
            checkpoint.finish()
            raise
        checkpoint.finish()
    trainer.memory.onload_all()
    return trainer


def make_engine(rank: Rank) -> Engine:
    return Engine.start(
        rank.model_folder,
        rank.config.rollout,
        rank.env,
        stop_token_ids=rank.tokenizer.eos,
        dtype=DTYPES[rank.config.train.dtype],
        shapes=hf_shapes(rank.shape),
        fp32=fp32_tensors(rank.shape),
    )


def _exchange(rank: Rank, engine: Engine, span: Span = nullcontext) -> Exchange:
    env, size = rank.env, rank.config.rollout.tensor
    return Exchange(
        engine,
        make_scorer(rank.config.rewards, decode=rank.tokenizer.decode),
        replica=Axis(env.world_size // size, env.rank // size),
        member=Axis(size, env.rank % size),
        device=rank.device.torch,
        span=span,
    )


def _rollouts(rank: Rank, exchange: Exchange) -> Rollouts:
    config, algorithm = rank.config, rank.config.algorithm
    keep = partial(has_spread, mask_truncated=algorithm.truncated == "mask")
    return Rollouts(
        exchange,
        samples_per_prompt=config.rollout.samples_per_prompt,
        temperature=config.rollout.temperature,
        run_seed=config.run.seed,
        keep=keep if algorithm.filter_zero_std else None,
        max_refills=algorithm.max_refills,
        shape=Shaping(algorithm, config.rollout.max_tokens),
        greedy_baseline=algorithm.advantage == "remax",
    )


def _evaluation(rank: Rank, exchange: Exchange, *, every: int) -> Evaluation:
    config = rank.config

    def problems(size: int, task: Task) -> Callable[[], list[Prompt]]:
        return cache(lambda: make_prompts(rank, "eval", task).take(size, repeat=False))

    held_out = problems(config.eval.size, config.task)
    sets = [
        ProblemSet("accuracy", held_out, config.eval.temperature),
        ProblemSet("sampled_accuracy", held_out, config.rollout.temperature),
    ]
    for part in config.eval.sets:
        temperature = config.rollout.temperature if part.temperature is None else part.temperature
        prompts = problems(part.size, eval_task(config.task, part))
        sets.append(ProblemSet(f"{part.name}/mean@{part.samples}", prompts, temperature, part.samples))
    return Evaluation(
        exchange,
        sets if config.eval.size else sets[2:],
        run_seed=config.run.seed,
        every=every,
        last_step=config.train.steps,
        file=run_dir(config) / "eval.jsonl" if rank.env.is_main else None,
        say=print if rank.env.is_main else None,
    )


def _publisher(rank: Rank, trainer: Trainer, engine: Engine) -> Publisher:
    """Returns the publisher from this trainer to the engine, with a probe that compares them."""
    config, shape, env, bound = rank.config, rank.shape, rank.env, parity_bound(rank.config)
    weights = WeightFormat(trainer.hf_shapes(), DTYPES[config.train.dtype], fp32_tensors(shape))
    launch = config.launch.model_copy(update={"processes": env.world_size})
    fleet = fleet_of(config.model_copy(update={"launch": launch}), ranks_per_node=env.local_world_size)
    if shape.bridge:
        table, plan = (
            None,
            plan_slices(
                weights,
                trainer.slices_by_rank(),
                rank.transport.gather(list(engine.receiver.slices)),
                ranks_per_replica=fleet.ranks_per_replica,
                round_bytes=config.sync.round_bytes,
                ranks_per_node=fleet.ranks_per_node,
            ),
        )
    else:
        table = slices_of(engine_table(shape), shape, fleet.engine_layout(env.rank))
        plan = plan_of(config, shape, fleet, spec="te" if rank.device.is_cuda else "local")
    probe = Probe(
        probe_tokens(shape.vocab, length=min(16, engine.max_model_len - 1)),
        trainer=partial(score_rows, trainer),
        engine=engine.score,
        max=bound.max,
        mean=bound.mean,
        always=config.checks.probe == "always",
    )
    return Publisher(
        plan,
        WeightSender(trainer.local_slices(), trainer.parameters_by_name),
        engine.receiver,
        rank.transport,
        weights,
        ranks_per_replica=fleet.ranks_per_replica,
        table=table,
        probe=probe,
        is_atomic=config.sync.atomic,
        ranks_per_node=fleet.ranks_per_node,
    )
