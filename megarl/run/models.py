"""Reward models beside the policy's trainer, in the same layout. Their weights, gradients and optimizer state are on
the host, except while they score or are trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megarl.data.tokenizer import Tokenizer, check_vocabulary, load_tokenizer
from megarl.launch.build import OFFLOAD_ALL, Rank, make_trainer
from megarl.models.hub import model_folder
from megarl.rewards.catalog import ModelOptions
from megarl.rewards.interface import parse_options
from megarl.rewards.model import ModelReward
from megarl.rollout.engine import Engine
from megarl.trainer.heads import RewardHead, load_head
from megarl.trainer.trainer import Trainer
from megarl.types import Sample, TokenBatch


@dataclass(frozen=True)
class RewardModel:
    """A trainer with a reward head, and how its scores become rewards."""

    trainer: Trainer
    head: RewardHead
    reward: ModelReward

    @contextmanager
    def onloaded(self) -> Iterator[None]:
        self.trainer.memory.onload_all()
        yield
        self.trainer.memory.offload_all()

    def score(
        self,
        engine: Engine,
        span: Callable[[str], AbstractContextManager[Any]],
        samples: Sequence[Sample],
    ) -> list[Sample]:
        """Exchange.score; the engine sleeps meanwhile."""
        with span("reward_model"):
            engine.sleep()
            self.trainer.memory.onload_weights()
            scored = self.reward(samples)
            self.trainer.memory.offload_all()
            engine.wake("weights")
            engine.wake("kv_cache")
        return scored


def make_reward_model(rank: Rank, policy: Trainer) -> RewardModel | None:
    """None if the run has no reward `model`. Raises ValueError for a folder that is no such model."""
    config = rank.config
    if (
        reward := next((reward for reward in config.rewards if reward.name == "model"), None)
    ) is None:
        return None
    options, updates = parse_options(ModelOptions, reward), config.iterative.reward_model
    folder = rank.model_folder if options.path is None else model_folder(options.path)
    head = RewardHead() if options.path is None else load_head(folder)
    if options.path is not None:
        check_vocabulary(rank.tokenizer, load_tokenizer(folder), f"rewards: name='model': {folder}")
    if head.kind == "process" and config.stage == "iterative_grpo" and updates.train:
        raise ValueError(
            f"rewards: name='model': {folder} scores steps, but iterative_grpo trains on rankings of whole responses; "
            "set iterative.reward_model.train=false, or use a model of responses"
        )
    train: dict[str, Any] = {
        "offload": OFFLOAD_ALL,
        "lr": updates.lr,
        "min_lr": 0.0,
        "schedule": "constant",
    }
    train |= {"warmup_steps": 0, "updates_per_step": 1, "epochs_per_batch": 1}
    trainer = make_trainer(rank, head=head, folder=folder, beside=policy, **train)
    trainer.memory.offload_all()
    return RewardModel(
        trainer, head, model_reward(trainer, head, reward.weight, options.splitter, rank.tokenizer)
    )


def model_reward(
    trainer: Trainer, head: RewardHead, weight: float, splitter: Any, tokenizer: Tokenizer
) -> ModelReward:
    def score(batch: TokenBatch) -> Tensor:
        outputs = trainer.forward(batch)
        assert outputs.values_T is not None
        return outputs.values_T if head.kind == "process" else head.scores(outputs, batch)

    return ModelReward(weight, score, head.kind == "process", splitter, tokenizer.decode)
