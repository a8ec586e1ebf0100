"""The ladder of checks for a GPU: what a step says becomes a row, a page and an exit code."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import psutil
import pytest

from benchmarks import gpu_check
from benchmarks.gpu_check import Failed, Place, Skipped, Step


def passes(place: Place) -> str:
    place.run("said", sys.executable, "-c", "print('hello')", remedy="none")
    return "1 < 2"


def skips(place: Place) -> str:
    raise Skipped("needs two GPUs")


def ends(place: Place) -> str:
    code = "import sys; print('ValueError: no such kernel'); sys.exit(3)"
    return place.run("ends", sys.executable, "-c", code, remedy="install it again")


def hangs(place: Place) -> str:
    place.seconds = 0.5
    return place.run("hangs", sys.executable, "-c", "import time; time.sleep(60)", remedy="another")


def lacks(place: Place) -> str:
    return {}["loss"]


def climb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **checks) -> tuple[int, dict]:
    steps = {name: Step(check, "that it works") for name, check in checks.items()}
    monkeypatch.setattr(gpu_check, "STEPS", steps)
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--out", str(tmp_path)])
    code = gpu_check.main()
    return code, json.loads((tmp_path / "gpu_check.json").read_text())


def test_rows_and_exit_codes(tmp_path, monkeypatch) -> None:
    code, record = climb(tmp_path, monkeypatch, a=passes, b=ends, c=hangs, d=lacks, e=skips)
    assert code == 3 and record["schema"] == 1 and not record["ok"]
    rows = {row["name"]: row for row in record["steps"]}
    assert [row["status"] for row in rows.values()] == ["passed", *["failed"] * 3, "skipped"]
    assert "ended with 3: ValueError: no such kernel" in rows["b"]["seen"]
    assert rows["b"]["report"] == "install it again"
    assert "did not end within 0 s" in rows["c"]["seen"] and "raise --limit" in rows["c"]["report"]
    assert "KeyError" in rows["d"]["seen"] and str(tmp_path) in rows["d"]["report"]
    page = (tmp_path / "gpu_check.html").read_text()
    assert "1 passed, 3 failed, 1 skipped, on " in page and "Expected: that it works" in page
    assert "1 &lt; 2" in page and "To do: install it again" in page
    assert climb(tmp_path, monkeypatch, a=passes, e=skips)[0] == 0
    assert climb(tmp_path, monkeypatch, e=skips)[0] == 2


def test_without_the_packages_nothing_else_is_tried(tmp_path, monkeypatch) -> None:
    def broken(place: Place) -> str:
        raise Failed("vllm: ImportError", "install it")

    code, record = climb(tmp_path, monkeypatch, packages=broken, a=passes)
    assert code == 3 and [row["name"] for row in record["steps"]] == ["packages"]


def test_settings_given_win_over_those_of_a_step(tmp_path) -> None:
    place = Place(1, tmp_path, settings=("train.steps=9", "rollout.gpu_memory_utilization=0.1"))
    settings = place.usual(["train.steps=1", "rollout.enforce_eager=true"])
    assert "train.steps=9" in settings and "train.steps=1" not in settings
    assert settings.count("rollout.gpu_memory_utilization=0.1") == 1
    assert len(settings) == len({setting.split("=")[0] for setting in settings})


# A tree in which the commands of the ladder do what PLAN says: {"say": text, "code": exit code, "rows": of metrics.jsonl
# by run or of every run, "seen": what a process of gpu_processes saw, "hangs": True}
COMMAND = """
import json, os, sys, time
from pathlib import Path
plan = json.loads(os.environ["PLAN"])
folders = [Path(word.removeprefix("run.dir=")) for word in sys.argv if word.startswith("run.dir=")]
if folders and sys.argv[1] == "train":
    folder = folders[0] / Path(sys.argv[2]).stem
    folder.mkdir(parents=True, exist_ok=True)
    rows = plan.get("rows", {})
    rows = rows.get(folders[0].name, rows.get("", []))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + chr(10) for row in rows))
    saved = folder / "checkpoints" / "step_2"
    is_killed = folders[0].name == "killed" and not saved.exists()
    saved.mkdir(parents=True, exist_ok=True)
    (saved / "pid").write_text(str(os.getpid()))
    if plan.get("saves", True):
        (saved / "metadata.json").touch()
    time.sleep(60 * is_killed)
elif not folders:
    rank = f".{sys.argv[3]}" if sys.argv[1] == "collectives" else ""
    home = Path(sys.argv[2])
    home.mkdir(parents=True, exist_ok=True)
    (home / f"{sys.argv[1]}{rank}.json").write_text(json.dumps(plan["seen"]))
print(plan.get("say", ""), flush=True)
time.sleep(60 * plan.get("hangs", False))
sys.exit(plan.get("code", 0))
"""
EQUAL = {"tensors": 38, "differ": [], "moved": [], "seconds": [0.1]}
ROWS = [{"step": step, "rollout/digest": f"{step}", "loss": 0.5} for step in range(4)]

PLANTED = {  # step -> GPUs, what its commands do, what is said to be seen, what is said to be done
    "packages": (
        0,
        {"seen": {"torch": "2.14.0", "does not import": {"vllm": "ImportError: libcudart.so.13"}}},
        "vllm: ImportError: libcudart.so.13",
        "scripts/install.sh",
    ),
    "nccl": (
        0,
        {"seen": {"wrong": ["all_reduce"], "bus GB/s": 1.0}},
        "rank 1: all_reduce",
        "NCCL_DEBUG=INFO",
    ),
    "te_layers": (
        1,
        {"seen": {"qwen3": {"mean": 0.05, "floor": 0.01}, "llama": {"mean": 0.02, "floor": 0.02}}},
        "qwen3: more than twice the rounding of bf16; mean",
        "NVTE_FLASH_ATTN=0",
    ),
    "engine": (
        1,
        {"say": "torch.AcceleratorError: no kernel image is available", "code": 4},
        "engine ended with 4: torch.AcceleratorError: no kernel image is available",
        "VLLM_USE_V2_MODEL_RUNNER=0",
    ),
    "first_sync": (
        1,
        {"say": "megarl: rank 1 refused in sync: checksum of model.norm.weight", "code": 3},
        "checksum of model.norm.weight",
        "troubleshooting",
    ),
    "second_sync": (
        1,
        {"seen": {"qwen3:bf16": EQUAL | {"differ": ["model.norm.weight"]}}},
        "qwen3:bf16: 1 of the tensors differ: model.norm.weight",
        "stop: the engine would sample from other weights",
    ),
    "second_sync_fp8": (
        1,
        {"seen": {"qwen3:fp8": EQUAL | {"relative error": 0.042}}},
        "the kernel's weights are off by 0.042, as rounded twice",
        "stop: the engine would sample from other weights",
    ),
    "sleep": (
        1,
        {"say": "torch.OutOfMemoryError: CUDA out of memory", "code": 4},
        "sleep ended with 4: torch.OutOfMemoryError",
        "rollout.sleep_level=0",
    ),
    "parity_bf16": (
        1,
        {"say": "statistic 3.1 is above 1.5\nfirst layer that differs: 2.mlp", "code": 3},
        "statistic 3.1 is above 1.5 | first layer that differs: 2.mlp",
        "is not rounding",
    ),
    "parity_fp8": (
        1,
        {"say": "statistic 3.1 is above 1.5", "code": 3},
        "parity_fp8 ended with 3: statistic 3.1 is above 1.5",
        "is not rounding",
    ),
    "adapters": (
        1,
        {"say": "ValueError: vLLM has no LoRA layer for q_proj", "code": 4},
        "ValueError: vLLM has no LoRA layer for q_proj",
        "lora.sync=merged",
    ),
    "replay": (
        1,
        {"rows": {"": [{"routing/missing": 1.0}]}},
        "the engine recorded no route",
        "rollout.router_replay=none",
    ),
    "training_fp8": (
        1,
        {"rows": {"": [{"grad_norm": float("nan")}]}},
        "grad_norm nan after 2 steps",
        "precision.fp8=null",
    ),
    "memory": (
        1,
        {"rows": {"": [{"memory/update/peak_gb": None}]}},
        "no phase has a peak",
        "train.offload",
    ),
    "speed": (
        1,
        {"hangs": True},
        "speed did not end within 1 s: it printed nothing",
        "raise --limit",
    ),
    "kill_resume": (
        1,
        {"rows": {"whole": ROWS, "killed": [*ROWS[:3], ROWS[3] | {"rollout/digest": "x"}]}},
        "other samples in steps [3]",
        "do not rely on a resume",
    ),
}


def test_every_step_has_a_planted_failure() -> None:
    assert list(PLANTED) == list(gpu_check.STEPS)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tree")
    (root / "pyproject.toml").write_text((gpu_check.ROOT / "pyproject.toml").read_text())
    for module in ("megarl/cli.py", "benchmarks/gpu_processes.py"):
        (root / module).parent.mkdir()
        (root / module).with_name("__init__.py").touch()
        (root / module).write_text(COMMAND)
    return root


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_failure_is_seen_and_says_what_to_do(
    name: str, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus, plan, seen, todo = PLANTED[name]
    monkeypatch.setattr(gpu_check, "ROOT", tree)
    monkeypatch.setenv("PLAN", json.dumps(plan))
    (result,) = gpu_check.climb(Place(gpus, tmp_path, 1.0 if "hangs" in plan else 60.0), [name])
    assert (result.status, result.expected) == ("failed", gpu_check.STEPS[name].expected)
    assert seen in result.seen and todo in result.report, (result.seen, result.report)
    assert "the check itself failed" not in result.report


def test_a_run_that_saves_nothing_is_ended(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check, "ROOT", tree)
    monkeypatch.setenv("PLAN", json.dumps({"rows": {"whole": ROWS}, "saves": False}))
    (result,) = gpu_check.climb(Place(1, tmp_path, 4.0), ["kill_resume"])
    assert result.status == "failed" and "no checkpoint of step 2" in result.seen, result.seen
    pid = int((tmp_path / "killed" / "tiny_dense" / "checkpoints" / "step_2" / "pid").read_text())
    end = time.monotonic() + 20
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end, "it still runs"
        time.sleep(0.05)
