"""Which rank is late, and why: told from the memory that ranks and launcher share."""

from __future__ import annotations

import os
import struct
import time

import pytest

from megarl.launch import heartbeat
from megarl.launch.exit_codes import CurrentPhase, Failure
from megarl.launch.heartbeat import Heartbeats, Slots, shared_memory
from megarl.platform.env import Env


@pytest.fixture
def slots(monkeypatch: pytest.MonkeyPatch) -> Slots:
    for name, value in {"BEAT_S": 0.01, "STOPPED_S": 0.05, "SILENT_S": 0.05}.items():
        monkeypatch.setattr(heartbeat, name, value)
    return Slots(shared_memory("test"))


def watch(heartbeats: Heartbeats, pids: dict[int, int], within_s: float) -> Failure | None:
    deadline, failure = time.monotonic() + within_s, None
    while failure is None and time.monotonic() < deadline:
        failure = heartbeats.check(pids)
        time.sleep(0.005)
    return failure


def test_a_silent_rank_is_reported_and_ends_the_run_at_the_timeout(slots: Slots, capfd) -> None:
    phase = CurrentPhase("sync")
    slots.start_beating(0, phase)
    os.pwrite(slots.fd, struct.pack("<QI64s", 7, 0, b"rollout"), heartbeat.SLOT_BYTES)  # rank 1 beats no more
    began = time.monotonic()
    late = watch(Heartbeats(slots, timeout_s=0.4), {0: os.getpid(), 1: os.getpid()}, within_s=5)
    assert time.monotonic() - began >= 0.4
    assert late is not None and (late.rank, late.code, late.phase) == (1, 3, "rollout")
    assert "rank 1" in late.message and "shows no sign of life" in late.message and "stopped" not in late.message
    assert capfd.readouterr().err.count("\n") == 1, "reported once"
    assert watch(Heartbeats(slots, timeout_s=0.1), {0: os.getpid()}, within_s=0.5) is None
    assert slots.read(0)[1] == "sync"


def test_time_in_which_the_launcher_did_not_look_does_not_count(slots: Slots, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "MAX_ELAPSED_S", 0.02)
    heartbeats = Heartbeats(slots, timeout_s=0.2)
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

    fd = shared_memory("store")
    os.set_inheritable(fd, True)  # as in a rank
    store = heartbeat.make_store(Env(store_fd=fd, launched=True), timedelta(seconds=0.2))
    store.set("key", "value")
    assert store.get("key") == b"value" and os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:megarl-store")
    assert not os.get_inheritable(fd)
    with pytest.raises(RuntimeError, match=r"[Tt]imeout"):
        store.wait(["absent"])
