"""DPO on stored pairs, and DPO and SFT on sampled ones, in several layouts of the ranks there are; rank 0 writes JSON.

python preference_ranks.py MODEL RESULTS.json
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from trainer_cases import random_batch

from megarl.algorithms.objective import Objective
from megarl.algorithms.preference import DpoObjective, best_and_worst
from megarl.config.schema import Algorithm, Dpo, Train
from megarl.data.preferences import preference_batch
from megarl.data.tasks import ranked_tokens
from megarl.data.tokenizer import TokenIds
from megarl.layout import Layout, Parallel
from megarl.models.registry import read_model
from megarl.stages.dpo import DpoLearner
from megarl.trainer.learner import PolicyLearner, SelectingLearner
from megarl.trainer.reference import Reference
from megarl.trainer.trainer import Trainer
from megarl.types import PreferenceBatch, Prompt, StepReport

LAYOUTS = {1: [Parallel()], 2: [Parallel(), Parallel(2), Parallel(1, 2)]}
TRAIN = {"dtype": "fp32", "lr": 1e-2, "max_tokens_per_microbatch": 96}
STEPS = 3


def stored(seed: int) -> PreferenceBatch:
    """Seven prompts with three ranked responses each: the ranks get different numbers of pairs."""
    rows = ranked_tokens(split="train", vocab=67, size=7, responses=3, seed=seed)
    prompts = [(tuple(map(int, row["prompt"].split())), row) for row in rows]
    return preference_batch(
        TokenIds((2,), 67), [Prompt(n, ids, "", extra=row) for n, (ids, row) in enumerate(prompts)]
    )


def build(model: Path, parallel: Parallel, **train: Any) -> Trainer:
    layout = Layout.of(parallel, dist.get_world_size(), dist.get_rank())
    settings = Train.model_validate(TRAIN | train)
    return Trainer.build(
        read_model(model), layout, train=settings, folder=model, device=torch.device("cpu")
    )


def on_stored_pairs(model: Path, parallel: Parallel) -> list[StepReport]:
    trainer = build(model, parallel)
    reference = Reference(trainer.parameters_by_name)
    learner = DpoLearner(trainer, reference, Dpo(), {}, lambda _: nullcontext())
    reports = [learner.update(stored(seed)) for seed in range(STEPS)]
    trainer.close()
    return reports


def on_samples(
    model: Path, parallel: Parallel, objective: Objective, **train: Any
) -> list[StepReport]:
    is_sft, reports = not isinstance(objective, DpoObjective), []
    learner = SelectingLearner(
        PolicyLearner(build(model, parallel, **train), objective),
        lambda batch: best_and_worst(batch)[:: 1 + is_sft],
    )
    for seed in range(STEPS):
        batch = random_batch(num_rows=12, seed=seed)
        scored, _ = objective.advantages(batch, learner.score(batch), objective.initial_state())
        reports.append(learner.update(scored, gate=lambda part: {"rows": part.num_rows}))
    learner.learner.trainer.close()
    return reports


def main(model: Path, results: Path) -> None:
    dist.init_process_group("gloo")
    found = {}
    for parallel in LAYOUTS[dist.get_world_size()]:
        cases = {
            "dpo": on_stored_pairs(model, parallel),
            "previous": on_samples(
                model, parallel, DpoObjective(Algorithm(), options=Dpo(reference="previous"))
            ),
            "initial": on_samples(model, parallel, DpoObjective(Algorithm()), updates_per_step=2),
            "best_of_n": on_samples(model, parallel, Objective(Algorithm(loss="sft"))),
        }
        for name, reports in cases.items():
            found[f"{name} {parallel}"] = [
                [
                    {"loss": u.loss, "grad_norm": u.grad_norm, **u.metrics, **report.metrics}
                    for u in report.updates
                ]
                for report in reports
            ]
    if dist.get_rank() == 0:
        results.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
