"""One of two gloo ranks that scores samples with reward models, beside a policy, in each layout.

python reward_score_ranks.py FOLDER RESULTS.json
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import (
    AutoModelForSequenceClassification,
    Qwen3Config,
    Qwen3ForSequenceClassification,
)

from megarl.commands.random_model import create_model
from megarl.config.schema import Config, Create
from megarl.platform.device import pick_device
from megarl.platform.env import Env
from megarl.run.context import RankContext
from megarl.run.models import make_reward_model, make_trainer
from megarl.types import Sample

LAYOUTS: dict[str, dict[str, int]] = {"dp2": {}, "tp2": {"tensor": 2}, "pp2": {"pipeline": 2}}
SMALL = {
    "layers": 2,
    "hidden": 32,
    "heads": 2,
    "kv_heads": 2,
    "head_dim": 16,
    "vocab": 67,
    "tokenizer": "none",
}


class Engine:
    """Records when it sleeps."""

    bytes_asleep = 0

    def __init__(self) -> None:
        self.said: list[str] = []

    def sleep(self) -> None:
        self.said.append("sleep")

    def wake(self, part: str) -> None:
        self.said.append(part)


def save_classifier(folder: Path, heads: int = 2) -> Path:
    """As transformers writes it: large weights, so that scores differ."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=67, hidden_size=16 * heads, intermediate_size=96, num_hidden_layers=2, num_attention_heads=heads,
        num_key_value_heads=2, head_dim=16, num_labels=1, pad_token_id=0, eos_token_id=1, bos_token_id=None,
        tie_word_embeddings=True, max_position_embeddings=512, initializer_range=0.2,
    )  # fmt: skip
    Qwen3ForSequenceClassification(config).save_pretrained(folder)
    return folder


def make_samples() -> list[Sample]:
    generator, samples = torch.Generator().manual_seed(1), []
    for index in range(9):
        tokens = torch.randint(2, 67, (5 + 3 * index,), generator=generator)
        trainable = torch.arange(len(tokens)) >= 3
        zeros = torch.zeros(len(tokens))
        samples.append(Sample(0, index, tokens, trainable, zeros, zeros.int(), "stop", reward=0.25))
    return samples


@torch.no_grad()
def transformers_scores(folder: Path, rows: list[list[int]]) -> list[float]:
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    return [float(model(torch.tensor([row])).logits) for row in rows]


def measure(policy: Path, classifier: Path, parallel: dict[str, int]) -> dict[str, Any]:
    reward = {"name": "model", "weight": 2.0, "options": {"path": str(classifier)}}
    sections = {"model": {"path": str(policy)}, "parallel": parallel, "rewards": [reward]}
    config = Config.model_validate(
        sections | {"train": {"dtype": "fp32", "max_tokens_per_microbatch": 40}}
    )
    env = Env.read()
    rank, engine = RankContext.of(config, env, pick_device(env.local_rank)), Engine()
    trainer = make_trainer(rank)
    reward_model = make_reward_model(rank, trainer)
    assert reward_model is not None
    scored = reward_model.score(engine, lambda name: nullcontext(), make_samples())
    bytes_left = sum(
        p.untyped_storage().nbytes() for p in reward_model.trainer.parameters_by_name().values()
    )
    found = {
        "rewards": [sample.reward for sample in scored],
        "engine": engine.said,
        "bytes_left": bytes_left,
    }
    reward_model.trainer.close()
    trainer.close()
    return found


def main(folder: Path, results: Path) -> None:
    dist.init_process_group("gloo")
    policy, classifier = folder / "policy", folder / "classifier"
    if dist.get_rank() == 0:
        create_model(Create.model_validate(SMALL), folder).rename(policy)
        save_classifier(classifier)
    dist.barrier()
    found: dict[str, Any] = {
        name: measure(policy, classifier, parallel) for name, parallel in LAYOUTS.items()
    }
    if dist.get_rank() == 0:
        rows = [sample.tokens.tolist() for sample in make_samples()]
        results.write_text(
            json.dumps(found | {"transformers": transformers_scores(classifier, rows)})
        )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
