"""A trainer of a tiny random model on one rank; the tests that build one use the fixture `one_rank`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "dist"))
from trainer_cases import random_batch

from megarl.commands.random_model import create_model
from megarl.config.precision import Fp8
from megarl.config.schema import Create, Lora, Moe, Precision, Train
from megarl.layout import Layout, Parallel
from megarl.models.registry import read_model
from megarl.trainer.heads import Head
from megarl.trainer.trainer import Trainer

SMALL = {
    "layers": 2,
    "hidden": 32,
    "heads": 2,
    "kv_heads": 2,
    "head_dim": 16,
    "vocab": 67,
    "tokenizer": "none",
}
make_batch = random_batch


def build(
    folder: Path,
    create: dict | None = None,
    *,
    head: Head | None = None,
    moe: Moe | None = None,
    fp8: Fp8 | None = None,
    lora: Lora | None = None,
    megatron_options: dict | None = None,
    share_groups_with: Trainer | None = None,
    **train,
) -> Trainer:
    model = create_model(Create(**(SMALL | (create or {}))), folder)
    settings = Train.model_validate(
        {"dtype": "fp32", "lr": 1e-2, "max_tokens_per_microbatch": 64, **train}
    )
    layout, device = Layout.of(Parallel(), 1, 0), torch.device("cpu")
    return Trainer.build(
        read_model(model),
        layout,
        train=settings,
        moe=moe,
        head=head,
        folder=model,
        device=device,
        precision=Precision(fp8=fp8),
        lora=lora,
        megatron_options=megatron_options,
        share_groups_with=share_groups_with,
    )
