"""Writes files atomically, and explains errors of full disks.

Does not import torch.
"""

import errno
import json
import os
import resource
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FULL = (errno.ENOSPC, errno.EDQUOT)
SLACK_BYTES = 1 << 16  # partly filled blocks and metadata of a file


@contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """Yields a path in the folder of `file` to write to. On success, the new file is flushed to
    disk and renamed to `file`; on an error it is removed.
    """
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


def write_json(file: Path, values: Mapping[str, Any]) -> None:
    write_atomic(file, json.dumps(values, indent=2) + "\n")


def sync_path(path: Path) -> None:
    """Flushes a file, or a folder's entries, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def full_disk(error: BaseException, folder: Path, missing_bytes: int = 0) -> str:
    """Returns a message if a full disk (of `folder`) or the limit on file sizes caused `error`,
    else "".

    Some libraries hide the cause (torch's zip writer: "unexpected pos 704 vs 598"). So the disk
    also counts as full if it has no room for `missing_bytes`, the bytes that an incomplete file
    lacks.
    """
    codes = {cause.errno for cause in causes(error) if isinstance(cause, OSError)}
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if errno.EFBIG in codes or -1 < limit < missing_bytes + SLACK_BYTES:
        return (
            f"a file in {folder} needs more than the limit of {limit:,} bytes; raise it "
            "(`ulimit -f`)"
        )
    while not folder.exists():
        folder = folder.parent
    usage = shutil.disk_usage(folder)
    if codes.isdisjoint(FULL) and (not missing_bytes or usage.free >= missing_bytes + SLACK_BYTES):
        return ""
    mount = next(
        path for path in (folder.resolve(), *folder.resolve().parents) if os.path.ismount(path)
    )
    return (
        f"the disk of {folder} (mounted at {mount}) is full: {usage.free:,} of {usage.total:,} "
        "bytes are free; make room and start the run again, which resumes from its newest "
        "checkpoint, or set another run.dir"
    )


def causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
