"""Shared memory of a job: one prefix for every segment, so jobs never meet and nothing outlives them. No torch.

    launcher --job id--> ranks --shm_prefix--> names of the engine's segments in /dev/shm
    launcher, on its way out or after a crash --unlink_shm--> gone;  a new job --unlink_dead--> what dead jobs left

The engine unlinks its segments as soon as every rank has mapped them (they live until unmapped), so only a
job that dies during start-up leaves any.
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

__all__ = ["shm_prefix", "unlink_dead", "unlink_shm"]

SHM = Path("/dev/shm")
MARK = "megarl-"
OWNER = re.compile(rf"{MARK}(\d+)-")


def shm_prefix(job_id: str, pid: int) -> str:
    """Prefix of the job's segments; `pid` is its launcher's, whose death makes them garbage."""
    return f"{MARK}{pid}-{re.sub(r'[^A-Za-z0-9_.]', '_', job_id)}-"


def unlink_shm(prefix: str) -> list[str]:
    """Remove every segment whose name starts with `prefix`; the names removed."""
    assert prefix.startswith(MARK), f"{prefix!r} is not a megarl prefix: it could name segments of others"
    removed = []
    for path in SHM.glob("*") if SHM.is_dir() else ():
        if path.name.startswith(prefix):
            with suppress(FileNotFoundError, PermissionError):
                path.unlink()
                removed.append(path.name)
    return removed


def unlink_dead() -> list[str]:
    """Remove the segments of jobs whose launcher is no longer alive; the names removed."""
    owners = {found.group(0): int(found.group(1)) for path in SHM.glob(f"{MARK}*") if (found := OWNER.match(path.name))}
    return [name for mark, pid in owners.items() if not Path(f"/proc/{pid}").exists() for name in unlink_shm(mark)]
