"""The code blocks of the documentation run, in a folder per page; configs load; outputs are as printed.

scripts/docs/blocks.py says what the classes of a block mean.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.commands.random_model import create_model
from megarl.config.load import load_config
from megarl.config.schema import Create
from scripts.docs.blocks import Block, blocks
from scripts.docs.check import SHELL, metric_patterns
from tests.hub import Hub, Repo, serve_hub

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = {
    file.relative_to(DOCS).as_posix(): list(blocks(file.read_text(encoding="utf-8")))
    for file in sorted(DOCS.rglob("*.md"))
}
OTHER_PAGES = [*ROOT.glob("README*.md"), *sorted(ROOT.glob("examples/*/README.md"))]
# of the repository's folder; the package is on PYTHONPATH, and a link to it would hide that
LEFT_OUT = (".git", "runs", "models", "site", "data", "megarl", "tests", "scripts")
SECONDS = {"run": 120, "gpu": 120, "long": 5400}
MEGARL = """#!/bin/sh
if [ "$1" = train ] && [ -n "$DRY_RUN" ]; then set -- "$@" --dry-run; fi
exec {python} -m megarl.cli "$@"
"""


def pages_with(*kinds: str) -> list[str]:
    return [page for page, found in PAGES.items() if {block.kind for block in found} & {*kinds}]


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    """A hub with the models that pages name: their tokenizers are tiny, and they have no weights."""
    tiny = create_model(Create(), tmp_path_factory.mktemp("tokenizer"))
    names = ("tokenizer.json", "tokenizer_config.json")
    tokenizer = {name: (tiny / name).read_bytes() for name in names}
    config = (ROOT / "configs/models/qwen3_8b/config.json").read_bytes()
    with serve_hub({"Qwen/Qwen3-8B": Repo(tokenizer | {"config.json": config})}, {}) as hub:
        yield hub


def make_folder(folder: Path) -> None:
    """Makes the folder of a page: the repository's files, and `megarl` and `python` on the path."""
    for each in ROOT.iterdir():
        if each.name not in LEFT_OUT:
            (folder / each.name).symlink_to(each)
    (folder / "scripts").mkdir()
    for each in (ROOT / "scripts").iterdir():
        (folder / "scripts" / each.name).symlink_to(each)
    # the environment is the one that runs this test; a page must not install into it
    (folder / "scripts/install.sh").unlink()
    (folder / "scripts/install.sh").write_text("#!/bin/sh\n")
    (folder / "scripts/install.sh").chmod(0o755)
    programs = folder / "bin"
    programs.mkdir()
    for name, text in (("megarl", MEGARL), ("python", '#!/bin/sh\nexec {python} "$@"\n')):
        (programs / name).write_text(text.format(python=shlex.quote(sys.executable)))
        (programs / name).chmod(0o755)


def run_page(found: list[Block], folder: Path, kinds: tuple[str, ...], env: dict[str, str]) -> None:
    """Runs the blocks of these kinds in order, and saves and loads what others name."""
    make_folder(folder)
    env = env | {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": f"{ROOT}:{folder}"}
    printed = None
    for block in found:
        if block.kind == "output":
            if printed is not None:
                assert matches(printed, block.text), f"line {block.line}: it prints\n{printed}"
            continue
        printed = None
        if "file" in block.attributes:
            file = folder / block.attributes["file"]
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block.text, encoding="utf-8")
        if block.kind == "run" and block.language == "yaml":
            load(block, folder)
        elif block.kind == "run" and block.language == "python":
            compile(block.text, block.attributes.get("file", "page"), "exec")
        elif block.kind in kinds and block.language in SHELL:
            printed = run(block, folder, env)


def load(block: Block, folder: Path) -> None:
    file = folder / block.attributes.get("file", "page.yaml")
    file.write_text(block.text, encoding="utf-8")
    try:
        load_config(file)
    except ValueError as error:
        raise AssertionError(f"line {block.line}: {error}") from None


def run(block: Block, folder: Path, env: dict[str, str]) -> str:
    """Runs a block of shell; returns what it prints, with stderr only where it must fail."""
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.text],
        cwd=folder,
        env=env | ({"DRY_RUN": "1"} if block.kind == "gpu" else {}),
        capture_output=True,
        text=True,
        timeout=SECONDS[block.kind],
    )
    code = int(block.attributes.get("exit", 0))
    assert done.returncode == code, (
        f"line {block.line}: exit {done.returncode}\n{done.stderr[-3000:]}"
    )
    return done.stdout + (done.stderr if code else "")


def matches(printed: str, expected: str) -> bool:
    """Returns True if the lines are equal up to spaces at their ends; an expected `...` is any lines."""
    lines = [re.escape(line.rstrip()) for line in expected.strip().splitlines()]
    pattern = "\n".join("(?:.*\n)*.*" if line == re.escape("...") else line for line in lines)
    return bool(re.fullmatch(pattern, "\n".join(map(str.rstrip, printed.strip().splitlines()))))


@pytest.mark.parametrize("page", pages_with("run", "gpu"))
def test_the_blocks_of_a_page_run(page: str, tmp_path: Path, hub: Hub) -> None:
    folder = tmp_path / "page"
    folder.mkdir()
    run_page(PAGES[page], folder, ("run", "gpu"), hub.env(tmp_path))


@pytest.mark.long
@pytest.mark.exhaustive
@pytest.mark.timeout(6 * 3600)
@pytest.mark.parametrize("page", pages_with("long"))
def test_the_long_blocks_of_a_page_run(page: str, tmp_path: Path, hub: Hub) -> None:
    run_page(PAGES[page], tmp_path, ("run", "gpu", "long"), dict(os.environ))
    for file in tmp_path.glob("runs/*/metrics.jsonl"):
        for name in {key for line in file.open() for key in json.loads(line)}:
            known = any(pattern.fullmatch(name) for pattern in metric_patterns())
            assert known, f"{name} has no text in megarl/telemetry/metrics.yaml"


@pytest.mark.parametrize(
    ("page", "problem"),
    [
        ("```bash {.run}\nmegarl nope\n```", "exit 2"),
        ("```bash {.run}\necho 1\n```\n\n```text {.output}\n2\n```", r"it prints\s+1\b"),
        ("```bash {.run exit=2}\ntrue\n```", "exit 0"),
        ("```yaml {.run}\ntrain: {stepz: 1}\n```", "unknown key train.stepz"),
        ("```yaml {.run file=a.yaml}\nrun: {name: a}\n```\n```bash {.gpu}\nmegarl train a.yaml\n```", "no model is set"),
    ],
)  # fmt: skip
def test_a_block_that_is_wrong_fails(page: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=problem):
        run_page(list(blocks(page)), tmp_path, ("run", "gpu"), dict(os.environ))


def test_outputs_may_leave_lines_out() -> None:
    assert matches("a\nb\nc\nd\n", "a\n...\nd\n") and matches("a  \n", "a\n")
    assert not matches("a\nb\n", "a\n") and not matches("abc", "a.c")


@pytest.mark.parametrize("file", OTHER_PAGES, ids=lambda file: file.relative_to(ROOT).as_posix())
def test_the_configs_of_a_readme_load(file: Path, tmp_path: Path) -> None:
    for block in blocks(file.read_text(encoding="utf-8")):
        if block.language == "yaml":
            load(block, tmp_path)
