"""The controller's view of engines and ranks, around stand-ins for Ray's actors; with Ray it is tested in tests/e2e."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.config.load import parse_config
from megarl.platform.env import Env
from megarl.processes import exit_codes
from megarl.processes.children import Children
from megarl.processes.exit_codes import Failure
from megarl.rollout.exchange import pack
from megarl.rollout.vllm.async_engine import AsyncEngine
from megarl.run import rank_process
from megarl.split import controller, engines, ray_actors
from megarl.split.controller import RemoteWeights
from megarl.split.engines import EngineLost, Engines
from megarl.split.ray_actors import RankLost, TrainerRanks
from megarl.split.ray_cluster import NodeGone
from megarl.types import CheckFailed, Prompt, PublishReport, Request, Sample

GONE = ray_actors.RayActorError("it has ended")


class Ref:
    """A call that may not be done."""

    def __init__(
        self, reply: Callable[[], Any], is_done: Callable[[], bool] = lambda: True
    ) -> None:
        self.reply, self.is_done = reply, is_done


class Ray:
    """`killed`: actors; a stuck wait fails instead of hanging."""

    def __init__(self) -> None:
        self.killed: list[Any] = []

    def get(self, ref: Ref, **_: Any) -> Any:
        assert ref.is_done(), "it would hang"
        reply = ref.reply()
        if isinstance(reply, Exception):
            raise reply
        return reply

    def wait(
        self, refs: list[Ref], num_returns: int = 1, timeout: float | None = None
    ) -> tuple[list[Ref], list[Ref]]:
        done = [ref for ref in refs if ref.is_done()][:num_returns]
        assert done or timeout == 0, "it would hang"
        return done, [ref for ref in refs if ref not in done]

    def put(self, value: Any) -> Any:
        return value

    def kill(self, actor: Any) -> None:
        self.killed.append(actor)


class Actor:
    """An engine or a rank; `lost` names the method in which it ends."""

    def __init__(self, events: list[Any], name: str) -> None:
        self.events, self.name, self.lost, self.is_gone, self.samples = (
            events,
            name,
            "",
            False,
            list[Sample](),
        )
        self.is_dropped = False
        self.start = SimpleNamespace(
            remote=lambda *_values: Ref(lambda: self.value(([("node", [1], [])], 16)))
        )
        self.place = SimpleNamespace(remote=lambda: Ref(lambda: ("node", [], 7)))
        self.call = SimpleNamespace(remote=self.begin)

    def value(self, value: Any) -> Any:
        return GONE if self.is_gone else {"value": value}

    def begin(self, method: str, *values: Any) -> Ref:
        if method == "poll":
            return Ref(self.poll, lambda: self.is_gone or self.is_dropped or bool(self.samples))
        self.events.append((self.name, method, *values[:1]))
        self.is_gone |= method == self.lost
        self.is_dropped |= method == "drop"
        if method == "submit":
            self.samples += [sample(request) for request in values[0]]
        if method == "abort":
            aborted = [sample for sample in self.samples if sample.key in values[0]]
            self.samples = [sample for sample in self.samples if sample.key not in values[0]]
            return Ref(lambda: self.value(pack(aborted).numpy()))
        replies = {"transfer": [{"prove": False}] if "engine" in self.name else False}
        replies["end"] = (
            [{}]
            if "engine" in self.name
            else PublishReport(values[0] if values else 0, 1, 1, 1, True, 0.1)
        )
        return Ref(lambda: self.value(replies.get(method)))

    def poll(self) -> Any:
        samples, self.samples = self.samples, []
        return self.value(pack(samples).numpy())


def sample(request: Request) -> Sample:
    tokens = torch.tensor([1, 2, 3])
    return Sample(
        request.prompt.prompt_id,
        request.index,
        tokens,
        tokens > 1,
        torch.zeros(3),
        torch.tensor([-1, 3, 3], dtype=torch.int32),
        "length",
    )


def requests(count: int) -> list[Request]:
    return [
        Request(Prompt(number, (1,), ""), index, 5, 1.0)
        for number in range(count)
        for index in range(2)
    ]


class Job:
    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        replicas: int = 2,
        restarts: int = 3,
        parts: int = 1,
    ) -> None:
        self.ray, self.events, self.made, self.is_node_gone = (
            Ray(),
            list[Any](),
            list[Actor](),
            False,
        )
        self.gone: str | None = None
        for module in (engines, ray_actors, controller):
            monkeypatch.setattr(module, "ray", self.ray)
        monkeypatch.setattr(
            engines, "kill_engine", lambda *values: self.events.append(("family", *values))
        )
        monkeypatch.setattr(
            controller, "end_barrier", lambda *values: self.events.append(("barrier", *values[2:4]))
        )
        values = {
            "launch": {"topology": "split", "max_restarts": restarts},
            "rollout": {"replicas": replicas},
        }
        config = parse_config(values)
        cluster = SimpleNamespace(
            placed=lambda actors: [self.place_of(actor) for actor in actors],
            expect_nodes=self.expect,
        )
        watch = SimpleNamespace(
            add=lambda name, _actor, place: self.events.append(("watch", name, place[0], place[2])),
            gone=lambda kind: self.gone,
        )
        place: Any = SimpleNamespace(start=self.start, cluster=cluster, watch=watch, parts=parts)
        self.engines = Engines(config, None, (), place)  # type: ignore[arg-type]
        self.engines.start()
        self.rank = Actor(self.events, "rank")
        checks: Any = SimpleNamespace(check=lambda: self.events.append("probe"), always=False)
        self.weights = RemoteWeights(
            config, TrainerRanks([self.rank]), self.engines, checks, "file:/x", 4
        )
        self.engines.recover = self.weights.republish

    def place_of(self, actor: Actor) -> tuple[str, list[int], int]:
        if actor.lost == "place":
            raise GONE
        return "node", [], 7

    def expect(self) -> None:
        if self.is_node_gone:
            raise NodeGone("a node is gone")

    def start(self, _kind: Any, number: int, part: int) -> Actor:
        name = f"engine {number}" + (f" part {part}" if part else "")
        self.made.append(Actor(self.events, name))
        return self.made[-1]

    def names(self, method: str) -> list[str]:
        return [event[0] for event in self.events if event[1] == method]


def test_all_join_receive_and_commit_before_a_prompt_is_accepted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = Job(monkeypatch)
    with pytest.raises(CheckFailed, match="no engine has verified weights"):
        job.engines.submit(requests(1))
    assert job.weights.publish(version=3).version == 3
    for method in ("join", "transfer", "end"):
        assert sorted(job.names(method)) == ["engine 0", "engine 1", "rank"], method
    assert {event[1:] for event in job.events if event[0] == "watch"} == {
        (f"engine {n}", "node", 7) for n in (0, 1)
    }
    job.weights.publish(version=3)
    assert len(job.names("join")) == 3, "they join once"
    job.engines.submit(requests(4))
    samples = job.engines.poll() + job.engines.poll()
    assert sorted((s.prompt_id, s.index) for s in samples) == [
        (n, i) for n in range(4) for i in range(2)
    ]


def test_requests_of_a_lost_engine_go_to_the_other_which_alone_is_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = Job(monkeypatch)
    job.weights.publish(version=3)
    job.engines.submit(requests(4))
    job.made[1].is_gone = True
    samples = [sample for _ in range(6) for sample in job.engines.poll()]
    assert sorted((s.prompt_id, s.index) for s in samples) == [
        (n, i) for n in range(4) for i in range(2)
    ], "each once"
    assert job.ray.killed == [job.made[1]] and ("family", "node", [1], []) in job.events
    assert [replica.is_ready for replica in job.engines.replicas] == [True, False] and len(
        job.made
    ) == 3
    assert job.names("transfer") == ["engine 0", "engine 1", "rank"], (
        "no sync before the next publish"
    )
    job.weights.publish(version=4)
    assert all(replica.is_ready for replica in job.engines.replicas) and len(job.names("join")) == 6


def test_what_is_aborted_comes_back_once_from_engines_and_from_lost_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = Job(monkeypatch)
    job.weights.publish(version=3)
    job.engines.submit(requests(4))
    with pytest.raises(ValueError, match="sample 1 of prompt 2 was submitted twice"):
        job.engines.submit(requests(4)[5:])
    keys = [request.key for request in requests(4)]
    assert [sample.key for sample in job.engines.abort(keys[:3])] == [keys[0], keys[1], keys[2]]
    for again in (keys[:1], [keys[3], keys[3]]):
        with pytest.raises(
            ValueError, match=f"sample {again[0][1]} of prompt {again[0][0]} cannot"
        ):
            job.engines.abort(again)
    assert job.engines.running() == 5
    job.made[1].lost = "abort"
    (lost,) = job.engines.abort(keys[3:4])
    assert (lost.key, lost.finish, lost.tokens.tolist()) == (keys[3], "abort", [1])
    rest = []
    while job.engines.running():
        rest += job.engines.poll()
    assert sorted(sample.key for sample in rest) == keys[4:]


def test_the_only_engine_is_started_synced_and_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch, replicas=1)
    job.weights.publish(version=3)
    job.made[0].lost = "submit"
    job.engines.submit(requests(2))
    assert len(job.engines.poll()) == 4
    kinds = [event[:2] for event in job.events if event[0] == "engine 0"]
    synced = [("engine 0", method) for method in ("join", "transfer", "end")]
    assert kinds == [*synced, ("engine 0", "submit"), *synced, ("engine 0", "submit")]


@pytest.mark.parametrize("method", ["join", "transfer", "end"])
def test_an_engine_lost_in_a_sync_is_replaced_and_the_sync_made_again(
    monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    job = Job(monkeypatch)
    job.made[0].lost = method
    assert job.weights.publish(version=5).version == 5
    assert len(job.names("join")) == 6 and job.ray.killed == [job.made[0]]
    assert all(replica.is_ready for replica in job.engines.replicas)
    number = ["join", "transfer", "end"].index(method)
    ended = [event[1] for event in job.events if event[0] == "barrier" and event[2] == "engine 0"]
    assert ended == [number, number + 1], "nobody waits for it, and nobody finds out who is left"


def test_two_engines_that_are_lost_at_once_are_lost_once(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch)
    job.weights.publish(version=3)
    job.made[0].lost = job.made[1].lost = "submit"
    job.engines.submit(requests(4))
    samples = [sample for _ in range(6) for sample in job.engines.poll()]
    assert sorted((s.prompt_id, s.index) for s in samples) == [
        (n, i) for n in range(4) for i in range(2)
    ], "each once"
    assert job.ray.killed == job.made[:2] and job.engines.restarts == 2 and len(job.made) == 4


def test_an_engine_that_is_lost_while_the_trainer_works_starts_again_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = Job(monkeypatch)
    job.weights.publish(version=3)
    job.engines.submit(requests(4))
    job.made[1].is_gone = True
    TrainerRanks([job.rank], meanwhile=job.engines.poll_while_training).service.close()
    assert len(job.made) == 3 and job.names("transfer") == ["engine 0", "engine 1", "rank"], (
        "and nothing is synced"
    )
    job.engines.poll_while_training()
    assert job.engines.running() == 8
    samples = [sample for _ in range(6) for sample in job.engines.poll()]
    assert sorted((s.prompt_id, s.index) for s in samples) == [
        (n, i) for n in range(4) for i in range(2)
    ], "each once"


def test_the_only_engine_lost_while_the_trainer_works_gets_weights_when_it_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = Job(monkeypatch, replicas=1)
    job.weights.publish(version=3)
    job.engines.submit(requests(1))
    job.made[0].is_gone = True
    job.engines.poll_while_training()
    assert len(job.made) == 2 and len(job.names("transfer")) == 2
    job.weights.announce(4)
    job.engines.submit(requests(3)[2:])
    samples = [sample for _ in range(4) for sample in job.engines.poll()]
    assert len(samples) == 6 and job.weights.version == 4 and len(job.names("transfer")) == 4


def test_what_is_used_up_while_the_trainer_works_ends_the_run_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = Job(monkeypatch, restarts=0)
    job.weights.publish(version=3)
    job.engines.submit(requests(4))
    job.made[1].is_gone = True
    TrainerRanks([job.rank], meanwhile=job.engines.poll_while_training).service.close()
    with pytest.raises(CheckFailed, match="are used up"):
        job.engines.poll()


def test_an_engine_that_dies_while_it_starts_is_started_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = Job(monkeypatch)
    job.made[1].lost = "place"
    job.engines.retry_on_loss(job.engines.wait_started)
    assert len(job.made) == 3 and job.engines.restarts == 1
    job.made[2].start = job.made[0].start = Ref(lambda: None)  # never asked again
    job.engines.retry_on_loss(job.engines.wait_started)
    other = Job(monkeypatch)
    other.made[0].start = SimpleNamespace(remote=lambda *_: None)
    other.engines.replicas[0].starting = Ref(lambda: {"failure": Failure(0, 1, "no memory")})
    with pytest.raises(EngineLost, match="no memory"):
        other.engines.retry_on_loss(other.engines.wait_started)


def test_all_parts_of_an_engine_over_nodes_end_and_start_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = Job(monkeypatch, replicas=1, parts=2)
    assert [made.name for made in job.made] == ["engine 0", "engine 0 part 1"]
    replica = job.engines.replicas[0]
    replica.starting = Ref(lambda: {"value": ([("node", [1], ["/a"]), ("other", [2], [])], 16)})
    job.engines.wait_started()
    watched = [event[1] for event in job.events if event[0] == "watch"]
    assert watched == ["engine 0", "engine 0 part 1"]
    lost = RankLost(Failure(0, 1, "part 1 of engine 0 has ended"))
    job.engines.replace_replica(EngineLost(replica, lost))
    assert job.ray.killed == job.made[:2]
    ended = [event[1:] for event in job.events if event[0] == "family"]
    assert ended == [("node", [1], ["/a"]), ("other", [2], [])]
    assert [made.name for made in job.made[2:]] == ["engine 0", "engine 0 part 1"]


@pytest.mark.parametrize("is_started", [False, True])
def test_an_engine_ends_with_its_part_on_another_node(
    is_started: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the engine has started its own failure is the part's; afterwards it is lost by it."""

    async def play() -> tuple[Any, list[str]]:
        failed, lost = asyncio.Event(), list[str]()

        async def serve(*_: Any) -> Any:
            await failed.wait()
            return {"failure": Failure(0, 1, "part 1 of engine 0: no memory")}

        async def remains() -> Any:
            return "other", [2], []

        async def start(*_: Any) -> Any:
            if not is_started:
                failed.set()
                await asyncio.sleep(3600)
            return SimpleNamespace(max_model_len=16, lose=lost.append)

        part = ray_actors_part(serve, remains)
        monkeypatch.setattr(AsyncEngine, "start", start)
        monkeypatch.setattr(ray_actors.ray.util, "get_node_ip_address", lambda: "127.0.0.1")
        monkeypatch.setenv("VLLM_HOST_IP", "")  # is restored
        actor: Any = object.__new__(ray_actors.EngineActor.__ray_metadata__.modified_class)
        actor._number = 0
        monkeypatch.setattr(actor, "remains", lambda: ("node", [1], []), raising=False)
        reply = await actor.start(parse_config({}), Path(), (), [part])
        failed.set()
        await asyncio.sleep(0.01)
        return reply, lost

    reply, lost = asyncio.run(play())
    if is_started:
        assert reply == {"value": ([("node", [1], []), ("other", [2], [])], 16)}
        assert lost == ["part 1 of engine 0: no memory"]
    else:
        assert reply["failure"].message == "part 1 of engine 0: no memory"


def ray_actors_part(serve: Any, remains: Any) -> Any:
    return SimpleNamespace(
        serve=SimpleNamespace(remote=serve), remains=SimpleNamespace(remote=remains)
    )


def test_replies_of_every_data_rank_are_read() -> None:
    async def call(*values: Any) -> Any:
        assert values == ("collective_rpc", "sync_transfer", None, (3,), None)
        return [[{"prove": False}, {"prove": False}], [{"prove": False}, {"error": "no"}]]

    async def pause(**_: Any) -> None: ...

    core = SimpleNamespace(call_utility_all_async=call)
    llm = SimpleNamespace(engine_core=core, pause_generation=pause)
    engine = AsyncEngine(llm, parse_config({}), Path(), Children({}, set()), (), 0)
    replies = asyncio.run(engine.transfer(3))
    assert replies == [{"prove": False}] * 3 + [{"error": "rank 3 of engine 0: no"}]


def test_when_a_node_has_taken_many_along_the_node_is_the_cause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = Job(monkeypatch, restarts=1)
    job.weights.publish(version=3)
    job.made[0].lost = job.made[1].lost = "submit"
    job.is_node_gone = True
    with pytest.raises(NodeGone):
        job.engines.submit(requests(4))


def test_a_failure_of_the_ranks_may_be_an_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though they report it first."""
    job = Job(monkeypatch)
    job.weights.publish(version=3)
    begin, failed = job.rank.begin, list[int]()

    def fail_once(method: str, *values: Any) -> Ref:
        if method == "transfer" and not failed:
            failed.append(1)
            record = Failure(0, exit_codes.DEFECT, "Connection closed by peer")
            return Ref(lambda: {"failure": record})
        return begin(method, *values)

    def die_later(method: str, *values: Any) -> Ref:
        looks = iter([False] * (method == "transfer"))
        return Ref(
            lambda: GONE if method == "transfer" else job.made[0].value(None),
            lambda: next(looks, True),
        )

    job.rank.call = SimpleNamespace(remote=fail_once)
    job.made[0].call = SimpleNamespace(remote=die_later)
    assert job.weights.publish(version=4).version == 4
    assert job.ray.killed == [job.made[0]] and job.engines.restarts == 1


def test_restarts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch, restarts=1)
    job.weights.publish(version=3)
    job.made[0].lost = job.made[1].lost = "transfer"
    with pytest.raises(
        CheckFailed, match=r"engine 1 was killed.*launch.max_restarts=1 are used up"
    ):
        job.weights.publish(version=4)


def test_a_rank_that_is_gone_is_the_cause_of_what_its_peers_report(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = Job(monkeypatch)
    peer, gone = Actor(job.events, "rank 0"), Actor(job.events, "rank 1")
    failure = Failure(0, exit_codes.DEFECT, "Connection closed by peer")
    peer.value = lambda value: {"failure": failure}  # type: ignore[method-assign]
    gone.is_gone = True
    with pytest.raises(RankLost, match="rank 1 was killed") as lost:
        TrainerRanks([peer, gone]).service.close()
    assert lost.value.is_gone
    stuck: Any = SimpleNamespace(
        call=SimpleNamespace(remote=lambda *_values: Ref(lambda: None, lambda: False))
    )
    with pytest.raises(
        RankLost, match="rank 1 was killed"
    ):  # and nobody waits for what a peer reports
        TrainerRanks([stuck, gone]).service.close()
    refusal = Failure(0, exit_codes.REFUSED, "log-probs differ")
    peer.value = lambda value: {"failure": refusal}  # type: ignore[method-assign]
    with pytest.raises(CheckFailed, match="log-probs differ"):
        TrainerRanks([peer, peer]).service.close()
    with pytest.raises(RankLost, match="log-probs differ"):
        TrainerRanks([peer, Actor(job.events, "rank 1")]).service.close()


def test_a_rank_that_is_gone_ends_a_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch)
    job.weights.publish(version=3)
    job.engines.submit(requests(4))
    assert job.engines.poll()
    job.gone = "rank 1"
    with pytest.raises(RankLost, match="rank 1 was killed") as lost:
        job.engines.poll()
    assert lost.value.is_gone


def test_after_the_ranks_are_lost_no_sample_of_before_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = Job(monkeypatch, replicas=1)
    job.weights.publish(version=3)
    job.engines.submit(requests(1))
    job.engines.reset_for_new_trainer()
    assert job.engines.running() == 0 and job.names("drop") == ["engine 0"]
    job.made[0].samples.clear()
    with pytest.raises(CheckFailed, match="no engine has verified weights"):
        job.engines.submit(requests(1))
    job.weights.publish(version=2)
    assert len(job.names("join")) == 4
    job.engines.submit(requests(1))
    assert len(job.engines.poll()) == 2


def test_only_ranks_that_train_run_kernels_in_launch_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each actor is a process of its own; its variables are set before it imports torch."""
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    monkeypatch.setattr(rank_process, "compute_capability", lambda: (9, 0))
    seen = []

    def made(*_: Any) -> Any:
        seen.append(os.environ.get(name))
        raise RuntimeError("far enough")

    trainer = SimpleNamespace(TrainerRank=made)
    monkeypatch.setattr(ray_actors.ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setenv("VLLM_HOST_IP", "")  # is restored
    engine = SimpleNamespace(AsyncEngine=SimpleNamespace(start=made), Part=lambda *_: None)
    monkeypatch.setitem(sys.modules, "megarl.split.trainer_rank", trainer)
    monkeypatch.setitem(sys.modules, "megarl.rollout.vllm.async_engine", engine)
    for kind in (ray_actors.EngineActor, ray_actors.RankActor):
        actor: Any = object.__new__(kind.__ray_metadata__.modified_class)
        actor._number = 0
        for parallel in ({"tensor": 2}, {}):
            monkeypatch.setenv(name, "")  # is restored
            monkeypatch.delenv(name)
            config = parse_config({"model": {"create": {}}, "parallel": parallel})
            monkeypatch.setattr(
                actor, "_failed", lambda error: {"failure": str(error)}, raising=False
            )
            outcome = (
                actor.start(config, Env(0, 1, 0, 1), "store", "name")
                if (kind is ray_actors.RankActor)
                else asyncio.run(actor.start(config, None, (), ()))
            )
            assert outcome == {"failure": "far enough"}
    assert seen == [None, None, "1", None]


def test_an_actor_records_its_calls(tmp_path: Path) -> None:
    """Polls, which overlap other calls of an engine, are left out; the file is whole after each call."""
    rank, engine = (
        kind.__ray_metadata__.modified_class
        for kind in (ray_actors.RankActor, ray_actors.EngineActor)
    )
    file = tmp_path / "timeline_node2.json"

    async def answer(method: str, *values: Any) -> Any:
        return method, values

    def score(batch: int) -> int:
        if file.exists():
            assert json.loads(file.read_text()) == []
        return batch + 1

    for kind, made, methods, expected in (
        (rank, SimpleNamespace(score=score), ["score"], ["score"]),
        (engine, SimpleNamespace(call=answer), ["poll", "transfer"], ["transfer"]),
    ):
        actor = kind.__new__(kind)
        actor.__dict__ |= {"_made": made, "_number": 0, "_log": tmp_path / "logs" / "x.log"}
        actor._span = nullcontext
        replies = list[Any]()
        for is_recorded in (False, True):
            if is_recorded:
                actor.record_calls(2)
            for method in methods:
                reply = actor.call(method, 1)
                replies.append(asyncio.run(reply) if inspect.isawaitable(reply) else reply)
        assert replies[0] == replies[len(methods)] and "value" in replies[0], replies
        spans = json.loads(file.read_text())
        assert [(span["name"], span["pid"]) for span in spans] == [(name, 2) for name in expected]
        file.unlink()
