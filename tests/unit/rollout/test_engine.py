"""The engine around a stand-in for vLLM's `LLM`; with vLLM itself it is tested in tests/dist."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.config.schema import Rollout
from megarl.data.tokenizer import TokenIds, stop_token_ids
from megarl.rollout.engine import Engine, _moe_backend
from megarl.types import Prompt, Request


def flat(tokens: list[int]) -> SimpleNamespace:
    """vLLM's FlatLogprobs."""
    return SimpleNamespace(token_ids=tokens, logprobs=[-1.0] * len(tokens))


class Llm:
    model_config = SimpleNamespace(max_model_len=8)

    def __init__(self) -> None:
        self.calls: list[str] = []

    def wake_up(self, tags: list[str]) -> None:
        self.calls.extend(tags)

    def generate(self, inputs: list[Any], params: list[Any], *, use_tqdm: bool) -> list[Any]:
        self.calls.append("generate")
        if "stop_token_ids" in params[0]:
            return [self._sample(**each) for each in params]
        rows = [each["prompt_token_ids"] for each in inputs]
        return [SimpleNamespace(prompt_logprobs=flat(row[1:])) for row in rows]

    def _sample(self, max_tokens: int, stop_token_ids: list[int], **_: Any) -> SimpleNamespace:
        """Samples 11, 12, ... as vLLM does: the token that stops is part of the response."""
        tokens = []
        for token in range(11, 11 + max_tokens):
            tokens.append(token)
            if token in stop_token_ids:
                break
        reason = "stop" if tokens[-1] in stop_token_ids else "length"
        answer = SimpleNamespace(token_ids=tokens, logprobs=flat(tokens), finish_reason=reason)
        return SimpleNamespace(outputs=[answer], num_cached_tokens=None)


def test_the_cache_is_awake_when_a_sync_scores_its_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM schedules nothing before all of it is awake, and `generate` would wait for ever."""
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=dict))
    llm, receiver = Llm(), SimpleNamespace(state="sealed")
    engine = Engine(llm, Rollout(), (), receiver, eager=False)  # type: ignore[arg-type]
    engine._asleep = ["weights", "kv_cache"]
    engine.wake("weights")
    assert [row.tolist() for row in engine.score(torch.zeros(2, 3, dtype=torch.int64))] == [[-1.0, -1.0]] * 2
    assert llm.calls == ["weights", "kv_cache", "generate"]


@pytest.mark.parametrize(("stop", "tokens", "finish"), [("12", [11, 12], "stop"), ("15", [11, 12, 13, 14], "length")])
def test_a_stop_token_ends_the_response_and_stays_in_it(
    monkeypatch: pytest.MonkeyPatch, stop: str, tokens: list[int], finish: str
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=dict))
    receiver = SimpleNamespace(state="ready", version=0)
    ids = stop_token_ids(TokenIds((2,), 67), (stop,))
    engine = Engine(Llm(), Rollout(max_tokens=4), ids, receiver, eager=False)  # type: ignore[arg-type]
    sample = engine.sample([Request(Prompt(0, (5, 6), "5 6"), 0, seed=1, temperature=1.0)], version=0)[0]
    assert (sample.tokens.tolist(), sample.finish) == ([5, 6, *tokens], finish)
    assert sample.trainable.tolist() == [False, False] + [True] * len(tokens)
    assert len(sample.rollout_logprobs) == len(sample.tokens)


@pytest.mark.parametrize(("capability", "backend"), [((9, 0), "auto"), ((10, 0), "triton"), (None, "auto")])
def test_experts_keep_their_width_on_blackwell(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None, backend: str
) -> None:
    """vLLM 0.33 would round 192 up to 256 there, and its loader's trace would meet rows of no checkpoint."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert _moe_backend() == backend
