"""Sends all numeric metrics to TensorBoard and Weights & Biases, if configured.

    Telemetry --log--> Trackers -+-> TensorBoard   event files in the run directory
                                 '-> WandB         a run online, or files for `wandb sync`

A tracker that fails is disabled with a warning, and training continues: metrics.jsonl is the
complete record of a run.
"""

import math
import secrets
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from megarl.config.schema import Config, Telemetry
from megarl.platform.env import get_env, log_text, require
from megarl.processes.files import write_atomic
from megarl.telemetry.metrics import NamedValues, iterate_jsonl, read_metrics

UPLOAD_S = 60  # time limit for W&B's remaining uploads at the end of a run


def check_trackers(telemetry: Telemetry) -> None:
    """Raises ValueError if a configured tracker's package or the login to Weights & Biases is
    missing.
    """
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
        except (wandb.Error, ValueError) as error:  # invalid API key or WANDB_ variable
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
    """The configured trackers of a run that starts or resumes at step `start`."""

    def __init__(self, config: Config, *, start: int) -> None:
        self._running: dict[str, TensorBoard | WandB] = {}
        for name, setting, tracker in (
            ("TensorBoard", config.telemetry.tensorboard, TensorBoard),
            ("Weights & Biases", config.telemetry.wandb, WandB),
        ):
            if setting:
                with self._dropped_on_failure(name):
                    self._running[name] = tracker(config, start=start)

    def log(self, step: int, metrics: NamedValues, *, is_complete: bool = True) -> None:
        """Sends the finite numbers to all trackers; booleans become 0 and 1.

        With `is_complete=False`, a later call with the same step adds its other metrics.
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
    """Writes TensorBoard event files; readers discard steps from `start` on in earlier files."""

    def __init__(self, config: Config, *, start: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(config.run_dir), purge_step=start)

    def log(self, step: int, metrics: Mapping[str, float], *, is_complete: bool) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        # without it, a killed run would lose steps that a resumed run does not repeat
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandB:
    """Logs to Weights & Biases; a resumed run uses the id stored in the run directory.

    Online, W&B keeps the first values of repeated steps. Offline, W&B cannot append to a run, so a
    resumed run logs the earlier steps again.
    """

    def __init__(self, config: Config, *, start: int) -> None:
        import wandb

        folder = config.run_dir
        file = folder / "wandb_run_id"
        # a run that starts over needs a new id, because W&B ignores decreasing steps
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
            wandb.teardown()  # otherwise its service still reserves the id
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
        # if an exception is ending the run, sys.exc_info() returns it
        self._run.finish(exit_code=int(sys.exc_info()[0] is not None))


def _numbers(metrics: NamedValues) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in metrics.items()
        if name not in ("step", "eval/step")
        and isinstance(value, int | float)
        and math.isfinite(value)
    }


def _warn(message: str) -> None:
    print(f"megarl: warning: {log_text(' '.join(message.split()))}", flush=True)
