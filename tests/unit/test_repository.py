"""The files around the code: the index of results, the changelog, the workflow, the templates."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from benchmarks.exhaustive import CHECKS

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def test_the_index_of_results_is_complete() -> None:
    rows = re.findall(r"^\| (.+?) \| .+ \| (.+?) \|$", (RESULTS / "README.md").read_text(), re.M)
    rows = [row for row in rows if row[0] not in ("file", "---")]
    listed = [name for names, _ in rows for name in names.split(", ")]
    assert sorted(listed) == sorted(file.name for file in RESULTS.iterdir() if file.suffix != ".md")
    for names, text in rows:
        for module, arguments in re.findall(r"`python -m (benchmarks[\w.]*) ?(.*?)`", text):
            assert (ROOT / f"{module.replace('.', '/')}.py").is_file() or module == "benchmarks"
            if module == "benchmarks":
                assert (ROOT / "benchmarks" / f"{arguments.split()[0]}.py").is_file(), arguments
        for check in re.findall(r"`exhaustive (\w+)`", text):
            assert check in CHECKS and names == f"{check}.txt"


def test_the_changelog_is_cut_at_the_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    assert re.findall(r"^## (.+)$", text, re.M)[0] == "Unreleased"
    for release in text.split("\n## ")[1:]:
        topics = re.findall(r"^### (.+)$", release, re.M)
        assert len(topics) == len(set(topics)), "each topic once"
    source = (ROOT / "megarl" / "__init__.py").read_text()
    (version,) = re.findall(r'__version__ = "(.+)"', source)
    assert re.search(rf"^## {re.escape(version)} \(\d{{4}}-\d\d-\d\d\)$", text, re.M)
    assert version not in (ROOT / "pyproject.toml").read_text().partition("[tool.ruff]")[0]


def test_the_workflow_runs_what_ci_runs() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    (job,) = workflow["jobs"].values()
    assert job["steps"][-1] == {"run": ".ci/run"} and (ROOT / ".ci/run").is_file()
    for file in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"):
        form = yaml.safe_load(file.read_text())
        assert file.name == "config.yml" or {"name", "description", "body"} <= set(form)
    for line in (ROOT / ".github/CODEOWNERS").read_text().splitlines():
        if line.startswith("/"):
            assert (ROOT / line.split()[0].strip("/")).exists(), line
