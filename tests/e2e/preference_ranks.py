"""The stages that sample and compare, with a real engine that is started once: each whole, and resumed at its middle.

python preference_ranks.py FOLDER        metrics go to FOLDER/<case>/metrics.jsonl
"""

from __future__ import annotations

import shutil
import sys
from contextlib import nullcontext
from pathlib import Path

import torch.distributed as dist

from megarl.config.load import load_config
from megarl.launch import run_rl
from megarl.launch.build import Rank
from megarl.launch.exit_codes import CurrentPhase
from megarl.launch.random_model import materialize_model
from megarl.launch.run_rl import make_engine
from megarl.platform.device import pick_device
from megarl.platform.env import Env
from megarl.rollout.engine import Engine

ROOT = Path(__file__).resolve().parents[2]
CASES = {
    "previous": ["iterative_dpo", "dpo.reference=previous"],
    "initial": ["iterative_dpo", "dpo.reference=initial", "train.updates_per_step=2"],
    "best_of_n": ["best_of_n"],
    "flat": [
        "iterative_dpo",
        "rewards=[{name: 'algorithm_rewards:same'}]",
        "algorithm.max_refills=0",
        "checkpoint.every=0",
    ],
}
SMALL = ["train.steps=4", "train.prompts_per_step=4", "train.lr=3e-3", "checkpoint.every=2"]


def main(folder: Path) -> None:
    env, phase, engines = Env.read(), CurrentPhase(), list[Engine]()
    dist.init_process_group("gloo")
    device = pick_device(env.local_rank)

    def start(rank: Rank) -> Engine:
        engines.extend([] if engines else [make_engine(rank)])
        return engines[0]

    for name, (stage, *overrides) in (CASES | {f"{n}_resumed": CASES[n] for n in ("initial", "best_of_n")}).items():
        if name.endswith("_resumed"):
            kept = folder / name.removesuffix("_resumed") / "checkpoints" / "step_2"
            shutil.copytree(kept, folder / name / "checkpoints" / "step_2")
        values = [f"run.dir={folder}", f"run.name={name}", *SMALL, *overrides]
        config = materialize_model(load_config(ROOT / "configs" / f"{stage}.yaml", values))
        rank = Rank.of(config, env, device, phase)
        run_rl.open_rank, run_rl.make_engine = (lambda *_, rank=rank: nullcontext(rank)), start
        getattr(run_rl, f"run_{stage}")(config, env, phase)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
