"""One job of two gloo ranks: check_layouts as it is, and with mistakes planted. Rank 0 writes the rows.

python layout_ranks.py RESULTS.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from megarl.algorithms import objective as objective_module
from megarl.algorithms.objective import Objective
from megarl.commands.random_model import create_model
from megarl.config.schema import Algorithm, Create, Moe, Train
from megarl.layout import Layout
from megarl.models.registry import read_model
from megarl.parity import layouts as layouts_module
from megarl.parity.layouts import (
    SUPERVISED,
    check_layouts,
    prompt_rows,
    random_routes,
    with_rewards,
)
from megarl.trainer import trainer as trainer_module
from megarl.trainer.learner import PolicyLearner
from megarl.trainer.moe import RouterLosses
from megarl.trainer.router_replay import LayerRoutes
from megarl.trainer.trainer import Trainer
from megarl.types import Prompt

WORLD = 2
SIZES = {
    "layers": 4,
    "hidden": 32,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
    "vocab": 67,
    "tokenizer": "none",
}
DENSE = Create(**SIZES)
MOE = Create(**SIZES | {"layers": 2}, family="qwen3_moe", experts=4)
POLICY = Algorithm.model_validate(
    {
        "kl": {"coef": 0.1},
        "entropy_coef": 0.01,
        "correction": "tis",
        "loss": "ppo_clip",
        "advantage": "grpo",
    }
)
IN_REWARD = POLICY.model_copy(
    update={"kl": POLICY.kl.model_copy(update={"where": "reward", "estimator": "k1"})}
)
LAYOUTS = {  # name -> model, objective, layouts
    "supervised": (DENSE, SUPERVISED, ["tp2", "1"]),
    "dense": (DENSE, Objective(POLICY), ["1", "tp2", "cp2", "pp2,vpp2"]),
    "moe": (MOE, Objective(IN_REWARD), ["1", "tp2", "pp2", "ep2"]),
}


@dataclass
class Case:
    model: Path
    objective: Objective
    faulty_weights: bool = False

    def build(self, layout: Layout, is_plain: bool) -> PolicyLearner:
        shape = read_model(self.model)
        train = Train(
            dtype="fp32",
            max_tokens_per_microbatch=48,
            offload=("gradients", "optimizer"),
            recompute="full",
        )
        if is_plain:
            train = Train(dtype="fp32", max_tokens_per_microbatch=1000)
        trainer = Trainer.build(
            shape,
            layout,
            train=train,
            moe=Moe(aux_loss=0.1, z_loss=0.02) if shape.is_moe else None,
            folder=self.model,
            device=torch.device("cpu"),
        )
        if self.faulty_weights and layout.tp.size == 2:
            for name, parameter in trainer.parameters_by_name().items():
                if "layers.2.mlp" in name and layout.tp.rank == 1:
                    parameter.data.mul_(1.01)
        return PolicyLearner(trainer, self.objective)


@contextmanager
def kl_by_microbatches() -> Iterator[None]:
    """KL is divided by the number of micro-batches of the rank."""
    run, kl_loss, count = trainer_module.forward_backward, objective_module._kl_loss, [1]

    def forward_backward(chunks: Any, microbatches: Any, *args: Any, **options: Any) -> None:
        count[0] = len(microbatches)
        run(chunks, microbatches, *args, **options)

    with (
        mock.patch.object(trainer_module, "forward_backward", forward_backward),
        mock.patch.object(objective_module, "_kl_loss", lambda *x: kl_loss(*x) / count[0]),
    ):
        yield


@contextmanager
def balance_by_data_rank() -> Iterator[None]:
    """Each data rank counts the routers' losses of all data ranks."""
    loss, init = RouterLosses.loss, trainer_module.RouterLosses
    size = [1]

    def build(chunks: Any, moe: Any, shape: Any, tensor: Any) -> RouterLosses:
        size[0] = WORLD // (tensor.size * chunks[0].config.pipeline_model_parallel_size)
        return init(chunks, moe, shape, tensor)

    with (
        mock.patch.object(trainer_module, "RouterLosses", build),
        mock.patch.object(RouterLosses, "loss", lambda *x: loss(*x) * size[0]),
    ):
        yield


@contextmanager
def recompute_routes() -> Iterator[None]:
    """The recomputation routes tokens itself, where the forward pass replayed."""
    replay = LayerRoutes.get_replay_topk

    def get_replay_topk(self: LayerRoutes, *args: Any) -> Any:
        known = self.experts
        if torch.is_grad_enabled() and self.calls[False]:
            self.experts = [torch.zeros_like(x) for x in known or ()]
        found = replay(self, *args)
        self.experts = known
        return found

    with mock.patch.object(LayerRoutes, "get_replay_topk", get_replay_topk):
        yield


@contextmanager
def weights_of_another_microbatch() -> Iterator[None]:
    """Corrections use the engine's log-probs of the micro-batch before."""
    correction, last = Objective._correction, []

    def of_last(self: Objective, tokens: Any, rollout_M: torch.Tensor) -> Any:
        wrong_M = rollout_M.clone()
        if last:
            size = min(len(last[-1]), len(wrong_M))
            wrong_M[:size] = last[-1][:size]
        last.append(rollout_M)
        return correction(self, tokens, wrong_M)

    with mock.patch.object(Objective, "_correction", of_last):
        yield


@contextmanager
def weights_by_rank() -> Iterator[None]:
    """Each data rank divides the loss by its own number of tokens."""
    weights = Objective.weights

    def by_rank(self: Objective, batch: Any, plan: Any) -> torch.Tensor:
        weights_T = weights(self, batch, plan)
        lengths = batch.lengths_N.tolist()
        parts = list(weights_T.split(lengths))
        for update in plan.rows:
            for rank in update:
                rows = [row for microbatch in rank for row in microbatch]
                share = sum(float(parts[row].sum()) for row in rows) * len(update)
                for row in rows:
                    parts[row] = parts[row] / share
        return torch.cat(parts)

    with mock.patch.object(Objective, "weights", by_rank):
        yield


# name -> mistake, case of LAYOUTS, layouts
FAULTS: dict[str, tuple[Callable[[], Any], str, list[str]]] = {
    "KL": (kl_by_microbatches, "dense", ["1"]),
    "balance": (balance_by_data_rank, "moe", ["1", "tp2"]),
    "recompute": (recompute_routes, "moe", ["1"]),
    "correction": (weights_of_another_microbatch, "dense", ["1"]),
    "divisor": (weights_by_rank, "dense", ["1", "tp2"]),
}


def main(file: Path) -> None:
    dist.init_process_group("gloo")
    rank, found = dist.get_rank(), {}
    # an odd number of tokens, so that ranks differ in theirs
    prompts = [Prompt(n // 2, tuple(range(n, n + 4 + n % 7)), "") for n in range(12)]
    rows = with_rewards(prompt_rows(prompts, num_tokens=5, vocab=67))
    if rank == 0:
        for create in (DENSE, MOE):
            create_model(create, file.parent)
    dist.barrier()

    def check(create: Create, objective: Objective, layouts: list[str], **options: Any) -> Any:
        case = Case(create_model(create, file.parent), objective, **options)
        shape, batch = read_model(case.model), rows
        if shape.is_moe:
            batch = replace(rows, choices=random_routes(shape, rows))
        return check_layouts(layouts, batch, case.build, world=WORLD, rank=rank)

    for name, (create, objective, layouts) in LAYOUTS.items():
        found[name] = check(create, objective, layouts)
    layouts_module.DRAWS = 1
    found["weights"] = check(DENSE, SUPERVISED, ["1", "tp2"], faulty_weights=True)
    for name, (plant, case, layouts) in FAULTS.items():
        create, objective, _ = LAYOUTS[case]
        with plant():
            found[name] = check(create, objective, layouts)
    if rank == 0:
        file.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
