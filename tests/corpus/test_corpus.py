"""Files, folders and rows as people have them: each folder here is one report, with what must come of it.

    NAME/expect.yaml
        argv: [train, EXAMPLES/sft/sft.yaml, "task.name=jsonl:rows.jsonl", --dry-run]    a command line, run in a copy of the folder
        exit: 2                                     its exit code
        says: ["rows.jsonl: line 3"]                what it prints, in parts
        silent: [Traceback]                         what it must not print
        value: {data.answers: [5, "2024-01-05"]}    what probes/data.py's answers(folder) returns; {below: 1e-5} is a bound
        base: [chatml]                              bases/NAME: files that are there before the report's own
        json: {config.json: {vocab_size: 9}}        keys to set in JSON files, null removes one
        remove: [generation_config.json]
        about: why people have it
        source: a public report of the kind

`CONFIGS` and `EXAMPLES` are the repository's configs/ and examples/. A base may have a make.py, whose make(folder) writes what is no text; a report
may have one as well, which sees the folder last. Commands run in this process, until a rank would start.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from megarl.cli import main

HERE = Path(__file__).parent
PLACES = {name.upper(): str(HERE.parents[1] / name) for name in ("configs", "examples")}
KEYS = {"argv", "exit", "says", "silent", "value", "base", "json", "remove", "about", "source"}
REPORTS = sorted(path.parent for path in HERE.glob("*/expect.yaml"))


def read_report(folder: Path) -> dict[str, Any]:
    report = yaml.safe_load((folder / "expect.yaml").read_text(encoding="utf-8"))
    assert not report.keys() - KEYS, f"{folder.name}: {report.keys() - KEYS}"
    assert report.get("about"), folder.name
    assert ("argv" in report and "exit" in report) or "value" in report, folder.name
    assert report.get("exit") in (None, 0) or report.get("says"), f"{folder.name}: says what?"
    return report


def fill_in(argv: list[Any]) -> list[str]:
    texts = [str(argument) for argument in argv]
    for name, place in PLACES.items():
        texts = [text.replace(name, place) for text in texts]
    return texts


def run_make(path: Path, folder: Path) -> None:
    if path.exists():
        spec = importlib.util.spec_from_file_location(f"make_{path.parent.name}", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.make(folder)


def copy_files(source: Path, folder: Path) -> None:
    ignore = shutil.ignore_patterns("make.py", "expect.yaml", "__pycache__")
    shutil.copytree(source, folder, dirs_exist_ok=True, ignore=ignore, symlinks=True)


@pytest.fixture(scope="session")
def made_bases() -> dict[str, Path]:
    """The bases that this process has made, by name."""
    return {}


@pytest.fixture
def make_folder(made_bases: dict[str, Path], tmp_path_factory: pytest.TempPathFactory):
    def make(report: Path, expect: dict[str, Any]) -> Path:
        folder = tmp_path_factory.mktemp(report.name)
        names = expect.get("base", [])
        for name in [names] if isinstance(names, str) else names:
            if name not in made_bases:
                made_bases[name] = tmp_path_factory.mktemp(f"base_{name}")
                copy_files(HERE / "bases" / name, made_bases[name])
                run_make(HERE / "bases" / name / "make.py", made_bases[name])
            copy_files(made_bases[name], folder)
        copy_files(report, folder)
        for name, changes in expect.get("json", {}).items():
            values = json.loads((folder / name).read_text()) | changes
            kept = {key: value for key, value in values.items() if value is not None}
            (folder / name).write_text(json.dumps(kept))
        for name in expect.get("remove", []):
            (folder / name).unlink()
        run_make(report / "make.py", folder)
        return folder

    return make


@pytest.fixture
def users_modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forgets the Python files of a report once it is done."""
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None) or ""
        if "/make_" in file or str(Path.cwd()) in file:
            del sys.modules[name]


def check_value(name: str, measured: Any, expected: Any) -> None:
    if isinstance(expected, dict) and expected.keys() == {"below"}:
        assert measured < expected["below"], f"{name}: {measured}"
    else:
        assert measured == expected, name


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: report.name)
def test_report(
    report: Path,
    make_folder: Any,
    users_modules: None,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    expect = read_report(report)
    folder = make_folder(report, expect)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{HERE.parents[1]}")
    if "argv" in expect:
        code = main(fill_in(expect["argv"]))
        printed = "".join(capfd.readouterr())
        assert code == expect["exit"], printed
        for text in expect.get("says", []):
            assert text in printed, printed
        for text in ["Traceback", *expect.get("silent", [])]:
            assert text not in printed, printed
    for name, expected in expect.get("value", {}).items():
        module, _, function = name.rpartition(".")
        probe = getattr(importlib.import_module(f"tests.corpus.probes.{module}"), function)
        check_value(name, probe(folder), expected)


def test_the_corpus_has_no_two_reports_alike() -> None:
    seen = {}
    for report in REPORTS:
        files = sorted(path for path in report.rglob("*") if path.is_file())
        content = b"".join(path.read_bytes() for path in files)
        assert content not in seen, f"{report.name} and {seen[content]}"
        seen[content] = report.name
