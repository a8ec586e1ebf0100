"""Checks what pages name: python -m scripts.docs.check

    pages --names in code and blocks--> keys, metrics, exit codes, options, paths, modules --> problems, one per line

Links and anchors between pages are checked by `mkdocs build --strict`, those of README and examples here.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path

from megarl.config.reference import keys
from scripts.docs.blocks import Block, blocks
from scripts.docs.generated import ROOT, commands, exit_code_texts, metric_texts

SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
DOTTED = re.compile(r"[a-z_]+(\.\d+)?(\.[a-z_]+(\.\d+)?)+")
METRIC = re.compile(r"[a-z_]+(/[A-Za-z@_{}, <>]+)+")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]+")
LINK = re.compile(r"\]\((?!https?://|#|mailto:)([^)#\s]+)(#[^)\s]*)?\)")
ENDINGS = [
    "py",
    "sh",
    "yaml",
    "yml",
    "json",
    "jsonl",
    "md",
    "txt",
    "png",
    "html",
    "toml",
    "cfg",
    "sbatch",
    "safetensors",
    "ci",
    "lock",
    "pdf",
]
FOLDERS = [
    "megarl",
    "docs",
    "configs",
    "examples",
    "scripts",
    "tests",
    "benchmarks",
    "docker",
    ".ci",
    ".github",
]
SHELL = ("bash", "sh", "shell", "console")
FILES = [
    *sorted(ROOT.glob("docs/**/*.md")),
    *sorted(ROOT.glob("*.md")),
    *sorted(ROOT.glob("examples/**/*.md")),
]
HISTORY = ("CHANGELOG.md",)  # names what existed
FOREIGN = re.compile(r"<!-- names of [^:]+: (.*?) -->", re.DOTALL)  # names that are not megarl's
PROJECTS = (
    "verl",
    "slime",
    "OpenRLHF",
    "TRL",
    "NeMo",
)  # a table with one as a header: only `megarl` is checked


@cache
def known_keys() -> dict[str, str]:
    """Returns {key of the config: its type}."""
    return {key.name: key.kind for key in keys()}


@cache
def metric_patterns() -> tuple[re.Pattern[str], ...]:
    """Returns a pattern per metric: words in capitals stand for any name."""
    names = [name for texts in metric_texts().values() for name in texts]
    return tuple(re.compile(re.sub("[A-Z]{4,}", "[^ ]+", re.escape(name))) for name in names)


@cache
def options() -> frozenset[str]:
    """Returns every option of a command, of a script and of a program of benchmarks and tests."""
    names = {name for parser in commands().values() for name in parser._option_string_actions}
    for pattern in ("scripts/**/*", "benchmarks/**/*", "tests/*", "tests/contract/*"):
        for file in ROOT.glob(pattern):
            if file.suffix in (".sh", ".py", ".sbatch"):
                names.update(OPTION.findall(file.read_text(encoding="utf-8")))
    return frozenset(names)


def problems(page: str, folder: Path = ROOT) -> Iterator[str]:
    """Yields what is wrong with a page; relative links start at `folder`."""
    parsed = list(blocks(page))
    for block in parsed:
        if folder.is_relative_to(ROOT / "docs"):
            for problem in block.problems:
                yield f"line {block.line}: {problem}"
    text = _of_megarl(_without_blocks(page, parsed))
    foreign = " ".join(FOREIGN.findall(page)).split()
    for number, line in enumerate(text.splitlines(), 1):
        for span in SPAN.findall(line):
            if span.split("=")[0] in foreign:
                continue
            for problem in _of_span(span):
                yield f"line {number}: {problem}"
        for code in re.findall(r"\bexit code (\d+)", line):
            if int(code) not in exit_code_texts():
                yield f"line {number}: there is no exit code {code}"
        for target, anchor in LINK.findall(line):
            if not (folder / target).exists():
                yield f"line {number}: the link {target} leads nowhere"
            elif anchor and target.endswith(".md") and not _has_anchor(folder / target, anchor[1:]):
                yield f"line {number}: {target} has no heading {anchor}"
    for block in parsed:
        if block.language in SHELL:
            for problem in _of_shell(block):
                yield f"line {block.line}: {problem}"


def _without_blocks(page: str, parsed: list[Block]) -> str:
    """Returns the page with empty lines for its blocks."""
    lines = page.splitlines()
    for block in parsed:
        count = block.text.count("\n")
        lines[block.line - 1 : block.line + count + 1] = [""] * (count + 2)
    return "\n".join(lines)


def _of_megarl(text: str) -> str:
    """Returns the text with only the column `megarl` of tables that compare projects."""
    lines = []
    column = 0
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("|")] if line.startswith("|") else []
        if "megarl" in cells and not {*PROJECTS}.isdisjoint(cells):
            column = cells.index("megarl")
        elif not cells:
            column = 0
        lines.append(cells[column] if column and len(cells) > column else line)
    return "\n".join(lines)


def _of_span(span: str) -> Iterator[str]:
    """Yields problems of what stands between backticks."""
    span = span.strip()
    word = span.partition("=")[0].partition(":")[0].strip()
    if span.startswith("megarl "):
        yield from _of_command(span)
    elif OPTION.fullmatch(word.partition(" ")[0]):
        if word.partition(" ")[0] not in options():
            yield f"there is no option {word.partition(' ')[0]}"
    elif re.fullmatch(r"megarl(\.\w+)+(:\w+)?", span):
        if not _is_module(span.replace(":", ".")):
            yield f"there is no module or name {span}"
    elif span.split("/")[0] in FOLDERS and "/" in span:
        yield from _of_path(span)
    elif DOTTED.fullmatch(word) and word.rpartition(".")[2] not in ENDINGS:
        yield from _of_key(word)
    elif METRIC.fullmatch(span):
        yield from _of_metric(span)


def _of_path(path: str) -> Iterator[str]:
    path = path.split()[0].split(":")[0].rstrip("/")
    if re.search(r"[<>{}$A-Z]{2,}|\.\.\.|[<{$]", path):
        return  # a placeholder
    if not any(ROOT.glob(path)):
        yield f"there is no path {path}"


def _of_key(word: str) -> Iterator[str]:
    """Yields a problem if a dotted name begins with a section and is no key of it."""
    name = re.sub(r"\.\d+\b", "", word)
    section = name.partition(".")[0]
    if known_keys().get(section) != "section" or name in known_keys():
        return
    parent = name.rpartition(".")[0]
    while parent:
        if "mapping" in known_keys().get(parent, ""):
            return  # an option
        parent = parent.rpartition(".")[0]
    yield f"there is no key {word}"


def _of_metric(span: str) -> Iterator[str]:
    """Yields a problem if a name looks like a metric and is none."""
    topics = {
        pattern.pattern.partition("/")[0] for pattern in metric_patterns() if "/" in pattern.pattern
    }
    if span.partition("/")[0] not in topics:
        return
    for name in _expanded(re.sub(r"<(\w+)>", r"\1", span)):
        if not any(pattern.fullmatch(name) for pattern in metric_patterns()):
            yield f"there is no metric {name}"


def _expanded(text: str) -> list[str]:
    """Returns the names that braces stand for: a/{b, c} -> a/b, a/c."""
    parts = re.split(r"\{([^}]*)\}", text)
    choices = [re.split(r",\s*", part) if index % 2 else [part] for index, part in enumerate(parts)]
    return ["".join(names) for names in product(*choices)]


def _of_shell(block: Block) -> Iterator[str]:
    """Yields problems of the commands in a block of shell."""
    for line in block.text.replace("\\\n", " ").splitlines():
        code = re.sub(r"(^|\s)#.*", "", line.removeprefix("$ "))
        for part in re.split(r"&&|\|\||;|\||>", code):
            command = re.match(r"\s*(?:\w+=\S+\s+)*(?:\S*/)?megarl (.*)", part)
            if command:
                yield from _of_command(f"megarl {command[1]}")
            for path in re.findall(
                r"(?:^|[\s=])((?:scripts|configs|examples|docker|\.ci)/[\w./-]+)", part
            ):
                yield from _of_path(path)


def _of_command(text: str) -> Iterator[str]:
    """Yields problems of a call of megarl: command, options, keys of overrides."""
    try:
        words = shlex.split(text, comments=True)[1:]
    except ValueError:
        words = text.split()[1:]
    if not words or words[0].startswith(("-", "[", "<")) or words[0].isupper():
        return
    parser = commands().get(words[0])
    if parser is None:
        yield f"there is no command megarl {words[0]}"
        return
    for word in words[1:]:
        name = word.strip("[]").partition("=")[0]
        if name.startswith("--"):
            if name not in parser._option_string_actions:
                yield f"megarl {words[0]} has no option {name}"
        elif "=" in word and DOTTED.fullmatch(name):
            if name.partition(".")[0] not in known_keys():
                yield f"there is no key {name}"
            yield from _of_key(name)


def _is_module(name: str) -> bool:
    """Returns True if a dotted name is a module of megarl, or a name that one defines."""
    path = ROOT / name.replace(".", "/")
    if path.is_dir() or path.with_suffix(".py").is_file():
        return True
    parent, _, last = name.rpartition(".")
    folder = ROOT / parent.replace(".", "/")
    for file in (folder.with_suffix(".py"), folder / "__init__.py"):
        if file.is_file() and re.search(rf"\b{last}\b", file.read_text(encoding="utf-8")):
            return True
    return False


def _has_anchor(page: Path, anchor: str) -> bool:
    text = page.read_text(encoding="utf-8")
    headings = re.findall(r"^#+ +(.*)", text, re.MULTILINE)
    ids = {
        re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())
        for heading in headings
    }
    return anchor in ids or f"#{anchor}" in text or "<!-- generated" in text


def main() -> int:
    """Prints the problems of every page; returns the exit code."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    count = 0
    for file in FILES:
        if file.name in HISTORY:
            continue
        for problem in problems(file.read_text(encoding="utf-8"), file.parent):
            print(f"{file.relative_to(ROOT)}: {problem}")
            count += 1
    print(f"{len(FILES)} pages: {count} problems")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
