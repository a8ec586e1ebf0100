"""Writes signatures.json: what the wheels of the GPU packages pinned in pyproject.toml offer of what megarl uses.

    python tests/contract/wheels.py [--wheels DIR]      DIR has the wheels; without it they are downloaded (0.4 GB)

Nothing is installed or imported: files are read out of the wheels and parsed. Re-exports and base classes are followed
within a wheel. Exits with 1, naming file, line and path, if megarl uses something that a wheel does not have.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import inspect
import json
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import torch
from calls import (
    FORWARDED,
    KINDS,
    PROVIDES,
    RENAMED,
    Function,
    Signatures,
    Use,
    as_text,
    is_in,
    prefixes,
    problems,
    signature,
    uses,
)
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
FILE = Path(__file__).with_name("signatures.json")
EXTRAS = {"3.11": ("cpu", "ray"), "3.12": ("gpu", "ray")}  # Python -> what is installed with it
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux2014_x86_64", "manylinux_2_24_x86_64", "any")


@dataclass(frozen=True, slots=True)
class Module:
    name: str


@dataclass(frozen=True, slots=True)
class Class:
    module: str
    node: ast.ClassDef


@dataclass(frozen=True, slots=True)
class Callable:
    module: str
    node: Function
    is_bound: bool


@dataclass(frozen=True, slots=True)
class Instance:
    of: Class


@dataclass(frozen=True, slots=True)
class Unknown:
    """A value whose type cannot be read, or an object of another package: `name` if it was imported from there."""

    name: str = ""


Found = Module | Class | Callable | Instance | Unknown


class Missing(Exception):
    pass


class Wheel:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._zip = ZipFile(path)
        self._files = {name for name in self._zip.namelist() if name.endswith(".py")}
        self._trees: dict[str, ast.Module] = {}

    def signatures(self, path: str) -> Signatures:
        """Of every prefix of `path`, up to the first whose type cannot be read. Raises Missing."""
        found: Found | None = None
        texts: dict[str, str] = {}
        for prefix in prefixes(path):
            name = prefix.rpartition(".")[2]
            found = (
                self._call(found) if prefix.endswith("()") and found else self._member(found, name)
            )
            texts[prefix] = self._text(found)
            if isinstance(found, Unknown):
                break
        return texts

    def _file(self, module: str) -> str | None:
        stem = module.replace(".", "/")
        return next(
            (name for name in (f"{stem}/__init__.py", f"{stem}.py") if name in self._files), None
        )

    def _exists(self, module: str) -> bool:
        return any(name.startswith(f"{module.replace('.', '/')}/") for name in self._files) or bool(
            self._file(module)
        )

    def _text(self, found: Found) -> str:
        if isinstance(found, Callable):
            return as_text(signature(found.node.args, skip=int(found.is_bound)))
        if isinstance(found, Class):
            return as_text(self._constructor(found))
        if isinstance(found, Instance):
            return f": {found.of.module}.{found.of.node.name}"
        return f": {found.name}" if isinstance(found, Module) else ""

    def _member(self, found: Found | None, name: str) -> Found:
        if found is None or isinstance(found, Module):
            return self._in_module(found.name if found else "", name)
        if isinstance(found, Class | Instance):
            return self._in_class(found, name)
        raise Missing

    def _in_module(
        self, module: str, name: str, seen: frozenset[tuple[str, str]] = frozenset()
    ) -> Found:
        inner = f"{module}.{name}" if module else name
        # a package may import itself
        statements = self._statements(module) if (module, name) not in seen else ()
        seen |= {(module, name)}
        for node in statements:
            if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names):
                try:
                    return self._in_module(self._source(module, node), name, seen)
                except Missing:
                    continue
            for bound, make in self._bindings(module, node, seen):
                if bound == name:
                    return make()
        if self._exists(inner):
            return Module(inner)
        raise Missing

    def _statements(self, module: str) -> Iterator[ast.stmt]:
        """Of a module's top level, and of its branches, where the first definition of a name counts."""
        file = self._file(module)
        if file is None:
            return
        if module not in self._trees:
            self._trees[module] = ast.parse(self._zip.read(file))
        waiting: list[ast.stmt] = list(self._trees[module].body)
        while waiting:
            node = waiting.pop(0)
            if isinstance(node, ast.If | ast.Try | ast.With):
                nested = [*node.body, *getattr(node, "orelse", ())]
                nested += [x for handler in getattr(node, "handlers", ()) for x in handler.body]
                waiting[:0] = nested
            else:
                yield node

    def _bindings(
        self, module: str, node: ast.stmt, seen: frozenset[tuple[str, str]]
    ) -> Iterator[tuple[str, Any]]:
        if isinstance(node, ast.ClassDef):
            yield node.name, lambda: Class(module, node)
        elif isinstance(node, Function):
            yield node.name, lambda: Callable(module, node, is_bound=False)
        elif isinstance(node, ast.ImportFrom):
            source = self._source(module, node)
            for alias in node.names:
                yield (
                    alias.asname or alias.name,
                    lambda alias=alias: self._imported(source, alias.name, seen),
                )
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield (
                    alias.asname or alias.name.split(".")[0],
                    lambda alias=alias: self._imported("", alias.name, seen),
                )
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            value = node.value
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    yield target.id, lambda: self._typed(module, value) if value else Unknown()

    def _source(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        is_package = str(self._file(module)).endswith("__init__.py")
        parents = module.split(".")
        parents = parents[: len(parents) - node.level + is_package]
        return ".".join([*parents, *([node.module] if node.module else [])])

    def _imported(self, module: str, name: str, seen: frozenset[tuple[str, str]]) -> Found:
        whole = f"{module}.{name}" if module else name
        if not self._exists(whole.split(".")[0]):
            return Unknown(whole)
        if not module:
            return Module(name) if self._exists(name) else Unknown(name)
        return self._in_module(module, name, seen)

    def _typed(self, module: str, node: ast.expr) -> Found:
        """What an expression of a module evaluates to."""
        try:
            if isinstance(node, ast.Name):
                return self._in_module(module, node.id)
            if isinstance(node, ast.Attribute) and not isinstance(
                found := self._typed(module, node.value), Unknown
            ):
                return self._member(found, node.attr)
            if isinstance(node, ast.Call):
                return self._call(self._typed(module, node.func))
        except Missing:
            pass
        return Unknown()

    def _annotated(self, module: str, node: ast.expr | None) -> Found:
        """An instance of the class that an annotation names."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node = ast.parse(node.value, mode="eval").body
        found = self._typed(module, node) if node else Unknown()
        return Instance(found) if isinstance(found, Class) else Unknown()

    def _call(self, found: Found) -> Found:
        if isinstance(found, Class):
            return Instance(found)
        return (
            self._annotated(found.module, found.node.returns)
            if isinstance(found, Callable)
            else Unknown()
        )

    def _bases(self, owner: Class) -> Iterator[Class | Unknown]:
        """The class itself, then its bases, depth first."""
        yield owner
        for base in owner.node.bases:
            generic = base.value if isinstance(base, ast.Subscript) else base
            found = self._typed(owner.module, generic)
            if isinstance(found, Class):
                yield from self._bases(found)
            elif isinstance(generic, ast.Attribute | ast.Name):
                name = self._full_name(owner.module, generic)
                yield Unknown(name)

    def _full_name(self, module: str, node: ast.expr) -> str:
        if isinstance(node, ast.Attribute):
            return f"{self._full_name(module, node.value)}.{node.attr}"
        assert isinstance(node, ast.Name)
        try:
            found = self._in_module(module, node.id)
        except Missing:
            return node.id  # a builtin
        return found.name if isinstance(found, Unknown | Module) else ""

    def _in_class(self, found: Class | Instance, name: str) -> Found:
        owner = found.of if isinstance(found, Instance) else found
        for base in self._bases(owner):
            if isinstance(base, Unknown):
                if base.name.startswith("torch.") and hasattr(_from_torch(base.name), name):
                    return Unknown()
                continue
            nodes = [x for x in base.node.body if isinstance(x, Function) and x.name == name]
            decorators = {
                ast.unparse(x).rpartition(".")[2] for node in nodes for x in node.decorator_list
            }
            if nodes and decorators & {"property", "cached_property"}:
                return self._annotated(base.module, nodes[0].returns)
            if nodes:  # the last of its overloads
                is_bound = "staticmethod" not in decorators and (
                    isinstance(found, Instance) or "classmethod" in decorators
                )
                return Callable(base.module, nodes[-1], is_bound)
            if attribute := self._attribute(base, name):
                return attribute
            if any(isinstance(x, Function) and x.name == "__getattr__" for x in base.node.body):
                return Unknown()
        raise Missing

    def _attribute(self, owner: Class, name: str) -> Found | None:
        """A field or variable of the class, or what a method assigns to `self.name`."""
        for node in ast.walk(owner.node):
            targets = (
                node.targets if isinstance(node, ast.Assign) else getattr(node, "target", None)
            )
            for target in targets if isinstance(targets, list) else [targets]:
                is_field = (
                    isinstance(target, ast.Name) and target.id == name and node in owner.node.body
                )
                if is_field or (
                    isinstance(target, ast.Attribute) and ast.unparse(target) == f"self.{name}"
                ):
                    if isinstance(node, ast.AnnAssign):
                        return self._annotated(owner.module, node.annotation)
                    value = node.value if isinstance(node, ast.Assign) and not is_field else None
                    return (
                        self._typed(owner.module, value)
                        if isinstance(value, ast.Call)
                        else Unknown()
                    )
        return None

    def _constructor(self, owner: Class) -> inspect.Signature:
        for base in self._bases(owner):
            if isinstance(base, Unknown):
                continue
            for node in base.node.body:
                if isinstance(node, Function) and node.name in ("__init__", "__new__"):
                    return signature(node.args, skip=1)
            if self._has_fields(base):
                # a dataclass may list keyword-only fields first
                return inspect.Signature(
                    sorted(self._fields(base).values(), key=lambda field: field.kind)
                )
        anything = (
            inspect.Parameter("args", KINDS.VAR_POSITIONAL),
            inspect.Parameter("kwargs", KINDS.VAR_KEYWORD),
        )
        is_plain = not [x for x in self._bases(owner) if isinstance(x, Unknown)]
        return inspect.Signature(() if is_plain else anything)

    def _has_fields(self, owner: Class) -> bool:
        is_struct = any(
            isinstance(base, Unknown) and base.name == "msgspec.Struct"
            for base in self._bases(owner)
        )
        return is_struct or any("dataclass" in ast.unparse(x) for x in owner.node.decorator_list)

    def _fields(self, owner: Class) -> dict[str, inspect.Parameter]:
        """Of a dataclass, those of its bases first."""
        fields: dict[str, inspect.Parameter] = {}
        for base in owner.node.bases:
            found = self._typed(owner.module, base)
            fields |= self._fields(found) if isinstance(found, Class) else {}
        only = any("kw_only=True" in ast.unparse(x) for x in owner.node.decorator_list)
        for node in owner.node.body if self._has_fields(owner) else ():
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                value = ast.unparse(node.value) if node.value else None
                if "ClassVar" not in ast.unparse(node.annotation) and "init=False" not in (
                    value or ""
                ):
                    is_given = value and (not value.startswith("field(") or "default" in value)
                    kind = KINDS.KEYWORD_ONLY if only else KINDS.POSITIONAL_OR_KEYWORD
                    default = ... if is_given else KINDS.empty
                    fields[node.target.id] = inspect.Parameter(
                        node.target.id, kind, default=default
                    )
        return fields


def _from_torch(name: str) -> object:
    found: object = torch
    for part in name.split(".")[1:]:
        found = getattr(found, part, None)
    return found


def pins(text: str) -> list[tuple[Requirement, str]]:
    """The requirements of EXTRAS for each Python version, of packages that megarl may import."""
    extras = tomllib.loads(text)["project"]["optional-dependencies"]
    found = []
    for python, names in EXTRAS.items():
        for requirement in (Requirement(line) for name in names for line in extras[name]):
            marker = requirement.marker
            applies = marker is None or marker.evaluate({"python_version": python})
            if requirement.name in PROVIDES and applies:
                found.append((requirement, python))
    return found


def download(requirement: Requirement, python: str, folder: Path) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
    ]
    command += ["--python-version", python, "--dest", str(folder / python)]
    command += [option for platform in PLATFORMS for option in ("--platform", platform)]
    subprocess.run([*command, f"{requirement.name}{requirement.specifier}"], check=True)
    return next((folder / python).glob(f"{requirement.name.replace('-', '_')}-*.whl"))


def read(
    path: Path, found: Sequence[Use], package: str, python: str
) -> tuple[dict[str, Any], list[str]]:
    """One entry of signatures.json, and the uses that the wheel does not have."""
    wheel, texts, missing = Wheel(path), dict[str, str](), list[Use]()
    wanted = [Use("", name) for name in FORWARDED.values()] + list(found)
    for use in wanted:
        if is_in(use.path, package):
            try:
                texts |= wheel.signatures(use.path)
            except Missing:
                if use.where and not use.override:
                    missing.append(use)
    paths = {use.path for use in wanted}
    absent = [use for use in missing if RENAMED.get(use.path) not in texts]
    wrong = [f"{use.where}: {use.path} is not in {path.name}" for use in absent]
    wrong += problems([use for use in found if use.path in texts], texts)
    distribution, version = path.name.split("-")[:2]
    entry = {
        "package": distribution.replace("_", "-"),
        "version": version,
        "python": python,
        "wheel": path.name,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "signatures": {
            name: text
            for name, text in sorted(texts.items())
            if text != f": {name}" or name in paths
        },
    }
    return entry, wrong


def sources() -> dict[str, str]:
    files = sorted((ROOT / "megarl").rglob("*.py"))
    return {file.relative_to(ROOT).as_posix(): file.read_text(encoding="utf-8") for file in files}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--wheels", metavar="DIR", type=Path)
    given: Path | None = parser.parse_args().wheels
    found, entries, missing = uses(sources()), dict[str, Any](), list[str]()
    with tempfile.TemporaryDirectory() as temporary:
        for requirement, python in pins((ROOT / "pyproject.toml").read_text()):
            package = PROVIDES[requirement.name]
            if not any(is_in(use.path, package) for use in found):
                continue
            stem = requirement.name.replace("-", "_")
            if given:
                versions = (
                    path for path in sorted(given.glob(f"{stem}-*.whl")) if _fits(path, requirement)
                )
                path = next(versions)
            else:
                path = download(requirement, python, Path(temporary))
            if path.name in entries:
                entries[path.name]["python"] += f" {python}"
                continue
            entries[path.name], absent = read(path, found, package, python)
            missing += absent
    print(*missing, sep="\n")
    if not missing:
        FILE.write_text(json.dumps(list(entries.values()), indent=1) + "\n")
    return 1 if missing else 0


def _fits(path: Path, requirement: Requirement) -> bool:
    return requirement.specifier.contains(path.name.split("-")[1])


if __name__ == "__main__":
    raise SystemExit(main())
