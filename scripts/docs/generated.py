"""Generates the sections of pages that code defines: commands, keys, presets, metrics, exit codes, messages.

A page has a line `<!-- generated: NAME -->` where the section is shown. The texts are read where the code has them:
argparse's help, the attribute docstrings of the config and of the exit codes, the comments above the presets,
megarl/telemetry/metrics.yaml, and the messages in megarl/config.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from megarl import cli
from megarl.config.presets import PRESETS
from megarl.config.reference import Key, keys

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "megarl/config"
ERRORS = ("ValueError", "FileNotFoundError")  # of users: exit code 2
VALUE = "…"  # a value in a message


def anchor(text: str) -> str:
    """Returns an id for a heading: lower case, with hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def prose(text: str) -> str:
    """Returns a text as one line of a table; what is between backticks remains code."""
    line = " ".join(text.split()).replace("|", "\\|")
    parts = line.split("`")
    parts[::2] = (re.sub(r"([\[\]*])", r"\\\1", part).replace("<", "&lt;") for part in parts[::2])
    return "`".join(parts)


def code(text: str) -> str:
    """Returns a text as code in a table."""
    return f"`{' '.join(text.split()).replace('|', chr(92) + '|')}`"


def changelog() -> str:
    """Returns CHANGELOG.md without its title."""
    return (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").partition("\n")[2]


@cache
def commands() -> dict[str, argparse.ArgumentParser]:
    """Returns {command: its parser}."""
    parser = cli._parser()
    (subparsers,) = (
        action for action in parser._actions if isinstance(action, argparse._SubParsersAction)
    )
    return dict(subparsers.choices)


def command_line() -> str:
    """Returns a section per command: usage, and a table of its arguments."""
    parts = []
    helps = {command.NAME: command.HELP for command in cli.COMMANDS}
    for name, parser in commands().items():
        usage = " ".join(parser.format_usage().removeprefix("usage: ").split())
        parts.append(
            f"## megarl {name}\n\n{prose(helps[name][0].upper() + helps[name][1:])}.\n\n```text\n{usage}\n```\n"
        )
        rows = ["| argument | meaning |", "|---|---|"]
        for action in parser._actions:
            if action.dest == "help":
                continue
            label = ", ".join(action.option_strings) or str(action.metavar or action.dest)
            if action.option_strings and action.nargs != 0:
                label += (
                    f" {action.metavar or '{' + ','.join(map(str, action.choices or ())) + '}'}"
                )
            text = action.help or ""
            if "%(" in text:
                text = parser._get_formatter()._expand_help(action)
            rows.append(f"| {code(label)} | {prose(text)} |")
        parts.append("\n".join(rows) + "\n")
    return "\n".join(parts)


def config() -> str:
    """Returns a section of every part of the config, with an anchor of every key."""
    tables: dict[str, list[Key]] = {}
    sections: dict[str, Key] = {}
    for key in keys():
        if key.is_section:
            sections[key.name] = key
            tables.setdefault(key.name, [])
        tables.setdefault(key.name.rpartition(".")[0], []).append(key)
    parts = []
    for name, rows in tables.items():
        level = "##" if name.count(".") == 0 else "###"
        parts.append(f"{level} {name or 'Top level'} {{ #{name or 'top-level'} }}\n")
        if name:
            parts.append(prose(sections[name].text) + "\n")
        lines = ["| key | meaning; type and default |", "|---|---|"]
        for key in rows:
            label = (
                f"[`{key.name}`](#{key.name})"
                if key.is_section
                else f"`{key.name}`{{ #{key.name} }}"
            )
            lines.append(f"| {label} | {prose(key.text)}<br><small>{prose(key.kind)}</small> |")
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


@cache
def preset_texts() -> dict[str, str]:
    """Returns {preset: the comment above it in megarl/config/presets.py}."""
    source = (CONFIG / "presets.py").read_text(encoding="utf-8")
    comments = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    (table,) = (
        node.value
        for node in ast.parse(source).body
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "PRESETS"
    )
    texts = {}
    for key in table.keys:
        line = key.lineno - 1
        lines: list[str] = []
        while line in comments:
            lines.insert(0, comments[line])
            line -= 1
        texts[key.value] = " ".join(lines)
    return texts


def presets() -> str:
    """Returns a section per preset: its source, and the values that it sets."""
    parts = []
    for name, values in PRESETS.items():
        text = re.sub(
            r"arXiv (\d{4}\.\d{5})", r"[arXiv \1](https://arxiv.org/abs/\1)", preset_texts()[name]
        )
        settings = yaml.safe_dump({"algorithm": values}, sort_keys=False)
        parts.append(f"## {name}\n\n{text}\n\n```yaml\n{settings}```\n")
    return "\n".join(parts)


@cache
def metric_texts() -> dict[str, dict[str, str]]:
    """Returns {topic: {metric: text}}; words in capitals stand for a name."""
    return yaml.safe_load((ROOT / "megarl/telemetry/metrics.yaml").read_text(encoding="utf-8"))


def metrics() -> str:
    """Returns a table of metrics per topic."""
    parts = []
    for topic, texts in metric_texts().items():
        rows = [f"| `{name}`{{ #{name} }} | {prose(text)} |" for name, text in texts.items()]
        parts.append(
            "\n".join([f"## {topic}\n", "| metric | meaning |", "|---|---|", *rows]) + "\n"
        )
    return "\n".join(parts)


@cache
def exit_code_texts() -> dict[int, str]:
    """Returns {exit code: text}, from the docstrings in megarl/processes/exit_codes.py."""
    body = ast.parse((ROOT / "megarl/processes/exit_codes.py").read_text(encoding="utf-8")).body
    texts = {}
    for index, node in enumerate(body[:-1]):
        is_code = isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        if is_code and type(node.value.value) is int:
            below: Any = body[index + 1]
            is_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
            texts[node.value.value] = " ".join(below.value.value.split()) if is_text else ""
    return texts


def exit_codes() -> str:
    """Returns a table of exit codes."""
    rows = [f"| `{code}` | {prose(text)} |" for code, text in exit_code_texts().items()]
    return "\n".join(["| exit code | meaning |", "|---|---|", *rows]) + "\n"


@dataclass(frozen=True)
class Message:
    """A message of exit code 2: a text of megarl/config with VALUE for values."""

    file: str  # in megarl/config, without .py
    text: str

    @property
    def anchor(self) -> str:
        """Its id in guides/troubleshooting.md."""
        words = anchor(self.text).split("-")
        return "-".join([self.file, *words[:12]])


@cache
def config_messages() -> tuple[Message, ...]:
    """Returns the messages of every `raise ValueError(...)` and `refuse(...)` in megarl/config."""
    found: dict[Message, None] = {}
    for file in sorted(CONFIG.glob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for text in _messages(tree):
            found[Message(file.stem, text)] = None
    return tuple(found)


def _messages(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        error = node.exc if isinstance(node, ast.Raise) else None
        if isinstance(error, ast.Call) and ast.unparse(error.func) in ERRORS and error.args:
            text = _template(error.args[0])
            if text.strip(f"{VALUE}: ,"):
                yield text
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "refuse":
            start = next(
                (_template(word.value) for word in node.keywords if word.arg == "start"), ""
            )
            for problem in node.args:
                if isinstance(problem, ast.Tuple):
                    yield start + _template(problem.elts[1])


def _template(node: ast.expr) -> str:
    """Returns the text of a string expression, with VALUE for each value."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_template, node.values))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _template(node.left) + _template(node.right)
    return VALUE


def messages() -> str:
    """Returns a table of the messages of megarl/config per file, each with an anchor."""
    parts = []
    by_file: dict[str, list[Message]] = {}
    for message in config_messages():
        by_file.setdefault(message.file, []).append(message)
    for file, rows in by_file.items():
        module = ast.parse((CONFIG / f"{file}.py").read_text(encoding="utf-8"))
        title = (ast.get_docstring(module) or "").partition("\n\n")[0]
        parts.append(f"### {file} {{ #messages-{anchor(file)} }}\n\n{title}\n")
        parts += [
            f"- `{' '.join(row.text.split()).replace('`', chr(39))}`{{ #{row.anchor} }}"
            for row in rows
        ]
        parts.append("")
    return "\n".join(parts)


def python() -> str:
    """Returns the directives of mkdocstrings for the functions and types of user code."""
    modules = {
        "megarl.algorithms.advantages": "Advantages",
        "megarl.algorithms.losses": "Losses",
        "megarl.algorithms.kl": "KL estimators",
        "megarl.algorithms.corrections": "Corrections",
        "megarl.algorithms.aggregation": "Aggregation",
        "megarl.rewards.interface": "Rewards",
        "megarl.roles": "Roles of the loop",
        "megarl.types": "Batches",
    }
    return "\n".join(
        f"## {title}\n\n::: {module}\n    options:\n      show_root_heading: false\n      show_root_toc_entry: false\n"
        for module, title in modules.items()
    )


SECTIONS: dict[str, Callable[[], str]] = {
    "changelog": changelog,
    "cli": command_line,
    "config": config,
    "presets": presets,
    "metrics": metrics,
    "exit codes": exit_codes,
    "config messages": messages,
    "python": python,
}
