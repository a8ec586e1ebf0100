"""Code that pages quote is the code of the package."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def without_comments(text: str) -> str:
    lines = (re.sub(r"\s*# .*", "", line).rstrip() for line in text.splitlines())
    return "\n".join(line for line in lines if line)


@pytest.mark.parametrize(
    ("page", "file", "first"),
    [
        ("concepts/loop_and_roles.md", "stages/rl.py", "def train(run: RlRun)"),
        ("extend/family.md", "models/mixtral.py", '"""Mixtral'),
        ("extend/algorithm.md", "algorithms/losses.py", "def reinforce("),
        ("extend/stage.md", "config/stages.py", '    "dpo": Stage('),
    ],
)
def test_a_quote_is_the_code(page: str, file: str, first: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    (quote,) = [
        block
        for block in re.findall(r"^```python[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        if block.startswith(first)
    ]
    source = (ROOT / "megarl" / file).read_text(encoding="utf-8")
    assert without_comments(quote) in without_comments(source)
