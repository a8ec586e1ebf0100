"""Reads the code blocks of a page, and the classes that say how a test treats each.

```bash {.run}                           run by a test, in the folder of the page
```yaml {.run file=my.yaml}              a config: loaded by megarl, and saved for later blocks
```python {.run file=my_reward.py}       saved, and compiled
```json {file=data.jsonl}                any text: saved
```text {.output}                        what the block above prints; a line `...` is any lines

.run                  runs on a CPU in seconds        .long     runs on a CPU in minutes: exhaustive tests
.gpu                  names GPUs: its `megarl train` lines run with --dry-run
.norun reason="..."   cannot run in a test
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

CODE = ("bash", "sh", "shell", "console", "yaml", "python")  # languages whose blocks need a class
CLASSES = ("run", "long", "gpu", "norun", "output")
_FENCE = re.compile(
    r"^(?P<indent> *)(?P<ticks>`{3,})(?P<language>[\w+-]*) *(?:\{(?P<attributes>[^}]*)\})?(?P<rest>.*)$"
)
_ATTRIBUTE = re.compile(
    r"\.(?P<name>[\w-]+)|(?P<key>[\w-]+)=(?:\"(?P<quoted>[^\"]*)\"|(?P<value>[^\s\"]+))|(?P<other>\S+)"
)


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    language: str
    text: str
    line: int  # of its first fence
    classes: tuple[str, ...] = ()
    attributes: dict[str, str] = field(default_factory=dict)
    problems: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """The class that says how it is tested; empty if there is none."""
        return self.classes[0] if self.classes else ""


def blocks(page: str) -> Iterator[Block]:
    """Yields the fenced blocks of a page, in order."""
    lines = page.splitlines()
    number = 0
    while number < len(lines):
        fence = _FENCE.match(lines[number])
        number += 1
        if not fence:
            continue
        start = number
        closing = re.compile(rf"^ *{fence['ticks']}`* *$")
        while number < len(lines) and not closing.match(lines[number]):
            number += 1
        indent = len(fence["indent"])
        text = "".join(f"{line[indent:]}\n" for line in lines[start:number])
        number += 1
        yield _block(fence, text, start)


def _block(fence: re.Match[str], text: str, line: int) -> Block:
    classes, attributes, problems = [], {}, []
    for part in _ATTRIBUTE.finditer(fence["attributes"] or ""):
        if part["name"]:
            classes.append(part["name"])
        elif part["key"]:
            attributes[part["key"]] = (
                part["quoted"] if part["quoted"] is not None else part["value"]
            )
        else:
            problems.append(f"{part[0]!r} is neither .CLASS nor KEY=VALUE")
    problems += [f"unknown class .{name}" for name in classes if name not in CLASSES]
    problems += [
        f"unknown attribute {key}" for key in attributes if key not in ("file", "reason", "exit")
    ]
    if fence["rest"].strip():
        problems.append(f"{fence['rest'].strip()!r} after the language")
    if fence["language"] in CODE and len(classes) != 1:
        problems.append(
            f"a block of {fence['language']} needs one of {', '.join(f'.{name}' for name in CLASSES)}"
        )
    if "norun" in classes and not attributes.get("reason"):
        problems.append('.norun needs a reason="..."')
    return Block(fence["language"], text, line, tuple(classes), attributes, tuple(problems))


def plain(page: str) -> str:
    """Returns the page with fences as Markdown knows them: ```yaml title="my.yaml"."""
    lines = []
    open_ticks = ""
    for line in page.splitlines():
        fence = _FENCE.match(line)
        if open_ticks:
            if re.match(rf"^ *{open_ticks}`* *$", line):
                open_ticks = ""
        elif fence:
            open_ticks = fence["ticks"]
            name = re.search(r"\bfile=(\S+)", fence["attributes"] or "")
            title = f' title="{name[1]}"' if name else ""
            line = f"{fence['indent']}{fence['ticks']}{fence['language'] or 'text'}{title}"
        lines.append(line)
    return "\n".join(lines) + "\n"
