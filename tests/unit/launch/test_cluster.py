"""The folder of a local Ray: private, and gone with its job; with Ray itself it is tested in tests/e2e."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from megarl.launch import cluster


def test_folders_of_jobs_that_were_killed_go_and_those_of_others_stay(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    killed, starting, foreign = (tmp_path / f"{cluster.FOLDER}{name}" for name in ("killed", "starting", "foreign"))
    for folder in (killed, starting):
        (folder / "ray").mkdir(parents=True)
    foreign.symlink_to(tmp_path)
    os.utime(killed, (0, 0))
    with cluster._private_folder() as own:
        assert own.stat().st_mode & 0o777 == 0o700
        os.utime(own, (0, 0))
        with cluster._private_folder() as second:
            assert sorted(tmp_path.iterdir()) == sorted([own, second, starting, foreign])
    assert sorted(tmp_path.iterdir()) == sorted([starting, foreign])
