"""What TensorBoard and Weights & Biases hold after a run, read from their files; and that neither can stop it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megarl.config.load import parse_config
from megarl.config.schema import Config, Telemetry
from megarl.platform import env as packages
from megarl.telemetry.metrics import append_line, forget_steps, read_metrics
from megarl.telemetry.trackers import Trackers, check_trackers


def made(folder: Path, **telemetry: Any) -> Config:
    return parse_config(
        {"run": {"dir": str(folder.parent), "name": folder.name}, "telemetry": telemetry}
    )


def run(config: Config, folder: Path, start: int, end: int, loss: float) -> None:
    """Steps as Telemetry records them, with an evaluation before each even one."""
    folder.mkdir(exist_ok=True)
    forget_steps(folder / "metrics.jsonl", start)
    trackers = Trackers(config, start=start)
    for step in range(start, end):
        if step % 2 == 0:
            trackers.log(step, {"eval/step": step, "eval/accuracy": loss}, is_complete=False)
        metrics = {
            "step": step,
            "loss": loss + step,
            "reward/http://host:1/x/mean": 1.0,
            "weights/verified": True,
        }
        metrics |= {"layout": "tp2", "kl/ref": None, "kl/rollout": float("nan")}
        append_line(folder / "metrics.jsonl", metrics)
        trackers.log(step, metrics)
    trackers.close()


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder)).Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def test_tensorboard_has_every_number_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    folder = tmp_path / "a"
    run(made(folder, tensorboard=True), folder, 0, 4, loss=0.0)
    run(made(folder, tensorboard=True), folder, 2, 5, loss=10.0)
    found = scalars(folder)
    assert found["loss"] == [(0, 0.0), (1, 1.0), (2, 12.0), (3, 13.0), (4, 14.0)]
    rows = read_metrics(folder / "metrics.jsonl")
    for name in ("loss", "reward/http://host:1/x/mean", "weights/verified"):
        assert found[name] == [(row["step"], float(row[name])) for row in rows], name
    assert found.keys() == {
        "loss",
        "reward/http://host:1/x/mean",
        "weights/verified",
        "eval/accuracy",
    }
    assert found["eval/accuracy"] == [(0, 0.0), (2, 10.0), (4, 10.0)]
    run(made(folder, tensorboard=True), folder, 0, 1, loss=20.0)
    assert scalars(folder)["loss"] == [(0, 20.0)], "a run from the start has no past"


def test_tensorboard_is_complete_when_a_run_is_killed(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    trackers = Trackers(made(tmp_path / "a", tensorboard=True), start=0)
    file = next((tmp_path / "a").iterdir())
    sizes = []
    for step in range(3):
        trackers.log(step, {f"metric{i}": 0.5 for i in range(200)})
        sizes.append(file.stat().st_size)  # at once: a thread writes what is not flushed
    trackers.close()
    assert sizes[0] < sizes[1] < sizes[2] == file.stat().st_size
    assert [step for step, _ in scalars(tmp_path / "a")["metric199"]] == [0, 1, 2]


class Failing:
    def __init__(self) -> None:
        self.calls = 0

    def log(self, step: int, metrics: Any, *, is_complete: bool) -> None:
        self.calls += 1
        raise ConnectionError("gone\naway")

    def close(self) -> None:
        raise ConnectionError("gone")


def test_a_tracker_that_fails_is_dropped_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trackers, failing = Trackers(made(tmp_path / "a"), start=0), Failing()
    trackers._running["X"] = failing
    for step in range(3):
        trackers.log(step, {"loss": 1.0})
    trackers.close()
    assert failing.calls == 1
    out = capsys.readouterr().out
    assert out.startswith("megarl: warning: X failed") and out.count("\n") == 1, out


def wandb_script(script: str, folder: Path, **environment: str) -> str:
    """Runs in a process without a login; returns what it prints."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    env |= {
        "HOME": str(folder),
        "NETRC": str(folder / "netrc"),
        "PYTHONPATH": os.pathsep.join(sys.path),
    } | environment
    command = [
        sys.executable,
        "-c",
        f"from pathlib import Path\nFOLDER = Path({str(folder / 'run')!r})\n{script}",
    ]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


STEPS = (
    f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); from test_trackers import *\n"
)
KILLED = """
trackers = Trackers(made(FOLDER, wandb="p"), start=5)
trackers.log(5, {"loss": 1.0})
import psutil
(core,) = (child for child in psutil.Process().children() if "wandb-core" in " ".join(child.cmdline()))
core.kill()
print("killed")
for step in range(6, 60):
    trackers.log(step, {"loss": 1.0})
trackers.close()
"""


def records(file: Path) -> list[Any]:
    """The records of a .wandb file: blocks of 32 KiB with fragments, as in LevelDB's log, of protobuf messages."""
    from wandb.proto.wandb_internal_pb2 import Record

    data = file.read_bytes()
    messages, parts, offset = [], b"", 7
    while offset + 7 <= len(data):
        if (left := 32768 - offset % 32768) < 7:
            offset += left
            continue
        size, kind = int.from_bytes(data[offset + 4 : offset + 6], "little"), data[offset + 6]
        parts += data[offset + 7 : offset + 7 + size]
        offset += 7 + size
        if kind in (1, 4):  # a whole message, or its last fragment
            messages.append(Record.FromString(parts))
            parts = b""
    return messages


def history(file: Path) -> dict[int, dict[str, Any]]:
    rows = {}
    for record in records(file):
        if record.WhichOneof("record_type") == "history":
            row = {
                item.key or "/".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            assert row["_step"] not in rows
            rows[row["_step"]] = {
                name: value for name, value in row.items() if not name.startswith("_")
            }
    return rows


def test_wandb_offline(tmp_path: Path) -> None:
    """A resumed run keeps its id, and its files hold every step; without its service, training goes on."""
    pytest.importorskip("wandb")
    twice = "".join(
        f'run(made(FOLDER, wandb="p"), FOLDER, {values})\n'
        for values in ("0, 4, 0.0", "2, 5, 10.0")
    )
    out = wandb_script(STEPS + twice + KILLED, tmp_path, WANDB_MODE="offline")
    assert (
        out.partition("killed\n")[2].count("\n") == 1 and "warning: Weights & Biases failed" in out
    ), out

    files = sorted(
        (tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb"),
        key=lambda f: f.stat().st_mtime_ns,
    )
    assert len(files) == 3
    assert {file.stem for file in files} == {
        f"run-{(tmp_path / 'run' / 'wandb_run_id').read_text()}"
    }
    rows = history(files[1])
    assert sorted(rows) == [0, 1, 2, 3, 4]
    assert [rows[step]["loss"] for step in range(5)] == [0, 1, 12, 13, 14]
    assert rows[1].keys() == {"loss", "reward/http://host:1/x/mean", "weights/verified"}
    assert rows[2]["eval/accuracy"] == 10.0 and rows[4]["eval/accuracy"] == 10.0
    config = next(
        r.run for r in records(files[0]) if r.WhichOneof("record_type") == "run"
    ).config.update
    assert json.loads({item.key: item.value_json for item in config}["telemetry"])["wandb"] == "p"


@pytest.mark.long
def test_wandb_out_of_reach_records_offline(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    once = 'run(made(FOLDER, wandb="p"), FOLDER, 0, 2, 0.0)\n'
    nowhere = {
        "WANDB_BASE_URL": "http://127.0.0.1:9",
        "WANDB_API_KEY": "0" * 40,
        "WANDB_INIT_TIMEOUT": "1",
    }
    out = wandb_script(STEPS + once, tmp_path, **nowhere)
    assert out.count("\n") == 2 and "cannot be reached" in out, out
    folder = Path(re.search(r"wandb sync (\S+)", out)[1])
    assert sorted(history(next(folder.glob("run-*.wandb")))) == [0, 1]


CHECK = """
from megarl.config.schema import Telemetry
from megarl.telemetry.trackers import check_trackers
try:
    check_trackers(Telemetry(wandb="p"))
    print("passed")
except ValueError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        (
            {},
            "run wandb login, set WANDB_API_KEY, or record without a network by WANDB_MODE=offline",
        ),
        ({"WANDB_API_KEY": "short"}, "must have 40+ characters, has 5"),
        ({"WANDB_MODE": "offline"}, "passed"),
    ],
)
def test_a_missing_login_is_found_before_ranks_start(
    tmp_path: Path, environment: dict[str, str], said: str
) -> None:
    pytest.importorskip("wandb")
    assert said in wandb_script(CHECK, tmp_path, **environment)


def test_a_missing_package_is_found_before_ranks_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "is_installed", lambda module: False)
    for values, said in (
        (
            {"tensorboard": True},
            "tensorboard=true needs TensorBoard: pip install megarl[tensorboard]",
        ),
        ({"wandb": "p"}, "wandb=p needs wandb: pip install megarl[wandb]"),
    ):
        with pytest.raises(ValueError, match=re.escape(f"telemetry.{said}")):
            check_trackers(Telemetry(**values))
    check_trackers(Telemetry())
