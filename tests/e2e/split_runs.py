"""Runs of the split topology, as tests see them: their processes, their phase, what they leave behind.

Run as a program, `python tests/e2e/split_runs.py FOLDER train CONFIG ...`, it is `megarl` that lets itself be watched:
FOLDER/phase is what the controller is doing, FOLDER/batches the batches that were trained on.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self

from megarl.platform.env import child_env
from megarl.processes.children import SEGMENT, descendants

ROOT = Path(__file__).resolve().parents[2]
PHASE_BYTES = 32
# A process by the log that it writes and by how many of its ancestors do: not by its title, as setproctitle does
# nothing where the first variable of the environment has been replaced.
ROLES = {
    "RankActor": ("rank_", 0),
    "EngineActor": ("engine_", 0),
    "EngineCore": ("engine_", 1),
    "Worker": ("engine_", 2),
}


def title(pid: int) -> str:
    try:
        return (
            Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        )
    except OSError:
        return ""


def output(pid: int) -> str:
    """The name of the file that its standard error is."""
    try:
        return Path(os.readlink(f"/proc/{pid}/fd/2")).name
    except OSError:
        return ""


def ancestors(pid: int) -> Iterator[int]:
    """Its parent, and theirs."""
    with suppress(OSError):
        while pid := int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]):
            yield pid


def started(pid: int) -> str | None:
    """When this process was started; None if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


@dataclass
class Belongings:
    """Processes below this one, and the shared memory that they map: looked for until the end."""

    # TMPDIR; short, as sockets are there
    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="t")))
    processes: dict[int, str | None] = field(default_factory=dict)
    segments: set[str] = field(default_factory=set)
    _ended: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        for pid, began in self.processes.items():
            if began is not None and started(pid) == began:  # of a test that has failed
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _watch(self) -> None:
        while not self._ended.wait(0.5):
            for pid in descendants(os.getpid()):
                if pid not in self.processes:
                    self.processes[pid] = started(pid)
                with suppress(OSError):
                    self.segments.update(SEGMENT.findall(Path(f"/proc/{pid}/maps").read_text()))

    def left(self, timeout_s: float = 90) -> list[str]:
        """Processes, segments of shared memory and folders of Ray that are there, unless they go within this time.

        Ray's agents outlive a controller that is killed by 62 s: they report its end to a GCS that is gone, with a
        time-out of 60 s that is no setting (ray/_private/utils.py, publish_error_to_driver)."""
        deadline = time.monotonic() + timeout_s
        while True:
            running = [
                pid
                for pid, began in self.processes.items()
                if began is not None and started(pid) == began
            ]
            left = [f"{pid} {title(pid)[:80]}" for pid in running]
            left += [name for name in self.segments if Path(name).exists()] + list(
                map(str, self.folder.glob("megarl-ray-*"))
            )
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.2)


@dataclass
class Node:
    """A Ray node: several of them on this machine are a cluster."""

    process: subprocess.Popen[str]

    @classmethod
    def start(cls, folder: Path, name: str, cpus: int, *where: str) -> Self:
        """`where`: --head ..., or --address HOST:PORT of the head; the token is FOLDER/token."""
        own = [
            "--num-cpus",
            str(cpus),
            "--node-ip-address",
            "127.0.0.1",
            "--object-store-memory",
            str(100 << 20),
        ]
        (folder / "token").write_text("ab" * 32)
        environment = child_env(
            **cls.access(folder), RAY_agent_register_timeout_ms=240_000, TMPDIR=str(folder)
        )
        command = [Path(sys.executable).with_name("ray"), "start", "--block", *own, *where]
        with (log := folder / f"{name}.log").open("w") as output:
            process = subprocess.Popen(
                command, env=environment, stdout=output, stderr=subprocess.STDOUT, text=True
            )
        deadline = time.monotonic() + 240
        while "Ray runtime started" not in log.read_text():
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        return cls(process)

    @staticmethod
    def access(folder: Path) -> dict[str, Any]:
        return {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": folder / "token",
            "RAY_USAGE_STATS_ENABLED": 0,
        }

    def kill(self) -> None:
        for pid in [self.process.pid, *descendants(self.process.pid)]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


@dataclass
class Run:
    """`megarl train CONFIG key=value ...`; `is_watched`: with its phase and batches."""

    folder: Path  # run.dir
    name: str
    process: subprocess.Popen[str]
    again: Callable[[], Run]  # starts the same command

    @classmethod
    def start(
        cls,
        folder: Path,
        name: str,
        config: str,
        *values: str,
        tmp: Path | None = None,
        is_watched: bool = False,
    ) -> Self:
        folder.mkdir(parents=True, exist_ok=True)
        own = (folder / name).with_suffix(".watched")
        own.mkdir(exist_ok=True)
        program = [str(Path(__file__)), str(own)] if is_watched else ["-m", "megarl.cli"]
        command = [
            sys.executable,
            *program,
            "train",
            f"configs/{config}.yaml",
            f"run.dir={folder}",
            f"run.name={name}",
        ]
        environment = child_env(**({"TMPDIR": str(tmp)} if tmp else {}))
        with (folder / f"{name}.err").open("a") as errors:
            process = subprocess.Popen(
                [*command, *values],
                cwd=ROOT,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                text=True,
                env=environment,
            )
        again = partial(cls.start, folder, name, config, *values, tmp=tmp, is_watched=is_watched)
        return cls(folder, name, process, again)

    @property
    def watched(self) -> Path:
        return (self.folder / self.name).with_suffix(".watched")

    def finish(self, code: int = 0) -> list[dict[str, Any]]:
        """Its metrics, one of each step."""
        assert self.process.wait(550) == code, self.errors() + self._logs()
        return self.rows()

    def rows(self) -> list[dict[str, Any]]:
        file = self.folder / self.name / "metrics.jsonl"
        return (
            [json.loads(line) for line in file.read_text().splitlines() if line]
            if file.exists()
            else []
        )

    def step(self) -> int:
        """The last one that is done; -1: none."""
        return max((row["step"] for row in self.rows()), default=-1)

    def errors(self) -> str:
        return (self.folder / f"{self.name}.err").read_text(errors="replace")

    def _logs(self) -> str:
        files = (self.folder / self.name / "logs").glob("*")
        return "\n".join(
            f"== {file.name}\n{file.read_text(errors='replace')[-1500:]}" for file in files
        )

    def family(self, pattern: str) -> list[int]:
        """Its processes whose command contains `pattern`, or of this role."""
        family = descendants(self.process.pid)
        if pattern not in ROLES:
            return [pid for pid in family if pattern in title(pid)]
        log, generation = ROLES[pattern]
        writers = [
            pid for pid in family if "resource_tracker" not in title(pid) and log in output(pid)
        ]
        return [
            pid for pid in writers if len(set(writers).intersection(ancestors(pid))) == generation
        ]

    def phase(self) -> str:
        file = self.watched / "phase"
        return file.read_text().strip() if file.exists() else ""

    def wait_for(
        self, what: Callable[[], Any], timeout_s: float = 480, pause_s: float = 0.02
    ) -> Any:
        deadline = time.monotonic() + timeout_s
        while not (value := what()):
            assert self.process.poll() is None, (
                f"it has ended, code {self.process.poll()}:\n{self.errors()}{self._logs()}"
            )
            assert time.monotonic() < deadline, f"it did not happen:\n{self.errors()}{self._logs()}"
            time.sleep(pause_s)
        return value

    def until(self, step: int, timeout_s: float = 480) -> None:
        self.wait_for(lambda: self.step() >= step, timeout_s)

    def kill(self, victim: str, phase: str = "", delay_s: float = 0.0) -> float | None:
        """Kills one process (`controller`: that itself) this long after a phase begins; returns after how many seconds
        the controller has noticed, None where nobody is left to notice."""
        noticed, pid = self.errors().count("; restart "), self._victim(victim, phase, delay_s)
        os.kill(pid, signal.SIGKILL)
        began = time.monotonic()
        if victim == "controller":
            self.process.wait()
            return None
        self.wait_for(lambda: self.errors().count("; restart ") > noticed, timeout_s=60)
        return time.monotonic() - began

    def pause(self, victim: str, phase: str, delay_s: float, *, seconds: float) -> None:
        pid = self._victim(victim, phase, delay_s)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(pid, signal.SIGCONT)

    def _victim(self, victim: str, phase: str, delay_s: float) -> int:
        pid = (
            self.process.pid
            if victim == "controller"
            else self.wait_for(lambda: self.family(victim))[0]
        )
        if phase:
            self.wait_for(lambda: self.phase() != phase, pause_s=0.001)
            self.wait_for(lambda: self.phase() == phase, pause_s=0.001)
        time.sleep(delay_s)
        return pid

    def audit(self) -> str:
        """The balance of the ledger, which must be even."""
        command = [sys.executable, "-m", "megarl.cli", "audit", str(self.folder / self.name)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return " ".join(done.stdout.split())

    def listeners(self) -> set[tuple[str, int]]:
        """Addresses, as in /proc/net/tcp and tcp6, and ports on which its processes listen."""
        sockets = set[str]()
        for pid in (self.process.pid, *descendants(self.process.pid)):
            for handle in Path(f"/proc/{pid}/fd").glob("*"):
                with suppress(OSError):
                    sockets.update(re.findall(r"^socket:\[(\d+)\]$", os.readlink(handle)))
        found = set[tuple[str, int]]()
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                _, local, _, state, *rest = line.split()
                if state == "0A" and rest[5] in sockets:
                    address, port = local.split(":")
                    found.add((address, int(port, 16)))
        return found


PROBE = """
import socket, sys
for port in map(int, sys.argv[2:]):
    probe = socket.socket()
    probe.settimeout(2)
    if probe.connect_ex((sys.argv[1], port)) == 0:
        print(port)
"""


def open_to_others(ports: set[int]) -> set[int] | None:
    """Those that a process in another network namespace, as on another host, can connect to; None where none may be
    made. One port that listens on all addresses is tried with them, and must be open."""
    name, address = f"m{os.getpid()}", "10.231.7"

    def ip(*words: str) -> bool:
        return subprocess.run(["ip", *words], capture_output=True).returncode == 0

    try:
        if not (shutil.which("ip") and ip("netns", "add", name)):
            return None
        steps = (
            f"link add {name}h type veth peer name {name}p netns {name}",
            f"addr add {address}.1/30 dev {name}h",
            f"link set {name}h up",
            f"-n {name} addr add {address}.2/30 dev {name}p",
            f"-n {name} link set {name}p up",
        )
        if not all(ip(*step.split()) for step in steps):
            return None
        with socket.create_server(("0.0.0.0", 0)) as control:
            port = control.getsockname()[1]
            command = ["ip", "netns", "exec", name, sys.executable, "-c", PROBE, f"{address}.1"]
            done = subprocess.run(
                [*command, *map(str, (port, *ports))], capture_output=True, text=True, check=True
            )
        found = set(map(int, done.stdout.split()))
        assert port in found
        return found - {port}
    finally:
        ip("link", "del", f"{name}h")
        ip("netns", "del", name)


def compare(
    one: list[dict[str, Any]],
    other: list[dict[str, Any]],
    rel: float = 0.0,
    least: float = 1e-12,
) -> float:
    """Same samples; loss and gradient norm bit for bit, or to `rel` of the value or of `least`.

    Returns the largest relative difference.
    """
    assert [row["step"] for row in one] == [row["step"] for row in other]
    worst = 0.0
    for row, expected in zip(one, other, strict=True):
        assert row["rollout/digest"] == expected["rollout/digest"], row["step"]
        assert row["weights/verified"] and row["weights/version"] == expected["weights/version"]
        for key in ("loss", "grad_norm", "reward/mean", "entropy"):
            difference = abs(row[key] - expected[key]) / max(abs(expected[key]), least)
            assert difference <= rel, (row["step"], key, difference)
            worst = max(worst, difference)
    return worst


def main(folder: Path, arguments: list[str]) -> int:
    import torch

    from megarl.cli import main as megarl
    from megarl.data import collate
    from megarl.processes.exit_codes import CurrentPhase

    phase = os.open(folder / "phase", os.O_RDWR | os.O_CREAT)

    def set_phase(self: CurrentPhase, name: str) -> None:
        self.__dict__["name"] = name
        os.pwrite(phase, name.ljust(PHASE_BYTES).encode(), 0)

    def collate_and_keep(groups: Any, **options: Any) -> Any:
        batch = plain(groups, **options)
        number = len(list(folder.glob("batch_*")))
        torch.save(batch, folder / f"batch_{number}.pt")
        return batch

    CurrentPhase.name = property(lambda self: self.__dict__.get("name", ""), set_phase)  # type: ignore[assignment]
    plain, collate.collate = collate.collate, collate_and_keep
    return megarl(arguments)


if __name__ == "__main__":
    into, *rest = sys.argv[1:]
    sys.exit(main(Path(into), rest))
