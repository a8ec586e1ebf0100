"""Saves the state of a run as a Megatron distributed checkpoint, from which any layout can resume.

    state --host copy--> [thread] .step_<n>.part
      --all ranks wrote--> step_<n>, then `latest`; older checkpoints are removed

A checkpoint is the state between two steps: weights and optimizer, learning-rate schedule, the
prompts' cursor, the objective's state, each rank's RNG states. The files are written during the
next rollout, and their folder is renamed at a later boundary. If a check stops a run in the middle
of a step, the boundary before that step can still be saved.
"""

import math
import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, InitVar, asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from megarl.checkpoint import files, rank_state
from megarl.checkpoint.pickles import check_pickles
from megarl.checkpoint.torch_dist import REFERENCE, stored_objects
from megarl.checkpoint.writer import Writing
from megarl.processes.files import write_atomic
from megarl.roles import Stateful, Values
from megarl.types import ObjectiveState
from megarl.weights.sync.transports.values import gather_values


class Trained(Protocol):
    """The parts of a trainer that a checkpoint saves."""

    model: list[Any]  # Megatron's DistributedDataParallel of each chunk of this stage
    optimizer: MegatronOptimizer
    scheduler: Any  # only its `step` is saved

    # name -> (elements, checksum) of the frozen weights, which are not saved
    @property
    def base_checksums(self) -> Any: ...


@dataclass(frozen=True)
class Further:
    """What a stage saves in addition to the policy."""

    # prefix of the model's tensor names -> model
    models: Mapping[str, Trained] = field(default_factory=dict)
    states: Mapping[str, Stateful] = field(default_factory=dict)
    # context in which `models` are on the device
    onloaded: Callable[[], AbstractContextManager[None]] = nullcontext
    # context in which the policy's model has the reference's weights; None: these are not saved
    reference: Callable[[], AbstractContextManager[None]] | None = None


@dataclass(frozen=True)
class _Boundary:
    """The state after `step` steps, without the trainer's state."""

    step: int
    state: ObjectiveState
    prompts: Values


@dataclass
class Checkpoints:
    """Implements roles.Checkpoint. Every rank calls every method."""

    folder: Path
    trained: Trained
    prompts: Stateful
    state: InitVar[ObjectiveState]  # before the first step
    _: KW_ONLY
    every: int  # steps between checkpoints; the last step is always saved. 0: never save
    keep: int
    last_step: int
    asynchronous: bool = True
    export: Callable[[int], None] = lambda step: None  # called after every step, with its number
    say: Callable[[str], None] = print  # on rank 0
    further: Further = Further()

    def __post_init__(self, state: ObjectiveState) -> None:
        self._models = {"": self.trained, **self.further.models}  # prefix -> model
        self._now = _Boundary(0, state, self.prompts.state())
        self._saved = 0  # step of the newest checkpoint; step 0 is the model itself
        self._writing = None  # (step, Writing) while a checkpoint is written

    def maybe_save(self, step: int, state: ObjectiveState, *, last: bool = False) -> None:
        """Saves a checkpoint if one is due. Call it once per step, between update and publish.

        Raises CheckFailed if an earlier checkpoint could not be written.
        """
        self._now = _Boundary(step, state, self.prompts.state())
        if self._writing and not any(gather_values(self._writing[1].thread.is_alive())):
            self.finish()
        if self.every and (last or step == self.last_step or step % self.every == 0):
            self.save()
        self.export(step)

    def save(self) -> None:
        """Starts saving the newest boundary, unless it is already saved or is step 0.

        `finish` waits for the files.
        """
        self.finish()
        now = self._now
        if now.step == self._saved:
            return
        staging = self.folder / f".step_{now.step}.part"
        if dist.get_rank() == 0:
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir(parents=True)
        dist.barrier()
        common = {
            **asdict(now),
            "world": dist.get_world_size(),
            "states": {name: part.state() for name, part in self.further.states.items()},
        }
        scalars = {"run": common}
        tensors = []
        with self.further.onloaded():
            for prefix, trained in self._models.items():
                optimizer = trained.optimizer
                rank_state.allocate_unused(optimizer)
                common[f"{prefix}schedule"] = {"step": trained.scheduler.step}
                common[f"{prefix}base"] = dict(trained.base_checksums)
                scalars[f"{prefix}optimizer"] = rank_state.parts_of(optimizer)[0].state_dict()
                tensors += rank_state.host_copies(_chunks(trained), optimizer, prefix=prefix)
        if self.further.reference is not None:
            with self.further.reference():
                tensors += rank_state.host_copies(_chunks(self.trained), None, prefix=REFERENCE)
        sharded = {**self._objects(), **_sharded_random(), "t": tensors}
        self._writing = now.step, Writing(scalars, sharded, staging)
        if not self.asynchronous:
            self.finish()

    def hold(self) -> None:
        """Saves the newest boundary, before a stage changes more than a step does.

        Nothing is saved until the next boundary.
        """
        if self.every:
            self.save()
        self._saved = self._now.step

    def finish(self) -> None:
        """Waits for the files of the checkpoint being written, and renames their folder.

        Call it at the end of a run. Raises CheckFailed if a rank could not write.
        """
        if self._writing is None:
            return
        step, writing = self._writing
        self._writing = None
        writing.finish()
        if dist.get_rank() == 0:
            final = self.folder / f"step_{step}"
            shutil.rmtree(final, ignore_errors=True)
            writing.folder.rename(final)
            write_atomic(self.folder / "latest", f'"{final.name}"\n')
            for old in files.steps(self.folder)[: -self.keep]:
                shutil.rmtree(self.folder / f"step_{old}", ignore_errors=True)
        dist.barrier()
        self._saved = step

    def restore(self, resume: str) -> tuple[int, ObjectiveState]:
        """Resumes from "auto" (the newest complete checkpoint, if any), "never", or a folder.

        Returns (steps done, objective's state). Raises ValueError if the given folder is
        incomplete, or, with "auto", if there are checkpoints but all are incomplete.
        """
        if dist.get_rank() == 0:
            for unfinished in self.folder.glob(".step_*.part"):  # left by runs that were killed
                shutil.rmtree(unfinished, ignore_errors=True)
        source = self._find(resume)
        if source is None:
            return 0, self._now.state
        saved: Any = dist_checkpointing.load_common_state_dict(str(source))
        self._load_tensors(source, saved)
        common = saved["run"]
        random_states = self._load_objects(source, common)
        self.prompts.restore(common["prompts"])
        for name, part in self.further.states.items():
            part.restore(common["states"][name])
        for name, (_, restore) in _generators().items():
            if name in random_states:
                restore(random_states[name])
        state = ObjectiveState(**common["state"])
        self._now = _Boundary(common["step"], state, common["prompts"])
        self._saved = self._now.step
        return self._now.step, state

    def _load_tensors(self, source: Path, saved: Values) -> None:
        """Loads weights and optimizers.

        Raises ValueError, on every rank, naming the first difference from this run's models.
        """
        error = ""
        try:
            with self.further.onloaded():
                for prefix, trained in self._models.items():
                    _load(trained, source, saved, prefix)
            if self.further.reference is not None:
                with self.further.reference():
                    rank_state.load(_chunks(self.trained), source, prefix=REFERENCE)
        except ValueError as difference:
            error = str(difference)
        error = next(filter(None, gather_values(error)), None)
        if error:
            raise ValueError(
                f"{source} is not a checkpoint of this model: {error}; resume with the model "
                "it was saved from, or start over with checkpoint.resume=never"
            )

    def _load_objects(self, source: Path, common: Values) -> Values:
        """Loads FP8 and schedule states. Returns the RNG states, or {} for another world size."""
        objects = self._objects()
        if common["world"] == dist.get_world_size():
            objects |= _sharded_random()
        loaded: Any = dist_checkpointing.load(objects, str(source))
        for name, _, chunk in self._numbered():
            chunk.load_state_dict(loaded.get(name, {}), strict=False)
        for prefix, trained in self._models.items():
            trained.scheduler.step = common[f"{prefix}schedule"]["step"]
        return loaded.get("random", {})

    def _find(self, resume: str) -> Path | None:
        """Returns the folder to resume from, the same on every rank; None: start over.

        Rank 0 lists the folders, all ranks verify them. Raises ValueError as `restore` does.
        """
        if resume == "never":
            return None
        if resume != "auto":
            wrong = _wrong(Path(resume))
            if wrong:
                raise ValueError(
                    f"checkpoint.resume={resume} is incomplete: {wrong}; use another one, or auto"
                )
            return Path(resume)
        skipped = []
        for step in reversed(gather_values(files.steps(self.folder))[0]):
            folder = self.folder / f"step_{step}"
            wrong = _wrong(folder)
            if not wrong:
                return folder
            skipped.append(f"{folder.name}: {wrong}")
            if dist.get_rank() == 0:
                self.say(f"megarl: skipping checkpoint {folder}: {wrong}")
        if skipped:
            raise ValueError(
                f"no checkpoint in {self.folder} is complete ({'; '.join(skipped)}); restore or "
                "remove them, or start over with checkpoint.resume=never"
            )
        return None

    def _objects(self) -> dict[str, Any]:
        return {name: stored_objects(x, prefix=prefix) for name, prefix, x in self._numbered()}

    def _numbered(self) -> Iterator[tuple[str, str, Any]]:
        """Yields (key of its objects, prefix, chunk) for every chunk of all models."""
        for prefix, trained in self._models.items():
            for number, chunk in enumerate(_chunks(trained)):
                yield f"{prefix}objects{number}", prefix, chunk


def _chunks(trained: Trained) -> list[Any]:
    return [chunk.module for chunk in trained.model]


def _load(
    trained: Trained,
    source: Path,
    saved: Values,
    prefix: str,
) -> None:
    """Loads weights and optimizer. Raises ValueError naming a difference from this model."""
    part = saved.get(f"{prefix}optimizer")
    if part is None:
        raise ValueError(f"it has no {prefix.removesuffix('.')}")
    known = saved["run"].get(f"{prefix}base") or {}
    now = trained.base_checksums
    for name in {**known, **now}:
        if _differ(known.get(name), now.get(name)):
            raise ValueError(f"its frozen weights are others: {name}")
    group = part["optimizer"]["param_groups"][0]
    rank_state.allocate(trained.optimizer, group.get("step", 0))
    rank_state.load(_chunks(trained), source, trained.optimizer, prefix=prefix)


def _differ(one: tuple[int, int] | None, other: tuple[int, int] | None) -> bool:
    """Returns True if two (elements, checksum) pairs are of different values.

    A layout may hold several copies of the values, over which elements and checksums add up.
    """
    if one is None or other is None:
        return True
    copies = math.gcd(one[0], other[0])
    difference = one[1] * (other[0] // copies) - other[1] * (one[0] // copies)
    return difference % (1 << 64) != 0


def _wrong(folder: Path) -> str:
    """Describes the damage to a checkpoint; "" if it is complete.

    A collective: each rank reads its share of the files.
    """
    expected = {}
    wrong = []
    if dist.get_rank() == 0:
        try:
            expected = files.manifest(folder)
            check_pickles(folder)
        except ValueError as error:
            wrong = [str(error)]
    expected = gather_values(expected)[0]
    names = sorted(expected)[dist.get_rank() :: dist.get_world_size()]
    wrong += files.differences(folder, {name: expected[name] for name in names})
    return ", ".join(chain.from_iterable(gather_values(wrong)))


def _generators() -> dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]]:
    """Returns the functions that get and set the state of each random generator, by name."""
    megatron: Any = get_cuda_rng_tracker()
    generators = {
        "torch": (torch.get_rng_state, torch.set_rng_state),
        "numpy": (np.random.get_state, np.random.set_state),
        "python": (random.getstate, random.setstate),
        "megatron": (megatron.get_states, megatron.set_states),
    }
    if torch.cuda.is_available():
        generators["cuda"] = torch.cuda.get_rng_state, torch.cuda.set_rng_state
    return generators


def _sharded_random() -> dict[str, ShardedObject]:
    """Returns this rank's RNG states, for the same rank of a world of the same size."""
    state = {name: get() for name, (get, _) in _generators().items()}
    return {"random": ShardedObject("random", state, (dist.get_world_size(),), (dist.get_rank(),))}
