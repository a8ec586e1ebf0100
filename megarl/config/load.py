"""Builds the frozen `Config` from a YAML file, preset values and `key=value` overrides.

    file ---+
    preset -+-> nested dict --pydantic--> Config --resolved_yaml--> runs/<name>/config.yaml
    k=v ----+

Explicit values take precedence over those of the preset. An error is one line with the key, the
value, where it is set, and what is allowed.
"""

import re
from collections.abc import Iterator, Sequence
from copy import deepcopy
from itertools import count
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from megarl.config.estimators import BOUND_NAMES
from megarl.config.presets import PRESETS
from megarl.config.reference import keys
from megarl.config.schema import Config, Task
from megarl.config.section import Options, did_you_mean, message_of, short

Places = dict[str, str]  # dotted key -> place where it is set
MAX_NODES = 100_000  # maximum number of nodes in a YAML text, with aliases expanded
REFUSED_SCALARS = (  # (pattern of the tag, pattern of the value, problem if both match)
    (
        "int|float",
        "^[-+]?0[0-9xob_]|:",
        "is not decimal, so readers of YAML differ; write it so, or quote it",
    ),
    ("", r"[\0-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]", "has a control character; remove it"),
)


class _YamlLoader(yaml.SafeLoader):
    """A safe YAML loader that reads 1e-6 as a number.

    Raises YAMLError for values that Python cannot represent, such as 2001-02-30.
    """

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            problem = f"{short(node.value, 100)} is not of type {node.tag.rpartition(':')[2]}"
            raise _yaml_error(node.start_mark, problem) from None


_YamlLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Reads a config file and applies `overrides` ("section.key=value").

    Raises FileNotFoundError if the file does not exist, ValueError if its content or an override is
    invalid.
    """
    file = Path(path)
    if not file.is_file():
        neighbours = [each.name for each in file.parent.glob("*.yaml")]
        hint = did_you_mean(file.name, neighbours, "pass a YAML file", most=3)
        raise FileNotFoundError(f"config {file} is not a file; {hint} (of a run: its config.yaml)")
    values, lines = _read_yaml(file)
    assignments = [_parse_override(text) for text in overrides]
    _drop_replaced(values, dict(assignments))
    for key, value in assignments:
        _assign(values, key, value)
        lines[key] = "on the command line"
    return parse_config(values, lines)


def parse_config(values: Options, lines: Places | None = None) -> Config:
    """Builds a config from nested dicts, and adds the values of the preset.

    `lines` maps a dotted key to the place where it is set, for errors. Raises ValueError for an
    invalid value or an unknown key.
    """
    merged = deepcopy(values)
    lines = lines or {}
    if merged.get("algorithm") is None:
        merged["algorithm"] = {}
    if isinstance(merged["algorithm"], dict):
        merged["algorithm"] = _with_preset(merged["algorithm"])
    try:
        return Config.model_validate(merged)
    except ValidationError as error:
        raise ValueError(_explain(error, lines)) from None


def resolved_yaml(config: Config) -> str:
    """Returns all values, including those of the preset, as YAML that parses to the same config."""
    return yaml.safe_dump(
        config.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=110
    )


def changed(config: Config, section: str, **values: Any) -> Config:
    """Returns a copy of the config with new values in a section; the values are not validated."""
    return config.model_copy(update={section: getattr(config, section).model_copy(update=values)})


def flat(values: Options, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (dotted key, value) of nested settings."""
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _origin(key: str, lines: Places) -> str:
    """Returns the place where a dotted key, or else the nearest section around it, is set: `in FILE
    line N` or `on the command line`.
    """
    while key and key not in lines:
        key = key.rpartition(".")[0]
    return lines.get(key, "in the config")


def _read_yaml(file: Path) -> tuple[Options, Places]:
    """Returns the nested values of a YAML file, and {dotted key: place}.

    Raises ValueError if the file is not valid YAML in UTF-8, or not a mapping.
    """
    lines = {"": f"in {file}"}
    try:
        values = parse_yaml(file.read_text(encoding="utf-8"), lines)
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark else ""
        raise ValueError(
            f"{file}{line} is not YAML: {_problem(error)}; check indentation and colons, and "
            "check that it is in UTF-8"
        ) from None
    if not isinstance(values, dict | None):
        raise ValueError(
            f"{file} contains a {type(values).__name__}, not sections; see configs/quickstart.yaml"
        )
    return values or {}, lines


def parse_yaml(text: str, lines: Places) -> Any:
    """Returns the value of a YAML text, and adds the place of every dotted key to `lines`.

    `lines[""]` must be the place of the text. Raises ValueError for a key that is set twice, and
    YAMLError for invalid YAML, too deep nesting, or more than MAX_NODES nodes with aliases
    expanded.
    """
    numbers = count(1)

    def walk(node: yaml.Node, prefix: str) -> None:
        if next(numbers) > MAX_NODES:
            raise _yaml_error(node.start_mark, f"it has more than {MAX_NODES} values")
        if isinstance(node, yaml.ScalarNode):
            for tag, pattern, problem in REFUSED_SCALARS:
                if re.search(tag, node.tag) and re.search(pattern, node.value):
                    raise _yaml_error(node.start_mark, f"{short(node.value, 100)} {problem}")
        if isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                walk(item, f"{prefix}.{index}")
        for key_node, value_node in node.value if isinstance(node, yaml.MappingNode) else ():
            key = f"{prefix}.{key_node.value}" if prefix else str(key_node.value)
            place = f"{lines['']} line {key_node.start_mark.line + 1}"
            if key in lines:
                raise ValueError(f"{key} is set twice, {lines[key]} and {place}; remove one")
            lines[key] = place
            walk(value_node, key)

    loader = _YamlLoader(text)
    try:
        root = loader.get_single_node()
        if root is not None:
            walk(root, "")
            return loader.construct_document(root)
    except RecursionError:
        raise _yaml_error(loader.get_mark(), "it is nested too deeply") from None


def _yaml_error(mark: yaml.Mark | None, problem: str) -> yaml.YAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=mark)


def _problem(error: Exception) -> str:
    return " ".join(str(getattr(error, "problem", error)).split())


def _parse_override(text: str) -> tuple[str, Any]:
    key, equals, raw = text.partition("=")
    key = key.strip().removeprefix("--")
    if not equals or not re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*", key):
        raise ValueError(
            f"{text!r} on the command line is no override; write section.key=value, e.g. "
            "train.steps=10"
        )
    try:
        return key, parse_yaml(raw, {"": f"in {key} on the command line,"})
    except yaml.YAMLError as error:
        raise ValueError(
            f"the value of {key}={short(raw, 100)} is not YAML ({_problem(error)}); quote it"
        ) from None


def _drop_replaced(values: Options, overrides: Options) -> None:
    """Removes the settings of a model or task that the command line replaces with another one."""
    model = values.get("model")
    task = values.get("task")
    if "model.path" in overrides and isinstance(model, dict):
        model.pop("create", None)
        model.pop("revision", None)
    if not isinstance(task, dict):
        return
    name = None if task.get("mixture") else task.get("name", Task().name)
    if overrides.get("task.name", name) != name:
        task.pop("options", None)
        task.pop("mixture", None)
    if "task.mixture" in overrides:
        task.pop("name", None)
        task.pop("options", None)


def _assign(values: Options, key: str, value: Any) -> None:
    *path, last = key.split(".")
    for name in path:
        if not isinstance(values.get(name), dict):
            values[name] = {}  # replaces a null or scalar value; pydantic validates the result
        values = values[name]
    values[last] = value


def _with_preset(explicit: Options) -> Options:
    preset = deepcopy(PRESETS.get(str(explicit.get("preset", "grpo")), {}))
    # options of the preset apply only to the function that the preset selects
    for part, bounds in (("advantage", ()), ("loss", BOUND_NAMES), ("correction", ())):
        if part in explicit and explicit[part] != preset.get(part):
            for key in (f"{part}_options", *bounds):
                preset.pop(key, None)
    return _merge(preset, explicit)


def _merge(below: Options, above: Options) -> Options:
    """Merges `above` into `below` recursively, in place; `above` takes precedence."""
    for key, value in above.items():
        old = below.get(key)
        below[key] = (
            _merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
        )
    return below


def _explain(error: ValidationError, lines: Places) -> str:
    """Formats pydantic's error for an unknown key, or else its first error, as one line with the
    key, the value, where it is set, and the remedy.
    """
    errors = error.errors()
    for each in errors:
        if each["type"] in ("extra_forbidden", "invalid_key"):
            return explain_unknown([*map(str, each["loc"])], lines)
    first = errors[0]
    key = ".".join(
        part
        for part in map(str, first["loc"])
        if not re.search(r"[\[\]' ]|^(str|int|float|bool|literal)$", part)
    )
    place = _origin(key, lines)
    if first["type"] == "missing":
        return f"{key} is missing {place}; set it"
    problem = f"{key}={short(first['input'], 100)} {place} is invalid: {message_of(first)}"
    return f"{problem}; see `megarl explain {key}`"


def explain_unknown(path: list[str], lines: Places) -> str:
    """Formats the error for an unknown key; suggests the same name in other sections, or else
    similar names in the same section.
    """
    *parents, name = path
    section = ".".join(part for part in parents if not part.isdecimal())
    known = [key.name.rpartition(".") for key in keys()]
    here = [last for parent, _, last in known if parent == section]
    near = ["".join(key) for key in known if key[2] == name][:3]
    hint = did_you_mean(name, here, f"known keys here: {', '.join(here)}", most=2)
    if near:
        hint = f"did you mean {' or '.join(near)}?"
    key = ".".join(path)
    return f"unknown key {key} {_origin(key, lines)}; {hint}"
