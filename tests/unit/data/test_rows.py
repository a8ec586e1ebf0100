"""Values of rows as text, and runs that learn nothing: what tests/corpus cannot show by a command line."""

from __future__ import annotations

import math
from decimal import Decimal

import pytest
import torch

from megarl.data.collate import token_batch
from megarl.data.rows import reference, reference_text
from megarl.rewards.interface import ScoreRequest
from megarl.rewards.rules import Accuracy
from megarl.stages.sft import sampled_accuracy
from megarl.telemetry.log import brief
from megarl.telemetry.metrics import update_metrics
from megarl.types import StepReport, UpdateReport


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3.25e-05, "0.0000325"),
        (1e22, "10000000000000000000000"),
        (5.0, "5"),
        (-0.5, "-0.5"),
        (Decimal("12.50"), "12.50"),
        (Decimal("1E+2"), "100"),
        (7, "7"),
        ("1.0e3", "1.0e3"),
        (math.nan, None),
        (None, None),
        (True, True),
        ([1.0], [1.0]),
    ],
)
def test_a_reference_is_text_as_exact_as_it_was_read(value, text):
    assert reference(value) == text and type(reference(value)) is type(text)


def test_a_list_is_no_text_to_compare_with():
    assert reference_text(False) == "false"
    with pytest.raises(ValueError, match="is a list, not one text"):
        reference_text(["a"])


@pytest.mark.parametrize(("response", "score"), [("True", 1.0), ("true", 1.0), ("no", 0.0)])
def test_a_boolean_is_compared_in_lower_case(response, score):
    request = ScoreRequest("0", "", response, True, final_answer=response)
    assert Accuracy()([request])[0].value == score


def skipped(loss: float = math.nan) -> UpdateReport:
    return UpdateReport(loss, loss, 0.1, skipped=True)


def test_what_nothing_has_measured_is_shown_as_a_dash():
    batch = token_batch([(torch.arange(3), torch.zeros(3, dtype=torch.bool))] * 2)
    accuracy = sampled_accuracy(batch, torch.zeros(6))
    metrics = update_metrics(StepReport((skipped(),), {"accuracy/sampled": accuracy}))
    assert brief(metrics) == "accuracy -  loss -"


def test_rows_without_a_learned_token_do_not_raise_the_mean():
    learned = torch.tensor([False, True, True])
    batch = token_batch([(torch.arange(3), learned), (torch.arange(3), learned & False)])
    logprobs = torch.full((6,), math.log(0.5))
    assert sampled_accuracy(batch, logprobs) == pytest.approx(0.25)
    both = (skipped(), UpdateReport(2.0, 1.0, 0.1, skipped=False))
    assert update_metrics(StepReport(both))["loss"] == 2.0
