"""`checkpoint` and `telemetry`: what a run writes, how often, and what it resumes."""

from pathlib import Path
from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from megarl.config.section import Config, Section


class Checkpoint(Section):
    """Checkpoints, and exports in Hugging Face's format."""

    every: NonNegativeInt = 50
    """Steps from one checkpoint to the next, and one at the end; 0: none is saved."""
    keep: PositiveInt = 3
    """Checkpoints that are kept, the newest."""
    asynchronous: bool = True
    """Writes in the background, from a copy in host memory."""
    resume: str = "auto"
    """auto: the newest checkpoint of the run directory, if any; never; or a checkpoint's folder."""
    export_hf: Literal["never", "end"] | PositiveInt = "never"
    """Exports a Hugging Face model: never, at the end, or every N steps and at the end."""
    export_format: Literal["bf16", "same"] = "bf16"
    """bf16: the weights as trained (in train.dtype); same: rounded to the block format of
    model.path, if it has one."""


class SampleFiles(Section):
    """The best, the worst and random samples of a step, in rollouts/step_<n>.jsonl."""

    every: NonNegativeInt = 1
    """Steps from one file to the next; 0: none is written."""
    max_samples: PositiveInt = 64
    """Samples in a file."""
    keep: PositiveInt = 100
    """Files that are kept, the newest."""


class Telemetry(Section):
    """Trackers, and files of samples."""

    tensorboard: bool = False
    """Writes event files to the run directory."""
    wandb: str | None = Field(default=None, pattern=r"^[^/\\#?%:[:cntrl:]]{1,128}$")
    """Weights & Biases project; null: off. WANDB_MODE, WANDB_ENTITY and WANDB_DIR set the rest."""
    rollouts: SampleFiles = SampleFiles()
    """Files of samples."""


def check_resume(config: Config) -> None:
    """Raises FileNotFoundError if checkpoint.resume is not a checkpoint."""
    resume = config.checkpoint.resume
    if resume in ("auto", "never") or (Path(resume) / "metadata.json").is_file():
        return
    raise FileNotFoundError(
        f"checkpoint.resume={resume} is not a checkpoint (no metadata.json); "
        "use auto, never, or a folder such as checkpoints/step_100"
    )
