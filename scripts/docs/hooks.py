"""Hooks of MkDocs: fills in generated sections, and turns what GitHub shows into what the site shows.

page.md --generated sections--> --links to files outside docs/--> --classes of code blocks--> MkDocs
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scripts.docs.blocks import plain  # noqa: E402
from scripts.docs.generated import SECTIONS  # noqa: E402

MARKER = re.compile(r"<!-- generated: ([\w ]+) -->")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Returns the page as MkDocs renders it."""
    filled = MARKER.sub(lambda marker: SECTIONS[marker[1]](), markdown)
    return plain(filled)
