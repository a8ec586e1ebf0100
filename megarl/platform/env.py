"""The process environment, read once into a frozen `Env`; the only module that touches `os.environ`. No torch.

    launcher --set_env/child_env--> os.environ --Env.read--> Env --> everybody who needs a rank or a run directory

Torch's own names (RANK, WORLD_SIZE, ...) are torchrun's contract and kept verbatim; megarl adds three of
its own: MEGARL_JOB_ID (prefix of everything a job shares on a host), MEGARL_RUN_DIR, MEGARL_LAUNCHED
(process id of the `megarl.launch` that watches these ranks).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path

__all__ = ["Env", "child_env", "count_gpus", "get_env", "is_installed", "is_interactive", "set_env"]


@dataclass(frozen=True, slots=True)
class Env:
    """What a process knows of its job. Outside of torchrun: one rank, alone."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 0  # 0: none was given
    has_launcher: bool = False  # the five values above came from a launcher
    launched: bool = False  # ... and that launcher is megarl's own
    launcher_pid: int = 0  # whose death ends the job, the same on every rank of a host
    job_id: str = ""  # the same on every rank of a job on a host, different between jobs
    run_dir: Path | None = None

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def num_nodes(self) -> int:
        return max(1, self.world_size // self.local_world_size)

    @classmethod
    def read(cls, environ: Mapping[str, str] | None = None) -> Env:
        """Raises ValueError when a launcher's variable is missing or is not a number."""
        source = os.environ if environ is None else environ
        run_dir = source.get("MEGARL_RUN_DIR")
        job_id = source.get("MEGARL_JOB_ID", "")
        if "RANK" not in source or "WORLD_SIZE" not in source:
            pid = os.getpid()
            return cls(job_id=job_id or f"p{pid}", launcher_pid=pid, run_dir=Path(run_dir) if run_dir else None)

        def number(name: str, default: int) -> int:
            text = source.get(name, str(default))
            try:
                return int(text)
            except ValueError:
                raise ValueError(f"environment variable {name}={text!r} is not a number; start with torchrun") from None

        world_size, port = number("WORLD_SIZE", 1), number("MASTER_PORT", 0)
        # torchrun's restarts and its run id keep two jobs on one host apart; the port does it where neither is set
        job_id = job_id or source.get("TORCHELASTIC_RUN_ID", "none").replace("none", "") or f"p{port}"
        return cls(
            rank=number("RANK", 0),
            world_size=world_size,
            local_rank=number("LOCAL_RANK", 0),
            local_world_size=number("LOCAL_WORLD_SIZE", world_size),
            master_addr=source.get("MASTER_ADDR", "127.0.0.1"),
            master_port=port,
            has_launcher=True,
            launched="MEGARL_LAUNCHED" in source,
            launcher_pid=number("MEGARL_LAUNCHED", os.getppid()),
            job_id=job_id,
            run_dir=Path(run_dir) if run_dir else None,
        )


def get_env(name: str, default: str | None = None) -> str | None:
    """One variable of another library's, by its own name; prefer `Env` for everything megarl knows."""
    return os.environ.get(name, default)


def set_env(**variables: str | int | None) -> None:
    """Set variables other libraries read, before they are imported; None removes one."""
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = str(value)


def child_env(**variables: str | int) -> dict[str, str]:
    """This process's environment with `variables` on top, for a child."""
    return {**os.environ, **{name: str(value) for name, value in variables.items()}}


def is_interactive() -> bool:
    """True in a terminal that can redraw a line; CI logs and pipes get plain lines."""
    return sys.stdout.isatty() and os.environ.get("TERM", "") not in ("", "dumb") and "CI" not in os.environ


def count_gpus() -> int:
    """GPUs this process may use, counted without torch; 0 when the installed torch is a CPU build."""
    try:
        if version("torch").endswith("+cpu"):
            return 0
    except PackageNotFoundError:
        return 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    return len(list(Path("/proc/driver/nvidia/gpus").glob("*")))


def is_installed(package: str) -> bool:
    """Without importing anything, the packages it lies in neither."""
    name, path = "", None
    for part in package.split("."):
        name = f"{name}.{part}".lstrip(".")
        spec = PathFinder.find_spec(name, path)
        if spec is None:
            return any(distributions(name=package.replace(".", "-")))  # one that is installed to be edited
        path = spec.submodule_search_locations
    return True
