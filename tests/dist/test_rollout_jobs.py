"""Jobs on one host: side by side, killed, started again, interrupted; none sees another and none leaves anything."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from start_ranks import start_ranks

from megarl.platform.shm import shm_prefix

RANKS = Path(__file__).with_name("job_ranks.py")
START_S, END_S = 420, 60


def segments() -> list[str]:
    return [path.name for path in Path("/dev/shm").glob("*cpushm*")]


def wait_for(files: list[Path], jobs: list[subprocess.Popen[str]]) -> None:
    deadline = time.monotonic() + START_S
    while not all(file.exists() for file in files):
        dead = [job for job in jobs if job.poll() is not None]
        assert not dead, dead[0].communicate()[0][-3000:]
        assert time.monotonic() < deadline, f"no sample after {START_S} s"
        time.sleep(0.2)


def drawn(folder: Path, job: str) -> list:
    ranks = [json.loads((folder / f"{job}_{rank}.json").read_text()) for rank in (0, 1)]
    assert ranks[0] == ranks[1]
    return ranks[0]


def results(folder: Path, job: str) -> list[Path]:
    return [folder / f"{job}_{rank}.json" for rank in (0, 1)]


@pytest.mark.long  # test_launch does the same through the command line
def test_jobs_do_not_meet(tmp_path):
    before = set(segments())
    left_by_a_crash = Path("/dev/shm") / f"{shm_prefix('one', os.getpid())}tp:0-[0-1]-cpushm_0"
    left_by_a_crash.touch()
    one, two = start_ranks(RANKS, 2, str(tmp_path), "one"), start_ranks(RANKS, 2, str(tmp_path), "two")
    try:
        wait_for(results(tmp_path, "one") + results(tmp_path, "two"), one + two)
        assert not left_by_a_crash.exists()
        assert not set(segments()) - before, "mapped segments have no name: nothing to leak"
        assert drawn(tmp_path, "one") == drawn(tmp_path, "two")

        for rank in one:
            rank.kill()
        for file in results(tmp_path, "one"):
            file.unlink()
        again = start_ranks(RANKS, 2, str(tmp_path), "one")  # the same name, at once
        one += again
        wait_for(results(tmp_path, "one"), again + two)
        assert drawn(tmp_path, "one") == drawn(tmp_path, "two")

        for rank in two:
            rank.send_signal(signal.SIGINT)
        for rank in two:
            rank.wait(timeout=END_S)
        (tmp_path / "stop").touch()
        for rank in again:
            said = rank.communicate(timeout=END_S)[0]
            assert rank.returncode == 0, said[-3000:]
        assert not set(segments()) - before
    finally:
        for rank in one + two:
            rank.kill()
        left_by_a_crash.unlink(missing_ok=True)
