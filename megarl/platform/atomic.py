"""Writes files that readers see complete or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """Yields a path beside `file` to write to; on success it is flushed to disk and renamed to `file`."""
    staging = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        yield staging
        sync_path(staging)
        os.replace(staging, file)
    finally:
        staging.unlink(missing_ok=True)


def write_atomic(file: Path, content: str | bytes) -> None:
    with replacing(file) as staging:
        staging.write_bytes(content.encode() if isinstance(content, str) else content)


def sync_path(path: Path) -> None:
    """Flush a file, or a folder's entries, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
