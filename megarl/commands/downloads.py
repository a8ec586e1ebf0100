"""Downloads what a config names on the Hugging Face hub, and sets each `revision` to its commit.

    model        --resolve_model----> revision=commit  (small files)
    other models --resolve_model----> id@commit        (small files)
    datasets     --resolve_datasets-> revision=commit  (all files)
                 --preflight--------> checked
    all models   --download_weights-> the ranks read the files from the cache

The run's config.yaml records the commits. A resumed run keeps those it began with, as `main` may
have moved. Under torchrun every rank comes here: one rank per node downloads, the others wait.
"""

import fcntl
import hashlib
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from megarl.config.run_dir import resumed_run
from megarl.config.schema import Config
from megarl.data.hf_dataset import hub_id, resolve
from megarl.data.rows import parse_options
from megarl.models.hub import CODE, SMALL, WEIGHTS, download, is_hub_id, split_revision
from megarl.platform.env import Env
from megarl.processes.exit_codes import say
from megarl.processes.shared_memory import SHM, shm_prefix

POLICY = "model.path="
Fetch = Callable[[str | None], Path]  # revision -> the folder of its files, named by the commit


@dataclass(frozen=True)
class HubModel:
    """A model of a config that is a hub id; `key` of `section` has the id."""

    setting: str  # with its value, for errors
    name: str
    revision: str | None
    section: dict[str, Any]
    key: str

    @property
    def label(self) -> str:
        """The key of its commit, and its name in messages."""
        return self.setting.removeprefix(POLICY)


def resolve_model(config: Config, env: Env) -> Config:
    """Downloads all but the weights of hub ids, and sets their revisions to commits.

    Raises ValueError.
    """
    values = config.model_dump()
    commits = _commits_to_resume(config)
    for model in _hub_models(values):
        section = model.section
        patterns = SMALL
        if section.get("trust_remote_code"):
            patterns = (*SMALL, *CODE)
        fetch = partial(download, model.name, patterns=patterns, where=model.setting)
        commit = _commit(env, model.label, model.revision, commits, fetch)
        if section is values["model"]:
            section.update(path=model.name, revision=commit)
        else:
            section[model.key] = f"{model.name}@{commit}"
    return Config.model_validate(values)


def download_weights(config: Config, env: Env, command: str) -> None:
    """Downloads the *.safetensors of resolved hub ids. Raises ValueError."""
    for model in _hub_models(config.model_dump()):
        # other commands need neither critic nor teacher
        if command == "train" or model.key == "path":
            fetch = partial(download, model.name, patterns=WEIGHTS, where=model.setting)
            _in_turn(env, model.label, model.revision, fetch)


def _hub_models(values: Mapping[str, Any]) -> Iterator[HubModel]:
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
        if is_hub_id(name):
            revision = revision or section.get("revision")
            yield HubModel(setting + name, name, revision, section, key)


def resolve_datasets(config: Config, env: Env) -> Config:
    """Downloads the datasets of the task and of the evaluation sets, and sets their `revision`.

    Raises ValueError.
    """
    values = config.model_dump()
    commits = _commits_to_resume(config)
    for name, options in _hub_datasets(values):
        fetch = partial(_fetch_dataset, name, options)
        options["revision"] = _commit(env, name, options.get("revision"), commits, fetch)
    return Config.model_validate(values)


def _fetch_dataset(name: str, options: Mapping[str, Any], revision: str | None) -> Path:
    return resolve(hub_id(name) or "", parse_options(name, {**options, "revision": revision}))


def _hub_datasets(values: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the name and the options of each task that is a dataset on the hub."""
    task = values.get("task") or {}
    evaluated = values.get("eval") or {}
    for part in (task, *(task.get("mixture") or ()), *(evaluated.get("sets") or ())):
        name = part.get("task") or part.get("name") or ""
        if hub_id(name):
            yield name, part.setdefault("options", {})


def _commit(
    env: Env, name: str, revision: str | None, commits: Mapping[str, str], fetch: Fetch
) -> str:
    """Downloads a revision; returns its commit, and prints it.

    Without `revision`, it is the commit that the run to be resumed began with, or main.
    """
    commit = _in_turn(env, name, revision or commits.get(name), fetch).name
    if env.is_main and commit != revision:
        default = "main"
        if name in commits:
            default = "main, when the run began"
        say(f"{name} ({revision or default}) is commit {commit}")
    return commit


def _commits_to_resume(config: Config) -> dict[str, str]:
    """Returns name -> commit of the models and datasets that the run to be resumed began with."""
    run = resumed_run(config)
    if not run or not (run / "config.yaml").is_file():
        return {}
    values = yaml.safe_load((run / "config.yaml").read_text())
    commits = {model.label: model.revision for model in _hub_models(values) if model.revision}
    for name, options in _hub_datasets(values):
        if options.get("revision"):
            commits[name] = options["revision"]
    return commits


def _in_turn(env: Env, name: str, revision: str | None, fetch: Fetch) -> Path:
    """Calls `fetch` in one process of this node at a time.

    The first records the commit in a file that goes with the job's shared memory; the others find
    the downloaded files.
    """
    if env.local_world_size == 1:
        return fetch(revision)
    digest = hashlib.sha256(f"{name}@{revision}".encode()).hexdigest()[:8]
    folder = SHM
    if not SHM.is_dir():
        folder = Path(tempfile.gettempdir())
    with (folder / f"{shm_prefix(env.job_id, env.launcher_pid)}{digest}").open("a+") as commit:
        fcntl.flock(commit, fcntl.LOCK_EX)
        commit.seek(0)
        snapshot = fetch(commit.read() or revision)
        commit.truncate(0)
        commit.write(snapshot.name)
    return snapshot
