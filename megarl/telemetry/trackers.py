"""Sends every numeric metric to TensorBoard and Weights & Biases, where they are configured.

    Telemetry --log--> Trackers -+-> TensorBoard   event files in the run directory
                                 '-> WandB         a run online, or files for `wandb sync`

metrics.jsonl stays the record of a run: a tracker that fails is dropped with a warning, and
training continues.
"""

import math
import secrets
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from megarl.config.schema import Config, Telemetry
from megarl.platform.env import get_env, log_text, require
from megarl.processes.files import write_atomic
from megarl.telemetry.metrics import iterate_jsonl, read_metrics

UPLOAD_S = 60  # W&B may take this long to upload what is left at the end


def check_trackers(telemetry: Telemetry) -> None:
    """Raises ValueError if the package of a tracker is missing, or a login to Weights & Biases."""
    for name, module in (("tensorboard", "tensorboard.summary"), ("wandb", "wandb.sdk")):
        value = getattr(telemetry, name)
        if value:
            require(f"telemetry.{name}={str(value).replace('True', 'true')}", module)
    if telemetry.wandb:
        import wandb

        try:
            mode = wandb.setup(wandb.Settings(silent=True)).settings.mode
            has_login = mode in ("offline", "dryrun", "disabled") or wandb.login(
                verify=False, prompt=False
            )
        except (wandb.Error, ValueError) as error:  # of the key or of a WANDB_ variable
            raise ValueError(
                f"telemetry.wandb={telemetry.wandb}: {error}; correct it, or WANDB_MODE=offline"
            ) from None
        if not has_login:
            raise ValueError(
                f"telemetry.wandb={telemetry.wandb}, but there is no login for Weights & Biases; "
                "run wandb login, set "
                "WANDB_API_KEY, or record without a network by WANDB_MODE=offline"
            )


class Trackers:
    """The configured trackers of a run that starts at step `start`."""

    def __init__(self, config: Config, *, start: int) -> None:
        self._running: dict[str, TensorBoard | WandB] = {}
        for name, setting, tracker in (
            ("TensorBoard", config.telemetry.tensorboard, TensorBoard),
            ("Weights & Biases", config.telemetry.wandb, WandB),
        ):
            if setting:
                with self._dropped_on_failure(name):
                    self._running[name] = tracker(config, start=start)

    def log(self, step: int, metrics: Mapping[str, Any], *, is_complete: bool = True) -> None:
        """Passes on the finite numbers; booleans are 0 and 1.

        A later call completes a step without `is_complete`.
        """
        numbers = _numbers(metrics)
        for name, tracker in list(self._running.items()):
            with self._dropped_on_failure(name):
                tracker.log(step, numbers, is_complete=is_complete)

    def close(self) -> None:
        for name, tracker in list(self._running.items()):
            with self._dropped_on_failure(name):
                tracker.close()

    @contextmanager
    def _dropped_on_failure(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 (whatever a tracker raises, training continues)
            self._running.pop(name, None)
            _warn(f"{name} failed and receives nothing more: {error!r}; metrics.jsonl is complete")


class TensorBoard:
    """Readers drop the steps from `start` on that an earlier run of the folder wrote."""

    def __init__(self, config: Config, *, start: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(config.run_dir), purge_step=start)

    def log(self, step: int, metrics: Mapping[str, float], *, is_complete: bool) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        # otherwise a run that is killed loses steps that its checkpoint does not repeat
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandB:
    """A run resumes under the id in the run directory.

    Online, W&B keeps the first values of repeated steps; offline it cannot append: a resumed run
    writes earlier ones.
    """

    def __init__(self, config: Config, *, start: int) -> None:
        import wandb

        folder = config.run_dir
        file = folder / "wandb_run_id"
        # a run from the start gets a new id, since W&B ignores steps that go back
        if not start or not file.is_file():
            write_atomic(file, f"{folder.name[:48]}-{secrets.token_hex(4)}")
        init = partial(
            wandb.init,
            project=config.telemetry.wandb,
            id=file.read_text(encoding="utf-8"),
            name=folder.name,
            resume="allow",
            dir=get_env("WANDB_DIR", str(folder)),
            config=config.model_dump(mode="json"),
            allow_val_change=True,
            settings=wandb.Settings(
                silent=True, console="off", finish_timeout=UPLOAD_S, finish_timeout_raises=True
            ),
        )
        try:
            self._run = init()
        except wandb.Error as error:
            wandb.teardown()  # its service still reserves the id
            self._run = init(mode="offline")
            _warn(f"Weights & Biases cannot be reached, so its run is recorded offline: {error}")
        upload = f"upload it with: wandb sync {Path(self._run.dir).parent}"
        print(f"Weights & Biases run: {upload if self._run.offline else self._run.url}", flush=True)
        if self._run.offline:
            results = {row["step"]: row for row in read_metrics(folder / "eval.jsonl")}
            for row in iterate_jsonl(folder / "metrics.jsonl", step=int):
                if row["step"] < start:
                    named = {
                        f"eval/{name}": value
                        for name, value in results.get(row["step"], {}).items()
                    }
                    self.log(row["step"], _numbers(row | named), is_complete=True)

    def log(self, step: int, metrics: dict[str, float], *, is_complete: bool) -> None:
        self._run.log(metrics, step=step, commit=is_complete)

    def close(self) -> None:
        # called while an exception ends the run
        self._run.finish(exit_code=int(sys.exc_info()[0] is not None))


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in metrics.items()
        if name not in ("step", "eval/step")
        and isinstance(value, int | float)
        and math.isfinite(value)
    }


def _warn(message: str) -> None:
    print(f"megarl: warning: {log_text(' '.join(message.split()))}", flush=True)
