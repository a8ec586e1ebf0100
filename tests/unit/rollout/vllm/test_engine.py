"""The engine around a stand-in for vLLM's `LLM`; with vLLM itself it is tested in tests/dist."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.config.schema import Rollout
from megarl.data.tokenizer import TokenIds, stop_token_ids
from megarl.rollout.sampling import sample_all
from megarl.rollout.vllm.arguments import _moe_backend, sampling_params
from megarl.rollout.vllm.engine import Engine
from megarl.types import CheckFailed, Prompt, Request


def flat(tokens: list[int]) -> SimpleNamespace:
    """vLLM's FlatLogprobs."""
    return SimpleNamespace(token_ids=tokens, logprobs=[-1.0] * len(tokens))


class Llm:
    model_config = SimpleNamespace(max_model_len=8)

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.running: list[Any] = []

    def wake_up(self, tags: list[str]) -> None:
        self.calls.extend(tags)

    def enqueue(
        self, inputs: list[Any], params: list[Any], *, use_tqdm: bool, **_options: Any
    ) -> list[str]:
        self.calls.append("enqueue")
        for number, (prompt, each) in enumerate(zip(inputs, params, strict=True)):
            prompt_logprobs = flat(prompt["prompt_token_ids"][1:])
            output = self._sample(**each) if "stop_token_ids" in each else SimpleNamespace()
            output.__dict__.update(
                request_id=str(7 + number), finished=True, prompt_logprobs=prompt_logprobs
            )
            self.running.append(output)
        return [f"{output.request_id}-a1b2" for output in self.running]

    @property
    def llm_engine(self) -> Any:
        return SimpleNamespace(step=self._step, has_unfinished_requests=lambda: bool(self.running))

    def _step(self) -> list[Any]:
        """The last request is finished first, after a step in which it is not."""
        output = self.running[-1]
        if output.finished:
            output.finished = False
            return [SimpleNamespace(request_id=output.request_id, finished=False)]
        output.finished = True
        return [self.running.pop()]

    def _sample(self, max_tokens: int, stop_token_ids: list[int], **_: Any) -> SimpleNamespace:
        """Samples 11, 12, ... as vLLM does: the token that stops is part of the response."""
        tokens = []
        for token in range(11, 11 + max_tokens):
            tokens.append(token)
            if token in stop_token_ids:
                break
        reason = "stop" if tokens[-1] in stop_token_ids else "length"
        answer = SimpleNamespace(token_ids=tokens, logprobs=flat(tokens), finish_reason=reason)
        return SimpleNamespace(outputs=[answer], num_cached_tokens=1)


def test_the_cache_is_awake_when_a_sync_scores_its_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM schedules nothing before all of it is awake, and `generate` would wait for ever."""
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=dict))
    llm, receiver = Llm(), SimpleNamespace(state="sealed", request=None)
    engine = Engine(llm, Rollout(), (), receiver, eager=False)  # type: ignore[arg-type]
    engine._asleep = ["weights", "kv_cache"]
    engine.wake("weights")
    assert [row.tolist() for row in engine.score(torch.zeros(2, 3, dtype=torch.int64))] == [
        [-1.0, -1.0]
    ] * 2
    assert llm.calls == ["weights", "kv_cache", "enqueue"]


@pytest.mark.parametrize(
    ("stop", "tokens", "finish"), [("12", [11, 12], "stop"), ("15", [11, 12, 13, 14], "length")]
)
def test_a_stop_token_ends_the_response_and_stays_in_it(
    monkeypatch: pytest.MonkeyPatch, stop: str, tokens: list[int], finish: str
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=dict))
    receiver = SimpleNamespace(state="ready", version=0, request=None)
    ids = stop_token_ids(TokenIds((2,), 67), (stop,))
    engine = Engine(Llm(), Rollout(max_tokens=4), ids, receiver, eager=False)  # type: ignore[arg-type]
    requests = [Request(Prompt(0, (5, 6), "5 6"), 0, seed=1, temperature=1.0)]
    (sample,) = sample_all(engine, requests)
    assert (sample.tokens.tolist(), sample.finish) == ([5, 6, *tokens], finish)
    assert sample.trainable.tolist() == [False, False] + [True] * len(tokens)
    assert sample.rollout_logprobs.tolist() == [0.0, 0.0] + [-1.0] * len(tokens)
    assert sample.prompt_tokens_computed == 1, "of 2 tokens, 1 was cached"


@pytest.mark.parametrize(
    ("capability", "backend"), [((9, 0), "auto"), ((10, 0), "triton"), (None, "auto")]
)
def test_experts_keep_their_width_on_blackwell(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None, backend: str
) -> None:
    """vLLM 0.33 would round 192 up to 256 there, and its loader's trace would meet rows of no checkpoint."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert _moe_backend() == backend


def test_samples_are_returned_as_they_are_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=dict))
    llm = Llm()
    receiver = SimpleNamespace(state="ready", version=0, request=None)
    engine = Engine(llm, Rollout(max_tokens=4), (12,), receiver, eager=False)  # type: ignore[arg-type]
    requests = [
        Request(Prompt(number, (5, 6), ""), 0, seed=1, temperature=1.0) for number in range(3)
    ]
    engine.submit(requests)
    with pytest.raises(ValueError, match="sample 0 of prompt 1 was submitted twice"):
        engine.submit(requests[1:])
    for prompt_id in (2, 1, 0):
        assert engine.running() == prompt_id + 1
        assert [sample.prompt_id for sample in engine.poll()] == [prompt_id]
        assert len(llm.running) == prompt_id
    assert engine.poll() == []


def test_params_of_a_request_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """When it arrives, as that checks its prompt; not again before its first step."""
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=dict))
    made: list[int] = []

    def params(request: Request, *args: Any) -> Any:
        made.append(request.prompt.prompt_id)
        return sampling_params(request, *args)

    monkeypatch.setattr("megarl.rollout.vllm.arguments.sampling_params", params)
    receiver = SimpleNamespace(state="ready", version=0, request=None)
    engine = Engine(Llm(), Rollout(max_tokens=4), (12,), receiver, eager=False)  # type: ignore[arg-type]
    sample_all(engine, [Request(Prompt(n, (5, 6), ""), 0, 1, 1.0) for n in range(3)])
    assert made == [0, 1, 2]


def test_weights_that_change_under_a_request_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tokens would all have the later version's stamp."""
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=dict))
    receiver = SimpleNamespace(state="ready", version=0, request=None)
    engine = Engine(Llm(), Rollout(max_tokens=4), (12,), receiver, eager=False)  # type: ignore[arg-type]
    engine.submit([Request(Prompt(0, (5, 6), ""), 0, seed=1, temperature=1.0)])
    receiver.version = 1
    with pytest.raises(CheckFailed, match="from version 0 to 1 while 1 requests are running"):
        engine.poll()


def test_the_first_rank_decides_what_a_replica_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """What arrived there is taken over; what arrived or was aborted at another rank alone is named."""
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=dict))
    one, other = (Request(Prompt(n, (5, 6), ""), 0, seed=1, temperature=1.0) for n in (1, 2))

    def of_rank_1(requests: list[Request], of_first: list[Request]) -> Engine:
        receiver = SimpleNamespace(state="ready", version=0, request=None)
        engine = Engine(Llm(), Rollout(max_tokens=4), (12,), receiver, eager=False)  # type: ignore[arg-type]
        engine._ranks = "a group of two"
        first = [(*each.key, each.seed, each.temperature, each.tokens) for each in of_first]
        monkeypatch.setattr("megarl.rollout.vllm.engine.gather_values", lambda own, _: [first, own])
        monkeypatch.setattr("torch.distributed.get_rank", lambda _: 1)
        votes = torch.tensor([5, -3, 1])
        monkeypatch.setattr("torch.distributed.all_reduce", lambda x, *_: x.copy_(votes))
        engine.submit(requests)
        return engine

    engine = of_rank_1([one], [one, other])
    monkeypatch.setattr(engine, "_step", lambda: [])
    engine.poll(0.0)
    assert engine.running() == 2 and [*engine._ids] == [one.key, other.key]
    with pytest.raises(CheckFailed, match="sample 0 of prompt 2 was submitted to rank 1 of an eng"):
        of_rank_1([one, other], [one]).poll()
    engine = of_rank_1([], [])
    engine._aborted = [one.key]
    with pytest.raises(
        CheckFailed, match="sample 0 of prompt 1 was aborted at rank 1 of an engine"
    ):
        engine.poll()


@pytest.mark.parametrize(("timeout_s", "agreements", "polls"), [(None, 3, 3), (60.0, 20, 10)])
def test_ranks_agree_once_in_several_steps(
    monkeypatch: pytest.MonkeyPatch, timeout_s: float | None, agreements: int, polls: int
) -> None:
    """10 requests, each finished after 2 steps; with a time-out the first rank's clock counts before each step."""
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=dict))
    receiver = SimpleNamespace(state="ready", version=0, request=None)
    engine = Engine(Llm(), Rollout(max_tokens=4), (12,), receiver, eager=False)  # type: ignore[arg-type]
    engine._ranks = "a group of two"
    agreed: list[int] = []
    monkeypatch.setattr("torch.distributed.get_rank", lambda _: 0)
    monkeypatch.setattr("torch.distributed.all_reduce", lambda x, *_: agreed.append(1))
    engine.submit([Request(Prompt(n, (5, 6), ""), 0, seed=1, temperature=1.0) for n in range(10)])
    got = []
    while engine.running():
        got.append(engine.poll(timeout_s))
    assert sorted(sample.prompt_id for part in got for sample in part) == [*range(10)]
    assert (len(agreed), len(got)) == (agreements, polls)


def test_the_cache_is_freed_alone_and_what_is_left_can_fall_asleep(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A sync that is refused after its probe must free the engine's weights before a checkpoint is saved."""
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=dict))
    calls: list[str] = []
    llm, receiver = Llm(), SimpleNamespace(state="sealed", request=None, abort=lambda: None)
    llm.calls = calls
    llm.sleep = lambda level: calls.append(f"sleep {level}")  # type: ignore[attr-defined]
    llm.release_kv_cache_memory = lambda: calls.append("release")  # type: ignore[attr-defined]
    engine = Engine(llm, Rollout(sleep_level=2), (), receiver, eager=False)  # type: ignore[arg-type]
    engine.free_cache()
    engine.free_cache()
    assert calls == ["sleep 0", "release"] and engine.is_asleep
    engine.sleep()
    engine.sleep()
    assert calls[2:] == ["sleep 2"]
    engine.wake("weights")
    engine.wake("kv_cache")
    assert calls[3:] == ["weights", "kv_cache"] and not engine.is_asleep
    awake = Engine(llm, Rollout(), (), receiver, eager=False)  # type: ignore[arg-type]
    awake.free_cache()
    awake.sleep()
    assert not awake.is_asleep and len(calls) == 5
