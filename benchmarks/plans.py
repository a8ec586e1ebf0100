"""Plans of large models against their physical floor, from the messages that would be executed.

    python -m benchmarks plans [--only TEXT] [--json FILE]

Each case runs in a separate process: it plans, writes and reads back the list of messages, prices them round by round,
and lowers the plan for one rank in the middle of the fleet. Every figure is compared with LIMITS. Planning uses no
random numbers, so all figures except seconds and memory are the same on every machine.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from megarl.config.launch import fleet_of
from megarl.config.load import load_config
from megarl.weights.plan.cost import LINKS, MESSAGE_S
from megarl.weights.plan.from_config import plan_weights, write_messages

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
Case = tuple[
    str, int | None, str
]  # model, number of colocated ranks (None: split, as configured), overrides
CASES: list[Case] = [
    *((name, None, "") for name in ("qwen3_235b_a22b", "deepseek_v3", "kimi_k2")),
    *((name, world, "") for name in ("qwen3_235b_a22b", "glm_4_5") for world in (256, 512)),
    # engines whose data ranks share the experts
    (
        "qwen3_235b_a22b",
        None,
        "rollout.tensor=4 rollout.data=4 rollout.expert=16 rollout.replicas=8",
    ),
    ("qwen3_235b_a22b", 256, "rollout.tensor=4 rollout.data=16 rollout.expert=64"),
    ("deepseek_v3", None, "rollout.tensor=1 rollout.data=32 rollout.expert=32"),
    ("deepseek_v3", None, "rollout.tensor=1 rollout.data=64 rollout.expert=64"),
    ("deepseek_v3", 256, "rollout.tensor=4 rollout.data=8 rollout.expert=32"),
    ("kimi_k2", None, "rollout.tensor=1 rollout.data=32 rollout.expert=32 rollout.replicas=4"),
    ("glm_4_5", 256, "rollout.tensor=8 rollout.data=2 rollout.expert=16"),
]
# in place of the config's, whose engines share GPUs with the trainer
LAYOUTS = {
    "deepseek_v3": "parallel.pipeline=16 parallel.expert=16 rollout.tensor=32 rollout.replicas=1 launch.processes=256",
    "kimi_k2": "parallel.tensor=1 parallel.pipeline=16 parallel.expert=16 rollout.tensor=16 rollout.replicas=8 "
    "launch.processes=256",
    "glm_4_5": "parallel.tensor=2 parallel.pipeline=8 parallel.expert=16 rollout.tensor=16 rollout.replicas=4 "
    "launch.processes=128",
}
SEPARATE = (
    "rollout.data=1 rollout.expert=1 rollout.sleep_level=0 train.offload=[] launch.topology=split"
)
LIMITS = {
    "over_floor": 1.3,
    "with_messages": 1.6,
    "busiest_link": 1.15,
    "seconds": 60.0,
    "peak_gb": 2.0,
}


def measure(name: str, world: int | None, layout: str) -> dict[str, Any]:
    overrides = [f"model.path={CONFIGS}/models/{name}"]
    if name in LAYOUTS:
        overrides += f"{LAYOUTS[name]} {SEPARATE}".split()
    if world:
        overrides += [
            "launch.topology=colocated",
            f"launch.processes={world}",
            "rollout.replicas=null",
        ]
    config = load_config(CONFIGS / f"{name}.yaml", [*overrides, *layout.split()])
    plan, figures = plan_weights(config)
    fleet = fleet_of(config)
    start = time.perf_counter()
    lowered = plan.lower(fleet.first_receiver + fleet.receivers // 2)
    lower_seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    seconds, with_messages = _wire_seconds(plan, fleet.world, fleet.ranks_per_node)
    floor = figures["floor_seconds"]
    return {
        "case": f"{name}, {'split' if world is None else f'colocated on {world}'}"
        + (f", {config.rollout.layout}" if layout else ""),
        "ranks": fleet.world,
        "floor_seconds": round(floor, 3),
        "over_floor": round(seconds / floor, 3),
        "with_messages": round(with_messages / floor, 3),
        "busiest_link": round(figures["busiest_link_over_mean"], 3),
        "rounds": figures["num_rounds"],
        "messages": figures["num_messages"],
        "messages_of_the_rank": sum(map(len, lowered)),
        "peak_extra_gb": round(figures["peak_extra_bytes"] / 1e9, 2),
        "plan_seconds": round(figures["plan_seconds"], 1),
        "lower_seconds": round(lower_seconds, 1),
        "seconds": round(figures["plan_seconds"] + lower_seconds, 1),
        "peak_gb": round(peak, 2),
    }


def _wire_seconds(plan: Any, world: int, node: int) -> tuple[float, float]:
    """From the file of messages alone: each round as long as its busiest rank, without and with 10 us a message."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "messages.jsonl"
        write_messages(plan, file)
        numbers = file.read_text().translate({ord("["): None, ord("]"): None, ord("\n"): ","})
    rounds, senders, receivers, sizes = (
        np.fromstring(numbers, dtype=np.int64, sep=",").reshape(-1, 4).T
    )
    count, links = int(rounds.max()) + 1, LINKS["h100"]
    is_near = senders // node == receivers // node
    times = np.zeros((count, world))
    messages = np.zeros((count, world))
    for ranks in (senders, receivers):
        np.add.at(messages, (rounds, ranks), 1)
        for chosen, rate in ((~is_near, links.network), (is_near, links.nvlink)):
            load = np.zeros((count, world))
            np.add.at(load, (rounds[chosen], ranks[chosen]), sizes[chosen])
            times = np.maximum(times, load / rate)
    return float(times.max(1).sum()), float((times.max(1) + MESSAGE_S * messages.max(1)).sum())


def check(*, only: str = "", json_file: Path | None = None) -> bool:
    """Measure the cases whose model's name contains `only`, and print them. Returns whether all are within LIMITS."""
    results, failures = [], []
    for number in (number for number, (name, *_) in enumerate(CASES) if only in name):
        command = [sys.executable, "-m", "benchmarks.plans", str(number)]
        result = json.loads(
            subprocess.run(command, check=True, capture_output=True, text=True).stdout
        )
        print(
            ", ".join(
                f"{name} {value}" if name != "case" else value for name, value in result.items()
            ),
            flush=True,
        )
        limits = LIMITS
        if CASES[number][2]:  # with fewer experts per rank, embedding and head weigh more
            limits = {name: limit for name, limit in LIMITS.items() if name != "busiest_link"}
        failures += [
            f"{result['case']}: {name}" for name, limit in limits.items() if result[name] > limit
        ]
        failures += [f"{result['case']}: below its floor"] * (result["over_floor"] < 1)
        results.append(result)
    print("all within limits" if not failures else "\n".join(failures), LIMITS)
    if json_file:
        json_file.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return not failures


if __name__ == "__main__":
    print(json.dumps(measure(*CASES[int(sys.argv[1])])))
