"""The tests of a programming problem, as the field writes them, and what makes an answer right.

    {"inputs": [...], "outputs": [...], "fn_name"?}     APPS, TACO; with a function's name: arguments and results
    [{"input": ..., "output": ..., "testtype"?}, ...]   LiveCodeBench; "functional": one JSON value a line
    ["assert f(1) == 2", ...]  or one text of them      MBPP, HumanEval's check(candidate), functions named test_...

What is expected stays on this side; the code under test gets inputs only. Of an assertion, the parts that the code
must compute are asked of it as plain data, and the assertion itself is decided here, so no __eq__ of the code's has a
say. What is no simple assertion (a loop, a try) runs beside the code and passes when it raises nothing.
"""

from __future__ import annotations

import ast
import copy
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["CallTest", "ProgramTest", "read_tests", "same", "same_output"]

TOLERANCE = 1e-6  # relative or absolute, between numbers of which one is written with a fraction
TRUSTED: dict[str, Callable[..., Any]] = {
    "abs": abs, "all": all, "any": any, "dict": dict, "float": float, "frozenset": frozenset, "isclose": math.isclose,
    "len": len, "list": list, "max": max, "min": min, "round": round, "set": set, "sorted": sorted, "sum": sum,
    "tuple": tuple,
}  # fmt: skip
SIMPLE = (
    ast.Constant, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.Compare, ast.BoolOp, ast.UnaryOp, ast.expr_context,
    ast.boolop, ast.unaryop, ast.cmpop, ast.Add, ast.Sub, ast.Div,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ProgramTest:
    stdin: str
    stdout: str

    def right(self, output: bytes) -> bool:
        return same_output(output.decode("utf-8", "replace"), self.stdout)


@dataclass(frozen=True, slots=True)
class CallTest:
    """`right` decides from what was asked for, in order."""

    requests: tuple[dict[str, Any], ...]
    right: Callable[[Sequence[Any]], bool]


def read_tests(raw: Any, name: str | None = None) -> list[ProgramTest | CallTest]:
    """`name` is the function they call, where the tests do not say.

    Raises ValueError for what is no test.
    """
    if isinstance(raw, str):
        try:
            raw = json.loads(raw)
        except ValueError:
            raw = [raw]
    if isinstance(raw, Mapping) and "inputs" in raw and "outputs" in raw:
        name = raw.get("fn_name") or name if "fn_name" in raw else None
        inputs, outputs = raw["inputs"], raw["outputs"]
        if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
            raise ValueError("inputs and outputs are not lists of one length")
        tests = [_pair(given, expected, name) for given, expected in zip(inputs, outputs, strict=True)]
    elif isinstance(raw, Sequence) and not isinstance(raw, str | bytes):
        tests = [test for item in raw for test in _one(item, name)]
    else:
        raise ValueError(f"{type(raw).__name__} {str(raw)[:60]!r}")
    if not tests:
        raise ValueError("there is none")
    return tests


def _one(item: Any, name: str | None) -> list[ProgramTest | CallTest]:
    if isinstance(item, str):
        return _assertions(item, name)
    if isinstance(item, Mapping) and "input" in item and "output" in item:
        called = item.get("fn_name") or (name if item.get("testtype") == "functional" else None)
        if item.get("testtype") == "functional" and not called:
            raise ValueError("a functional test without fn_name")
        return [_pair(item["input"], item["output"], called)]
    raise ValueError(f"{type(item).__name__} {str(item)[:60]!r}")


# --- inputs and outputs -------------------------------------------------------------------------------------------


def _pair(given: Any, expected: Any, name: str | None) -> ProgramTest | CallTest:
    if name is None:
        return ProgramTest(_text(given), _text(expected))
    if isinstance(given, str):
        given = [_json(line) for line in given.splitlines() if line.strip()]
        expected = _json(expected) if isinstance(expected, str) else expected
    arguments = given if isinstance(given, list) else [given]
    wrapped = isinstance(expected, list) and len(expected) == 1  # APPS writes a result in a list of its own

    def right(values: Sequence[Any]) -> bool:
        found = _listed(values[0])
        return same(found, expected) or (wrapped and same(found, expected[0]))

    return CallTest(({"call": name, "arguments": arguments},), right)


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _listed(value: Any) -> Any:
    """Expected results were written as JSON, which has no tuples."""
    if isinstance(value, list | tuple):
        return [_listed(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _listed(item) for key, item in value.items()}
    return value


def same(found: Any, expected: Any) -> bool:
    """Equal, where numbers with a fraction may differ by TOLERANCE."""
    if isinstance(found, float) or isinstance(expected, float):
        if isinstance(found, int | float) and isinstance(expected, int | float):
            return found == expected or _close(found, expected)
        return False
    if isinstance(found, list | tuple) and isinstance(expected, list | tuple):
        alike = type(found) is type(expected) and len(found) == len(expected)
        return alike and all(same(*pair) for pair in zip(found, expected, strict=True))
    if isinstance(found, dict) and isinstance(expected, dict):
        return found.keys() == expected.keys() and all(same(found[key], expected[key]) for key in found)
    return found == expected


def same_output(found: str, expected: str) -> bool:
    """The same lines, but for space at their ends; else the same words, numbers compared as numbers."""
    lines, wanted = ([line.rstrip() for line in text.rstrip().split("\n")] for text in (found, expected))
    if lines == wanted:
        return True
    if len(lines) != len(wanted):
        return False
    words, others = ([line.split() for line in text] for text in (lines, wanted))
    return all(
        len(row) == len(other) and all(map(_same_word, row, other)) for row, other in zip(words, others, strict=True)
    )


def _same_word(found: str, expected: str) -> bool:
    if found == expected:
        return True
    if not any(mark in found + expected for mark in ".eE"):
        return False
    try:
        return _close(float(found), float(expected))
    except ValueError:
        return False


def _close(found: float, expected: float) -> bool:
    try:
        return math.isclose(found, expected, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    except OverflowError:  # an integer too large for a float
        return False


# --- assertions ---------------------------------------------------------------------------------------------------


def _assertions(text: str, name: str | None) -> list[ProgramTest | CallTest]:
    """One test of each assertion, with what stands before it; and one of what stands after the last."""
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ValueError(f"{error} in {text[:60]!r}") from None
    tests: list[ProgramTest | CallTest] = []
    setup: list[dict[str, Any]] = []
    for statement in _flat(body, name):
        if isinstance(statement, ast.Assert):
            request, right = _assertion(statement.test)
            tests.append(CallTest((*setup, *request), _after(len(setup), right)))
            setup = []
        else:
            setup.append({"statement": ast.unparse(statement)})
    return [*tests, *([CallTest(tuple(setup), bool)] if setup else [])]


def _after(count: int, right: Callable[[Sequence[Any]], bool]) -> Callable[[Sequence[Any]], bool]:
    return lambda values: right(values[count:])


def _flat(body: Sequence[ast.stmt], name: str | None) -> list[ast.stmt]:
    """The insides of ``check(candidate)`` and of ``test_...()`` in place of the functions and of their calls."""
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
                called = name or _called(body, item.name)
                if called is None:
                    raise ValueError(f"{item.name}({item.args.args[0].arg}) without the name of the function to check")
                flat += ast.parse(f"{item.args.args[0].arg} = {called}").body
            flat += item.body
        elif _called([item]) not in inlined:
            flat.append(item)
    return flat


def _called(body: Sequence[ast.stmt], function: str | None = None) -> str | None:
    """Without `function`: the name a lone call calls. With it: the name that call is given."""
    for item in body:
        if isinstance(item, ast.Expr) and isinstance(item.value, ast.Call) and isinstance(item.value.func, ast.Name):
            if function is None:
                return item.value.func.id
            if item.value.func.id == function and item.value.args and isinstance(item.value.args[0], ast.Name):
                return item.value.args[0].id
    return None


class _Asked(ast.NodeTransformer):
    """Puts a name in place of every largest part that is not simple, and remembers the part."""

    def __init__(self, trusted: Mapping[str, Any]) -> None:
        self.trusted = trusted
        self.parts: list[str] = []

    def visit(self, node: ast.AST) -> Any:
        simple = isinstance(node, SIMPLE)
        simple |= isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub | ast.Div)
        if simple:
            return self.generic_visit(node)
        if isinstance(node, ast.Call) and not any(isinstance(item, ast.Starred) for item in node.args):
            called = ast.unparse(node.func).removeprefix("math.")
            if called in self.trusted and all(item.arg for item in node.keywords):
                arguments = [self.visit(item) for item in node.args]
                keywords = [ast.keyword(item.arg, self.visit(item.value)) for item in node.keywords]
                return ast.Call(ast.Name(called, ast.Load()), arguments, keywords)
        self.parts.append(ast.unparse(node))
        return ast.copy_location(ast.Name(f"_asked_{len(self.parts) - 1}", ast.Load()), node)


def _assertion(condition: ast.expr) -> tuple[list[dict[str, Any]], Callable[[Sequence[Any]], bool]]:
    asked = _Asked(TRUSTED)
    decided = ast.Expression(asked.visit(copy.deepcopy(condition)))
    if not asked.parts:  # the function under test is called as one of ours, as in `assert sum([1, 2]) == 3`
        asked = _Asked({})
        decided = ast.Expression(asked.visit(condition))
    if not asked.parts:  # nothing is called; it holds where the code at least runs
        return [{"statement": ast.unparse(ast.Assert(condition))}], bool
    program = compile(ast.fix_missing_locations(decided), "assertion", "eval")

    def right(values: Sequence[Any]) -> bool:
        names = {f"_asked_{number}": value for number, value in enumerate(values)}
        try:
            return bool(eval(program, {"__builtins__": {}, **TRUSTED, **names}))
        except Exception:  # noqa: BLE001 (None < 1, say: the code's answer is of the wrong kind)
            return False

    return [{"expression": part} for part in asked.parts], right
