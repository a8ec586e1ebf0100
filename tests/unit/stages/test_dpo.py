"""DPO with the real trainer: the loss of its formula, the reference, and what is computed once."""

from __future__ import annotations

import math
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "trainer"))
from tiny_trainer import build

from megarl.algorithms.preference import response_logprobs
from megarl.config.schema import Dpo
from megarl.data.preferences import preference_batch
from megarl.data.prompts import PromptStream
from megarl.data.tasks import ranked_tokens
from megarl.data.tokenizer import TokenIds
from megarl.stages.dpo import DpoLearner
from megarl.trainer import trainer as trainer_module
from megarl.trainer.reference import Reference
from megarl.types import PreferenceBatch, Prompt

pytestmark = pytest.mark.usefixtures("one_rank")


def batch_of(*, seed: int, prompts: int = 6) -> PreferenceBatch:
    rows = ranked_tokens(split="train", vocab=67, size=prompts, responses=3, seed=seed)
    return preference_batch(
        TokenIds((2,), 67),
        [
            Prompt(n, tuple(map(int, row["prompt"].split())), row["prompt"], extra=row)
            for n, row in enumerate(rows)
        ],
    )


def make_learner(folder: Path, **train) -> DpoLearner:
    trainer = build(folder, **train)
    return DpoLearner(
        trainer,
        Reference(trainer.parameters_by_name),
        Dpo(),
        {},
        lambda _: nullcontext(),
    )


def logprobs_N(learner: DpoLearner, batch: PreferenceBatch) -> torch.Tensor:
    return response_logprobs(
        learner.trainer.forward(batch).logprobs_T, batch.mask, batch.cu_seqlens
    )


def test_the_reference_is_the_first_model_and_the_loss_that_of_the_formula(tmp_path: Path) -> None:
    first, later = batch_of(seed=0), batch_of(seed=1)
    learner = make_learner(tmp_path)
    expected_N = logprobs_N(learner, later)
    assert learner.accuracy(first)["accuracy"] == 0.5, "where the policy is the reference"
    start = learner.update(first).updates[0]
    assert start.loss == pytest.approx(math.log(2), abs=1e-7) and start.grad_norm > 1e-2
    assert abs(start.metrics["rewards/margin"]) < 1e-6
    policy_N = logprobs_N(learner, later)
    assert (policy_N - expected_N).abs().max() > 0.1, "the update shows"
    torch.testing.assert_close(learner.reference_logprobs(later), expected_N, rtol=0, atol=0)
    margin_P = 0.1 * ((policy_N - expected_N)[later.pairs] @ torch.tensor([1.0, -1.0]).double())
    accuracy = learner.accuracy(later)
    assert accuracy["size"] == 6 and accuracy["rewards/margin"] == pytest.approx(
        float(margin_P.mean())
    )
    assert accuracy["accuracy"] == pytest.approx(float((margin_P > 0).double().mean()))
    report = learner.update(later)
    assert report.updates[0].loss == pytest.approx(
        float(-margin_P.sigmoid().log().mean()), rel=1e-6
    )
    assert report.updates[0].metrics["rewards/accuracy"] == pytest.approx(
        float((margin_P > 0).double().mean())
    )
    assert report.metrics["pairs"] == 18
    learner.trainer.close()


def test_micro_batches_and_updates_change_no_loss(tmp_path: Path) -> None:
    """A step on micro-batches of one prompt each equals a step on one; two updates have half of the pairs each."""
    batch, found = batch_of(seed=0), {}
    for max_tokens in (40, 10_000):
        learner = make_learner(tmp_path, max_tokens_per_microbatch=max_tokens)
        found[max_tokens] = [learner.update(batch_of(seed=seed)).updates[0] for seed in (0, 1, 2)]
        learner.trainer.close()
    for one, many in zip(*found.values(), strict=True):
        assert one.loss == pytest.approx(many.loss, rel=1e-5) and one.grad_norm == pytest.approx(
            many.grad_norm, rel=1e-4
        )
    learner = make_learner(tmp_path, updates_per_step=2, lr=0.0)
    updates = learner.update(batch).updates
    assert len(updates) == 2 and all(
        update.loss == pytest.approx(math.log(2), abs=1e-6) for update in updates
    )
    learner.trainer.close()


def test_a_response_is_scored_once_and_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, run = [], trainer_module.forward_backward
    monkeypatch.setattr(
        trainer_module, "forward_backward", lambda *args, **kw: (made.append(1), run(*args, **kw))
    )
    learner, batch = make_learner(tmp_path), batch_of(seed=0)
    passes = []
    for seed in (0, 0, 1):
        learner.update(batch_of(seed=seed))
        passes.append(len(made))
    assert passes == [2, 3, 5], "the reference's and the update's own, which alone is repeated"
    stream, resumed = (PromptStream([], lambda question: (), max_tokens=1) for _ in range(2))
    stream.kept.update(learner.known)
    state = stream.state()
    stream.kept.clear()
    resumed.restore(state)
    assert resumed.kept == learner.known and len(resumed.kept) == 36
    known_N = learner.reference_logprobs(batch)
    learner.known.clear()
    learner.known.update(resumed.kept)
    assert torch.equal(learner.reference_logprobs(batch), known_N) and len(made) == 5
    learner.trainer.close()


def test_a_batch_without_pairs_changes_nothing(tmp_path: Path) -> None:
    learner = make_learner(tmp_path)
    learner.update(batch_of(seed=0))
    before = [parameter.clone() for parameter in learner.trainer.parameters_by_name().values()]
    report = learner.update(preference_batch(TokenIds((2,), 67), []))
    assert report.updates[0].skipped and report.metrics["pairs"] == 0
    assert all(map(torch.equal, before, learner.trainer.parameters_by_name().values()))
    learner.trainer.close()
