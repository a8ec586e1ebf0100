"""Shared memory of a job: a prefix per job, so that jobs do not collide and segments do not outlive them. No torch.

    ranks        shm_prefix  -> names of the engine's segments in /dev/shm
    launcher     unlink_shm  -> removes the job's segments when it ends
    next job     unlink_dead -> removes segments of jobs that were killed

The engine unlinks its segments once every rank has mapped them, so only a job killed during start-up leaves any.
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

SHM = Path("/dev/shm")
MARK = "megarl-"
OWNER = re.compile(rf"{MARK}(\d+)-")


def shm_prefix(job_id: str, pid: int) -> str:
    """Prefix of the names of a job's segments; `pid` is that of its launcher."""
    return f"{MARK}{pid}-{re.sub(r'[^A-Za-z0-9_.]', '_', job_id)}-"


def unlink_shm(prefix: str) -> list[str]:
    """Remove the segments whose names start with `prefix`; returns their names."""
    assert prefix.startswith(MARK), f"{prefix!r} is not a megarl prefix: segments of other programs could match"
    removed = []
    for path in SHM.glob("*") if SHM.is_dir() else ():
        if path.name.startswith(prefix):
            with suppress(FileNotFoundError, PermissionError):
                path.unlink()
                removed.append(path.name)
    return removed


def unlink_dead() -> list[str]:
    """Remove the segments of jobs whose launcher has died; returns their names."""
    owners = {match.group(0): int(match.group(1)) for path in SHM.glob(f"{MARK}*") if (match := OWNER.match(path.name))}
    return [name for mark, pid in owners.items() if not Path(f"/proc/{pid}").exists() for name in unlink_shm(mark)]
