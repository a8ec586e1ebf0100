"""Reads the tests of a programming problem in the formats of common datasets, and checks their results.

    {"inputs": [...], "outputs": [...], "fn_name"?}     APPS, TACO; with a function's name: arguments and results
    [{"input": ..., "output": ..., "testtype"?}, ...]   LiveCodeBench; "functional": one JSON value per line
    ["assert f(1) == 2", ...]  or one text of them      MBPP, HumanEval's check(candidate), functions named test_...

Expected results stay in this process; the code under test gets inputs only. For an assertion, the code evaluates the
parts only it can compute, as plain data, and the assertion itself is evaluated here, out of reach of any __eq__ the
code defines. Statements that are not simple assertions (a loop, a try) run with the code and pass unless they raise.
"""

from __future__ import annotations

import ast
import copy
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

TOLERANCE = 1e-6  # relative or absolute, for numbers of which at least one is written as a float
TRUSTED: dict[str, Callable[..., Any]] = {"isclose": math.isclose} | {
    function.__name__: function
    for function in (abs, all, any, dict, float, frozenset, len, list, max, min, round, set, sorted, sum, tuple)
}
SIMPLE = (
    ast.Constant, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.Compare, ast.BoolOp, ast.UnaryOp, ast.expr_context,
    ast.boolop, ast.unaryop, ast.cmpop, ast.Add, ast.Sub, ast.Div,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ProgramTest:
    stdin: str
    stdout: str

    def is_passed(self, output: bytes) -> bool:
        return same_output(output.decode("utf-8", "replace"), self.stdout)


@dataclass(frozen=True, slots=True)
class CallTest:
    """Requests for jail.sandbox.run_calls; `is_passed` checks their results."""

    requests: tuple[dict[str, Any], ...]
    is_passed: Callable[[Sequence[Any]], bool]


def read_tests(raw: Any, name: str | None = None) -> list[ProgramTest | CallTest]:
    """Parses tests of any known format, or raises ValueError; `name` is the function to call if the tests name none."""
    if isinstance(raw, str):
        try:
            raw = json.loads(raw)
        except ValueError:
            raw = [raw]
    if isinstance(raw, Mapping) and "inputs" in raw and "outputs" in raw:
        name = raw.get("fn_name") or name if "fn_name" in raw else None
        inputs, outputs = raw["inputs"], raw["outputs"]
        if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
            raise ValueError("inputs and outputs are not lists of equal length")
        tests = [_pair(argument, result, name) for argument, result in zip(inputs, outputs, strict=True)]
    elif isinstance(raw, Sequence) and not isinstance(raw, str | bytes):
        tests = [test for item in raw for test in _parse_item(item, name)]
    else:
        raise ValueError(f"unknown format: {type(raw).__name__} {str(raw)[:60]!r}")
    if not tests:
        raise ValueError("there are no tests")
    return tests


def _parse_item(item: Any, name: str | None) -> list[ProgramTest | CallTest]:
    if isinstance(item, str):
        return _assertions(item, name)
    if isinstance(item, Mapping) and "input" in item and "output" in item:
        function = item.get("fn_name") or (name if item.get("testtype") == "functional" else None)
        if item.get("testtype") == "functional" and not function:
            raise ValueError("a functional test has no fn_name")
        return [_pair(item["input"], item["output"], function)]
    raise ValueError(f"unknown format: {type(item).__name__} {str(item)[:60]!r}")


def _pair(inputs: Any, expected: Any, name: str | None) -> ProgramTest | CallTest:
    if name is None:
        return ProgramTest(_text(inputs), _text(expected))
    if isinstance(inputs, str):
        inputs = [_json(line) for line in inputs.splitlines() if line.strip()]
        expected = _json(expected) if isinstance(expected, str) else expected
    arguments = inputs if isinstance(inputs, list) else [inputs]
    is_wrapped = isinstance(expected, list) and len(expected) == 1  # APPS wraps a result in a list

    def is_passed(values: Sequence[Any]) -> bool:
        result = _tuples_as_lists(values[0])
        return same(result, expected) or (is_wrapped and same(result, expected[0]))

    return CallTest(({"call": name, "arguments": arguments},), is_passed)


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _tuples_as_lists(value: Any) -> Any:
    """Expected results are JSON, which has no tuples and only string keys."""
    if isinstance(value, list | tuple):
        return [_tuples_as_lists(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _tuples_as_lists(item) for key, item in value.items()}
    return value


def same(actual: Any, expected: Any) -> bool:
    """Compares values, with TOLERANCE if one of two numbers is a float."""
    if isinstance(actual, float) or isinstance(expected, float):
        return isinstance(actual, int | float) and isinstance(expected, int | float) and _close(actual, expected)
    if isinstance(actual, list | tuple) and isinstance(expected, list | tuple):
        alike = type(actual) is type(expected) and len(actual) == len(expected)
        return alike and all(map(same, actual, expected))
    if isinstance(actual, dict) and isinstance(expected, dict):
        return actual.keys() == expected.keys() and all(same(actual[key], expected[key]) for key in actual)
    return actual == expected


def same_output(actual: str, expected: str) -> bool:
    """Compares texts word by word on each line, numbers by value, ignoring trailing white space."""
    lines, expected_lines = ([line.split() for line in text.rstrip().split("\n")] for text in (actual, expected))
    return [*map(len, lines)] == [*map(len, expected_lines)] and all(
        map(_same_word, chain(*lines), chain(*expected_lines))
    )


def _same_word(actual: str, expected: str) -> bool:
    if actual == expected or not any(mark in actual + expected for mark in ".eE"):
        return actual == expected
    try:
        return _close(float(actual), float(expected))
    except ValueError:
        return False


def _close(actual: float, expected: float) -> bool:
    try:
        return math.isclose(actual, expected, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    except OverflowError:  # an integer too large for a float
        return False


def _assertions(text: str, name: str | None) -> list[ProgramTest | CallTest]:
    """Returns a test per assertion, set up by the statements before it, and a last test of those that remain."""
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ValueError(f"{error} in {text[:60]!r}") from None
    tests: list[ProgramTest | CallTest] = []
    setup: list[dict[str, Any]] = []
    for statement in _inline_tests(body, name):
        if isinstance(statement, ast.Assert):
            requests, is_passed = _assertion(statement.test, skip=len(setup))
            tests.append(CallTest((*setup, *requests), is_passed))
            setup = []
        else:
            setup.append({"statement": ast.unparse(statement)})
    return [*tests, *([CallTest(tuple(setup), bool)] if setup else [])]


def _inline_tests(body: Sequence[ast.stmt], name: str | None) -> list[ast.stmt]:
    """Replaces ``check(candidate)`` and ``test_...()`` with their bodies, and removes the calls to them."""
    inlined = {
        item.name: item
        for item in body
        if isinstance(item, ast.FunctionDef)
        and (item.name.startswith("test_") or item.name == "check")
        and not any(isinstance(node, ast.Return | ast.Global | ast.Nonlocal) for node in ast.walk(item))
    }
    flat: list[ast.stmt] = []
    for item in body:
        if isinstance(item, ast.FunctionDef) and item.name in inlined:
            if item.args.args:
                function = name or _called(body, item.name)
                if function is None:
                    raise ValueError(f"{item.name}({item.args.args[0].arg}) needs fn_name, the function to check")
                flat += ast.parse(f"{item.args.args[0].arg} = {function}").body
            flat += item.body
        elif _called([item]) not in inlined:
            flat.append(item)
    return flat


def _called(body: Sequence[ast.stmt], function: str | None = None) -> str | None:
    """Name called by the first statement that is a call; with `function`, the first argument of a call to it."""
    for item in body:
        if isinstance(item, ast.Expr) and isinstance(item.value, ast.Call) and isinstance(item.value.func, ast.Name):
            if function is None:
                return item.value.func.id
            if item.value.func.id == function and item.value.args and isinstance(item.value.args[0], ast.Name):
                return item.value.args[0].id
    return None


class _ExtractExpressions(ast.NodeTransformer):
    """Replaces the largest subexpressions that are not simple with names, and collects them in `expressions`."""

    def __init__(self, trusted: Mapping[str, Any]) -> None:
        self.trusted = trusted
        self.expressions: list[str] = []

    def visit(self, node: ast.AST) -> Any:
        is_arithmetic = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub | ast.Div)
        if is_arithmetic or isinstance(node, SIMPLE):
            return self.generic_visit(node)
        if isinstance(node, ast.Call) and not any(isinstance(item, ast.Starred) for item in node.args):
            function = ast.unparse(node.func).removeprefix("math.")
            if function in self.trusted and all(item.arg for item in node.keywords):
                arguments = [self.visit(item) for item in node.args]
                keywords = [ast.keyword(item.arg, self.visit(item.value)) for item in node.keywords]
                return ast.Call(ast.Name(function, ast.Load()), arguments, keywords)
        self.expressions.append(ast.unparse(node))
        return ast.copy_location(ast.Name(f"_value_{len(self.expressions) - 1}", ast.Load()), node)


def _assertion(condition: ast.expr, *, skip: int) -> tuple[list[dict[str, Any]], Callable[[Sequence[Any]], bool]]:
    """Returns an assertion's requests, and the assertion as a function of the results after the first `skip`."""
    extractor = _ExtractExpressions(TRUSTED)
    remainder = ast.Expression(extractor.visit(copy.deepcopy(condition)))
    if not extractor.expressions:  # the function under test has the name of a trusted one: `assert sum([1, 2]) == 3`
        extractor = _ExtractExpressions({})
        remainder = ast.Expression(extractor.visit(condition))
    if not extractor.expressions:  # nothing is called; passes if the code can be loaded
        return [{"statement": ast.unparse(ast.Assert(condition))}], bool
    program = compile(ast.fix_missing_locations(remainder), "assertion", "eval")

    def is_passed(values: Sequence[Any]) -> bool:
        names = {f"_value_{number}": value for number, value in enumerate(values[skip:])}
        try:
            return bool(eval(program, {"__builtins__": {}, **TRUSTED, **names}))
        except Exception:  # noqa: BLE001 (such as None < 1: the result has the wrong type)
            return False

    return [{"expression": expression} for expression in extractor.expressions], is_passed
