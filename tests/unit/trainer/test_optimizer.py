from __future__ import annotations

import pytest

from megarl.config.schema import Train
from megarl.trainer.optimizer import LrSchedule, learning_rate


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.7, 0.4, 0.1]),
        ("cosine", [0.5, 1.0, 1.0, 0.775, 0.325, 0.1]),
    ],
)
def test_warm_up_then_down_to_the_last_step(schedule: str, rates: list[float]) -> None:
    train = Train.model_validate({"lr": 1.0, "min_lr": 0.1, "steps": 6, "warmup_steps": 2, "schedule": schedule})
    assert [learning_rate(train, step) for step in range(6)] == pytest.approx(rates)
    assert learning_rate(train, 100) == pytest.approx(rates[-1])


def test_schedule_is_restored() -> None:
    train = Train.model_validate({"lr": 1.0, "steps": 6, "schedule": "linear"})
    one, other = LrSchedule(train, step=3), LrSchedule(train)
    other.load_state_dict(one.state_dict())
    assert other.lr == one.lr != LrSchedule(train).lr
