"""Several nodes, as two torchruns or two bare ranks on this machine: one job, and one rank's failure ends it all."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from start_ranks import environ, free_port

from megarl.platform.env import child_env

pytestmark = pytest.mark.long
ROOT = Path(__file__).resolve().parents[2]
FAILING = """
import os, sys
class Rows(list):
    def __getitem__(self, index):
        distributed = sys.modules.get("torch.distributed")  # the checks before it read all rows
        has_begun = distributed and distributed.is_initialized()
        if os.environ.get("RANK") == "1" and index > 4 and has_begun:
            raise RuntimeError("disk of node 1 is gone")
        return {"prompt": f"{index + 4} 9"}
def rows(split):
    return Rows([None] * 50)
"""


def nodes(
    folder: Path, *overrides: str, torchrun: bool = True, config: str = "tiny_dense"
) -> list[tuple[int, str]]:
    """(exit code, what it said) of the script on each of two nodes, or of two ranks as srun starts them."""
    port, started = free_port(), []
    for rank in range(2):
        values = {
            "NNODES": 2,
            "NODE_RANK": rank,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "NPROC": 1,
        }
        values |= {"PYTHON": sys.executable, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": 1}
        env = child_env(**values | ({} if torchrun else environ(rank, 2, port)))
        launcher = (
            ["bash", "scripts/torchrun_multinode.sh"]
            if torchrun
            else [sys.executable, "-m", "megarl.cli", "train"]
        )
        command = [*launcher, f"configs/{config}.yaml", f"run.dir={folder}", *overrides]
        started.append(
            subprocess.Popen(
                command,
                cwd=ROOT,
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        said = [process.communicate(timeout=500)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    return [(process.returncode, text) for process, text in zip(started, said, strict=True)]


EXPERTS = "parallel.expert=2 rollout.data=2 rollout.expert=2"


@pytest.mark.exhaustive
def test_an_engine_spans_nodes_with_data_and_expert_parallelism(tmp_path: Path) -> None:
    """Its two data ranks are on two nodes, and sample what an engine of one rank samples."""
    common = ["train.steps=2", "parallel.expert=2"]
    single = nodes(tmp_path, "run.name=single", *common, config="tiny_moe")
    spanning = nodes(tmp_path, "run.name=spanning", *EXPERTS.split(), *common, config="tiny_moe")
    assert [code for code, _ in (*single, *spanning)] == [0] * 4, (single, spanning)
    names = ("single", "spanning")
    runs = [(tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in names]
    for one, other in zip(*(map(json.loads, lines) for lines in runs), strict=True):
        assert one["rollout/digest"] == other["rollout/digest"] and other["weights/verified"]
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-5)


@pytest.mark.exhaustive  # two nodes train on every change under Slurm's script (e2e/test_stops.py)
def test_two_nodes_are_one_job(tmp_path: Path) -> None:
    done = nodes(tmp_path, "run.name=nodes", "parallel.tensor=2", "train.steps=2")
    assert [code for code, _ in done] == [0, 0], done
    rows = [
        json.loads(line) for line in (tmp_path / "nodes" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [row["world_size"] for row in rows] == [2, 2]
    assert (
        rows[0]["weights/bytes_received"] > 0
        and max(row["logprob_diff/max"] for row in rows) < 1e-4
    )
    assert json.loads((tmp_path / "nodes" / "exit.json").read_text())["code"] == 0


@pytest.mark.parametrize("torchrun", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_a_failure_on_one_node_ends_the_other_and_is_said(tmp_path: Path, torchrun: bool) -> None:
    (tmp_path / "failing.py").write_text(FAILING)
    began = time.monotonic()
    task = ["task.name=failing:rows", "task.options={}", "task.template=plain"]
    done = nodes(
        tmp_path,
        "run.name=failed",
        "parallel.tensor=2",
        "launch.timeout_s=600",
        *task,
        torchrun=torchrun,
    )
    assert time.monotonic() - began < 400, "the other node waited for a collective's time-out"
    assert all(code != 0 for code, _ in done), done
    left = json.loads((tmp_path / "failed" / "exit.json").read_text())
    assert left["code"] == 1 and "disk of node 1 is gone" in left["error"], left
