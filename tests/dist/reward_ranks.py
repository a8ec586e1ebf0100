"""One of two gloo ranks that trains reward models in each layout; rank 0 writes what each found as JSON.

python reward_ranks.py MODELS RESULTS.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from trainer_cases import save_model

from megarl.config.schema import Config
from megarl.data.preferences import preference_batch, step_batch
from megarl.data.tasks import ranked_tokens
from megarl.data.tokenizer import TokenIds
from megarl.layout import Layout
from megarl.models.registry import read_model
from megarl.stages.reward_model import Rankings, Steps
from megarl.trainer.heads import RewardHead
from megarl.trainer.trainer import Trainer
from megarl.types import Prompt, TokenBatch

LAYOUTS: list[dict[str, int]] = [{}, {"tensor": 2}, {"pipeline": 2}]
TOKENIZER = TokenIds((1,), 50)
CASES = {
    "qwen3": RewardHead(),  # tied: the last stage of two has a copy of the embedding
    "llama": RewardHead(kind="token", aggregate="weighted"),
    "qwen3_moe": RewardHead(kind="process"),
}


def batch_of(head: RewardHead) -> TokenBatch:
    rows = ranked_tokens(split="train", vocab=50, size=7, responses=3)
    prompts = [
        Prompt(n, TOKENIZER.encode_prompt(row["prompt"], None), "", None, row)
        for n, row in enumerate(rows)
    ]
    if head.kind != "process":
        return preference_batch(TOKENIZER, prompts)
    for prompt in prompts:
        prompt.extra.update(
            completions=prompt.extra["responses"], labels=[True, prompt.prompt_id % 2 == 0, False]
        )
    return step_batch(TOKENIZER, prompts, separator="")


def save(folder: Path) -> None:
    for model in CASES:
        save_model(model, folder)


def measure(folder: Path, model: str, parallel: dict[str, int]) -> dict[str, Any]:
    """Two updates, with two updates a step, and the scores afterwards."""
    train = {"dtype": "fp32", "lr": 1e-2, "max_tokens_per_microbatch": 64, "updates_per_step": 2}
    config, head = Config.model_validate({"parallel": parallel, "train": train}), CASES[model]
    layout = Layout.of(config.parallel.sizes, dist.get_world_size(), dist.get_rank())
    shape = read_model(folder / model)
    trainer = Trainer.build(
        shape,
        layout,
        train=config.train,
        folder=folder / model,
        device=torch.device("cpu"),
        head=head,
    )
    generator = torch.Generator().manual_seed(0)
    for name, parameter in trainer.parameters_by_name().items():
        if name.startswith("value_head"):
            parameter.data.normal_(generator=generator)
    trainer.optimizer.reload_model_params()
    batch = batch_of(head)
    learner = Steps(trainer) if head.kind == "process" else Rankings(trainer, head, centre=0.01)
    updates = [update for _ in range(2) for update in learner.update(batch).updates]
    right, scores = learner.right(batch)[0].sum(), trainer.forward(batch).values_T
    trainer.close()
    return {
        "updates": [(update.loss, update.grad_norm, dict(update.metrics)) for update in updates],
        "right": float(right),
        "scores": scores[scores != 0].tolist(),
    }


def main(folder: Path, results: Path) -> None:
    dist.init_process_group("gloo")
    found = {model: [measure(folder, model, parallel) for parallel in LAYOUTS] for model in CASES}
    if dist.get_rank() == 0:
        results.write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
