"""Real runs side by side that are stopped, killed and started again: none sees another, and nothing is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megarl.processes.shared_memory import shm_prefix

ROOT = Path(__file__).resolve().parents[2]
SHM = Path("/dev/shm")


def start(folder: Path, name: str, *overrides: str) -> subprocess.Popen[str]:
    common = [f"run.dir={folder}", f"run.name={name}", "checkpoint.resume=never"]
    common += ["parallel.tensor=2", "rollout.tensor=2"]  # engines of two ranks share memory
    command = [
        sys.executable,
        "-m",
        "megarl.cli",
        "train",
        "configs/tiny_dense.yaml",
        *common,
        *overrides,
    ]
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def wait_for_a_step(process: subprocess.Popen[str], folder: Path) -> None:
    deadline = time.monotonic() + 500
    while not (folder / "metrics.jsonl").exists() or not (folder / "metrics.jsonl").read_text():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, f"no step in {folder}"
        time.sleep(0.1)


def processes_about(folder: Path) -> list[str]:
    """State, parent and command line of the launchers and ranks that name `folder`."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            text = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if "-m megarl." in text and str(folder) in text:
                status = (process / "status").read_text().splitlines()
                found.append(
                    " ".join(
                        [
                            process.name,
                            *(x for x in status if x.startswith(("State", "PPid"))),
                            text,
                        ]
                    )
                )
        except OSError:
            continue
    return found


def digests(folder: Path) -> list[str]:
    """What was sampled at each step. The last line is left out: it may be half written."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["rollout/digest"] for line in lines[:-1] or lines]


def cpu_segments() -> set[Path]:
    return set(SHM.glob("*cpushm*"))


LOOPBACK = {"00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}


def listening(pids: set[str]) -> list[str]:
    """Addresses, as the kernel writes them, on which these processes wait for connections."""
    links = [
        os.readlink(fd)
        for pid in pids
        for fd in Path(f"/proc/{pid}/fd").iterdir()
        if fd.is_symlink()
    ]
    inodes = {
        link.removeprefix("socket:[").rstrip("]") for link in links if link.startswith("socket:")
    }
    sockets = [
        line.split()
        for kind in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{kind}").read_text().splitlines()
    ]
    return [
        socket[1].partition(":")[0]
        for socket in sockets
        if socket[3] == "0A" and socket[9] in inodes
    ]


@pytest.mark.long
def test_stop_kill_and_start_again(tmp_path: Path) -> None:
    segments = cpu_segments()
    dead = subprocess.Popen(["true"])
    dead.wait()
    left_by_a_crash = SHM / f"{shm_prefix('killed', dead.pid)}tp:0-[0-1]-cpushm_0"
    left_by_a_crash.touch()
    killed, stopped = (
        start(tmp_path, "killed", "train.steps=100000"),
        start(tmp_path, "stopped", "train.steps=100000"),
    )
    wait_for_a_step(killed, tmp_path / "killed")
    wait_for_a_step(stopped, tmp_path / "stopped")
    assert not left_by_a_crash.exists()
    assert not cpu_segments() - segments, "mapped segments have no name: nothing to leak"
    addresses = listening({about.partition(" ")[0] for about in processes_about(tmp_path)})
    assert addresses, "gloo listens somewhere"
    assert all(
        each in LOOPBACK or (len(each) == 8 and each.endswith("7F")) for each in addresses
    ), addresses

    killed.kill()
    stopped.send_signal(signal.SIGINT)
    _out, err = stopped.communicate(timeout=120)
    assert (stopped.returncode, err.count("\n")) == (130, 1), err
    killed.communicate()
    deadline = time.monotonic() + 120
    while (left := processes_about(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left
    sampled = digests(tmp_path / "stopped")
    for own, other in zip(sampled, digests(tmp_path / "killed"), strict=False):
        assert own == other, "the other job's activations came through"
    for line in (tmp_path / "stopped" / "metrics.jsonl").read_text().splitlines():
        assert json.loads(line)["weights/verified"]
    assert json.loads((tmp_path / "stopped" / "timeline.json").read_text())

    # the same samples
    again = start(tmp_path, "killed", "train.steps=1", "parallel.tensor=1", "rollout.tensor=1")
    out, err = again.communicate(timeout=500)
    assert again.returncode == 0, err
    assert "report.html" in out
    assert len((tmp_path / "killed" / "metrics.jsonl").read_text().splitlines()) == 1
    assert digests(tmp_path / "killed")[0] == sampled[0]
    assert not cpu_segments() - segments
