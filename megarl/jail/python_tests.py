"""Reads tests in Python: assertions (MBPP), check(candidate) (HumanEval), test_..., unittest.

    texts --flatten check and test_--> prologue (does not use the solution), tests (one assertion
                                       each, where they can be split that far)
          --names that the tests use and do not define--> proxies of the solution in the tests' jail

Tests are refused if the solution could decide their verdict (influence.py), or if they need
functions of the solution other than the named one.
"""

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

from megarl.jail.influence import (
    RAISES,
    Influence,
    Names,
    UnreadableTests,
    called,
    check,
    expects_error,
    is_asserting,
    nodes,
)

# imports for names that tests often use without importing them
IMPORTS = {
    "np": "import numpy as np",
    "Decimal": "from decimal import Decimal",
    "Fraction": "from fractions import Fraction",
}
IMPORTS |= {name: f"from typing import {name}" for name in typing.__all__ if name[0].isupper()}
IMPORTS |= {name: f"from collections import {name}" for name in collections.__all__}
# prefixes of NumPy's assertions, which would broadcast an empty result to any shape
NUMPY_ASSERTIONS = ("assert_a", "assert_equal")
HOOKS = ("setUp", "tearDown", "__")
DEFINITIONS = (ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
# ast.parse in two threads at once raises SystemError (CPython issue 106905)
ONE_PARSER = threading.Lock()


@dataclass(frozen=True)
class Script:
    """Tests to execute in order after `prologue`, in one namespace with the solution's `names`."""

    prologue: str
    tests: tuple[str, ...]
    names: tuple[str, ...]
    errors: tuple[str, ...]  # exception classes that the solution should define


@lru_cache(maxsize=64)  # the samples of a prompt share their tests
def read_script(texts: tuple[str, ...], entry: str | None = None) -> Script:
    """Returns the tests of the function `entry` as a script.

    Raises ValueError if the tests cannot be read, and UnreadableTests if they are refused.
    """
    try:
        with ONE_PARSER:
            body = []
            for text in texts:
                body += _flatten(_parse(text), entry)
            module = ast.Module(body, [])
            names, errors, imports = _solution_names(module, entry)
            _mark_in_place(module, names)
            module.body[:0] = _parse("\n".join(imports))
            influence = check(module, names)
            _check_assertions(module)
            return _split(module.body, influence, errors)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"{type(error).__name__}: {error}, in {texts[0][:60]!r}") from None


def _parse(text: str) -> list[ast.stmt]:
    return ast.parse(text).body


def _flatten(body: Sequence[ast.stmt], entry: str | None) -> Iterator[ast.stmt]:
    """Yields statements with check(candidate) and test_...() replaced by their bodies, or followed
    by a call if they cannot be inlined.
    """
    functions = {
        item.name
        for item in body
        if isinstance(item, ast.FunctionDef)
        and (item.name == "check" or item.name.startswith("test_"))
    }
    cases = {"TestCase"}
    runners = ("unittest.main(", "pytest.main(", *map("{}(".format, functions))
    runners += ("sys.exit(unittest.", "sys.exit(pytest.")
    statements = []
    for item in body:
        is_guard = ast.unparse(item).startswith("if __name__ ==")
        statements += getattr(item, "body", []) if is_guard else [item]
    statements = [item for item in statements if not ast.unparse(item).startswith(runners)]
    num_users = collections.Counter()  # name -> number of statements that mention it
    for item in statements:
        num_users.update(_names(item))
    for item in statements:
        if isinstance(item, ast.ImportFrom) and item.module == "solution":
            for alias in item.names:
                if alias.asname:
                    yield from _parse(f"{alias.asname} = {alias.name}")
        elif isinstance(item, ast.FunctionDef) and item.name in functions:
            caller = "_call_test"
            argument = item.name
            if item.name == "check":
                caller = "check"
                argument = _function(body, item, entry)
            is_called = num_users[item.name] > (item.name in _names(item))
            if not is_called and _can_be_inlined(item):
                for parameter in item.args.args:
                    yield from _parse(f"{parameter.arg} = {argument}")
                yield from item.body
            else:
                yield item
                yield from _parse(f"{caller}({argument})")
        elif isinstance(item, ast.ClassDef):
            yield item
            bases = {ast.unparse(base).rpartition(".")[2] for base in item.bases}
            if bases & cases:
                cases.add(item.name)
            for method in item.body:
                if not isinstance(method, ast.FunctionDef) or not method.name.startswith("test"):
                    continue
                if item.name in cases:
                    yield from _parse(
                        f"__import__('unittest').TestSuite([{item.name}({method.name!r})]).debug()"
                    )
                elif item.name.startswith("Test"):
                    yield from _parse(f"_call_test({item.name}().{method.name})")
        else:
            yield item


def _can_be_inlined(function: ast.FunctionDef) -> bool:
    if function.decorator_list or len(function.args.args) != int(function.name == "check"):
        return False
    kinds = (ast.Return, ast.Global, ast.Nonlocal, ast.Yield)
    return not nodes(function, kinds)


def _function(body: Sequence[ast.stmt], check: ast.FunctionDef, entry: str | None) -> str:
    """Returns the function under test: `entry`, or the argument of a call to `check`."""
    for call in nodes(ast.Module([*body], []), ast.Call):
        if call.args and ast.unparse(call.func) == check.name:
            return ast.unparse(call.args[0])
    if entry is None:
        raise ValueError(
            f"{check.name}({ast.unparse(check.args)}) needs fn_name, the function to check"
        )
    return entry


def _solution_names(module: ast.Module, entry: str | None) -> tuple[Names, Names, list[str]]:
    """Returns the names of the solution, the names of its exceptions, and missing imports.

    These are the names that the tests use and do not define. Raises ValueError if no function is
    tested, and UnreadableTests if the tests need other functions or exceptions of modules.
    """
    free = _free_names(module)
    owners = {ast.unparse(node.value) for node in nodes(module, ast.Attribute)}
    modules = owners & sys.stdlib_module_names
    entries = _names(ast.parse(entry or "")) & free
    importable = IMPORTS.keys() - entries
    imports = [f"import {name}" for name in free & modules]
    imports += [IMPORTS[name] for name in free & importable]
    names = free - modules - importable - (set(dir(builtins)) - entries)
    classes = [handler.type for handler in nodes(module, ast.ExceptHandler) if handler.type]
    for call in nodes(module, ast.Call):
        if called(call) in RAISES:
            classes += call.args[:1]
    expected = set().union(*map(_names, classes))
    if unknown := expected - names - set(dir(builtins)):
        raise UnreadableTests(f"{', '.join(sorted(unknown))}: exceptions of modules are not sent")
    errors = expected & names
    if names == errors:
        raise ValueError("which function do they test? set fn_name")
    if entry and (others := names - errors - entries - {"Solution"}):
        raise UnreadableTests(
            f"they use {', '.join(sorted(others))}, which neither they nor {entry} define; add it"
        )
    return names - errors, errors, imports


def _free_names(module: ast.Module) -> Names:
    table = symtable.symtable(ast.unparse(module), "tests", "exec")
    symbols = table.get_symbols()
    defined = {one.get_name() for one in symbols if one.is_assigned() or one.is_imported()}
    used = set()
    scopes = [table]
    while scopes:
        scope = scopes.pop()
        scopes += scope.get_children()
        for symbol in scope.get_symbols():
            if symbol.is_referenced() and (scope is table or symbol.is_global()):
                used.add(symbol.get_name())
    return used - defined - {"_call_test", "_sized"}


def _names(tree: ast.AST) -> Names:
    return {node.id for node in nodes(tree, ast.Name)}


def _mark_in_place(module: ast.Module, names: Names) -> None:
    """Marks calls of the solution whose result is not used, which may change their arguments.

    Also wraps results in `_sized`, so that NumPy's assertions do not accept an empty result.
    """
    code = {*names, "candidate"}
    own = {function.name for function in nodes(module, ast.FunctionDef)}
    for call in nodes(module, ast.Call):
        name = called(call)
        function = ast.unparse(call.func)
        is_close = name.endswith("close") and not function.startswith("math.")
        is_own = function.removeprefix("self.") in own
        if not is_own and (is_close or name.startswith(NUMPY_ASSERTIONS)):
            if len(call.args) > 1:
                found, expected = call.args[:2]
                if code & _names(expected) and not code & _names(found):
                    found, expected = expected, found
                sides = f"{ast.unparse(found)}, {ast.unparse(expected)}"
                place = call.args.index(found)
                call.args[place] = ast.parse(f"_sized({sides})", mode="eval").body
            elif call.keywords:  # for example actual=, desired=
                raise UnreadableTests(f"{ast.unparse(call)[:80]} names what it compares")
    for expression in nodes(module, ast.Expr):
        call = expression.value
        if not isinstance(call, ast.Call):
            continue
        function = ast.unparse(call.func)
        if function.startswith("Solution()."):
            function = "Solution"
        if function in code:
            call.keywords.append(ast.keyword("_in_place", ast.Constant(True)))


def _check_assertions(module: ast.Module) -> None:
    """Raises ValueError if there is no assertion, or if a function with one is never called."""
    run = {node.attr for node in nodes(module, ast.Attribute)} | _names(module)
    for statement in module.body:
        if ast.unparse(statement).startswith("__import__('unittest')."):
            run |= {node.value for node in nodes(statement, ast.Constant)}
    if not (is_asserting(module) or nodes(module, ast.Raise)):
        raise ValueError("they assert nothing")
    for function in nodes(module, ast.FunctionDef):
        name = function.name
        if name not in run and not name.startswith(HOOKS) and is_asserting(function):
            raise ValueError(f"{name} has assertions, and is never called")


def _asserts(statement: ast.stmt) -> bool:
    """Returns True if a statement asserts something or expects an error.

    Definitions and plain expressions do not count.
    """
    if isinstance(statement, (*DEFINITIONS, ast.Expr)):
        return False
    return bool(nodes(statement, ast.Assert)) or expects_error(statement)


def _split(body: Sequence[ast.stmt], influence: Influence, errors: Names) -> Script:
    """Splits the statements into a prologue and tests that end with an assertion or a test call.

    Statements after the last assertion belong to the last test. Raises ValueError if there are no
    tests.
    """
    names = influence.names
    prologue = []
    tests = []
    setup = []
    for statement in body:
        text = ast.unparse(statement)
        is_test = text.startswith(("_call_test(", "__import__('unittest')."))
        is_test |= _asserts(statement) and influence.of(statement)
        if not (tests or setup or is_test or _names(statement) & (names | errors)):
            prologue.append(text)
            continue
        setup.append(text)
        if is_test:
            tests.append("\n".join(setup))
            setup = []
    rest = "\n".join(setup)
    if tests:
        tests[-1] += f"\n{rest}"
    elif not all(isinstance(item, DEFINITIONS) for item in _parse(rest)):
        tests.append(rest)
    if not tests:
        raise ValueError("there are no tests")
    return Script(
        "\n".join(prologue),
        tuple(tests),
        tuple(sorted(names)),
        tuple(sorted(errors)),
    )
