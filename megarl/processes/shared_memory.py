"""Shared memory of a job: a prefix per job, so that jobs do not collide and no segment outlives its
job. Does not import torch.

    ranks        shm_prefix  -> names of the engine's segments in /dev/shm
    launcher     lock_shm    -> marks the job's prefix as in use, until the process ends
                 unlink_shm  -> removes the job's segments when it ends
    next job     unlink_dead -> removes segments of killed jobs: no process locks their prefix

The engine unlinks its segments after every rank has mapped them, so only a job that is killed
during start-up leaves segments behind. A file lock, unlike a process id, also works between
containers that share /dev/shm.
"""

import fcntl
import os
import re
from contextlib import suppress
from pathlib import Path

SHM = Path("/dev/shm")
MARK = "megarl-"
PREFIX = re.compile(rf"{MARK}\d+-[A-Za-z0-9_.]*-")
LOCK = "lock"  # name of the lock file: prefix + LOCK


def shm_prefix(job_id: str, pid: int) -> str:
    """Returns the prefix of the names of a job's segments; `pid` is its launcher's process id."""
    return f"{MARK}{pid}-{re.sub(r'[^A-Za-z0-9_.]', '_', job_id)}-"


def lock_shm(prefix: str) -> None:
    """Locks the prefix until this process ends, so that other jobs do not remove its segments."""
    if not os.access(SHM, os.W_OK):
        return
    staging = SHM / f".{prefix}{LOCK}"
    staging.unlink(missing_ok=True)
    handle = os.open(staging, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)  # never closed
    fcntl.flock(handle, fcntl.LOCK_EX)
    staging.rename(SHM / f"{prefix}{LOCK}")  # locked before it has this name


def unlink_shm(prefix: str, *, lock: bool = False) -> list[str]:
    """Removes the segments whose names start with `prefix` and, with `lock`, the lock file.

    Returns the names of the removed files.
    """
    assert prefix.startswith(MARK), (
        f"{prefix!r} is not a megarl prefix: segments of other programs could match"
    )
    removed = []
    for path in SHM.glob(f"{prefix}*"):
        if lock or path.name != f"{prefix}{LOCK}":
            with suppress(
                OSError
            ):  # removed by another process, or another user's file, or a folder
                path.unlink()
                removed.append(path.name)
    return removed


def unlink_dead() -> list[str]:
    """Removes the segments of jobs whose launcher has died; returns the removed names."""
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
