"""Downloads the model of a hub id before ranks start: its small files, then, once all is checked, its weights.

    Config(path=id) --resolve_model--> Config(path=id, revision=commit) --preflight--> download_weights --> ranks

The run's config.yaml records the commit, and its ranks read the files from the cache. Under torchrun every rank comes
here: one of a node downloads while the others wait.
"""

from __future__ import annotations

import fcntl
import hashlib
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import yaml

from megarl.config.load import run_dir
from megarl.config.schema import Config
from megarl.models.hub import CODE, SMALL, WEIGHTS, download, is_hub_id
from megarl.platform.env import Env
from megarl.platform.shm import SHM, shm_prefix


def resolve_model(config: Config, env: Env) -> Config:
    """Downloads all but the weights of a hub id, and sets `model.revision` to its commit. Raises ValueError."""
    model = config.model
    if model.path is None or model.create is not None or not is_hub_id(model.path):
        return config
    patterns = (*SMALL, *CODE) if model.trust_remote_code else SMALL
    revision = model.revision or _commit_to_resume(config)
    commit = _download_in_turn(env, model.path, revision, patterns).name
    if env.is_main and commit != model.revision:
        name = model.revision or ("main, when the run began" if revision else "main")
        print(f"megarl: {model.path} ({name}) is commit {commit}", file=sys.stderr)
    return config.model_copy(update={"model": model.model_copy(update={"revision": commit})})


def _commit_to_resume(config: Config) -> str | None:
    """Returns the commit that the run to be resumed began with: `main` may have moved, but not the run's reference."""
    resume, folder = config.checkpoint.resume, run_dir(config)
    if resume not in ("auto", "never"):
        folder = Path(resume).resolve().parent.parent
    elif resume == "never" or not any((folder / "checkpoints").glob("step_*")):
        return None
    file = folder / "config.yaml"
    model = (yaml.safe_load(file.read_text()).get("model") or {}) if file.is_file() else {}
    return model.get("revision") if model.get("path") == config.model.path else None


def download_weights(config: Config, env: Env) -> None:
    """Downloads the *.safetensors of a resolved hub id. Raises ValueError."""
    model = config.model
    if model.path is not None and model.create is None and is_hub_id(model.path):
        _download_in_turn(env, model.path, model.revision, WEIGHTS)


def _download_in_turn(env: Env, path: str, revision: str | None, patterns: Sequence[str]) -> Path:
    """Downloads in one process of this node at a time: the first records the commit, the others find its files.

    The record is removed with the job's shared memory.
    """
    if env.local_world_size == 1:
        return download(path, revision, patterns)
    name = hashlib.sha256(f"{path}@{revision}".encode()).hexdigest()[:8]
    folder = SHM if SHM.is_dir() else Path(tempfile.gettempdir())
    with (folder / f"{shm_prefix(env.job_id, env.launcher_pid)}{name}").open("a+") as commit:
        fcntl.flock(commit, fcntl.LOCK_EX)
        commit.seek(0)
        snapshot = download(path, commit.read() or revision, patterns)
        commit.truncate(0)
        commit.write(snapshot.name)
    return snapshot
