"""Tokens and passwords of the environment and of URLs: planted everywhere, and found in no file and on no terminal."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megarl import cli
from megarl.config.schema import Reward
from megarl.platform.env import redact
from megarl.processes.exit_codes import Failure, write_exit
from megarl.rewards import scorer
from megarl.telemetry.trackers import _warn

CANARIES = {
    "HF_TOKEN": "hf_canary_1",
    "WANDB_API_KEY": "0123canary_2",
    "SCORER_SECRET": "Bearer canary_3",
    "db_password": "canary_45",
}


@pytest.fixture(autouse=True)
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in CANARIES.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SHORT_KEY", "true")


def texts(folder: Path) -> str:
    return "".join(
        file.read_bytes().decode(errors="replace") for file in folder.rglob("*") if file.is_file()
    )


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("401 for hf_canary_1 and Bearer canary_3.", "401 for $HF_TOKEN and $SCORER_SECRET."),
        ("{'key': '0123canary_2'}canary_45", "{'key': '$WANDB_API_KEY'}$db_password"),
        ("https://me:pass@host/a@b http://token@host", "https://***@host/a@b http://***@host"),
        ("see https://host/a, or write to me@host", "see https://host/a, or write to me@host"),
        ("true", "true"),
    ],
)
def test_what_is_replaced(text: str, shown: str) -> None:
    assert redact(text) == shown
    assert redact(redact(text)) == shown


def test_failures_and_warnings(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    leak = " ".join(CANARIES.values())
    write_exit(tmp_path, 1, Failure(0, 1, f"no access: {leak}", "start-up", f"Traceback {leak}"))
    _warn(f"W&B: {leak}")
    assert (
        "canary"
        not in repr(Failure(0, 1, leak, traceback=leak)) + texts(tmp_path) + capfd.readouterr().out
    )


def test_a_users_function_that_raises_with_a_secret(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megarl.types import Prompt, Sample

    torch = pytest.importorskip("torch")
    zeros = torch.zeros(2)
    prompt = Prompt(0, (0,), "p", "a")
    sample = Sample(0, 0, zeros.long(), zeros == 0, zeros, zeros.int(), "stop", "r")
    # libraries disable loggers that exist
    monkeypatch.setattr(scorer, "log", logging.getLogger(__name__))
    [scored] = (
        scorer.make_scorer([Reward(name=f"{__name__}:leaks")]).start([prompt]).results([sample])
    )
    assert scored.reward is None and "$SCORER_SECRET" in caplog.text
    assert "canary" not in caplog.text


def leaks(response: str) -> float:
    raise ConnectionError(f"401 for {os.environ['SCORER_SECRET']}")


REWARDS = [
    {"name": "http://me:canary@host/s"},
    {"name": "http://host/s?token=canary"},
    {"name": "judge", "options": {"url": "http://me:canary@host/v1", "model": "m"}},
    {"name": "process", "options": {"scorer": "http://me:canary@host/s", "splitter": "newline"}},
    {"name": "http://host/s", "options": {"headers_env": {"Authorization": "Bearer canary"}}},
]


@pytest.mark.parametrize("reward", REWARDS, ids=str)
def test_a_config_with_a_secret_is_refused_without_showing_it(
    tmp_path, monkeypatch, capfd, reward
) -> None:
    monkeypatch.setenv("RANK", "0")  # a launcher's: the refusal is recorded in exit.json too
    monkeypatch.setenv("WORLD_SIZE", "1")
    file = tmp_path / "config.yaml"
    task = tmp_path / "task.jsonl"
    task.write_text('{"prompt": "1 + 1", "answer": "2"}\n')
    run = {"run": {"dir": str(tmp_path / "runs"), "name": "a"}, "task": {"name": f"jsonl:{task}"}}
    file.write_text(json.dumps(run | {"model": {"create": {}}, "rewards": [reward]}))
    assert cli.main(["train", str(file)]) == 2
    captured = capfd.readouterr()
    assert json.loads((tmp_path / "runs/a/exit.json").read_text())["code"] == 2
    assert "headers_env" in captured.err
    assert "canary" not in captured.out + captured.err + texts(tmp_path / "runs")


RUN_RL = """
import contextlib, os, sys, types

def run(rank):
    raise RuntimeError("401 for " + " ".join(os.environ[name] for name in {names}) + " at https://me:canary@mirror/")

for name, function in (("stages.rl", run), ("run.context", lambda *_: contextlib.nullcontext())):
    module = types.ModuleType("megarl." + name)
    module.run = module.open_rank = function
    sys.modules[module.__name__] = module
"""
LAUNCH = """
import sys
from megarl.config.load import parse_config
from megarl.config.validate import check_config
from megarl.processes.spawn import spawn_ranks
from megarl.platform.env import Env
rewards = [{"name": "http://host/s", "options": {"headers_env": {"Authorization": "SCORER_SECRET"}}}]
config = parse_config({"run": {"name": "a", "dir": sys.argv[1]}, "model": {"create": {}}, "rewards": rewards})
sys.exit(spawn_ranks(config, check_config(config, Env.read()), "train"))
"""


def test_a_run_that_fails_with_secrets_in_its_error(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(RUN_RL.replace("{names}", repr(list(CANARIES))))
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", LAUNCH, str(tmp_path / "runs")],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
    )
    written = texts(tmp_path / "runs")
    assert (
        done.returncode == 1 and "401 for $HF_TOKEN" in done.stderr and "SCORER_SECRET" in written
    )
    assert {"config.yaml", "exit.json", "rank_0.log"} <= {
        file.name for file in (tmp_path / "runs").rglob("*")
    }
    assert "canary" not in done.stdout + done.stderr + written
