"""Four gloo ranks that save and resume in one layout after another; rank 0 writes what differs as JSON.

python checkpoint_ranks.py RESULTS.json FOLDER

In each layout the state is also saved by Megatron-Core's own gather, of every tensor on every data rank.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from trainer_cases import random_batch

from megarl.checkpoint import rank_state
from megarl.checkpoint.state import Checkpoints
from megarl.checkpoint.writer import Writing
from megarl.commands.random_model import create_model
from megarl.config.schema import Create, Train
from megarl.layout import Layout, Parallel
from megarl.models.registry import read_model
from megarl.stages.sft import train_supervised
from megarl.trainer.trainer import Trainer
from megarl.types import ObjectiveState

WORLD = 4
SIZES = {
    "layers": 4,
    "hidden": 32,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
    "vocab": 67,
    "tokenizer": "none",
}
CHAINS: dict[str, tuple[str, dict[str, Any], list[dict[str, Any]]]] = {  # dtype, model, layouts
    "dense bf16": (
        "bf16",
        {},
        [{}, {"tensor": 2}, {"pipeline": 2, "layers": (1, 3)}, {"tensor": 2, "pipeline": 2}],
    ),
    "dense fp32": ("fp32", {}, [{"pipeline": 2, "virtual_pipeline": 2}, {}]),
    "experts": (
        "bf16",
        {"family": "qwen3_moe", "experts": 4},
        [{}, {"expert": 2}, {"tensor": 2}, {"pipeline": 2, "expert": 2}],
    ),
}


class Cursor:
    def state(self) -> dict[str, int]:
        return {}

    def restore(self, state: dict[str, int]) -> None:
        pass


def gathered_by_megatron(trainer: Trainer, folder: Path) -> None:
    if dist.get_rank() == 0:
        folder.mkdir()
    dist.barrier()
    model = {
        f"model{number}": chunk.module.sharded_state_dict()
        for number, chunk in enumerate(trainer.model)
    }
    metadata = {"distrib_optim_sharding_type": "fully_reshardable"}
    optimizer = trainer.optimizer.sharded_state_dict(model, metadata=metadata)
    Writing({}, {**model, "optimizer": optimizer}, folder).finish()


def state_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """All that this rank trains."""
    state = {
        name: parameter.detach().clone() for name, parameter in trainer.parameters_by_name().items()
    }
    for number, part in enumerate(rank_state.parts_of(trainer.optimizer)):
        for order, (main, moments) in enumerate(part.optimizer.state.items()):
            for name, tensor in {"main": main, **moments}.items():
                state[f"{number} {order} {name}"] = tensor.detach().clone()
    return state


def differences(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    names = sorted(one.keys() & other.keys())
    return sorted(one.keys() ^ other.keys()) + [
        name for name in names if not torch.equal(one[name], other[name])
    ]


def run_chain(
    folder: Path, model: Path, dtype: str, layouts: list[dict[str, int]]
) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for number, parallel in enumerate(layouts):
        train = Train(dtype=dtype, lr=1e-2, max_tokens_per_microbatch=64)  # type: ignore[arg-type]
        layout = Layout.of(Parallel(**parallel), WORLD, dist.get_rank())
        device = torch.device("cpu")
        trainer = Trainer.build(read_model(model), layout, train=train, folder=model, device=device)
        state, last = ObjectiveState(0.0), folder / f"checkpoints/step_{number}"
        checkpoints = Checkpoints(
            folder / "checkpoints", trainer, Cursor(), state, every=1, keep=9, last_step=9
        )
        if number:
            assert checkpoints.restore(str(last))[0] == number
            resumed = state_of(trainer)
            gathered_by_megatron(trainer, folder / f"resumed_{number}")
            for part in rank_state.parts_of(trainer.optimizer):
                for moments in part.optimizer.state.values():
                    moments["exp_avg"].zero_()
                    moments["exp_avg_sq"].zero_()
            rank_state.load(
                [chunk.module for chunk in trainer.model],
                folder / f"megatron_{number}",
                trainer.optimizer,
            )
            found[f"{number} from Megatron's files"] = differences(resumed, state_of(trainer))
        train_supervised(trainer, random_batch(num_rows=8, seed=number))
        gathered_by_megatron(trainer, folder / f"megatron_{number + 1}")
        checkpoints.maybe_save(number + 1, state)
        train_supervised(trainer, random_batch(num_rows=8, seed=99))  # while the files are written
        checkpoints.finish()
        trainer.close()
    return found


def work(rank: int, results: str, folder: str) -> None:
    root = Path(folder)
    dist.init_process_group("gloo", init_method=f"file://{root}/init", rank=rank, world_size=WORLD)
    found = {}
    for name, (dtype, model, layouts) in CHAINS.items():
        sizes = Create(**SIZES, **model)
        if rank == 0:
            (root / name).mkdir()
            create_model(sizes, root)
        dist.barrier()
        found[name] = run_chain(root / name, create_model(sizes, root), dtype, layouts)
    by_rank: list[Any] = [None] * WORLD
    dist.all_gather_object(by_rank, found)
    if rank == 0:
        Path(results).write_text(json.dumps(by_rank))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    mp.start_processes(work, (sys.argv[1], sys.argv[2]), WORLD, start_method="fork")
