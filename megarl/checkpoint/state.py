"""Everything a run needs to go on, as a Megatron distributed checkpoint: any layout can read it.

    runs/<name>/checkpoints/.step_<n>.part --all ranks wrote--> step_<n>, then `latest`, then older ones go

What is kept is the state between two steps: weights and optimizer, learning-rate schedule, the prompts' cursor and
the objective's state. A run that is refused in the middle of a step can still save the boundary before it.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from megarl.roles import Prompts
from megarl.types import ObjectiveState

__all__ = ["Checkpoints", "Trained"]

SHARDING = {"distrib_optim_sharding_type": "fully_reshardable"}  # the one format that every layout can read


class Trained(Protocol):
    """What of an actor is saved (megarl.actor.Actor has it)."""

    @property
    def model(self) -> Sequence[Any]: ...  # Megatron's DistributedDataParallel of each chunk of this stage
    @property
    def optimizer(self) -> MegatronOptimizer: ...
    @property
    def scheduler(self) -> Any: ...  # state_dict, load_state_dict


@dataclass(frozen=True, slots=True)
class _Boundary:
    """What is true after `step` steps, besides the actor's own state."""

    step: int
    state: ObjectiveState
    prompts: Mapping[str, Any]


class Checkpoints:
    """roles.Checkpoint. Every rank calls every method."""

    def __init__(
        self,
        folder: Path,
        actor: Trained,
        prompts: Prompts,
        state: ObjectiveState,
        *,
        every: int,  # steps; and at the end. 0: never
        keep: int,
        last_step: int,
    ) -> None:
        self._folder = folder
        self._actor = actor
        self._prompts = prompts
        self._every = every
        self._keep = keep
        self._last_step = last_step
        self._now = _Boundary(0, state, prompts.state())
        self._saved = 0  # step of the newest checkpoint; 0 needs none, it is the model itself

    def maybe_save(self, step: int, state: ObjectiveState, *, last: bool = False) -> None:
        """Called once a step, between update and publish."""
        self._now = _Boundary(step, state, self._prompts.state())
        if self._every and (last or step == self._last_step or step % self._every == 0):
            self.save()

    def save(self) -> Path | None:
        """Save the newest boundary, unless it is saved; its folder, or None when nothing was trained yet."""
        now = self._now
        if now.step == self._saved:
            return None
        final, staging = self._folder / f"step_{now.step}", self._folder / f".step_{now.step}.part"
        if dist.get_rank() == 0:
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir(parents=True)
        dist.barrier()
        kept = {
            "step": now.step,
            "state": asdict(now.state),
            "prompts": dict(now.prompts),
            "schedule": self._actor.scheduler.state_dict(),
        }
        dist_checkpointing.save({**self._sharded(), "run": kept}, str(staging))
        dist.barrier()  # every rank's files are whole
        if dist.get_rank() == 0:
            shutil.rmtree(final, ignore_errors=True)
            staging.rename(final)
            _point(self._folder / "latest", final.name)
            for step in sorted(_steps(self._folder), reverse=True)[self._keep :]:
                shutil.rmtree(self._folder / f"step_{step}", ignore_errors=True)
        dist.barrier()
        self._saved = now.step
        return final

    def restore(self, resume: str) -> tuple[int, ObjectiveState]:
        """Go on from `resume`: "auto" (the newest, if there is one), "never", or a checkpoint's folder.

        (steps done, objective's state). Raises FileNotFoundError when a folder that is named is no checkpoint.
        """
        source = self._find(resume)
        if source is None:
            return 0, self._now.state
        loaded: Any = dist_checkpointing.load(self._sharded(loading=True), str(source))
        self._actor.model[0].module.load_state_dict(loaded["model"])
        _load_optimizer(self._actor.optimizer, loaded["optimizer"])
        kept = loaded["run"]
        self._actor.scheduler.load_state_dict(kept["schedule"])
        self._prompts.restore(kept["prompts"])
        state = ObjectiveState(**{**kept["state"], "reward_stats": tuple(kept["state"]["reward_stats"])})
        self._now = _Boundary(int(kept["step"]), state, kept["prompts"])
        self._saved = self._now.step
        return self._now.step, state

    def _find(self, resume: str) -> Path | None:
        if resume == "never":
            return None
        if resume != "auto":
            if not (Path(resume) / "metadata.json").is_file():
                raise FileNotFoundError(f"checkpoint.resume={resume} is no checkpoint; name a folder as step_100")
            return Path(resume)
        found: list[str | None] = [None]
        if dist.get_rank() == 0:
            steps = _steps(self._folder)
            found = [f"step_{max(steps)}" if steps else None]
        dist.broadcast_object_list(found, src=0)  # one rank looks, so that all go on from the same one
        return None if found[0] is None else self._folder / found[0]

    def _sharded(self, *, loading: bool = False) -> dict[str, Any]:
        """This rank's weights and optimizer state, each tensor with its place in the whole one."""
        if loading:
            _allocate(self._actor.optimizer)
        model = self._actor.model[0].module.sharded_state_dict()
        optimizer = self._actor.optimizer.sharded_state_dict(model, is_loading=loading, metadata=SHARDING)
        return {"model": model, "optimizer": optimizer}


def _load_optimizer(optimizer: MegatronOptimizer, loaded: dict[str, Any]) -> None:
    """With torch's Adam (no Transformer Engine, no Apex) Megatron-Core 0.16 asks the checkpoint for a step count per
    parameter, where it keeps one per group, and then makes all parameters share one tensor, which each counts up.
    """
    parts = [part for part in _parts(optimizer) if isinstance(part.optimizer, torch.optim.Adam)]
    for part in parts:
        part._set_main_param_and_optimizer_states = partial(_place, part)
    optimizer.load_state_dict(loaded)
    for part in parts:
        for state in part.optimizer.state.values():
            state["step"] = state["step"].clone()


def _allocate(optimizer: MegatronOptimizer) -> None:
    """Moments and step counts exist only after a first step; a load writes into them."""
    for part in _parts(optimizer):
        part.init_state_fn(part.optimizer, part.config)
        if isinstance(part.optimizer, torch.optim.Adam):
            for state in part.optimizer.state.values():
                state.setdefault("step", torch.zeros((), dtype=torch.float32, device="cpu"))


def _parts(optimizer: MegatronOptimizer) -> list[Any]:
    """Dense and expert parameters have an optimizer each."""
    return getattr(optimizer, "chained_optimizers", [optimizer])


def _place(part: Any, model_param: Tensor, tensors: Mapping[str, Tensor]) -> None:
    group, order = part.model_param_group_index_map[model_param]
    main_param = part.optimizer.param_groups[group]["params"][order]
    state = {"param": main_param, **part.optimizer.state[main_param]}
    for name, value in tensors.items():
        state[name].data.copy_(value)


def _steps(folder: Path) -> list[int]:
    """Steps of the complete checkpoints: an incomplete one has another name."""
    names = [path.name.removeprefix("step_") for path in folder.glob("step_*") if (path / "metadata.json").is_file()]
    return [int(name) for name in names if name.isdecimal()]


def _point(file: Path, name: str) -> None:
    staging = file.with_name(f".{file.name}")
    staging.write_text(json.dumps(name) + "\n")
    os.replace(staging, file)
