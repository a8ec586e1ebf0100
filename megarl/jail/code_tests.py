"""Reads the tests of a programming problem in the formats of common datasets, and compares results.

    {"inputs": [...], "outputs": [...], "fn_name"?}    APPS, TACO; with fn_name: arguments, results
    [{"input": ..., "output": ..., "testtype"?}, ...]  LiveCodeBench; "functional": JSON lines
    ["assert f(1) == 2", ...]  or a single text        MBPP, HumanEval: python_tests.py

Expected results of the first two formats stay in this process, those of Python tests in the tests'
jail.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any

from megarl.jail.python_tests import Script, read_script

TOLERANCE = 1e-6  # relative or absolute, if the expected number is written as a float
FLOAT = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
# 0.5, 1.5e3, 1e-05; not 12, 1e5 and 0e47, which may be identifiers
EXPECTED_FLOAT = re.compile(r"[+-]?(\d+\.\d+([eE][+-]?\d+)?|\d[eE][+-]\d\d+)", re.ASCII)


@dataclass(frozen=True)
class ProgramTest:
    stdin: str
    stdout: str

    def is_passed(self, output: bytes) -> bool:
        return same_output(output.decode("utf-8", "replace"), self.stdout)


@dataclass(frozen=True)
class CallTest:
    """A call of the function `name` with JSON arguments.

    If `is_wrapped`, `expected` may be a list whose only item is the expected result.
    """

    name: str
    arguments: Sequence[Any]
    expected: Any
    is_wrapped: bool = False

    def is_passed(self, value: Any) -> bool:
        """Compares an encoded value (jail/values.py) with the expected result."""
        return same(value, self.expected) or (self.is_wrapped and same(value, self.expected[0]))


Pair = ProgramTest | CallTest


@dataclass(frozen=True)
class ProblemTests:
    pairs: Sequence[Pair]
    script: Script | None = None

    def __len__(self) -> int:
        count = len(self.pairs)
        if self.script:
            count += len(self.script.tests)
        return count


def read_tests(raw: Any, name: str | None = None) -> ProblemTests:
    """Returns the tests in `raw`, which may have any of the formats above.

    `name` is the function to test if the tests do not name one. Raises ValueError if the tests
    cannot be read, and its subclass UnreadableTests if the solution could decide their verdict.
    """
    if isinstance(raw, str):
        try:
            raw = json.loads(raw)
        except ValueError:
            raw = [raw]
    if isinstance(raw, Mapping) and "inputs" in raw and "outputs" in raw:
        return _read_lists(raw, name)
    if not isinstance(raw, Sequence) or isinstance(raw, str | bytes):
        raise _unknown_format(raw)
    texts = [item for item in raw if isinstance(item, str)]
    pairs = [_parse_pair(item, name) for item in raw if not isinstance(item, str)]
    if not pairs and not "".join(texts).strip():
        raise ValueError("there are no tests")
    script = None
    if texts:
        script = read_script(tuple(texts), name)
    return ProblemTests(pairs, script)


def _unknown_format(value: Any) -> ValueError:
    return ValueError(f"unknown format: {type(value).__name__} {str(value)[:60]!r}")


def _read_lists(raw: Mapping[str, Any], name: str | None) -> ProblemTests:
    """Parses `inputs` and `outputs` of a program or, if `raw` has "fn_name", of a function."""
    inputs = raw["inputs"]
    outputs = raw["outputs"]
    if "fn_name" not in raw:
        name = None
    elif raw["fn_name"]:
        name = raw["fn_name"]
    are_lists = isinstance(inputs, list) and isinstance(outputs, list)
    if not are_lists or len(inputs) != len(outputs):
        raise ValueError("inputs and outputs are not lists of equal length")
    if not inputs:
        raise ValueError("there are no tests")
    # APPS wraps the results of functions in lists
    is_wrapped = all(isinstance(output, list) and len(output) == 1 for output in outputs)
    return ProblemTests(
        [_pair(*pair, name, is_wrapped=is_wrapped) for pair in zip(inputs, outputs, strict=True)]
    )


def _parse_pair(item: Any, name: str | None) -> Pair:
    if not isinstance(item, Mapping) or "input" not in item or "output" not in item:
        raise _unknown_format(item)
    function = item.get("fn_name") or None
    if item.get("testtype") == "functional":
        function = function or name
        if not function:
            raise ValueError("a functional test has no fn_name")
    return _pair(item["input"], item["output"], function)


def _pair(
    inputs: Any,
    expected: Any,
    name: str | None,
    *,
    is_wrapped: bool = False,
) -> Pair:
    if name is None:
        return ProgramTest(_text(inputs), _text(expected))
    if isinstance(inputs, str):
        inputs = [_json(line) for line in inputs.splitlines() if line.strip()]
        if isinstance(expected, str):
            expected = _json(expected)
    if not isinstance(inputs, list):
        inputs = [inputs]
    return CallTest(name, inputs, expected, is_wrapped)


def _text(value: Any) -> str:
    if isinstance(value, list):
        return "\n".join(map(str, value))
    return str(value)


def _json(text: str) -> Any:
    with suppress(ValueError):
        return json.loads(text)
    return text


def same(actual: Any, expected: Any) -> bool:
    """Returns True if an encoded value equals an expected JSON value.

    A tuple equals a list, a dict's key equals its text, and a number equals an expected float
    within TOLERANCE.
    """
    if isinstance(actual, dict):
        ((kind, content),) = actual.items()
        if kind == "dict":
            # compares sizes first, to limit the size of a dict with untrusted keys
            if not isinstance(expected, dict) or len(content) != len(expected):
                return False
            items = {str(key): item for key, item in content}
            return items.keys() == expected.keys() and all(
                same(item, expected[key]) for key, item in items.items()
            )
        if kind not in ("tuple", "named", "int", "keys"):
            return False
        actual = content
        if kind == "named":
            actual = [item for _, item in content]
        if kind == "int":
            actual = None
            with suppress(ValueError):
                actual = int(content, 16)
    if isinstance(expected, list):
        if not isinstance(actual, list) or len(actual) != len(expected):
            return False
        return all(map(same, actual, expected))
    if isinstance(expected, float):
        return isinstance(actual, int | float) and _close(actual, expected)
    if isinstance(expected, int):
        return isinstance(actual, int) and actual == expected
    return type(actual) is type(expected) and actual == expected


def same_output(actual: str, expected: str) -> bool:
    """Returns True if two texts have equal words on each line; ignores trailing white space.

    Expected floats are compared by value.
    """
    lines = _words_of_lines(actual)
    known = _words_of_lines(expected)
    if [*map(len, lines)] != [*map(len, known)]:
        return False
    return all(map(_same_word, chain(*lines), chain(*known)))


def _words_of_lines(text: str) -> list[list[str]]:
    return [line.split() for line in text.rstrip().split("\n")]


def _same_word(actual: str, expected: str) -> bool:
    if actual == expected:
        return True
    if not EXPECTED_FLOAT.fullmatch(expected) or not FLOAT.fullmatch(actual):
        return False
    return _close(float(actual), float(expected))


def _close(actual: float, expected: float) -> bool:
    with suppress(OverflowError):  # an integer too large for a float
        return math.isclose(actual, expected, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    return False
