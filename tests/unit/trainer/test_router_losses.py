"""The routers' terms through a whole update: their gradient, their weight, and the bias that balances instead."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_trainer import build, make_batch

from megarl.algorithms.objective import loss_weights, supervised_loss
from megarl.config.schema import Moe
from megarl.data.packing import plan_microbatches
from megarl.trainer.moe import BalancedRouter
from megarl.trainer.trainer import Trainer
from megarl.types import UpdateReport

pytestmark = pytest.mark.usefixtures("one_rank")
EXPERTS = {"family": "qwen3_moe", "experts": 4, "experts_per_token": 2}
BATCH = make_batch(num_rows=8)
STEP = 2e-4  # so small that no token changes its experts


def take(trainer: Trainer) -> UpdateReport:
    plan = plan_microbatches(BATCH, trainer.layout, trainer.train)
    return trainer.step(BATCH, plan, supervised_loss, loss_weights(BATCH, plan))


def routers(trainer: Trainer) -> list[BalancedRouter]:
    return [module for module in trainer.model[0].modules() if isinstance(module, BalancedRouter)]


@pytest.mark.parametrize(("aux", "z"), [(2.0, 0.0), (0.0, 0.5)])
def test_the_gradient_of_the_routers_is_that_of_the_weighed_sum(
    tmp_path: Path, aux: float, z: float
) -> None:
    """By differences along the gradient itself; at lr 0 an update only measures."""
    trainer = build(tmp_path, EXPERTS, moe=Moe(aux_loss=aux, z_loss=z), lr=0.0, clip_grad=0.0)
    weights = [router.weight for router in routers(trainer)]
    report = take(trainer)
    gradients = [weight.main_grad.clone() for weight in weights]
    norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
    values = []
    for sign in (1, -1):
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.data.add_(gradient / norm, alpha=sign * STEP)
        moved = take(trainer)
        terms = aux * moved.metrics["moe/aux_loss"] + z * moved.metrics["moe/z_loss"]
        # the terms reported are means over the layers
        values.append(moved.loss + len(weights) * terms)
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.data.sub_(gradient / norm, alpha=sign * STEP)
    assert (values[0] - values[1]) / (2 * STEP) == pytest.approx(
        float(norm), rel=0.03
    ) and norm > 1e-2
    assert 1 <= report.metrics["moe/aux_loss"] < 2, "a mean over rows, 1 where experts are balanced"
    assert 1 < report.metrics["moe/z_loss"] < 10, "about log(4)^2"
    trainer.close()


def test_the_bias_moves_towards_balance(tmp_path: Path) -> None:
    """Down where an expert had more tokens than the mean, up where it had fewer."""
    create = {**EXPERTS, "family": "glm4_moe", "layers": 3}
    trainer = build(tmp_path, create, moe=Moe(bias_update_rate=0.01))
    counts: dict[BalancedRouter, torch.Tensor] = {}

    def count(
        router: BalancedRouter, _inputs: object, outputs: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        counts[router] += outputs[1].sum(0)

    for router in routers(trainer):
        counts[router] = torch.zeros(4)
        router.register_forward_hook(count)
    before = {router: router.expert_bias.clone() for router in counts}
    take(trainer)
    for router, count_E in counts.items():
        assert count_E.sum() == 2 * BATCH.num_tokens and count_E.std() > 0
        expected = 0.01 * (count_E.mean() - count_E).sign()
        torch.testing.assert_close(router.expert_bias - before[router], expected)
    trainer.close()
