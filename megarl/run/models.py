"""Builds the models of a rank: policy, critic, frozen models (reference, teacher), reward models.

All have the parallel layout of the policy's trainer and share its process groups. Frozen models and
reward models are offloaded to the host, except while they compute scores or are trained.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megarl.algorithms.objective import Objective
from megarl.config.schema import Config, FrozenModel, Train
from megarl.data.tokenizer import Tokenizer, check_vocabulary, load_tokenizer
from megarl.layout import Layout
from megarl.models.hub import model_folder
from megarl.models.registry import read_model
from megarl.rewards.catalog import ModelOptions
from megarl.rewards.interface import parse_options
from megarl.rewards.model import ModelReward
from megarl.rewards.served_model import ServedModel, client_of
from megarl.roles import SpanContext
from megarl.rollout.vllm.engine import Engine
from megarl.run.context import RankContext
from megarl.trainer.actor_critic import ActorCritic, CriticHead, Learner
from megarl.trainer.heads import Head, RewardHead, ValueHead, load_head
from megarl.trainer.learner import PolicyLearner
from megarl.trainer.reference import forward_in_turn
from megarl.trainer.trainer import Trainer
from megarl.types import CheckFailed, Sample, TokenBatch, TokenOutputs
from megarl.weights.plan.plan import first_few

OFFLOAD_ALL = ("gradients", "optimizer", "weights")  # a value of train.offload


def make_trainer(
    rank: RankContext,
    layout: Layout | None = None,
    *,
    head: Head | None = None,
    folder: Path | None = None,
    share_groups_with: Trainer | None = None,
    train: Train | None = None,
) -> Trainer:
    """Builds the policy's trainer, or a trainer for another model.

    `folder`, `head` and `train` replace the configured model, its vocabulary head and the section
    `train`. With `share_groups_with`, the new trainer shares the process groups of that trainer.
    """
    config = rank.config
    shape = read_model(folder) if folder is not None else rank.shape
    lora = None
    if head is None and share_groups_with is None:
        lora = config.lora  # only the policy has adapters
    options = dict(config.trainer.megatron_options)
    if config.rollout.router_replay != "none":
        options["moe_router_fusion"] = False
    return Trainer.build(
        shape,
        layout or rank.layout,
        train=train or config.train,
        moe=config.moe,
        head=head,
        lora=lora,
        precision=config.precision,
        folder=folder or rank.model_folder,
        device=rank.device,
        seed=config.run.seed,
        megatron_options=options,
        share_groups_with=share_groups_with,
    )


def check_weights(rank: RankContext, trainer: Trainer) -> None:
    """Raises CheckFailed, on every rank, if a weight is not finite.

    Without this check, the first comparison of log-probs would blame the engine.
    """
    parameters = trainer.parameters_by_name().items()
    wrong = [name for name, tensor in parameters if not torch.isfinite(tensor.sum())]
    names = sorted(set().union(*rank.transport.gather(wrong)))
    if names:
        raise CheckFailed(
            f"the trainer's weights are not finite: NaN or infinity in {first_few(names, 3)}, as "
            f"loaded from {rank.model_folder} or a checkpoint; use an undamaged copy"
        )


def make_objective(config: Config) -> Objective:
    return Objective(
        config.algorithm,
        config.rollout.max_tokens,
        config.critic.lam,
        config.critic.bootstrap_truncated,
    )


def make_learner(rank: RankContext, trainer: Trainer, objective: Objective) -> Learner:
    """Builds the learner: the policy, its frozen models, and a critic if the objective needs one.

    The reference policy is a copy of the trainer's current weights, unless the config names another
    model.
    """
    config = rank.config
    critic = config.critic
    frozen = {}
    if config.reference is not None:
        frozen["ref_logprobs"] = frozen_model(rank, config.reference, "reference", trainer)
    if config.teacher is not None:
        frozen["teacher_logprobs"] = frozen_model(rank, config.teacher, "teacher", trainer)
    learner = PolicyLearner(
        trainer,
        objective,
        seed=config.run.seed,
        frozen=frozen,
        records_choices=config.rollout.router_replay == "trainer",
    )
    if not objective.algorithm.needs_critic:
        return learner
    folder = model_folder(critic.model) if critic.model is not None else None
    head = CriticHead() if critic.bootstrap_truncated else ValueHead()
    train = config.train.model_copy(update={"lr": critic.lr, "min_lr": critic.min_lr})
    return ActorCritic(
        learner,
        make_trainer(rank, head=head, folder=folder, share_groups_with=trainer, train=train),
        critic,
    )


def frozen_model(
    rank: RankContext, part: FrozenModel, key: str, trainer: Trainer
) -> Callable[[TokenBatch], TokenOutputs]:
    """Returns a function that computes a batch's outputs with a frozen model.

    `part` is the config section `key` ("reference" or "teacher"). Its model is loaded here, or is
    served by another process. Raises ValueError if a loaded model's vocabulary differs from the
    policy's.
    """
    top_k = rank.config.algorithm.distill_top_k if key == "teacher" else 0
    if part.model is None:
        return ServedModel(client_of(part, key), part.served_name, rank.transport, top_k)
    folder = model_folder(part.model)
    check_vocabulary(rank.tokenizer, load_tokenizer(folder), f"{key}.model={part.model}")
    train = rank.config.train.model_copy(
        update={"offload": OFFLOAD_ALL, "optimizer_cpu_offload": False}
    )
    frozen = make_trainer(rank, folder=folder, share_groups_with=trainer, train=train)
    check_weights(rank, frozen)
    frozen.memory.offload_all()
    return partial(forward_in_turn, frozen, trainer.memory, top_k=top_k)


@dataclass(frozen=True)
class RewardModel:
    """A reward model: its trainer, its head, and the function that turns scores into rewards."""

    trainer: Trainer
    head: RewardHead
    reward: ModelReward

    @contextmanager
    def onloaded(self) -> Iterator[None]:
        self.trainer.memory.onload_all()
        yield
        self.trainer.memory.offload_all()

    def score(self, engine: Engine, span: SpanContext, samples: Sequence[Sample]) -> list[Sample]:
        """Returns the samples with this model's rewards; the engine sleeps meanwhile.

        Used as `Exchange.score`.
        """
        with span("reward_model"):
            engine.sleep()
            self.trainer.memory.onload_weights()
            scored = self.reward(samples)
            self.trainer.memory.offload_all()
            engine.wake("weights")
            engine.wake("kv_cache")
        return scored


def make_reward_model(rank: RankContext, policy: Trainer) -> RewardModel | None:
    """Builds the reward model of the reward named "model"; None if the run has no such reward.

    Raises ValueError if the folder is not a reward model, if its vocabulary differs from the
    policy's, or if iterative_grpo would train a process reward model.
    """
    config = rank.config
    updates = config.iterative.reward_model
    reward = next((reward for reward in config.rewards if reward.name == "model"), None)
    if reward is None:
        return None
    options = parse_options(ModelOptions, reward)
    folder = rank.model_folder
    head = RewardHead()
    if options.path is not None:
        folder = model_folder(options.path)
        head = load_head(folder)
        check_vocabulary(rank.tokenizer, load_tokenizer(folder), f"rewards: name='model': {folder}")
    if head.kind == "process" and config.stage == "iterative_grpo" and updates.train:
        raise ValueError(
            f"rewards: name='model': {folder} scores steps, but iterative_grpo trains on rankings "
            "of whole responses; set iterative.reward_model.train=false, or use a model of "
            "responses"
        )
    train = config.train.model_copy(
        update={
            "offload": OFFLOAD_ALL,
            "lr": updates.lr,
            "min_lr": 0.0,
            "schedule": "constant",
            "warmup_steps": 0,
            "updates_per_step": 1,
            "epochs_per_batch": 1,
        }
    )
    trainer = make_trainer(rank, head=head, folder=folder, share_groups_with=policy, train=train)
    trainer.memory.offload_all()
    return RewardModel(
        trainer,
        head,
        model_reward(trainer, head, reward.weight, options.splitter, rank.tokenizer),
    )


def model_reward(
    trainer: Trainer, head: RewardHead, weight: float, splitter: Any, tokenizer: Tokenizer
) -> ModelReward:
    scores_steps = head.kind == "process"

    def score(batch: TokenBatch) -> Tensor:
        outputs = trainer.forward(batch)
        assert outputs.values_T is not None
        return outputs.values_T if scores_steps else head.scores(outputs, batch)

    return ModelReward(weight, score, scores_steps, splitter, tokenizer.decode)
