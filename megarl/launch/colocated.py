"""One rank of a colocated job: the config becomes roles, the roles become a run, the run runs.

    world -> telemetry -> (engine) -> actor -> (weights between them) -> RlRun | SftRun -> train | sft -> export

Every rank does the same, in the same order: engines and process groups are made by collectives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megarl.actor.actor import DTYPES, Actor
from megarl.algorithms.objective import initial_state
from megarl.checkpoint.hf import export_hf
from megarl.checkpoint.state import Checkpoints
from megarl.config.load import run_dir
from megarl.config.model import ModelShape, read_model
from megarl.config.schema import Algorithm, Config
from megarl.data.prompts import PromptStream
from megarl.data.supervised import Examples
from megarl.data.tasks import load_task
from megarl.data.tokenizer import Tokenizer, load_tokenizer
from megarl.eval import Evaluation
from megarl.launch.checks import ParityGate, parity_bound
from megarl.launch.phases import TimedPhases
from megarl.layout import Axis, Layout
from megarl.platform.device import Device, pick_device
from megarl.platform.env import Env, is_interactive
from megarl.rewards.scorer import make_scorer
from megarl.roles import Prompts, Rewards
from megarl.rollout.engine import Engine, EngineSpec
from megarl.rollout.exchange import Exchange
from megarl.rollout.schedule import Rollouts, digest, has_spread
from megarl.sft import SftRun, sft
from megarl.telemetry.log import Silent, Telemetry, open_telemetry
from megarl.telemetry.metrics import publish_metrics
from megarl.train import RlRun, train
from megarl.types import CheckFailed, Group, Prompt, PublishReport, Sample, TrainBatch
from megarl.weights.models import hf_shapes
from megarl.weights.publish import Probe, Publisher
from megarl.weights.transports import Transport
from megarl.weights.transports.collective import Collective
from megarl.weights.transports.inprocess import InProcess

__all__ = ["evaluate", "run"]

Record = Callable[[Mapping[str, Any]], None]


def run(config: Config, env: Env) -> None:
    """`megarl train` on this rank, from start-up to the last file."""
    with _world(config, env) as parts:
        (_run_sft if config.stage == "sft" else _run_rl)(parts)


def evaluate(config: Config, env: Env) -> None:
    """`megarl eval` on this rank: held-out problems, greedy and as rollouts are sampled."""
    with _world(config, env) as parts:
        sampling = _Sampling.start(parts)
        actor = parts.actor()
        sampling.connect(parts, actor).publish(version=0)
        result = sampling.evaluation(parts, every=1).run(0)
        if env.is_main:
            print(_table(result), flush=True)


def _table(result: Mapping[str, Any]) -> str:
    rows = [f"{name:<18} {value:.3f}" for name, value in result.items() if isinstance(value, float)]
    return "\n".join([f"{result['size']} fresh problems", *rows])


@dataclass(frozen=True)
class _Parts:
    """What every stage needs, made once."""

    config: Config
    env: Env
    device: Device
    layout: Layout
    shape: ModelShape
    tokenizer: Tokenizer
    transport: Transport

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
        )

    def export(self, actor: Actor) -> None:
        """The trained weights as runs/<name>/hf, when asked for."""
        if not self.config.checkpoint.hf:
            return
        export_hf(
            run_dir(self.config) / "hf",
            origin=Path(self.model_folder),
            shapes=hf_shapes(self.shape),
            sources=actor.boxes_of_ranks(),
            parameters=actor.parameters_by_name,
            transport=self.transport,
            dtype=DTYPES[self.config.train.dtype],
        )


@contextmanager
def _world(config: Config, env: Env) -> Iterator[_Parts]:
    """torch.distributed up, and down again when all went well: after a failure peers may be gone."""
    device = pick_device(env.local_rank)
    _init_process_group(config, env, device)
    layout = Layout.of(config.parallel.sizes, env.world_size, env.rank)
    assert config.model.path is not None, "the launcher made the model"
    transport = Collective() if env.world_size > 1 else InProcess()
    shape, tokenizer = read_model(config.model.path), load_tokenizer(config.model.path)
    yield _Parts(config, env, device, layout, shape, tokenizer, transport)
    dist.destroy_process_group()


def _init_process_group(config: Config, env: Env, device: Device) -> None:
    timeout = timedelta(seconds=config.launch.timeout_s)
    backend = "cpu:gloo,cuda:nccl" if device.is_cuda else "gloo"
    if env.in_torchrun:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)


def _run_sft(parts: _Parts) -> None:
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
                actor=actor,
                phases=TimedPhases(telemetry.span),
                checkpoint=checkpoint,
                telemetry=telemetry,
                state=state,
                start=start,
            )
        )
    parts.export(actor)


def _run_rl(parts: _Parts) -> None:
    config = parts.config
    sampling = _Sampling.start(parts)
    actor, prompts = parts.actor(), parts.prompts()
    checkpoint = parts.checkpoints(actor, prompts)
    start, state = checkpoint.restore(config.checkpoint.resume)
    with parts.telemetry(start) as telemetry:
        run = RlRun(
            config=config,
            layout=parts.layout,
            prompts=prompts,
            rollouts=sampling.rollouts(parts, telemetry.record),
            actor=actor,
            weights=_Recorded(sampling.connect(parts, actor), telemetry.record),
            evaluation=sampling.evaluation(parts, every=config.eval.every),
            checks=ParityGate(parity_bound(config), parts.shape.is_moe, telemetry.record),
            phases=TimedPhases(telemetry.span),
            checkpoint=checkpoint,
            telemetry=telemetry,
            state=state,
            start=start,
        )
        try:
            train(run)
        except CheckFailed:  # raised on every rank alike: what was learnt so far is kept
            checkpoint.save()
            raise
    parts.export(actor)


@dataclass(frozen=True)
class _Sampling:
    """The engine and what is built around it."""

    engine: Engine
    exchange: Exchange

    @classmethod
    def start(cls, parts: _Parts) -> _Sampling:
        config = parts.config
        spec = EngineSpec.of(config, folder=parts.model_folder, stop_token_ids=parts.tokenizer.eos)
        engine = Engine.start(spec, parts.env, shapes=hf_shapes(parts.shape))
        size = config.rollout.tensor
        exchange = Exchange(
            engine,
            _Decoded(make_scorer(config.rewards), parts.tokenizer),
            replica=Axis(parts.env.world_size // size, parts.env.rank // size),
            member=Axis(size, parts.env.rank % size),
            device=parts.device.torch,
        )
        return cls(engine, exchange)

    def connect(self, parts: _Parts, actor: Actor) -> Publisher:
        """The publisher from this actor into the engine, with its probe."""
        config, bound = parts.config, parity_bound(parts.config)
        probe = Probe(
            probe_tokens(parts.shape),
            trainer=lambda tokens_NL: score_rows(actor, tokens_NL),
            engine=self.engine.score,
            max=bound.max,
            mean=bound.mean,
            always=config.checks.probe == "always",
        )
        return Publisher.connect(
            sources=actor.boxes_of_ranks(),
            expected=hf_shapes(parts.shape),
            parameters=actor.parameters_by_name,
            receiver=self.engine.receiver,
            replica_ranks=config.rollout.tensor,
            transport=parts.transport,
            dtype=DTYPES[config.train.dtype],
            probe=probe,
        )

    def rollouts(self, parts: _Parts, record: Record) -> _Collected:
        config = parts.config
        rollouts = Rollouts(
            self.exchange,
            samples_per_prompt=config.rollout.samples_per_prompt,
            temperature=config.rollout.temperature,
            run_seed=config.run.seed,
            keep=has_spread if config.algorithm.filter_zero_std else None,
        )
        return _Collected(rollouts, record)

    def evaluation(self, parts: _Parts, *, every: int) -> Evaluation:
        config = parts.config

        def held_out() -> list[Any]:
            stream = replace(parts.prompts(), source=load_task(config.task, "eval"))
            return stream.take(min(config.eval.size, stream.source.size or config.eval.size))

        return Evaluation(
            self.exchange,
            held_out,
            (("accuracy", config.eval.temperature), ("sampled_accuracy", config.rollout.temperature)),
            run_seed=config.run.seed,
            every=every,
            last_step=config.train.steps,
            file=run_dir(config) / "eval.jsonl" if parts.env.is_main else None,
        )


@dataclass(frozen=True)
class _Decoded:
    """roles.Rewards that makes the text first: the engine speaks token ids only."""

    rewards: Rewards
    tokenizer: Tokenizer

    def score(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> list[Sample]:
        decode = self.tokenizer.decode
        texts = [decode(sample.tokens[sample.trainable].tolist()) for sample in samples]
        return self.rewards.score(prompts, [replace(s, text=text) for s, text in zip(samples, texts, strict=True)])


@dataclass(frozen=True)
class _Recorded:
    """roles.Weights that also tells telemetry."""

    publisher: Publisher
    record: Record

    def publish(self, *, version: int) -> PublishReport:
        report = self.publisher.publish(version=version)
        self.record(publish_metrics(report))
        return report


@dataclass(frozen=True)
class _Collected:
    """roles.Rollouts that also tells telemetry what was sampled and what was left out."""

    rollouts: Rollouts
    record: Record

    def collect(self, prompts: Prompts, count: int, *, version: int) -> list[Group]:
        groups = self.rollouts.collect(prompts, count, version=version)
        counts: Counter[str] = self.rollouts.counts
        self.record({"rollout/digest": digest(groups), **counts})
        return groups


def probe_tokens(shape: ModelShape, *, rows: int = 4, length: int = 16) -> torch.Tensor:
    """[rows, length] token ids, fixed, from the whole vocabulary."""
    generator = torch.Generator().manual_seed(20)
    length = min(length, shape.max_position)
    return torch.randint(shape.vocab, (rows, length), generator=generator)


def score_rows(actor: Actor, tokens_NL: torch.Tensor) -> torch.Tensor:
    """[N, L - 1] fp32: the trainer's log-probs of tokens[:, 1:] at temperature 1, on every rank."""
    num_rows, length = tokens_NL.shape
    labels_NL = tokens_NL.roll(-1, dims=1)
    mask_NL = torch.ones_like(tokens_NL, dtype=torch.bool)
    mask_NL[:, -1] = False
    zeros_T, zeros_N = torch.zeros(num_rows * length), torch.zeros(num_rows)
    batch = TrainBatch(
        tokens=tokens_NL.flatten(),
        labels=labels_NL.flatten(),
        mask=mask_NL.flatten(),
        rollout_logprobs=zeros_T,
        token_rewards=zeros_T,
        step_ends=zeros_T.bool(),
        cu_seqlens=torch.arange(num_rows + 1) * length,
        rewards=zeros_N,
        baseline=zeros_N,
        group=torch.arange(num_rows),
        prompt_id=torch.arange(num_rows),
        finish=zeros_N.long(),
        versions=torch.zeros(num_rows, 2, dtype=torch.int64),
        temperature=1.0,
    )
    return actor.logprobs(batch).old.view(num_rows, length)[:, :-1]
