"""Real runs that are stopped, killed and started side by side: nothing is left, and everything starts again."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHM = Path("/dev/shm")


def start(folder: Path, name: str, *overrides: str) -> subprocess.Popen[str]:
    common = [f"run.dir={folder}", f"run.name={name}", "parallel.tensor=2", "checkpoint.resume=never"]
    command = [sys.executable, "-m", "megarl.cli", "train", "configs/tiny_dense.yaml", *common, *overrides]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for_a_step(process: subprocess.Popen[str], folder: Path) -> None:
    deadline = time.monotonic() + 240
    while not (folder / "metrics.jsonl").exists() or not (folder / "metrics.jsonl").read_text():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, f"no step in {folder}"
        time.sleep(0.1)


def processes_about(folder: Path) -> list[str]:
    """Command lines that name `folder`: launchers and ranks."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = file.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(folder) in text:
            found.append(text)
    return found


@pytest.mark.long
def test_stop_kill_and_start_again(tmp_path: Path) -> None:
    segments = set(SHM.glob("*"))
    killed, stopped = start(tmp_path, "killed", "train.steps=100000"), start(tmp_path, "stopped", "train.steps=100000")
    wait_for_a_step(killed, tmp_path / "killed")
    wait_for_a_step(stopped, tmp_path / "stopped")

    killed.kill()
    began = time.monotonic()
    stopped.send_signal(signal.SIGINT)
    _out, err = stopped.communicate(timeout=30)
    assert time.monotonic() - began < 10
    assert (stopped.returncode, err.count("\n")) == (130, 1), err
    killed.communicate()
    deadline = time.monotonic() + 5
    while processes_about(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not processes_about(tmp_path)
    for line in (tmp_path / "stopped" / "metrics.jsonl").read_text().splitlines():
        assert json.loads(line)["weights/verified"]
    assert json.loads((tmp_path / "stopped" / "timeline.json").read_text())

    again = start(tmp_path, "killed", "train.steps=1")
    out, err = again.communicate(timeout=240)
    assert again.returncode == 0, err
    assert "report.html" in out
    assert len((tmp_path / "killed" / "metrics.jsonl").read_text().splitlines()) == 1
    left = {path for path in SHM.glob("*") if path.name.startswith("megarl-")} - segments
    assert not left
