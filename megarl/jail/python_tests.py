"""Reads tests that are Python: assertions (MBPP), check(candidate) (HumanEval), functions test_..., unittest classes.

    texts --flatten check and test_--> prologue (uses nothing of the solution), tests (an assertion each, at the best)
          --names that the tests use and do not define--> proxies of the solution in the tests' jail

Tests are refused if only the solution's process could reach their verdict: both sides of a comparison come from it, or
they need its classes as types, or functions of it other than the named one.
"""

from __future__ import annotations

import ast
import builtins
import collections
import symtable
import sys
import threading
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

IMPORTS = {
    "np": "import numpy as np",
    "Decimal": "from decimal import Decimal",
    "Fraction": "from fractions import Fraction",
} | {
    name: f"from {module.__name__} import {name}"
    for module in (typing, collections)
    for name in module.__all__
    if name[0].isupper() or module is collections
}  # names that tests use without an import
DEFINITIONS = (ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
ONE_PARSER = (
    threading.Lock()
)  # ast.parse in two threads at once raises SystemError (CPython issue 106905)
RAISES = ("raises", "assertRaises", "assertRaisesRegex")


class Unjudgeable(ValueError):
    """The solution would decide its own verdict."""


@dataclass(frozen=True, slots=True)
class Script:
    """`tests` are executed in order in one namespace, after `prologue`, in which `names` are the solution's."""

    prologue: str
    tests: tuple[str, ...]
    names: tuple[str, ...]
    errors: tuple[str, ...]  # classes of exceptions that the solution should define


@lru_cache(maxsize=64)  # the samples of a prompt share their tests
def read_script(texts: tuple[str, ...], entry: str | None = None) -> Script:
    """Raises ValueError if the tests cannot be read, and Unjudgeable; `entry` is the function under test."""
    try:
        with ONE_PARSER:
            body = [
                statement for text in texts for statement in _flatten(ast.parse(text).body, entry)
            ]
            module = ast.Module(body, [])
            names, errors, imports = _solution_names(module, entry)
            _check_judgeable(module, names, errors, entry)
            _mark_in_place(module, names)
            ast.fix_missing_locations(module)
            return _split(module.body, imports, names, errors)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"{type(error).__name__}: {error}, in {texts[0][:60]!r}") from None


def _flatten(body: Sequence[ast.stmt], entry: str | None) -> Iterator[ast.stmt]:
    """Replaces check(candidate) and test_...() with their bodies, or a call if they cannot be."""
    definitions = [item for item in body if isinstance(item, ast.FunctionDef)]
    functions = {
        item.name: item
        for item in definitions
        if item.name == "check" or item.name.startswith("test_")
    }
    inlined = {
        name
        for name, item in functions.items()
        if not item.decorator_list
        and len(item.args.args) == (name == "check")
        and not any(
            isinstance(node, ast.Return | ast.Global | ast.Nonlocal | ast.Yield)
            for node in ast.walk(item)
        )
    }
    for item in body:
        called = (
            item.value if isinstance(item, ast.Expr) and isinstance(item.value, ast.Call) else None
        )
        name = ast.unparse(called.func) if called else ""
        if isinstance(item, ast.ImportFrom) and item.module == "solution":
            yield from ast.parse(
                "\n".join(f"{n.asname} = {n.name}" for n in item.names if n.asname)
            ).body
        elif name in ("unittest.main", "pytest.main", *functions) or ast.unparse(item).startswith(
            "if __name__ =="
        ):
            continue
        elif isinstance(item, ast.FunctionDef) and item.name in inlined:
            for argument in item.args.args:
                yield from ast.parse(f"{argument.arg} = {_function(body, item, entry)}").body
            yield from item.body
        else:
            yield item
            if isinstance(item, ast.FunctionDef) and item.name in functions:
                argument = _function(body, item, entry) if item.name == "check" else item.name
                yield from ast.parse(
                    f"{'check' if item.name == 'check' else '_call_test'}({argument})"
                ).body
            if isinstance(item, ast.ClassDef) and any(
                "TestCase" in ast.unparse(base) for base in item.bases
            ):
                methods = [node.name for node in item.body if isinstance(node, ast.FunctionDef)]
                for method in (name for name in methods if name.startswith("test")):
                    suite = f"__import__('unittest').TestSuite([{item.name}({method!r})])"
                    yield from ast.parse(f"{suite}.debug()").body


def _function(body: Sequence[ast.stmt], check: ast.FunctionDef, entry: str | None) -> str:
    """The function under test: `entry`, or the argument of a call to `check`."""
    for item in body:
        call = item.value if isinstance(item, ast.Expr) else None
        if isinstance(call, ast.Call) and call.args and ast.unparse(call.func) == check.name:
            return ast.unparse(call.args[0])
    if entry is None:
        raise ValueError(
            f"{check.name}({ast.unparse(check.args)}) needs fn_name, the function to check"
        )
    return entry


def _solution_names(module: ast.Module, entry: str | None) -> tuple[set[str], set[str], list[str]]:
    """Names that the tests use and do not define: of the solution, of its exceptions; and missing imports."""
    free = _free_names(module)
    owners = [node.value for node in ast.walk(module) if isinstance(node, ast.Attribute)]
    modules = {owner.id for owner in owners if isinstance(owner, ast.Name)}
    entries = _names(ast.parse(entry)) & free if entry else set[str]()
    imports = [f"import {name}" for name in free & modules & sys.stdlib_module_names]
    imports += [IMPORTS[name] for name in free & IMPORTS.keys() - entries]
    known = sys.stdlib_module_names & modules | IMPORTS.keys() - entries
    names = free - known - (set(dir(builtins)) - entries)
    errors = set()
    for node in ast.walk(module):
        expected = node.type if isinstance(node, ast.ExceptHandler) else None
        if isinstance(node, ast.Call) and node.args and _called(node) in RAISES:
            expected = node.args[0]
        errors |= _names(expected) & names if expected else set()
    return (names - errors) or _shadowed(module, free), errors, imports


def _free_names(module: ast.Module) -> set[str]:
    table = symtable.symtable(ast.unparse(module), "tests", "exec")
    defined = {
        symbol.get_name()
        for symbol in table.get_symbols()
        if symbol.is_assigned() or symbol.is_imported()
    }
    used, scopes = set(), [table]
    while scopes:
        scope = scopes.pop()
        scopes += scope.get_children()
        used |= {
            symbol.get_name()
            for symbol in scope.get_symbols()
            if symbol.is_referenced() and (scope is table or symbol.is_global())
        }
    return used - defined - {"_call_test"}


def _shadowed(module: ast.Module, free: set[str]) -> set[str]:
    """A function under test that has the name of a builtin one: the only one that all assertions call."""
    called = [
        {
            node.func.id
            for node in ast.walk(item)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        for item in module.body
        if isinstance(item, ast.Assert)
    ]
    names = set.intersection(*called) & free if called else set()
    if len(names) > 1:
        raise ValueError(f"is {' or '.join(sorted(names))} the function under test? set fn_name")
    return names


def _called(node: ast.AST) -> str:
    """The name of a called function or method; empty if the node is no call."""
    return ast.unparse(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""


def _names(node: ast.AST) -> set[str]:
    return {item.id for item in ast.walk(node) if isinstance(item, ast.Name)}


def _check_judgeable(
    module: ast.Module, names: set[str], errors: set[str], entry: str | None
) -> None:
    if entry and (others := names - _names(ast.parse(entry)) - {"Solution"}):
        raise Unjudgeable(
            f"they use {', '.join(sorted(others))}, which neither they nor {entry} define; add it"
        )
    names = (
        names | {"candidate"} if any("candidate" in _names(item) for item in module.body) else names
    )
    for node in ast.walk(module):
        sides: list[ast.expr] = []
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
        elif isinstance(node, ast.Call):
            called = _called(node)
            if called.startswith("assert") and called not in RAISES:
                sides = node.args[:2] if len(node.args) > 1 else []
            if (
                called in ("isinstance", "issubclass")
                and len(node.args) == 2
                and _names(node.args[1]) & names
            ):
                raise Unjudgeable(f"{ast.unparse(node)[:80]} needs a class of the solution")
            if _names(node.func) & names and any(
                isinstance(argument, ast.Lambda) for argument in node.args
            ):
                raise Unjudgeable(f"{ast.unparse(node)[:80]} passes a function to the solution")
        if sides and all(_names(side) & names for side in sides):
            raise Unjudgeable(f"{ast.unparse(node)[:80]}: both sides are the solution's")


def _mark_in_place(module: ast.Module, names: set[str]) -> None:
    """Marks calls whose result is not used, as of a function that sorts its argument."""
    for node in ast.walk(module):
        call = node.value if isinstance(node, ast.Expr) else None
        if not isinstance(call, ast.Call) or not _names(call.func) & {*names, "candidate"}:
            continue
        if isinstance(call.func, ast.Name) or ast.unparse(call.func).startswith("Solution()."):
            call.keywords.append(ast.keyword("_in_place", ast.Constant(True)))


def _asserts(statement: ast.stmt) -> bool:
    """An assertion, or a loop or block with one, or one that expects an error; but not its definition."""
    if isinstance(statement, (*DEFINITIONS, ast.Expr)):
        return False
    nodes = list(ast.walk(statement))
    is_raises = isinstance(statement, ast.With) and any(_called(node) in RAISES for node in nodes)
    return is_raises or any(isinstance(node, ast.Assert) for node in nodes)


def _split(
    body: Sequence[ast.stmt], imports: Sequence[str], names: set[str], errors: set[str]
) -> Script:
    """A test asserts, or calls a test function, with the statements before it; those left are the last."""
    prologue, tests, setup = list(imports), [], []
    for statement in body:
        text = ast.unparse(statement)
        is_test = _asserts(statement) or text.startswith(("_call_test(", "__import__('unittest')."))
        if not (tests or setup or is_test or _names(statement) & (names | errors)):
            prologue.append(text)
            continue
        setup.append(text)
        if is_test:
            tests.append("\n".join(setup))
            setup = []
    if any(not isinstance(item, DEFINITIONS) for item in ast.parse("\n".join(setup)).body):
        tests.append("\n".join(setup))
    if not tests:
        raise ValueError("there are no tests")
    return Script("\n".join(prologue), tuple(tests), tuple(sorted(names)), tuple(sorted(errors)))
