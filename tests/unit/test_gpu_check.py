"""The ladder of checks for a GPU: what a step says becomes a row, a page and an exit code."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import gpu_check
from benchmarks.gpu_check import Failed, Place, Skipped, Step


def passes(place: Place) -> str:
    place.run("said", sys.executable, "-c", "print('hello')", remedy="none")
    return "1 < 2"


def skips(place: Place) -> str:
    raise Skipped("needs two GPUs")


def ends(place: Place) -> str:
    code = "import sys; print('ValueError: no such kernel'); sys.exit(3)"
    return place.run("ends", sys.executable, "-c", code, remedy="install it again")


def hangs(place: Place) -> str:
    place.seconds = 0.5
    return place.run("hangs", sys.executable, "-c", "import time; time.sleep(60)", remedy="another")


def lacks(place: Place) -> str:
    return {}["loss"]


def climb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **checks) -> tuple[int, dict]:
    steps = {name: Step(check, "that it works") for name, check in checks.items()}
    monkeypatch.setattr(gpu_check, "STEPS", steps)
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--out", str(tmp_path)])
    code = gpu_check.main()
    return code, json.loads((tmp_path / "gpu_check.json").read_text())


def test_rows_and_exit_codes(tmp_path, monkeypatch) -> None:
    code, record = climb(tmp_path, monkeypatch, a=passes, b=ends, c=hangs, d=lacks, e=skips)
    assert code == 3 and record["schema"] == 1 and not record["ok"]
    rows = {row["name"]: row for row in record["steps"]}
    assert [row["status"] for row in rows.values()] == ["passed", *["failed"] * 3, "skipped"]
    assert "ended with 3: ValueError: no such kernel" in rows["b"]["seen"]
    assert rows["b"]["report"] == "install it again"
    assert "did not end within 0 s" in rows["c"]["seen"] and "raise --limit" in rows["c"]["report"]
    assert "KeyError" in rows["d"]["seen"] and str(tmp_path) in rows["d"]["report"]
    page = (tmp_path / "gpu_check.html").read_text()
    assert "1 &lt; 2" in page and "To do: install it again" in page
    assert climb(tmp_path, monkeypatch, a=passes, e=skips)[0] == 0
    assert climb(tmp_path, monkeypatch, e=skips)[0] == 2


def test_without_the_packages_nothing_else_is_tried(tmp_path, monkeypatch) -> None:
    def broken(place: Place) -> str:
        raise Failed("vllm: ImportError", "install it")

    code, record = climb(tmp_path, monkeypatch, packages=broken, a=passes)
    assert code == 3 and [row["name"] for row in record["steps"]] == ["packages"]


def test_settings_given_win_over_those_of_a_step(tmp_path) -> None:
    place = Place(1, tmp_path, settings=("train.steps=9", "rollout.gpu_memory_utilization=0.1"))
    settings = place.usual(["train.steps=1", "rollout.enforce_eager=true"])
    assert "train.steps=9" in settings and "train.steps=1" not in settings
    assert settings.count("rollout.gpu_memory_utilization=0.1") == 1
    assert len(settings) == len({setting.split("=")[0] for setting in settings})
