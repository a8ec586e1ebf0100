"""Runs the stages rl, best_of_n and iterative_dpo on one rank; and `megarl eval` and `megarl check --parity | --sync`.

engine, trainer --> publisher between them, exchange of samples, learner --> RlRun --> train --> export
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch.distributed as dist

from megarl.algorithms.objective import Objective
from megarl.algorithms.parity import Quantiles
from megarl.algorithms.preference import DpoObjective, best_and_worst
from megarl.checkpoint.state import Further
from megarl.config.load import changed, run_dir
from megarl.config.schema import Rollout, Task
from megarl.data.collate import collate
from megarl.data.tasks import eval_task
from megarl.data.tokenizer import stop_token_ids
from megarl.debug.parity_cause import CauseSearch
from megarl.launch.adapters import adapter_publisher, engine_adapters
from megarl.launch.build import (
    Rank,
    check_weights,
    export,
    make_checkpoints,
    make_evaluation,
    make_learner,
    make_objective,
    make_prompts,
    make_quantizer,
    make_trainer,
    rank_telemetry,
    saved,
)
from megarl.launch.parity import (
    CAUSE_ROWS,
    ParityChecks,
    make_checks,
    measure_logprobs,
    rounding_of,
    sampled_rows,
    through_fp8,
)
from megarl.launch.phases import TimedPhases
from megarl.launch.reward_models import RewardModel, make_reward_model
from megarl.layout import Axis
from megarl.models.registry import fp32_tensors, hf_shapes
from megarl.planner.weight_sync import fleet_of, rollout_format
from megarl.platform.device import DTYPES, device_bytes, peak_gb
from megarl.rewards.scorer import make_scorer
from megarl.roles import Telemetry
from megarl.rollout.engine import Engine
from megarl.rollout.exchange import Exchange
from megarl.rollout.publisher import make_publisher
from megarl.rollout.reward_shaping import Shaping
from megarl.rollout.schedule import Generate, Rollouts, has_spread
from megarl.stages.evaluation import Evaluation, ProblemSet, sampled
from megarl.stages.rl import RlRun, train
from megarl.telemetry.ledger import LEDGER, Ledger
from megarl.trainer.actor_critic import ActorCritic
from megarl.trainer.learner import PolicyLearner, SelectingLearner, SelectRows
from megarl.trainer.trainer import Trainer
from megarl.types import CheckFailed, ObjectiveState, Prompt, PublishReport, Terminated, TrainBatch
from megarl.weights.publish import Probe, Publisher, WeightFormat, WeightSender

PARITY_PROMPTS = 8
ROLLOUT_PATIENCE = 12  # times launch.timeout_s: how long a replica may be behind the others
LAST_STEPS = 50  # of a replica's ranks, after SIGTERM
Learner = PolicyLearner | ActorCritic
Span = Callable[[str], AbstractContextManager[None]]


def run_rl(rank: Rank) -> None:
    export(rank, train_policy(rank, make_engine))


def run_best_of_n(rank: Rank) -> None:
    """Trains by SFT on the best sample of each prompt (RAFT)."""
    config = rank.config
    algorithm = config.algorithm.model_copy(
        update={"loss": "sft", "correction": "none", "correction_options": {}}
    )
    objective = Objective(algorithm, config.rollout.max_tokens)
    export(
        rank, train_policy(rank, make_engine, objective, lambda batch: best_and_worst(batch)[::2])
    )


def run_iterative_dpo(rank: Rank) -> None:
    """Trains by DPO on the best and the worst sample of each prompt."""
    config = rank.config
    objective = DpoObjective(config.algorithm, config.rollout.max_tokens, options=config.dpo)
    export(rank, train_policy(rank, make_engine, objective, best_and_worst))


def run_eval(rank: Rank) -> None:
    """Runs `megarl eval` on this rank: held-out problems, sampled greedily and at the rollout temperature."""
    trainer, engine, *_ = _synced(rank)
    evaluation_of(
        rank, _exchange(rank, engine, reward_model=make_reward_model(rank, trainer)), 0
    ).run(0)


def run_sync(rank: Rank) -> None:
    """Runs `megarl check --sync` on this rank: one weight sync, verified as the first of a run."""
    *_, parity, report = _synced(rank)
    worst = max(parity.probe()[1], key=lambda excess: excess.statistic)
    if rank.env.is_main:
        kept, received = report.bytes_kept / 1e6, report.bytes_received / 1e6
        print(f"{report.num_tensors} tensors verified: checksums, places, names and log-probs")
        print(
            f"{kept:.1f} MB kept by {rank.env.world_size} ranks, {received:.1f} MB of them received from others"
        )
        print(worst, flush=True)


def run_parity(rank: Rank) -> None:
    """Runs `megarl check --parity` on this rank. Raises CheckFailed if rounding does not explain the differences."""
    # the verdict is given here
    rank = replace(rank, config=changed(rank.config, "checks", max_logprob_diff=math.inf))
    trainer, engine, parity, _ = _synced(rank)
    batch = parity_batch(rank, engine)
    measured = parity.measure(batch)
    found = Quantiles.of(measured.logprobs_K - batch.rollout_logprobs[batch.mask])
    excess = parity.excess(found, measured.floor, prompts=batch.prompt_id.unique().numel())
    if rank.env.is_main:
        print(
            f"{found.count} sampled tokens, {rank.config.train.dtype}; |trainer - engine| in nats"
        )
        print(f"measured   {found}")
        print(f"floor      {measured.floor}")
        print(
            f"statistic  {excess.statistic:.3g}, at most {excess.limit:.3g} from rounding",
            flush=True,
        )
    if batch.routes:
        own = Quantiles.of(
            (trainer.logprobs(replace(batch, routes=())) - batch.rollout_logprobs)[batch.mask]
        )
        trainer.logprobs(batch)
        share = trainer.router_replay.metrics()["routing/differs"]
        if rank.env.is_main:
            print(
                f"routing    {share:.2%} of (token, layer) pairs differ; the engine's routes are replayed"
            )
            print(f"           without replay {own}", flush=True)
    if not excess.is_explained:
        assert parity.find
        few = sampled_rows(batch, CAUSE_ROWS)
        cause = parity.find(few, parity.measure(few).floor, few.rollout_logprobs)
        raise CheckFailed(
            f"trainer and engine differ by more than rounding explains; {excess}; cause: {cause or 'not found'}"
        )


def parity_batch(rank: Rank, engine: Engine) -> TrainBatch:
    """A few prompts, sampled as in a run and not scored."""
    exchange = replace(_exchange(rank, engine), rewards=make_scorer(()))
    rollout = replace(make_rollouts(rank, exchange), keep=None).collect(
        make_prompts(rank), PARITY_PROMPTS, version=0
    )
    return collate(rollout.groups, temperature=rank.config.rollout.temperature)


def _synced(rank: Rank) -> tuple[Trainer, Engine, ParityChecks, PublishReport]:
    """For commands that do not train: after a weight sync. The trainer keeps only its weights on the device."""
    trainer = make_trainer(rank)
    check_weights(rank, trainer)
    trainer.memory.offload_all()
    engine = make_engine(rank)
    trainer.memory.onload_weights()
    parity = parity_checks(rank, trainer, engine)
    return trainer, engine, parity, publisher(rank, trainer, engine, parity).publish(version=0)


def train_policy(
    rank: Rank,
    start_engine: Callable[[Rank], Engine],
    objective: Objective | None = None,  # None: the section `algorithm`
    select: SelectRows | None = None,  # the samples of a prompt to train on; None: all of them
    *,
    loop: Callable[[RlRun], None] = train,
    beside: Callable[[Learner, RewardModel | None], Further] = lambda learner, reward_model: (
        Further()
    ),
) -> Trainer:
    """Runs the loop from the start or from a checkpoint, which also saves what `beside` returns; returns the policy.

    The trainer is offloaded before the engine starts, and the engine sleeps until the first sync: at no time do both
    keep on the device what they do not need together.
    """
    config = rank.config
    trainer, ledger = make_trainer(rank), Ledger(make_prompts(rank))
    objective = objective or make_objective(config)
    learner = make_learner(rank, trainer, objective)  # its reference is the model before any step
    reward_model = make_reward_model(rank, trainer)
    further = beside(learner, reward_model)
    checkpoint = make_checkpoints(
        rank, trainer, ledger, objective.initial_state(), learner, further
    )
    start, state = checkpoint.restore(config.checkpoint.resume)
    for trained in learner.trainers:
        check_weights(rank, trained)
        trained.memory.offload_all()
    engine = start_engine(rank)
    engine.sleep()
    with rank_telemetry(rank, start) as telemetry:
        telemetry.add({"memory/startup/peak_gb": peak_gb(rank.device)})
        phases = TimedPhases(
            telemetry.span, telemetry.add, rank.device, learner.trainers, engine, rank.phase
        )
        exchange = _exchange(rank, engine, phases.part, reward_model)
        parity = parity_checks(rank, trainer, engine)
        weights = publisher(rank, trainer, engine, parity)
        weights.span = phases.part
        timed = learner.timed(phases.part)
        run = make_run(
            rank,
            exchange,
            ledger,
            telemetry,
            (start, state),
            rollouts=make_rollouts(rank, exchange, ledger),
            learner=timed if select is None else SelectingLearner(timed, select),
            objective=objective,
            weights=weights,
            checks=parity,
            phases=phases,
            checkpoint=checkpoint,
        )
        with saved(learner.trainers, checkpoint, engine.sleep):
            loop(run)
    trainer.memory.onload_all()
    return trainer


def make_run(
    rank: Rank,
    generate: Generate,
    ledger: Ledger,
    telemetry: Telemetry,
    begun: tuple[int, ObjectiveState],
    **roles: Any,
) -> RlRun:
    """`begun`: the steps done and the objective's state; `roles`: the other parts of the run."""
    config, (start, state) = rank.config, begun
    if rank.env.is_main:
        ledger.open(
            run_dir(config) / LEDGER, step=start, max_staleness=config.rollout.max_staleness
        )
    is_masked = config.algorithm.truncated == "mask"
    return RlRun(
        prompts=ledger,
        collate=partial(collate, temperature=config.rollout.temperature, mask_truncated=is_masked),
        evaluation=evaluation_of(rank, generate, start, evaluated=telemetry.evaluated),
        telemetry=telemetry,
        state=state,
        steps=config.train.steps,
        prompts_per_step=config.train.prompts_per_step,
        start=start,
        **roles,
    )


def _engine_share(rank: Rank) -> Rollout:
    """On a GPU, the engine gets what is left of its share beside the trainer's part that is not offloaded."""
    rollout, memory = rank.config.rollout, device_bytes(rank.device)
    if memory is None:
        return rollout
    used, share = max(rank.transport.gather(memory[1] - memory[0])), rollout.gpu_memory_utilization
    weights = (
        sum(map(math.prod, hf_shapes(rank.shape).values()))
        * DTYPES[rank.config.train.dtype].itemsize
    )
    if (left := share * memory[1] - used) <= (needed := weights / rollout.tensor):
        raise ValueError(
            f"rollout.gpu_memory_utilization={share:g} of {memory[1] / 1e9:.1f} GB, less {used / 1e9:.1f} that "
            f"train.offload={list(rank.config.train.offload)} leaves in use, has no room for vLLM's weights of "
            f"{needed / 1e9:.1f}; offload more, or raise it or rollout.tensor"
        )
    return rollout.model_copy(update={"gpu_memory_utilization": left / memory[1]})


def make_engine(rank: Rank) -> Engine:
    engine = Engine.start(
        rank.model_folder,
        _engine_share(rank),
        rank.env,
        stop_token_ids=stop_token_ids(rank.tokenizer, rank.config.rollout.stop),
        weights=WeightFormat(
            hf_shapes(rank.shape), DTYPES[rank.config.train.dtype], fp32_tensors(rank.shape)
        ),
        fp8=rollout_format(rank.config, rank.shape),
        trust_remote_code=rank.config.model.trust_remote_code,
        adapters=engine_adapters(rank),
    )
    engine.before_steps(partial(_before_engine_step, rank))
    return engine


def _before_engine_step(rank: Rank) -> None:
    """Counts engine steps. After SIGTERM, gives the rollout up, which a resumed run repeats: on all ranks of a replica
    before the same step. The first to know chooses a later one, by which the others have received the signal too."""
    phase, size = rank.phase, rank.config.rollout.tensor
    phase.engine_steps += 1
    if phase.is_stopping and phase.name == "rollout":
        store: Any = dist.distributed_c10d._get_default_store()
        last = str(phase.engine_steps + LAST_STEPS * (size > 1))
        if phase.engine_steps >= int(
            store.compare_set(f"megarl/stop/{rank.env.rank // size}", "", last)
        ):
            raise Terminated("stopped by SIGTERM")


def _exchange(
    rank: Rank, engine: Engine, span: Span = nullcontext, reward_model: RewardModel | None = None
) -> Exchange:
    env, size = rank.env, rank.config.rollout.tensor
    model = {} if reward_model is None else {"score": partial(reward_model.score, engine, span)}
    return Exchange(
        engine,
        make_scorer(
            rank.config.rewards, decode=rank.tokenizer.decode, answer=rank.config.task.answer
        ),
        replica=Axis(env.world_size // size, env.rank // size),
        member=Axis(size, env.rank % size),
        span=span,
        is_stopping=lambda: rank.phase.is_stopping,
        meet=partial(rank.transport.barrier, "the exchange of samples", patience=ROLLOUT_PATIENCE),
        **model,
    )


def make_rollouts(
    rank: Rank, generate: Generate, ledger: Ledger | None = None, **ahead: Any
) -> Rollouts:
    config, algorithm = rank.config, rank.config.algorithm
    keep = partial(has_spread, mask_truncated=algorithm.truncated == "mask")
    return Rollouts(
        generate,
        samples_per_prompt=config.rollout.samples_per_prompt,
        temperature=config.rollout.temperature,
        run_seed=config.run.seed,
        keep=keep if algorithm.filter_zero_std else None,
        max_refills=algorithm.max_refills,
        shape=Shaping(algorithm, config.rollout.max_tokens),
        greedy_baseline=algorithm.advantage == "remax",
        ledger=ledger,
        **ahead,
    )


def evaluation_of(rank: Rank, generate: Generate, start: int, **outputs: Any) -> Evaluation:
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
        sets.append(
            ProblemSet(f"{part.name}/mean@{part.samples}", prompts, temperature, part.samples)
        )
    measures = [
        partial(sampled, generate, config.run.seed, part)
        for part in (sets if config.eval.size else sets[2:])
    ]
    return make_evaluation(rank, measures, start, **outputs)


def parity_checks(rank: Rank, trainer: Trainer, engine: Engine) -> ParityChecks:
    quantizer = make_quantizer(rank, trainer)
    search = CauseSearch(
        trainer, engine, rank.transport, rounding_of(trainer, is_fp8=quantizer is not None)
    )

    def find(*args: Any) -> str | None:
        with through_fp8(trainer, quantizer):
            return search.find(*args)

    return make_checks(
        rank,
        partial(measure_logprobs, trainer, quantizer=quantizer),
        [engine],
        version=lambda: engine.receiver.version,
        replays=rank.config.rollout.router_replay == "engine",
        find=find,
    )


def publisher(rank: Rank, trainer: Trainer, engine: Engine, probe: Probe) -> Publisher:
    """Returns the publisher from this trainer to the engine."""
    config, shape, env = rank.config, rank.shape, rank.env
    weights = WeightFormat(trainer.hf_shapes(), DTYPES[config.train.dtype], fp32_tensors(shape))
    fleet = fleet_of(
        changed(config, "launch", processes=env.world_size), ranks_per_node=env.local_world_size
    )
    make = partial(
        make_publisher,
        config,
        shape,
        fleet,
        rank.transport,
        is_cuda=rank.device.type == "cuda",
        weights=weights,
    )
    receiver: Any = engine.receiver
    if engine_adapters(rank) is not None:
        base = WeightSender(trainer.local_slices(), trainer.parameters_by_name)
        return adapter_publisher(
            rank, trainer, make(base, receiver.base), receiver, fleet.ranks_per_node, probe
        )
    sender = WeightSender(trainer.local_slices(), trainer.merged_parameters)
    if quantizer := make_quantizer(rank, trainer):
        sender = quantizer.sender(trainer.parameters_by_name)
    return make(sender, receiver, probe=probe)
