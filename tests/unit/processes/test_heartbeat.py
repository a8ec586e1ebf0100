"""Which rank is late, and why: told from the memory that ranks and launcher share."""

from __future__ import annotations

import json
import os
import sys
import threading
import time

import pytest

from megarl.platform.env import Env
from megarl.processes import heartbeat
from megarl.processes.exit_codes import CurrentPhase, Failure
from megarl.processes.heartbeat import (
    HOST,
    Heartbeats,
    RankState,
    Slots,
    StackSampler,
    find_late,
)

ROLLOUT = RankState(
    os.getpid(), HOST, "rollout", "engine step 7", False, False, 1.0, 1.0, "step (a/b.py:1)"
)
MOVES, WAITS = (
    ROLLOUT._replace(seconds=0.1),
    ROLLOUT._replace(is_waiting=True, seconds=40.0, operation="all_reduce 7"),
)
STUCK, BUSY = ROLLOUT._replace(seconds=41.0, cpu_s=0.2), ROLLOUT._replace(seconds=41.0, cpu_s=30.0)


@pytest.fixture
def slots(monkeypatch: pytest.MonkeyPatch) -> Slots:
    for name, value in {"BEAT_S": 0.01, "STOPPED_S": 0.05, "SILENT_S": 0.05}.items():
        monkeypatch.setattr(heartbeat, name, value)
    return Slots(os.memfd_create("test"))


def watch(heartbeats: Heartbeats, pids: dict[int, int], within_s: float) -> Failure | None:
    deadline, failure = time.monotonic() + within_s, None
    while failure is None and time.monotonic() < deadline:
        failure = heartbeats.check(pids)
        time.sleep(0.005)
    return failure


def test_a_silent_rank_is_reported_and_ends_the_run_at_the_timeout(slots: Slots, capfd) -> None:
    phase = CurrentPhase("sync")
    slots.start_beating(0, phase)
    # rank 1 beats no more
    os.pwrite(slots.fd, f"7 {json.dumps(ROLLOUT)}".encode(), heartbeat.SLOT_BYTES)
    began = time.monotonic()
    late = watch(Heartbeats(slots.read, 0.4, 0.01), {0: os.getpid(), 1: os.getpid()}, within_s=5)
    assert time.monotonic() - began >= 0.9 * 0.4
    assert late is not None and (late.rank, late.code, late.phase) == (1, 3, "rollout")
    assert (
        "rank 1" in late.message
        and "shows no sign of life" in late.message
        and "stopped" not in late.message
    )
    assert capfd.readouterr().err.count("\n") == 1, "reported once"
    assert watch(Heartbeats(slots.read, 0.1, 0.01), {0: os.getpid()}, within_s=0.5) is None
    assert RankState(*json.loads(slots.read(0).partition(" ")[2])).phase == "sync"


def test_time_in_which_the_launcher_did_not_look_does_not_count(slots: Slots) -> None:
    heartbeats = Heartbeats(slots.read, timeout_s=0.2, every_s=0.01)
    time.sleep(0.5)  # a laptop that slept
    assert heartbeats.check({0: os.getpid()}) is None


def test_failures_are_read_whole_or_not_at_all(slots: Slots) -> None:
    slots.start_beating(1, CurrentPhase())
    assert slots.failure(1) == slots.failure(0) == ""
    slots.write_failure(1, "déjà vu \ud800")
    time.sleep(0.05)  # beats go on beside it
    assert slots.failure(1) == "déjà vu ?" and slots.failure(0) == ""
    slots.write_failure(0, "x" * 100_000)
    assert len(slots.failure(0)) < heartbeat.SLOT_BYTES
    assert slots.failure(1) == "déjà vu ?"


def test_the_store_has_no_name_and_is_not_inherited() -> None:
    from datetime import timedelta

    fd = os.memfd_create("megarl-store")
    os.set_inheritable(fd, True)  # as in a rank
    store = heartbeat.make_store(Env(store_fd=fd, launched=True), timedelta(seconds=0.2))
    store.set("key", "value")
    assert store.get("key") == b"value" and os.readlink(f"/proc/self/fd/{fd}").startswith(
        "/memfd:megarl-store"
    )
    assert not os.get_inheritable(fd)
    with pytest.raises(RuntimeError, match=r"[Tt]imeout"):
        store.wait(["absent"])


@pytest.mark.parametrize(
    ("states", "late"),
    [
        ([WAITS, STUCK, WAITS, WAITS], [1]),
        ([WAITS, STUCK._replace(seconds=20.0), WAITS, WAITS], [1]),  # only slow so far
        ([WAITS, BUSY, WAITS], [1]),
        ([WAITS, STUCK, BUSY, MOVES], [1]),  # who computes may wait for it later
        ([WAITS, MOVES, BUSY], [1, 2]),
        ([WAITS, WAITS, WAITS._replace(operation="all_gather 7")], [2]),
        ([WAITS, WAITS, WAITS._replace(phase="sync")], [2]),
        ([WAITS, WAITS, WAITS], []),  # the network
        ([WAITS, WAITS._replace(seconds=1.0)], []),  # a moment ago it did something else
        ([MOVES, WAITS._replace(seconds=20.0)], []),
        ([STUCK], [0]),
        ([STUCK._replace(is_limited=True), BUSY], []),  # a reward that nobody waits for
        ([STUCK._replace(is_limited=True), WAITS], [0]),
        ([BUSY], []),
        ([], []),
    ],
)
def test_who_is_late(states: list[RankState], late: list[int]) -> None:
    found, waiting = find_late(dict(enumerate(states)))
    assert found == late
    assert waiting == [
        rank for rank, state in enumerate(states) if state.is_waiting and state.seconds == 40.0
    ]


@pytest.mark.parametrize(
    ("state", "how", "ends"),
    [
        (STUCK, "neither moves nor computes, for 40 s (rollout, engine step 7, at step", True),
        (BUSY, "is late, but not stuck, for 41 s", False),
        (
            STUCK._replace(is_limited=True),
            "is late, but not stuck, for 41 s",
            False,
        ),  # a reward of 41 s
        (STUCK._replace(pid=1, host="node7"), "rank 1 (process 1 on node7) neither moves", True),
    ],
)
def test_a_late_rank_is_named_with_its_stack_and_its_victims(
    state: RankState, how: str, ends: bool
) -> None:
    beats, said = iter(range(99)), []
    states = [WAITS, state]
    heartbeats = Heartbeats(
        lambda rank: f"{next(beats)} {json.dumps(states[rank])}", 70.0, 0.0, said.append
    )
    failure = heartbeats.check({0: 0, 1: 0})
    assert (failure is not None) == ends and heartbeats.suspect and heartbeats.suspect.rank == 1
    (line,) = said
    assert (
        how in line
        and "; waiting: 1, rank 0 for 40 s (rollout, all_reduce 7, at step (a/b.py:1))" in line
    )
    assert ("; the run ends after 35 s" in line) == ends
    heartbeats.check({0: 0, 1: 0})
    assert len(said) == 1, "reported once"
    states[:] = [MOVES, MOVES]
    assert heartbeats.check({0: 0, 1: 0}) is None and heartbeats.suspect is None
    assert said[1:] == ["rank 1 goes on"] * (heartbeat.SLOW not in line)


@pytest.mark.parametrize(
    ("file", "is_waiting", "is_limited"),
    [
        ("/site-packages/torch/distributed/distributed_c10d.py", True, False),
        ("/site-packages/vllm/distributed/device_communicators/cpu_communicator.py", True, False),
        ("/site-packages/megatron/core/pipeline_parallel/p2p_communication.py", True, False),
        ("/megarl/weights/transports/collective.py", True, False),
        ("/megarl/rewards/rules.py", False, True),
        ("/megarl/trainer/forward.py", False, False),
    ],
)
def test_a_sample_shows_where_the_main_thread_is(
    file: str, is_waiting: bool, is_limited: bool
) -> None:
    sampler, samples = StackSampler(CurrentPhase("train", engine_steps=3)), []

    main = threading.main_thread().ident

    def watcher() -> None:
        while sys._current_frames()[main].f_code.co_filename != file:
            time.sleep(0.001)
        samples.append(sampler.sample())
        time.sleep(0.05)
        samples.append(sampler.sample())

    thread = threading.Thread(target=watcher)
    thread.start()
    code = "from time import sleep\n\nwhile len(samples) < 2: sleep(0.01)"
    exec(compile(code, file, "exec"), {"samples": samples})
    thread.join()
    assert samples[1].stack.startswith(
        f"<module> ({'/'.join(file.split('/')[-2:])}:3) < test_a_sample"
    )
    assert (samples[1].is_waiting, samples[1].is_limited) == (is_waiting, is_limited)
    assert samples[0].seconds < samples[1].seconds and samples[1].seconds > 0.04 > samples[1].cpu_s


def test_a_rank_that_torchrun_has_not_started_is_not_silent() -> None:
    said = []
    heartbeats = Heartbeats(lambda rank: "", 0.1, 0.01, said.append)
    assert watch(heartbeats, {1: 0}, within_s=0.3) is None and not said
    assert watch(heartbeats, {1: os.getpid()}, within_s=5) is not None, (
        "megarl's own launcher knows that it runs"
    )
