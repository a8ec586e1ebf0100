"""The configs in a run directory: the first one, and one for each resume with changed settings.

    config.yaml, config_2.yaml, ... --newest--> compared with the new config
                                                --> refused, or written to config_<n>.yaml

When a run is resumed, settings that change the training result must not change by accident.
"""

import json
import re
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from megarl.config.load import flat, load_config, resolved_yaml
from megarl.config.schema import Config
from megarl.platform.json_text import read_json

LEDGER = "ledger.jsonl"  # the outcome of every prompt (data/ledger.py)

# Keys and sections that may change when a run is resumed. One line each for: names; length of the
# run; recording and its intervals; checks; then layout, memory and speed (equal up to rounding).
FREE = """
    run.name run.dir
    train.steps sft.until_accuracy sft.patience
    eval.every eval.size eval.temperature checkpoint telemetry
    checks model.trust_remote_code
    parallel launch sync rollout.tensor rollout.expert rollout.replicas moe.dispatcher
    train.max_tokens_per_microbatch train.max_tokens_per_logprob_batch train.logprob_chunk
    train.recompute train.recompute_modules train.offload train.optimizer_cpu_offload
    rollout.gpu_memory_utilization rollout.cpu_kv_cache_gb rollout.enforce_eager rollout.sleep_level
"""


def make_run_dir(config: Config) -> None:
    """Creates the run directory; raises ValueError if it is not writable."""
    folder = config.run_dir
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(
            f"cannot write to {folder} ({error.strerror}); set run.dir to a writable folder"
        ) from None


def resumed_run(config: Config) -> Path | None:
    """Returns the directory of the run that `config` would resume; None if it would start over."""
    resume = config.checkpoint.resume
    folder = config.run_dir
    if resume not in ("auto", "never"):
        return Path(resume).resolve().parent.parent
    return folder if resume == "auto" and any((folder / "checkpoints").glob("step_*")) else None


def check_resumed(config: Config) -> bool:
    """Returns True if `config` would resume a run that is complete, with exactly its settings.

    Raises ValueError if it would resume a run that has different settings, except FREE.
    """
    run = resumed_run(config)
    if run is None or (file := _newest(run)) is None:
        return False
    try:
        old = load_config(file)
    except ValueError as error:
        raise ValueError(
            f"cannot compare with the run to be resumed: {error}; pass --resume-changed"
        ) from None
    free = tuple(f"{key}." for key in FREE.split())
    found = _changes(old, config)
    changes = {key: found[key] for key in found if not f"{key}.".startswith(free)}
    if changes:
        raise ValueError(
            f"the run to be resumed began with other settings ({file}): {_text(changes)}; pass "
            "--resume-changed to continue with the new ones, or start over with "
            "checkpoint.resume=never or another run.name"
        )
    end = run / "exit.json"
    is_same = config.checkpoint.resume == "auto" and not found
    return is_same and end.is_file() and read_json(end)["code"] == 0


def prepare_run_dir(config: Config, command: str) -> Path:
    """Writes the resolved config, removes the exit record of an earlier run, and returns the path
    of the config.
    """
    folder = config.run_dir
    text = resolved_yaml(config)
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    (folder / "exit.json").unlink(missing_ok=True)
    newest = _newest(folder)
    resumed = resumed_run(config)
    if newest is None or command != "train" or resumed is None or not resumed.samefile(folder):
        for file in folder.glob("config_*.yaml"):
            file.unlink()
        newest = folder / "config.yaml"
    else:
        changes: Mapping[str, Any] = {"everything": ("?", "?")}
        with suppress(ValueError):
            changes = _changes(load_config(newest), config)
        if not changes:
            return newest
        newest = folder / f"config_{_number(newest) + 1}.yaml"
        text = f"# Resumed; changed: {_text(changes)}\n{text}"
    newest.write_text(text, encoding="utf-8")
    return newest


def _newest(run: Path) -> Path | None:
    files = run.glob("config*.yaml")
    numbered = [file for file in files if re.fullmatch("config(_[0-9]+)?", file.stem)]
    return max(numbered, key=_number, default=None)


def _number(file: Path) -> int:
    return int(file.stem.removeprefix("config").removeprefix("_") or 1)


def _changes(old: Config, new: Config) -> dict[str, tuple[Any, Any]]:
    """Returns {dotted key: (old, new)} of changed settings; if the model is in another folder, also
    of changed values in its config.json.
    """
    before, after = (dict(flat(config.model_dump(mode="json"))) for config in (old, new))
    old_model, new_model = (Path(config.model.path or "") for config in (old, new))
    if old_model.resolve() == new_model.resolve() or (
        old_model.parent.name == new_model.parent.name == ".models"
        and old_model.name == new_model.name
    ):  # a model of model.create, whose folder is named by a hash of its settings
        before["model.path"] = after["model.path"]
    else:
        before |= _model_values(old_model)
        after |= _model_values(new_model)
    keys = [key for key in {**before, **after} if before.get(key) != after.get(key)]
    return {key: (before.get(key), after.get(key)) for key in keys}


def _model_values(folder: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError, AttributeError):
        return dict(flat(read_json(folder / "config.json"), "config.json: "))
    return {}


def _text(changes: Mapping[str, tuple[Any, Any]]) -> str:
    return ", ".join(
        f"{key} {json.dumps(old)} -> {json.dumps(new)}" for key, (old, new) in changes.items()
    )
