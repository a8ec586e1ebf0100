"""The fork server: children are clean, killed in time, and survive nothing that started them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megarl.jail.fork_server import Child, ForkServer, ForkServerError

JOBS = """
import json, os, sys, time

state = []

def look(spec, out):
    state.append(spec)
    files = {int(name) for name in os.listdir("/proc/self/fd")}
    seen = {
        "spec": spec, "state": state, "environ": dict(os.environ), "session": os.getsid(0) == os.getpid(),
        "descriptors": sorted(name for name in files if os.path.exists(f"/proc/self/fd/{name}")), "out": out,
        "argv": sys.argv + sys.orig_argv, "stdout": os.readlink("/proc/self/fd/1"), "cwd": os.getcwd(),
    }
    with open(out, "w") as file:
        json.dump(seen, file)

def add(spec, out):
    os.write(out, str(sum(spec)).encode())

def end(spec):
    return spec

def fail(spec):
    raise ValueError

def exit_with(spec):
    sys.exit(spec)

def sleep(spec):
    time.sleep(spec)

def die(spec):
    os.kill(os.getpid(), spec)

def orphan(spec, out):
    if pid := os.fork():
        os.write(out, str(pid).encode())
    else:
        os.close(out)
        time.sleep(60)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("jobs")
    (folder / "jobs.py").write_text(JOBS)
    return folder


@pytest.fixture
def server(folder: Path) -> Iterator[ForkServer]:
    server = ForkServer(["jobs"], [str(folder)])
    yield server
    server.stop()


def run(server: ForkServer, target: str, spec: object) -> str:
    """What the child writes on its pipe until it ends."""
    reader, writer = os.pipe()
    with os.fdopen(reader) as stream:
        try:
            child = server.start(target, spec, [writer])
        finally:
            os.close(writer)
        text = stream.read()
    child.wait(30)
    return text


def is_alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def assert_dies(pid: int) -> None:
    deadline = time.monotonic() + 20
    while is_alive(pid):
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.01)


def test_a_child_has_nothing_of_the_caller_and_nothing_of_its_siblings(
    server, monkeypatch, tmp_path
):
    monkeypatch.setenv("CANARY", "secret")
    with open(tmp_path / "open in the caller", "w") as file:
        os.set_inheritable(file.fileno(), True)
        siblings = [server.start("jobs:sleep", 600) for _ in range(3)]
        for spec in ("first", {"second": ["a"] * 100_000}):
            seen = json.loads(run(server, "jobs:look", spec))
            assert seen["spec"] == spec and seen["state"] == [spec], "a state survived"
            assert seen["session"] and seen["stdout"] == "/dev/null" and seen["cwd"] == "/"
            assert seen["descriptors"] == [0, 1, 2, seen["out"]], "a descriptor was inherited"
            assert "CANARY" not in seen["environ"] and seen["argv"] == ["", ""]
        assert [child.kill() for child in siblings] == [-signal.SIGKILL] * 3


@pytest.mark.parametrize(
    ("target", "spec", "status"),
    [
        ("jobs:end", None, 0),
        ("jobs:end", 7, 7),
        ("jobs:fail", None, 1),
        ("jobs:exit_with", 0, 1),
        ("jobs:missing", None, 1),
        ("no_such_module:f", None, 1),
        ("jobs:die", 9, -9),
        ("jobs:die", 40, -40),
    ],
)
def test_exit_status(server, target, spec, status):
    child = server.start(target, spec)
    assert child.wait(30) == child.wait() == child.returncode == status


def test_a_child_is_waited_for_and_killed(server):
    child = server.start("jobs:sleep", 600)
    assert child.returncode is None and is_alive(child.pid)
    with pytest.raises(TimeoutError):
        child.wait(0.01)
    assert child.kill() == child.kill() == -signal.SIGKILL
    assert_dies(child.pid)


def test_a_child_whose_caller_forgets_it_is_killed(server):
    pid = server.start("jobs:sleep", 600).pid  # closes its socket
    assert_dies(pid)


def test_what_a_child_leaves_behind_is_killed(server):
    assert_dies(int(run(server, "jobs:orphan", None)))


def test_many_threads(server):
    with ThreadPoolExecutor(8) as pool:
        sums = list(pool.map(lambda number: run(server, "jobs:add", [number] * 1000), range(40)))
    assert sums == [str(number * 1000) for number in range(40)]


def test_a_dead_server_is_started_again(server):
    child = server.start("jobs:sleep", 600)
    server.process.kill()
    with pytest.raises(ForkServerError, match="ended while"):
        child.wait(20)
    assert_dies(child.pid)
    assert run(server, "jobs:add", [1, 2]) == "3"


def test_a_server_that_dies_at_every_request_is_an_error(folder, tmp_path):
    (tmp_path / "traps.py").write_text(
        "import os\nos.register_at_fork(before=lambda: os._exit(3))\n"
    )
    with pytest.raises(ForkServerError, match="traps ended twice"):
        ForkServer(["traps"], [str(tmp_path)]).start("jobs:end", None)


def test_a_module_that_is_missing_is_named():
    with pytest.raises(ForkServerError, match="No module named 'no_such_module'"):
        ForkServer(["no_such_module"]).start("os:getpid", None)


def test_a_fork_that_fails_is_an_error_and_harms_no_other(folder, tmp_path):
    trap = "import os\nfork = os.fork\ndef f():\n    os.fork = fork\n    raise OSError(11, 'x')\nos.fork = f\n"
    (tmp_path / "traps.py").write_text(trap)
    server = ForkServer(["traps", "jobs"], [str(tmp_path), str(folder)])
    with pytest.raises(ForkServerError, match="temporarily unavailable"):
        server.start("jobs:end", None)
    assert server.start("jobs:end", 3).wait(30) == 3
    server.stop()


CALLER = """
import sys, threading, time
from megarl.jail.fork_server import ForkServer
server = ForkServer(["jobs"], [sys.argv[1]])
thread = threading.Thread(target=server.start, args=("jobs:end", 0))  # the thread ends, the server stays
thread.start()
thread.join()
child = server.start("jobs:sleep", 600)
print(server.process.pid, child.pid, flush=True)
time.sleep(600)
"""


def test_server_and_children_end_with_the_caller(folder):
    caller = subprocess.Popen(
        [sys.executable, "-c", CALLER, str(folder)], stdout=subprocess.PIPE, text=True
    )
    assert caller.stdout is not None
    pids = [int(pid) for pid in caller.stdout.readline().split()]
    assert all(map(is_alive, pids)) and len(pids) == 2
    caller.kill()
    caller.wait()
    caller.stdout.close()
    for pid in pids:
        assert_dies(pid)


def test_a_fork_of_the_caller_starts_its_own_server(server):
    run(server, "jobs:add", [1])
    first, pid = server.process.pid, os.fork()
    if pid == 0:
        try:
            own = run(server, "jobs:add", [1, 2]) == "3" and server.process.pid != first
            server.stop()
            os._exit(0 if own else 1)
        finally:
            os._exit(2)
    assert os.waitpid(pid, 0)[1] == 0
    assert run(server, "jobs:add", [2]) == "2" and server.process.pid == first


def test_threads_may_kill_while_others_start(server):
    def start_and_kill(_: int) -> int:
        return server.start("jobs:sleep", 600).kill()

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(start_and_kill, range(40))) == {-signal.SIGKILL}
    assert threading.active_count() < 20 and isinstance(server.start("jobs:end", 0), Child)
