"""Order of start-up: the trainer is built and offloaded before the engine starts with what is left of the device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.commands.random_model import materialize_model
from megarl.config.load import load_config
from megarl.platform.device import pick_device
from megarl.platform.env import Env
from megarl.rollout.vllm.engine import Engine
from megarl.run import engine, models
from megarl.run.context import RankContext
from megarl.stages import rl
from megarl.trainer import trainer as trainer_module
from megarl.trainer.trainer import Trainer

pytestmark = pytest.mark.usefixtures("one_rank")
ROOT = Path(__file__).resolve().parents[3]
OFFLOAD = "train.offload=[gradients, optimizer, weights]"
GB = 10**9


class Started(Exception):
    """Ends the run where the engine would start."""


def test_start_up_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device of 80 GB of which 10 are in use, then on one of which 48 are."""
    config = load_config(
        ROOT / "configs" / "tiny_dense.yaml", [f"run.dir={tmp_path}", "train.dtype=bf16", OFFLOAD]
    )
    rank, trace, trainers = (
        RankContext.of(materialize_model(config), Env(), pick_device(0)),
        list[tuple[str, Any]](),
        [],
    )

    def sizes() -> list[int]:
        """Bytes on the device: weights, gradients, fp32 weights."""
        (chunk,) = trainers[0].model
        mains = [x for part in trainers[0].optimizer.optimizer.param_groups for x in part["params"]]
        kinds = [b.param_data for b in chunk.buffers], [b.grad_data for b in chunk.buffers], mains
        return [sum(x.untyped_storage().nbytes() for x in kind) for kind in kinds]

    def make_trainer(
        rank: RankContext, made: Callable[[RankContext], Trainer] = models.make_trainer
    ) -> Trainer:
        trainers.append(made(rank))
        trace.append(("built", sizes()))
        return trainers[-1]

    def build_optimizer(chunks: Any, train: Any, made: Any = trainer_module.build_optimizer) -> Any:
        trace.append(
            (
                "optimizer",
                sum(b.grad_data.untyped_storage().nbytes() for c in chunks for b in c.buffers),
            )
        )
        return made(chunks, train)

    def start(_folder: Path, rollout: Any, *_: Any, **__: Any) -> Engine:
        trace.append(("engine", (sizes(), rollout.gpu_memory_utilization)))
        raise Started

    monkeypatch.setattr(rl, "make_trainer", make_trainer)
    monkeypatch.setattr(trainer_module, "build_optimizer", build_optimizer)
    monkeypatch.setattr(Engine, "start", start)
    monkeypatch.setattr(engine, "device_bytes", lambda _: (70 * GB, 80 * GB))
    with pytest.raises(Started):
        rl.train_policy(rank, engine.make_engine)
    (_, gradients), (_, (weights, freed, mains)), (_, (left, share)) = trace
    assert [name for name, _ in trace] == ["optimizer", "built", "engine"]
    assert gradients == freed == 0 and mains > weights > 0, (
        "no gradients while the optimizer is built"
    )
    assert left == [0, 0, 0] and share == pytest.approx(0.6 - 10 / 80)

    monkeypatch.setattr(engine, "device_bytes", lambda _: (32 * GB, 80 * GB))
    with pytest.raises(
        ValueError, match=r"of 80\.0 GB, less 48\.0 that .* has no room for vLLM's weights"
    ):
        engine.make_engine(rank)
    trainers[0].close()
