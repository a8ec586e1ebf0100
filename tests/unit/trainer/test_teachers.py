"""Teachers: another model beside the policy, and one behind a URL; the student reaches a teacher that is enumerated."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_trainer import SMALL, build, make_batch
from torch import Tensor
from trainer_cases import load_model, oracle_log_softmax

from megarl.algorithms.objective import Objective
from megarl.config.load import parse_config
from megarl.config.schema import Algorithm, Create, FrozenModel
from megarl.data.tokenizer import TokenIds, check_vocabulary
from megarl.launch.random_model import create_model, random_tokenizer
from megarl.models.registry import read_model
from megarl.rewards.served_model import ServedModel, client_of
from megarl.trainer.learner import PolicyLearner
from megarl.trainer.reference import logprobs_in_turn
from megarl.trainer.trainer import Trainer
from megarl.types import CheckFailed, MicrobatchRows, ScoredBatch, TokenOutputs, TrainBatch
from megarl.weights.transports.inprocess import InProcess
from tests.unit.rewards.conftest import reply, serve

pytestmark = pytest.mark.usefixtures("one_rank")
OTHER = {"hidden": 48, "layers": 3, "heads": 3, "kv_heads": 3, "seed": 7}  # a model of another shape
VOCAB, LENGTH, PROMPT = 8, 3, 5  # 512 responses to one prompt
OFFLOAD = ("gradients", "optimizer", "weights")


def beside(trainer: Trainer, folder: Path) -> Callable[[TrainBatch], Tensor]:
    train = trainer.train.model_copy(update={"offload": OFFLOAD})
    other = Trainer.build(
        read_model(folder), trainer.layout, train=train, folder=folder, device=trainer.device, beside=trainer
    )
    other.memory.offload_all()
    return partial(logprobs_in_turn, other, trainer.memory)


def completions(model: torch.nn.Module) -> Callable[[Any, dict[str, Any]], None]:
    """A server's answers: transformers in vLLM's format."""

    @torch.no_grad()
    def answer(handler: Any, body: dict[str, Any]) -> None:
        assert body["max_tokens"] == 1 and body["prompt_logprobs"] == 0
        tokens = torch.tensor(body["prompt"])
        logprobs = model(input_ids=tokens[None]).logits[0].log_softmax(-1)[:-1].gather(1, tokens[1:, None])[:, 0]
        given = [
            {str(t): {"logprob": lp, "rank": 1}} for t, lp in zip(body["prompt"][1:], logprobs.tolist(), strict=True)
        ]
        reply(handler, {"choices": [{"text": "", "prompt_logprobs": [None, *given]}]})

    return answer


def served_model(url: str, **options: Any) -> ServedModel:
    part = FrozenModel(url=url, options={"timeout_s": 20.0, "total_s": 30.0, "backoff_s": 0.01} | options)
    return ServedModel(client_of(part, "teacher"), "tiny", InProcess())


@contextmanager
def serving(answer: Callable[[Any, dict[str, Any]], None]) -> Any:
    with serve() as server:
        server.answers["/v1/completions"] = answer
        yield server


def test_a_model_beside_the_policy_and_a_served_one_agree(tmp_path: Path) -> None:
    folder = create_model(Create(**(SMALL | OTHER)), tmp_path)
    student, batch = build(tmp_path, offload=OFFLOAD), make_batch(num_rows=8, temperature=1.0)
    before = student.forward(batch).logprobs_T
    local = beside(student, folder)(batch)
    model = load_model(folder)
    with torch.no_grad():
        exact = oracle_log_softmax(model, batch).gather(1, batch.labels[:, None])[:, 0].where(batch.mask, 0.0)
    with serving(completions(model)) as server:
        served = served_model(f"{server.base}/v1/")(batch)
        assert len(server.seen) == 8 and server.seen[0][2]["model"] == "tiny"
    assert before is not None and (before - local).abs().max() > 0.5, "another model"
    assert torch.allclose(local, exact, atol=1e-5) and torch.allclose(served, exact, atol=1e-5)
    after = student.forward(batch).logprobs_T
    assert after is not None and torch.equal(before, after), "the policy came back"
    student.close()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"choices": [{"text": ""}]}, r"no log-probs \(bad_answer\).*without the log-probs of a token"),
        (
            {"choices": [{"prompt_logprobs": [None] + [{"1": {"logprob": None}}] * 40}]},
            "without the log-probs of a token|NoneType as a score",
        ),
        ({}, "bad_answer"),
        (None, r"no log-probs \(http_400\).*resume the run once the server answers"),
    ],
)
def test_a_server_that_does_not_answer_stops_the_run(answer: Any, message: str) -> None:
    with serving(lambda handler, body: reply(handler, answer, status=200 if answer is not None else 400)) as server:
        score, batch = served_model(server.base + "/v1", retries=0), make_batch(num_rows=2, temperature=1.0)
        with pytest.raises(CheckFailed, match=message):
            score(batch)
    with pytest.raises(CheckFailed, match=r"no log-probs \(no_connection\)"):
        score(batch)


def test_urls_and_options_are_checked() -> None:
    for url, options, message in (
        ("ftp://a/v1", {}, "teacher.url='ftp://a/v1/completions'.*is not the URL of a server"),
        ("http://localhost:8/v1", {"retry": 1}, "teacher.url='http.*has no option 'retry'; did you mean retries"),
    ):
        with pytest.raises(ValueError, match=message):
            client_of(FrozenModel(url=url, options=options), "teacher")


def test_another_vocabulary_is_refused() -> None:
    one, other = (random_tokenizer(Create(phrases=phrases)) for phrases in ((), ("ab",)))
    check_vocabulary(one, random_tokenizer(Create(hidden=64)), "teacher.model=x")
    with pytest.raises(ValueError, match=r"teacher.model=x has another tokenizer than the policy \(\d+ entries differ"):
        check_vocabulary(one, other, "teacher.model=x")
    with pytest.raises(ValueError, match="2 entries differ"):
        check_vocabulary(TokenIds((), 67), TokenIds((), 68), "teacher.model=x")


def test_the_gradient_is_that_of_the_kl_divergence() -> None:
    """Over all tokens of one position, each with its probability, in fp64; beside the advantage of a reward."""
    torch.manual_seed(0)
    logits, teacher = torch.randn(5, dtype=torch.float64, requires_grad=True), torch.randn(5).double().log_softmax(0)
    logprobs, rewards = logits.log_softmax(0), torch.randn(5).double()
    kl = (logprobs.exp() * (logprobs - teacher)).sum()
    (exact,) = torch.autograd.grad(0.5 * kl - (logprobs.exp() * rewards).sum(), logits, retain_graph=True)
    batch = replace(
        batch_of(torch.arange(5)[:, None], length=1), rollout_logprobs=logprobs.detach().repeat_interleave(2)
    )
    algorithm = Algorithm(advantage="reinforce", loss="reinforce", correction="none", distill_coef=0.5)
    scored = ScoredBatch(
        **{field.name: getattr(batch, field.name) for field in fields(TrainBatch)},
        advantages=rewards.repeat_interleave(2), old_logprobs=None, ref_logprobs=None, kl_coef=0.0,
        teacher_logprobs=teacher.repeat_interleave(2),
    )  # fmt: skip
    rows = MicrobatchRows(tuple(range(5)), torch.arange(10), batch.cu_seqlens, batch.mask)
    losses = Objective(algorithm).loss(scored)(TokenOutputs(logprobs.repeat_interleave(2)), rows)
    weights = logprobs.detach().exp().repeat_interleave(2) * batch.mask
    (found,) = torch.autograd.grad((losses.loss * weights).sum(), logits)
    assert torch.allclose(found, exact, atol=1e-12)
    assert float(losses.sums["kl/teacher"]) > 0


# --- the student reaches the teacher ------------------------------------------------------------------------------


def enumerate_batch() -> TrainBatch:
    """Every response to the prompt: rows [prompt, a, b, c]."""
    ids = torch.cartesian_prod(*[torch.arange(VOCAB)] * LENGTH)
    return batch_of(ids)


def batch_of(ids_NL: Tensor, length: int = LENGTH) -> TrainBatch:
    count = len(ids_NL)
    tokens = torch.cat([torch.full((count, 1), PROMPT), ids_NL], 1)
    total = tokens.numel()
    mask = torch.tensor([True] * length + [False]).repeat(count)
    labels = tokens.flatten().roll(-1).where(mask, 0)
    return TrainBatch(
        tokens=tokens.flatten(), labels=labels, mask=mask, cu_seqlens=torch.arange(count + 1) * (length + 1),
        rollout_logprobs=torch.zeros(total), token_rewards=torch.zeros(total),
        step_ends=torch.zeros(total, dtype=torch.bool), outcome_at=torch.full((count,), -1),
        rewards=torch.zeros(count), baseline=torch.zeros(count), group=torch.zeros(count, dtype=torch.int64),
        prompt_id=torch.zeros(count, dtype=torch.int64), finish=torch.zeros(count, dtype=torch.int64),
        versions=torch.zeros(count, 2, dtype=torch.int64), temperature=1.0,
    )  # fmt: skip


def row_sums(logprobs_T: Tensor) -> Tensor:
    return logprobs_T.double().view(-1, LENGTH + 1).sum(1)


@pytest.mark.long
def test_the_student_reaches_an_enumerable_teacher(tmp_path: Path) -> None:
    """KL(student || teacher), exact over 512 responses, falls below 0.02 nats and a fiftieth of what it was."""
    small = {"vocab": VOCAB, "seed": 1}
    student = build(tmp_path, small, lr=1e-2, schedule="linear", steps=150, max_tokens_per_microbatch=8192)
    teacher = beside(student, create_model(Create(**(SMALL | OTHER | {"vocab": VOCAB})), tmp_path))
    sections = {"algorithm": {"preset": "distill"}, "teacher": {"model": "x"}, "model": {"create": {}}}
    objective = Objective(parse_config(sections).algorithm)
    learner = PolicyLearner.of(student, objective, frozen={"teacher_logprobs": teacher})
    everything, draw = enumerate_batch(), torch.Generator().manual_seed(0)
    teacher_N = row_sums(teacher(everything))
    assert torch.allclose(teacher_N.exp().sum(), torch.tensor(1.0, dtype=torch.float64), atol=1e-4)
    curve = []
    for _ in range(150):
        logprobs_T = learner.logprobs(everything)
        student_N = row_sums(logprobs_T)
        curve.append(float((student_N.exp() * (student_N - teacher_N)).sum()))
        rows = torch.multinomial(student_N.exp(), 256, replacement=True, generator=draw)
        sampled = logprobs_T.view(-1, LENGTH + 1)[rows].flatten()
        ids = everything.tokens.view(-1, LENGTH + 1)[rows, 1:]
        batch = replace(batch_of(ids), rollout_logprobs=sampled)
        scored, _ = objective.advantages(batch, learner.score(batch), objective.initial_state())
        learner.update(scored)
    print([round(value, 4) for value in curve[::10]], curve[-1])
    assert curve[0] > 0.5 and curve[-1] < min(0.02, 0.02 * curve[0]), curve
    student.close()
