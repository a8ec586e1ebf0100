"""Processes: how a job ends is said once and truly, and nothing of it is left. The ranks do not train here."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megarl.processes.exit_codes import Failure
from megarl.processes.spawn import _message_of, lock_run_dir

STAND_IN = str(Path(__file__).parent / "stand_in")
LAUNCH = """
import math, pathlib, sys
from megarl.config.load import parse_config
from megarl.config.validate import check_config
from megarl.processes import heartbeat, spawn
from megarl.platform.env import Env

class Watched(heartbeat.Heartbeats):
    def check(self, pids):
        late = super().check(pids)
        if all(rank in self.states and self.states[rank].phase != "start-up" for rank in pids):
            pathlib.Path(folder, name, "busy_seen").touch()
        return late

spawn.Heartbeats = Watched
spawn.GRACE_S = 1.0  # which passes in full where a peer does not fail
heartbeat.SILENT = heartbeat.SILENT_S = math.inf  # on a busy machine imports take longer than these tests' time-outs
name, folder, world, timeout_s = sys.argv[1:]
run, launcher = {"name": name, "dir": folder}, {"processes": int(world), "timeout_s": int(timeout_s)}
config = parse_config({"run": run, "model": {"create": {}}, "launch": launcher})
try:
    sys.exit(spawn.spawn_ranks(config, check_config(config, Env.read()), "train"))
except ValueError as error:
    sys.exit(f"refused: {error}")
"""


def start(
    name: str, folder: Path, world: int = 2, timeout_s: int = 600, **environ: str
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", LAUNCH, name, str(folder), str(world), str(timeout_s)],
        env={**os.environ, "PYTHONPATH": STAND_IN, **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=500)
    return process.returncode, out, err


def wait_for(*files: Path, within_s: float = 300) -> None:
    deadline = time.monotonic() + within_s
    while not all(file.exists() and (file.stat().st_size or "busy" in file.name) for file in files):
        assert time.monotonic() < deadline, f"none of {files}"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def gone(*pids: int, within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(is_alive, pids))


def rank_pids(folder: Path, world: int = 2) -> list[int]:
    return [int((folder / f"up_{rank}").read_text().split()[0]) for rank in range(world)]


def exit_file(folder: Path) -> dict[str, object]:
    return json.loads((folder / "exit.json").read_text())


def test_done(tmp_path: Path) -> None:
    code, out, err = finish(start("done", tmp_path, OMP_NUM_THREADS="3"))
    assert (code, out, err) == (0, "hello from rank 0 of 2\n", ""), (
        "rank 0 speaks, noise goes to the logs"
    )
    logs = tmp_path / "done" / "logs"
    assert "hello from rank 1" in (logs / "rank_1.log").read_text()
    assert {"noise from rank 0", "c++ chatter"} <= set(
        (logs / "rank_0.log").read_text().splitlines()
    )
    assert exit_file(tmp_path / "done") | {"seconds": 0} == {"code": 0, "seconds": 0, "world": 2}
    ups = [(tmp_path / "done" / f"up_{rank}").read_text().split()[1:] for rank in range(2)]
    assert ups[0] == ups[1], "ranks of a job share its id and its launcher"
    assert ups[0][2] == "3", "the user's thread count stays"
    assert ups[0][3] == "lo", "nobody on the network can reach a port"
    assert ups[0][4] == "unset", "without tensor parallelism kernels run in any order"
    assert (tmp_path / "done" / "config.yaml").exists()


@pytest.mark.parametrize(
    ("name", "code", "lines", "said"),
    [
        ("user", 2, 1, "model.path=/not/there is not a directory"),
        ("refused", 3, 1, "refused to continue (start-up): log-probs differ by 3 at most"),
        (
            "defect",
            1,
            None,
            "rank 1 failed in start-up: ValueError: invalid literal for int() with base 10: 'what'",
        ),
        ("echo", 3, 1, "first"),
        ("killed", 1, 3, "rank 1 was killed by SIGKILL; out of memory?"),
        ("segfault", 1, 3, "rank 1 was killed by SIGSEGV"),
        ("unknown", 1, 3, "rank 1 was killed by Real-time signal 6"),
        (
            "checkpoint",
            1,
            None,
            "rank 1 failed in start-up: CheckpointException: size mismatch of a tensor",
        ),
    ],
)
def test_first_failure_is_said_once(
    tmp_path: Path, name: str, code: int, lines: int | None, said: str
) -> None:
    got, _out, err = finish(start(name, tmp_path))
    assert got == code, err
    assert err.count(said) == 1, err
    assert lines is None or len(err.splitlines()) == lines, err
    assert exit_file(tmp_path / name)["code"] == code
    assert gone(*rank_pids(tmp_path / name), within_s=0)


def test_a_defect_shows_the_last_lines_and_where_its_peer_was(tmp_path: Path) -> None:
    _code, _out, err = finish(start("defect", tmp_path))
    assert 'int("what")' in err
    assert f"{tmp_path}/defect/logs/rank_1.log" in err
    assert "still running: rank 0 (start-up, at run (stand_in/sitecustomize.py:" in err


def test_a_failure_of_no_rank_names_the_folder_of_logs(tmp_path: Path) -> None:
    """The split topology's controller has no rank, and no log of its own."""
    said = _message_of(Failure(-1, 1, "ImportError: a", "start-up"), tmp_path, ())
    assert said == f"the launcher failed in start-up: ImportError: a\nlogs: {tmp_path}/logs"


@pytest.mark.parametrize("name", ["forever", "stubborn"])
def test_ctrl_c_ends_everything(tmp_path: Path, name: str) -> None:
    process = start(name, tmp_path)
    folder = tmp_path / name
    wait_for(folder / "busy_0", folder / "busy_1")
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    code, _out, err = finish(process)
    assert time.monotonic() - began < 280, "the ranks sleep for 300 s"
    assert (code, err.count("\n")) == (130, 1)
    children = [int(file.read_text()) for file in folder.glob("child_*")]
    assert len(children) == (2 if name == "stubborn" else 0)
    assert gone(*rank_pids(folder), *children, within_s=60)
    assert exit_file(folder)["code"] == 130


def test_killed_launcher_takes_its_ranks_along_and_the_name_is_free(tmp_path: Path) -> None:
    process = start("forever", tmp_path)
    folder = tmp_path / "forever"
    wait_for(folder / "busy_0", folder / "busy_1")
    pids = rank_pids(folder)
    code, _out, err = finish(start("forever", tmp_path))
    assert code != 0
    assert "choose another run.name" in err, "two runs of one name would write over each other"
    process.kill()
    process.communicate()
    assert gone(*pids, within_s=60)
    for file in folder.glob("*_*"):
        file.unlink()
    again = start("forever", tmp_path)
    wait_for(folder / "busy_0", folder / "busy_1")
    again.send_signal(signal.SIGINT)
    assert finish(again)[0] == 130


def test_a_folder_has_one_run_though_its_lock_is_removed_or_reached_by_a_link(
    tmp_path: Path,
) -> None:
    run, link = tmp_path / "run", tmp_path / "link"
    link.symlink_to(run)
    with lock_run_dir(run):
        for folder in (run, link):
            with (
                pytest.raises(ValueError, match=rf"is in use by another run \(pid {os.getpid()}\)"),
                lock_run_dir(folder),
            ):
                pass
        (run / ".lock").unlink()
        with pytest.raises(ValueError, match="is in use by another run"), lock_run_dir(run):
            pass
    with lock_run_dir(run):
        assert (run / ".lock").read_text() == str(os.getpid())


def test_a_file_system_that_locks_no_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS refuses an exclusive lock of what is open for reading only."""
    flock = fcntl.flock

    def nfs(handle: int, operation: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(errno.EBADF, "Bad file descriptor")
        flock(handle, operation)

    monkeypatch.setattr(fcntl, "flock", nfs)
    with (
        lock_run_dir(tmp_path),
        pytest.raises(ValueError, match="is in use by another run"),
        lock_run_dir(tmp_path),
    ):
        pass


def test_a_lock_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("kept")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to(tmp_path / "target")
    with (
        pytest.raises(
            ValueError, match=r"\.lock cannot be locked \(.*\); remove it, or set run\.dir"
        ),
        lock_run_dir(tmp_path / "run"),
    ):
        pass
    assert (tmp_path / "target").read_text() == "kept"


def test_two_runs_side_by_side(tmp_path: Path) -> None:
    both = [start(f"done-{i}", tmp_path) for i in range(2)]
    assert [finish(process)[0] for process in both] == [0, 0]
    ids = {(tmp_path / f"done-{i}" / "up_0").read_text().split()[1] for i in range(2)}
    assert len(ids) == 2


@pytest.mark.timeout(240)  # without the notice it would wait for ever
def test_a_stopped_rank_is_named_long_before_the_timeout(tmp_path: Path) -> None:
    rank, process, folder = 1, start("forever", tmp_path, timeout_s=10), tmp_path / "forever"
    wait_for(folder / "busy_0", folder / "busy_1")
    pid = rank_pids(folder)[rank]
    os.kill(pid, signal.SIGSTOP)
    code, _out, err = finish(process)
    assert code == 3 and "; the run ends after 5 s" in err, "half of the time-out"
    assert (
        f"refused to continue (start-up): rank {rank} (process {pid}) is stopped, by a signal or a debugger"
        in err
    )
    assert exit_file(folder) | {"error": "", "seconds": 0} == {
        "code": 3, "rank": rank, "during": "start-up", "error": "", "seconds": 0, "world": 2
    }  # fmt: skip
    assert gone(*rank_pids(folder), within_s=60)


@pytest.mark.long
def test_rank_0_stopped_in_a_roll_call_is_named(tmp_path: Path) -> None:
    """With a store in rank 0's process its peers would wait for ever."""
    process, folder = start("rollcall", tmp_path, timeout_s=10), tmp_path / "rollcall"
    wait_for(folder / "met_0", folder / "met_1", within_s=60)
    pid = rank_pids(folder)[0]
    os.kill(pid, signal.SIGSTOP)
    code, _out, err = finish(process)
    assert code == 3 and f"rank 0 (process {pid}) is stopped" in err, err


@pytest.mark.long
def test_a_roll_call_times_out_by_itself(tmp_path: Path) -> None:
    process, folder = start("rollcall", tmp_path, timeout_s=5), tmp_path / "rollcall"
    code, _out, err = finish(process)  # rank 0 runs, and never comes
    assert (folder / "met_0").exists()
    assert code == 3 and "rank 0 of 2 did not reach the second roll call within 5 s" in err, err


def test_a_stopped_rank_is_reported_soon_and_may_go_on(tmp_path: Path) -> None:
    process, folder = start("forever", tmp_path), tmp_path / "forever"
    wait_for(folder / "busy_0", folder / "busy_1")
    pid = rank_pids(folder)[1]
    os.kill(pid, signal.SIGSTOP)
    assert process.stderr
    warning = process.stderr.readline()
    assert (
        f"rank 1 (process {pid}) is stopped" in warning
        and f"`kill -CONT {pid}` continues it" in warning
    )
    assert "the run ends after 300 s" in warning
    os.kill(pid, signal.SIGCONT)
    assert process.stderr.readline() == "megarl: rank 1 goes on\n"
    process.send_signal(signal.SIGINT)
    assert finish(process)[0] == 130


def test_a_call_that_holds_the_gil_is_not_taken_for_a_stop(tmp_path: Path) -> None:
    # a stopped rank would have 8 s, the call takes 9
    code, _out, err = finish(start("gil", tmp_path, timeout_s=16))
    assert (code, err) == (0, "")


@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        (
            "saves",
            143,
            "SIGTERM: the run ends when it is saved; Ctrl-C ends it at once\nmegarl: stopped by SIGTERM; the last",
        ),
        ("finishes", 0, "SIGTERM: the run ends when it is saved; Ctrl-C ends it at once\n"),
        ("forever", 143, "stopped; results so far are in"),  # nothing to save before the first step
    ],
)
def test_sigterm_reaches_ranks_that_train(tmp_path: Path, name: str, code: int, said: str) -> None:
    process, folder = start(name, tmp_path), tmp_path / name
    seen = [] if name == "forever" else [folder / "busy_seen"]  # the launcher has had their beats
    wait_for(folder / "busy_0", folder / "busy_1", *seen)
    process.send_signal(signal.SIGTERM)
    got, _out, err = finish(process)
    assert got == code and f"megarl: {said}" in err, err
    assert exit_file(folder)["code"] == code and gone(*rank_pids(folder), within_s=60)
    assert sum(file.exists() for file in (folder / "saved_0", folder / "saved_1")) == (
        2 if name == "saves" else 0
    )


def test_ctrl_c_ends_a_run_that_does_not_finish_saving(tmp_path: Path) -> None:
    process, folder = start("hangs", tmp_path), tmp_path / "hangs"
    wait_for(folder / "busy_0", folder / "busy_1", folder / "busy_seen")
    process.send_signal(signal.SIGTERM)
    assert process.stderr and "SIGTERM: the run ends when it is saved" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    assert finish(process)[0] == 130


def test_a_full_disk_is_one_line_and_keeps_its_exit_code(small_disk: Path) -> None:
    code, _out, err = finish(start("full", small_disk))
    first, *rest = err.splitlines()
    assert code == 3 and first.startswith(
        f"megarl: refused to continue (start-up): the disk of {small_disk}/full (mounted"
    )
    assert rest == [
        f"megarl: {small_disk}/full/exit.json was not written (No space left on device)"
    ]
