"""A rank that stalls is named, SIGTERM saves, and either run, started again, ends as if nothing had happened."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megarl.platform.env import child_env

ROOT = Path(__file__).resolve().parents[2]
SFT = [
    "configs/quickstart_sft.yaml",
    "model.create.layers=2",
    "train.steps=20",
    "train.prompts_per_step=8",
    "train.schedule=cosine",
    "checkpoint.every=1000",  # so that only a save at the end can be resumed
    "checkpoint.export_hf=end",
    "launch.processes=2",
    "launch.timeout_s=60",
]
MOE = [
    "configs/tiny_moe.yaml",
    "task.name=stall_task:random_tokens",
    "task.options={vocab: 67}",
    "rewards=[{name: 'stall_task:reward'}]",
    "parallel.pipeline=2",
    "parallel.expert=2",
    "launch.processes=4",
    "train.steps=3",
    "checkpoint.every=1",
    "checkpoint.export_hf=end",
]
OPERATIONS = ("p2p", "alltoall", "reduce", "sync", "engine")
# A cluster of two nodes: srun starts the step on both, scancel signals every process of the step, as Slurm does.
SLURM = {
    "srun": """#!/usr/bin/env bash
shift
for node in 0 1; do SLURM_NODEID=$node setsid "$@" & pids+=("$!"); done
echo "${pids[@]}" > "$CLUSTER/step"
for pid in "${pids[@]}"; do wait "$pid" || code=$?; done
exit "${code:-0}"
""",
    "scancel": """#!/usr/bin/env bash
tree() { echo "$1"; for child in $(cat /proc/"$1"/task/*/children 2>/dev/null); do tree "$child"; done; }
kill -TERM $(for pid in $(cat "$CLUSTER/step"); do tree "$pid"; done)
""",
    "scontrol": """#!/usr/bin/env bash
case $1 in show) echo 127.0.0.1; echo 127.0.0.1 ;; requeue) echo "$2" >> "$CLUSTER/requeued" ;; esac
""",
}


def command(folder: Path, name: str, values: list[str]) -> list[str]:
    config, *overrides = values
    run = [f"run.dir={folder}", f"run.name={name}"]
    return [sys.executable, "-m", "megarl.cli", "train", config, *run, *overrides]


def run(
    folder: Path, name: str, values: list[str], stall: str = "nowhere:never:0"
) -> subprocess.CompletedProcess[str]:
    env = child_env(STALL=stall, PYTHONPATH=f"{ROOT}:{Path(__file__).parent}", OMP_NUM_THREADS=1)
    return subprocess.run(
        command(folder, name, values), cwd=ROOT, env=env, capture_output=True, text=True
    )


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "hf" / "model.safetensors")


def is_equal(folder: Path, *names: str) -> bool:
    one, other = (weights(folder / name) for name in names)
    steps = [
        [json.loads(line)["step"] for line in (folder / name / "metrics.jsonl").open()]
        for name in names
    ]
    return all(torch.equal(one[name], other[name]) for name in one) and steps[1] == sorted(
        set(steps[1])
    )


def wait_for_steps(folder: Path, count: int) -> None:
    deadline = time.monotonic() + 300
    while (
        not (file := folder / "metrics.jsonl").exists()
        or len(file.read_text().splitlines()) < count
    ):
        assert time.monotonic() < deadline, "no steps"
        time.sleep(0.05)


# In ranks, not in what they start: a library aborts as it is torn down.
ABORTS = """
import atexit, os, sys, threading
if "megarl.cli" in sys.orig_argv and "RANK" in os.environ:
    atexit.register(os.abort)
    threading.Thread(target=lambda: (threading.main_thread().join(), os.abort()), daemon=True).start()
"""


def exit_file(folder: Path) -> dict[str, object]:
    return json.loads((folder / "exit.json").read_text())


def sums(folder: Path) -> list[str]:
    rows = [
        {"prompt": f"Calculate {a} + {b}.", "answer": str(a + b)}
        for a in range(10, 30)
        for b in range(10, 30)
    ]
    (folder / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return [*SFT, f"task.name=jsonl:{folder}/sums.jsonl", "task.options={}"]


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_sigterm_under_slurm_saves_requeues_and_resumes(tmp_path: Path) -> None:
    # the engine spans both nodes, too: as on two hosts, they share no memory
    values = [*sums(tmp_path), "parallel.tensor=2", "rollout.tensor=2"]
    assert run(tmp_path, "whole", values).returncode == 0
    (tmp_path / "at_start").mkdir()
    (tmp_path / "at_start/sitecustomize.py").write_text(ABORTS)
    for name, text in SLURM.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    env = child_env(
        PATH=f"{tmp_path}:{os.environ['PATH']}", CLUSTER=str(tmp_path), PYTHON=sys.executable, PYTHONPATH=f"{ROOT}:{tmp_path}/at_start",
        SLURM_SUBMIT_DIR=str(ROOT), SLURM_JOB_ID=os.getpid(), SLURM_JOB_NODELIST="n[0-1]", SLURM_NNODES=2, NPROC=1,
        OMP_NUM_THREADS=1,
    )  # fmt: skip
    config, *overrides = values
    batch = [
        "bash",
        "scripts/slurm.sbatch",
        config,
        f"run.dir={tmp_path}",
        "run.name=slurm",
        *overrides,
    ]
    process = subprocess.Popen(
        batch, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    wait_for_steps(tmp_path / "slurm", 3)
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=400)[0]
    assert process.returncode != 0 and (tmp_path / "requeued").read_text() == f"{os.getpid()}\n", (
        said
    )
    assert exit_file(tmp_path / "slurm")["code"] == 143, said
    spans = json.loads((tmp_path / "slurm" / "timeline_node1.json").read_text())
    assert {"step 0", "update"} <= {span["name"] for span in spans} and spans[0]["pid"] == 1
    (saved,) = (path.name for path in (tmp_path / "slurm" / "checkpoints").glob("step_*"))
    again = subprocess.run(batch, cwd=ROOT, env=env, capture_output=True, text=True)
    assert again.returncode == 0, again.stdout + again.stderr
    assert exit_file(tmp_path / "slurm") == {"code": 0, "world": 2}
    reports = [(tmp_path / name / "report.html").read_text() for name in ("whole", "slurm")]
    assert reports[0].splitlines()[-1] == reports[1].splitlines()[-1], "it is complete"
    first = json.loads((tmp_path / "slurm" / "metrics.jsonl").read_text().splitlines()[0])["step"]
    print(f"{saved} saved, metrics from step {first}")
    assert 3 <= int(saved.removeprefix("step_")) < 20 and is_equal(tmp_path, "whole", "slurm")


def check_stall(folder: Path, stall: str, values: list[str], timeout_s: int = 60) -> None:
    """The rank is named, the code is 3, and the run, started again, ends like one that was left alone."""
    where, how, rank = stall.split(":")
    name = f"{where}-{how}"
    done = run(folder, name, [*values, f"launch.timeout_s={timeout_s}"], stall)
    lines = [line for line in done.stderr.splitlines() if line.startswith("megarl: rank")]
    # as any rank is on a busy machine
    first = next(line for line in lines if "late, but not stuck" not in line)
    print(f"\n{stall}: exit {done.returncode}\n{first}", flush=True)
    assert done.returncode == 3 and exit_file(folder / name)["rank"] == int(rank), done.stderr
    assert (
        f"megarl: rank {rank} (process " in first
        and int(first.partition(", for ")[2].partition(" s ")[0]) <= 60
    )
    assert ("is stopped, by a signal" if how == "stop" else "neither moves nor computes") in first
    assert run(folder, name, values).returncode == 0 and is_equal(folder, "whole", name)


@pytest.mark.long
@pytest.mark.exhaustive  # a stopped rank is named on every change, without training (unit/processes/test_spawn.py)
@pytest.mark.timeout(900)
def test_a_rank_stopped_in_a_pipeline_message_is_named_and_the_run_resumes(tmp_path: Path) -> None:
    values = [
        value
        for value in sums(tmp_path)
        if "checkpoint.every" not in value and "train.steps" not in value
    ]
    values += [
        "task.name=stall_task:sums",
        "parallel.pipeline=2",
        "checkpoint.every=1",
        "train.steps=4",
    ]
    assert run(tmp_path, "whole", values).returncode == 0
    check_stall(tmp_path, "p2p:stop:1", values)


@pytest.fixture(scope="module")
def unstalled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run in which one rank's reward takes 20 s, which changes nothing: `whole`."""
    folder, began = tmp_path_factory.mktemp("stalls"), time.monotonic()
    slow = run(folder, "whole", [*MOE, "launch.timeout_s=60"], "reward:slow:0")
    print(
        f"\nreward:slow:0: exit {slow.returncode}\n{slow.stderr.strip() or 'nothing said'}",
        flush=True,
    )
    assert slow.returncode == 0 and time.monotonic() - began > 20
    first = json.loads((folder / "whole" / "metrics.jsonl").open().readline())
    assert first["samples/dropped"] == 0 and first["time/reward"] > 15, first
    return folder


@pytest.mark.long
@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("stall", [f"{name}:stop:1" for name in OPERATIONS] + ["alltoall:hang:1"])
def test_a_stalled_rank_is_named_and_the_run_resumes(unstalled: Path, stall: str) -> None:
    check_stall(unstalled, stall, MOE, timeout_s=120 if "hang" in stall else 60)


@pytest.mark.long
@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("tensor", [1, 2])
def test_sigterm_in_a_rollout(tmp_path: Path, tensor: int) -> None:
    """The rollout is given up, by the ranks of a replica at the same engine step."""
    values = [
        "configs/tiny_dense.yaml",
        "parallel.tensor=2",
        "launch.processes=2",
        "checkpoint.every=1000",
    ]
    values += [
        f"rollout.tensor={tensor}",
        "rollout.max_tokens=400",
        "train.steps=4",
        "checkpoint.export_hf=end",
    ]
    assert run(tmp_path, "whole", values).returncode == 0
    process = subprocess.Popen(
        command(tmp_path, "cut", values), cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    wait_for_steps(tmp_path / "cut", 2)
    time.sleep(1.0)
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    said = process.communicate()[1]
    print(
        f"\nrollout.tensor={tensor}: exit {process.returncode} {time.monotonic() - began:.1f} s after SIGTERM\n{said}"
    )
    assert process.returncode == exit_file(tmp_path / "cut")["code"] == 143
    assert run(tmp_path, "cut", values).returncode == 0 and is_equal(tmp_path, "whole", "cut")


@pytest.mark.long
@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_under_torchrun_the_ranks_watch_each_other(tmp_path: Path) -> None:
    config, *overrides = [
        *sums(tmp_path),
        "task.name=stall_task:sums",
        "parallel.pipeline=2",
        "launch.timeout_s=120",
    ]
    env = child_env(
        NNODES=1, NODE_RANK=0, MASTER_ADDR="127.0.0.1", MASTER_PORT=20_000 + os.getpid() % 20_000, NPROC=2,
        PYTHON=sys.executable, PYTHONPATH=f"{ROOT}:{Path(__file__).parent}", OMP_NUM_THREADS=1, STALL="p2p:stop:1",
    )  # fmt: skip
    script = [
        "bash",
        "scripts/torchrun_multinode.sh",
        config,
        f"run.dir={tmp_path}",
        "run.name=watched",
        *overrides,
    ]
    done = subprocess.run(script, cwd=ROOT, env=env, capture_output=True, text=True, timeout=400)
    left = exit_file(tmp_path / "watched")
    print(done.returncode, left)
    assert done.returncode == 1 and (left["code"], left["rank"]) == (3, 1), (
        done.stdout + done.stderr
    )
    assert (
        f"megarl: {str(left['error'])[:20]}" in done.stdout
        and "is stopped, by a signal or a debugger" in done.stdout
    )
