"""Seconds of one GRPO step, and of CPU, by what the main thread does: engine, trainer and loop.

    python -m benchmarks.step_phases CONFIG [KEY=VALUE ...]      prints the table of its last step

The run itself is `megarl train CONFIG`; a reward of weight 0 has each rank import this module, which then times the
functions of PARTS. A function's seconds do not include those of the others that it calls. CPU is that of the whole
process, all threads; on a busy machine it says more than seconds. `time/step` includes what is not listed.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from megarl.platform.env import child_env, get_env

ROOT = Path(__file__).resolve().parents[1]
VARIABLE = "MEGARL_STEP_PHASES"  # the file
RUNNER, SCHEDULER = (
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner",
    "vllm.v1.core.sched.scheduler:Scheduler",
)
TRAINER = "megarl.trainer.trainer:"
PARTS = {  # part -> the functions, as "module:name" in the module that calls them
    "generate": {
        "forward pass": [f"{RUNNER}._model_forward"],
        "batch, logits": [f"{RUNNER}.execute_model"],
        "sampling": [f"{RUNNER}.sample_tokens"],
        "scheduler": [f"{SCHEDULER}.schedule", f"{SCHEDULER}.update_from_output"],
        "requests, outputs": [
            "vllm.v1.engine.llm_engine:LLMEngine.add_request",
            "vllm.v1.engine.output_processor:OutputProcessor.process_outputs",
        ],
        "rest of vLLM": ["vllm.v1.engine.llm_engine:LLMEngine.step"],
        "megarl": ["megarl.rollout.vllm.engine:Engine.sample"],
    },
    "rollout": {
        "reward": ["megarl.rewards.scorer:Scoring.add", "megarl.rewards.scorer:Scoring.results"],
        "exchange": ["megarl.rollout.exchange:Exchange.__call__"],
        "groups, digest": ["megarl.rollout.schedule:Rollouts.collect"],
        "collate": ["megarl.stages.rl:collate"],
    },
    "score": {"score, advantages": [
        "megarl.trainer.learner:PolicyLearner.score", "megarl.algorithms.objective:Objective.advantages",
    ]},
    "update": {
        "plan, pack": ["megarl.trainer.learner:batch_plans", f"{TRAINER}pack", f"{TRAINER}zero_grad"],
        "forward: layers": ["megatron.core.models.gpt:GPTModel.forward"],
        "forward: log-probs": ["megarl.trainer.forward:_read"],
        "loss": [f"{TRAINER}LossSums.__call__"],
        "backward": ["megatron.core.pipeline_parallel.schedules:backward_step"],
        "gradients over ranks": ["megarl.trainer.optimizer:finalize_model_grads"],
        "norm, optimizer": [f"{TRAINER}take_step"],
        "parity gate": ["megarl.parity.gate:ParityChecks.parity"],
        "rest": ["megarl.trainer.learner:PolicyLearner.update"],
    },
    "publish": {
        "engine's layers": [
            f"megarl.rollout.vllm.weight_loader:LayerReceiver.{name}" for name in ("begin", "write", "seal", "finish")
        ],
        "pack, send, verify": ["megarl.weights.sync.publish:Publisher.publish"],
    },
}  # fmt: skip


def nothing(*, response: str) -> float:
    """A reward of weight 0."""
    return 0.0


class Timers:
    """Seconds of each part since the step began, and of CPU, without those of the parts inside it."""

    def __init__(self, file: Path) -> None:
        self.file, self.spent, self.inner = (
            file,
            defaultdict[str, list[float]](lambda: [0.0, 0.0]),
            [[0.0, 0.0]],
        )

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            if part == "rollout: groups, digest":
                self.spent.clear()
            self.inner.append([0.0, 0.0])
            began = time.perf_counter(), time.process_time()
            try:
                return function(*args, **options)
            finally:
                elapsed = time.perf_counter() - began[0], time.process_time() - began[1]
                for clock, (whole, inner) in enumerate(zip(elapsed, self.inner.pop(), strict=True)):
                    self.spent[part][clock] += whole - inner
                    self.inner[-1][clock] += whole
                if part == "publish: pack, send, verify":
                    self.file.write_text(json.dumps(self.spent))

        return call

    def install(self) -> None:
        for phase, parts in PARTS.items():
            for part, places in parts.items():
                for place in places:
                    module, _, path = place.partition(":")
                    *owners, name = path.split(".")
                    owner = importlib.import_module(module)
                    for attribute in owners:
                        owner = getattr(owner, attribute)
                    setattr(owner, name, self.timed(f"{phase}: {part}", getattr(owner, name)))


def main(config: str, *values: str) -> int:
    with tempfile.TemporaryDirectory() as folder:
        rewards = "rewards=[{name: accuracy}, {name: 'benchmarks.step_phases:nothing', weight: 0}]"
        command = [
            sys.executable,
            "-m",
            "megarl.cli",
            "train",
            config,
            f"run.dir={folder}",
            "run.name=phases",
            rewards,
        ]
        env = child_env(PYTHONPATH=str(ROOT), **{VARIABLE: f"{folder}/phases.json"})
        before = os.getloadavg()[0]
        subprocess.run(
            [*command, *values], cwd=ROOT, env=env, check=True, stdout=subprocess.DEVNULL
        )
        spent = json.loads(Path(folder, "phases.json").read_text())
        step = json.loads(Path(folder, "phases", "metrics.jsonl").read_text().splitlines()[-1])
    print(f"$ python -m benchmarks.step_phases {config} {' '.join(values)}")
    print(
        f"step {step['step']}, layout {step['layout']}, load {before:.1f} before and {os.getloadavg()[0]:.1f} after"
    )
    print(
        f"{step['samples/count']} samples of {step['length/mean']:.1f} tokens, loss {step['loss']:.6g}"
    )
    total = sum(cpu for _, cpu in spent.values())

    def line(name: str, wall: float, cpu: float) -> None:
        print(f"{name:26}{wall:10.3f} s {cpu:10.3f} s of CPU {100 * cpu / total:6.1f}%")

    for phase, parts in PARTS.items():
        rows = {part: spent.get(f"{phase}: {part}", (0.0, 0.0)) for part in parts}
        line(f"\n{phase:26}", *(sum(row[clock] for row in rows.values()) for clock in range(2)))
        for part, row in rows.items():
            line(f"  {part}", *row)
    print(f"\n{'step':26}{step['time/step']:10.3f} s {total:10.3f} s of CPU in the parts above")
    return 0


if (FILE := get_env(VARIABLE)) and get_env("RANK") == "0":
    Timers(Path(FILE)).install()

if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
