"""Generates the sections of pages that code defines: commands, keys, presets, metrics, exit codes, messages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def changelog() -> str:
    """Returns CHANGELOG.md without its title."""
    return (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").partition("\n")[2]


SECTIONS: dict[str, Callable[[], str]] = {
    "changelog": changelog,
    "cli": lambda: "",
    "config": lambda: "",
    "presets": lambda: "",
    "metrics": lambda: "",
    "exit codes": lambda: "",
    "config messages": lambda: "",
    "python": lambda: "",
}
