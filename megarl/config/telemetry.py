"""`telemetry`: what a run records besides its metrics."""

from pydantic import Field, NonNegativeInt, PositiveInt

from megarl.config.section import Section


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
