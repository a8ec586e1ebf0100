"""Checkpoints of a real trainer, one rank: whole or skipped, taken while the state moves on, everything restored."""

from __future__ import annotations

import io
import os
import pickle
import random
import re
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2] / "dist"))
from trainer_cases import random_batch

from benchmarks.checkpoint_memory import Live
from megarl.checkpoint import files, state
from megarl.checkpoint.rank_state import allocate
from megarl.checkpoint.state import Checkpoints, Further
from megarl.commands.random_model import create_model
from megarl.config.schema import Create, Train
from megarl.layout import Layout, Parallel
from megarl.models.registry import read_model
from megarl.run.models import check_weights
from megarl.stages.sft import train_supervised
from megarl.trainer.reference import Reference
from megarl.trainer.trainer import Trainer
from megarl.types import CheckFailed, ObjectiveState
from megarl.weights.sync.transports import Transport

SMALL = Create(layers=1, hidden=32, heads=2, kv_heads=2, head_dim=16, vocab=67, tokenizer="none")
TRAIN = {"dtype": "bf16", "lr": 1e-2, "prompts_per_step": 4, "steps": 8, "schedule": "linear"}


class Cursor:
    def __init__(self) -> None:
        self.position = 0

    def state(self) -> dict[str, int]:
        return {"position": self.position}

    def restore(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Job:
    """A trainer that learns a step at a time, its cursor and its checkpoints, as a new process has them."""

    def __init__(
        self,
        root: Path,
        folder: Path | None = None,
        model: Create = SMALL,
        share_groups_with: Trainer | None = None,
        **options,
    ) -> None:
        path, layout = create_model(model, root / "models"), Layout.of(Parallel(), 1, 0)
        train, device = Train.model_validate(TRAIN), torch.device("cpu")
        self.trainer = Trainer.build(
            read_model(path),
            layout,
            train=train,
            folder=path,
            device=device,
            share_groups_with=share_groups_with,
        )
        self.cursor, self.said = Cursor(), []
        self.state, self.folder = ObjectiveState(0.0), folder or root / "checkpoints"
        given = {"every": 1, "keep": 3, "last_step": 100, "say": self.said.append, **options}
        self.checkpoints = Checkpoints(self.folder, self.trainer, self.cursor, self.state, **given)

    def step(self, number: int) -> None:
        train_supervised(self.trainer, random_batch(num_rows=4, seed=number))
        self.cursor.position += 4
        self.state = ObjectiveState(kl_coef=number + 0.5, reward_stats=(number, 0.25, 3.0))

    def weights(self) -> dict[str, torch.Tensor]:
        """Parameters, main weights, moments and step counts."""
        found = {name: p.detach().clone() for name, p in self.trainer.parameters_by_name().items()}
        for part in getattr(self.trainer.optimizer, "chained_optimizers", [self.trainer.optimizer]):
            for number, group in enumerate(part.optimizer.param_groups):
                for order, main in enumerate(group["params"]):
                    found |= {f"main {number} {order}": main.detach().clone()}
                    state = part.optimizer.state[main]
                    found |= {
                        f"{key} {number} {order}": torch.as_tensor(v).clone()
                        for key, v in state.items()
                    }
        return found


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, world: None) -> Job:
    """Two whole checkpoints, and the job that made them."""
    job = Job(tmp_path_factory.mktemp("saved"))
    for step in (1, 2):
        job.step(step)
        job.checkpoints.maybe_save(step, job.state)
    job.checkpoints.finish()
    return job


@contextmanager
def damaged(job: Job, *steps: int) -> Iterator[list[Path]]:
    """Its folders of these steps; afterwards as they were."""
    folders = [job.folder / f"step_{step}" for step in steps]
    for folder in folders:
        shutil.copytree(folder, folder.with_name(f"kept_{folder.name}"))
    job.said.clear()
    try:
        yield folders
    finally:
        for folder in folders:
            shutil.rmtree(folder)
            folder.with_name(f"kept_{folder.name}").rename(folder)


def draws() -> list[float]:
    return [random.random(), np.random.rand(), float(torch.rand(()))]


class Iterative(Job):
    """Beside the policy a second model, a reference and a cursor, which do not change in a step."""

    def __init__(self, root: Path) -> None:
        self.model, self.history, self.is_onloaded = Job(root, root / "unused"), Cursor(), False
        further = Further(
            {"reward_model.": self.model.trainer},
            {"history": self.history},
            self.onloaded,
            self.lent,
        )
        super().__init__(root, further=further, share_groups_with=self.model.trainer)
        self.reference = Reference(self.trainer.parameters_by_name)

    @contextmanager
    def onloaded(self) -> Iterator[None]:
        self.is_onloaded = True
        yield
        self.is_onloaded = False

    @contextmanager
    def lent(self) -> Iterator[None]:
        with self.reference.in_use():
            yield

    def begin(self, number: int) -> None:
        """What happens at the start of an iteration."""
        self.reference.reset()
        self.model.step(number)
        self.history.position += 1

    def everything(self) -> dict[str, torch.Tensor]:
        with self.lent():
            reference = {
                name: p.detach().clone() for name, p in self.trainer.parameters_by_name().items()
            }
        parts = {"policy": self.weights(), "model": self.model.weights(), "reference": reference}
        found = {
            f"{part} {name}": value
            for part, values in parts.items()
            for name, value in values.items()
        }
        schedules = [self.trainer.scheduler.step, self.model.trainer.scheduler.step]
        return found | {
            "numbers": torch.tensor([self.history.position, self.cursor.position, *schedules])
        }


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(value, other[name]) for name, value in one.items()
    )


def test_what_a_stage_has_beside_the_policy_comes_back(tmp_path: Path) -> None:
    job = Iterative(tmp_path)
    job.step(0)  # so that the reference is not the model of the start
    job.begin(10)
    job.step(1)
    job.checkpoints.maybe_save(1, job.state)
    kept = job.everything()
    assert not job.is_onloaded and not torch.equal(kept["policy main 0 0"], kept["model main 0 0"])
    job.begin(11)  # while it is being written
    job.checkpoints.finish()
    again = Iterative(tmp_path)
    assert again.checkpoints.restore("auto")[0] == 1
    assert equal(again.everything(), kept) and not equal(job.everything(), kept)


def test_an_iteration_that_is_refused_leaves_the_boundary_before_it(tmp_path: Path) -> None:
    """Saved even where no save was due; after it, nothing that the iteration has changed can be saved."""
    job = Iterative(tmp_path)
    job.checkpoints.every = 100
    job.checkpoints.hold()
    assert files.steps(job.folder) == [], "the start is the models themselves"
    job.begin(10)
    job.step(1)
    job.checkpoints.maybe_save(1, job.state)
    kept = job.everything()
    job.checkpoints.hold()
    job.begin(11)
    job.checkpoints.save()  # as when a check refuses
    job.checkpoints.finish()
    again = Iterative(tmp_path)
    assert again.checkpoints.restore("auto")[0] == 1 and equal(again.everything(), kept)
    again.checkpoints.every = 0
    again.step(2)
    again.checkpoints.maybe_save(2, again.state)
    again.checkpoints.hold()
    again.begin(11)
    again.checkpoints.save()
    again.checkpoints.finish()
    assert files.steps(job.folder) == [1]


def test_everything_comes_back_as_it_was_when_it_was_saved(tmp_path: Path) -> None:
    """The second step runs while the first is being written; what is saved is the first."""
    job = Job(tmp_path)
    job.step(1)
    kept = job.weights()
    job.checkpoints.maybe_save(1, job.state)
    expected = draws()
    job.step(2)
    job.checkpoints.finish()
    assert any(not torch.equal(kept[name], value) for name, value in job.weights().items())

    again = Job(tmp_path)
    assert again.checkpoints.restore("auto") == (1, ObjectiveState(1.5, (1, 0.25, 3.0)))
    found = again.weights()
    assert found.keys() == kept.keys() and all(
        torch.equal(found[name], kept[name]) for name in kept
    )
    assert again.cursor.position == 4 and again.trainer.scheduler.step == 1
    assert draws() == expected
    again.step(2)
    assert all(torch.equal(again.weights()[name], value) for name, value in job.weights().items())


def test_a_run_that_has_taken_no_step_is_saved(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.checkpoints.maybe_save(1, job.state)
    job.checkpoints.finish()
    job.step(2)
    resumed = Job(tmp_path)
    assert resumed.checkpoints.restore("auto")[0] == 1
    resumed.step(2)
    assert equal(resumed.weights(), job.weights())


def test_saving_and_loading_need_room_for_one_copy(tmp_path: Path) -> None:
    """On one rank; tests/dist has more. In bf16: weights 2 bytes, fp32 weights and moments 12."""
    wide = SMALL.model_copy(update={"hidden": 128})
    job = Job(tmp_path, model=wide)
    sizes = [parameter.numel() for parameter in job.trainer.parameters_by_name().values()]
    job.step(1)
    with Live() as saving:
        job.checkpoints.maybe_save(1, job.state)
        job.checkpoints.finish()
    again = Job(tmp_path, model=wide)
    with Live() as loading:
        assert again.checkpoints.restore("auto")[0] == 1
    assert 10 * sum(sizes) < saving.peak < 14.5 * sum(sizes)
    assert 7 * sum(sizes) < loading.peak < 10 * sum(sizes)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_names_come_last_and_only_the_newest_stay(tmp_path: Path, asynchronous: bool) -> None:
    job = Job(tmp_path, keep=2, asynchronous=asynchronous)
    folder = tmp_path / "checkpoints"
    (folder / ".step_9.part").mkdir(parents=True)  # left by a run that was killed
    job.checkpoints.restore("auto")
    assert not (folder / ".step_9.part").exists()
    for step in (1, 2, 3):
        job.step(step)
        job.checkpoints.maybe_save(step, job.state)
        newest = {1: [1], 2: [1, 2], 3: [2, 3]}[step]
        assert files.steps(folder) == (
            newest if not asynchronous else {1: [], 2: [1], 3: [1, 2]}[step]
        )
    job.checkpoints.finish()
    assert files.steps(folder) == [2, 3] and (folder / "latest").read_text() == '"step_3"\n'


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize(
    "name", ["__0_0.distcp", ".metadata", "common.pt", "metadata.json", "manifest.json"]
)
def test_a_damaged_checkpoint_is_skipped_by_name(saved: Job, name: str) -> None:
    for damage in (cut, flip, Path.unlink):
        with damaged(saved, 2) as (newest,):
            damage(newest / name)
            assert saved.checkpoints.restore("auto")[0] == 1
            assert len(saved.said) == 1 and saved.said[0].startswith(
                f"megarl: skipping checkpoint {newest}: "
            )
            # a manifest with one bit flipped is still one, and blames the file that this bit was about
            assert name in saved.said[0] or (name, damage) == ("manifest.json", flip)
            with pytest.raises(ValueError, match=r"step_2 is incomplete: .*; use another one"):
                saved.checkpoints.restore(str(newest))
    assert saved.checkpoints.restore("auto")[0] == 2


class Runs:
    """Pickled, it is a call of os.system."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple:
        return os.system, (self.command,)


def code_in_metadata(folder: Path, code: Runs) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.planner_data = code
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def code_in_an_object(folder: Path, code: Runs) -> None:
    """Appended to a file, in the place of the random state."""
    metadata, stream = pickle.loads((folder / ".metadata").read_bytes()), io.BytesIO()
    torch.save(code, stream)
    (index,) = (index for index in metadata.storage_data if index.fqn.startswith("random"))
    place = metadata.storage_data[index]
    with (folder / place.relative_path).open("ab") as file:
        place.offset, place.length = file.tell(), len(stream.getvalue())
        file.write(stream.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def code_in_common(folder: Path, code: Runs) -> None:
    torch.save({"run": code}, folder / "common.pt")


def seal(folder: Path) -> None:
    """A manifest of the files as they are."""
    names = [path.name for path in folder.iterdir() if path.name != "manifest.json"]
    files.write_manifest(folder, files.sums(folder, names))


@pytest.mark.parametrize(
    ("craft", "name"),
    [
        (code_in_metadata, r"\.metadata"),
        (code_in_an_object, r"__0_\d\.distcp"),
        (code_in_common, r"common\.pt"),
    ],
)
def test_a_crafted_checkpoint_runs_nothing(
    saved: Job,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    craft: Callable[[Path, Runs], None],
    name: str,
) -> None:
    with damaged(saved, 2) as (newest,):
        craft(newest, Runs(f"touch {tmp_path}/ran"))
        seal(newest)
        refused = rf"{name} refers to posix\.system, which could run code"
        assert saved.checkpoints.restore("auto")[0] == 1
        assert re.search(refused, saved.said[0])
        with pytest.raises(ValueError, match=refused):
            saved.checkpoints.restore(str(newest))
        # the loading itself is safe, too
        monkeypatch.setattr(state, "check_pickles", lambda folder: None)
        with pytest.raises(BaseException, match=r"posix\.system"):
            saved.checkpoints.restore(str(newest))
        assert not (tmp_path / "ran").exists()


def outside(folder: Path) -> None:
    """The metadata names a file of another folder."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    next(iter(metadata.storage_data.values())).relative_path = "../step_1/__0_0.distcp"
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    seal(folder)


def lists_common_only(folder: Path) -> None:
    files.write_manifest(folder, files.sums(folder, ["common.pt"]))
    flip(folder / "__0_0.distcp")


def last_shard(folder: Path) -> Path:
    """Megatron-Core 0.16 writes two files a rank, 0.19 one."""
    return max(folder.glob("*.distcp"))


def unlisted_shard(folder: Path) -> None:
    shard = last_shard(folder)
    names = {path.name for path in folder.iterdir()} - {shard.name, "manifest.json"}
    files.write_manifest(folder, files.sums(folder, sorted(names)))
    flip(shard)


def no_shards(folder: Path) -> None:
    (folder / "manifest.json").write_text('{"files": {}}')
    for file in folder.glob("*.distcp"):
        file.unlink()


def absent_shard(folder: Path) -> None:
    last_shard(folder).unlink()
    seal(folder)


def deep(folder: Path) -> None:
    (folder / "manifest.json").write_text("[" * 100_000)


def names_a_secret(folder: Path) -> None:
    manifest = files.sums(
        folder, [path.name for path in folder.iterdir() if path.name != "manifest.json"]
    )
    files.write_manifest(folder, manifest | {"../../secret": {"bytes": 1, "sha256": ""}})


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (outside, "which is not in the checkpoint"),
        (lists_common_only, "manifest.json does not list .metadata"),
        (unlisted_shard, r"manifest.json does not list __0_\d.distcp"),
        (no_shards, "manifest.json does not list .metadata"),
        (absent_shard, r"is in __0_\d.distcp, which is not in the checkpoint"),
        (deep, "manifest.json cannot be read"),
        (names_a_secret, "../../secret is missing"),
    ],
)
def test_a_manifest_that_covers_less_is_not_whole(
    saved: Job, damage: Callable[[Path], None], reason: str
) -> None:
    with damaged(saved, 2) as (newest,):
        damage(newest)
        assert saved.checkpoints.restore("auto")[0] == 1
        assert re.search(reason, saved.said[0]), saved.said


def replaced_by_a_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


SECRET = '{"files": {"../../secret": {"bytes": 1, "sha256": ""}}}'
DAMAGES = {
    "manifest is not UTF-8": lambda folder: (folder / "manifest.json").write_bytes(
        b'{"files": {"\xff": 1}}'
    ),
    "manifest names a file outside": lambda folder: (folder / "manifest.json").write_text(SECRET),
    "a folder in a shard's place": lambda folder: replaced_by_a_folder(folder / "__0_0.distcp"),
    "empty": lambda folder: [file.unlink() for file in folder.iterdir()],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder_is_skipped(saved: Job, damage: str) -> None:
    with damaged(saved, 2) as (newest,):
        DAMAGES[damage](newest)
        assert saved.checkpoints.restore("auto")[0] == 1
        assert saved.said[0].startswith(f"megarl: skipping checkpoint {newest}: ")


def test_only_checkpoints_count(saved: Job) -> None:
    others = [saved.folder / name for name in (".step_9.part", "step_8", "step_x", "step_٩")]
    for folder in others[::2]:
        folder.mkdir()
    for file in others[1::2]:
        file.touch()
    latest = (saved.folder / "latest").read_text()
    (saved.folder / "latest").write_text("nonsense")
    try:
        assert saved.checkpoints.restore("auto")[0] == 2
        with pytest.raises(ValueError, match=r"absent is incomplete: manifest\.json is missing"):
            saved.checkpoints.restore(str(saved.folder / "absent"))
    finally:
        (saved.folder / "latest").write_text(latest)
        for path in others[1:]:
            path.rmdir() if path.is_dir() else path.unlink()


def test_nothing_whole_is_said_and_not_started_over(saved: Job) -> None:
    with damaged(saved, 1, 2) as folders:
        for folder in folders:
            flip(folder / "common.pt")
        with pytest.raises(
            ValueError,
            match=r"no checkpoint in .* is complete .*step_2: common.pt.*step_1: common.pt",
        ):
            saved.checkpoints.restore("auto")
        assert saved.checkpoints.restore("never")[0] == 0


def test_a_failed_write_stops_the_run_at_the_next_boundary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(tmp_path)

    def full(folder: Path, names: list[str]) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(files, "sums", full)
        job.step(1)
        job.checkpoints.maybe_save(1, job.state)
        with pytest.raises(
            CheckFailed, match=r"step_1.* was not written: rank 0: the disk of .* is full"
        ):
            job.checkpoints.finish()
    assert files.steps(tmp_path / "checkpoints") == []
    job.checkpoints.save()  # what a refused run does last: now there is room
    job.checkpoints.finish()
    assert files.steps(tmp_path / "checkpoints") == [1]


def test_the_state_of_a_hybrid_optimizer_is_allocated_by_its_dummy_step() -> None:
    """Megatron-Core has no `init_state_fn` for it; its own loading takes this step too."""
    steps: list[dict] = []
    hybrid = SimpleNamespace(state={}, param_groups=[], dummy_step=lambda: steps.append({}))
    allocate(SimpleNamespace(init_state_fn=None, optimizer=hybrid), 1)  # type: ignore[arg-type]
    assert len(steps) == 1
    hybrid.state = {"p": {}}
    allocate(SimpleNamespace(init_state_fn=None, optimizer=hybrid), 1)  # type: ignore[arg-type]
    assert len(steps) == 1


def test_weights_that_are_not_finite_are_named(tmp_path: Path) -> None:
    job = Job(tmp_path)
    rank: Any = SimpleNamespace(transport=Transport(), model_folder="models/x")
    check_weights(rank, job.trainer)
    for value in (float("nan"), float("-inf")):
        name, tensor = list(job.trainer.parameters_by_name().items())[-1]
        tensor.data.view(-1)[-1] = value
        with pytest.raises(
            CheckFailed, match=rf"NaN or infinity in {name}, as loaded from models/x"
        ):
            check_weights(rank, job.trainer)


@pytest.mark.parametrize("free", [0, 4_000, 40_000, 150_000])
def test_a_full_disk_is_named_and_the_older_checkpoint_stays(
    tmp_path: Path, small_disk: Path, free: int
) -> None:
    """The disk fills at the first file, at a shard, at the metadata; afterwards there is room again."""
    job = Job(tmp_path, folder=small_disk)
    job.step(1)
    job.checkpoints.maybe_save(1, job.state)
    job.checkpoints.finish()
    filler = small_disk / "filler"
    filler.write_bytes(bytes(shutil.disk_usage(small_disk).free - free))
    before = shutil.disk_usage(small_disk).free
    job.step(2)
    with pytest.raises(
        (CheckFailed, OSError),
        match=rf"the disk of {small_disk}.* is full: [\d,]+ of 1,048,576 bytes",
    ):
        job.checkpoints.maybe_save(2, job.state)
        job.checkpoints.finish()
    assert [path.name for path in small_disk.iterdir() if path.suffix == ".part"] == []
    assert shutil.disk_usage(small_disk).free == before
    filler.unlink()
    assert job.checkpoints.restore("auto")[0] == 1


def test_a_limit_on_file_sizes_is_named(tmp_path: Path) -> None:
    job, limits = Job(tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    job.step(1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(
            CheckFailed, match=r"more than the limit of 20,000 bytes; raise it \(`ulimit -f`\)"
        ):
            job.checkpoints.maybe_save(1, job.state)
            job.checkpoints.finish()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_another_models_checkpoint_is_refused_with_what_differs(saved: Job, tmp_path: Path) -> None:
    wide = Job(tmp_path, model=SMALL.model_copy(update={"hidden": 48}))
    with pytest.raises(
        ValueError, match=r"step_2 is not a checkpoint of this model: .*32.*48"
    ) as refused:
        wide.checkpoints.restore(str(saved.folder / "step_2"))
    assert "\n" not in str(refused.value)
