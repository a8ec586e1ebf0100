"""One rank: the whole loop with engines of several layouts, on the same trainer layout; or one with a fault.

python engine_layout_ranks.py FOLDER CASE...     metrics go to FOLDER/CASE/metrics.jsonl
python engine_layout_ranks.py FOLDER fault FAULT  raises what the fault is found by
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from megarl.commands.random_model import materialize_model
from megarl.config.load import load_config
from megarl.config.schema import Config
from megarl.patches import vllm as patches
from megarl.platform.device import pick_device
from megarl.platform.env import Env
from megarl.rollout.vllm.engine import Engine
from megarl.run.context import RankContext
from megarl.run.engine import make_engine
from megarl.stages.rl import train_policy

ROOT = Path(__file__).resolve().parents[2]
STEPS = "train.steps=4 eval.every=0"
LATENT = "model.create.family=deepseek_v3 model.create.head_dim=64 model.create.kv_heads=4"
CASES = {  # name -> processes, overrides; the first of each number of processes and model is compared with
    "two_base": (2, ""),
    "two_data": (2, "rollout.data=2 rollout.expert=2"),
    "two_data_replay": (2, "rollout.data=2 rollout.expert=2 rollout.router_replay=engine"),
    "two_tensor": (2, "rollout.tensor=2 rollout.expert=2"),
    "four_base": (4, "parallel.expert=2"),
    "four_data": (4, "parallel.expert=2 rollout.data=4 rollout.expert=4"),
    "four_both": (4, "parallel.expert=2 rollout.tensor=2 rollout.data=2 rollout.expert=4"),
    "four_replicas": (4, "parallel.expert=2 rollout.data=2 rollout.expert=2"),
    "latent_base": (2, LATENT),
    "latent_data": (2, f"{LATENT} rollout.data=2 rollout.expert=2"),
    "four_latent_base": (4, f"{LATENT} parallel.expert=2"),
    "four_latent_both": (
        4,
        f"{LATENT} parallel.expert=2 rollout.tensor=2 rollout.data=2 rollout.expert=4",
    ),
}
UNEVEN = "train.prompts_per_step=1 rollout.samples_per_prompt=1 rollout.engine_options.cpu_distributed_timeout_seconds=15"


def run(folder: Path, case: str, world: int, overrides: str, env: Env) -> None:
    changes = [f"run.dir={folder}", f"run.name={case}", f"launch.processes={world}"]
    config = load_config(
        ROOT / "configs/tiny_moe.yaml", [*changes, *STEPS.split(), *overrides.split()]
    )
    config = materialize_model(config)
    if LATENT in overrides:
        config = with_yarn(config, folder / f"model_{case}", env)
    engines: list[Engine] = []

    def start(rank: RankContext) -> Engine:
        engines.append(make_engine(rank))
        return engines[-1]

    rank = RankContext.of(config, env, pick_device(env.local_rank))
    trainer = train_policy(rank, start)
    trainer.close()
    for engine in engines:
        engine.close()


def with_yarn(config: Config, folder: Path, env: Env) -> Config:
    """As the family's models have it: vLLM's CPU kernel of a plain rope misreads a latent's keys, which are strided."""
    assert config.model.path is not None
    if env.rank == 0:
        shutil.copytree(config.model.path, folder)
        values = json.loads((folder / "config.json").read_text())
        values["rope_parameters"] = {
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64,
            "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        }  # fmt: skip
        (folder / "config.json").write_text(json.dumps(values))
    dist.barrier()
    return config.model_copy(
        update={"model": config.model.model_copy(update={"path": str(folder), "create": None})}
    )


@contextmanager
def exchanged_experts() -> Iterator[None]:
    """vLLM's loader stores the first two experts of the second rank in each other's place."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    usual = RoutedExperts._map_global_expert_id_to_local_expert_id

    def exchanged(self: Any, expert: int) -> int:
        local = usual(self, expert)
        return {0: 1, 1: 0}.get(local, local)

    if dist.get_rank() == 1:
        with mock.patch.object(
            RoutedExperts, "_map_global_expert_id_to_local_expert_id", exchanged
        ):
            yield
    else:
        yield


@contextmanager
def shifted_map() -> Iterator[None]:
    """The kernel, which no checksum sees, takes each expert for its neighbour."""
    usual = patches.LOCAL_EXPERTS.replacement

    def shifted(original: Any, experts: Any, *args: Any, **kwargs: Any) -> None:
        kwargs["expert_map"] = kwargs["expert_map"].roll(1)
        usual(original, experts, *args, **kwargs)

    row = patches.replace(patches.LOCAL_EXPERTS, replacement=shifted)
    with mock.patch.object(patches, "EXPERT_PARALLEL", (row, *patches.EXPERT_PARALLEL[1:])):
        yield


@contextmanager
def stops_early() -> Iterator[None]:
    """The data rank without a prompt does not step along with the other."""
    if dist.get_rank() == 1:
        with mock.patch.object(Engine, "finish", lambda self: None):
            yield
    else:
        yield


FAULTS: dict[str, tuple[Callable[[], Any], str]] = {
    "exchanged_experts": (exchanged_experts, ""),
    "shifted_map": (shifted_map, ""),
    "stops_early": (stops_early, UNEVEN),
}


def main(folder: Path, names: list[str]) -> None:
    env = Env.read()
    dist.init_process_group("gloo")
    if names[0] == "fault":
        fault, overrides = FAULTS[names[1]]
        with fault():
            run(folder, names[1], 2, f"rollout.data=2 rollout.expert=2 {overrides}", env)
    else:
        for name in names:
            run(folder, name, *CASES[name], env)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
