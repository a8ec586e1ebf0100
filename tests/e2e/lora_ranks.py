"""One rank of two: the whole loop with LoRA and real engines, merged and as an adapter; engines are kept.

python lora_ranks.py FOLDER [more]     metrics go to FOLDER/<case>/metrics.jsonl, what syncs moved to FOLDER/syncs.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch.distributed as dist

from megarl.commands.random_model import materialize_model
from megarl.config.load import load_config
from megarl.platform.device import pick_device
from megarl.platform.env import Env
from megarl.rollout.vllm.engine import Engine
from megarl.run.checkpoints import export
from megarl.run.context import RankContext
from megarl.run.engine import make_engine
from megarl.stages.rl import train_policy

ROOT = Path(__file__).resolve().parents[2]
COMMON = "train.steps=3 train.lr=2e-2 algorithm.kl.coef=0.01 lora.rank=5 lora.alpha=10 rollout.max_prompt_tokens=100"
ATTENTION = "lora.targets=[q_proj,k_proj,v_proj,o_proj]"
AGAIN = "task.options.least=65 task.options.most=100 task.options.size=4 train.prompts_per_step=4"
CASES = [  # config, case, overrides; those of one engine follow each other
    ("tiny_dense", "merged", "parallel.tensor=2"),
    ("tiny_dense", "adapter", "lora.sync=adapter parallel.tensor=2"),
    (
        "tiny_dense",
        "continued",
        f"lora.sync=adapter lora.path=FOLDER/tiny_dense-adapter/adapter {AGAIN}",
    ),
    (
        "tiny_moe",
        "adapter",
        f"lora.sync=adapter {ATTENTION} parallel.expert=2 rollout.router_replay=engine",
    ),
]
MORE = [
    ("tiny_dense", "merged_pp2", "parallel.pipeline=2"),
    ("tiny_dense", "adapter_tp2", "lora.sync=adapter rollout.tensor=2 parallel.pipeline=2"),
    ("tiny_moe", "merged_attention", f"{ATTENTION} parallel.expert=2"),
    ("tiny_moe", "adapter", f"lora.sync=adapter {ATTENTION} parallel.expert=2"),
    ("tiny_moe", "merged_all", "parallel.tensor=2 parallel.expert=2"),
    ("tiny_moe", "merged_all_dp", ""),
    (
        "tiny_moe",
        "merged_all_replay",
        "parallel.tensor=2 parallel.expert=2 rollout.router_replay=trainer",
    ),
]


def main(folder: Path, cases: list[tuple[str, str, str]]) -> None:
    env = Env.read()
    dist.init_process_group("gloo")
    device, syncs = pick_device(env.local_rank), {}
    kept: dict[tuple[str, ...], Engine] = {}  # one at most

    for name, case, overrides in cases:
        common = [
            f"run.dir={folder}",
            f"run.name={name}-{case}",
            "launch.processes=2",
            *COMMON.split(),
        ]
        config = materialize_model(
            load_config(
                ROOT / "configs" / f"{name}.yaml",
                [*common, *overrides.replace("FOLDER", str(folder)).split()],
            )
        )
        assert config.lora is not None

        def start(rank: RankContext) -> Engine:
            lora = rank.config.lora
            assert lora is not None
            rollout = rank.config.rollout
            key = (
                rank.config.model.path or "",
                lora.sync,
                str(rollout.tensor),
                rollout.router_replay,
            )
            if key not in kept:
                for engine in kept.values():
                    engine.close()
                kept.clear()
                kept[key] = make_engine(rank)
            return kept[key]

        rank = RankContext.of(config, env, device)
        trainer = train_policy(rank, start)
        assert trainer.adapters is not None
        export(rank, trainer)
        sizes = {name: 4 * len(x.flatten()) for name, x in trainer.adapters.parameters.items()}
        shapes = trainer.adapters.tensors.shapes.values()
        syncs[f"{name}-{case}"] = {
            "adapter_bytes": 4 * sum(a * b for a, b in shapes),
            "parameters": len(sizes),
        }
        trainer.close()
    if env.is_main:
        (folder / "syncs.json").write_text(json.dumps(syncs))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), MORE if sys.argv[2:] else CASES)
