"""Nested spans as a Chrome trace, for chrome://tracing or Perfetto.

with timeline.span("update"): ...   -->   runs/<name>/timeline.json, a complete JSON array after every flush
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Timeline:
    """`seconds` totals the spans of each name since the last `clear`; `flush` appends finished spans to the file."""

    def __init__(self, file: Path) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._events, self._is_empty = [], True
        file.parent.mkdir(parents=True, exist_ok=True)
        self._out = file.open("w+", encoding="utf-8")
        self._out.write("[\n]")
        self._out.flush()
        self._origin = time.perf_counter()

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            took = time.perf_counter() - begin
            self.seconds[name] += took
            start_us, took_us = round((begin - self._origin) * 1e6, 1), round(took * 1e6, 1)
            self._events.append({"name": name, "ph": "X", "ts": start_us, "dur": took_us, "pid": 0, "tid": 0})

    def clear(self) -> None:
        self.seconds.clear()

    def flush(self) -> None:
        if not self._events:
            return
        self._out.seek(self._out.seek(0, 2) - len("\n]"))  # overwrite the closing bracket
        lead = "\n" if self._is_empty else ",\n"
        self._out.write(lead + ",\n".join(map(json.dumps, self._events)) + "\n]")
        self._out.flush()
        self._events, self._is_empty = [], False

    def close(self) -> None:
        self.flush()
        self._out.close()
