"""The untrusted code, after `jailed.drop_rights`: runs a program, or executes requests and reports their results.

stdio: solution.py as a program     calls: requests.json, one JSON line per request on the report pipe
"""

from __future__ import annotations

import json
import os
import sys
import types
from collections.abc import Callable
from typing import Any

LAZY_ANNOTATIONS = annotations.compiler_flag  # List[int] in a signature needs no import


def failure_kind(error: BaseException) -> str:
    if isinstance(error, MemoryError):
        return "memory"
    if isinstance(error, PermissionError) or (isinstance(error, OSError) and error.errno == 18):  # EXDEV: a link out
        return "forbidden"
    if isinstance(error, OSError) and error.errno in (27, 28):  # EFBIG, ENOSPC
        return "disk"
    if isinstance(error, AssertionError):
        return "wrong_answer"
    if isinstance(error, SystemExit):
        return "exited"
    return "exception"


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
    kind = load(source, "__main__")[1]
    return "" if kind == "exited" else kind


def to_json(value: Any) -> Any:
    """Plain data as JSON, with tags for types that JSON lacks (sandbox.from_json reads them back).

    Raises TypeError for any other value.
    """
    if value is None or isinstance(value, (bool, str, float)):
        return str.__str__(value) if isinstance(value, str) else value
    if isinstance(value, int):
        return int.__index__(value) if -(2**63) <= value < 2**63 else {"int": int.__format__(value, "x")}
    kind: Any
    for kind in (tuple, list, set, frozenset):
        if isinstance(value, kind):
            return {"set" if kind is frozenset else kind.__name__: [to_json(item) for item in kind.__iter__(value)]}
    if isinstance(value, dict):
        return {"dict": [[to_json(key), to_json(item)] for key, item in dict.items(value)]}
    if type(value).__module__ == "collections":  # deque
        return {"list": [to_json(item) for item in value]}
    if hasattr(value, "tolist"):  # NumPy
        return to_json(value.tolist())
    raise TypeError(f"{type(value).__name__} is not plain data")


def execute_request(request: dict[str, Any], namespace: dict[str, Any]) -> dict[str, Any]:
    """Run a {statement}, {expression} or {call, arguments}. Returns its `value`, or its `error` and the reason."""
    try:
        if "statement" in request:
            exec(request["statement"], namespace)
            return {"value": True}
        if "expression" in request:
            value = eval(request["expression"], namespace)
        else:
            name = request["call"]
            function = namespace[name] if name in namespace else getattr(namespace["Solution"](), name)
            value = function(*request["arguments"])
        return {"value": to_json(value)}
    except BaseException as error:  # noqa: BLE001 (generated code may raise anything)
        return {"error": failure_kind(error), "why": f"{type(error).__name__}: {error}"[:200]}


def run_calls(source: str, requests: list[dict[str, Any]], report: int) -> str:
    namespace, kind = load(source, "solution")
    if not kind:
        write(report, {"loaded": True})
        for number, request in enumerate(requests):
            write(report, {"number": number, **execute_request(request, namespace)})
    return kind


def write(report: int, line: dict[str, Any], dumps: Any = json.dumps, send: Any = os.write) -> None:
    try:
        data = dumps(line).encode() + b"\n"
    except (ValueError, RecursionError, MemoryError) as error:
        data = dumps({"number": line.get("number"), "error": "exception", "why": type(error).__name__}).encode() + b"\n"
    while data:
        data = data[send(report, data) :]


def main(spec: dict[str, Any], drop_rights: Callable[[dict[str, Any]], dict[str, str]]) -> None:
    report = spec["report"]
    with open("solution.py", encoding="utf-8", errors="surrogateescape") as file:
        source = file.read()
    requests = []
    if spec["mode"] == "calls":
        with open("requests.json", encoding="utf-8") as file:
            requests = json.load(file)
    sys.path += spec["packages"]
    missing = drop_rights(spec)
    write(report, {"missing": missing})
    if spec["mode"] == "probe" or (missing and spec["strict"]):
        return
    kind = run_stdio(source) if spec["mode"] == "stdio" else run_calls(source, requests, report)
    write(report, {"end": kind})
    if spec["mode"] == "calls":
        os._exit(0)  # in stdio mode Python waits for the program's threads
