"""README.md is short, and README.zh-CN.md has the same code, figures and links."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)]+)\)")
PAGES = ("README.md", "README.zh-CN.md")


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def code(page: str) -> list[list[str]]:
    """Returns the lines of each block, without comments."""
    return [
        [re.sub(r"\s*#.*", "", line) for line in block.splitlines()]
        for block in FENCE.findall(page)
    ]


def links(page: str) -> Counter[str]:
    """Returns the targets; a link to the other language is not among them."""
    return Counter(set(LINK.findall(page)) - set(PAGES))


def figures(page: str) -> Counter[str]:
    """Returns the numbers and inline code of the prose."""
    prose = LINK.sub("]", FENCE.sub("", page))
    return Counter(re.findall(r"`[^`]+`|(?<![\w.])\d+(?:\.\d+)*(?:e-?\d+)?", prose))


def test_readme_is_short() -> None:
    readme = read("README.md")
    assert readme.count("\n") <= 150
    assert len(readme.split()) <= 900
    # a reader with GPUs learns what has run on them before any command
    assert readme.index("**not** run yet") < readme.index("```")
    assert {"scripts/quickstart.sh", "scripts/test.sh"} <= set(readme.split())


@pytest.mark.parametrize("part", [code, links, figures])
def test_languages_agree(part: object) -> None:
    assert callable(part)
    assert part(read("README.md")) == part(read("README.zh-CN.md"))
    assert part(read("README.md"))


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_to_files(name: str) -> None:
    missing = [link for link in links(read(name)) if not (ROOT / link.partition("#")[0]).exists()]
    assert not missing
