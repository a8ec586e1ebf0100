"""The first hour on a GPU: a ladder of checks, each with what is expected, what was seen and what to do about it.

    scripts/gpu_check.sh [1 | 8] [--only STEP ...] [--out DIR]

Every step makes its own small random models, takes at most eight minutes, and runs in processes of its own. Without a
GPU the same code runs on the CPU, but for the steps that say why they need one. Results: DIR/gpu_check.json and
DIR/gpu_check.html, and a log of each command.

Exit code: 0 all steps that could run passed, 2 no step could run, 3 a step failed.
"""

from __future__ import annotations

import argparse
import html
import json
import os
import platform
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from math import isfinite
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
LIMIT_S = 480
Rows = list[dict[str, Any]]
LARGER = ("model.create.hidden=256", "model.create.head_dim=64", "train.dtype=bf16")
FAMILIES = ("llama", "qwen2", "qwen3", "mixtral", "qwen3_moe", "glm4_moe", "deepseek_v3", "gpt_oss")


class Failed(Exception):
    """A step failed; the message says what was seen, `remedy` what to do."""

    def __init__(self, seen: str, remedy: str) -> None:
        super().__init__(seen)
        self.remedy = remedy


class Skipped(Exception):
    """A step cannot run here, for the reason in the message."""


@dataclass
class Place:
    """Where the checks run."""

    gpus: int  # 0: on the CPU
    out: Path
    seconds: float = LIMIT_S
    settings: tuple[str, ...] = ()  # of every run, in place of the step's own

    @property
    def ranks(self) -> int:
        return max(self.gpus, 1)

    def run(self, name: str, *command: str, remedy: str, env: dict[str, str] | None = None) -> str:
        """Runs a command, with its output in NAME.log; returns the output."""
        log = self.out / f"{name}.log"
        with log.open("w") as stream:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": python_path(), **(env or {})},
                start_new_session=True,
            )
            try:
                code = process.wait(timeout=self.seconds)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                seen = f"{name} did not end within {self.seconds:.0f} s: {last_lines(log)}"
                todo = "raise --limit, or look in the log for what it waits for"
                raise Failed(seen, todo) from None
        if code:
            raise Failed(f"{name} ended with {code}: {last_lines(log)}", remedy)
        return log.read_text()

    def process(self, name: str, *arguments: str, remedy: str, folder: str = "") -> dict[str, Any]:
        """Runs a process of benchmarks.gpu_processes; returns what it saw."""
        home = self.out / (folder or name)
        module = (sys.executable, "-m", "benchmarks.gpu_processes")
        self.run(folder or name, *module, name, str(home), *arguments, remedy=remedy)
        return json.loads((home / f"{name}.json").read_text())

    def train(self, name: str, config: str, *settings: str, remedy: str) -> Rows:
        """Runs `megarl train`; returns its metrics."""
        folder = self.out / name
        command = (sys.executable, "-m", "megarl.cli", "train", f"configs/{config}.yaml")
        self.run(name, *command, f"run.dir={folder}", *self.usual(settings), remedy=remedy)
        return metrics(folder / config)

    def usual(self, settings: Sequence[str]) -> list[str]:
        usual = [*LARGER, "checkpoint.every=0"]
        if self.gpus:
            usual += [f"launch.processes={self.gpus}", "rollout.gpu_memory_utilization=0.3"]
        values = dict(setting.split("=", 1) for setting in [*usual, *settings, *self.settings])
        return [f"{key}={value}" for key, value in values.items()]


def python_path() -> str:
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


def last_lines(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    said = [line for line in lines if "Error" in line or line.startswith("error")]
    return (" | ".join((said or lines)[-2:])[-600:] or "it printed nothing") + f" ({log})"


def metrics(folder: Path) -> Rows:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def packages(place: Place) -> str:
    seen = place.process("packages", remedy="scripts/install.sh, in a new environment")
    broken = seen.pop("does not import")
    if broken:
        raise Failed(
            "; ".join(f"{name}: {why}" for name, why in broken.items()),
            "install with scripts/install.sh; a package that was built for another torch must be built again",
        )
    extra = "gpu" if place.gpus else "cpu"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = [Requirement(line) for line in project["optional-dependencies"][extra]]
    other = [
        f"{pin.name} {seen[pin.name]} (pinned {pin.specifier})"
        for pin in pins
        if pin.name in seen
        and (pin.marker is None or pin.marker.evaluate())
        and not pin.specifier.contains(seen[pin.name])
    ]
    text = ", ".join(f"{name} {value}" for name, value in seen.items())
    return text + ("; other versions than pinned: " + ", ".join(other) if other else "")


def nccl(place: Place) -> str:
    if place.gpus == 1:
        raise Skipped("needs two GPUs")
    world = place.gpus or 2
    remedy = "run it again with NCCL_DEBUG=INFO, and look at nvidia-smi topo -m"
    home = place.out / "collectives"
    code = (
        "import subprocess, sys; ranks = [subprocess.Popen([sys.executable, '-m', 'benchmarks.gpu_processes',"
        f" 'collectives', {str(home)!r}, str(rank), '{world}']) for rank in range({world})];"
        " sys.exit(max(abs(rank.wait()) for rank in ranks))"
    )
    place.run("nccl", sys.executable, "-c", code, remedy=remedy, env={"STORE": str(time.time_ns())})
    found = [json.loads((home / f"collectives.{rank}.json").read_text()) for rank in range(world)]
    wrong = [
        f"rank {rank}: {', '.join(seen['wrong'])}"
        for rank, seen in enumerate(found)
        if seen["wrong"]
    ]
    if wrong:
        raise Failed("wrong results: " + "; ".join(wrong), remedy)
    return f"{world} ranks, exact; bus bandwidth {min(seen['bus GB/s'] for seen in found)} GB/s"


def te_layers(place: Place) -> str:
    families = FAMILIES if place.gpus else ("qwen3", "qwen3_moe")
    remedy = "compare with NVTE_FLASH_ATTN=0 and NVTE_FUSED_ATTN=0 in turn to find the kernel, then report it"
    seen = place.process("layers", *families, remedy=remedy)
    far = [family for family, off in seen.items() if off["mean"] > 2 * off["floor"]]
    text = ", ".join(f"{name} {off['mean']:.3f} ({off['floor']:.3f})" for name, off in seen.items())
    text = f"mean difference from transformers in fp32 (of transformers in bf16): {text}"
    if far:
        raise Failed(f"{', '.join(far)}: more than twice the rounding of bf16; {text}", remedy)
    return text


def engine(place: Place) -> str:
    remedy = "the log has the first error: VLLM_LOGGING_LEVEL=INFO shows what comes before it; with VLLM_USE_V2_MODEL_RUNNER=0, vLLM uses its older runner"
    rows = place.train(
        "engine", "tiny_dense", "train.steps=1", "rollout.enforce_eager=true", remedy=remedy
    )
    return f"one step, mean difference of log-probs {rows[-1]['logprob_diff/mean']:.4f}"


def synced(place: Place, name: str, cases: Sequence[str]) -> str:
    remedy = "stop: the engine would sample from other weights than the trainer has; report the tensors named here"
    seen = place.process("sync", *cases, remedy=remedy, folder=name)
    texts, wrong = [], []
    for case, found in seen.items():
        error = f", error {found['relative error']}" if "relative error" in found else ""
        texts.append(f"{case}: {found['tensors']} tensors{error}, {found['seconds'][-1]} s")
        for what, names in (("differ", found["differ"]), ("have moved", found["moved"])):
            if names:
                wrong.append(f"{case}: {len(names)} of the tensors {what}: {', '.join(names[:4])}")
        if found.get("relative error", 0) > 0.03:
            wrong.append(
                f"{case}: the kernel's weights are off by {found['relative error']}, as rounded twice"
            )
    if wrong:
        raise Failed("; ".join(wrong) + " | " + "; ".join(texts), remedy)
    return "equal to a fresh load, at unchanged addresses: " + "; ".join(texts)


def first_sync(place: Place) -> str:
    remedy = "the message names the tensor or the rank: see the guide's page on troubleshooting"
    for name, model in (("first_sync", "tiny_dense"), ("first_sync_moe", "tiny_moe")):
        rows = place.train(name, model, "train.steps=3", "checks.probe=always", remedy=remedy)
    worst = max(row["logprob_diff/mean"] for row in rows)
    return f"4 verified syncs of each of two models, probed; mean difference at most {worst:.4f}"


def second_sync(place: Place) -> str:
    families = FAMILIES if place.gpus else ("qwen3", "qwen3_moe")
    return synced(place, "second_sync", [f"{family}:bf16" for family in families])


def second_sync_fp8(place: Place) -> str:
    if not place.gpus and not has_fp8_on_cpu():
        raise Skipped("vLLM's FP8 kernels on a CPU need AMX, which this one has not")
    return synced(place, "second_sync_fp8", ["qwen3:fp8", "qwen3_moe:fp8"])


def sleep(place: Place) -> str:
    if not place.gpus:
        raise Skipped("GPU only: on a CPU an engine's sleep frees nothing")
    remedy = (
        "set rollout.sleep_level=0 and train.offload=[], and lower rollout.gpu_memory_utilization"
    )
    rows = place.train(
        "sleep", "tiny_dense", "rollout.sleep_level=2", "train.offload=[gradients,optimizer]",
        "checks.probe=always", remedy=remedy,
    )  # fmt: skip
    peaks = [value for key, value in rows[-1].items() if key.startswith("memory/update")]
    return f"{len(rows)} steps with the engine asleep while training; peak of the update {max(peaks):.2f} GB"


def parity(place: Place, name: str, *settings: str) -> str:
    remedy = (
        "the log names the first layer that differs, unless it ended before; a figure above the bound"
        " is not rounding: do not train with it"
    )
    command = (sys.executable, "-m", "megarl.cli", "check", "--parity", "configs/tiny_dense.yaml")
    folder = f"run.dir={place.out / name}"
    text = place.run(name, *command, folder, *place.usual(settings), remedy=remedy)
    lines = [
        line.strip()
        for line in text.splitlines()
        if line.startswith(("measured", "floor", "statistic"))
    ]
    return "; ".join(" ".join(line.split()) for line in lines)


def parity_bf16(place: Place) -> str:
    return parity(place, "parity_bf16")


def parity_fp8(place: Place) -> str:
    if not place.gpus and not has_fp8_on_cpu():
        raise Skipped("vLLM's FP8 kernels on a CPU need AMX, which this one has not")
    return parity(place, "parity_fp8", "rollout.quantization=fp8")


def has_fp8_on_cpu() -> bool:
    import torch

    return torch.cpu._is_amx_tile_supported()


def adapters(place: Place) -> str:
    remedy = "set lora.sync=merged, which moves whole weights"
    rows = place.train(
        "adapters", "tiny_dense", "lora.rank=8", "lora.sync=adapter", "train.steps=2", remedy=remedy
    )
    return f"2 steps, mean difference of log-probs {rows[-1]['logprob_diff/mean']:.4f}"


def replay(place: Place) -> str:
    remedy = "set rollout.router_replay=none; vLLM's enable_return_routed_experts is what it uses"
    rows = place.train(
        "replay", "tiny_moe", "rollout.router_replay=engine", "train.steps=2", remedy=remedy
    )
    last = rows[-1]
    if not last["routing/missing"] < 1:
        raise Failed("the engine recorded no route (routing/missing 1)", remedy)
    return (
        f"2 steps, {last['routing/differs']:.2%} of choices replayed that differ, {last['routing/missing']:.2%} missing;"
        f" mean difference of log-probs {last['logprob_diff/mean']:.4f}"
    )


def training_fp8(place: Place) -> str:
    remedy = "set precision.fp8=null; NVTE_DEBUG=1 names the kernel"
    setting = "precision.fp8={recipe: blockwise" + ("}" if place.gpus else ", emulate: true}")
    rows = place.train("training_fp8", "tiny_dense", setting, "train.steps=2", remedy=remedy)
    if not isfinite(rows[-1]["grad_norm"]):
        raise Failed(f"grad_norm {rows[-1]['grad_norm']} after 2 steps", remedy)
    return f"2 steps of recipe blockwise, grad_norm {rows[-1]['grad_norm']:.3f}"


def memory(place: Place) -> str:
    if not place.gpus:
        raise Skipped(
            "GPU only: a CPU's allocator does not report peaks; benchmarks.memory_phases counts tensors"
        )
    remedy = "compare with the memory figures at the head of the config; set train.offload and rollout.sleep_level"
    rows = place.train("memory", "tiny_dense", *sizes(place), "train.steps=2", remedy=remedy)
    parts = {
        key.split("/")[1]: value for key, value in rows[-1].items() if key.startswith("memory/")
    }
    if not any(parts.values()):
        raise Failed("no phase has a peak in metrics.jsonl", remedy)
    return ", ".join(
        f"{name} {value:.2f} GB" for name, value in sorted(parts.items()) if value is not None
    )


def sizes(place: Place) -> list[str]:
    """A model of the shape of Qwen3-0.6B on a GPU; a small one on a CPU."""
    if not place.gpus:
        return ["rollout.samples_per_prompt=8", "train.prompts_per_step=4"]
    shape = "layers=28 hidden=1024 heads=16 kv_heads=8 head_dim=128 intermediate=3072 vocab=151936"
    return [
        *(f"model.create.{size}" for size in shape.split()), "task.options.vocab=151936",
        "rollout.samples_per_prompt=16", "train.prompts_per_step=16", "rollout.max_tokens=512",
        "train.max_tokens_per_microbatch=16384", "model.create.max_position=4096",
    ]  # fmt: skip


def speed(place: Place) -> str:
    remedy = "look at the timeline of the run's report for the phase that is slow"
    rows = place.train("speed", "tiny_dense", *sizes(place), "train.steps=4", remedy=remedy)
    later = rows[1:]
    parts = {
        name: median(row[f"time/{name}"] for row in later)
        for name in ("generate", "update", "publish")
    }
    tokens = fmean(row["tokens_per_second"] for row in later)
    text = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in parts.items())
    return f"median of {len(later)} steps: {text}; {tokens:,.0f} sampled tokens a second"


def kill_resume(place: Place) -> str:
    remedy = "do not rely on a resume; report it with killed.log, which names the checkpoint, and both metrics.jsonl"
    settings = ["train.steps=4", "checkpoint.every=1", "checkpoint.asynchronous=false"]
    whole = place.train("whole", "tiny_dense", *settings, remedy=remedy)
    folder = place.out / "killed"
    command = [
        sys.executable,
        "-m",
        "megarl.cli",
        "train",
        "configs/tiny_dense.yaml",
        f"run.dir={folder}",
    ]
    command += place.usual(settings)
    with (place.out / "killed.log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True,
            env={**os.environ, "PYTHONPATH": python_path()},
        )  # fmt: skip
        end = time.monotonic() + place.seconds
        saved = folder / "tiny_dense" / "checkpoints" / "step_2" / "metadata.json"
        while not saved.exists():
            if process.poll() is not None or time.monotonic() > end:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                raise Failed(
                    f"no checkpoint of step 2: {last_lines(place.out / 'killed.log')}", remedy
                )
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    resumed = place.train("killed", "tiny_dense", *settings, remedy=remedy)
    # the kill may have cost the line of the step that was saved last
    digests = [{row["step"]: row["rollout/digest"] for row in rows} for rows in (whole, resumed)]
    other = [step for step in digests[1] if digests[0][step] != digests[1][step]]
    losses = [rows[-1]["loss"] for rows in (whole, resumed)]
    if other or losses[0] != losses[1] or max(digests[1]) != max(digests[0]):
        raise Failed(f"other samples in steps {other}; losses of the last step {losses}", remedy)
    return f"killed after step 2, resumed: the same samples, loss of step 4 {losses[0]} in both"


@dataclass(frozen=True)
class Step:
    """A check, and what it expects."""

    check: Callable[[Place], str]
    expected: str


STEPS = {
    "packages": Step(packages, "all import, at the pinned versions"),
    "nccl": Step(nccl, "sums and messages between ranks are exact"),
    "te_layers": Step(
        te_layers, "log-probs of every family as transformers', to the rounding of bf16"
    ),
    "engine": Step(engine, "vLLM starts, takes a verified sync and samples"),
    "first_sync": Step(first_sync, "every sync of three steps is verified, and so is its probe"),
    "second_sync": Step(
        second_sync, "after three syncs all tensors equal a fresh load, none has moved"
    ),
    "second_sync_fp8": Step(
        second_sync_fp8, "the same in FP8, and the kernels hold what was sent: error below 0.03"
    ),
    "sleep": Step(sleep, "an engine that slept is filled again, verified"),
    "parity_bf16": Step(parity_bf16, "trainer and engine differ by rounding only"),
    "parity_fp8": Step(parity_fp8, "the same with an engine in FP8"),
    "adapters": Step(adapters, "an engine takes adapters, verified"),
    "replay": Step(replay, "the trainer takes the experts that the engine chose"),
    "training_fp8": Step(training_fp8, "training in FP8 agrees with the engine in bf16"),
    "memory": Step(memory, "the peak of each phase, for comparison with the config's head"),
    "speed": Step(speed, "figures, no bound"),
    "kill_resume": Step(kill_resume, "a killed run resumes with the samples of one that was not"),
}


@dataclass
class Result:
    """A row of gpu_check.json."""

    name: str
    status: Literal["passed", "failed", "skipped"]
    seconds: float
    expected: str
    seen: str
    report: str = ""  # what to do, if it failed
    extra: dict[str, Any] = field(default_factory=dict)


def climb(place: Place, names: Sequence[str]) -> list[Result]:
    """Runs the steps in order; a step that fails does not end the others, unless packages are missing."""
    results: list[Result] = []
    for name in names:
        step = STEPS[name]
        began = time.monotonic()
        status, seen, report = "passed", "", ""
        try:
            seen = step.check(place)
        except Skipped as error:
            status, seen = "skipped", str(error)
        except Failed as error:
            status, seen, report = "failed", str(error), error.remedy
        except (OSError, KeyError, ValueError) as error:
            status, seen = "failed", f"{type(error).__name__}: {error}"
            report = f"the check itself failed; see the logs in {place.out}"
        seconds = round(time.monotonic() - began, 1)
        results.append(Result(name, status, seconds, step.expected, seen, report))
        print(f"{status:8} {name:16} {seconds:6.1f} s  {seen}", flush=True)
        if report:
            print(f"{'':8} {'':16} to do: {report}", flush=True)
        write(place, results)
        if name == "packages" and status == "failed":
            break
    return results


def commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


def write(place: Place, results: Sequence[Result]) -> None:
    ok = not any(result.status == "failed" for result in results)
    rows = [{k: v for k, v in asdict(result).items() if k != "extra"} for result in results]
    record = {
        "schema": 1, "commit": commit(), "host": platform.node(), "gpus": place.gpus, "ok": ok, "steps": rows,
    }  # fmt: skip
    (place.out / "gpu_check.json").write_text(json.dumps(record, indent=1) + "\n")
    (place.out / "gpu_check.html").write_text(page(record))


def page(record: dict[str, Any]) -> str:
    def row(step: dict[str, Any]) -> str:
        todo = f"<p class=todo>To do: {html.escape(step['report'])}</p>" if step["report"] else ""
        seen = f"<p>{html.escape(step['seen'])}</p>"
        return (
            f"<tr class={step['status']}><th>{html.escape(step['name'])}</th><td class=status>{step['status']}</td>"
            f"<td class=num>{step['seconds']:.0f} s</td><td><p class=expected>Expected: {html.escape(step['expected'])}</p>"
            f"{seen}{todo}</td></tr>"
        )

    rows = "\n".join(map(row, record["steps"]))
    counts = {
        s: sum(x["status"] == s for x in record["steps"]) for s in ("passed", "failed", "skipped")
    }
    summary = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    where = {0: "the CPU", 1: "one GPU"}.get(record["gpus"], f"{record['gpus']} GPUs")
    return TEMPLATE.format(
        summary=f"{summary}, on {where}",
        commit=record["commit"][:12],
        host=html.escape(record["host"]),
        rows=rows,
    )


TEMPLATE = """<!doctype html>
<html lang=en><meta charset=utf-8><meta name=viewport content="width=device-width, initial-scale=1">
<title>megarl: checks on a GPU</title>
<style>
:root {{ color-scheme: light dark; --line: #8884; --ok: #1a7f37; --bad: #cf222e; --off: #777; }}
@media (prefers-color-scheme: dark) {{ :root {{ --ok: #3fb950; --bad: #f85149; --off: #999; }} }}
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }}
table {{ border-collapse: collapse; width: 100%; }}
th, td {{ text-align: left; vertical-align: top; padding: .5rem .6rem; border-top: 1px solid var(--line); }}
th {{ font-weight: 600; white-space: nowrap; }}
td p {{ margin: 0 0 .2rem; overflow-wrap: anywhere; }}
.expected {{ color: var(--off); }}
.num {{ text-align: right; white-space: nowrap; }}
.passed .status {{ color: var(--ok); }} .failed .status {{ color: var(--bad); font-weight: 600; }}
.skipped .status, .skipped p {{ color: var(--off); }}
.todo {{ border-left: 3px solid var(--bad); padding-left: .6rem; }}
@media (max-width: 40rem) {{ td, th {{ display: block; border: 0; padding: .1rem 0; }} .num {{ text-align: left; }}
 tr {{ display: block; border-top: 1px solid var(--line); padding: .6rem 0; }} }}
</style>
<h1>megarl: checks on a GPU</h1>
<p>{summary}. Commit {commit}, host {host}.</p>
<table>
{rows}
</table>
"""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/gpu_check.sh", description="the first hour on a GPU"
    )
    parser.add_argument(
        "gpus", nargs="?", type=int, choices=(1, 8), help="default: 8 if there are 8, else 1"
    )
    parser.add_argument(
        "--only", nargs="+", choices=list(STEPS), metavar="STEP", help=", ".join(STEPS)
    )
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "gpu_check")
    parser.add_argument(
        "--limit", type=float, default=LIMIT_S, help="seconds of a command (default: 480)"
    )
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="KEY=VALUE", help="settings of every run"
    )
    args = parser.parse_args()
    import torch

    found = torch.cuda.device_count()
    if args.gpus and args.gpus > found:
        print(f"error: {args.gpus} GPUs asked for, {found} found", file=sys.stderr)
        return 2
    place = Place(
        args.gpus or (8 if found >= 8 else min(found, 1)),
        args.out.resolve(),
        args.limit,
        tuple(args.set),
    )
    place.out.mkdir(parents=True, exist_ok=True)
    results = climb(place, args.only or list(STEPS))
    print(f"{place.out / 'gpu_check.html'}")
    if any(result.status == "failed" for result in results):
        return 3
    return 0 if any(result.status == "passed" for result in results) else 2


if __name__ == "__main__":
    sys.exit(main())
