"""Shared memory is named after its job and goes with it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from megarl.platform import shm


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(shm, "SHM", tmp_path)
    return tmp_path


def test_only_the_jobs_own(folder):
    mine, other = shm.shm_prefix("a/b c", 12), shm.shm_prefix("a", 1)
    assert "/" not in mine and " " not in mine
    for name in (f"{mine}tp:0-[0-1]-cpushm_0", f"{mine}x", f"{other}x", "psm_1", "megarl"):
        (folder / name).touch()
    assert len(shm.unlink_shm(mine)) == 2
    assert sorted(path.name for path in folder.iterdir()) == sorted([f"{other}x", "psm_1", "megarl"])
    with pytest.raises(AssertionError):
        shm.unlink_shm("psm")


def test_the_dead_leave_nothing(folder):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    (folder / f"{shm.shm_prefix('j', dead.pid)}tp").touch()
    (folder / f"{shm.shm_prefix('j', os.getpid())}tp").touch()
    assert shm.unlink_dead() == [f"{shm.shm_prefix('j', dead.pid)}tp"]
    assert [path.name for path in folder.iterdir()] == [f"{shm.shm_prefix('j', os.getpid())}tp"]
