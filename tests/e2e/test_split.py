"""The split topology, on the real Ray, Megatron-Core and vLLM: the numbers of the colocated one, whatever is killed.

One run serves many checks, as starting Ray, ranks and engines is what takes the time.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megarl.platform.children import descendants
from megarl.platform.env import child_env

ROOT = Path(__file__).resolve().parents[2]
SEGMENTS = re.compile(r"psm_|vllm|megarl|sem\.")


def arguments(folder: Path, name: str, config: str, *overrides: str) -> list[str]:
    values = [f"run.dir={folder}", f"run.name={name}", *overrides]
    return [sys.executable, "-m", "megarl.cli", "train", f"configs/{config}.yaml", *values]


def start(folder: Path, name: str, config: str, *overrides: str) -> subprocess.Popen[str]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.err").open("w") as errors:
        command = arguments(folder, name, config, *overrides)
        return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=errors, text=True)


def finish(process: subprocess.Popen[str], folder: Path, name: str, code: int = 0) -> list[dict[str, Any]]:
    """Its metrics, one of each step."""
    assert process.wait(550) == code, (folder / f"{name}.err").read_text() + logs(folder / name)
    return rows(folder / name)


def rows(run: Path) -> list[dict[str, Any]]:
    file = run / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def logs(run: Path) -> str:
    return "\n".join(f"== {file.name}\n{file.read_text(errors='replace')[-1500:]}" for file in (run / "logs").glob("*"))


def family(process: subprocess.Popen[str], pattern: str) -> list[int]:
    """Processes of the run whose name or command contains `pattern`."""

    def title(pid: int) -> str:
        try:
            return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            return ""

    return [pid for pid in descendants(process.pid) if pattern in title(pid)]


def wait_for(what: Callable[[], Any], process: subprocess.Popen[str], timeout_s: float = 240) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (value := what()):
        assert process.poll() is None and time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)
    return value


def listeners(pids: set[int]) -> set[str]:
    """Addresses, as in /proc/net/tcp and tcp6, on which these processes listen."""
    sockets = set[str]()
    for pid in pids:
        for handle in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                sockets.update(re.findall(r"^socket:\[(\d+)\]$", os.readlink(handle)))
            except OSError:
                continue
    found = set[str]()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == "0A" and rest[5] in sockets:
                found.add(local.partition(":")[0])
    return found


LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}


@pytest.fixture
def clean() -> Iterator[None]:
    """What a run leaves behind is a fault: segments of shared memory, folders of Ray."""

    def left() -> set[str]:
        segments = {name for name in os.listdir("/dev/shm") if SEGMENTS.search(name)}
        return segments | {str(path) for path in Path("/tmp").glob("megarl-ray-*")}

    before = left()
    yield
    assert left() <= before


def compare(split: list[dict[str, Any]], colocated: list[dict[str, Any]], rel: float = 0.0) -> None:
    """Same samples; loss and gradient norm bit for bit, or to `rel`."""
    assert [row["step"] for row in split] == [row["step"] for row in colocated]
    for one, other in zip(split, colocated, strict=True):
        assert one["rollout/digest"] == other["rollout/digest"], one["step"]
        assert one["weights/verified"] and one["weights/version"] == other["weights/version"]
        worst = max(
            (abs(one[key] - other[key]) / max(abs(other[key]), 1e-12), key)
            for key in ("loss", "grad_norm", "reward/mean", "entropy")
        )
        print(f"step {one['step']}: largest relative difference {worst[0]:.1e} ({worst[1]})")
        assert worst[0] <= rel, worst


SPLIT = ("launch.topology=split",)
SMALL = ("train.prompts_per_step=4", "rollout.samples_per_prompt=4", "rollout.cpu_kv_cache_gb=0.1")


@pytest.mark.long
@pytest.mark.exhaustive  # several minutes: Ray and two engines start for each
@pytest.mark.usefixtures("clean")
def test_split_equals_colocated_and_shuts_strangers_out(tmp_path: Path) -> None:
    """Also: checkpoints of either topology resume in the other."""
    common = ("train.steps=4", "checkpoint.every=2", *SMALL)
    whole = start(tmp_path, "whole", "tiny_dense", "launch.processes=1", *common)
    colocated = finish(whole, tmp_path, "whole")

    run = start(tmp_path, "split", "tiny_dense", *SPLIT, "launch.processes=1", *common)
    wait_for(lambda: family(run, "EngineCore") and rows(tmp_path / "split"), run)
    pids = {run.pid, *descendants(run.pid)}
    assert listeners(pids) <= LOOPBACK, listeners(pids)
    assert not family(run, "dashboard.py --host") or not is_open(8265)
    environment = child_env(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="0" * 64)
    address = gcs_address(run)
    stranger = f"import ray; ray.init(address='{address}', logging_level='ERROR')"
    refused = subprocess.run([sys.executable, "-c", stranger], env=environment, capture_output=True, text=True)
    assert refused.returncode != 0 and "uthenticat" in refused.stderr, refused.stderr[-800:]
    compare(finish(run, tmp_path, "split"), colocated)


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def gcs_address(process: subprocess.Popen[str]) -> str:
    (pid,) = family(process, "gcs_server")[:1]
    command = Path(f"/proc/{pid}/cmdline").read_bytes().decode()
    raylet = Path(f"/proc/{family(process, 'raylet/raylet')[0]}/cmdline").read_bytes().decode()
    found = re.search(r"--gcs-address=([\d.]+:\d+)", raylet)
    assert found, command
    return found[1]


@pytest.mark.long
@pytest.mark.exhaustive  # several minutes: Ray and two engines start for each
@pytest.mark.usefixtures("clean")
def test_what_is_killed_is_replaced_and_the_numbers_stay(tmp_path: Path) -> None:
    """An engine's core and its actor, then a rank of the trainer; each while the run goes on."""
    common = ("train.steps=8", "checkpoint.every=1", "launch.processes=1", *SMALL)
    colocated = finish(start(tmp_path, "whole", "tiny_dense", *common), tmp_path, "whole")
    run = start(tmp_path, "killed", "tiny_dense", *SPLIT, "rollout.replicas=2", *common)
    kills: list[str] = []
    for step, pattern in ((1, "EngineCore"), (3, "EngineActor"), (5, "RankActor")):
        wait_for(lambda step=step: max((row["step"] for row in rows(tmp_path / "killed")), default=-1) >= step, run)
        victim = wait_for(lambda pattern=pattern: family(run, pattern), run)[0]
        os.kill(victim, signal.SIGKILL)
        kills.append(pattern)
    compare(finish(run, tmp_path, "killed"), colocated)
    assert (tmp_path / "killed.err").read_text().count("restart ") == len(kills)


CASES = {
    "tensor 1, two replicas": (0.0, "launch.processes=2", "rollout.replicas=2"),
    "tensor 2": (1e-5, "launch.processes=2", "rollout.tensor=2"),
    "tensor 2, two replicas": (
        1e-5,
        "launch.processes=4",
        "parallel.tensor=2",
        "rollout.tensor=2",
        "rollout.replicas=2",
    ),
}


@pytest.mark.long
@pytest.mark.exhaustive
@pytest.mark.timeout(2400)
@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize("model", ["tiny_dense", "tiny_moe"])
@pytest.mark.parametrize("case", CASES)
def test_twenty_steps(model: str, case: str, tmp_path: Path) -> None:
    rel, *layout = CASES[case]
    common = ("train.steps=20", *SMALL)
    trained = [value for value in layout if "replicas" not in value]
    colocated = finish(start(tmp_path, "whole", model, *trained, *common), tmp_path, "whole")
    split = finish(start(tmp_path, "split", model, *SPLIT, *layout, *common), tmp_path, "split")
    compare(split, colocated, rel)
