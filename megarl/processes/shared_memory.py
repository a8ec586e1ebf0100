"""Shared memory of a job: a prefix per job, so that jobs do not collide and segments do not outlive
them. No torch.

    ranks        shm_prefix  -> names of the engine's segments in /dev/shm
    launcher     lock_shm    -> marks the job's prefix as in use, until the process ends
                 unlink_shm  -> removes the job's segments when it ends
    next job     unlink_dead -> removes segments of jobs that were killed: nobody locks their prefix

The engine unlinks its segments once every rank has mapped them: only a job killed during start-up
leaves any. A file lock, unlike a process id, is also seen by another container that shares
/dev/shm.
"""

import fcntl
import os
import re
from contextlib import suppress
from pathlib import Path

SHM = Path("/dev/shm")
MARK = "megarl-"
PREFIX = re.compile(rf"{MARK}\d+-[A-Za-z0-9_.]*-")
LOCK = "lock"  # after the prefix


def shm_prefix(job_id: str, pid: int) -> str:
    """Prefix of the names of a job's segments; `pid` is that of its launcher."""
    return f"{MARK}{pid}-{re.sub(r'[^A-Za-z0-9_.]', '_', job_id)}-"


def lock_shm(prefix: str) -> None:
    """Lock the prefix until this process ends, so that other jobs leave its segments alone."""
    if not os.access(SHM, os.W_OK):
        return
    staging = SHM / f".{prefix}{LOCK}"
    staging.unlink(missing_ok=True)
    handle = os.open(staging, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)  # never closed
    fcntl.flock(handle, fcntl.LOCK_EX)
    staging.rename(SHM / f"{prefix}{LOCK}")  # it is locked whenever it has this name


def unlink_shm(prefix: str, *, lock: bool = False) -> list[str]:
    """Remove the segments whose names start with `prefix`, and its lock if `lock`; returns their
    names.
    """
    assert prefix.startswith(MARK), (
        f"{prefix!r} is not a megarl prefix: segments of other programs could match"
    )
    removed = []
    for path in SHM.glob(f"{prefix}*"):
        if lock or path.name != f"{prefix}{LOCK}":
            with suppress(
                OSError
            ):  # another process removed it, or it is another user's, or a folder
                path.unlink()
                removed.append(path.name)
    return removed


def unlink_dead() -> list[str]:
    """Remove the segments of jobs whose launcher has died; returns their names."""
    matches = [PREFIX.match(path.name) for path in SHM.glob(f"{MARK}*")]
    names = []
    for prefix in {match[0] for match in matches if match}:
        if not _is_locked(prefix):
            names += unlink_shm(prefix, lock=True)
    return names


def _is_locked(prefix: str) -> bool:
    try:
        handle = os.open(SHM / f"{prefix}{LOCK}", os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError as error:
        return isinstance(error, PermissionError)
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False
