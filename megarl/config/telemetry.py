"""Section `telemetry`: trackers and sample files, in addition to the metrics of a run."""

from pydantic import Field, NonNegativeInt, PositiveInt

from megarl.config.section import Section


class SampleFiles(Section):
    """Files rollouts/step_<n>.jsonl with the best, the worst and random samples of a step."""

    every: NonNegativeInt = 1
    """Steps between files; 0: no files."""
    max_samples: PositiveInt = 64
    """Maximum number of samples in a file."""
    keep: PositiveInt = 100
    """Number of newest files to keep."""


class Telemetry(Section):
    """Trackers and sample files."""

    tensorboard: bool = False
    """Writes TensorBoard event files to the run directory."""
    wandb: str | None = Field(default=None, pattern=r"^[^/\\#?%:[:cntrl:]]{1,128}$")
    """Weights & Biases project; null: off. WANDB_MODE, WANDB_ENTITY and WANDB_DIR set the rest."""
    rollouts: SampleFiles = SampleFiles()
    """Sample files."""
