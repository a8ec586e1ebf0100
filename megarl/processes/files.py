"""Files that readers see complete or not at all, and the disk that has no room for them.

No torch.
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
SLACK_BYTES = 1 << 16  # blocks, and what a file has besides its data


@contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """Yields a path beside `file` to write to; on success it is flushed to disk and renamed to
    `file`.
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
    """Flush a file, or a folder's entries, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def full_disk(error: BaseException, folder: Path, missing_bytes: int = 0) -> str:
    """Returns one line about the disk of `folder` or the limit on file sizes, if one of them caused
    `error`, else "". Libraries hide the cause (torch's zip writer: "unexpected pos 704 vs 598"):
    the disk must also have room for `missing_bytes`, what an incomplete file lacks.
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
