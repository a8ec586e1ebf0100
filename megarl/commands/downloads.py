"""Downloads a config's models and datasets from the Hugging Face hub, and pins their revisions.

    hub_models: model   --pin_revisions----> revision=commit  (small files)
                others  --pin_revisions----> id@commit        (small files)
    hub_datasets        --pin_revisions----> revision=commit  (all files)
                        --preflight--------> checked
    all models          --download_weights-> the ranks read the files from the cache

The run's config.yaml records the commits. A resumed run uses its original commits, because `main`
may have moved. Under torchrun, every rank calls this module: one rank per node downloads while the
others wait.
"""

import fcntl
import hashlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import yaml

from megarl.config.run_dir import resumed_run
from megarl.config.schema import Config
from megarl.config.section import Options, validate_options
from megarl.data.hf_dataset import hub_id, resolve
from megarl.data.rows import DatasetOptions
from megarl.models.hub import CODE, SMALL, WEIGHTS, download, is_hub_id, split_revision
from megarl.platform.env import Env
from megarl.processes.exit_codes import say
from megarl.processes.shared_memory import SHM, shm_prefix

POLICY = "model.path="
COMMIT = "{commit}"


@dataclass(frozen=True)
class HubEntry:
    """A hub model or dataset that a config refers to."""

    name: str  # identifies the entry across configs, and in messages
    revision: str | None
    fetch: Callable[[str | None], Path]  # revision -> downloaded folder, whose name is the commit
    section: Options  # the section of the config that refers to it
    pinned: Mapping[str, str]  # new values of the section; COMMIT is replaced by the commit


def download_weights(config: Config, env: Env, command: str) -> None:
    """Downloads the *.safetensors of all hub models, whose revisions must be pinned.

    Raises ValueError if a download fails.
    """
    for entry in hub_models(config.model_dump(), WEIGHTS):
        # only `train` needs critic, teacher and reference
        if command == "train" or "path" in entry.pinned:
            _in_turn(env, entry, entry.revision)


def pin_revisions(
    config: Config, env: Env, find: Callable[[Options], Iterator[HubEntry]]
) -> Config:
    """Downloads the entries that `find` yields (models without weights) and pins their revisions.

    An entry without a revision gets the commit recorded by the run to resume, or else `main`.
    Returns the config with commits. Raises ValueError if a download fails.
    """
    values = config.model_dump()
    run = resumed_run(config)
    commits = {}
    if run and (run / "config.yaml").is_file():
        begun = find(yaml.safe_load((run / "config.yaml").read_text()))
        commits = {entry.name: entry.revision for entry in begun}
    for entry in find(values):
        before = commits.get(entry.name)
        commit = _in_turn(env, entry, entry.revision or before).name
        if env.is_main and commit != entry.revision:
            default = "main"
            if before:
                default = "main, when the run began"
            say(f"{entry.name} ({entry.revision or default}) is commit {commit}")
        for key, value in entry.pinned.items():
            entry.section[key] = value.replace(COMMIT, commit)
    return Config.model_validate(values)


def hub_models(values: Options, patterns: Sequence[str] = SMALL) -> Iterator[HubEntry]:
    models = []
    policy = values.get("model") or {}
    if not policy.get("create"):
        models.append((POLICY, policy, "path"))
    for name in ("critic", "teacher", "reference"):
        models.append((f"{name}.model=", values.get(name) or {}, "model"))
    for reward in values.get("rewards") or ():
        if reward["name"] == "model":
            models.append(("rewards: name=model: path=", reward.get("options") or {}, "path"))
    for setting, section, key in models:
        name, revision = split_revision(section.get(key) or "")
        if not is_hub_id(name):
            continue
        pinned = {key: f"{name}@{COMMIT}"}
        files = patterns
        if section is policy:
            pinned = {key: name, "revision": COMMIT}
            revision = revision or policy.get("revision")
        if section.get("trust_remote_code") and patterns == SMALL:
            files = (*SMALL, *CODE)
        setting += name
        fetch = partial(download, name, patterns=files, where=setting)
        yield HubEntry(setting.removeprefix(POLICY), revision, fetch, section, pinned)


def hub_datasets(values: Options) -> Iterator[HubEntry]:
    task = values.get("task") or {}
    evaluated = values.get("eval") or {}
    for part in (task, *(task.get("mixture") or ()), *(evaluated.get("sets") or ())):
        name = part.get("task") or part.get("name") or ""
        if hub_id(name):
            options = part.setdefault("options", {})
            fetch = partial(_fetch_dataset, name, options)
            yield HubEntry(name, options.get("revision"), fetch, options, {"revision": COMMIT})


def _fetch_dataset(name: str, options: Options, revision: str | None) -> Path:
    values = {**options, "revision": revision}
    return resolve(
        hub_id(name) or "", validate_options(DatasetOptions, values, f"task.name={name}")
    )


def _in_turn(env: Env, entry: HubEntry, revision: str | None) -> Path:
    """Downloads an entry in one process of this node at a time.

    The first process records the commit in a file, which is removed with the job's shared memory;
    the others use this commit and find the files in the cache.
    """
    if env.local_world_size == 1:
        return entry.fetch(revision)
    digest = hashlib.sha256(f"{entry.name}@{revision}".encode()).hexdigest()[:8]
    folder = SHM
    if not SHM.is_dir():
        folder = Path(tempfile.gettempdir())
    with (folder / f"{shm_prefix(env.job_id, env.launcher_pid)}{digest}").open("a+") as commit:
        fcntl.flock(commit, fcntl.LOCK_EX)
        commit.seek(0)
        snapshot = entry.fetch(commit.read() or revision)
        commit.truncate(0)
        commit.write(snapshot.name)
    return snapshot
