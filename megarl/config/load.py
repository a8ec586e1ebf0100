"""YAML file + preset values + `key=value` overrides -> frozen `Config`, or a one-line error.

    file ---+
    preset -+-> nested dict --pydantic--> Config --resolved_yaml--> runs/<name>/config.yaml
    k=v ----+

Explicit values take precedence over the preset's. Every error is a `ValueError` that gives the key, its value, where it
is set, and what is allowed.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from megarl.config.names import LOSS_BOUNDS
from megarl.config.presets import PRESETS
from megarl.config.schema import Config, Task

__all__ = ["load_config", "parse_config", "resolved_yaml", "run_dir"]

COMMAND_LINE = "on the command line"
NAMED_OPTIONS = ("advantage", "loss", "correction")  # each has `<name>_options`, which belong to the named function
RENAMED = {  # key of an earlier version -> its present name
    "algorithm.bypass": "algorithm.use_rollout_logprobs",
    "algorithm.kl.is_ratio": "algorithm.kl.importance_weighted",
    "algorithm.select_options": "algorithm.token_selection_options",
    "checkpoint.hf": "checkpoint.export_hf",
    "rollout.sleep": "rollout.sleep_level",
    "sync.staged": "sync.atomic",
    "train.optimizer_on_host": "train.optimizer_cpu_offload",
}


class _Loader(yaml.SafeLoader):
    """Safe YAML in which 1e-6 is a number."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read the config in `path` and apply `overrides` ("section.key=value").

    Raises ValueError or FileNotFoundError with a one-line message.
    """
    file = Path(path)
    if not file.is_file():
        near = difflib.get_close_matches(file.stem, [p.stem for p in file.parent.glob("*.yaml")], n=3)
        hint = f"; did you mean {' or '.join(str(file.parent / n) + '.yaml' for n in near)}?" if near else ""
        raise FileNotFoundError(f"config {file} does not exist{hint or '; give a YAML file'}")
    values, lines = _read_yaml(_read_text(file), str(file))
    assignments = [_parse_override(text) for text in overrides]
    _drop_replaced(values, dict(assignments))
    for key, value in assignments:
        _assign(values, key, value)
        lines[key] = COMMAND_LINE
    return parse_config(values, lines, source=str(file))


def parse_config(
    values: Mapping[str, Any], lines: Mapping[str, str] | None = None, *, source: str = "config"
) -> Config:
    """Build a config from the nested dict of a file.

    `lines` maps dotted keys to where they are set, for error messages. Raises ValueError with a one-line message.
    """
    merged = deepcopy(dict(values))
    where = _Where(lines or {}, source)
    if unknown := next(_unknown_keys(merged, Config, ""), None):
        key, near, known = unknown
        if key in RENAMED:
            raise ValueError(f"{key} {where(key)} has been renamed; use {RENAMED[key]}")
        hint = f"did you mean {' or '.join(near)}?" if near else f"known keys here: {', '.join(known)}"
        raise ValueError(f"unknown key {key} {where(key)}; {hint}")
    algorithm = merged.get("algorithm")
    if algorithm is None or isinstance(algorithm, dict):
        merged["algorithm"] = _with_preset(algorithm or {}, where)
    try:
        return Config.model_validate(merged)
    except ValidationError as error:
        raise ValueError(_explain(error, where)) from None


def resolved_yaml(config: Config) -> str:
    """All values as YAML, including the preset's; reading it back gives the same config."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=110)


def run_dir(config: Config) -> Path:
    return Path(config.run.dir) / config.run.name


class _Where:
    """Describes where a dotted key is set: `in FILE line N`, or `on the command line`."""

    def __init__(self, lines: Mapping[str, str], source: str) -> None:
        self.lines, self.source = lines, source

    def __call__(self, key: str) -> str:
        while key and key not in self.lines:
            key = key.rpartition(".")[0]
        return self.lines.get(key, f"in {self.source}")


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 text ({error.reason} at byte {error.start}); save it as UTF-8") from None


def _read_yaml(text: str, name: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The nested values of a YAML document, and the line of each dotted key."""
    lines: dict[str, str] = {}

    def walk(node: yaml.Node | None, prefix: str) -> None:
        if isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                walk(item, f"{prefix}.{index}")
        if not isinstance(node, yaml.MappingNode):
            return
        for key_node, value_node in node.value:
            key = f"{prefix}.{key_node.value}" if prefix else str(key_node.value)
            line = f"in {name} line {key_node.start_mark.line + 1}"
            if key in lines:
                raise ValueError(f"{key} is given twice, {lines[key]} and {line}; remove one")
            lines[key] = line
            walk(value_node, key)

    try:
        walk(yaml.compose(text, Loader=_Loader), "")
        values = yaml.load(text, Loader=_Loader)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ValueError(f"{name} line {line} is not YAML: {error.reason}; remove {text[error.position]!r}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark else ""
        problem = " ".join(str(getattr(error, "problem", None) or error).split())
        raise ValueError(f"{name}{line} is not YAML: {problem}; check indentation and colons") from None
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise ValueError(f"{name} contains a {type(values).__name__}, not sections; see configs/quickstart.yaml")
    return values, lines


def _parse_override(text: str) -> tuple[str, Any]:
    key, equals, raw = text.partition("=")
    key = key.strip().removeprefix("--")
    if not equals or not re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*", key):
        raise ValueError(
            f"{text!r} on the command line is not an override; write section.key=value, e.g. train.steps=10"
        )
    try:
        return key, yaml.load(raw, Loader=_Loader)
    except yaml.YAMLError:
        raise ValueError(f"the value of {key}={raw!r} is not YAML; quote it") from None


def _drop_replaced(values: dict[str, Any], overrides: Mapping[str, Any]) -> None:
    """Remove settings of a model or task that the command line replaces by another."""
    model, task = values.get("model"), values.get("task")
    if "model.path" in overrides and isinstance(model, dict):
        model.pop("create", None)
    if "task.name" in overrides and isinstance(task, dict) and overrides["task.name"] != task.get("name", Task().name):
        task.pop("options", None)


def _assign(values: dict[str, Any], key: str, value: Any) -> None:
    *path, last = key.split(".")
    node = values
    for name in path:
        if not isinstance(node.get(name), dict):
            node[name] = {}  # replaces a null or plain value; pydantic validates the result
        node = node[name]
    node[last] = value


def _with_preset(explicit: dict[str, Any], where: _Where) -> dict[str, Any]:
    name = explicit.get("preset", "grpo")
    if not isinstance(name, str) or name not in PRESETS:
        near = difflib.get_close_matches(str(name), PRESETS, n=2)
        hint = f"did you mean {' or '.join(near)}?" if near else f"choose from: {', '.join(PRESETS)}"
        raise ValueError(f"algorithm.preset={name!r} {where('algorithm.preset')} is unknown; {hint}")
    preset = deepcopy(dict(PRESETS[name]))
    for part in NAMED_OPTIONS:  # the preset's options belong to the preset's function
        if part in explicit and explicit[part] != preset.get(part):
            for key in (f"{part}_options", *(LOSS_BOUNDS if part == "loss" else ())):
                preset.pop(key, None)
    return _merge(preset, explicit) | {"preset": name}


def _merge(below: dict[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge recursively; `above` takes precedence."""
    for key, value in above.items():
        old = below.get(key)
        below[key] = _merge(old, value) if isinstance(old, dict) and isinstance(value, Mapping) else value
    return below


def _section(annotation: Any) -> type[BaseModel] | None:
    """The section class inside an annotation such as `Create | None` or `tuple[Reward, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (Union, UnionType, tuple, list):
        return next(filter(None, map(_section, get_args(annotation))), None)
    return None


def _known_keys(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        yield prefix + name
        if inner := _section(field.annotation):
            yield from _known_keys(inner, f"{prefix}{name}.")


def _unknown_keys(values: Any, section: type[BaseModel], prefix: str) -> Iterator[tuple[str, list[str], list[str]]]:
    """(dotted key, near names, all names of its section) of each key that is not in `section`."""
    if isinstance(values, list):
        for index, item in enumerate(values):
            yield from _unknown_keys(item, section, f"{prefix}{index}.")
        return
    if not isinstance(values, Mapping):
        return
    for key, value in values.items():
        field = section.model_fields.get(str(key))
        if field is None:
            yield f"{prefix}{key}", _near(str(key), section, prefix), list(section.model_fields)
        elif inner := _section(field.annotation):
            yield from _unknown_keys(value, inner, f"{prefix}{key}.")


def _near(key: str, section: type[BaseModel], prefix: str) -> list[str]:
    """Names similar to `key` in its section, else the same or a similar name in any section."""
    if here := difflib.get_close_matches(key, section.model_fields, n=2):
        return [prefix + name for name in here]
    everywhere = list(_known_keys(Config))
    same = [name for name in everywhere if name.rpartition(".")[2] == key]
    if same:
        return same[:3]
    last = {name.rpartition(".")[2]: name for name in everywhere}
    return [last[name] for name in difflib.get_close_matches(key, last, n=2)]


def _explain(error: ValidationError, where: _Where) -> str:
    """The first of pydantic's errors as one line: key, value, where it is set, what is allowed."""
    first, *others = error.errors()
    names = [str(part) for part in first["loc"] if not re.search(r"[\[\]' ]|^(str|int|float|bool|literal)$", str(part))]
    key = ".".join(names)
    allowed = first["msg"].removeprefix("Value error, ").replace("Input should be", "it should be")
    count = f" (and {len(others)} more)" if others else ""
    if first["type"] == "missing":
        return f"{key} is missing {where(key)}; give it a value{count}"
    return f"{key}={first['input']!r} {where(key)} is refused: {allowed}{count}"
