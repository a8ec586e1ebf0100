"""The frame of the benchmarks on contenders written here, and the smallest case of each benchmark."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import contender
from benchmarks.frame import Case, Contender, Outcome, run_case
from benchmarks.names import BENCHES, Bench, cases
from benchmarks.packing import pack_mffd
from benchmarks.run import bench, describe

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
    return {
        "function": function,
        "arguments": arguments,
        "threads": [THREADS],
        "call_s": 0.01,
        "output": where,
    }


def test_a_contender_reports_its_time_memory_and_output(contenders: None, tmp_path: Path) -> None:
    report = contender.main(request("contenders:slow", tmp_path / "out.npy"))
    assert report["seconds"] == {str(THREADS): 0.25}, "the call measures itself"
    assert report["cpu_seconds"] == {str(THREADS): None}, "CPU time of other processes is unknown"
    assert report["figures"] == {"blocks": 1.0}
    assert report["peak_bytes"] > 20 << 20
    assert report["versions"].keys() >= {"python", "torch", "megarl"}
    assert np.load(tmp_path / "out.npy").shape == (10,)
    seconds = contender.main(request("contenders:quick"))["seconds"][str(THREADS)]
    assert 0 < seconds != 0.25, "measured around the call"
    assert contender.main(request("contenders:absent")) == {
        "error": "not installed: pip install something"
    }


@pytest.mark.long
def test_contenders_in_processes_of_their_own(contenders: None, tmp_path: Path, capsys) -> None:
    assert not bench(["ours"], rounds=1, json_file=tmp_path / "report.json")
    shown = capsys.readouterr().out
    report = json.loads((tmp_path / "report.json").read_text())
    rows = {row["contender"]: row for row in report["results"] if row["case"] == "numbers"}
    assert list(rows) == ["quick", "slow", "wrong", "absent", "broken"]
    assert (
        rows["slow"]["is_equal"]
        and rows["slow"]["speedup"] > 5
        and rows["slow"]["peak_bytes"] > 20 << 20
    )
    assert not rows["wrong"]["is_equal"] and rows["wrong"]["note"].startswith(
        "DIFFERS, at most 1.0e+00"
    )
    assert (
        rows["absent"]["note"] == "not installed: pip install something"
        and rows["absent"]["seconds"] is None
    )
    assert rows["broken"]["note"] == "failed: IndexError: list index out of range"
    assert all(
        text in shown for text in ("numbers", "alone", "pip install something", "load", "torch")
    )
    assert report["before"]["load"] and report["rounds"] == 1


def test_rounds_alternate(contenders: None, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(
        "two", tuple(Contender(name, f"contenders:{name}") for name in ("absent", "broken"))
    )
    lines: list[str] = []
    monkeypatch.setattr("benchmarks.frame._run_contender", lambda case, contender, output: ANSWER)
    run_case(case, rounds=3, progress=lines.append)
    assert [text.split()[1].rstrip(",") for text in lines] == [
        "absent",
        "broken",
        "broken",
        "absent",
        "absent",
        "broken",
    ]


ANSWER = {
    "seconds": {"1": 1.0},
    "cpu_seconds": {"1": 1.0},
    "peak_bytes": None,
    "figures": {},
    "versions": {},
}


def test_names() -> None:
    assert all(name in describe() and entry.about in describe() for name, entry in BENCHES.items())
    with pytest.raises(ValueError, match="did you mean losses"):
        bench(["loses"])
    with pytest.raises(ValueError, match="--rounds=0; at least 1"):
        bench(["losses"], rounds=0)
    with pytest.raises(ValueError, match="no case of losses contains --only='7x7'"):
        bench(["losses"], only="7x7")


@pytest.mark.parametrize("name", BENCHES)
def test_every_contender_exists(name: str) -> None:
    for case in cases(name):
        for one in case.contenders:
            module, _, function = one.function.partition(":")
            assert callable(getattr(sys.modules[module], function)), one


SMALLEST = {
    "advantages": ("ours", {"name": "reinforce_pp", "rewards": "kl", "rows": 16, "length": 32}),
    "losses": ("ours", {"rows": 16, "length": 32}),
    "packing": ("ffd", {"items": 64, "longest": 16384}),
    "end_to_end": ("megarl_update", {"model": "", "prompts": 2, "samples": 4, "response": 4}),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.long if name == "end_to_end" else ())
        for name in SMALLEST
    ],
)
def test_the_smallest_case_runs(name: str) -> None:
    function, arguments = SMALLEST[name]
    output = getattr(import_module(BENCHES[name].module), function)(**arguments)()
    values = output.output if isinstance(output, Outcome) else output
    assert np.isfinite(values).all() and values.any()


def test_mffd_packs_each_row_once() -> None:
    lengths = [9, 8, 7, 6, 5, 5, 4, 3, 2, 2, 1, 1]
    bins = pack_mffd(lengths, 10)
    assert sorted(item for bin in bins for item in bin) == list(range(len(lengths)))
    assert max(sum(lengths[item] for item in bin) for bin in bins) <= 10
