"""Hooks of MkDocs: fill in generated sections, and turn what GitHub shows into what the site shows.

    docs/*.md --generated sections--> --links out of docs/--> --classes of code blocks--> MkDocs

A link to a file of the repository outside docs/ works on GitHub. The site has a copy of the file below repository/,
of a text as a page that shows it, and the link leads there.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scripts.docs.blocks import plain  # noqa: E402
from scripts.docs.generated import SECTIONS  # noqa: E402

MARKER = re.compile(r"<!-- generated: ([\w ]+) -->")
LINK = re.compile(r"(?<=\]\()(?P<target>\.\./[^)#\s]+)(?P<anchor>#[^)\s]*)?(?=\))")
SHORT = re.compile(r"<code>([^<\n]{1,32})</code>")
LANGUAGES = {
    ".py": "python",
    ".sh": "bash",
    ".yaml": "yaml",
    ".yml": "yaml",
    ".json": "json",
    ".toml": "toml",
    ".md": "markdown",
}
IMAGES = (".png", ".svg", ".jpg")
SHOWN_CHARACTERS = 200_000  # of a text


def on_files(files: Files, config: Any) -> Files:
    """Adds the files of the repository that pages link to."""
    targets = set()
    for file in list(files.documentation_pages()):
        for link in LINK.finditer(Path(file.abs_src_path).read_text(encoding="utf-8")):
            target = _outside(file.src_uri, link["target"])
            if target and target.exists():
                targets.add(target)
    for target in sorted(targets):
        name = target.relative_to(ROOT)
        options = {"inclusion": InclusionLevel.NOT_IN_NAV}
        if target.suffix in IMAGES:
            files.append(File.generated(config, _uri(target), abs_src_path=str(target), **options))
        else:
            page = f"---\nsearch: {{exclude: true}}\n---\n# {name}\n\n{_shown(target)}"
            files.append(File.generated(config, _uri(target), content=page, **options))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Returns the page as MkDocs renders it."""
    if page.file.src_uri.startswith("repository/"):
        return markdown

    def relink(link: re.Match[str]) -> str:
        target = _outside(page.file.src_uri, link["target"])
        if target is None or not target.exists():
            return link[0]
        return os.path.relpath(_uri(target), Path(page.file.src_uri).parent)

    filled = MARKER.sub(lambda marker: SECTIONS[marker[1]](), markdown)
    return plain(LINK.sub(relink, filled))


def on_page_content(html: str, **_: Any) -> str:
    """Marks short code in prose, which docs/assets/site.css keeps on one line."""
    return SHORT.sub(r'<code class="short">\1</code>', html)


def _outside(page: str, target: str) -> Path | None:
    """Returns the file that a relative link of a page in docs/ leads to, if it is not in docs/."""
    file = Path(os.path.normpath(ROOT / "docs" / Path(page).parent / target))
    is_outside = file.is_relative_to(ROOT) and not file.is_relative_to(ROOT / "docs")
    return file if is_outside else None


def _uri(target: Path) -> str:
    name = f"repository/{target.relative_to(ROOT).as_posix()}"
    return name if target.suffix in IMAGES else f"{name}.md"


def _shown(target: Path) -> str:
    if target.is_dir():
        return "\n".join(f"- `{each.name}`" for each in sorted(target.iterdir()))
    text = target.read_text(encoding="utf-8")[:SHOWN_CHARACTERS].rstrip()
    return f"`````{LANGUAGES.get(target.suffix, 'text')}\n{text}\n`````\n"
