"""Judges in processes of their own: whatever a text does to its judge, the text is worth 0 and the others their due."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from megarl.jail.judging import JudgePool, Verdict

JUDGES = """
import json, os, resource, signal, socket, sys, time
from megarl.jail.judging import Verdict

seen = []

def attempt(function, *arguments):
    try:
        function(*arguments)
        return "done"
    except OSError:
        return "refused"

def look(context):
    def judge(text):
        found = {
            "environ": sorted(os.environ), "context": context, "seen": list(seen),
            "read": attempt(open, context["secret"]), "write": attempt(open, context["outside"], "w"),
        }
        seen.append(text)
        return Verdict(1.0, "looked", json.dumps(found))
    return judge

def make(context):
    def judge(text):
        if text == "raise":
            raise ValueError("odd\\nanswer")
        if text == "exit":
            sys.exit(0)
        if text == "leave":
            os._exit(0)
        if text == "loop":
            while True: pass
        if text == "sleep":
            time.sleep(600)
        if text == "big number":
            9 ** 9 ** 9 ** 9
        if text == "memory":
            return len(bytearray(100 << 30))
        if text == "fork":
            os.fork()
        if text == "connect":
            socket.socket(socket.AF_INET)
        if text == "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        if text == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if text == "real-time":
            os.kill(os.getpid(), 40)
        return {"nan": float("nan"), "inf": float("inf"), "none": None, "text": "1.0x"}.get(text, 1.0)
    return judge

def no_judge(context):
    raise KeyError("dataset")
"""
GOOD = Verdict(1.0)
ENDINGS = [
    ("raise", "raised", "its judge raised ValueError: odd answer"),
    ("exit", "raised", "SystemExit"),
    ("leave", "crashed", "ended with status 0"),
    ("loop", "timeout", "status -27 of 1 CPU seconds"),
    ("big number", "timeout", "status -27 of 1 CPU seconds"),
    ("memory", "memory", ""),
    ("fork", "forbidden", ""),
    ("connect", "forbidden", ""),
    ("segfault", "crashed", "-11"),
    ("kill", "memory", "-9"),
    ("real-time", "crashed", "-40"),
    ("nan", "raised", "nan"),
    ("inf", "raised", "inf"),
    ("none", "raised", "TypeError"),
    ("text", "raised", "ValueError"),
]


@pytest.fixture(scope="module")
def pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, JudgePool]]:
    folder = tmp_path_factory.mktemp("judges")
    (folder / "judges.py").write_text(JUDGES)
    sys.path.append(str(folder))
    try:
        yield {
            name: JudgePool(f"judges:{name}") for name in ("make", "look", "no_judge", "missing")
        }
    finally:
        sys.path.remove(str(folder))


def judge(
    pools: dict[str, JudgePool], *texts: str, factory: str = "make", context: object = None
) -> list[Verdict]:
    return pools[factory].judge(context, [(text,) for text in texts], timeout_s=1.0)


@pytest.mark.parametrize(("text", "cause", "detail"), ENDINGS, ids=[text for text, *_ in ENDINGS])
def test_a_text_that_ends_its_judge_is_worth_0_and_harms_no_other(pools, text, cause, detail):
    before, verdict, *after = judge(pools, "good", text, "good", "good")
    assert (verdict.value, verdict.cause) == (0.0, cause) and detail in verdict.detail
    assert [before, *after] == [GOOD] * 3


def test_many_that_end_it_in_a_row(pools):
    verdicts = judge(pools, *["kill", "good", "leave"] * 20)
    assert [verdict.value for verdict in verdicts] == [0.0, 1.0, 0.0] * 20


def test_a_judge_that_waits_is_killed(pools, monkeypatch):
    monkeypatch.setattr("megarl.jail.judging.BUSY_S", 0.5)
    assert [verdict.cause for verdict in judge(pools, "good", "sleep", "good")] == [
        "",
        "timeout",
        "",
    ]


def test_nothing_to_judge(pools):
    assert judge(pools) == []


def test_a_judge_has_no_rights_and_a_child_starts_clean(pools, monkeypatch, tmp_path):
    monkeypatch.setenv("CANARY", "secret of the trainer")
    (tmp_path / "secret").write_text("x")
    context = {"secret": str(tmp_path / "secret"), "outside": str(tmp_path / "evil")}
    for _ in range(2):
        first, second = (
            json.loads(v.detail) for v in judge(pools, "a", "b", factory="look", context=context)
        )
        assert (first["seen"], second["seen"]) == ([], ["a"]), (
            "something of an earlier child stayed"
        )
        assert first["read"] == first["write"] == "refused" and first["context"] == context
        assert "CANARY" not in first["environ"]
    assert sorted(os.listdir(tmp_path)) == ["secret"]


def test_many_texts_in_order_and_many_threads(pools):
    with ThreadPoolExecutor(4) as threads:
        runs = [threads.submit(judge, pools, *(["good", "none"] * 150)) for _ in range(4)]
    assert [[v.value for v in run.result()] for run in runs] == [[1.0, 0.0] * 150] * 4


@pytest.mark.parametrize(
    ("factory", "detail"), [("no_judge", "KeyError: 'dataset'"), ("missing", "no attribute")]
)
def test_a_judge_that_cannot_start_leaves_the_text_without_a_value(pools, factory, detail):
    verdicts = judge(pools, "good", "good", factory=factory)
    assert [(v.value, v.cause) for v in verdicts] == [(None, "no_judge")] * 2
    assert all(detail in v.detail for v in verdicts)


def test_a_server_that_is_killed_leaves_texts_without_a_value_and_is_started_again(pools):
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(judge, pools, "good", "sleep")
        server = pools["make"].server
        while server.process is None:
            time.sleep(0.01)
        time.sleep(0.5)
        server.process.kill()
        assert {v.cause for v in running.result()} == {"no_judge"}
    assert judge(pools, "good") == [GOOD]


def test_no_folder_is_left(pools, tmp_path):
    code = "from megarl.jail.judging import JudgePool as P; P('judges:make').judge(None, [('good',)] * 40, timeout_s=1)"
    env = {"PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True
    )
    assert not done.stderr and not list(tmp_path.iterdir())
