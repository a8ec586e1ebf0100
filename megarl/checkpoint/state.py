"""Everything a run needs to go on, as a Megatron distributed checkpoint: any layout can read it.

    state --host copy--> [thread] .step_<n>.part --all ranks wrote--> step_<n>, then `latest`, then older ones go

What is kept is the state between two steps: weights and optimizer, learning-rate schedule, the prompts' cursor, the
objective's state, each rank's random generators. The files are written while the next rollout runs, and get their
name at a later boundary, when every rank's are whole. A run that is refused in the middle of a step can still save
the boundary before it.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch import Tensor

from megarl.checkpoint import files
from megarl.checkpoint.writer import Writing
from megarl.platform.atomic import write_atomic
from megarl.roles import Prompts
from megarl.types import ObjectiveState

__all__ = ["Checkpoints", "Trained"]

SHARDING = {"distrib_optim_sharding_type": "fully_reshardable"}  # the one format that every layout can read


class Trained(Protocol):
    """What of an actor is saved (megarl.trainer.Actor has it)."""

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
        asynchronous: bool = True,
        say: Callable[[str], None] = print,  # on rank 0
    ) -> None:
        self._folder = folder
        self._actor = actor
        self._prompts = prompts
        self._every = every
        self._keep = keep
        self._last_step = last_step
        self._asynchronous = asynchronous
        self._say = say
        self._now = _Boundary(0, state, prompts.state())
        self._saved = 0  # step of the newest checkpoint; 0 needs none, it is the model itself
        self._writing: tuple[int, Writing] | None = None  # step

    def maybe_save(self, step: int, state: ObjectiveState, *, last: bool = False) -> None:
        """Called once a step, between update and publish.

        Raises CheckFailed when an earlier checkpoint could not be written.
        """
        self._now = _Boundary(step, state, self._prompts.state())
        if self._writing is not None and _all_true(self._writing[1].done):
            self.finish()
        if self._every and (last or step == self._last_step or step % self._every == 0):
            self.save()

    def save(self) -> None:
        """Save the newest boundary, unless it is saved or nothing was trained yet. `finish` waits for the files."""
        self.finish()
        now = self._now
        if now.step == self._saved:
            return
        begun = files.staging(self._folder, now.step)
        if dist.get_rank() == 0:
            shutil.rmtree(begun, ignore_errors=True)
            begun.mkdir(parents=True)
        dist.barrier()
        kept = {
            "step": now.step,
            "state": asdict(now.state),
            "prompts": dict(now.prompts),
            "schedule": self._actor.scheduler.state_dict(),
            "world": dist.get_world_size(),
        }
        self._writing = now.step, Writing({**self._sharded(), **_sharded_random(), "run": kept}, begun)
        if not self._asynchronous:
            self.finish()

    def finish(self) -> None:
        """Wait for the checkpoint that is being written, and give it its name; call at the end of a run.

        Raises CheckFailed when it could not be written.
        """
        if self._writing is None:
            return
        step, writing = self._writing
        self._writing = None
        writing.finish()
        if dist.get_rank() == 0:
            final = self._folder / f"step_{step}"
            shutil.rmtree(final, ignore_errors=True)
            files.staging(self._folder, step).rename(final)
            write_atomic(self._folder / "latest", f'"{final.name}"\n')
            files.prune(self._folder, self._keep)
        dist.barrier()
        self._saved = step

    def restore(self, resume: str) -> tuple[int, ObjectiveState]:
        """Go on from `resume`: "auto" (the newest that is whole, if there is one), "never", or a checkpoint's folder.

        (steps done, objective's state). Raises ValueError when a folder that is named is no whole checkpoint, or
        none of several is.
        """
        if dist.get_rank() == 0:
            files.sweep(self._folder)
        source = self._find(resume)
        if source is None:
            return 0, self._now.state
        common: Any = dist_checkpointing.load_common_state_dict(str(source))
        kept = common["run"]
        same_world = kept["world"] == dist.get_world_size()
        sharded = self._sharded(loading=True) | (_sharded_random() if same_world else {})
        loaded: Any = dist_checkpointing.load(sharded, str(source))
        for name, chunk in self._chunks():
            chunk.load_state_dict(loaded[name])
        _load_optimizer(self._actor.optimizer, loaded["optimizer"])
        self._actor.scheduler.load_state_dict(kept["schedule"])
        self._prompts.restore(kept["prompts"])
        if same_world:
            _set_random(loaded["random"])
        state = ObjectiveState(**{**kept["state"], "reward_stats": tuple(kept["state"]["reward_stats"])})
        self._now = _Boundary(int(kept["step"]), state, kept["prompts"])
        self._saved = self._now.step
        return self._now.step, state

    def _find(self, resume: str) -> Path | None:
        """The same on every rank: rank 0 looks, all read."""
        if resume == "never":
            return None
        if resume != "auto":
            if wrong := _wrong(Path(resume)):
                raise ValueError(f"checkpoint.resume={resume} is no whole checkpoint: {wrong}; name another, or auto")
            return Path(resume)
        steps = _of_rank_0(files.steps(self._folder))
        skipped = []
        for step in reversed(steps):
            folder = self._folder / f"step_{step}"
            wrong = _wrong(folder)
            if not wrong:
                return folder
            skipped.append(f"{folder.name}: {wrong}")
            if dist.get_rank() == 0:
                self._say(f"megarl: checkpoint {folder} is skipped: {wrong}")
        if skipped:
            raise ValueError(
                f"no checkpoint in {self._folder} is whole ({'; '.join(skipped)}); mend or remove them, or start "
                "anew with checkpoint.resume=never"
            )
        return None

    def _chunks(self) -> list[tuple[str, Any]]:
        """Virtual stages have several; their layers' keys are global, so another layout finds them."""
        return [(f"model{number}", chunk.module) for number, chunk in enumerate(self._actor.model)]

    def _sharded(self, *, loading: bool = False) -> dict[str, Any]:
        """This rank's weights and optimizer state, each tensor with its place in the whole one."""
        if loading:
            _allocate(self._actor.optimizer)
        model = {name: chunk.sharded_state_dict() for name, chunk in self._chunks()}
        optimizer = self._actor.optimizer.sharded_state_dict(model, is_loading=loading, metadata=SHARDING)
        return {**model, "optimizer": optimizer}


def _all_true(value: bool) -> bool:
    agreed = torch.tensor(int(value))
    dist.all_reduce(agreed, dist.ReduceOp.MIN)
    return bool(agreed)


def _of_rank_0(value: Any) -> Any:
    told = [value]
    dist.broadcast_object_list(told, src=0)
    return told[0]


def _wrong(folder: Path) -> str:
    """What is wrong with a checkpoint, "" if nothing; each rank reads its share of the files."""
    expected, wrong = {}, []
    if dist.get_rank() == 0:
        try:
            expected = files.manifest(folder)
        except ValueError as error:
            wrong = [str(error)]
    expected = _of_rank_0(expected)
    names = sorted(expected)[dist.get_rank() :: dist.get_world_size()]
    wrong += files.differences(folder, {name: expected[name] for name in names})
    found: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(found, wrong)
    return ", ".join(text for rank in found for text in rank)


def _sharded_random() -> dict[str, ShardedObject]:
    """This rank's random generators; of use to the same rank of a world of the same size."""
    state = {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(),
        "python": random.getstate(),
        "megatron": _megatrons().get_states(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return {"random": ShardedObject("random", state, (dist.get_world_size(),), (dist.get_rank(),))}


def _megatrons() -> Any:
    """Megatron-Core's named random states."""
    return get_cuda_rng_tracker()


def _set_random(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])
    _megatrons().set_states(state["megatron"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


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
