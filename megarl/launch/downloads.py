"""Downloads what a config names on the Hugging Face hub, before ranks start, and sets each `revision` to its commit.

    model path=id    --resolve_model----> revision=commit (small files) --preflight--> download_weights --> ranks
    task  name=hf:id --resolve_datasets-> revision=commit (all files)

The run's config.yaml records the commits, and its ranks read the files from the cache. A resumed run keeps the commits
it began with, as `main` may have moved. Under torchrun every rank comes here: one of a node downloads, the others wait.
"""

from __future__ import annotations

import fcntl
import hashlib
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from megarl.config.schema import Config
from megarl.data.hf_dataset import hub_id, parse_options, resolve
from megarl.launch.run_config import resumed_run
from megarl.models.hub import CODE, SMALL, WEIGHTS, download, is_hub_id
from megarl.platform.env import Env
from megarl.platform.shm import SHM, shm_prefix


def resolve_model(config: Config, env: Env) -> Config:
    """Downloads all but the weights of a hub id, and sets `model.revision` to its commit. Raises ValueError."""
    model = config.model
    if model.path is None or model.create is not None or not is_hub_id(model.path):
        return config
    path, patterns = model.path, (*SMALL, *CODE) if model.trust_remote_code else SMALL
    commit = _commit(env, path, model.revision, _commits_to_resume(config), lambda r: download(path, r, patterns))
    return config.model_copy(update={"model": model.model_copy(update={"revision": commit})})


def download_weights(config: Config, env: Env) -> None:
    """Downloads the *.safetensors of a resolved hub id. Raises ValueError."""
    model = config.model
    if model.path is not None and model.create is None and is_hub_id(model.path):
        path = model.path
        _in_turn(env, path, model.revision, lambda revision: download(path, revision, WEIGHTS))


def resolve_datasets(config: Config, env: Env) -> Config:
    """Downloads the datasets of the task and of the evaluation sets, and sets their `revision`. Raises ValueError."""
    task, evaluated, commits = config.task, config.eval, _commits_to_resume(config)

    def pinned(name: str | None, options: Mapping[str, Any]) -> dict[str, Any]:
        if name is None or (dataset := hub_id(name)) is None:
            return dict(options)

        def fetch(revision: str | None) -> Path:
            return resolve(dataset, parse_options(dataset, {**options, "revision": revision}))

        return {**options, "revision": _commit(env, name, options.get("revision"), commits, fetch)}

    parts = [part.model_copy(update={"options": pinned(part.name, part.options)}) for part in task.mixture]
    sets = [part.model_copy(update={"options": pinned(part.task, part.options)}) for part in evaluated.sets]
    task = task.model_copy(update={"options": pinned(task.name, task.options), "mixture": tuple(parts)})
    return config.model_copy(update={"task": task, "eval": evaluated.model_copy(update={"sets": tuple(sets)})})


def _commit(
    env: Env, name: str, revision: str | None, commits: Mapping[str, str], fetch: Callable[[str | None], Path]
) -> str:
    """Downloads `revision`, else what the run to be resumed began with, else main; returns and prints the commit."""
    commit = _in_turn(env, name, revision or commits.get(name), fetch).name
    if env.is_main and commit != revision:
        asked = revision or ("main, when the run began" if name in commits else "main")
        print(f"megarl: {name} ({asked}) is commit {commit}", file=sys.stderr)
    return commit


def _commits_to_resume(config: Config) -> dict[str, str]:
    """Returns name -> commit of the models and datasets that the run to be resumed began with."""
    if (run := resumed_run(config)) is None or not (file := run / "config.yaml").is_file():
        return {}
    return dict(_recorded(yaml.safe_load(file.read_text())))


def _recorded(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    model, task = values.get("model") or {}, values.get("task") or {}
    sets: Sequence[Mapping[str, Any]] = (values.get("eval") or {}).get("sets") or ()
    if model.get("path") and model.get("revision"):
        yield model["path"], model["revision"]
    for part in (task, *(task.get("mixture") or ()), *sets):
        name, revision = part.get("task") or part.get("name"), (part.get("options") or {}).get("revision")
        if name and revision:
            yield name, revision


def _in_turn(env: Env, name: str, revision: str | None, fetch: Callable[[str | None], Path]) -> Path:
    """Calls `fetch` in one process of this node at a time: the first records the commit, the others find its files.

    The record is removed with the job's shared memory.
    """
    if env.local_world_size == 1:
        return fetch(revision)
    digest = hashlib.sha256(f"{name}@{revision}".encode()).hexdigest()[:8]
    folder = SHM if SHM.is_dir() else Path(tempfile.gettempdir())
    with (folder / f"{shm_prefix(env.job_id, env.launcher_pid)}{digest}").open("a+") as commit:
        fcntl.flock(commit, fcntl.LOCK_EX)
        commit.seek(0)
        snapshot = fetch(commit.read() or revision)
        commit.truncate(0)
        commit.write(snapshot.name)
    return snapshot
