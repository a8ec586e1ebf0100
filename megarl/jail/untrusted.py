"""What runs after `jailed.drop_rights`: a program, a solution that is called, or the tests of a problem.

stdio       solution.py as a program
solution    solution.py, then a JSON line on the report pipe for each request on the standard input
tests       statements from the standard input (proxies.py)
"""

from __future__ import annotations

import builtins
import errno
import json
import operator
import os
import sys
import types
from collections.abc import Callable
from typing import Any, BinaryIO

from megarl.jail.proxies import run_tests
from megarl.jail.values import decode, encode, refuse

LAZY_ANNOTATIONS = annotations.compiler_flag  # List[int] in a signature needs no import
KINDS = {
    MemoryError: "memory",
    PermissionError: "forbidden",
    AssertionError: "wrong_answer",
    SystemExit: "exited",
}
BY_ERRNO = {
    errno.EXDEV: "forbidden",
    errno.EFBIG: "disk",
    errno.ENOSPC: "disk",
}  # EXDEV: a link out


def failure_kind(error: BaseException) -> str:
    if isinstance(error, OSError) and error.errno in BY_ERRNO:
        return BY_ERRNO[error.errno]
    return next((kind for kinds, kind in KINDS.items() if isinstance(error, kinds)), "exception")


def load(source: str, name: str) -> tuple[dict[str, Any], str]:
    """Run `source` as the module `name`. Returns its namespace and the kind of its failure, empty if it succeeded."""
    module = types.ModuleType(name)
    sys.modules[name] = module
    reserve = bytearray(1 << 20)  # freed to handle a MemoryError
    try:
        program = compile(source, "solution.py", "exec", LAZY_ANNOTATIONS, dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {}, "syntax"
    try:
        exec(program, module.__dict__)
        if name == "__main__":
            sys.stdout.flush()
    except BaseException as error:  # noqa: BLE001 (generated code may raise anything)
        del reserve
        return module.__dict__, failure_kind(error)
    return module.__dict__, ""


def run_stdio(source: str) -> str:
    """Run the solution as a program. Returns the kind of its failure; calling sys.exit is not one."""
    sys.argv = ["solution.py"]
    builtins.__dict__.update(exit=sys.exit, quit=sys.exit)  # as Python's site module would
    kind = load(source, "__main__")[1]
    return "" if kind == "exited" else kind


FUNCTIONS = (
    operator.call,
    getattr,
    setattr,
    len,
    iter,
    operator.getitem,
    operator.setitem,
    str,
    repr,
)
OPERATIONS: dict[str, Callable[..., Any]] = {function.__name__: function for function in FUNCTIONS}


def execute(
    request: dict[str, Any], namespace: dict[str, Any], objects: list[Any]
) -> dict[str, Any]:
    """Applies an operation to a name or object of the solution.

    {do, target, arguments, keywords?, with_objects?, in_place?} -> {value, arguments?} or {raised, text, kind}
    """

    def refer(value: Any) -> int:
        known = next((number for number, item in enumerate(objects) if item is value), len(objects))
        objects[known:] = objects[known:] or [value]
        return known

    try:
        resolve = objects.__getitem__
        arguments = [decode(argument, resolve) for argument in request["arguments"]]
        keywords = {
            name: decode(argument, resolve)
            for name, argument in request.get("keywords", {}).items()
        }
        target = request["target"]
        target = objects[target] if isinstance(target, int) else lookup(target, namespace)
        value = OPERATIONS[request["do"]](target, *arguments, **keywords)
        reply = {"value": encode(value, refer if request.get("with_objects") else refuse)}
        if request.get("in_place"):
            reply["arguments"] = [encode(argument) for argument in arguments]
        return reply
    except BaseException as error:  # noqa: BLE001 (generated code may raise anything)
        names = [kind.__name__ for kind in type(error).__mro__]
        return {"raised": names, "text": str(error)[:1000], "kind": failure_kind(error)}


def lookup(name: str, namespace: dict[str, Any]) -> Any:
    """A global of the solution, or a method of its class Solution."""
    if name in namespace:
        return namespace[name]
    if "Solution" in namespace:
        return getattr(namespace["Solution"](), name)
    raise NameError(f"name {name!r} is not defined")


def serve(source: str, requests: BinaryIO, report: int) -> str:
    """Load the solution and execute requests, one a line, until there are no more."""
    namespace, kind = load(source, "solution")
    if not kind:
        write(report, {"loaded": True})
        objects: list[Any] = []
        for line in requests:
            write(report, execute(json.loads(line), namespace, objects))
    return kind


def write(report: int, line: dict[str, Any], dumps: Any = json.dumps, send: Any = os.write) -> None:
    try:
        data = dumps(line).encode() + b"\n"
    except (ValueError, RecursionError, MemoryError) as error:
        data = (
            dumps({"raised": [type(error).__name__], "text": "", "kind": "exception"}).encode()
            + b"\n"
        )
    while data:
        data = data[send(report, data) :]


def take_requests() -> BinaryIO:
    """The standard input, which the code then finds empty."""
    requests = os.fdopen(os.dup(0), "rb")
    with open(os.devnull) as null:
        os.dup2(null.fileno(), 0)
    return requests


def main(spec: dict[str, Any], drop_rights: Callable[[dict[str, Any]], dict[str, str]]) -> None:
    report, mode = spec["report"], spec["mode"]
    with open("solution.py", encoding="utf-8", errors="surrogateescape") as file:
        source = file.read()
    requests = take_requests() if mode in ("solution", "tests") else None
    sys.path += spec["packages"]
    missing = drop_rights(spec)
    write(report, {"missing": missing})
    is_refused = bool(missing) and spec["strict"]
    spec.clear()  # the code could read it in the callers' frames
    if mode == "probe" or is_refused:
        return
    if requests and mode == "tests":
        run_tests(requests, report)
    else:
        write(report, {"end": serve(source, requests, report) if requests else run_stdio(source)})
    if mode != "stdio":
        os._exit(0)  # in stdio mode Python waits for the program's threads
