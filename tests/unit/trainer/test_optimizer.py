"""The learning-rate schedule, and steps against torch's own AdamW."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_trainer import build
from transformers import get_scheduler

from megarl.config.schema import Train
from megarl.trainer.optimizer import LrSchedule, sum_of_squares, take_step, zero_grad

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.775, 0.55, 0.325]),
        ("cosine", [0.5, 1.0, 1.0, 0.8681981, 0.55, 0.2318019]),
    ],
)
def test_warm_up_then_down_to_the_end(schedule: str, rates: list[float]) -> None:
    train = Train.model_validate(
        {"lr": 1.0, "min_lr": 0.1, "steps": 6, "warmup_steps": 2, "schedule": schedule}
    )
    assert [LrSchedule(train, step).lr for step in range(6)] == pytest.approx(rates)
    end = 1.0 if schedule == "constant" else 0.1
    assert LrSchedule(train, 6).lr == LrSchedule(train, 100).lr == pytest.approx(end)


@pytest.mark.parametrize(("warmup", "steps"), [(0, 1), (0, 9), (3, 9), (8, 9)])
@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_after_the_warm_up_rates_are_megatrons_and_transformers(
    schedule: str, warmup: int, steps: int
) -> None:
    """The last step still learns."""
    # imported by megarl.trainer first, which patches it
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    values = {"lr": 0.3, "steps": steps, "warmup_steps": warmup, "schedule": schedule}
    ours = [LrSchedule(Train.model_validate(values), step).lr for step in range(steps + 1)]
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.3)
    theirs = get_scheduler(schedule, optimizer, warmup, steps)
    group = {"max_lr": 0.3, "min_lr": 0.0, "lr": 0.3}
    megatron = OptimizerParamScheduler(
        SimpleNamespace(param_groups=[group]),  # type: ignore[arg-type]
        *(0.0, 0.3, 0.0, warmup, steps, schedule, 0.0, 0.0, steps, "constant"),
    )
    for step, lr in enumerate(ours):
        if step >= warmup:
            assert lr == pytest.approx(theirs.get_last_lr()[0], abs=1e-16)
            assert lr == pytest.approx(megatron.get_lr(group), abs=1e-16)
        optimizer.step()
        theirs.step()
        megatron.step(1)
    assert ours[steps - 1] > 0 == ours[steps]


@pytest.mark.usefixtures("one_rank")
def test_steps_are_those_of_torchs_adamw(tmp_path: Path) -> None:
    """With an eps as large as the gradients, so that their scale matters and clipping shows."""
    settings = {"betas": (0.8, 0.95), "eps": 0.05, "weight_decay": 0.3, "clip_grad": 0.5}
    trainer = build(tmp_path, **settings)
    parameters = list(trainer.parameters_by_name().values())
    plain = [parameter.detach().clone().requires_grad_() for parameter in parameters]
    groups = [
        {"params": [p for p in plain if (p.ndim > 1) == decays], "weight_decay": 0.3 * decays}
        for decays in (1, 0)
    ]
    adamw = torch.optim.AdamW(groups, lr=1.0, betas=(0.8, 0.95), eps=0.05)
    random = torch.Generator().manual_seed(0)
    for scale, lr in ((0.1, 0.02), (1e-4, 0.03), (0.2, 0.01)):  # the second is not clipped
        zero_grad(trainer.model, trainer.optimizer)
        for parameter, copy in zip(parameters, plain, strict=True):
            copy.grad = scale * torch.randn(copy.shape, generator=random)
            parameter.main_grad.copy_(copy.grad)
        grad_norm, _ = take_step(trainer.optimizer, lr=lr, clip_grad=0.5, device=CPU)
        norm = float(torch.nn.utils.clip_grad_norm_(plain, 0.5))
        for group in adamw.param_groups:
            group["lr"] = lr
        adamw.step()
        assert grad_norm == pytest.approx(norm, rel=1e-5) and (norm > 0.5) == (scale > 1e-3)
    for parameter, copy in zip(parameters, plain, strict=True):
        torch.testing.assert_close(parameter.detach(), copy.detach(), rtol=1e-5, atol=1e-6)
    trainer.close()


def test_squares_of_many_numbers_are_summed_in_fp64() -> None:
    random = torch.Generator().manual_seed(0)
    many = (
        torch.randn(4_000_077, generator=random)
        * torch.rand(4_000_077, generator=random) ** 4
        * 1e-3
    )
    expected = float(many.double().square().sum())
    assert float(sum_of_squares(many)) == pytest.approx(expected, rel=2e-7)
    assert float(sum_of_squares(many[:100])) == pytest.approx(
        float(many[:100].double().square().sum()), rel=2e-7
    )
    assert float(many.norm()) ** 2 != pytest.approx(expected, rel=1e-4), "what it is for"


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("is_decoupled", [False, True])
def test_gradients_are_clipped_where_the_optimizer_keeps_them(is_decoupled: bool) -> None:
    """Megatron-Core's precision-aware optimizer keeps them in `decoupled_grad`."""
    parameter = torch.nn.Parameter(torch.zeros(4))
    setattr(parameter, "decoupled_grad" if is_decoupled else "grad", torch.ones(4))
    optimizer: Any = SimpleNamespace(
        param_groups=[],
        config=SimpleNamespace(use_precision_aware_optimizer_no_fp8_or_ds_fp8=is_decoupled),
        prepare_grads=lambda: False,
        get_main_grads_for_grad_norm=lambda: [torch.ones(4)],
        get_parameters=lambda: [parameter],
        step_with_ready_grads=lambda: True,
    )
    take_step(optimizer, lr=1.0, clip_grad=0.5, device=CPU)
    gradient = parameter.decoupled_grad if is_decoupled else parameter.grad  # type: ignore[attr-defined]
    torch.testing.assert_close(gradient, torch.full((4,), 0.25))


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("entry", [1.0, float("nan"), float("inf")])
def test_without_clipping_a_step_has_the_whole_gradient_or_none(entry: float) -> None:
    """`clip_grad` 0 is no bound; a gradient that is not finite changes nothing, whoever finds it."""
    parameter = torch.nn.Parameter(torch.zeros(4))
    parameter.grad = torch.tensor([1.0, entry, 1.0, 1.0])
    stepped: list[bool] = []
    optimizer: Any = SimpleNamespace(
        param_groups=[],
        config=SimpleNamespace(use_precision_aware_optimizer_no_fp8_or_ds_fp8=False),
        prepare_grads=lambda: False,
        get_main_grads_for_grad_norm=lambda: [parameter.grad],
        get_parameters=lambda: [parameter],
        step_with_ready_grads=lambda: stepped.append(True),
    )
    norm, skipped = take_step(optimizer, lr=1.0, clip_grad=0.0, device=CPU)
    assert skipped == (entry != 1.0) and stepped == [True] * (entry == 1.0)
    if entry == 1.0:
        assert norm == 2.0 and parameter.grad.tolist() == [1.0] * 4
