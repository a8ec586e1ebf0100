"""PPO's learner: two trainers in one process that share process groups and nothing else, trained and saved together."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_trainer import build, make_batch
from torch import Tensor

from megarl.algorithms.critic import value_losses
from megarl.algorithms.objective import Objective, loss_weights
from megarl.checkpoint.state import Checkpoints, Further
from megarl.checkpoint.torch_dist import CRITIC, MegatronFolder, stored_tensors
from megarl.config.schema import Algorithm, Critic
from megarl.data.packing import plan_microbatches
from megarl.trainer.actor_critic import ActorCritic, CriticHead
from megarl.trainer.heads import ValueHead
from megarl.trainer.learner import PolicyLearner
from megarl.trainer.trainer import Trainer
from megarl.types import FINISH, CheckFailed, ObjectiveState, ScoredBatch, TrainBatch

pytestmark = pytest.mark.usefixtures("one_rank")
PPO = Algorithm(advantage="gae", advantage_options={"gamma": 0.9, "lam": 0.8, "whiten": True})


def make(
    folder: Path,
    algorithm: Algorithm = PPO,
    critic: dict | None = None,
    create: dict | None = None,
    **train,
) -> ActorCritic:
    settings = Critic(**{"lr": 3e-2, **(critic or {})})
    objective = Objective(
        algorithm, value_lam=settings.lam, bootstrap_truncated=settings.bootstrap_truncated
    )
    actor = PolicyLearner(build(folder, create, **train), objective)
    head = CriticHead() if settings.bootstrap_truncated else ValueHead()
    values = build(
        folder, create, head=head, share_groups_with=actor.trainer, **{**train, "lr": settings.lr}
    )
    return ActorCritic(actor, values, settings)


def scored_by(learner: ActorCritic, batch: TrainBatch) -> ScoredBatch:
    return learner.actor.objective.advantages(
        batch, learner.score(batch), learner.actor.objective.initial_state()
    )[0]


def state_of(trainer: Trainer) -> list[Tensor]:
    """Weights, main weights and moments, the schedule."""
    tensors = [p.detach().clone() for p in trainer.parameters_by_name().values()]
    for part in getattr(trainer.optimizer, "chained_optimizers", [trainer.optimizer]):
        for main, state in part.optimizer.state.items():
            tensors += [
                main.detach().clone(),
                *(torch.as_tensor(state[name]).clone() for name in sorted(state)),
            ]
    return [*tensors, torch.tensor(trainer.scheduler.step)]


def both(learner: ActorCritic) -> list[Tensor]:
    return state_of(learner.actor.trainer) + state_of(learner.critic)


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def close(learner: ActorCritic) -> None:
    learner.critic.close()
    learner.actor.trainer.close()


def test_two_epochs_are_two_updates_by_hand_of_each(tmp_path: Path) -> None:
    """With advantages and targets that stay as they were; the policy's are those of a learner without a critic."""
    batch = make_batch(num_rows=8)
    learner = make(tmp_path, epochs_per_batch=2)
    scored = scored_by(learner, batch)
    report = learner.update(scored)
    after, moved = both(learner), learner.critic.forward(batch).values_T
    close(learner)
    first, second = report.updates
    assert first.metrics["kl/old"] == first.metrics["clip_frac"] == 0.0 < second.metrics["kl/old"]
    assert report.metrics["value/loss"] > 0 and 0 < report.metrics["value/clip_frac"] < 1
    assert (moved - scored.old_values).abs().max() > 0.05

    by_hand = make(tmp_path)
    actor, critic = by_hand.actor.trainer, by_hand.critic
    plan = plan_microbatches(scored, actor.layout, actor.train, units=scored.group.tolist())
    old = replace(scored, old_logprobs=actor.forward(batch).logprobs_T)
    policy = [
        actor.step(
            old, plan, learner.actor.objective.loss(old), learner.actor.objective.weights(old, plan)
        )
        for _ in range(2)
    ]
    loss = partial(value_losses, scored, 0.2)
    value = [critic.step(scored, plan, loss, loss_weights(scored, plan)) for _ in range(2)]
    for trainer in (actor, critic):
        trainer.finish_batch()
    assert [(u.loss, u.grad_norm) for u in policy] == [
        (u.loss, u.grad_norm) for u in (first, second)
    ]
    assert report.metrics["value/loss"] == (value[0].loss + value[1].loss) / 2
    assert value[0].metrics["value/clip_frac"] == 0.0, "the values are the old ones"
    assert same(after, both(by_hand))
    close(by_hand)

    alone = PolicyLearner(build(tmp_path, epochs_per_batch=2), learner.actor.objective)
    assert alone.update(scored).updates == report.updates, "a critic beside it changes nothing"
    assert same(state_of(alone.trainer), after[: len(state_of(alone.trainer))])
    alone.trainer.close()


def test_the_groups_are_the_actors(tmp_path: Path) -> None:
    learner, batch = make(tmp_path), make_batch(num_rows=4)
    assert learner.critic.groups is learner.actor.trainer.groups
    expected = learner.actor.trainer.logprobs(batch)
    learner.critic.close()
    assert torch.equal(learner.actor.trainer.logprobs(batch), expected)
    learner.actor.trainer.close()


def test_only_the_critic_learns_while_it_warms_up(tmp_path: Path) -> None:
    learner, batch = (
        make(tmp_path, critic={"warmup_steps": 1}, schedule="linear", steps=3),
        make_batch(num_rows=8),
    )
    scored, seen = scored_by(learner, batch), []

    def gate(judged: ScoredBatch) -> dict[str, float]:
        seen.append(judged.old_logprobs)
        return {"logprob_diff/max": 0.5}

    actor, critic = state_of(learner.actor.trainer), state_of(learner.critic)
    report = learner.update(scored, gate=gate)
    assert (
        report.updates == ()
        and report.metrics["logprob_diff/max"] == 0.5
        and report.metrics["value/loss"] > 0
    )
    assert same(actor[:-1], state_of(learner.actor.trainer)[:-1]) and not same(
        critic, state_of(learner.critic)
    )
    assert torch.equal(seen[0], learner.actor.trainer.logprobs(batch))
    report = learner.update(scored, gate=gate)
    assert [update.lr for update in report.updates] == [pytest.approx(2e-2 / 3)], (
        "its schedule has gone on"
    )
    assert report.metrics["value/lr"] == pytest.approx(2e-2)
    assert not same(actor[:-1], state_of(learner.actor.trainer)[:-1])
    close(learner)


@pytest.mark.parametrize("warmup", [0, 1])
def test_a_refusal_leaves_both_untouched(tmp_path: Path, warmup: int) -> None:
    learner = make(tmp_path, critic={"warmup_steps": warmup})
    scored = scored_by(learner, make_batch(num_rows=8))
    before = both(learner)

    def refuse(_: ScoredBatch) -> dict[str, float]:
        raise CheckFailed("no")

    with pytest.raises(CheckFailed, match="no"):
        learner.update(scored, gate=refuse)
    assert same(before, both(learner))
    close(learner)


def test_values_after_the_last_token_are_read_where_a_cut_needs_them(tmp_path: Path) -> None:
    batch = make_batch(num_rows=4)
    at_end = batch.cu_seqlens[1:] - 1
    for bootstrap in (False, True):
        learner = make(tmp_path, critic={"bootstrap_truncated": bootstrap})
        learner.update(scored_by(learner, batch))  # from a head of zeros
        values_T = learner.score(batch).old_values
        assert (
            values_T is not None
            and values_T[batch.mask].all()
            and bool(values_T[at_end].all()) == bootstrap
        )
        is_read_T = batch.mask.index_fill(0, at_end, bootstrap)
        assert not values_T[~is_read_T].any()
        close(learner)


def test_offloading_both_changes_nothing(tmp_path: Path) -> None:
    found = []
    for offload in ([], ["gradients", "optimizer", "weights"]):
        learner = make(tmp_path, offload=offload, dtype="bf16")
        for seed in range(2):
            for trainer in learner.trainers:
                trainer.memory.onload_weights()
            learner.update(scored_by(learner, make_batch(num_rows=8, seed=seed)))
            for trainer in learner.trainers:
                trainer.memory.free_gradients()
                trainer.memory.offload_training_state()
                trainer.memory.offload_all()
            if offload:
                trainers = (learner.actor.trainer, learner.critic)
                buffers = [buffer for trainer in trainers for buffer in trainer.model[0].buffers]
                assert not any(b.param_data.untyped_storage().nbytes() for b in buffers), (
                    "both are away"
                )
        for trainer in learner.trainers:
            trainer.memory.onload_all()
        found.append(both(learner))
        close(learner)
    assert same(*found)


# --- checkpoints ------------------------------------------------------------------------------------------------------


class Cursor:
    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None: ...


def checkpoints(folder: Path, learner: ActorCritic, *, critic: bool = True) -> Checkpoints:
    further = Further({CRITIC: learner.critic} if critic else {})
    at = (folder / "checkpoints", learner.actor.trainer, Cursor(), ObjectiveState(0.0))
    return Checkpoints(*at, every=1, keep=3, last_step=9, further=further)


@pytest.mark.parametrize("dtype", [pytest.param("fp32", marks=pytest.mark.long), "bf16"])
def test_both_are_resumed_bit_for_bit(tmp_path: Path, dtype: str) -> None:
    train: dict[str, Any] = {"dtype": dtype, "schedule": "linear", "steps": 5}
    batches, learner = (
        [make_batch(num_rows=8, seed=seed) for seed in range(2)],
        make(tmp_path, **train),
    )
    saves = checkpoints(tmp_path, learner)
    learner.update(scored_by(learner, batches[0]))
    kept = both(learner)
    saves.maybe_save(1, ObjectiveState(0.5))
    learner.update(scored_by(learner, batches[1]))  # while the first step is written
    saves.finish()
    after = both(learner)
    close(learner)
    assert (tmp_path / "checkpoints" / "step_1" / "manifest.json").is_file()

    learner = make(tmp_path, **train)
    assert checkpoints(tmp_path, learner).restore("auto") == (1, ObjectiveState(0.5))
    assert same(kept, both(learner))
    learner.update(scored_by(learner, batches[1]))
    assert same(after, both(learner))
    close(learner)


def test_a_checkpoint_without_a_critic_is_refused_and_one_with_it_serves_a_policy(
    tmp_path: Path,
) -> None:
    learner = make(tmp_path)
    scored = scored_by(learner, make_batch(num_rows=4))
    for folder, critic in (("grpo", False), ("ppo", True)):
        learner.update(scored)
        saves = checkpoints(tmp_path / folder, learner, critic=critic)
        saves.maybe_save(1, ObjectiveState(0.0), last=True)
        saves.finish()
    expected = state_of(learner.actor.trainer)
    with pytest.raises(
        ValueError, match=r"step_1 is not a checkpoint of this model: it has no critic; resume"
    ):
        checkpoints(tmp_path / "grpo", learner).restore("auto")
    close(learner)
    learner = make(tmp_path)
    model: Any = learner.actor.trainer.model[0].module
    # as a conversion does
    MegatronFolder(tmp_path / "ppo" / "checkpoints" / "step_1").check(stored_tensors(model))
    assert checkpoints(tmp_path / "ppo", learner, critic=False).restore("auto")[0] == 1
    assert same(expected, state_of(learner.actor.trainer))
    close(learner)


# --- a critic that learns ---------------------------------------------------------------------------------------------

STEPS, GAMMA = 2, 0.7
ONWARD = {
    0: (0, 0, 1, 2),
    1: (0, 1, 1, 2),
    2: (0, 1, 2, 2),
}  # state -> next states, each of the same chance
# [state, next state]
REWARD = torch.tensor([[1.0, 0.0, -1.0], [0.5, -0.5, 2.0], [-2.0, 1.0, -1.0]])


def every_episode() -> TrainBatch:
    """All paths of STEPS transitions, as often as they are probable: no noise of sampling. Then they are cut."""
    paths = [path for path in product(range(3), repeat=STEPS + 1) for _ in range(copies(path))]
    tokens, count = torch.tensor(paths), len(paths)
    rewards = torch.cat([REWARD[tokens[:, :-1], tokens[:, 1:]], torch.zeros(count, 1)], 1)
    return replace(
        make_batch(num_rows=count),
        tokens=tokens.flatten(),
        labels=tokens.roll(-1, 1).flatten(),
        mask=torch.arange(tokens.numel()) % (STEPS + 1) != STEPS,
        cu_seqlens=torch.arange(count + 1) * (STEPS + 1),
        rollout_logprobs=torch.zeros(tokens.numel()),
        token_rewards=rewards.flatten(),
        step_ends=torch.zeros(tokens.numel(), dtype=torch.bool),
        outcome_at=torch.full((count,), -1),
        group=torch.arange(count),
        finish=torch.full((count,), FINISH.index("length")),
    )


def copies(path: tuple[int, ...]) -> int:
    return prod(ONWARD[state].count(following) for state, following in pairwise(path))


@pytest.mark.long
@pytest.mark.parametrize("lam", [pytest.param(1.0, marks=pytest.mark.exhaustive), 0.5])
def test_a_critic_reaches_the_exact_values_of_a_decision_process(
    tmp_path: Path, lam: float
) -> None:
    """Three states that are tokens, without an end: V = r + gamma P V, to 0.02 of values that span 1.36."""
    chance_SS = torch.tensor([[ONWARD[state].count(n) / 4 for n in range(3)] for state in range(3)])
    exact_S = torch.linalg.solve(torch.eye(3) - GAMMA * chance_SS, (chance_SS * REWARD).sum(1))
    batch, steps = every_episode(), 300
    rules = Algorithm(advantage="gae", advantage_options={"gamma": GAMMA, "lam": lam})
    settings = {"warmup_steps": steps, "bootstrap_truncated": True, "lr": 1e-2}
    learner = make(
        tmp_path, rules, settings, steps=steps, schedule="linear", max_tokens_per_microbatch=2048
    )
    for _ in range(steps):
        report = learner.update(scored_by(learner, batch))
    values_T = learner.score(batch).old_values
    assert values_T is not None
    error = float((values_T - exact_S[batch.tokens]).abs().max())
    print(
        f"lambda {lam}: exact values {[round(value, 3) for value in exact_S.tolist()]}, largest error {error:.4f}"
    )
    assert error < 0.02 and exact_S.max() - exact_S.min() > 1
    assert report.metrics["value/explained_variance"] > 0.2
    close(learner)
