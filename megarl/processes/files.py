"""Recognises a full disk behind an error. No torch."""

from __future__ import annotations

import errno
import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT)
SLACK_BYTES = 1 << 16  # blocks, and what a file has besides its data


def full_disk(error: BaseException, folder: Path, missing_bytes: int = 0) -> str:
    """Returns one line about the disk of `folder` or the limit on file sizes, if one of them caused `error`, else "".
    Libraries hide the cause (torch's zip writer: "unexpected pos 704 vs 598"): the disk must also have room for
    `missing_bytes`, what an incomplete file lacks."""
    codes = {cause.errno for cause in causes(error) if isinstance(cause, OSError)}
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if errno.EFBIG in codes or -1 < limit < missing_bytes + SLACK_BYTES:
        return f"a file in {folder} needs more than the limit of {limit:,} bytes; raise it (`ulimit -f`)"
    while not folder.exists():
        folder = folder.parent
    usage = shutil.disk_usage(folder)
    if codes.isdisjoint(FULL) and (not missing_bytes or usage.free >= missing_bytes + SLACK_BYTES):
        return ""
    mount = next(
        path for path in (folder.resolve(), *folder.resolve().parents) if os.path.ismount(path)
    )
    return (
        f"the disk of {folder} (mounted at {mount}) is full: {usage.free:,} of {usage.total:,} bytes are "
        "free; make room and start the run again, which resumes from its newest checkpoint, or set another run.dir"
    )


def causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
