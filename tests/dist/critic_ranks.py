"""PPO's learner in one layout after another, saved and resumed in each; rank 0 writes what was found as JSON.

python critic_ranks.py RESULTS.json FOLDER      on one rank, or on two; FOLDER has the models
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from trainer_cases import random_batch

from megarl.algorithms.objective import Objective
from megarl.checkpoint import rank_state
from megarl.checkpoint.state import Checkpoints, Further
from megarl.checkpoint.torch_dist import CRITIC
from megarl.commands.random_model import create_model
from megarl.config.load import parse_config
from megarl.config.schema import Config, Create
from megarl.layout import Layout
from megarl.models.registry import read_model
from megarl.trainer.actor_critic import ActorCritic, CriticHead
from megarl.trainer.learner import PolicyLearner
from megarl.trainer.trainer import Trainer
from megarl.types import StepReport

MODELS = {
    "dense": Create(layers=2, hidden=32, heads=4, kv_heads=2, head_dim=16, vocab=67, tokenizer="none"),
    "untied": Create(layers=2, hidden=32, heads=4, kv_heads=2, head_dim=16, vocab=67, tokenizer="none", tied=False),
    "experts": Create(family="qwen3_moe", experts=4, layers=2, hidden=32, heads=4, kv_heads=2, head_dim=16, vocab=67,
                      tokenizer="none"),
}  # fmt: skip
LAYOUTS: dict[str, list[dict[str, int]]] = {
    "dense": [{}, {"tensor": 2}, {"pipeline": 2}, {"context": 2}],
    "untied": [{"pipeline": 2}],
    "experts": [{"expert": 2}],
}
OTHER = {"tensor": 2}  # in which the last checkpoint of data parallelism is resumed, too


class Cursor:
    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None: ...


def config_of(parallel: dict[str, int]) -> Config:
    kl = {"where": "reward", "coef": 0.05}
    return parse_config({
        "parallel": parallel,
        "algorithm": {"preset": "ppo", "advantage_options": {"gamma": 0.95, "lam": 0.9}, "kl": kl},
        "critic": {"lr": 1e-2, "bootstrap_truncated": True},
        "train": {"dtype": "fp32", "lr": 1e-2, "max_tokens_per_microbatch": 64, "epochs_per_batch": 2},
    })  # fmt: skip


class Job:
    """A new process's learner and checkpoints; `take` is one step of the loop."""

    def __init__(self, folder: Path, model: str, parallel: dict[str, int], saves: Path) -> None:
        config, device = config_of(parallel), torch.device("cpu")
        path = create_model(MODELS[model], folder)
        layout = Layout.of(config.parallel.sizes, dist.get_world_size(), dist.get_rank())
        train, critic = config.train, config.critic
        self.actor = Trainer.build(
            read_model(path), layout, train=train, folder=path, device=device
        )
        objective = Objective(config.algorithm, bootstrap_truncated=True)
        values = Trainer.build(
            read_model(path),
            layout,
            train=train.model_copy(update={"lr": critic.lr}),
            head=CriticHead(),
            folder=path,
            device=device,
            share_groups_with=self.actor,
        )
        self.learner = ActorCritic(PolicyLearner(self.actor, objective), values, critic)
        state = self.state = objective.initial_state()
        kept: Any = {"every": 1, "keep": 9, "last_step": 9, "further": Further({CRITIC: values})}
        self.saves = Checkpoints(saves, self.actor, Cursor(), state, **kept)

    def take(self, step: int) -> list[float]:
        batch = random_batch(num_rows=8, seed=step)
        batch.finish[::3] = 1  # cut by length
        scored, self.state = self.learner.actor.objective.advantages(
            batch, self.learner.score(batch), self.state
        )
        report: StepReport = self.learner.update(scored)
        numbers = [
            number for update in report.updates for number in (update.loss, update.grad_norm)
        ]
        names = (
            "value/loss",
            "value/grad_norm",
            "value/clip_frac",
            "value/explained_variance",
            "value/mean",
        )
        return [*numbers, *(report.metrics[name] for name in names)]

    def tensors(self) -> list[torch.Tensor]:
        found = []
        for trainer in (self.actor, self.learner.critic):
            found += [
                parameter.detach().clone() for parameter in trainer.parameters_by_name().values()
            ]
            for part in rank_state.parts_of(trainer.optimizer):
                found += [
                    state[name].clone()
                    for state in part.optimizer.state.values()
                    for name in sorted(state)
                ]
        return found

    def close(self) -> None:
        self.learner.critic.close()
        self.actor.close()


def run(folder: Path, model: str, parallel: dict[str, int]) -> dict[str, Any]:
    world = dist.get_world_size()
    saves = folder / f"{model} {world} {parallel}"
    whole = Job(folder, model, parallel, saves)
    numbers = [whole.take(0)]
    whole.saves.maybe_save(1, whole.state)
    numbers.append(whole.take(1))
    whole.saves.finish()
    expected = whole.tensors()
    whole.close()
    found: dict[str, Any] = {"numbers": numbers}
    for name, sizes in {
        "again": parallel,
        **({"other": OTHER} if world > 1 and not parallel else {}),
    }.items():
        job = Job(folder, model, sizes, saves)
        assert job.saves.restore("auto") == (1, whole.state)
        found[name] = job.take(1)
        if name == "again":
            found["same"] = all(map(torch.equal, job.tensors(), expected))
        job.close()
    return found


def main(results: Path, folder: Path) -> None:
    dist.init_process_group("gloo")
    found = {}
    for model, layouts in LAYOUTS.items():
        for parallel in layouts if dist.get_world_size() > 1 else [{}]:
            found[f"{model} {parallel}"] = run(folder, model, parallel)
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, found)
    if dist.get_rank() == 0:
        results.write_text(json.dumps(everywhere))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
