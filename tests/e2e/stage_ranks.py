"""The stages with a real engine that is started once: whole, resumed at their middle, and in layouts of two ranks.

python stage_ranks.py FOLDER [once|every]       metrics go to FOLDER/<case>/metrics.jsonl

On one rank all cases, and those of IN_LAYOUTS as "<case> one"; on two these as "<case> tp2" and so on, in every layout,
or each case in one and each layout in a third of them.
"""

from __future__ import annotations

import shutil
import sys
from importlib import import_module
from pathlib import Path

import torch.distributed as dist

from megarl.commands.random_model import create_model, materialize_model
from megarl.config.load import load_config
from megarl.config.schema import Create
from megarl.config.stages import STAGES
from megarl.platform.device import pick_device
from megarl.platform.env import Env
from megarl.processes.exit_codes import CurrentPhase
from megarl.rollout.vllm.engine import Engine
from megarl.run.context import RankContext
from megarl.run.engine import make_engine
from megarl.stages import iterative_grpo, preference_rl, rl

ROOT = Path(__file__).resolve().parents[2]
LEARNS = ["train.steps=10", "checkpoint.every=5", "train.prompts_per_step=8"]
CASES = {  # config and what differs
    "previous": ["iterative_dpo", "dpo.reference=previous"],
    "initial": ["iterative_dpo", "dpo.reference=initial", "train.updates_per_step=2"],
    "best_of_n": ["best_of_n", *LEARNS],
    "ppo": ["ppo", *LEARNS, "train.prompts_per_step=48", "critic.warmup_steps=2"],
    "judge": ["reward_model", "reward_model={process: true}", "task.name=algorithm_rewards:judged",
              "task.options={vocab: 67}", "train.steps=24", "checkpoint.every=12", "train.prompts_per_step=32",
              "train.lr=5e-3", "train.warmup_steps=0", "eval={every: 12, size: 32}"],
    "flat": ["iterative_dpo", "rewards=[{name: 'algorithm_rewards:same'}]", "algorithm.max_refills=0",
             "checkpoint.every=0"],
}  # fmt: skip
RESUMED = ("initial", "best_of_n", "ppo", "judge")
FEW = ["train.steps=2", "checkpoint.every=0", "rollout.samples_per_prompt=4"]
FILES = {
    path.stem: path
    for folder in ("configs", "examples")
    for path in ROOT.glob(f"{folder}/**/*.yaml")
}
IN_LAYOUTS = {
    "ppo": ["ppo", *FEW, "train.prompts_per_step=8", "critic.warmup_steps=0", "critic.bootstrap_truncated=true"],
    "iterative_grpo": ["iterative_grpo", *FEW, "iterative.iterations=2", "iterative.reward_model.prompts=4",
                       "iterative.reward_model.updates=2"],
    "iterative_dpo": ["iterative_dpo", *FEW, "dpo.reference=initial"],
    "best_of_n": ["best_of_n", *FEW],
    "sft": ["sft", *FEW, "train.prompts_per_step=8", "eval={every: 1, size: 8}"],
    "distill": ["tiny_dense", *FEW, "algorithm.preset=distill", "rewards=[]", "teacher.model=TEACHER"],
    "process": ["tiny_dense", *FEW, "algorithm.advantage=grpo_process",
                "rewards=[{name: model, options: {path: FOLDER/judge/hf}}]"],
}  # fmt: skip
LAYOUTS = {"dp2": "launch.processes=2", "tp2": "parallel.tensor=2", "pp2": "parallel.pipeline=2"}
SMALL = [
    "train.steps=4",
    "train.prompts_per_step=4",
    "train.lr=3e-3",
    "checkpoint.every=2",
    "rollout.max_tokens=16",
]
OTHER = {"layers": 3, "hidden": 48, "head_dim": 16, "vocab": 67, "tokenizer": "none", "seed": 7}
SAMPLE = (rl, preference_rl, iterative_grpo)  # modules of stages with an engine


def cases(folder: Path, layouts: str) -> dict[str, list[str]]:
    where = LAYOUTS if layouts else {"one": "launch.processes=1"}
    few = {
        f"{case} {name}": [*values, key]
        for number, (case, values) in enumerate(IN_LAYOUTS.items())
        for place, (name, key) in enumerate(where.items())
        if layouts != "once" or number % len(where) == place
    }
    chosen = few if layouts else CASES | {f"{name}_resumed": CASES[name] for name in RESUMED} | few
    teacher = str(create_model(Create.model_validate(OTHER), folder / "models"))
    return {
        case: [value.replace("TEACHER", teacher).replace("FOLDER", str(folder)) for value in values]
        for case, values in chosen.items()
    }


def main(folder: Path, layouts: str = "") -> None:
    env, phase, engines = Env.read(), CurrentPhase(), list[Engine]()
    dist.init_process_group("gloo")
    device = pick_device(env.local_rank)

    def start(rank: RankContext) -> Engine:
        engines.extend([] if engines else [make_engine(rank)])
        return engines[0]

    for name, (file, *overrides) in cases(folder, layouts).items():
        print(name, flush=True)
        if name.endswith("_resumed"):
            saved = folder / name.removesuffix("_resumed") / "checkpoints"
            kept = min(saved.glob("step_*"), key=lambda path: int(path.name.removeprefix("step_")))
            shutil.copytree(kept, folder / name / "checkpoints" / kept.name)
        values = [f"run.dir={folder}", f"run.name={name.replace(' ', '.')}", *SMALL, *overrides]
        config = materialize_model(load_config(FILES[file], values))
        rank = RankContext.of(config, env, device, phase)
        for module in SAMPLE:
            vars(module).update(make_engine=start)
        module, _, function = STAGES[config.stage].entry.partition(":")
        getattr(import_module(module), function)(rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
