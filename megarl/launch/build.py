"""One rank of a colocated job: the config becomes roles, the roles become a run, the run runs.

    world -> telemetry -> (engine) -> actor -> (weights between them) -> RlRun | SftRun -> train | sft -> export

Every rank does the same, in the same order: engines and process groups are made by collectives.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megarl.algorithms.objective import initial_state
from megarl.checkpoint.hf import export_hf
from megarl.checkpoint.state import Checkpoints
from megarl.config.load import run_dir
from megarl.config.schema import Algorithm, Config
from megarl.data.prompts import PromptStream
from megarl.data.supervised import Examples
from megarl.data.tasks import load_task
from megarl.data.tokenizer import Tokenizer, load_tokenizer
from megarl.launch.checks import ParityGate, parity_bound, probe_tokens, score_rows
from megarl.launch.phases import TimedPhases
from megarl.launch.recorded import RecordedActor, RecordedRewards, RecordedRollouts, RecordedWeights, Span
from megarl.layout import Axis, Layout
from megarl.models.engine import engine_slices
from megarl.models.registry import fp32_tensors, hf_shapes, read_model
from megarl.models.shape import ModelShape
from megarl.planner.weight_sync import fleet_of, plan_of
from megarl.platform.device import DTYPES, Device, pick_device
from megarl.platform.env import Env, is_interactive
from megarl.rewards.scorer import make_scorer
from megarl.rollout.engine import Engine, EngineSpec
from megarl.rollout.exchange import Exchange
from megarl.rollout.reward_shaping import Shaping
from megarl.rollout.schedule import Rollouts, has_spread
from megarl.stages.evaluation import Evaluation
from megarl.stages.rl import RlRun, train
from megarl.stages.sft import SftRun, sft
from megarl.telemetry.log import Silent, Telemetry, open_telemetry
from megarl.trainer.trainer import Actor
from megarl.types import CheckFailed, Prompt
from megarl.weights.publish import Probe, Publisher, WeightFormat, WeightSender, plan_slices
from megarl.weights.transports import Transport
from megarl.weights.transports.collective import Collective
from megarl.weights.transports.inprocess import InProcess

__all__ = ["Builder", "evaluate", "run", "run_rl", "world"]


def run(config: Config, env: Env) -> None:
    """`megarl train` on this rank, from start-up to the last file."""
    with world(config, env) as parts:
        (_run_sft if config.stage == "sft" else _run_rl)(parts)


def evaluate(config: Config, env: Env) -> None:
    """`megarl eval` on this rank: held-out problems, greedy and as rollouts are sampled."""
    with world(config, env) as parts:
        engine = parts.engine()
        parts.publisher(parts.actor(), engine).publish(version=0)
        evaluation = parts.evaluation(parts.exchange(engine, Silent().span), every=1)
        evaluation.forget(0)
        result = evaluation.run(0)
        if env.is_main:
            print(_table(result), flush=True)


def _table(result: Mapping[str, Any]) -> str:
    rows = [f"{name:<18} {value:.3f}" for name, value in result.items() if isinstance(value, float)]
    return "\n".join([f"{result['size']} fresh problems", *rows])


@dataclass(frozen=True)
class Builder:
    """What every stage needs, made once."""

    config: Config
    env: Env
    device: Device
    layout: Layout
    shape: ModelShape
    tokenizer: Tokenizer
    transport: Transport

    @classmethod
    def of(cls, config: Config, env: Env, device: Device) -> Builder:
        """torch.distributed must be initialised."""
        assert config.model.path is not None, "the launcher made the model"
        layout = Layout.of(config.parallel.sizes, env.world_size, env.rank)
        transport = Collective(timeout_s=config.launch.timeout_s) if env.world_size > 1 else InProcess()
        shape, tokenizer = read_model(config.model.path), load_tokenizer(config.model.path)
        return cls(config, env, device, layout, shape, tokenizer, transport)

    @property
    def model_folder(self) -> str:
        assert self.config.model.path is not None, "the launcher made the model"
        return self.config.model.path

    def actor(self) -> Actor:
        return Actor.build(self.config, self.shape, self.layout, folder=self.model_folder, device=self.device.torch)

    def prompts(self) -> PromptStream:
        task = self.config.task
        return PromptStream(
            load_task(task),
            self.tokenizer,
            max_tokens=self.config.rollout.max_prompt_tokens,
            template=task.template,
            seed=self.config.run.seed,
        )

    def engine(self) -> Engine:
        spec = EngineSpec.of(self.config, folder=self.model_folder, stop_token_ids=self.tokenizer.eos)
        return Engine.start(spec, self.env, shapes=hf_shapes(self.shape), fp32=fp32_tensors(self.shape))

    def exchange(self, engine: Engine, span: Span) -> Exchange:
        size = self.config.rollout.tensor
        return Exchange(
            engine,
            RecordedRewards(make_scorer(self.config.rewards, decode=self.tokenizer.decode), self.tokenizer, span),
            replica=Axis(self.env.world_size // size, self.env.rank // size),
            member=Axis(size, self.env.rank % size),
            device=self.device.torch,
        )

    def rollouts(self, exchange: Exchange) -> Rollouts:
        config, algorithm = self.config, self.config.algorithm
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

    def evaluation(self, exchange: Exchange, *, every: int) -> Evaluation:
        config = self.config

        def held_out() -> list[Prompt]:
            stream = replace(self.prompts(), source=load_task(config.task, "eval"))
            return stream.take(min(config.eval.size, stream.source.size or config.eval.size))

        return Evaluation(
            exchange,
            held_out,
            (("accuracy", config.eval.temperature), ("sampled_accuracy", config.rollout.temperature)),
            run_seed=config.run.seed,
            every=every,
            last_step=config.train.steps,
            file=run_dir(config) / "eval.jsonl" if self.env.is_main else None,
        )

    def publisher(self, actor: Actor, engine: Engine) -> Publisher:
        """From this actor into the engine, with a probe of both."""
        config, env, bound = self.config, self.env, parity_bound(self.config)
        weights = WeightFormat(actor.hf_shapes(), DTYPES[config.train.dtype], fp32_tensors(self.shape))
        world = config.launch.model_copy(update={"processes": env.world_size})
        fleet = fleet_of(config.model_copy(update={"launch": world}), ranks_per_node=env.local_world_size)
        if self.shape.bridge:
            table, plan = (
                None,
                plan_slices(
                    weights,
                    actor.slices_by_rank(),
                    self.transport.gather(list(engine.receiver.slices)),
                    ranks_per_replica=fleet.ranks_per_replica,
                    round_bytes=config.sync.round_bytes,
                    ranks_per_node=fleet.ranks_per_node,
                ),
            )
        else:
            table = engine_slices(self.shape, fleet.engine_layout(env.rank))
            plan = plan_of(config, self.shape, fleet, style="te" if self.device.is_cuda else "local")
        probe = Probe(
            probe_tokens(self.shape.vocab, length=min(16, engine.max_model_len - 1)),
            trainer=lambda tokens_NL: score_rows(actor, tokens_NL),
            engine=engine.score,
            max=bound.max,
            mean=bound.mean,
            always=config.checks.probe == "always",
        )
        return Publisher.connect(
            plan,
            WeightSender(actor.local_slices(), actor.parameters_by_name),
            engine.receiver,
            self.transport,
            weights,
            ranks_per_replica=fleet.ranks_per_replica,
            table=table,
            probe=probe,
            is_atomic=config.sync.atomic,
            ranks_per_node=fleet.ranks_per_node,
        )

    @contextmanager
    def telemetry(self, start: int) -> Iterator[Telemetry | Silent]:
        opened = open_telemetry(
            run_dir(self.config),
            rank=self.env.rank,
            steps=self.config.train.steps,
            start=start,
            interactive=is_interactive(),
            facts={"world_size": self.env.world_size, "layout": str(self.layout)},
        )
        try:
            yield opened
        finally:
            opened.close()

    def checkpoints(self, actor: Actor, prompts: PromptStream) -> Checkpoints:
        config = self.config
        return Checkpoints(
            run_dir(config) / "checkpoints",
            actor,
            prompts,
            initial_state(config.algorithm),
            every=config.checkpoint.every,
            keep=config.checkpoint.keep,
            last_step=config.train.steps,
            asynchronous=config.checkpoint.asynchronous,
        )

    def export(self, actor: Actor) -> None:
        """The trained weights as runs/<name>/hf, when asked for."""
        if self.config.checkpoint.export_hf == "never":
            return
        export_hf(
            run_dir(self.config) / "hf",
            origin=Path(self.model_folder),
            shapes=actor.hf_shapes(),
            sources=actor.slices_by_rank(),
            parameters=actor.parameters_by_name,
            transport=self.transport,
            dtype=DTYPES[self.config.train.dtype],
            fp32=fp32_tensors(self.shape),
        )


@contextmanager
def world(config: Config, env: Env) -> Iterator[Builder]:
    """torch.distributed up, and down again when all went well: after a failure peers may be gone."""
    device = pick_device(env.local_rank)
    _init_process_group(config, env, device)
    yield Builder.of(config, env, device)
    dist.destroy_process_group()


def _init_process_group(config: Config, env: Env, device: Device) -> None:
    timeout = timedelta(seconds=config.launch.timeout_s)
    backend = "cpu:gloo,cuda:nccl" if device.is_cuda else "gloo"
    if env.has_launcher:
        dist.init_process_group(backend, timeout=timeout)
    else:
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)


def _run_sft(parts: Builder) -> None:
    # the loss is fixed by the stage; whatever the algorithm section says is about RL
    algorithm = Algorithm(advantage="none", loss="sft", aggregation="token-mean", correction="none")
    parts = replace(parts, config=parts.config.model_copy(update={"algorithm": algorithm}))
    actor, prompts = parts.actor(), parts.prompts()
    checkpoint = parts.checkpoints(actor, prompts)
    start, state = checkpoint.restore(parts.config.checkpoint.resume)
    with parts.telemetry(start) as telemetry:
        sft(
            SftRun(
                config=parts.config,
                layout=parts.layout,
                prompts=prompts,
                examples=Examples(parts.tokenizer),
                actor=RecordedActor(actor, telemetry.record, telemetry.span),
                phases=TimedPhases(telemetry.span, telemetry.record, parts.device.torch, actor.memory),
                checkpoint=checkpoint,
                telemetry=telemetry,
                state=state,
                start=start,
            )
        )
        checkpoint.finish()
    parts.export(actor)


def _run_rl(parts: Builder) -> None:
    parts.export(run_rl(parts, parts.engine()))


def run_rl(parts: Builder, engine: Engine) -> Actor:
    """The loop from start, or from a checkpoint, to the last step; the trained actor."""
    config = parts.config
    actor, prompts = parts.actor(), parts.prompts()
    checkpoint = parts.checkpoints(actor, prompts)
    start, state = checkpoint.restore(config.checkpoint.resume)
    with parts.telemetry(start) as telemetry:
        exchange = parts.exchange(engine, telemetry.span)
        evaluation = parts.evaluation(exchange, every=config.eval.every)
        evaluation.forget(start)
        run = RlRun(
            config=config,
            layout=parts.layout,
            prompts=prompts,
            rollouts=RecordedRollouts(parts.rollouts(exchange), telemetry.record),
            actor=RecordedActor(actor, telemetry.record, telemetry.span),
            weights=RecordedWeights(parts.publisher(actor, engine), telemetry.record),
            evaluation=evaluation,
            checks=ParityGate(parity_bound(config), parts.shape.is_moe, telemetry.record),
            phases=TimedPhases(telemetry.span, telemetry.record, parts.device.torch, actor.memory, engine),
            checkpoint=checkpoint,
            telemetry=telemetry,
            state=state,
            start=start,
        )
        try:
            train(run)
        except CheckFailed:  # raised on every rank alike: what was learnt so far is kept
            actor.memory.wake_all()
            checkpoint.save()
            checkpoint.finish()
            raise
        checkpoint.finish()
    actor.memory.wake_all()
    return actor
