"""The engine around a stand-in for vLLM's `LLM`; with vLLM itself it is tested in tests/dist."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.config.schema import Rollout
from megarl.rollout.engine import Engine


class Llm:
    model_config = SimpleNamespace(max_model_len=8)

    def __init__(self) -> None:
        self.calls: list[str] = []

    def wake_up(self, tags: list[str]) -> None:
        self.calls.extend(tags)

    def generate(self, inputs: list[Any], params: list[Any], *, use_tqdm: bool) -> list[Any]:
        self.calls.append("generate")
        rows = [each["prompt_token_ids"] for each in inputs]
        return [SimpleNamespace(prompt_logprobs=[{t: SimpleNamespace(logprob=-1.0)} for t in row]) for row in rows]


def test_the_cache_is_awake_when_a_sync_scores_its_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM schedules nothing before all of it is awake, and `generate` would wait for ever."""
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=dict))
    llm, receiver = Llm(), SimpleNamespace(state="sealed")
    engine = Engine(llm, Rollout(), (), receiver, eager=False)  # type: ignore[arg-type]
    engine._asleep = ["weights", "kv_cache"]
    engine.wake("weights")
    assert [row.tolist() for row in engine.score(torch.zeros(2, 3, dtype=torch.int64))] == [[-1.0, -1.0]] * 2
    assert llm.calls == ["weights", "kv_cache", "generate"]
