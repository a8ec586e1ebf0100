"""Replay on one rank: planted routes against transformers made to take them, the router's gradient, and what is left
behind. Layouts and the engine's own routes are in tests/dist/test_routes.py."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2] / "dist"))
from trainer_cases import load_model, oracle_log_softmax, random_batch, save_model

from megarl.algorithms.objective import Objective, loss_weights, supervised_loss
from megarl.config.schema import Algorithm, Critic, Moe, Train
from megarl.data.collate import take_rows
from megarl.data.packing import plan_microbatches
from megarl.layout import Layout, Parallel
from megarl.models.registry import read_model
from megarl.trainer.actor_critic import ActorCritic
from megarl.trainer.heads import ValueHead
from megarl.trainer.learner import PolicyLearner
from megarl.trainer.moe import BalancedRouter
from megarl.trainer.router_replay import LayerRoutes
from megarl.trainer.trainer import Trainer
from megarl.types import CheckFailed, Routes, TrainBatch, UpdateReport, route_dtype
from megarl.weights.sync.checksum import row_checksums

pytestmark = pytest.mark.usefixtures("one_rank")
LAYERS, EXPERTS, TOPK = 3, 4, 2
BATCH = random_batch(num_rows=6)
SETTINGS = {"dtype": "fp32", "lr": 0.0, "max_tokens_per_microbatch": 48, "clip_grad": 0.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(f"qwen3_moe@{LAYERS}", tmp_path_factory.mktemp("model"))


def build(
    folder: Path,
    *,
    moe: Moe | None = None,
    share_groups_with: Trainer | None = None,
    head: Any = None,
    **train,
) -> Trainer:
    settings = Train.model_validate(SETTINGS | train)
    layout, device = Layout.of(Parallel(), 1, 0), torch.device("cpu")
    return Trainer.build(
        read_model(folder),
        layout,
        train=settings,
        folder=folder,
        device=device,
        moe=moe,
        share_groups_with=share_groups_with,
        head=head,
    )


def routes_of(experts: Tensor) -> Routes:
    return Routes((0,) * len(experts), tuple(row_checksums(experts).tolist()), experts)


def planted(batch: TrainBatch, *, seed: int = 1) -> TrainBatch:
    """Random routes for every token but the last of a row."""
    generator, rows = torch.Generator().manual_seed(seed), []
    for length in batch.cu_seqlens.diff().tolist():
        experts = torch.rand(LAYERS, length, EXPERTS, generator=generator).argsort(-1)[..., :TOPK]
        experts[:, -1] = 0
        rows.append(routes_of(experts.to(route_dtype(EXPERTS)).contiguous()))
    return replace(batch, choices=tuple(rows))


def oracle(folder: Path, batch: TrainBatch) -> Tensor:
    """[T] of transformers, each of whose routers takes the planted experts, row by row."""
    model, shape = load_model(folder), read_model(folder)
    rows: dict[str, list[Tensor]] = {}

    def reroute(name: str, layer: int) -> Any:
        def hook(
            module: Any, inputs: tuple[Tensor], output: tuple[Tensor, ...]
        ) -> tuple[Tensor, ...]:
            logits, _, own = output
            row = len(rows.setdefault(name, []))
            rows[name].append(own)
            routes = batch.choices[row]
            assert routes is not None and routes.experts is not None
            experts = routes.experts[layer].long()
            is_known = (experts != experts[:, :1]).any(1, keepdim=True)
            chosen = torch.where(is_known, experts, own)
            probs = (inputs[0].flatten(0, -2) @ module.weight.T).softmax(-1).gather(1, chosen)
            return logits, probs / probs.sum(1, keepdim=True), chosen

        return hook

    for number, layer in enumerate(model.model.layers):
        layer.mlp.gate.register_forward_hook(reroute(str(number), number))
    with torch.no_grad():
        logprobs = oracle_log_softmax(model, batch).gather(1, batch.labels[:, None])[:, 0]
    assert shape.layers == len(rows) == LAYERS
    return torch.where(batch.mask, logprobs, 0.0)


def routers(trainer: Trainer) -> list[BalancedRouter]:
    return [module for module in trainer.model[0].modules() if isinstance(module, BalancedRouter)]


def recorded(trainer: Trainer, batch: TrainBatch) -> tuple[Tensor, tuple[Routes, ...]]:
    outputs = trainer.forward(batch, record=True)
    return outputs.logprobs_T, outputs.choices


def take(trainer: Trainer, batch: TrainBatch, seen: list[Tensor] | None = None) -> UpdateReport:
    """One update; `seen` gets its own log-probs and the gradient of each router."""
    plan = plan_microbatches(batch, trainer.layout, trainer.train)
    gradients = trainer.backward(batch, plan, supervised_loss, loss_weights(batch, plan))
    if seen is not None:
        logprobs_T = trainer.gathered(gradients.outputs).logprobs_T
        assert logprobs_T is not None
        seen += [logprobs_T, *(router.weight.main_grad.clone() for router in routers(trainer))]
    return trainer.apply(gradients)


def nothing_is_left(trainer: Trainer) -> bool:
    from megatron.core.transformer.moe.router_replay import (
        RouterReplay,
    )  # nobody uses Megatron's own

    is_idle = all(router.router_replay is None for router in routers(trainer))
    return is_idle and not RouterReplay.global_router_replay_instances


def test_planted_routes_are_taken_in_forward_and_update(folder: Path) -> None:
    batch, trainer = planted(BATCH), build(folder)
    expected = oracle(folder, batch)
    own = trainer.logprobs(BATCH)
    assert (own - expected).abs()[BATCH.mask].mean() > 0.05
    torch.testing.assert_close(trainer.logprobs(batch), expected, rtol=0, atol=2e-5)
    seen: list[Tensor] = []
    report = take(trainer, batch, seen)
    torch.testing.assert_close(seen[0], expected, rtol=0, atol=2e-5)
    assert 0.5 < report.metrics["routing/differs"] < 1 and report.metrics["routing/missing"] == 0
    assert nothing_is_left(trainer) and trainer.logprobs(BATCH).equal(own)
    assert "routing/differs" not in take(trainer, BATCH).metrics
    trainer.close()


def test_the_routers_gradient_is_that_of_their_probabilities(folder: Path) -> None:
    """By differences along the gradient itself, at fixed routes; for a router of each layer."""
    batch, trainer = planted(BATCH), build(folder)
    seen: list[Tensor] = []
    take(trainer, batch, seen)
    for router, gradient in zip(routers(trainer), seen[1:], strict=True):
        losses = []
        for sign in (1, -1):
            router.weight.data.add_(gradient / gradient.norm(), alpha=sign * 1e-2)
            losses.append(take(trainer, batch).loss)
            router.weight.data.sub_(gradient / gradient.norm(), alpha=sign * 1e-2)
        assert (losses[0] - losses[1]) / 2e-2 == pytest.approx(float(gradient.norm()), rel=2e-3)
        assert gradient.norm() > 1e-2
    trainer.close()


@pytest.mark.parametrize(
    "recompute", [{"recompute": "full"}, {"recompute": "selective", "recompute_modules": ["moe"]}]
)
def test_recomputed_activations_take_the_same_routes(
    folder: Path, recompute: dict[str, Any]
) -> None:
    """In each of several micro-batches, whose routes differ."""
    batch, found = planted(BATCH), []
    for settings in ({}, recompute):
        trainer, seen = build(folder, **settings), list[Tensor]()
        take(trainer, batch, seen)
        assert nothing_is_left(trainer) and len(trainer.microbatches(batch)) > 1
        found.append(seen)
        trainer.close()
    for plain, recomputed in zip(*found, strict=True):
        torch.testing.assert_close(recomputed, plain, rtol=0, atol=1e-6)


def test_recorded_routes_replay_to_the_same_log_probs(folder: Path) -> None:
    trainer = build(folder)
    own, routes = recorded(trainer, BATCH)
    assert own.equal(trainer.logprobs(BATCH)) and len(routes) == BATCH.num_rows
    with torch.no_grad():
        for router in routers(trainer):
            router.weight.add_(
                torch.randn(router.weight.shape, generator=torch.Generator().manual_seed(0)),
                alpha=0.2,
            )
    replayed, moved = trainer.logprobs(replace(BATCH, choices=routes)), trainer.logprobs(BATCH)
    assert recorded(trainer, BATCH)[1] != routes and not replayed.equal(moved)
    with torch.no_grad():
        for router in routers(trainer):
            router.weight.sub_(
                torch.randn(router.weight.shape, generator=torch.Generator().manual_seed(0)),
                alpha=0.2,
            )
    outputs = trainer.forward(replace(BATCH, choices=routes))
    torch.testing.assert_close(outputs.logprobs_T, own, rtol=0, atol=1e-5)
    assert outputs.metrics == {"routing/differs": 0.0, "routing/missing": 0.0}
    trainer.close()


def test_tokens_without_a_route_are_routed_by_the_trainer_and_counted(folder: Path) -> None:
    trainer, whole = build(folder), planted(BATCH)
    own = trainer.logprobs(BATCH)
    unknown = replace(BATCH, choices=(None,) * BATCH.num_rows)
    assert trainer.logprobs(unknown).equal(own)
    report = take(trainer, replace(BATCH, choices=(None, *whole.choices[1:])))
    row = int(BATCH.cu_seqlens[1]) - 1
    assert report.metrics["routing/missing"] == pytest.approx(
        row / (BATCH.num_tokens - BATCH.num_rows)
    )
    some = whole.choices[0]
    assert some is not None and some.experts is not None
    experts = some.experts.clone()
    experts[:, :2] = 0  # as of tokens from a cache that had no routes
    report = take(trainer, replace(BATCH, choices=(routes_of(experts), *whole.choices[1:])))
    assert report.metrics["routing/missing"] == pytest.approx(
        2 / (BATCH.num_tokens - BATCH.num_rows)
    )
    trainer.close()


def test_one_changed_route_is_noticed_and_nothing_is_left(folder: Path) -> None:
    batch, trainer = planted(BATCH), build(folder)
    routes = batch.choices[3]
    assert routes is not None and routes.experts is not None
    before = [weight.clone() for weight in trainer.parameters_by_name().values()]
    routes.experts[1, 2, 0] ^= 1
    for call in (trainer.logprobs, lambda batch: take(trainer, batch)):
        with pytest.raises(CheckFailed, match="routes of 1 "):
            call(batch)
        assert nothing_is_left(trainer)
    assert all(map(torch.equal, before, trainer.parameters_by_name().values()))
    trainer.close()


def test_a_router_whose_top_k_is_fused_is_noticed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = build(folder)
    monkeypatch.setattr(
        LayerRoutes, "get_replay_topk", lambda self, scores, k, g, t, compute: compute(scores, k)
    )
    with pytest.raises(AssertionError, match="fused"):
        trainer.logprobs(planted(BATCH))
    trainer.close()


def test_the_bias_counts_replayed_tokens_and_the_balance_the_routers_own(tmp_path: Path) -> None:
    folder = save_model("glm4_moe@4", tmp_path)  # a dense layer, 3 with experts
    trainer = build(folder, moe=Moe(bias_update_rate=0.01, aux_loss=0.1), lr=1e-2)
    own = take(trainer, BATCH).metrics["moe/aux_loss"]
    rows = [torch.zeros(LAYERS, n, 4, dtype=torch.uint8) for n in BATCH.cu_seqlens.diff().tolist()]
    for row in rows:
        row[:] = torch.arange(4)  # every token to experts 0 to 3 of 8
    trainer.close()
    trainer = build(folder, moe=Moe(bias_update_rate=0.01, aux_loss=0.1), lr=1e-2)
    before = [router.expert_bias.clone() for router in routers(trainer)]
    report = take(trainer, replace(BATCH, choices=tuple(map(routes_of, rows))))
    for router, bias in zip(routers(trainer), before, strict=True):
        assert (router.expert_bias - bias)[:4].lt(0).all() and (router.expert_bias - bias)[4:].gt(
            0
        ).all()
    assert (
        report.metrics["moe/aux_loss"] == pytest.approx(own, rel=0.3)
        and report.metrics["moe/aux_loss"] < 1.9
    )
    trainer.close()


def test_only_the_policy_replays(folder: Path) -> None:
    """Not its reference, nor the critic: their routes are their own."""
    algorithm = Algorithm.model_validate(
        {"advantage": "gae", "kl": {"coef": 0.1, "where": "reward"}}
    )
    trainer = build(folder, lr=1e-2)
    critic = build(folder, head=ValueHead(), share_groups_with=trainer, lr=1e-2)
    with torch.no_grad():
        critic.parameters_by_name()["value_head.weight"].normal_()  # it begins at 0
    values, own = critic.forward(BATCH).values_T, trainer.logprobs(BATCH)
    learner = ActorCritic(PolicyLearner(trainer, Objective(algorithm, 16)), critic, Critic())
    assert learner.actor.reference is not None
    learner.actor.reference.is_policy = False
    batch = planted(BATCH)
    scores = learner.score(batch)
    assert scores.old_values is not None and values is not None and scores.old_values.equal(values)
    assert scores.ref_logprobs is not None and scores.ref_logprobs.equal(own)
    assert scores.old_logprobs is not None and not scores.old_logprobs.equal(own)
    objective = learner.actor.objective
    scored = objective.advantages(batch, scores, objective.initial_state())[0]
    assert scored.choices == batch.choices
    report = learner.update(scored)
    assert report.updates[0].metrics["routing/differs"] > 0.5
    assert scored.returns is not None
    loss = float((values - scored.returns)[BATCH.mask].double().square().mean()) / 2
    assert report.metrics["value/loss"] == pytest.approx(loss, rel=1e-5)
    assert nothing_is_left(trainer) and nothing_is_left(critic)
    critic.close()
    trainer.close()


def test_later_updates_replay_the_routes_of_the_old_log_probs(folder: Path) -> None:
    """Those that compare with them."""
    objective = Objective(Algorithm(), 16)
    trainer = build(folder, lr=3e-2, updates_per_step=2)
    learner = PolicyLearner(trainer, objective, records_choices=True)
    scores = learner.score(BATCH)
    assert len(scores.choices) == BATCH.num_rows
    scored = objective.advantages(BATCH, scores, objective.initial_state())[0]
    first, second = learner.update(scored).updates
    assert first.metrics["routing/differs"] == 0 < second.metrics["routing/differs"]
    trainer.close()


def test_rows_keep_their_routes() -> None:
    batch = planted(BATCH)
    assert take_rows(batch, [4, 1]).choices == (batch.choices[4], batch.choices[1])
    assert take_rows(BATCH, [4, 1]).choices == ()


def test_256_experts_fit_a_byte() -> None:
    assert [route_dtype(n) for n in (128, 256, 257)] == [torch.uint8, torch.uint8, torch.int16]
    experts = torch.tensor([[[255, 3], [0, 1]]], dtype=torch.uint8)
    layer = LayerRoutes([experts[0]], torch.zeros(2, dtype=torch.int64), train=False)

    def compute(scores: Tensor, topk: int, **_: Any) -> Sequence[Tensor]:
        return SimpleNamespace(v=scores.topk(topk)).v

    scores = torch.arange(512.0).view(2, 256)
    with torch.no_grad():
        values, chosen = layer.get_replay_topk(scores, 2, None, None, compute)
    assert chosen.tolist() == [[255, 3], [0, 1]] and values.tolist() == [
        [255.0, 3.0],
        [256.0, 257.0],
    ]
    assert layer.counts.tolist() == [2, 2]


def test_routes_are_recorded_and_replayed_in_larger_micro_batches(folder: Path) -> None:
    found = []
    for tokens in (None, 1000):
        trainer = build(folder, max_tokens_per_logprob_batch=tokens)
        own = trainer.forward(BATCH, record=True).choices
        assert (len(trainer.microbatches(BATCH)) == 1) == (tokens is not None)
        found.append((own, trainer.logprobs(planted(BATCH))))
        trainer.close()
    (few, few_T), (many, many_T) = found
    for one, other in zip(few, many, strict=True):
        assert torch.equal(one.experts, other.experts)
    assert (few_T - many_T).abs().max() < 1e-5
    assert (few_T - build_logprobs(folder)).abs().max() > 1e-3, "the planted routes were taken"


def build_logprobs(folder: Path) -> Tensor:
    trainer = build(folder)
    logprobs_T = trainer.logprobs(BATCH)
    trainer.close()
    return logprobs_T
