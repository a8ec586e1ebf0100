"""One rank of two or four: the whole loop with real engines, in many layouts and two objectives; engines are kept.

python loop_ranks.py FOLDER     metrics go to FOLDER/<case>/metrics.jsonl, replicas that differ to FOLDER/replicas.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from megarl.commands.random_model import materialize_model
from megarl.config.load import load_config
from megarl.platform.device import pick_device
from megarl.platform.env import Env
from megarl.rollout.vllm.engine import Engine
from megarl.run.context import RankContext
from megarl.run.engine import make_engine
from megarl.stages.rl import train_policy
from megarl.trainer.trainer import Trainer
from megarl.weights.sync.checksum import checksum

ROOT = Path(__file__).resolve().parents[2]
REINFORCE_PP = "algorithm.preset=reinforce_pp"
TP2, PP2 = "parallel.tensor=2", "parallel.pipeline=2"
# the engines change least often: their start is what costs
TWO_RANKS = [
    ("tiny_dense", "dp", ""),
    ("tiny_dense", "cp2", "parallel.context=2"),
    ("tiny_dense", "tp2", TP2),
    ("tiny_dense", "pp2", PP2),
    ("tiny_dense", "dp-rpp", REINFORCE_PP),
    ("tiny_dense", "pp2-rpp", f"{PP2} {REINFORCE_PP}"),
    ("tiny_dense", "engine_tp2", f"{TP2} rollout.tensor=2"),
    ("tiny_moe", "dp", ""),
    ("tiny_moe", "ep2", "parallel.expert=2"),
    ("tiny_moe", "tp2_etp2", f"{TP2} parallel.expert_tensor=2"),
]
DENSE = {
    "dp": "",
    "cp2": "parallel.context=2",
    "tp2_cp2": "parallel.tensor=2 parallel.context=2",
    "tp2_pp2": "parallel.tensor=2 parallel.pipeline=2",
    "engine_tp2": "parallel.tensor=2 rollout.tensor=2",
}
MOE = {
    "dp": "",
    "cp2_ep2": "parallel.context=2 parallel.expert=2",
    "tp2": "parallel.tensor=2",
    "tp2_etp2": "parallel.tensor=2 parallel.expert_tensor=2",
    "tp2_ep2": "parallel.tensor=2 parallel.expert=2",
    "pp2_ep2": "parallel.pipeline=2 parallel.expert=2",
}
FOUR_RANKS = [
    *(("tiny_dense", name, layout) for name, layout in DENSE.items() if name != "engine_tp2"),
    *(("tiny_dense", f"{name}-rpp", f"{DENSE[name]} {REINFORCE_PP}") for name in ("dp", "tp2_pp2")),
    ("tiny_dense", "engine_tp2", DENSE["engine_tp2"]),
    *(("tiny_moe", name, layout) for name, layout in MOE.items()),
    *(("tiny_moe", f"{name}-rpp", f"{MOE[name]} {REINFORCE_PP}") for name in ("dp", "tp2_ep2")),
]


def main(folder: Path) -> None:
    env = Env.read()
    dist.init_process_group("gloo")
    device = pick_device(env.local_rank)
    two_commits = ["model.path=org/model", f"model.revision=commit{2 * env.rank // env.world_size}"]
    with pytest.raises(
        ValueError, match=r"model.revision is commit0 and commit1 on different nodes"
    ):
        RankContext.of(load_config(ROOT / "configs" / "tiny_dense.yaml", two_commits), env, device)
    kept: dict[tuple[str, int], Engine] = {}  # one at most

    def start(rank: RankContext) -> Engine:
        key = (rank.config.model.path or "", rank.config.rollout.tensor)
        if key not in kept:
            for engine in kept.values():
                engine.close()
            kept.clear()
            kept[key] = make_engine(rank)
        return kept[key]

    differ: dict[str, list[str]] = {}
    for name, case, overrides in TWO_RANKS if env.world_size == 2 else FOUR_RANKS:
        common = [
            f"run.dir={folder}",
            f"run.name={name}-{case}",
            f"launch.processes={env.world_size}",
            "train.steps=2",
        ]
        config = materialize_model(
            load_config(ROOT / "configs" / f"{name}.yaml", [*common, *overrides.split()])
        )
        trainer = train_policy(RankContext.of(config, env, device), start)
        differ[f"{name}-{case}"] = replicas_that_differ(trainer)
    if env.is_main:
        (folder / "replicas.json").write_text(json.dumps(differ))
    dist.barrier()
    dist.destroy_process_group()


def replicas_that_differ(trainer: Trainer) -> list[str]:
    """Rectangles of HF tensors whose bits are not the same on all ranks that hold them."""
    held, found = trainer.parameters_by_name(), {}
    for box in trainer.tensors.slices:
        tensor = held[box.param].detach()
        part = tensor.as_strided(box.shape, box.strides, tensor.storage_offset() + box.offset)
        found[f"{box.name} {box.start} {box.shape}"] = int(checksum(part.contiguous().flatten()))
    everywhere = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, found)
    seen: dict[str, set[int]] = {}
    for rank in everywhere:
        for name, value in rank.items():
            seen.setdefault(name, set()).add(value)
    return sorted(name for name, values in seen.items() if len(values) > 1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
