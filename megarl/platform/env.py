"""The process environment, read once into a frozen `Env`; the only module that uses `os.environ`.

No torch.

torchrun sets RANK, WORLD_SIZE and so on. megarl adds MEGARL_JOB_ID, which prefixes the names of a
job's shared resources on a host, and MEGARL_LAUNCHED, the process id of megarl's own launcher.
"""

import os
import re
import sys
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path

# For ranks on one node: the interface on which gloo, NCCL and vLLM listen, of which no other host
# can reach a port.
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "VLLM_HOST_IP": "127.0.0.1"}
# One file per GPU. Sandboxes do not always mount /proc/driver.
GPU_FILES = (("/proc/driver/nvidia/gpus", "*"), ("/dev", "nvidia[0-9]*"))

RESUME_CHANGED = "MEGARL_RESUME_CHANGED"  # set: other data than a run began with are accepted
SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSWORD|AUTH", re.IGNORECASE)  # in the name of a variable
SECRET_CHARS = 8  # shorter values are words that texts need


@dataclass(frozen=True)
class Env:
    """A process's rank and job; a single rank if there is no launcher."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 0  # 0: not set
    has_launcher: bool = False  # a launcher set the values above
    launched: bool = False  # the launcher is megarl's own
    launcher_pid: int = 0  # the same on every rank of a host; its death ends the job
    job_id: str = ""  # the same on every rank of a host, unique to the job
    store_fd: int = -1  # of memory shared with megarl's own launcher (megarl.processes.heartbeat)
    slots_fd: int = -1

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @classmethod
    def read(cls) -> "Env":
        """Raises ValueError if a launcher's variable is not a number."""
        source = os.environ
        job_id = source.get("MEGARL_JOB_ID", "")
        if "RANK" not in source or "WORLD_SIZE" not in source:
            pid = os.getpid()
            return cls(job_id=job_id or f"p{pid}", launcher_pid=pid)

        def number(name: str, default: int = 0) -> int:
            text = source.get(name, str(default))
            try:
                return int(text)
            except ValueError:
                raise ValueError(
                    f"environment variable {name}={text!r} is not an integer; use torchrun"
                ) from None

        world_size = number("WORLD_SIZE")
        port = number("MASTER_PORT")
        # torchrun's run id, or otherwise the port, distinguishes jobs on one host
        job_id = (
            job_id or source.get("TORCHELASTIC_RUN_ID", "none").replace("none", "") or f"p{port}"
        )
        return cls(
            rank=number("RANK"),
            world_size=world_size,
            local_rank=number("LOCAL_RANK"),
            local_world_size=number("LOCAL_WORLD_SIZE", world_size),
            master_addr=source.get("MASTER_ADDR", "127.0.0.1"),
            master_port=port,
            has_launcher=True,
            launched="MEGARL_LAUNCHED" in source,
            launcher_pid=number("MEGARL_LAUNCHED", os.getppid()),
            job_id=job_id,
            store_fd=number("MEGARL_STORE_FD", -1),
            slots_fd=number("MEGARL_SLOTS_FD", -1),
        )


def get_env(name: str, default: str | None = None) -> str | None:
    """Read a variable of another library; for rank and job use `Env`."""
    return os.environ.get(name, default)


def set_env(**variables: str | int | None) -> None:
    """Set variables that other libraries read when they are imported; None removes one."""
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = str(value)


def child_env(**variables: str | int) -> dict[str, str]:
    """This process's environment, updated by `variables`, for a child process."""
    return {**os.environ, **{name: str(value) for name, value in variables.items()}}


def redact(text: str) -> str:
    """Replaces what must not be logged: values of variables with the name of a secret, and
    passwords in URLs.
    """
    secrets = {
        value: name
        for name, value in os.environ.items()
        if SECRET.search(name) and len(value) >= SECRET_CHARS
    }
    for value in sorted(secrets, key=len, reverse=True):
        text = text.replace(value, f"${secrets[value]}")
    return re.sub(r"(?<=://)[^/\s'\"]*@", "***@", text)


def is_interactive() -> bool:
    """Returns True if stdout is a terminal that can redraw a line, not a pipe or a CI log."""
    return (
        sys.stdout.isatty()
        and os.environ.get("TERM", "") not in ("", "dumb")
        and "CI" not in os.environ
    )


def count_gpus() -> int:
    """Number of GPUs visible to this process, without importing torch; 0 for a CPU
    build of torch.
    """
    try:
        if version("torch").endswith("+cpu"):
            return 0
    except PackageNotFoundError:
        return 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return sum(name.strip() not in ("", "-1") for name in visible.split(","))
    return next(
        filter(None, (len(list(Path(folder).glob(pattern))) for folder, pattern in GPU_FILES)), 0
    )


def has_bf16_products(cpuinfo: str = "/proc/cpuinfo") -> bool:
    """Returns True if the CPU has instructions for products of bf16 numbers, or the system does not
    tell.
    """
    with suppress(OSError):
        if flags := re.search(
            r"^(?:flags|Features)\s*:(.*)$", Path(cpuinfo).read_text(), re.MULTILINE
        ):
            return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(flags[1].split())
    return True


def is_installed(package: str) -> bool:
    """Returns True if `package` (dotted) can be imported, without importing it or its parents."""
    name = ""
    path = None
    for part in package.split("."):
        name = f"{name}.{part}".lstrip(".")
        spec = PathFinder.find_spec(name, path)
        if spec is None:
            return any(distributions(name=package.replace(".", "-")))  # an editable install
        path = spec.submodule_search_locations
    return True
