"""The `code` reward on problems of HumanEval's shape: samples a second and CPU time, here or against another checkout.

    python -m benchmarks.code_reward [--against PATH] [--samples 80] [--rounds 5] [--concurrency 2]

A fresh process per checkout and round, in alternation, scores right solutions, and one in five that is wrong. The
scores must be those known, in every process, before times are compared. CPU time counts the jailed processes
and a fork server, with its start.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.code_problems import PROBLEMS

__all__ = ["main"]

HERE = Path(__file__).resolve().parents[1]


def requests_and_scores(samples: int) -> tuple[list[dict[str, Any]], list[float]]:
    """Fields of requests, and their known scores."""
    requests, scores = [], []
    for row in range(samples):
        name, solution, tests = PROBLEMS[row % len(PROBLEMS)]
        is_wrong = row % 5 == 4
        source = f"{solution}\n{name} = lambda *arguments: 'wrong'" if is_wrong else solution
        response = f"The code:\n```python\n{source}\n```\n"
        fields = {
            "id": f"{row}/0",
            "prompt": "p",
            "response": response,
            "extra": {"tests": tests, "entry_point": name},
        }
        requests.append(fields)
        scores.append(0.0 if is_wrong else 1.0)
    return requests, scores


def measure(samples: int, concurrency: int) -> dict[str, Any]:
    """Scores the samples with the megarl that is first on the path."""
    from megarl.config.schema import Reward
    from megarl.jail import sandbox
    from megarl.rewards.code import make_code
    from megarl.rewards.interface import ScoreRequest

    reward = make_code(
        Reward(
            name="code", options={"concurrency": concurrency, "time_s": 60.0, "sandbox": "strict"}
        )
    )
    requests, scores = requests_and_scores(samples)
    cpu_start = _cpu_s()
    reward([ScoreRequest(**fields) for fields in requests[:2]])  # warm-up
    start = time.perf_counter()
    found = reward([ScoreRequest(**fields) for fields in requests])
    seconds = time.perf_counter() - start
    if server := getattr(
        sandbox, "SERVER", None
    ):  # the CPU time of its children counts once it has ended
        server.close()
    cpu_s = _cpu_s() - cpu_start
    wrong = [
        f"{row}: {score.value} {score.detail}"
        for row, score in enumerate(found)
        if score.value != scores[row]
    ]
    return {"seconds": seconds, "cpu_s": cpu_s, "wrong": wrong}


def _cpu_s() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.code_reward", description=__doc__)
    parser.add_argument("--against", type=Path, metavar="PATH", help="another checkout of megarl")
    parser.add_argument("--samples", type=int, default=80)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--concurrency", type=int, default=2)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.samples, args.concurrency)))
        return 0
    checkouts = [HERE, *([args.against.resolve()] if args.against else [])]
    results: dict[Path, list[dict[str, Any]]] = {checkout: [] for checkout in checkouts}
    print(
        f"load {os.getloadavg()[0]:.1f} before, {os.cpu_count()} CPUs, {args.samples} samples",
        flush=True,
    )
    for round_ in range(args.rounds):
        for checkout in checkouts if round_ % 2 == 0 else checkouts[::-1]:
            result = _fresh(checkout, args)
            if result["wrong"]:
                print(f"{checkout}: wrong scores: {result['wrong']}")
                return 3
            results[checkout].append(result)
    for checkout, rounds in results.items():
        rates = [args.samples / result["seconds"] for result in rounds]
        cpu_ms = median(result["cpu_s"] for result in rounds) / args.samples * 1e3
        spread = f"({min(rates):.1f} - {max(rates):.1f})"
        name = "this checkout" if checkout == HERE else "the other"
        print(f"{name:<14}{median(rates):6.1f} samples/s {spread}, {cpu_ms:.0f} ms of CPU a sample")
    print(
        f"load {os.getloadavg()[0]:.1f} after; medians of {args.rounds} fresh processes; all scores as known"
    )
    return 0


def _fresh(checkout: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Runs this file in a fresh process, with the package of `checkout`."""
    script = (
        f"import sys; sys.path[:0] = [{str(checkout)!r}]; import megarl; sys.path[0] = {str(HERE)!r}; "
        "from benchmarks.code_reward import main; sys.exit(main())"
    )
    options = ["--measure", "--samples", str(args.samples), "--concurrency", str(args.concurrency)]
    done = subprocess.run(
        [sys.executable, "-P", "-c", script, *options], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    sys.exit(main())
