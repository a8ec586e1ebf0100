"""Downloads what a config names on the Hugging Face hub, before ranks start, and sets each `revision` to its commit.

    model path=id    --resolve_model----> revision=commit (small files) --preflight--> download_weights --> ranks
    other models=id  --resolve_model----> id@commit       (small files) --preflight--> download_weights --> ranks
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
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from megarl.config.schema import Config
from megarl.data.hf_dataset import hub_id, parse_options, resolve
from megarl.launch.run_config import resumed_run
from megarl.models.hub import CODE, SMALL, WEIGHTS, download, is_hub_id, split_revision
from megarl.platform.env import Env
from megarl.platform.shm import SHM, shm_prefix

POLICY = "model.path="


def resolve_model(config: Config, env: Env) -> Config:
    """Downloads all but the weights of hub ids, and sets their revisions to commits. Raises ValueError."""
    values, commits = config.model_dump(), _commits_to_resume(config)
    for where, name, revision, section, key in _hub_models(values):
        patterns = (*SMALL, *CODE) if section.get("trust_remote_code") else SMALL
        fetch = partial(download, name, patterns=patterns, where=where)
        commit = _commit(env, where.removeprefix(POLICY), revision, commits, fetch)
        section.update(
            {key: name, "revision": commit}
            if section is values["model"]
            else {key: f"{name}@{commit}"}
        )
    return Config.model_validate(values)


def download_weights(config: Config, env: Env, command: str) -> None:
    """Downloads the *.safetensors of resolved hub ids. Raises ValueError."""
    for where, name, revision, _, key in _hub_models(config.model_dump()):
        if command == "train" or key == "path":  # other commands need neither critic nor teacher
            _in_turn(
                env,
                where.removeprefix(POLICY),
                revision,
                partial(download, name, patterns=WEIGHTS, where=where),
            )


def _hub_models(
    values: Mapping[str, Any],
) -> Iterator[tuple[str, str, str | None, dict[str, Any], str]]:
    """Yields of each model that is a hub id: its setting, for errors; id; revision; section of the config, and key."""
    policy, rewards = values.get("model") or {}, values.get("rewards") or ()
    models = [] if policy.get("create") else [(POLICY, policy, "path")]
    models += [
        (f"{name}.model=", values.get(name) or {}, "model")
        for name in ("critic", "teacher", "reference")
    ]
    models += [
        ("rewards: name=model: path=", x.get("options") or {}, "path")
        for x in rewards
        if x["name"] == "model"
    ]
    for prefix, section, key in models:
        name, revision = split_revision(section.get(key) or "")
        if is_hub_id(name):
            yield prefix + name, name, revision or section.get("revision"), section, key


def resolve_datasets(config: Config, env: Env) -> Config:
    """Downloads the datasets of the task and of the evaluation sets, and sets their `revision`. Raises ValueError."""
    task, evaluated, commits = config.task, config.eval, _commits_to_resume(config)

    def pinned(name: str | None, options: Mapping[str, Any]) -> dict[str, Any]:
        if name is None or (dataset := hub_id(name)) is None:
            return dict(options)

        def fetch(revision: str | None) -> Path:
            return resolve(dataset, parse_options(dataset, {**options, "revision": revision}))

        return {**options, "revision": _commit(env, name, options.get("revision"), commits, fetch)}

    parts = [
        part.model_copy(update={"options": pinned(part.name, part.options)})
        for part in task.mixture
    ]
    sets = [
        part.model_copy(update={"options": pinned(part.task, part.options)})
        for part in evaluated.sets
    ]
    task = task.model_copy(
        update={"options": pinned(task.name, task.options), "mixture": tuple(parts)}
    )
    return config.model_copy(
        update={"task": task, "eval": evaluated.model_copy(update={"sets": tuple(sets)})}
    )


def _commit(
    env: Env,
    name: str,
    revision: str | None,
    commits: Mapping[str, str],
    fetch: Callable[[str | None], Path],
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
    task = values.get("task") or {}
    sets: Sequence[Mapping[str, Any]] = (values.get("eval") or {}).get("sets") or ()
    yield from (
        (where.removeprefix(POLICY), commit)
        for where, _, commit, *_ in _hub_models(values)
        if commit
    )
    for part in (task, *(task.get("mixture") or ()), *sets):
        name, revision = (
            part.get("task") or part.get("name"),
            (part.get("options") or {}).get("revision"),
        )
        if name and revision:
            yield name, revision


def _in_turn(
    env: Env, name: str, revision: str | None, fetch: Callable[[str | None], Path]
) -> Path:
    """Calls `fetch` in one process of this node at a time: the first records the commit, in a file that goes with the
    job's shared memory; the others find its files."""
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
