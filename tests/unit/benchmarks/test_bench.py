"""The frame of `megarl bench`, on contenders written here."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import contender
from benchmarks.frame import Case, Contender, run_case
from benchmarks.names import BENCHES, Bench, cases
from benchmarks.run import bench
from megarl.cli import main

THREADS = torch.get_num_threads()  # left as they are: other tests run in this process
CONTENDERS = """
import time
import numpy as np
from benchmarks.frame import Case, Contender, Missing, Outcome

def quick(size):
    return lambda: np.arange(size, dtype=np.float32)

def slow(size):
    def call():
        block = np.ones(30 << 20, dtype=np.uint8)
        return Outcome(np.arange(size, dtype=np.float32) + 1e-7 * block[0], seconds=0.25, figures={"blocks": 1.0})
    return call

def wrong(size):
    return lambda: np.arange(size, dtype=np.float32) + 1

def absent(size):
    raise Missing("not installed: pip install something")

def broken(size):
    return lambda: [][size]

NAMES = ("quick", "slow", "wrong", "absent", "broken")
CASES = (
    Case("numbers", tuple(Contender(name, f"contenders:{name}") for name in NAMES), {"size": 10},
         with_memory=True, at_least=5.0, call_s=0.01),
    Case("alone", (Contender("quick", "contenders:quick", {"size": 3}),), call_s=0.01),
)
"""


@pytest.fixture
def contenders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that this process and its children can import."""
    (tmp_path / "contenders.py").write_text(CONTENDERS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(BENCHES, "ours", Bench("of this test", "contenders"))
    monkeypatch.delitem(sys.modules, "contenders", raising=False)


def request(function: str, output: Path | None = None) -> dict:
    arguments = {"size": 10}
    where = None if output is None else str(output)
    return {"function": function, "arguments": arguments, "threads": [THREADS], "call_s": 0.01, "output": where}


def test_a_contender_tells_its_time_memory_and_output(contenders: None, tmp_path: Path) -> None:
    told = contender.main(request("contenders:slow", tmp_path / "out.npy"))
    assert told["seconds"] == {str(THREADS): 0.25}, "it measures itself"
    assert told["cpu_seconds"] == {str(THREADS): None}, "what works then is not known"
    assert told["figures"] == {"blocks": 1.0}
    assert told["peak_bytes"] > 20 << 20
    assert told["versions"].keys() >= {"python", "torch", "megarl"}
    assert np.load(tmp_path / "out.npy").shape == (10,)
    assert 0 < contender.main(request("contenders:quick"))["seconds"][str(THREADS)] < 0.1
    assert contender.main(request("contenders:absent")) == {"error": "not installed: pip install something"}


@pytest.mark.long
def test_contenders_in_processes_of_their_own(contenders: None, tmp_path: Path, capsys) -> None:
    assert main(["bench", "ours", "--rounds", "1", "--json", str(tmp_path / "told.json")]) == 3
    shown = capsys.readouterr().out
    told = json.loads((tmp_path / "told.json").read_text())
    rows = {row["contender"]: row for row in told["results"] if row["case"] == "numbers"}
    assert list(rows) == ["quick", "slow", "wrong", "absent", "broken"]
    assert rows["slow"]["is_equal"] and rows["slow"]["speedup"] > 5 and rows["slow"]["peak_bytes"] > 20 << 20
    assert not rows["wrong"]["is_equal"] and rows["wrong"]["note"].startswith("DIFFERS, at most 1.0e+00")
    assert rows["absent"]["note"] == "not installed: pip install something" and rows["absent"]["seconds"] is None
    assert rows["broken"]["note"] == "failed: IndexError: list index out of range"
    assert all(text in shown for text in ("numbers", "alone", "pip install something", "load", "torch"))
    assert told["before"]["load"] and told["rounds"] == 1


def test_rounds_alternate(contenders: None, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("two", tuple(Contender(name, f"contenders:{name}") for name in ("absent", "broken")))
    told: list[str] = []
    monkeypatch.setattr("benchmarks.frame._ask", lambda case, contender, output: ANSWER)
    run_case(case, rounds=3, say=told.append)
    assert [text.split()[1].rstrip(",") for text in told] == [
        "absent",
        "broken",
        "broken",
        "absent",
        "absent",
        "broken",
    ]


ANSWER = {"seconds": {"1": 1.0}, "cpu_seconds": {"1": 1.0}, "peak_bytes": None, "figures": {}, "versions": {}}


def test_names(capsys) -> None:
    assert main(["bench"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed and entry.about in listed for name, entry in BENCHES.items())
    assert main(["bench", "loses"]) == 2
    assert "did you mean losses?" in capsys.readouterr().err
    assert main(["bench", "losses", "--rounds", "0"]) == 2
    with pytest.raises(ValueError, match="no case of losses holds --only='7x7'"):
        bench(["losses"], only="7x7")


@pytest.mark.parametrize("name", BENCHES)
def test_every_contender_exists(name: str) -> None:
    for case in cases(name):
        for one in case.contenders:
            module, _, function = one.function.partition(":")
            assert callable(getattr(sys.modules[module], function)), one
