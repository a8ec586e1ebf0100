"""Describes the keys of the config: type, default, text, and the checks and presets that use them.

The texts are the attribute docstrings of the sections; `megarl explain`, the reference of the
documentation and the errors for unknown keys read them here.
"""

import ast
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel

from megarl.config.presets import PRESETS
from megarl.config.schema import Config
from megarl.config.section import Options

TYPES = {"string": "text", "boolean": "true or false", "object": "mapping"}  # of JSON schema
BOUNDS = {
    "exclusiveMinimum": "above",
    "minimum": "at least",
    "exclusiveMaximum": "below",
    "maximum": "at most",
    "pattern": "matching",
}


@dataclass(frozen=True)
class Key:
    """A key of the config."""

    name: str  # dotted; the index of a list is left out: rewards.weight
    kind: str  # type, bounds and default: "integer above 0; default 256"
    text: str
    is_section: bool


def keys(section: type[BaseModel] = Config, prefix: str = "") -> Iterator[Key]:
    """Yields the keys of a section, each section before its own keys."""
    properties = section.model_json_schema()["properties"]
    for name, field in section.model_fields.items():
        schema = properties[name]
        inner = _section(field.annotation)
        kind = _kind(schema)
        for names in filter(None, map(_names, field.metadata)):
            kind = _choice(names)
        default = "required"
        if "default" in schema:
            default = f"default {json.dumps(schema['default'])}"
        kind = "section" if inner else f"{kind}; {default}"
        text = " ".join((field.description or "").split())
        yield Key(prefix + name, kind, text, inner is not None)
        if inner:
            yield from keys(inner, f"{prefix}{name}.")


def checks_of(key: str) -> Iterator[str]:
    """Yields the conditions under which the checks that read a key raise ValueError, from their
    docstrings: "if rows can exceed the maximum length of the engine or the model."
    """
    section, _, name = key.rpartition(".")
    section = section.rpartition(".")[2]
    for file in sorted(Path(__file__).parent.glob("*.py")):
        text = file.read_text(encoding="utf-8")
        for node in ast.parse(text).body:
            if not isinstance(node, ast.FunctionDef) or "check_" not in node.name:
                continue
            source = ast.get_source_segment(text, node) or ""
            is_read = re.search(rf"\.{name}\b", source) and re.search(rf"\b{section}\b", source)
            what, raises, cause = (ast.get_docstring(node) or "").partition("Raises ValueError ")
            if section and is_read and raises and not what:
                yield " ".join(cause.split())


def presets_of(key: str) -> dict[str, Any]:
    """Returns {preset: value} of the presets that set a key."""
    values = {}
    for preset, settings in PRESETS.items():
        value: Any = {"algorithm": settings}
        for name in key.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        if value is not None:
            values[preset] = value
    return values


def _section(annotation: Any) -> type[BaseModel] | None:
    """Returns the section class in an annotation such as `Create | None` or `tuple[Reward, ...]`;
    None if there is none.
    """
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_section, get_args(annotation))), None)


def _names(metadata: Any) -> tuple[str, ...]:
    """Returns the names that `section.one_of` accepts; empty for other metadata of a field."""
    return getattr(getattr(metadata, "func", None), "keywords", {}).get("names", ())


def _kind(schema: Options) -> str:
    """Returns the type in a JSON schema, in words."""
    if "anyOf" in schema:
        return " or ".join(map(_kind, schema["anyOf"]))
    if "enum" in schema:
        return _choice(schema["enum"])
    kind = str(schema.get("const", schema.get("type", "any value")))
    kind = TYPES.get(kind, kind)
    items = schema.get("items")
    if items:
        kind = f"list of {_kind(items)}"
    if "prefixItems" in schema:
        kind = f"list [{', '.join(map(_kind, schema['prefixItems']))}]"
    bounds = [f"{word} {schema[key]}" for key, word in BOUNDS.items() if key in schema]
    return " ".join([kind, " and ".join(bounds)]).strip()


def _choice(names: list[Any] | tuple[str, ...]) -> str:
    *others, last = map(str, names)
    return f"{', '.join(others)} or {last}"
