"""Runs the tests of a problem in a separate jail, with proxies for the solution's names.

    request {"run": text} --exec--> proxy --{"ask": ...} on the report pipe--> trainer --> solution
                               <--reply on the standard input-- trainer <-- plain values
    report {"verdict": kind of failure, "why"}

No code or object of the solution is in this process, and no expected value leaves it. A proxy asks
the solution's jail for an object's data: attributes, length, items, text and results of methods. An
object of a class that the tests name (capitalised) also supports `in`, and its methods may have the
names of methods of plain data. Any other operation on an object, such as `==` or `+`, fails the
test, and so do exceptions that would end a loop or the process.
"""

from __future__ import annotations

import builtins
import json
from copy import deepcopy
from functools import partialmethod
from typing import Any, BinaryIO, NoReturn

from megarl.jail.influence import CONTROL
from megarl.jail.untrusted import write
from megarl.jail.values import PLAIN, JailMessage, decode, encode, failure

# operations that return data of an object; they do not depend on the expected values
GIVING = """len str repr format bytes int float complex round iter reversed next bool getitem
setitem delitem setattr delattr index neg pos abs invert"""
REFUSED = "lt le gt ge hash reduce_ex instancecheck subclasscheck enter exit dir"


class Unjudgeable(BaseException):
    """Raised if an argument cannot be sent to the solution."""


class Refused(BaseException):
    """Raised if the solution fails the test; it fails even if the test catches this and goes on."""


class Link:
    """The connection to the solution's jail, through the trainer, which checks all messages."""

    def __init__(self, requests: BinaryIO, report: int, first: JailMessage) -> None:
        self.requests = requests
        self.report = report
        self.names = first["names"]
        # exception classes of the solution that the tests expect
        self.errors = {name: type(name, (Exception,), {}) for name in first["errors"]}
        self.num_replies = 0
        self.refusal = ""

    def refuse(self, kind: str, why: str) -> NoReturn:
        self.refusal = kind
        raise Refused(why)

    def ask(
        self,
        remote: Remote,
        do: str,
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
        *,
        in_place: bool = False,
    ) -> Any:
        """Applies the operation `do` to `remote` in the solution's jail; returns plain data or a
        proxy.

        With `in_place`, lists, dicts and sets among `arguments` are updated with the solution's
        changes. Raises the solution's exception.
        """
        operation = {
            "do": do,
            "target": remote._target,
            "arguments": [encode(argument, _number) for argument in arguments],
            "keywords": {name: encode(value, _number) for name, value in keywords.items()},
            "in_place": in_place,
        }
        write(self.report, {"ask": operation})
        reply = json.loads(self.requests.readline())
        self.num_replies += 1
        if "raised" in reply:
            raise self.error(reply)

        def resolve(number: int, kind: str) -> Remote:
            is_instance = kind in self.names and kind[0].isupper()
            if kind == "Solution" and remote._target != kind:  # a function must not return one
                is_instance = False
            return Remote(self, number, is_instance)

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
        """Returns the solution's exception as an instance of the nearest class that the tests know.

        Raises Refused for exceptions that would end a loop or the process.
        """
        if "Exception" not in reply["raised"] or CONTROL.intersection(reply["raised"]):
            self.refuse(reply["kind"], reply["text"])
        known = vars(builtins) | self.errors
        classes = [known[name] for name in reply["raised"] if name in known]
        kind = classes[0]
        error = kind.__new__(kind, reply["text"])
        # KeyError quotes its text, and the solution's class may have several bases that tests name
        if str(error) != reply["text"] or not all(isinstance(error, base) for base in classes):
            kind = type(kind.__name__, (*classes,), {"__str__": lambda _: reply["text"]})
            error = kind.__new__(kind, reply["text"])
        error.kind_of_solution = reply["kind"]  # type: ignore[attr-defined]
        return error


class Remote:
    """A proxy for a name or an object of the solution."""

    __slots__ = ("_is_instance", "_link", "_target")
    _is_instance: bool  # True for a name, or an object of a class that the tests name
    _link: Link
    _target: str | int

    def __init__(self, link: Link, target: str | int, is_instance: bool = True) -> None:
        object.__setattr__(self, "_link", link)
        object.__setattr__(self, "_target", target)
        object.__setattr__(self, "_is_instance", is_instance)

    def __call__(self, *arguments: Any, _in_place: bool = False, **keywords: Any) -> Any:
        return self._link.ask(self, "call", arguments, keywords, in_place=_in_place)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in PLAIN and not self._is_instance:
            _refuse(self, name)
        return _ask(self, "getattr", name)

    def __contains__(self, item: Any) -> bool:
        if not self._is_instance:
            _refuse(self, "in")
        return _ask(self, "contains", item)

    def __eq__(self, other: object) -> bool:
        return other is not None and _refuse(self, "==")


def _refuse(remote: Remote, operation: str, *_: Any) -> NoReturn:
    remote._link.refuse("wrong_answer", f"{operation} of an object that the solution returned")


def _ask(remote: Remote, operation: str, *arguments: Any) -> Any:
    return remote._link.ask(remote, operation, arguments, {})


for _method, _names in ((_ask, GIVING), (_refuse, REFUSED)):
    for _name in _names.split():
        setattr(Remote, f"__{_name}__", partialmethod(_method, _name))


def _number(value: Any) -> int:
    if isinstance(value, Remote) and isinstance(value._target, int):
        return value._target
    raise Unjudgeable(
        f"an argument is a {type(value).__name__}, which cannot be sent to the solution"
    )


def _verdict(error: BaseException, link: Link) -> str:
    kind = getattr(error, "kind_of_solution", "")
    if kind:
        return kind
    # after a reply in this test, the solution may have caused the error
    if isinstance(error, Unjudgeable) and not link.num_replies:
        return "unjudgeable"
    if isinstance(error, ModuleNotFoundError) and not link.num_replies:
        return "bad_tests"
    return "wrong_answer"


def _sized(found: Any, expected: Any) -> Any:
    """Returns a copy of `found`, which NumPy then compares with `expected`.

    Raises AssertionError if it has fewer items, or any where none are expected: NumPy would
    broadcast them to any shape.
    """
    import numpy as np

    found = deepcopy(found)  # refuses proxies, whose data may differ in a later request
    size, least = (np.array(side, object).size for side in (found, expected))
    if size < least or (size and not least):
        raise AssertionError("other items than expected")
    return found


def run_tests(requests: BinaryIO, report: int) -> None:
    """Executes requests: first {"names", "errors"} of the solution, then {"run": text} for each
    test.
    """
    link = Link(requests, report, json.loads(requests.readline()))
    namespace = {"__name__": "tests", "_call_test": lambda test: test(), "_sized": _sized}
    namespace |= link.errors
    namespace |= {name: Remote(link, name) for name in link.names}
    write(report, {"ready": True})
    for line in requests:
        verdict = ""
        why = ""
        link.refusal = ""
        link.num_replies = 0
        try:
            text = json.loads(line)["run"]
            exec(compile(text, "tests.py", "exec", annotations.compiler_flag), namespace)
        except BaseException as error:  # noqa: BLE001 (tests may raise anything)
            verdict = _verdict(error, link)
            why = f"{type(error).__name__}: {error}"[:200]
        write(report, {"verdict": link.refusal or verdict, "why": why})
