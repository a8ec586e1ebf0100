"""Runs a program, or serves calls of a solution, after `jailed.drop_rights`."""

from __future__ import annotations

import builtins
import errno
import json
import operator
import os
import sys
import types
from collections.abc import Callable
from itertools import islice
from typing import Any, BinaryIO

from megarl.jail.values import MAX_ITEMS, JailMessage, decode, encode, failure

LAZY_ANNOTATIONS = annotations.compiler_flag  # List[int] in a signature needs no import
KINDS = {
    MemoryError: "memory",
    PermissionError: "forbidden",
    AssertionError: "wrong_answer",
    SystemExit: "exited",
}
BY_ERRNO = {
    errno.EXDEV: "forbidden",  # a link out of the folder
    errno.EFBIG: "disk",
    errno.ENOSPC: "disk",
}


def failure_kind(error: BaseException) -> str:
    if isinstance(error, OSError) and error.errno in BY_ERRNO:
        return BY_ERRNO[error.errno]
    for error_class, kind in KINDS.items():
        if isinstance(error, error_class):
            return kind
    return "exception"


def load(source: str, name: str) -> tuple[dict[str, Any], str]:
    """Runs `source` as the module `name`.

    Returns (namespace, kind of failure); the kind is "" if the code succeeded.
    """
    module = types.ModuleType(name)
    sys.modules[name] = module
    reserve = bytearray(1 << 20)  # freed so that a MemoryError can be handled
    try:
        flags = 0 if "__annotations__" in source else LAZY_ANNOTATIONS
        program = compile(source, "solution.py", "exec", flags, dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {}, "syntax"
    try:
        exec(program, module.__dict__)
        if name == "__main__" and not getattr(sys.stdout, "closed", False):
            sys.stdout.flush()
    except BaseException as error:  # noqa: BLE001 (generated code may raise anything)
        del reserve
        return module.__dict__, failure_kind(error)
    return module.__dict__, ""


# copied before the solution can change the originals
OPERATIONS: dict[str, Callable[..., Any]] = {
    **vars(builtins),
    **vars(operator),
    "iter": lambda value: islice(value, MAX_ITEMS),
    "reversed": lambda value: islice(reversed(value), MAX_ITEMS),
}


def execute(request: JailMessage, namespace: dict[str, Any], objects: list[Any]) -> JailMessage:
    """Applies an operation to a name or an object of the solution and returns the reply.

    {do, target, arguments, keywords?, in_place?} -> {value, arguments?} or {raised, text, kind}
    """

    def refer(value: Any) -> int:
        objects.append(value)
        return len(objects) - 1

    def resolve(number: int, _class: str) -> Any:
        return objects[number]

    def lookup(name: str | int) -> Any:
        """Returns an object by number, a global of the solution, or a method of its Solution."""
        if isinstance(name, int):
            return objects[name]
        if name in namespace:
            return namespace[name]
        if "Solution" in namespace:
            return getattr(namespace["Solution"](), name)
        raise NameError(f"name {name!r} is not defined")

    try:
        arguments = [decode(argument, resolve) for argument in request["arguments"]]
        keywords = {
            name: decode(argument, resolve)
            for name, argument in request.get("keywords", {}).items()
        }
        target = lookup(request["target"])
        value = OPERATIONS[request["do"]](target, *arguments, **keywords)
        reply = {"value": encode(value, refer)}
        if request.get("in_place"):
            reply["arguments"] = [encode(argument, refer) for argument in arguments]
        return reply
    except BaseException as error:  # noqa: BLE001 (generated code may raise anything)
        names = [kind.__name__ for kind in type(error).__mro__]
        return {"raised": names, "text": str(error)[:1000], "kind": failure_kind(error)}


def serve(source: str, requests: BinaryIO, report: int) -> str:
    """Loads the solution and executes requests, one per line, until the input ends.

    Returns the kind of failure if the solution does not load, else "".
    """
    namespace, kind = load(source, "solution")
    if kind:
        return kind
    write(report, {"loaded": True})
    objects = []
    for line in requests:
        write(report, execute(json.loads(line), namespace, objects))
    return ""


def write(report: int, line: JailMessage, dumps: Any = json.dumps, send: Any = os.write) -> None:
    try:
        data = dumps(line).encode() + b"\n"
    except (ValueError, RecursionError, MemoryError) as error:
        data = dumps(failure(type(error).__name__)).encode() + b"\n"
    while data:
        data = data[send(report, data) :]
