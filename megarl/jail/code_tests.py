"""Reads the tests of a programming problem in the formats of common datasets, and compares results.

    {"inputs": [...], "outputs": [...], "fn_name"?}     APPS, TACO; with a function's name: arguments and results
    [{"input": ..., "output": ..., "testtype"?}, ...]   LiveCodeBench; "functional": one JSON value per line
    ["assert f(1) == 2", ...]  or one text of them      MBPP, HumanEval: python_tests.py

Expected results of the first two stay in this process; those of Python tests in the tests' jail.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any

from megarl.rewards.python_tests import Script, read_script

TOLERANCE = 1e-6  # relative or absolute, where the expected number is written as a float
FLOAT = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
# 0.5, 1.5e3, 1e-05; but 12, 1e5 and 0e47 may be identifiers
EXPECTED_FLOAT = re.compile(r"[+-]?(\d+\.\d+([eE][+-]?\d+)?|\d[eE][+-]\d\d+)", re.ASCII)


@dataclass(frozen=True, slots=True)
class ProgramTest:
    stdin: str
    stdout: str

    def is_passed(self, output: bytes) -> bool:
        return same_output(output.decode("utf-8", "replace"), self.stdout)


@dataclass(frozen=True, slots=True)
class CallTest:
    """A call with JSON arguments; `is_wrapped`: the expected result may be the only item of `expected`."""

    name: str
    arguments: Sequence[Any]
    expected: Any
    is_wrapped: bool = False

    def is_passed(self, value: Any) -> bool:
        """`value` is encoded (jail/values.py)."""
        return same(value, self.expected) or (self.is_wrapped and same(value, self.expected[0]))


@dataclass(frozen=True, slots=True)
class ProblemTests:
    programs: Sequence[ProgramTest] = ()
    calls: Sequence[CallTest] = ()
    script: Script | None = None

    def __len__(self) -> int:
        return len(self.programs) + len(self.calls) + (len(self.script.tests) if self.script else 0)


def read_tests(raw: Any, name: str | None = None) -> ProblemTests:
    """Parses tests of any known format; `name`: the function, if they name none. Raises ValueError, and Unjudgeable."""
    if isinstance(raw, str):
        try:
            raw = json.loads(raw)
        except ValueError:
            raw = [raw]
    if isinstance(raw, Mapping) and "inputs" in raw and "outputs" in raw:
        name = raw.get("fn_name") or name if "fn_name" in raw else None
        inputs, outputs = raw["inputs"], raw["outputs"]
        if (
            not isinstance(inputs, list)
            or not isinstance(outputs, list)
            or len(inputs) != len(outputs)
        ):
            raise ValueError("inputs and outputs are not lists of equal length")
        is_wrapped = all(
            isinstance(output, list) and len(output) == 1 for output in outputs
        )  # as APPS does
        pairs = [
            _pair(*pair, name, is_wrapped=is_wrapped) for pair in zip(inputs, outputs, strict=True)
        ]
        texts = []
    elif isinstance(raw, Sequence) and not isinstance(raw, str | bytes):
        texts = [item for item in raw if isinstance(item, str)]
        pairs = [_parse_pair(item, name) for item in raw if not isinstance(item, str)]
    else:
        raise ValueError(f"unknown format: {type(raw).__name__} {str(raw)[:60]!r}")
    if not pairs and not "".join(texts).strip():
        raise ValueError("there are no tests")
    return ProblemTests(
        [test for test in pairs if isinstance(test, ProgramTest)],
        [test for test in pairs if isinstance(test, CallTest)],
        read_script(tuple(texts), name) if texts else None,
    )


def _parse_pair(item: Any, name: str | None) -> ProgramTest | CallTest:
    if isinstance(item, Mapping) and "input" in item and "output" in item:
        function = item.get("fn_name") or (name if item.get("testtype") == "functional" else None)
        if item.get("testtype") == "functional" and not function:
            raise ValueError("a functional test has no fn_name")
        return _pair(item["input"], item["output"], function)
    raise ValueError(f"unknown format: {type(item).__name__} {str(item)[:60]!r}")


def _pair(
    inputs: Any, expected: Any, name: str | None, *, is_wrapped: bool = False
) -> ProgramTest | CallTest:
    if name is None:
        return ProgramTest(_text(inputs), _text(expected))
    if isinstance(inputs, str):
        inputs = [_json(line) for line in inputs.splitlines() if line.strip()]
        expected = _json(expected) if isinstance(expected, str) else expected
    return CallTest(name, inputs if isinstance(inputs, list) else [inputs], expected, is_wrapped)


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _json(text: str) -> Any:
    with suppress(ValueError):
        return json.loads(text)
    return text


def same(actual: Any, expected: Any) -> bool:
    """Compares an encoded value with JSON: a tuple equals a list, a key its text; with TOLERANCE to a float."""
    if isinstance(actual, dict):
        ((kind, content),) = actual.items()
        if kind == "dict" and isinstance(expected, dict) and len(content) == len(expected):
            items = sorted(((str(key), item) for key, item in content), key=lambda item: item[0])
            pairs = zip(items, sorted(expected.items()), strict=True)
            return all(key == known and same(item, value) for (key, item), (known, value) in pairs)
        if kind not in ("tuple", "int"):
            return False
        actual = content if kind == "tuple" else _big(content)
    if isinstance(expected, list):
        return (
            isinstance(actual, list)
            and len(actual) == len(expected)
            and all(map(same, actual, expected))
        )
    if isinstance(expected, float):
        return isinstance(actual, int | float) and _close(actual, expected)
    if isinstance(expected, int):
        return isinstance(actual, int) and actual == expected
    return type(actual) is type(expected) and actual == expected


def _big(digits: str) -> int | None:
    with suppress(ValueError):
        return int(digits, 16)
    return None


def same_output(actual: str, expected: str) -> bool:
    """Compares texts word by word on each line, floats by value, ignoring trailing white space."""
    lines, known = (
        [line.split() for line in text.rstrip().split("\n")] for text in (actual, expected)
    )
    return [*map(len, lines)] == [*map(len, known)] and all(
        map(_same_word, chain(*lines), chain(*known))
    )


def _same_word(actual: str, expected: str) -> bool:
    if actual == expected or not EXPECTED_FLOAT.fullmatch(expected):
        return actual == expected
    return bool(FLOAT.fullmatch(actual)) and _close(float(actual), float(expected))


def _close(actual: float, expected: float) -> bool:
    with suppress(OverflowError):  # an integer too large for a float
        return math.isclose(actual, expected, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    return False
