"""Shared memory is named after its job and goes with it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.processes import shared_memory as shm

HOLD = "import sys; from pathlib import Path; from megarl.processes import shared_memory as shm; shm.SHM = Path(sys.argv[1])\n"
HOLD += "shm.lock_shm(sys.argv[2]); print(flush=True); sys.stdin.read()"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(shm, "SHM", tmp_path)
    return tmp_path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_only_the_jobs_own(folder):
    mine, other = shm.shm_prefix("a/b c", 12), shm.shm_prefix("a", 1)
    assert "/" not in mine and " " not in mine
    for name in (
        f"{mine}tp:0-[0-1]-cpushm_0",
        f"{mine}x",
        f"{mine}lock",
        f"{other}x",
        "psm_1",
        "megarl",
    ):
        (folder / name).touch()
    assert len(shm.unlink_shm(mine)) == 2
    assert names(folder) == sorted([f"{mine}lock", f"{other}x", "psm_1", "megarl"])
    assert shm.unlink_shm(mine, lock=True) == [f"{mine}lock"]
    with pytest.raises(AssertionError):
        shm.unlink_shm("psm")


def test_the_dead_leave_nothing_and_the_living_are_left_alone(folder):
    """The owner lives, though no process here has its number: it may be in another container."""
    absent = subprocess.Popen([sys.executable, "-c", ""])
    absent.wait()
    mine, killed = shm.shm_prefix("live", absent.pid), shm.shm_prefix("killed", os.getpid())
    owner = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder), mine],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert owner.stdout is not None and owner.stdout.read(1) == b"\n"
    (folder / f"{mine}tp").touch()
    (folder / f"{killed}tp").touch()
    (folder / f"{killed}lock").touch()  # of a process that has ended
    assert sorted(shm.unlink_dead()) == [f"{killed}lock", f"{killed}tp"]
    assert names(folder) == [f"{mine}lock", f"{mine}tp"]
    owner.kill()
    owner.communicate()
    assert sorted(shm.unlink_dead()) == [f"{mine}lock", f"{mine}tp"] and names(folder) == []


def test_files_that_are_traps(folder):
    """A folder named like a segment, and locks that are links, pipes or folders."""
    target = folder / "target"
    target.write_text("kept")
    (folder / "megarl-1-a-segment").mkdir()
    (folder / "megarl-2-a-lock").symlink_to(target)
    os.mkfifo(folder / "megarl-3-a-lock")
    (folder / "megarl-4-a-lock").mkdir()
    (folder / ".megarl-5-a-lock").symlink_to(target)
    shm.lock_shm("megarl-5-a-")
    assert sorted(shm.unlink_dead()) == ["megarl-2-a-lock", "megarl-3-a-lock"]
    assert names(folder) == ["megarl-1-a-segment", "megarl-4-a-lock", "megarl-5-a-lock", "target"]
    assert target.read_text() == "kept"


def test_without_shared_memory_there_is_nothing_to_lock(folder, monkeypatch):
    monkeypatch.setattr(shm, "SHM", folder / "absent")
    shm.lock_shm("megarl-1-a-")
    assert shm.unlink_dead() == shm.unlink_shm("megarl-1-a-") == []
