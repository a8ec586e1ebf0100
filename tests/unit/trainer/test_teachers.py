"""Teachers: another model beside the policy, and one behind a URL; the student reaches a teacher that is enumerated."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from tiny_trainer import SMALL, build, make_batch
from torch import Tensor
from trainer_cases import load_model, oracle_log_softmax

from megarl.algorithms.objective import Objective
from megarl.commands.random_model import create_model, random_tokenizer
from megarl.config.load import parse_config
from megarl.config.schema import Algorithm, Create, FrozenModel
from megarl.data.collate import take_rows
from megarl.data.tokenizer import TokenIds, check_vocabulary
from megarl.models.registry import read_model
from megarl.platform.env import LOOPBACK
from megarl.rewards.served_model import ServedModel, client_of
from megarl.trainer.learner import PolicyLearner
from megarl.trainer.reference import forward_in_turn
from megarl.trainer.trainer import Trainer
from megarl.types import CheckFailed, MicrobatchRows, ScoredBatch, TokenOutputs, TrainBatch
from megarl.weights.sync.transports import Transport
from tests.unit.rewards.conftest import reply, serve

pytestmark = pytest.mark.usefixtures("one_rank")
OTHER = {
    "hidden": 48,
    "layers": 3,
    "heads": 3,
    "kv_heads": 3,
    "seed": 7,
}  # a model of another shape
VOCAB, LENGTH, PROMPT = 8, 3, 5  # 512 responses to one prompt
OFFLOAD = ("gradients", "optimizer", "weights")


def teacher_outputs(
    trainer: Trainer, folder: Path, top_k: int = 0
) -> Callable[[TrainBatch], TokenOutputs]:
    train = trainer.train.model_copy(update={"offload": OFFLOAD})
    other = Trainer.build(
        read_model(folder),
        trainer.layout,
        train=train,
        folder=folder,
        device=trainer.device,
        share_groups_with=trainer,
    )
    other.memory.offload_all()
    return partial(forward_in_turn, other, trainer.memory, top_k=top_k)


def completions(model: torch.nn.Module) -> Callable[[Any, dict[str, Any]], None]:
    """A server's answers: transformers in vLLM's format."""

    @torch.no_grad()
    def answer(handler: Any, body: dict[str, Any]) -> None:
        assert body["max_tokens"] == 1
        tokens, top_k = torch.tensor(body["prompt"]), min(body["prompt_logprobs"], 20)
        logprobs = model(input_ids=tokens[None]).logits[0].log_softmax(-1)[:-1]
        # the first may be among the others
        ids = torch.cat([tokens[1:, None], logprobs.topk(top_k, 1).indices], 1)
        given = [
            {str(t): {"logprob": lp, "rank": 1} for t, lp in zip(*row, strict=True)}
            for row in zip(ids.tolist(), logprobs.gather(1, ids).tolist(), strict=True)
        ]
        reply(handler, {"choices": [{"text": "", "prompt_logprobs": [None, *given]}]})

    return answer


def served_model(url: str, top_k: int = 0, **options: Any) -> ServedModel:
    part = FrozenModel(
        url=url, options={"timeout_s": 20.0, "total_s": 30.0, "backoff_s": 0.01} | options
    )
    return ServedModel(client_of(part, "teacher"), "tiny", Transport(), top_k)


@contextmanager
def serving(answer: Callable[[Any, dict[str, Any]], None]) -> Any:
    with serve() as server:
        server.answers["/v1/completions"] = answer
        yield server


def test_a_model_beside_the_policy_and_a_served_one_agree(tmp_path: Path) -> None:
    folder = create_model(Create(**(SMALL | OTHER)), tmp_path)
    student, batch = build(tmp_path, offload=OFFLOAD), make_batch(num_rows=8, temperature=1.0)
    before = student.forward(batch).logprobs_T
    model, found = (
        load_model(folder),
        [teacher_outputs(student, folder)(batch), teacher_outputs(student, folder, 4)(batch)],
    )
    with torch.no_grad():
        log_softmax = oracle_log_softmax(model, batch)
    with serving(completions(model)) as server:
        found += [served_model(f"{server.base}/v1/", top_k)(batch) for top_k in (0, 4)]
        assert len(server.seen) == 16 and server.seen[0][2]["model"] == "tiny"
    exact = log_softmax.gather(1, batch.labels[:, None])[:, 0].where(batch.mask, 0.0)
    assert before is not None and (before - exact).abs().max() > 0.5, "another model"
    top, ids = (x.where(batch.mask[:, None], 0) for x in log_softmax.topk(4, 1))
    for outputs, top_k in zip(found, (0, 4, 0, 4), strict=True):
        assert torch.allclose(outputs.logprobs_T, exact, atol=1e-5)
        assert (
            (outputs.extra_labels_TK is not None)
            == (outputs.extra_logprobs_TK is not None)
            == (top_k > 0)
        )
        assert not top_k or torch.equal(outputs.extra_labels_TK, ids)
        assert not top_k or torch.allclose(outputs.extra_logprobs_TK, top, atol=1e-5)
    after = student.forward(batch).logprobs_T
    assert after is not None and torch.equal(before, after), "the policy came back"
    student.close()


@contextmanager
def vllm_server(folder: Path, log: Path, *options: str) -> Any:
    """vLLM's own OpenAI server; its base URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(folder),
        "--port",
        str(port),
    ]
    command += [
        "--host",
        "127.0.0.1",
        "--served-model-name",
        "tiny",
        "--dtype",
        "float32",
        "--max-model-len",
        "64",
    ]
    env = (
        os.environ
        | LOOPBACK
        | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    )
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, *options], env=env, stdout=output, stderr=output, start_new_session=True
        )
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 240
    try:
        while True:
            with suppress(httpx.HTTPError):
                if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                    break
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.5)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.mark.long
@pytest.mark.exhaustive
def test_a_vllm_server_and_a_model_beside_the_policy_agree(tmp_path: Path) -> None:
    pytest.importorskip("vllm")  # whose attention on a CPU takes no heads of 16 channels
    folder = create_model(Create(**(SMALL | OTHER | {"head_dim": 64})), tmp_path)
    student, batch = build(tmp_path, offload=OFFLOAD), make_batch(num_rows=8, temperature=1.0)
    local = [teacher_outputs(student, folder)(batch), teacher_outputs(student, folder, 4)(batch)]
    with vllm_server(folder, tmp_path / "vllm.log", "--enforce-eager") as url:
        patient = {"timeout_s": 120.0, "total_s": 240.0}  # the first request compiles
        found = [served_model(f"{url}/v1", top_k, **patient)(batch) for top_k in (0, 4)]
        with pytest.raises(CheckFailed, match=r"--max-logprobs 21 or more; its default is 20"):
            served_model(f"{url}/v1", 21, retries=0, **patient)(batch)
    for outputs, own in zip(found, local, strict=True):
        assert torch.allclose(outputs.logprobs_T, own.logprobs_T, atol=1e-5)
    assert torch.equal(found[1].extra_labels_TK, local[1].extra_labels_TK)
    assert torch.allclose(found[1].extra_logprobs_TK, local[1].extra_logprobs_TK, atol=1e-5)
    student.close()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (
            {"choices": [{"text": ""}]},
            r"no log-probs \(bad_answer\).*without the log-probs of a token",
        ),
        (
            {"choices": [{"prompt_logprobs": [None] + [{"1": {"logprob": None}}] * 40}]},
            "without the log-probs of a token|NoneType as a score",
        ),
        ({}, "bad_answer"),
        (None, r"no log-probs \(http_400\).*resume the run once the server answers"),
    ],
)
def test_a_server_that_does_not_answer_stops_the_run(answer: Any, message: str) -> None:
    with serving(
        lambda handler, body: reply(handler, answer, status=200 if answer is not None else 400)
    ) as server:
        score, batch = (
            served_model(server.base + "/v1", retries=0),
            make_batch(num_rows=2, temperature=1.0),
        )
        with pytest.raises(CheckFailed, match=message):
            score(batch)
    with pytest.raises(CheckFailed, match=r"no log-probs \(no_connection\)"):
        score(batch)


@pytest.mark.parametrize("status", [200, 400])
def test_a_server_that_limits_log_probs_is_refused_with_vllms_option(status: int) -> None:
    entry = {str(token): {"logprob": -3.0} for token in range(67)}
    answer = {"choices": [{"prompt_logprobs": [None] + [entry] * 40}]}
    with serving(lambda handler, body: reply(handler, answer, status=status)) as server:
        served, batch = (
            served_model(server.base + "/v1", 68, retries=0),
            make_batch(num_rows=2, temperature=1.0),
        )
        with pytest.raises(CheckFailed, match=r"--max-logprobs 68 or more; its default is 20"):
            served(batch)
        if status == 200:
            assert (
                served_model(server.base + "/v1", 67)(batch)
                .extra_labels_TK[batch.mask]
                .sort()
                .values[0, -1]
                == 66
            )


def distilling(top_k: int, beta: float = 1.0) -> Objective:
    values = {
        "preset": "distill",
        "distill_coef": 0.5,
        "distill_top_k": top_k,
        "distill_beta": beta,
    }
    sections = {"algorithm": values, "teacher": {"model": "x"}, "model": {"create": {}}}
    return Objective(parse_config(sections).algorithm)


@pytest.mark.parametrize("top_k", [5, 67])
def test_the_step_is_that_of_the_divergence_in_plain_fp64(tmp_path: Path, top_k: int) -> None:
    """Loss, gradient norm and metric, in one micro-batch and in many; the other advantages are 0."""
    folder, batch = create_model(Create(**(SMALL | OTHER)), tmp_path), make_batch(num_rows=8)
    batch = replace(batch, rewards=0 * batch.rewards, token_rewards=0 * batch.token_rewards)
    found = []
    for size in (64, 512):
        student, objective = build(tmp_path, max_tokens_per_microbatch=size), distilling(top_k)
        learner = PolicyLearner(
            student, objective, frozen={"teacher_logprobs": teacher_outputs(student, folder, top_k)}
        )
        scored, _ = objective.advantages(batch, learner.score(batch), objective.initial_state())
        assert scored.extra_labels is not None and scored.extra_labels.dtype == torch.int32
        kept = take_rows(scored, [1, 4])
        assert (
            kept.extra_labels.shape == kept.teacher_top_logprobs.shape == (kept.num_tokens, top_k)
        )
        report = learner.update(scored).updates[0]
        found.append([report.loss, report.grad_norm, report.metrics["kl/teacher_top_k"]])
        student.close()
    model, other = (
        load_model(create_model(Create(**SMALL), tmp_path)).double(),
        load_model(folder).double(),
    )
    model.model.embed_tokens.padding_idx = None  # it would get no gradient
    p, q = (oracle_log_softmax(each, batch).double()[batch.mask].exp() for each in (model, other))
    ids = q.topk(top_k, 1).indices
    p, q = (
        torch.cat([x.gather(1, ids), 1 - x.gather(1, ids).sum(1, keepdim=True)], 1)
        for x in (p, q.detach())
    )
    p, q = (x[:, :top_k] if top_k == 67 else x for x in (p, q))
    kl = (p * (p / q).log()).sum(1).mean()
    (0.5 * kl).backward()
    norm = torch.stack([weight.grad.norm() for weight in model.parameters()]).norm()
    for figures in found:
        assert figures == pytest.approx([0.5 * float(kl), float(norm), float(kl)], rel=2e-5)


def test_a_teachers_tokens_that_the_policy_does_not_have_are_padding(tmp_path: Path) -> None:
    student, batch = build(tmp_path), make_batch(num_rows=2)
    ids, logprobs = (
        torch.tensor([66, 67]).repeat(batch.num_tokens, 1),
        torch.zeros(batch.num_tokens, 2),
    )
    teacher = TokenOutputs(logprobs[:, 0], extra_labels_TK=ids, extra_logprobs_TK=logprobs)
    scores = PolicyLearner(
        student, distilling(2), frozen={"teacher_logprobs": lambda _: teacher}
    ).score(batch)
    assert scores.teacher_top_logprobs is not None
    assert scores.teacher_top_logprobs.unique(dim=0).tolist() == [[0.0, -torch.inf]]
    student.close()


def test_urls_and_options_are_checked() -> None:
    for url, options, message in (
        ("ftp://a/v1", {}, "teacher.url='ftp://a/v1/completions'.*is not the URL of a server"),
        (
            "http://localhost:8/v1",
            {"retry": 1},
            "teacher.url='http.*has no option 'retry'; did you mean retries",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            client_of(FrozenModel(url=url, options=options), "teacher")


def test_another_vocabulary_is_refused() -> None:
    one, other = (random_tokenizer(Create(phrases=phrases)) for phrases in ((), ("ab",)))
    check_vocabulary(one, random_tokenizer(Create(hidden=64)), "teacher.model=x")
    with pytest.raises(
        ValueError,
        match=r"teacher.model=x has another tokenizer than the policy \(\d+ entries differ",
    ):
        check_vocabulary(one, other, "teacher.model=x")
    with pytest.raises(ValueError, match="2 entries differ"):
        check_vocabulary(TokenIds((), 67), TokenIds((), 68), "teacher.model=x")


def test_the_gradient_is_that_of_the_kl_divergence() -> None:
    """Over all tokens of one position, each with its probability, in fp64; beside the advantage of a reward."""
    torch.manual_seed(0)
    logits, teacher = (
        torch.randn(5, dtype=torch.float64, requires_grad=True),
        torch.randn(5).double().log_softmax(0),
    )
    logprobs, rewards = logits.log_softmax(0), torch.randn(5).double()
    kl = (logprobs.exp() * (logprobs - teacher)).sum()
    (exact,) = torch.autograd.grad(
        0.5 * kl - (logprobs.exp() * rewards).sum(), logits, retain_graph=True
    )
    batch = replace(
        batch_of(torch.arange(5)[:, None], length=1),
        rollout_logprobs=logprobs.detach().repeat_interleave(2),
    )
    algorithm = Algorithm(
        advantage="reinforce", loss="reinforce", correction="none", distill_coef=0.5
    )
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
        versions=torch.zeros(total, dtype=torch.int32), temperature=1.0,
    )  # fmt: skip


def row_sums(logprobs_T: Tensor) -> Tensor:
    return logprobs_T.double().view(-1, LENGTH + 1).sum(1)


@pytest.mark.long
@pytest.mark.parametrize(("top_k", "beta"), [(0, 1.0), (VOCAB, 1.0), (VOCAB, 0.5)])
def test_the_student_reaches_an_enumerable_teacher(tmp_path: Path, top_k: int, beta: float) -> None:
    """KL(student || teacher), exact over 512 responses, falls below 0.02 nats and a fiftieth of what it was."""
    small, steps = (
        {"vocab": VOCAB, "seed": 1},
        150,
    )  # all tokens: fewer leave the others' shares open
    student = build(
        tmp_path, small, lr=1e-2, schedule="linear", steps=steps, max_tokens_per_microbatch=8192
    )
    teacher = teacher_outputs(
        student, create_model(Create(**(SMALL | OTHER | {"vocab": VOCAB})), tmp_path), top_k
    )
    objective = distilling(top_k, beta)
    objective = replace(
        objective, algorithm=objective.algorithm.model_copy(update={"distill_coef": 1.0})
    )
    learner = PolicyLearner(student, objective, frozen={"teacher_logprobs": teacher})
    everything, draw = enumerate_batch(), torch.Generator().manual_seed(0)
    teacher_N = row_sums(teacher(everything).logprobs_T)
    assert torch.allclose(teacher_N.exp().sum(), torch.tensor(1.0, dtype=torch.float64), atol=1e-4)
    curve = []
    for _ in range(steps):
        logprobs_T = learner.trainer.logprobs(everything)
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
