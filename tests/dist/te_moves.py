"""Weights of Transformer Engine's layers: syncs, exports, checkpoints and tables. Used by te_ranks.py."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from checkpoint_ranks import Cursor
from family_ranks import round_trip
from safetensors.torch import save_file
from te_cases import TE, Bench, Parallel, relative, run
from torch import Tensor
from trainer_cases import load_model, oracle_logprobs, random_batch
from trainer_ranks import config_of
from transformers_engine import Receiver

from megarl.checkpoint.state import Checkpoints
from megarl.layout import Layout
from megarl.layout import Parallel as Sizes
from megarl.models.engine import engine_table
from megarl.models.registry import (
    fp32_tensors,
    hf_shapes,
    megatron_table,
    padded_vocab,
    read_model,
)
from megarl.models.shards import slices_of
from megarl.stages.sft import train_supervised
from megarl.trainer.megatron_config import transformer_config
from megarl.trainer.model import build_model, local_tensors
from megarl.trainer.parallel_groups import destroy_parallel, init_parallel
from megarl.types import ObjectiveState, TrainBatch
from megarl.weights.sync.publish import Publisher, WeightFormat, WeightSender, plan_slices
from megarl.weights.sync.transports.collective import Collective

SYNCED = [
    ("qwen3", {"tensor": 2}),
    ("qwen3_moe", {"tensor": 2, "expert": 2}),
    ("deepseek_v3", {"pipeline": 2}),
]
EXPORTED = [("glm4_moe", {"tensor": 2, "expert": 2}), ("gpt_oss", {"expert": 2})]
RESHARDED = [{"tensor": 2}, {"pipeline": 2}, {"expert": 2}]


def check_sync(bench: Bench) -> list[dict[str, Any]]:
    """Live syncs to an engine on each rank, which scores with plain transformers what it received."""
    return [_synced(bench, *case) for case in SYNCED]


def _synced(bench: Bench, model: str, parallel: Parallel) -> dict[str, Any]:
    policy = bench.policy(model, config_of(parallel), **TE)
    trainer = policy.trainer
    shape = trainer.shape
    shapes = hf_shapes(shape)
    slices = list(slices_of(engine_table(shape), shape, Layout.of(Sizes(), 1, 0)))
    receiver = Receiver(
        {name: torch.full(size, torch.nan) for name, size in shapes.items()}, slices
    )
    weights = WeightFormat(shapes, torch.float32, fp32_tensors(shape))
    transport = Collective()
    plan = plan_slices(
        weights,
        trainer.tensors.by_rank(),
        transport.gather(slices),
        ranks_per_replica=1,
        round_bytes=1 << 16,
    )
    sender = WeightSender(trainer.tensors.slices, trainer.parameters_by_name)
    publisher = Publisher(plan, sender, receiver, transport, weights, probe=None)
    folder = bench.folder / f"engine-{bench.number}"
    batch = random_batch(num_rows=8)
    errors = []
    stale = []
    for version in range(2):
        assert publisher.publish(version=version).verified
        engine_T = _scored(receiver.tensors, policy.folder, folder, batch)
        errors.append(relative(trainer.logprobs(batch), engine_T))
        train_supervised(trainer, batch)
        stale.append(relative(trainer.logprobs(batch), engine_T))
    trainer.close()
    return {"model": model, "parallel": parallel, "errors": errors, "stale": stale}


@torch.no_grad()
def _scored(tensors: Mapping[str, Tensor], origin: Path, folder: Path, batch: TrainBatch) -> Tensor:
    """Returns the log-probs of transformers with these weights."""
    folder.mkdir(exist_ok=True)
    shutil.copy(origin / "config.json", folder)
    save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
    return oracle_logprobs(load_model(folder), batch)


def check_exports(bench: Bench) -> dict[str, list[str]]:
    """The tensors that loading and exporting a checkpoint changed."""
    found = {}
    for model, parallel in EXPORTED:
        policy = bench.policy(model, config_of(parallel), **TE)
        found[model] = round_trip(policy)
        policy.trainer.close()
    return found


def check_checkpoints(bench: Bench) -> list[dict[str, Any]]:
    """A state saved in one layout and resumed in the next: the same log-probs, gradients and later steps."""
    found = []
    batch = random_batch(num_rows=8)
    folder = bench.folder / "checkpoints"
    expected = None
    for number, parallel in enumerate(RESHARDED):
        trainer = bench.trainer("qwen3_moe", config_of(parallel), **TE)
        state = ObjectiveState(0.0)
        checkpoints = Checkpoints(folder, trainer, Cursor(), state, every=1, keep=9, last_step=9)
        if number:
            checkpoints.restore(str(folder / f"step_{number}"))
            seen = run(trainer, batch)
            after_T = trainer.logprobs(batch)
            assert expected is not None
            found.append(
                {
                    "parallel": parallel,
                    "logprobs": relative(seen.logprobs_T, expected[0]),
                    "grad_norm": [seen.step.grad_norm, expected[1]],
                    "after": relative(after_T, expected[2]),
                    "moved": relative(after_T, seen.logprobs_T),
                }
            )
        train_supervised(trainer, random_batch(num_rows=8, seed=number))
        checkpoints.maybe_save(number + 1, state)
        checkpoints.finish()
        seen = run(trainer, batch)
        expected = (seen.logprobs_T, seen.step.grad_norm, trainer.logprobs(batch))
        trainer.close()
    return found


def check_prediction(bench: Bench) -> dict[str, Any]:
    """Elements of the parameters of multi-token prediction: those that the table has, and those that are built."""
    if bench.number == 0:
        return {}
    shape = replace(read_model(bench.folder / "deepseek_v3"), mtp_layers=1)
    layout = Layout.of(Sizes(), 1, 0)
    init_parallel(layout, seed=0)
    how: Any = {"dtype": torch.float32, "dispatcher": "alltoall", "use_te": True}
    config = transformer_config(shape, layout, **how)
    config.mtp_num_layers = shape.mtp_layers
    (model,) = build_model(shape, layout, config, use_te=True)
    built = {
        name.replace("mtp_model_layer", "transformer_layer"): x.numel()
        for name, x in local_tensors([model]).items()
    }
    destroy_parallel()
    table = megatron_table(shape, spec="te", padded_vocab=padded_vocab(shape.vocab, 1))
    expected: dict[str, set[int]] = {}
    for part in slices_of(table, shape, layout, mtp=True):
        elements = part.offset + sum(
            (n - 1) * stride for n, stride in zip(part.shape, part.strides, strict=True)
        )
        expected.setdefault(part.param, set()).add(elements + 1)
    return {
        "built": {name: size for name, size in built.items() if name.startswith("mtp.")},
        "expected": {name: max(ends) for name, ends in expected.items() if name.startswith("mtp.")},
    }
