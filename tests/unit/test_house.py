"""The house rules that a machine can check: rows, bans, sizes. Also run before every commit."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "megarl").rglob("*.py"))
MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_CONFIG_LINES = 400, 60, 40

# what must not be written, and the only places where it may (relative to megarl/)
BANS = {
    r"\bos\.(environ|getenv|putenv)\b": {"platform/env.py"},
    r"torch\.cuda\.current_device": {"platform/megatron_on_cpu.py", "platform/device.py"},
    r"megatron\.core\.parallel_state|import parallel_state": {"trainer/parallel_groups.py"},
    r"^\s*from \.": set(),  # absolute imports only
    r"except\s*:": set(),
    r"https?://(?!(arxiv\.org|github\.com|www\.apache\.org)/|(host|localhost)[:/])": set(),
}


def relative(file: Path) -> str:
    return file.relative_to(ROOT / "megarl").as_posix()


def code_lines(file: Path) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        yield number, line.partition("#")[0] if "http" not in line else line


@pytest.mark.parametrize("ban", BANS)
def test_banned(ban: str) -> None:
    found = [
        f"{relative(file)}:{number}: {line.strip()}"
        for file in SOURCES
        if relative(file) not in BANS[ban]
        for number, line in code_lines(file)
        if re.search(ban, line)
    ]
    assert not found, "\n".join(found)


def test_every_ban_catches_something() -> None:
    """A pattern that matches nothing at all would guard nothing."""
    planted = (
        "os.environ['A']",
        "torch.cuda.current_device()",
        "from megatron.core import parallel_state",
        "from .names import x",
        "except:",
        "http://example.com/",
    )
    for pattern, text in zip(BANS, planted, strict=True):
        assert re.search(pattern, text), pattern


@pytest.mark.parametrize("file", SOURCES, ids=relative)
def test_sizes(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    tree = ast.parse(text)
    assert len(text.splitlines()) <= MAX_FILE_LINES, "split it by noun"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or 0) - node.lineno + 1
            assert length <= MAX_FUNCTION_LINES, f"{node.name} has {length} lines"
    assert not text or ast.get_docstring(tree), "a module says what flows through it"


def test_names() -> None:
    assert not [relative(file) for file in SOURCES if file.stem in ("utils", "helpers", "misc", "common")]


def test_classes_inherit_at_most_once() -> None:
    """A class of ours that is a base of ours has no further base of ours."""
    bases: dict[str, list[str]] = {}
    for file in SOURCES:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                bases[node.name] = [base.id for base in node.bases if isinstance(base, ast.Name)]
    ours = {name: [base for base in of if base in bases] for name, of in bases.items()}
    # a batch type is its stage's fields on top of the last stage's; config sections share one closed base
    deep = [name for name, of in ours.items() if any(ours[base] for base in of)]
    assert not deep, deep


def test_configs_say_only_what_differs() -> None:
    for file in (ROOT / "configs").glob("*.yaml"):
        assert len(file.read_text().splitlines()) <= MAX_CONFIG_LINES, file.name


def test_rows() -> None:
    """The import contracts of pyproject.toml."""
    cli = pytest.importorskip("importlinter.cli", reason="import-linter is in the dev extra")
    assert cli.lint_imports(config_filename=str(ROOT / "pyproject.toml"), no_cache=True) == 0
