"""The code whose weight syncs `benchmarks.gpu_contract sync` has compared, as a hash.

Comments, docstrings, formatting and the version of Python do not change it.
"""

from __future__ import annotations

import ast
import tomllib
from hashlib import sha256
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("megarl/weights", "megarl/models", "megarl/rollout/vllm")


def code_hash(root: Path = ROOT) -> str:
    """16 hexadecimal digits, of the code in FOLDERS and of the pins of `megarl[gpu]`."""
    digest = sha256()
    for folder in FOLDERS:
        for file in sorted((root / folder).rglob("*.py")):
            parts = (file.relative_to(root).as_posix(), structure(ast.parse(file.read_text())))
            digest.update(repr(parts).encode())
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    digest.update(repr(sorted(project["optional-dependencies"]["gpu"])).encode())
    return digest.hexdigest()[:16]


def structure(value: Any) -> Any:
    """A syntax tree as tuples, without strings that are statements, empty fields and positions."""
    if isinstance(value, list):
        return [structure(item) for item in value if not _is_text(item)]
    if not isinstance(value, ast.AST):
        return repr(value)
    fields = [
        (name, structure(field))
        for name, field in ast.iter_fields(value)
        if field is not None and field != [] and name != "kind"
    ]
    return (type(value).__name__, fields)


def _is_text(item: Any) -> bool:
    return (
        isinstance(item, ast.Expr)
        and isinstance(item.value, ast.Constant)
        and isinstance(item.value.value, str)
    )
