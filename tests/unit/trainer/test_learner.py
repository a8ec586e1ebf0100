"""The policy's updates of one batch: schedule, gate, token selection, and whose log-probs are the old ones."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_trainer import build, make_batch
from torch import Tensor

from megarl.algorithms.objective import Objective
from megarl.config.schema import Algorithm, Moe
from megarl.data.packing import plan_microbatches
from megarl.models.flops import forward_flops
from megarl.trainer import trainer as trainer_module
from megarl.trainer.heads import ValueHead
from megarl.trainer.learner import PolicyLearner
from megarl.trainer.trainer import Gradients, Trainer
from megarl.types import CheckFailed, MicrobatchPlan, ScoredBatch, TokenLosses

pytestmark = pytest.mark.usefixtures("one_rank")


def make_learner(
    folder: Path, objective: Objective | None = None, **train
) -> tuple[PolicyLearner, ScoredBatch]:
    """A learner and a batch that it has scored."""
    learner = PolicyLearner(
        build(folder, **train), objective or Objective(Algorithm(advantage="reinforce"))
    )
    batch = make_batch(num_rows=8)
    state = learner.objective.initial_state()
    return learner, learner.objective.advantages(batch, learner.score(batch), state)[0]


def state_of(learner: PolicyLearner) -> list[Tensor]:
    """Weights, main weights and moments, the schedule, the random state."""
    trainer = learner.trainer
    tensors = [p.detach().clone() for p in trainer.parameters_by_name().values()]
    for part in getattr(trainer.optimizer, "chained_optimizers", [trainer.optimizer]):
        for state in part.optimizer.state.values():
            tensors += [torch.as_tensor(value).clone() for value in state.values()]
    return [*tensors, torch.tensor(trainer.scheduler.step), torch.get_rng_state()]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_the_learning_rate_advances_once_a_batch(tmp_path: Path) -> None:
    learner, scored = make_learner(
        tmp_path, updates_per_step=2, steps=5, lr=1e-2, schedule="linear"
    )
    lrs = [[update.lr for update in learner.update(scored).updates] for _ in range(3)]
    assert lrs == [pytest.approx([lr, lr]) for lr in (1e-2, 8e-3, 6e-3)]
    learner.trainer.close()


@pytest.mark.parametrize("updates", [1, 2])
def test_a_refusal_leaves_everything_untouched(tmp_path: Path, updates: int) -> None:
    """With one update on a batch the gate acts after its backward pass, with more before the first."""
    create = {"family": "glm4_moe", "layers": 3, "experts": 4}  # its routers have biases
    trained = {"create": create, "moe": Moe(bias_update_rate=0.01), "updates_per_step": updates}
    learner, scored = make_learner(tmp_path, **trained)
    learner.update(scored)
    expected_T = learner.trainer.forward(scored).logprobs_T
    assert (scored.old_logprobs is None) == (updates == 1) and expected_T is not None
    seen = []

    def refuse(batch: ScoredBatch) -> dict[str, float]:
        seen.append(batch.old_logprobs)
        learner.trainer.forward(batch)  # as where the floor is measured
        raise CheckFailed("no")

    before = state_of(learner)
    with pytest.raises(CheckFailed, match="no"):
        learner.update(scored, gate=refuse)
    assert same(before, state_of(learner))
    assert torch.equal(seen[0], expected_T if updates == 1 else scored.old_logprobs)
    report = learner.update(scored, gate=lambda batch: {"logprob_diff/max": 0.5})
    assert report.metrics["logprob_diff/max"] == 0.5 and len(report.updates) == updates
    assert not same(before, state_of(learner))
    learner.trainer.close()


@pytest.mark.parametrize(
    ("algorithm", "train", "passes"),
    [
        ({}, {}, 1),
        ({"kl": {"where": "loss", "coef": 0.1}}, {}, 2),  # the reference
        ({"kl": {"where": "reward", "coef": 0.1}}, {}, 3),
        ({"kl": {"where": "loss", "coef": 0.1, "target": 0.1, "horizon": 100}}, {}, 3),
        ({"loss": "kl_cov"}, {}, 2),
        ({}, {"updates_per_step": 2}, 3),
        ({}, {"epochs_per_batch": 2}, 2),
    ],
)
def test_no_forward_pass_is_made_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: dict, train: dict, passes: int
) -> None:
    made, run = [], trainer_module.forward_backward
    monkeypatch.setattr(
        trainer_module, "forward_backward", lambda *args, **kw: (made.append(1), run(*args, **kw))
    )
    objective = Objective(Algorithm(advantage="reinforce", **algorithm))
    learner, scored = make_learner(tmp_path, objective, **train)
    learner.update(scored, gate=lambda batch: {"seen": float(batch.old_logprobs[batch.mask].sum())})
    assert len(made) == passes
    learner.trainer.close()


@pytest.mark.parametrize("where", ["loss", "reward"])
def test_a_reference_that_has_become_the_policy_has_no_divergence(
    tmp_path: Path, where: str
) -> None:
    objective = Objective(Algorithm(advantage="reinforce", kl={"where": where, "coef": 0.1}))
    learner, scored = make_learner(tmp_path, objective, lr=3e-2)
    learner.update(scored)
    parameters, state = learner.trainer.parameters_by_name().values(), objective.initial_state()
    later = objective.advantages(scored, learner.score(scored), state)[0]
    assert not torch.equal(later.ref_logprobs, learner.trainer.forward(scored).logprobs_T)
    learner.reference.reset()
    policy = [p.detach().clone() for p in parameters]
    with learner.reference.in_use():
        assert same(policy, [*parameters])
    fresh = objective.advantages(scored, learner.score(scored), state)[0]
    assert fresh.ref_logprobs is None
    if where == "reward":  # no token is penalised
        plain = Objective(Algorithm(advantage="reinforce"))
        assert torch.equal(
            fresh.advantages, plain.advantages(scored, learner.score(scored), state)[0].advantages
        )
    (update,) = learner.update(fresh).updates
    assert update.metrics["kl/ref"] == 0.0 or (
        where == "reward" and update.metrics["kl/ref"] < 1e-12
    )
    assert objective.advantages(scored, learner.score(scored), state)[0].ref_logprobs is not None, (
        "it has moved on"
    )
    learner.trainer.close()


def test_two_epochs_are_two_updates_by_hand(tmp_path: Path) -> None:
    """The old log-probs are those before the first, where the ratio is 1."""
    objective = Objective(Algorithm(advantage="reinforce"))
    learner, scored = make_learner(tmp_path, objective, epochs_per_batch=2, lr=3e-2)
    first, second = learner.update(scored).updates
    after = state_of(learner)
    learner.trainer.close()
    assert first.metrics["kl/old"] == first.metrics["clip_frac"] == 0.0
    assert second.metrics["kl/old"] > 1e-3 and second.metrics["clip_frac"] > 0.0

    learner, scored = make_learner(tmp_path, objective, lr=3e-2)
    old_T = learner.trainer.forward(scored).logprobs_T
    scored = replace(scored, old_logprobs=old_T)
    plan = plan_microbatches(
        scored, learner.trainer.layout, learner.trainer.train, units=scored.group.tolist()
    )
    weights_T, loss = objective.weights(scored, plan), objective.loss(scored)
    by_hand = [learner.trainer.step(scored, plan, loss, weights_T) for _ in range(2)]
    learner.trainer.finish_batch()
    assert [(u.loss, u.grad_norm) for u in by_hand] == [
        (u.loss, u.grad_norm) for u in (first, second)
    ]
    assert same(after, state_of(learner))
    flops = forward_flops(learner.trainer.shape, scored.lengths_N.tolist(), outputs=67)
    for report in (first, *by_hand):
        assert (report.tokens, report.flops) == (scored.num_tokens, 3 * flops)
        assert report.peak_flops == 0.0, "a CPU"
    learner.trainer.close()


def test_every_epoch_trains_each_row_once_in_an_order_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner, scored = make_learner(tmp_path, updates_per_step=4, epochs_per_batch=3)
    plans, backward = [], Trainer.backward

    def watched(
        trainer: Trainer, batch: ScoredBatch, plan: MicrobatchPlan, *args: Any, **options: Any
    ) -> Gradients:
        plans.append(plan.rows[0])
        return backward(trainer, batch, plan, *args, **options)

    monkeypatch.setattr(Trainer, "backward", watched)
    for _ in range(2):
        learner.update(scored)
    rows = [sorted(row for rank in plan for bin in rank for row in bin) for plan in plans]
    epochs = [tuple(map(tuple, rows[start : start + 4])) for start in range(0, len(rows), 4)]
    assert all(
        sorted(row for update in epoch for row in update) == list(range(8)) for epoch in epochs
    )
    assert epochs[0] == epochs[3], "the first epoch is in the order of the batch"
    assert len({epochs[0], *epochs[1:3], *epochs[4:]}) > 2 and epochs[1:3] != epochs[4:], (
        "by step and epoch"
    )
    learner.trainer.close()


def test_the_gate_sees_a_batch_that_trains_nothing(tmp_path: Path) -> None:
    learner, scored = make_learner(tmp_path)
    scored = replace(scored, mask=torch.zeros_like(scored.mask))
    report = learner.update(
        scored, gate=lambda batch: {"tokens": float(batch.old_logprobs.numel())}
    )
    assert report.updates[0].skipped and report.metrics["tokens"] == scored.num_tokens
    learner.trainer.close()


@dataclass(frozen=True)
class Watched(Objective):
    """Keeps the log-probs that tokens are selected by."""

    selected_by: list[Tensor] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)

    def select(self, batch, logprobs_T, plan, *, seed) -> Tensor:
        self.selected_by.append(logprobs_T)
        self.seeds.append(seed)
        return super().select(batch, logprobs_T, plan, seed=seed)


def test_tokens_are_selected_by_the_policy_before_each_update(tmp_path: Path) -> None:
    algorithm = Algorithm(
        loss="kl_cov", advantage="reinforce", token_selection_options={"share": 0.3}
    )
    objective = Watched(algorithm)
    learner, scored = make_learner(tmp_path, objective, updates_per_step=2, lr=3e-2)
    learner.update(scored)
    assert scored.old_logprobs is not None
    assert len(objective.selected_by) == 2 and torch.equal(
        objective.selected_by[0], scored.old_logprobs
    )
    assert float((objective.selected_by[1] - scored.old_logprobs).abs().max()) > 1e-2, (
        "the first update moved them"
    )
    learner.update(scored)
    assert len(set(objective.seeds)) == 4, "each update of each step draws anew"
    learner.trainer.close()


@pytest.mark.parametrize("kl", [None, {"where": "loss", "coef": 0.1}])
@pytest.mark.parametrize("updates", [1, 2])
def test_log_probs_that_were_not_scored_are_those_before_the_update(
    tmp_path: Path, updates: int, kl: dict | None
) -> None:
    """Bit for bit: the forward pass that scores makes the micro-batches of the update."""
    reports = []
    objective = Objective(Algorithm(advantage="reinforce", **({"kl": kl} if kl else {})))
    for is_scored in (True, False):
        learner, scored = make_learner(tmp_path, objective, updates_per_step=updates)
        old_T = learner.trainer.forward(scored).logprobs_T if is_scored else None
        report = learner.update(replace(scored, old_logprobs=old_T))
        reports.append(
            [(update.loss, update.grad_norm, update.metrics) for update in report.updates]
        )
        learner.trainer.close()
    assert reports[0] == reports[1]
    assert len(reports[0]) == updates and reports[0][0][1] > 1e-3


def test_an_updates_own_log_probs_are_those_of_a_pass_before_it(tmp_path: Path) -> None:
    """Of rows on their own, whatever else the update's micro-batches hold."""
    seen = list[Tensor]()
    learner, scored = make_learner(tmp_path)
    learner.update(scored, gate=lambda batch: seen.append(batch.old_logprobs) or {})
    learner.trainer.close()
    alone, scored = make_learner(tmp_path, max_tokens_per_microbatch=1)
    before_T = alone.trainer.forward(scored).logprobs_T
    alone.trainer.close()
    difference_T = (seen[0] - before_T)[scored.mask].abs()
    ulp = torch.finfo(before_T.dtype).eps * float(before_T[scored.mask].abs().max())
    assert scored.old_logprobs is None
    assert difference_T.max() < 4 * ulp, "more than the order of sums explains"


def test_passes_without_gradients_may_have_larger_micro_batches(tmp_path: Path) -> None:
    """null is the update's own number of tokens, bit for bit; more differ by the order of sums."""
    seen, counts = {}, {}
    for tokens in (None, 64, 1000):
        learner, scored = make_learner(tmp_path, max_tokens_per_logprob_batch=tokens)
        trainer = learner.trainer
        counts[tokens] = len(trainer.microbatches(scored))
        seen[tokens] = trainer.forward(scored).logprobs_T
        plan = plan_microbatches(scored, trainer.layout, trainer.train)
        assert len(plan.rows[0][0]) == counts[None] > 1, "updates keep theirs"
        trainer.close()
    assert counts == {None: counts[64], 64: counts[64], 1000: 1}, counts
    assert torch.equal(seen[None], seen[64])
    ulp = torch.finfo(torch.float32).eps * float(seen[64].abs().max())
    assert (seen[1000] - seen[64]).abs().max() < 4 * ulp, "more than the order of sums explains"


def test_an_entropy_bonus_is_computed_where_entropy_is_not_reported(tmp_path: Path) -> None:
    norms = []
    for coef in (0.0, 0.3):
        objective = Objective(Algorithm(advantage="reinforce", entropy_coef=coef))
        learner, scored = make_learner(tmp_path, objective, entropy_every=0)
        (update,) = learner.update(scored).updates
        assert ("entropy" in update.metrics) == (coef > 0)
        norms.append(update.grad_norm)
        learner.trainer.close()
    assert norms[0] != pytest.approx(norms[1], rel=1e-3)
    learner, scored = make_learner(tmp_path, entropy_every=2)
    reported = ["entropy" in learner.update(scored).updates[0].metrics for _ in range(3)]
    learner.trainer.close()
    assert reported == [True, False, True]


def test_a_value_head_learns(tmp_path: Path) -> None:
    """A critic of one number a token, from 0, whatever the micro-batches."""
    batch, losses = make_batch(num_rows=8), {}
    target_T = torch.where(batch.mask, (batch.tokens % 2).float(), 0.0)

    def squared_error(outputs, rows) -> TokenLosses:
        loss_M = torch.where(rows.mask, (outputs.values_T - rows.select(target_T)).square(), 0.0)
        return TokenLosses(loss_M, {}, rows.mask.sum())

    for max_tokens in (30, 10_000):
        trainer = build(tmp_path, head=ValueHead(), max_tokens_per_microbatch=max_tokens)
        plan = plan_microbatches(batch, trainer.layout, trainer.train)
        weights_T = batch.mask.double() / batch.mask.sum()
        assert not trainer.forward(batch).values_T.any()
        losses[max_tokens] = [
            trainer.step(batch, plan, squared_error, weights_T).loss for _ in range(10)
        ]
        assert losses[max_tokens][0] == pytest.approx(float(target_T[batch.mask].mean()))
        assert losses[max_tokens][-1] < 0.5 * losses[max_tokens][0]
        state = trainer.model[0].module.sharded_state_dict()
        assert {"value_head.weight", "value_head.bias"} <= set(state), "a checkpoint holds it"
        trainer.close()
    assert losses[30] == pytest.approx(losses[10_000], rel=1e-4)


def test_shared_prefixes_change_no_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reports = []
    for shares in (True, False):
        learner, scored = make_learner(tmp_path)
        for start in scored.cu_seqlens[:-1].tolist():
            scored.tokens[start : start + 3] = scored.labels[start : start + 2] = torch.tensor(1)
        assert learner.trainer.shares_prefixes
        with monkeypatch.context() as patched:
            patched.setattr(trainer_module.Trainer, "shares_prefixes", shares)
            reports.append(learner.update(scored).updates[0])
        learner.trainer.close()
    assert (
        reports[0].grad_norm == pytest.approx(reports[1].grad_norm, rel=1e-6)
        and reports[0].grad_norm > 1e-3
    )
    assert reports[0].loss == pytest.approx(reports[1].loss, abs=1e-6)
