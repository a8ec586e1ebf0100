"""One engine a rank, many runs one after the other: presets and options in the whole loop.

python algorithm_ranks.py FOLDER SET     SET is `learning`, `options` or, on any number of ranks, `spread`;
                                         metrics go to FOLDER/<case>/metrics.jsonl
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import torch.distributed as dist

from megarl.commands.random_model import create_model, materialize_model
from megarl.config.load import load_config
from megarl.config.presets import PRESETS
from megarl.config.schema import Create
from megarl.platform.device import pick_device
from megarl.platform.env import Env
from megarl.rollout.vllm.engine import Engine
from megarl.run.context import RankContext
from megarl.run.engine import make_engine
from megarl.stages.rl import train_policy

ROOT = Path(__file__).resolve().parents[2]
COMMON = ["train.lr=3e-3", "train.max_tokens_per_microbatch=4096", "train.updates_per_step=2"]
STEPS = 24
PROCESS = (  # four tokens a step, each worth its own share of even ones
    "rewards=[{name: process, options: {splitter: regex, pattern: '(\\d+ ){4}', scorer: 'algorithm_rewards:steps'}}]"
)
LEARNING = {
    **{
        name: [f"algorithm.preset={name}"]
        for name in ("grpo", "reinforce_pp", "reinforce_pp_baseline", "rloo", "gspo", "cispo")
    },
    "grpo_process": ["algorithm.advantage=grpo_process", PROCESS],
}
ADAPTIVE = "algorithm.kl={where: %s, coef: 0.1, target: 1e-5, horizon: 128}"
OPTIONS = {  # two steps each, two updates a step, on top of the preset grpo where none is named
    "clip_cov": ["algorithm.loss=clip_cov", "algorithm.token_selection_options={share: 0.1, low: -100, high: 100}"],
    "kl_cov": ["algorithm.loss=kl_cov", "algorithm.token_selection_options={share: 0.1}"],
    "clip_cov_no_share": ["algorithm.loss=clip_cov", "algorithm.token_selection_options={low: 100, high: 200}"],
    "gmpo": ["algorithm.loss=gmpo"],
    "sapo": ["algorithm.loss=sapo"],
    "gpg": ["algorithm.advantage=gpg", "algorithm.loss=gpg"],
    "opo": ["algorithm.advantage=opo"],
    "bypass": ["algorithm.use_rollout_logprobs=true", "algorithm.correction=none"],
    "opsm": ["algorithm.correction=opsm", "algorithm.correction_options={delta: 0.0}"],
    "entropy": ["algorithm.entropy_coef=1.0"],
    "normalised": [
        "algorithm.preset=reinforce", "algorithm.normalise_rewards=true", "algorithm.reward_clip=[-0.5, 0.5]",
        "algorithm.reward_clip_stage=normalised",
    ],
    "mask": ["algorithm.truncated=mask"],
    "penalise": ["algorithm.truncated=penalise", "algorithm.truncated_reward=-2"],
    "filtered": ["rewards=[{name: 'algorithm_rewards:coarse'}]", "algorithm.max_refills=2"],
    "unfiltered": ["rewards=[{name: 'algorithm_rewards:coarse'}]", "algorithm.filter_zero_std=false"],
    "all_flat": ["rewards=[{name: 'algorithm_rewards:same'}]", "algorithm.max_refills=1"],
    "hostile": [
        "algorithm.preset=dr_grpo", "rewards=[{name: 'algorithm_rewards:hostile'}]", "train.steps=4",
        "algorithm.max_refills=0",
    ],
    "process": ["algorithm.advantage=grpo_process", PROCESS],
    "process_and_outcome": [
        "algorithm.advantage=grpo_process", PROCESS.replace("}}]", "}}, {name: 'algorithm_rewards:coarse'}]"),
    ],
    "adaptive_reward": ["train.steps=4", "checkpoint.every=2", ADAPTIVE % "reward", "algorithm.normalise_rewards=true"],
    "adaptive_loss": ["train.steps=4", "checkpoint.every=2", ADAPTIVE % "loss"],
}  # fmt: skip
TAUGHT = ["train.steps=4", "checkpoint.every=2", "rewards=[]", "teacher.model=TEACHER"]
SPREAD = (
    "dapo",
    "remax",
    "clip_cov",
    "kl_cov",
    "process_and_outcome",
    "filtered",
)  # over several ranks
RESUMED = ("adaptive_reward", "adaptive_loss", "distill")


def cases(which: str) -> dict[str, list[str]]:
    if which == "learning":
        return {name: [f"train.steps={STEPS}", *overrides] for name, overrides in LEARNING.items()}
    options = {name: [f"algorithm.preset={name}"] for name in PRESETS} | OPTIONS
    options["distill"] = ["algorithm.preset=distill", *TAUGHT]
    options["distill_top_k"] = [*options["distill"], "algorithm.distill_top_k=8", "train.steps=2"]
    options |= {f"{name}_resumed": options[name] for name in RESUMED}
    options["learns"] = [*LEARNING["grpo"], f"train.steps={STEPS}"]
    options = {name: options[name] for name in SPREAD} if which == "spread" else options
    return {name: ["train.steps=2", *overrides] for name, overrides in options.items()}


def main(folder: Path, which: str) -> None:
    env = Env.read()
    dist.init_process_group("gloo")
    device, engines = pick_device(env.local_rank), []

    def start(rank: RankContext) -> Engine:
        """The engine of the first case serves all."""
        engines.extend([] if engines else [make_engine(rank)])
        return engines[0]

    other = {"layers": 3, "hidden": 48, "head_dim": 16, "vocab": 67, "tokenizer": "none", "seed": 7}
    teacher = create_model(Create(**other), folder / "models")
    for name, overrides in cases(which).items():
        print(name, flush=True)
        if name.endswith("_resumed"):  # as if it had been stopped after two of its four steps
            kept = folder / name.removesuffix("_resumed") / "checkpoints"
            shutil.copytree(kept / "step_2", folder / name / "checkpoints" / "step_2")
        overrides = [override.replace("TEACHER", str(teacher)) for override in overrides]
        values = [f"run.dir={folder}", f"run.name={name}", *COMMON, *overrides]
        config = materialize_model(load_config(ROOT / "configs" / "tiny_dense.yaml", values))
        rank = RankContext.of(config, env, device)
        train_policy(rank, start)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
