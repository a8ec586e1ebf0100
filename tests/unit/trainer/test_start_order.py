"""Order of start-up: the trainer is built and offloaded before the engine starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.config.load import load_config
from megarl.launch import run_rl
from megarl.launch.build import Rank
from megarl.launch.random_model import materialize_model
from megarl.platform.device import pick_device
from megarl.platform.env import Env
from megarl.rollout.engine import Engine
from megarl.trainer.trainer import Trainer

pytestmark = pytest.mark.usefixtures("one_rank")
ROOT = Path(__file__).resolve().parents[3]
OFFLOAD = "train.offload=[gradients, optimizer, weights]"


class Started(Exception):
    """Ends the run where the engine would start."""


def test_the_trainer_is_off_the_device_when_the_engine_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(ROOT / "configs" / "tiny_dense.yaml", [f"run.dir={tmp_path}", "train.dtype=bf16", OFFLOAD])
    rank, trainers, make_trainer = Rank.of(materialize_model(config), Env(), pick_device(0)), [], run_rl.make_trainer

    def make(rank: Rank) -> Trainer:
        trainers.append(make_trainer(rank))
        return trainers[0]

    def start(_rank: Rank) -> Engine:
        (trainer,) = trainers
        (chunk,) = trainer.model
        assert [buffer.param_data.untyped_storage().nbytes() for buffer in chunk.buffers] == [0]
        assert [buffer.grad_data.untyped_storage().nbytes() for buffer in chunk.buffers] == [0]
        raise Started

    monkeypatch.setattr(run_rl, "make_trainer", make)
    with pytest.raises(Started):
        run_rl.train_policy(rank, start)
    trainers[0].close()
