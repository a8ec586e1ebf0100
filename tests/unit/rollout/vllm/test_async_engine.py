"""A replica of the split topology around a stand-in for vLLM's AsyncLLM; with vLLM itself it is tested in tests/e2e."""

from __future__ import annotations

import asyncio
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.config.load import parse_config
from megarl.config.schema import Config
from megarl.processes.children import Children
from megarl.rollout.exchange import unpack
from megarl.rollout.vllm import async_engine
from megarl.rollout.vllm.async_engine import AsyncEngine
from megarl.types import CheckFailed, Prompt, Request, Sample


class Llm:
    """Samples a token whenever it is told to `step`; a request of three tokens is finished."""

    model_config = SimpleNamespace(max_model_len=16)

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.version, self.is_paused = "default", False
        self.running: dict[str, list[str]] = {}  # request -> the version of each of its tokens
        self.done: dict[str, asyncio.Future[str]] = {}
        self.data_ranks: dict[str, int] = {}
        self.engine_core = SimpleNamespace(call_utility_all_async=self.call_all)

    async def generate(
        self, prompt: dict[str, Any], params: Any, request_id: str, data_parallel_rank: int
    ) -> Any:
        self.data_ranks[request_id] = data_parallel_rank
        self.running[request_id] = []
        self.done[request_id] = asyncio.get_running_loop().create_future()
        reason = await self.done[request_id]
        versions = self.running.pop(request_id)
        spans = [SimpleNamespace(version=v, start=i, end=i + 1) for i, v in enumerate(versions)]
        logprobs = SimpleNamespace(logprobs=[-0.5] * len(versions))
        answer = SimpleNamespace(
            token_ids=[7] * len(versions),
            logprobs=logprobs,
            finish_reason=reason,
            weight_versions=spans,
        )
        yield SimpleNamespace(outputs=[answer], num_cached_tokens=0)

    async def step(self) -> None:
        for name, versions in list(self.running.items()) * (not self.is_paused):
            versions.append(self.version)
            if len(versions) == 3:
                self.done[name].set_result("length")
        await asyncio.sleep(0)

    async def abort(self, names: list[str]) -> None:
        for name in names:
            self.done[name].set_result("abort")

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        self.is_paused = True
        self.calls.append(("pause", mode, clear_cache))

    async def resume_generation(self) -> None:
        self.is_paused = False
        self.calls.append("resume")

    async def reset_prefix_cache(self) -> None:
        self.calls.append("reset")

    async def update_weight_version(self, version: str) -> None:
        self.version = version

    async def call_all(
        self, utility: str, method: str, timeout_s: None, args: tuple[Any, ...], kwargs: None
    ) -> list[list[dict[str, Any]]]:
        assert utility == "collective_rpc"
        self.calls.append((method, *args))
        return [[{"prove": True}]] if method == "sync_transfer" else [[{}]]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> AsyncEngine:
    kinds = SimpleNamespace(RequestOutputKind=SimpleNamespace(FINAL_ONLY="final"))
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=SimpleNamespace))
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", kinds)
    return AsyncEngine(Llm(), Config(), tmp_path, Children({}, set()), [9], 0)


def requests(count: int) -> list[Request]:
    return [Request(Prompt(number, (1, 2), ""), number, 5, 1.0) for number in range(count)]


async def publish(engine: AsyncEngine, version: int, *, committed: bool = True) -> None:
    assert await engine.transfer(version) == [{"prove": True}] and not engine.is_ready
    await engine.end(version, committed)


async def poll(engine: AsyncEngine) -> list[Sample]:
    return unpack(torch.tensor(await asyncio.wait_for(engine.call("poll"), 5)))


async def settle() -> None:
    for _ in range(8):
        await asyncio.sleep(0)


def test_no_prompt_before_a_verified_sync(engine: AsyncEngine) -> None:
    async def run() -> None:
        for prepare in (None, False):
            if prepare is not None:
                await publish(engine, 1, committed=False)
            with pytest.raises(CheckFailed, match="engine 0 has no verified weights"):
                engine.submit(requests(1))
        assert engine.llm.is_paused, "a sync that failed leaves it so"
        await publish(engine, 1)
        engine.submit(requests(1))
        with pytest.raises(
            ValueError, match="prompt 3 has 16 tokens, but the engine accepts 1 to 15"
        ):
            engine.submit([Request(Prompt(3, (1,) * 16, ""), 0, 5, 1.0)])

    asyncio.run(run())
    kinds = [call if isinstance(call, str) else call[0] for call in engine.llm.calls]
    assert kinds == ["pause", "sync_transfer", "sync_end"] * 2 + ["reset", "resume"]
    assert ("pause", "keep", True) in engine.llm.calls


def test_a_prompt_stays_with_one_data_rank(engine: AsyncEngine) -> None:
    engine.config = parse_config({"rollout": {"data": 2, "expert": 2}})

    async def run() -> None:
        await publish(engine, 1)
        engine.submit([*requests(4), *requests(2)])
        await settle()
        await engine.drop()

    asyncio.run(run())
    by_prompt: dict[str, set[int]] = {}
    for name, rank in engine.llm.data_ranks.items():
        by_prompt.setdefault(name.split("-")[1], set()).add(rank)
    ranks = [rank for (rank,) in by_prompt.values()]
    assert sorted(ranks) == [0, 0, 1, 1]


def test_weights_change_in_flight_and_each_token_has_its_version(engine: AsyncEngine) -> None:
    async def run() -> list[Sample]:
        await publish(engine, 4)
        engine.submit(requests(2))
        await settle()
        await engine.llm.step()
        await publish(engine, 5)
        await engine.llm.step()
        await engine.llm.step()
        return await poll(engine)

    for number, sample in enumerate(asyncio.run(run())):
        assert sample.versions.tolist() == [-1, -1, 4, 5, 5] and (
            sample.prompt_id,
            sample.index,
        ) == (number, number)
        assert (
            sample.trainable.tolist() == [False, False, True, True, True]
            and sample.finish == "length"
        )
        assert sample.rollout_logprobs.tolist() == [0, 0, -0.5, -0.5, -0.5]


def test_dropped_requests_do_not_come_back(engine: AsyncEngine) -> None:
    async def run() -> None:
        await publish(engine, 1)
        engine.submit(requests(3)[2:])
        await settle()
        for _ in range(3):  # it is finished, and not polled
            await engine.llm.step()
        await settle()
        engine.submit(requests(2))
        await settle()
        await engine.llm.step()
        await engine.drop()
        engine.submit(requests(1))
        await settle()
        for _ in range(3):
            await engine.llm.step()
        await settle()
        samples: list[Sample] = []
        while not samples:
            samples = await poll(engine)
        assert [sample.prompt_id for sample in samples] == [0], "the new one alone"
        assert not engine._tasks and not engine._finished

    asyncio.run(run())


def test_an_aborted_request_comes_back_once_with_its_tokens_so_far(engine: AsyncEngine) -> None:
    async def run() -> None:
        await publish(engine, 1)
        engine.submit(requests(3))
        await settle()
        await engine.llm.step()
        aborted = unpack(torch.tensor(await engine.abort([(1, 1), (7, 7)])))
        assert [(s.key, s.finish, int(s.trainable.sum())) for s in aborted] == [
            ((1, 1), "abort", 1)
        ]
        for _ in range(2):
            await engine.llm.step()
        await settle()
        polled = await poll(engine)
        assert [(s.key, s.finish) for s in polled] == [((0, 0), "length"), ((2, 2), "length")]
        assert not await no_news(engine.abort([(0, 0)])), "it has come back"

    asyncio.run(run())


async def no_news(call: Any) -> list[Sample]:
    return unpack(torch.tensor(await call))


def test_a_core_that_does_not_answer_is_lost(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_engine, "CHECK_S", 0.01)
    engine.config = parse_config({"launch": {"timeout_s": 1}})
    answers = iter([True] * 3)

    async def is_sleeping() -> bool:
        if not next(answers, False):
            await asyncio.get_running_loop().create_future()
        return False

    async def run() -> None:
        engine.llm.is_sleeping = is_sleeping
        waiting, began = asyncio.ensure_future(engine.call("poll")), time.monotonic()
        await asyncio.wait_for(engine._check_core(), 5)
        assert time.monotonic() - began > 0.9, "it has the time of a sync"
        with pytest.raises(
            RuntimeError, match=r"engine 0 is lost: its core has not answered for 0\.9 s"
        ):
            await waiting

    asyncio.run(run())


@pytest.mark.parametrize("stage", ["pausing", "receiving"])
def test_a_lost_process_ends_what_waits_for_it(engine: AsyncEngine, stage: str) -> None:
    async def run() -> None:
        await publish(engine, 1)
        hanging: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if stage == "receiving":
            engine.llm.engine_core.call_utility_all_async = lambda *_: hanging
        else:
            engine.llm.pause_generation = lambda **options: hanging
        calls = [asyncio.ensure_future(engine.call(*call)) for call in (("poll",), ("transfer", 2))]
        await settle()
        engine.lose("its process VLLM::EngineCore (7) has ended")
        for call in calls:
            with pytest.raises(
                RuntimeError, match="engine 0 is lost: its process VLLM::EngineCore"
            ):
                await asyncio.wait_for(call, 5)
        with pytest.raises(
            RuntimeError, match="engine 0 is lost"
        ):  # which starts it again; a refusal would not
            await engine.call("submit", requests(1))

    asyncio.run(run())
