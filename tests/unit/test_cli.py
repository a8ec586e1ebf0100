"""The command as a user types it: exit codes, one line for a mistake, quickly and without torch."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megarl import cli

WITHOUT_TORCH = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "vllm", "megatron", "transformers"):
            raise AssertionError(name + " was imported")
sys.meta_path.insert(0, Refuse())
from megarl.cli import main
sys.exit(main(sys.argv[1:]))
"""
CONFIG = "run: {dir: RUNS}\nmodel: {create: {}}\ntask: {name: jsonl:task.jsonl}\nrollout: {max_tokens: 16}\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "c.yaml").write_text(CONFIG.replace("RUNS", str(tmp_path / "runs")))
    (tmp_path / "task.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    return tmp_path


def megarl(folder: Path, *args: str) -> tuple[int, str, str]:
    command = [sys.executable, "-c", WITHOUT_TORCH, *args]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


def cpu_seconds() -> float:
    """Of the child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.fixture(scope="module")
def torch_s() -> float:
    """CPU seconds that importing torch takes on this machine now."""
    before = cpu_seconds()
    subprocess.run([sys.executable, "-c", "import torch"], check=True, timeout=120)
    return cpu_seconds() - before


def test_dry_run_says_what_would_run_and_writes_nothing(folder: Path) -> None:
    code, out, err = megarl(
        folder,
        "train",
        "c.yaml",
        "--dry-run",
        "train.prompts_per_step=4",
        "parallel.tensor=2",
        "train.dtype=fp32",  # some CPUs have no bf16, and a run on one is warned
    )
    assert (code, err) == (0, "")
    assert "prompts_per_step: 4" in out, "an override behind an option counts too"
    assert "4 prompts x 8 samples = 32 rows of at most 1040 tokens" in out
    assert "2 (no GPU here); Megatron-Core: tp2 (data 1); vLLM: 2 replicas of tp1" in out
    assert not (folder / "runs").exists()


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["train", "c.yaml", "train.stepz=1"], "did you mean steps?"),
        (["train", "c.yaml", "parallel.tensor=3"], "heads=4 is not divisible by parallel.tensor=3"),
        (
            ["train", "c.yaml", "launch.processes=3", "parallel.tensor=2"],
            "3 processes (launch.processes",
        ),
        (["train", "c.yaml", "model.path=/nope"], "/nope is not a directory"),
        (["train", "c.yaml", "model.path=."], "no config.json"),
        (["train", "c.yaml", "model.path=gpt"], "supported: llama, qwen2, qwen3, qwen3_moe"),
        (["train", "c.yaml", "task.name=jsonl:empty.jsonl"], "empty.jsonl"),
        (["train", "c.yaml", "task.name=jsonl:bad.jsonl"], "line 2"),
        (["train", "c.yaml", "task.name=jsonl:nope.jsonl"], "nope.jsonl"),
        (["train", "c.yaml", "rewards=[{name: 'nope.mod:f'}]"], "nope.mod:f"),
        (["train", "cc.yaml"], "did you mean c.yaml?"),
        (["train", "c.yaml", "--fast"], "unknown argument --fast"),
        (["train"], "CONFIG"),
        (["trian", "c.yaml"], "invalid choice: 'trian'"),
        (["report", "runs/none"], "runs/none"),
    ],
)
def test_a_mistake_is_one_line_and_exit_2(
    folder: Path, args: list[str], said: str, torch_s: float
) -> None:
    (folder / "empty.jsonl").write_text("")
    (folder / "bad.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt"\n')
    (folder / "gpt").mkdir()
    (folder / "gpt" / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    before = cpu_seconds()
    code, out, err = megarl(folder, *args)
    assert (code, out) == (2, ""), err
    assert err.count("\n") == 1, err
    assert said in err
    assert cpu_seconds() - before < torch_s, "it is said before torch is imported"


def test_help_names_the_commands(folder: Path) -> None:
    code, out, _err = megarl(folder, "--help")
    assert code == 0
    assert all(word in out for word in ("train", "eval", "report", "section.key=value"))


def test_plan_needs_neither_torch_nor_weights(folder: Path) -> None:
    """A model of 117 billion parameters on 64 GPUs, from its config.json."""
    configs = Path(__file__).resolve().parents[2] / "configs"
    model = f"model.path={configs}/models/gpt_oss_120b"
    code, out, err = megarl(
        folder, "plan", str(configs / "gpt_oss_120b.yaml"), model, "--weights", "--json"
    )
    assert (code, err) == (0, "")
    plan = json.loads(out)
    assert (
        plan["plan_seconds"] < 60
        and plan["bytes_kept"] == plan["bytes_received"] > 4 * plan["model_bytes"]
    )
    assert {
        "num_messages",
        "predicted_seconds",
        "floor_seconds",
        "busiest_link_over_mean",
    } <= plan.keys()
    code, out, err = megarl(
        folder, "plan", "c.yaml", "--weights", "parallel.pipeline=2", "launch.processes=2"
    )
    assert (code, err) == (0, "")
    assert "sent by stage 1" in out and "time on the wire" in out
    code, out, err = megarl(
        folder, "plan", "c.yaml", "--weights", "rollout.tensor=2", "launch.processes=3"
    )
    assert (code, out) == (2, "")
    assert (
        "3 processes (launch.processes, or torchrun's WORLD_SIZE) are not divisible by ranks of an "
        "engine replica = 2; use a multiple of 2" in err
    )


def test_plan_of_memory_needs_no_torch_and_a_second(folder: Path) -> None:
    """A trillion parameters on 512 GPUs. What does not fit ends with 2, as does a dry run of it."""
    configs = Path(__file__).resolve().parents[2] / "configs"
    kimi = [str(configs / "kimi_k2.yaml"), f"model.path={configs}/models/kimi_k2"]
    before = cpu_seconds()
    code, out, err = megarl(folder, "plan", *kimi, "--json")
    seconds = cpu_seconds() - before
    assert (code, err) == (0, "") and seconds < 5, "most of it Python's start"
    plan = json.loads(out)
    assert plan["fits"] and plan["gpu"] == "h100" and "weights" not in plan
    assert plan["trainer"]["phases"].keys() >= {"startup", "rollout", "update", "sync", "probe"}
    code, out, err = megarl(folder, "plan", *kimi, "--gpu", "b200")
    assert (code, err) == (0, "") and "of the 191.5 GB of each B200" in out
    code, out, err = megarl(folder, "plan", *kimi, "train.recompute=none")
    assert (code, err) == (2, "") and "out of memory, trainer, update: " in out
    assert "; set train.recompute=full" in out
    code, out, err = megarl(
        folder, "train", *kimi, "--dry-run", "rollout.data=1", "rollout.expert=1"
    )
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert "out of memory, " in err and "; set rollout." in err
    code, out, err = megarl(folder, "train", *kimi, "--dry-run", "launch.gpu=null")
    assert code == 2 and "512 processes (launch.processes) need launch.gpu" in err


def test_plan_prints_both_plans_as_one_object(folder: Path) -> None:
    code, out, _err = megarl(folder, "plan", "c.yaml", "--weights", "--json")
    plan = json.loads(out)
    assert code == 0 and plan["fits"]
    assert plan["weights"]["plan_seconds"] == plan["plan_seconds"]
    assert plan["weights"]["trainer"]["gpus"] == 1 and plan["trainer"]["phases"]


def test_memory_is_not_checked_without_a_gpu(folder: Path) -> None:
    code, out, _err = megarl(folder, "train", "c.yaml", "--dry-run")
    assert code == 0
    assert "memory     not checked: no GPU here, and launch.gpu is null" in out
    code, out, _err = megarl(folder, "train", "c.yaml", "--dry-run", "launch.gpu=h100")
    assert code == 0 and "of the 84.9 GB of each H100" in out


# a library that aborts as it is torn down, by an exit handler and by a thread that waits for the end
ABORTS = """
import atexit, os, sys, threading
import megarl.cli as cli
atexit.register(os.abort)
threading.Thread(target=lambda: (threading.main_thread().join(), os.abort()), daemon=True).start()
def main():
    print("last words " * 100)
    print("on stderr " * 100, file=sys.stderr, end="")
    return 3
cli.main = main
"""
CLOSED = "os.close(1)\n"  # the terminal is gone: flushing fails


@pytest.mark.parametrize("closed", ["", CLOSED])
def test_a_rank_of_torchrun_leaves_without_teardown(closed: str) -> None:
    """Its exit code is that of the run, and what it printed is complete."""
    program = [sys.executable, "-c", f"{ABORTS}{closed}cli.run()"]
    ranks = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    env = {**os.environ, **ranks, "PYTHONUNBUFFERED": ""}
    done = subprocess.run(program, env=env, capture_output=True, text=True)
    assert done.returncode == 3, done.stderr
    assert done.stdout == ("" if closed else "last words " * 100 + "\n")
    assert done.stderr == "on stderr " * 100
    if not closed:
        done = subprocess.run(program, env=os.environ, capture_output=True, text=True)
        assert done.returncode == -signal.SIGABRT, "without a launcher, exit handlers run"


def test_an_ignored_sigchld_is_reset(monkeypatch):
    """Else ranks that failed seem to end with status 0."""
    handler = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    monkeypatch.setattr(cli, "main", lambda: signal.getsignal(signal.SIGCHLD))
    try:
        with pytest.raises(SystemExit) as end:
            cli.run()
    finally:
        signal.signal(signal.SIGCHLD, handler)
    assert end.value.code == signal.SIG_DFL
