"""Figures of the package that the gates bound: python tests/house_report.py [ROOT] [--against OLD] [--files PACKAGE]

    size               files, lines, code lines (without docstrings, comments and blanks), `tokenize` tokens
    density            tokens a code line; walruses and conditional expressions per 1,000 code lines; assignments of
                       a tuple literal to several names; comprehensions inside comprehensions; lines over 100 columns
    docstrings         docstrings that begin with a preposition or "Whether"
    files per value    files of megarl/ whose code (names, attributes, arguments, keywords, whole strings) has one of
                       the value's identifiers; a value that many files name is expensive to change

ROOT and OLD are repository roots, for example a checkout of an earlier commit. The exit code is 1 above a target.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
FSTRING_START = getattr(tokenize, "FSTRING_START", None)  # Python 3.12 and newer cut f-strings up
FSTRING_END = getattr(tokenize, "FSTRING_END", None)
MAX_LINE = 100
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
FIRST_WORD = re.compile(
    r"\s*(Of|In|With|For|By|To|On|Without|Beside|From|As|At|Between|Within|After|Before|Under"
    r"|Whether|Beyond|Among|Until|Instead)\b"
)
COLUMNS = (
    "files",
    "lines",
    "code",
    "tokens",
    "walrus",
    "ternary",
    "tuple=",
    "nested",
    ">100",
    "docs",
)


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
        # what the engine returned, and what the trainer compares it with
        r"(rollout|old)_logprobs(_[A-Z]+)?|LogProbs",
        r"bench/.*|parity/.*|(stages/)?sft\.py",
        9,
    ),
    Value(
        "a weight shard, from trainer to engine",
        # where it lies in a rank's memory, what moves, what travels together
        r"ShardSlice|Transfer|Message|Box|Piece",
        # conversion on disk is another way; a Message of a conversation is a text
        r"bench/.*|checkpoint/.*|(launch/convert|commands/conversion)\.py"
        r"|data/conversations\.py",
        12,
    ),
    Value("algorithm.clip_high", r"clip_high", r"", 2),
    # other files know choices that are recorded in one forward pass and followed in another
    Value("router replay", r"(?i).*(replay|routes).*", r"", 16),
    # others ask for bits, block formats or storage
    Value("FP8 and other encoded formats", r"(?i).*(fp8|encoded|quanti[sz]).*", r"", 26),
)


def tokens_of(text: str) -> list[tokenize.TokenInfo]:
    """Tokens without layout and comments; an f-string is one token on every Python."""
    tokens: list[tokenize.TokenInfo] = []
    opened: list[tokenize.TokenInfo] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == FSTRING_START:
            opened.append(token)
        elif token.type == FSTRING_END:
            start = opened.pop()
            if not opened:
                whole = tokenize.TokenInfo(
                    tokenize.STRING, "f-string", start.start, token.end, start.line
                )
                tokens.append(whole)
        elif not opened and token.type not in LAYOUT:
            tokens.append(token)
    return tokens


def docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    """String constants that are a module's, class's or function's docstring, or follow an attribute."""
    for node in ast.walk(tree):
        body = node.body if isinstance(node, DOCUMENTED) else []
        for index, statement in enumerate(body):
            is_string = isinstance(statement, ast.Expr) and isinstance(
                statement.value, ast.Constant
            )
            if not is_string or not isinstance(statement.value.value, str):
                continue
            if index == 0 or isinstance(body[index - 1], ast.Assign | ast.AnnAssign):
                yield statement.value


def code_lines(text: str, tree: ast.Module) -> int:
    """Lines with code; those of docstrings, comments and blanks do not count."""
    starts = {(node.lineno, node.col_offset) for node in docstrings(tree)}
    lines: set[int] = set()
    for token in tokens_of(text):
        if token.start not in starts:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines)


def tuple_assignments(tree: ast.Module) -> list[ast.Assign]:
    """`a, b = x, y`, except swaps; a name for a tuple of constants is none."""
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
            continue
        values = {ast.unparse(value) for value in node.value.elts}
        for target in node.targets:
            if (
                isinstance(target, ast.Tuple)
                and {ast.unparse(name) for name in target.elts} != values
            ):
                found.append(node)
    return found


def nested_comprehensions(tree: ast.Module) -> list[ast.expr]:
    """Comprehensions inside comprehensions, and those with more than one `for`."""
    found: list[ast.expr] = []

    def visit(node: ast.AST, is_inside: bool) -> None:
        is_comprehension = isinstance(node, COMPREHENSIONS)
        if is_comprehension and (is_inside or len(node.generators) > 1):
            found.append(node)
        for child in ast.iter_child_nodes(node):
            visit(child, is_inside or is_comprehension)

    visit(tree, False)
    return found


def prepositions(tree: ast.Module) -> list[ast.Constant]:
    """Docstrings, those of attributes too, that begin with a preposition or "Whether"."""
    return [node for node in docstrings(tree) if FIRST_WORD.match(str(node.value))]


def sources(root: Path) -> Iterator[tuple[str, Path]]:
    """(path relative to the package, file) of every module."""
    for file in sorted((root / "megarl").rglob("*.py")):
        yield file.relative_to(root / "megarl").as_posix(), file


def figures(text: str) -> Counter[str]:
    """COLUMNS of one module, by name."""
    tree = ast.parse(text)
    nodes = list(ast.walk(tree))
    lines = text.splitlines()
    return Counter(
        {
            "files": 1,
            "lines": len(lines),
            "code": code_lines(text, tree),
            "tokens": len(tokens_of(text)),
            "walrus": sum(isinstance(node, ast.NamedExpr) for node in nodes),
            "ternary": sum(isinstance(node, ast.IfExp) for node in nodes),
            "tuple=": len(tuple_assignments(tree)),
            "nested": len(nested_comprehensions(tree)),
            ">100": sum(len(line) > MAX_LINE for line in lines),
            "docs": len(prepositions(tree)),
        }
    )


def sizes(root: Path, inside: str | None = None) -> dict[str, Counter[str]]:
    """{package: figures}; modules of the root are one package, `.`. `inside` a package: {file: figures}."""
    totals: dict[str, Counter[str]] = {}
    for path, file in sources(root):
        package = path.partition("/")[0] if "/" in path else "."
        key = package if inside is None else path
        if inside in (None, package):
            totals.setdefault(key, Counter()).update(figures(file.read_text(encoding="utf-8")))
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
    pattern = re.compile(value.identifiers)
    elsewhere = re.compile(value.elsewhere)
    return [
        path
        for path, file in sources(root)
        if not elsewhere.fullmatch(path)
        and any(map(pattern.fullmatch, identifiers(ast.parse(file.read_text(encoding="utf-8")))))
    ]


def row(name: str, now: Counter[str]) -> str:
    """One line of the table: sums, and the ratios that the gates bound."""
    code = max(now["code"], 1)
    cells = "".join(f"{now[column]:>9,}" for column in COLUMNS)
    ratios = f"{now['tokens'] / code:9.2f}"
    ratios += f"{1000 * now['walrus'] / code:9.1f}{1000 * now['ternary'] / code:9.1f}"
    return f"{name:<36}{cells}{ratios}"


def print_sizes(root: Path, inside: str | None) -> None:
    table = sizes(root, inside)
    table["total"] = sum(table.values(), Counter())
    ratios = ("tok/line", "walrus/k", "ternary/k")
    print(f"{'':<36}" + "".join(f"{name:>9}" for name in (*COLUMNS, *ratios)))
    for name in sorted(table, key=lambda name: (name == "total", name)):
        print(row(name, table[name]))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("root", type=Path, nargs="?", default=Path(__file__).resolve().parents[1])
    parser.add_argument("--against", type=Path, metavar="OLD", help="another checkout, shown first")
    parser.add_argument("--files", metavar="PACKAGE", help="the files of one package")
    args = parser.parse_args()
    if args.against:
        print_sizes(args.against, args.files)
    print_sizes(args.root, args.files)
    is_over = False
    for value in VALUES if args.files is None else ():
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
