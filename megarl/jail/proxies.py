"""The tests of a problem, in their own jail: names of the solution are proxies that ask its jail.

    request {"run": text} --exec--> proxy --{"ask": ...} on the report pipe--> trainer --> solution
                               <--reply on the standard input-- trainer <-- plain values
    report {"verdict": kind of failure, "why"}

No code or object of the solution is in this process, and no expected value leaves it. Functions
return plain data; only classes (capitalised names) give objects, which are used in the solution's
jail. One equals nothing but itself.
"""

from __future__ import annotations

import builtins
import json
import os
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, BinaryIO

from megarl.jail.values import JailMessage, decode, encode, failure

# of plain data
PREDICATES = [
    name for name in dir(str) + dir(set) + dir(float) if name.startswith(("is", "start", "end"))
]


class Unjudgeable(BaseException):
    """The tests need what only the solution's own process could decide."""


class Link:
    """The way to the solution's jail, through the trainer, which checks what passes."""

    def __init__(self, requests: BinaryIO, report: int, errors: Sequence[str]) -> None:
        self.requests = requests
        self.report = report
        # classes that the tests expect
        self.errors = {name: type(name, (Exception,), {}) for name in errors}
        self.objects: dict[int, Remote] = {}

    def send(self, line: JailMessage) -> None:
        data = json.dumps(line).encode() + b"\n"
        while data:
            data = data[os.write(self.report, data) :]

    def ask(
        self,
        remote: Remote,
        do: str,
        arguments: tuple[Any, ...],
        keywords: dict[str, Any] | None = None,
        *,
        level: int | None = None,
        in_place: bool = False,
    ) -> Any:
        """Returns plain data, or with `level` an object of that level.

        With `in_place`, lists, dicts and sets among `arguments` get the items that the solution
        gave them.
        """
        keywords = keywords or {}
        operation = {
            "do": do,
            "target": remote._target,
            "arguments": [encode(argument, _number) for argument in arguments],
            "keywords": {name: encode(value, _number) for name, value in keywords.items()},
            "with_objects": level is not None,
            "in_place": in_place,
        }
        self.send({"ask": operation})
        reply = json.loads(self.requests.readline())
        if "raised" in reply:
            raise self.error(reply)

        def resolve(number: int) -> Remote:
            return self.objects.setdefault(number, Remote(self, number, level or 0))

        try:
            value = decode(reply["value"], resolve)
            changed = [decode(argument, resolve) for argument in reply.get("arguments", ())]
        except Exception:  # noqa: BLE001 (a set of lists, a fraction over 0)
            raise self.error(failure("ValueError", "not a value")) from None
        for argument, new in zip(arguments, changed, strict=False):
            if isinstance(argument, list) and isinstance(new, list):
                argument[:] = new
            elif isinstance(argument, dict | set) and isinstance(new, type(argument)):
                argument.clear()
                argument.update(new)
        return value

    def error(self, reply: JailMessage) -> Exception:
        """Returns the solution's exception, as the nearest class that the tests know."""
        kind: type[Exception] = RuntimeError
        for name in reply["raised"]:
            known = self.errors.get(name) or getattr(builtins, name, None)
            if isinstance(known, type) and issubclass(known, Exception):
                kind = known
                break
        try:
            error = kind(reply["text"])
        except TypeError:  # UnicodeDecodeError
            error = RuntimeError(reply["text"])
        error.kind_of_solution = reply["kind"]  # type: ignore[attr-defined]
        return error


class Remote:
    """A name or object of the solution.

    `level` counts the attributes read since the name or the instance. Comparison, arithmetic and
    `in` would give the solution an expected value, so they are not forwarded.
    """

    __slots__ = ("_level", "_link", "_target")
    _level: int
    _link: Link
    _target: str | int

    def __init__(self, link: Link, target: str | int, level: int = 0) -> None:
        object.__setattr__(self, "_link", link)
        object.__setattr__(self, "_target", target)
        object.__setattr__(self, "_level", level)

    def __call__(self, *arguments: Any, _in_place: bool = False, **keywords: Any) -> Any:
        if self._level > 1:
            raise TypeError("of the objects that a class returned, only methods can be called")
        is_class = isinstance(self._target, str) and self._target[:1].isupper()
        return self._link.ask(
            self,
            "call",
            arguments,
            keywords,
            level=0 if is_class else None,
            in_place=_in_place,
        )

    def __getattr__(self, name: str) -> Any:
        # a predicate of plain data is not the solution's to answer
        if name.startswith("__") or name in PREDICATES:
            raise AttributeError(name)
        return self._link.ask(self, "getattr", (name,), level=self._level + 1)

    def __setattr__(self, name: str, value: Any) -> None:
        self._link.ask(self, "setattr", (name, value))

    def __instancecheck__(self, other: Any) -> bool:
        raise Unjudgeable(f"isinstance(..., {self._target}) asks for a class of the solution")


def _forward(operation: str) -> Callable[..., Any]:
    return lambda self, *arguments: self._link.ask(self, operation, arguments)


for _operation in ("len", "iter", "getitem", "setitem", "str", "repr"):
    setattr(Remote, f"__{_operation}__", _forward(_operation))


def _number(value: Any) -> int:
    if isinstance(value, Remote) and isinstance(value._target, int):
        return value._target
    raise Unjudgeable(
        f"an argument is a {type(value).__name__}, which cannot be sent to the solution"
    )


def _call_test(function: Callable[..., Any]) -> None:
    """Calls a test function as pytest does, once per row of its parameters."""
    rows = [{}]
    for mark in getattr(function, "pytestmark", ()):
        if mark.name != "parametrize":
            continue
        names, values = mark.args[:2]
        if isinstance(names, str):
            names = [name.strip() for name in names.split(",")]
        if len(names) < 2:
            values = [[value] for value in values]
        parameters = [dict(zip(names, cells, strict=True)) for cells in values]
        rows = [row | parameter for row, parameter in product(rows, parameters)]
    for row in rows:
        function(**row)


def _verdict(error: BaseException) -> str:
    kind = getattr(error, "kind_of_solution", "")
    if kind:
        return kind
    if isinstance(error, Unjudgeable):
        return "unjudgeable"
    if isinstance(error, SystemExit) and not error.code:
        return ""
    if isinstance(error, ModuleNotFoundError):
        return "bad_tests"
    return "wrong_answer"


def run_tests(requests: BinaryIO, report: int) -> None:
    """Executes requests: {"names", "errors"} of the solution first, then {"run": text} each."""
    first = json.loads(requests.readline())
    link = Link(requests, report, first["errors"])
    namespace = {"__name__": "tests", "_call_test": _call_test, **link.errors}
    namespace |= {name: Remote(link, name) for name in first["names"]}
    link.send({"ready": True})
    for line in requests:
        verdict = ""
        why = ""
        try:
            text = json.loads(line)["run"]
            exec(compile(text, "tests.py", "exec", annotations.compiler_flag), namespace)
        except BaseException as error:  # noqa: BLE001 (tests may raise anything)
            verdict = _verdict(error)
            why = f"{type(error).__name__}: {error}"[:200]
        link.send({"verdict": verdict, "why": why})
