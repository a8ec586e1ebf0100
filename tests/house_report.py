"""Sizes of the package, and how many files name a value: python tests/house_report.py [ROOT] [--against OLD]

    lines and tokens   physical lines and `tokenize` tokens (without comments and layout) of each package
    files per value    files of megarl/ whose code (names, attributes, arguments, keywords, whole strings) has one of
                       the value's identifiers; a value that many files name is expensive to change

ROOT and OLD are repository roots, for example a checkout of an earlier commit. The exit code is 1 above a target.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

LAYOUT = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
    tokenize.ENDMARKER,
}  # fmt: skip


@dataclass(frozen=True)
class Value:
    name: str
    identifiers: str  # a regular expression that an identifier matches as a whole
    elsewhere: str  # files that are not on its way
    most: int  # files that may name it


# The alternatives after "|" of an identifier are its names before the packages were rebuilt.
VALUES = (
    Value(
        "a sampled log-prob, from engine to loss",
        r"(rollout|old)_logprobs(_[A-Z]+)?|LogProbs",  # what the engine returned, and what the trainer compares it with
        r"bench/.*|(stages/)?sft\.py",
        8,
    ),
    Value(
        "a weight shard, from trainer to engine",
        r"ShardSlice|Transfer|Message|Box|Piece",  # where it lies in a rank's memory, what moves, what travels together
        r"bench/.*|checkpoint/(?!hf\.py).*|launch/convert\.py",  # conversion on disk is another way
        10,
    ),
    Value("algorithm.clip_high", r"clip_high", r"", 5),
)


def sources(root: Path) -> Iterator[tuple[str, Path]]:
    """(path relative to the package, file) of every module."""
    for file in sorted((root / "megarl").rglob("*.py")):
        yield file.relative_to(root / "megarl").as_posix(), file


def sizes(root: Path) -> dict[str, Counter[str]]:
    """{package: lines, tokens, files}; modules of the root are one package, `.`"""
    totals: dict[str, Counter[str]] = {}
    for path, file in sources(root):
        package = path.partition("/")[0] if "/" in path else "."
        with file.open("rb") as source:
            tokens = sum(token.type not in LAYOUT for token in tokenize.tokenize(source.readline))
        lines = len(file.read_text(encoding="utf-8").splitlines())
        totals.setdefault(package, Counter()).update(lines=lines, tokens=tokens, files=1)
    return totals


def identifiers(tree: ast.Module) -> Iterator[str]:
    """Identifiers that the code of a module uses or defines, and strings that are one identifier (keys of a dict)."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                yield name
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.alias(name=name):
                yield name.rpartition(".")[2]
            case ast.keyword(arg=str(name)) | ast.Constant(value=str(name)) if name.isidentifier():
                yield name


def files_that_name(value: Value, root: Path) -> list[str]:
    pattern, elsewhere = re.compile(value.identifiers), re.compile(value.elsewhere)
    return [
        path
        for path, file in sources(root)
        if not elsewhere.fullmatch(path)
        and any(
            pattern.fullmatch(name)
            for name in identifiers(ast.parse(file.read_text(encoding="utf-8")))
        )
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("root", type=Path, nargs="?", default=Path(__file__).resolve().parents[1])
    parser.add_argument(
        "--against",
        type=Path,
        metavar="OLD",
        help="another checkout, whose figures stand in brackets",
    )
    args = parser.parse_args()
    new, old = sizes(args.root), sizes(args.against) if args.against else {}
    new["total"], old["total"] = sum(new.values(), Counter()), sum(old.values(), Counter())
    for package in sorted(new.keys() | old.keys(), key=lambda name: (name == "total", name)):
        now, before = new.get(package, Counter()), old.get(package, Counter())
        columns = (
            f"{now[kind]:>8,} ({before[kind]:,}) {kind}" for kind in ("lines", "tokens", "files")
        )
        print(f"{package:<12}" + "".join(f"{column:<26}" for column in columns))
    is_over = False
    for value in VALUES:
        files = files_that_name(value, args.root)
        before = (
            f", {len(files_that_name(value, args.against))} in the other" if args.against else ""
        )
        is_over |= len(files) > value.most
        print(
            f"\n{value.name}: {len(files)} files, at most {value.most}{before}\n  {' '.join(files)}"
        )
    return int(is_over)


if __name__ == "__main__":
    sys.exit(main())
