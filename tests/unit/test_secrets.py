"""Tokens and passwords of the environment and of URLs: planted everywhere, and found in no file and on no terminal."""

from __future__ import annotations

import base64
import json
import logging
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote, quote_plus

import pytest

from megarl import cli
from megarl.config.schema import Reward
from megarl.jail import workers
from megarl.platform.env import MAX_CHARS, READ_CHARS, clean_logs, log_text, redact
from megarl.processes.exit_codes import Failure, parse_record, say, to_record, write_exit
from megarl.rewards import scorer
from megarl.rewards.remote import HttpClient, HttpOptions
from megarl.telemetry.trackers import _warn

# Arabic letter mark, soft hyphen, a tag, interlinear anchor, fillers, vowel separator, joiner
HIDDEN = "\u061c\xad\U000e0041\ufff9\u3164\u115f\u180e\u034f"
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
        (
            "login as app:hunter22pass failed for abcdef99",
            "login as app:$DATABASE_URL failed for $BUILD_ID",
        ),
        ("401: Authorization: Bearer abcdef", "401: Authorization: Bearer ***"),
        ("{'authorization': 'Basic dXNlcjpwYXNz'}", "{'authorization': 'Basic ***'}"),
        ("GET /v1?a=1&api_key=xyz12&b=2", "GET /v1?a=1&api_key=***&b=2"),
        ("/s?access_token=abcd#x", "/s?access_token=***#x"),
        ('{"api-key": "0123"} password=swordfish', '{"api-key": "***"} password=***'),
        ("sk-proj-abcDEF0123456789", "***"),
        ("ghp_0123456789abcdefghij, hf_abcdefghijklmnopqr.", "***, ***."),
        ("rollout.max_tokens=16 key=5 hf_dataset.py", "rollout.max_tokens=16 key=5 hf_dataset.py"),
        ("task-mask-scheduler-9 tokens: 12345", "task-mask-scheduler-9 tokens: 12345"),
        ("X-Auth-Token: abcd1234", "X-Auth-Token: ***"),
        ("Cookie: session=abcd1234; b=x", "Cookie: ***"),
        ('{"token": "abcd 1234", "n": 1}', '{"token": "***", "n": 1}'),
        (r"{\"client_secret\": \"abcd1234\"}", r"{\"client_secret\": \"***\"}"),
        ("Server=h;pwd=abcd1234;Database=x", "Server=h;pwd=***;Database=x"),
        ("AccountKey=abcd1234==", "AccountKey=***"),
        ("https://h/?sv=1&sig=abcd1234", "https://h/?sv=1&sig=***"),
        ("http://u:pw/12@h/ http://h:80/a@b", "http://***@h/ http://h:80/a@b"),
        ("token: None, eos_token='<|im_end|>'", "token: None, eos_token='<|im_end|>'"),
        ("prompt_key=question npm_config_registry", "prompt_key=question npm_config_registry"),
        ("-----BEGIN PRIVATE KEY-----\nMIIE\n-----END PRIVATE KEY-----.", "***."),
        ("-----BEGIN PRIVATE KEY-----\nMIIE", "***"),
    ],
)
def test_what_is_replaced(text: str, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # a DSN, and a header's value under any name (headers_env)
    monkeypatch.setenv("DATABASE_URL", "postgres://app:hunter22pass@db/x")
    monkeypatch.setenv("BUILD_ID", "abcdef99")
    options = HttpOptions(headers_env={"X-Auth": "BUILD_ID"})
    HttpClient("http://host/s", options, name="r")
    assert redact(text) == shown
    assert redact(redact(text)) == shown


@pytest.mark.parametrize(
    "token",
    [
        "AIzaSy_1-34567890abcdefghij",
        "pypi-AgEIcHlwaS5vcmcCJDEy",
        "npm_abcdefghijklmnopqrstuvwxyz",
        "SG.abcdefghijklmnop.qrstuvwxyz",
        "ya29.a0AfH6SMabcdefghijkl",
        "ASIAABCDEFGHIJKLMNOP",
        "github_pat_11ABCDEFG0abcdefghijkl_abcdefGH",
    ],
)
def test_tokens_that_are_known_by_their_beginning(token: str) -> None:
    assert redact(f"401 for {token}.") == "401 for ***."


@pytest.mark.parametrize(
    "name", ["GH_PAT", "STRIPE_SK", "AZURE_SAS", "SIGNATURE", "OPENAI_PRIVATE", "ENCRYPTION_PHRASE"]
)
def test_a_variables_secret_in_each_encoding(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "first'line+A\nsecond\"line/B"
    monkeypatch.setenv(name, secret)
    monkeypatch.setenv("DSN", "postgres://u:p%40ss/word@h/x")
    encoded = base64.b64encode(secret.encode()).decode()
    forms = [secret, repr(secret), json.dumps(secret), quote(secret), quote_plus(secret), encoded]
    for text in [*forms, *secret.splitlines()]:
        assert re.fullmatch(rf"""['"]?\${name}['"=]*""", redact(text)), text
    assert redact("p@ss/word, p%40ss/word") == "$DSN, $DSN"


def test_a_secret_on_a_cut_is_not_shown_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "0123456789abcdef" * 100
    monkeypatch.setenv("LONG_TOKEN", secret)
    for offset in range(0, len(secret), 160):
        filler = "x" * offset
        for text in (f"{filler}{secret * 40}", f"{secret * 40}{filler}"):
            assert len(text) > 2 * READ_CHARS and "89abc" not in log_text(text), offset


@pytest.mark.parametrize("unit", ["?key", "\x1b", "://:", "\n"])
def test_a_text_of_any_length_is_logged_at_once(unit: str) -> None:
    began = time.process_time()
    assert len(log_text("x" * READ_CHARS)) < MAX_CHARS
    assert len(log_text(unit * 2_500_000)) <= MAX_CHARS
    assert time.process_time() - began < 1, "10 MB; only its ends are searched"


@pytest.mark.parametrize(
    "unit", ["?key", "password ", "://a", "://a:", "bearer ", "&token", "sk-a", "a:b@"]
)
def test_hostile_text_is_searched_at_once(unit: str) -> None:
    began = time.process_time()
    redact(unit * 100_000)
    assert time.process_time() - began < 10, "quadratic time would be hours"


def test_text_of_a_model_stays_on_its_own_lines(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A solution's exception can neither clear the screen, nor forge a line, nor fill the disk."""
    forged = "\x1b[2J\x9b2J\rmegarl: done\u202e\nmegarl: done\u2028\n megarl: done"
    forged += f"{HIDDEN}{'é' * 100_000}"
    monkeypatch.setattr(logging, "_logRecordFactory", logging.LogRecord)
    clean_logs()
    log = logging.getLogger("megarl.test")
    log.warning("cause: %s", forged)
    try:
        raise ValueError(forged)
    except ValueError:
        log.exception("failed")
    say(forged)
    _warn(forged)
    failure = Failure(0, 1, forged, traceback=f"Traceback\n{forged}")
    write_exit(tmp_path, 1, failure)
    assert parse_record(to_record(failure)) == failure, "what is clean stays as it is"
    captured = capfd.readouterr()
    written = caplog.text + captured.out + captured.err
    error = json.loads((tmp_path / "exit.json").read_text())["error"]
    for text in (caplog.text, written, error, failure.traceback):
        assert r"\x1b[2J\x9b2J\rmegarl: done\u202e" in text
        assert ascii(HIDDEN)[1:-1] in text
        assert not re.search(r"[^\n -~é]", text)
        assert "é (100,0" not in text and "characters]" in text
    assert len(written) < 10 * MAX_CHARS
    lines = [
        line
        for line in written.splitlines()
        if line.strip(" ")[:12] == "megarl: done" and line[:2] != "  "
    ]
    assert not lines, "only say's own line begins with megarl"


def test_failures_and_warnings(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    leak = " ".join(CANARIES.values())
    write_exit(tmp_path, 1, Failure(0, 1, f"no access: {leak}", "start-up", f"Traceback {leak}"))
    _warn(f"W&B: {leak}")
    assert (
        "canary"
        not in repr(Failure(0, 1, leak, traceback=leak)) + texts(tmp_path) + capfd.readouterr().out
    )


def test_a_users_function_that_raises_with_a_secret(
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from megarl.types import Prompt, Sample

    torch = pytest.importorskip("torch")
    zeros = torch.zeros(2)
    prompt = Prompt(0, (0,), "p", "a")
    sample = Sample(0, 0, zeros.long(), zeros == 0, zeros, zeros.int(), "stop", "r")
    monkeypatch.setattr(logging, "_logRecordFactory", logging.LogRecord)
    clean_logs()
    # libraries disable loggers that exist
    monkeypatch.setattr(scorer, "log", logging.getLogger(__name__))
    server = replace(workers.SERVER, process=None, requests=None)  # with this environment
    monkeypatch.setattr(workers, "SERVER", server)
    [scored] = (
        scorer.make_scorer([Reward(name=f"{__name__}:leaks")]).start([prompt]).results([sample])
    )
    assert scored.reward is None and "$SCORER_SECRET" in caplog.text
    assert "canary" not in caplog.text
    logged = capfd.readouterr().err
    assert "asked with $SCORER_SECRET" in logged and "canary" not in logged


def leaks(response: str) -> float:
    logging.warning(f"asked with {os.environ['SCORER_SECRET']}")
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
