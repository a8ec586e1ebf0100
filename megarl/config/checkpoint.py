"""Section `checkpoint`: saving, exporting and resuming, and its check."""

from pathlib import Path
from typing import Literal

from pydantic import NonNegativeInt, PositiveInt

from megarl.config.section import Config, Section


class Checkpoint(Section):
    """Checkpoints, and exports in Hugging Face format."""

    every: NonNegativeInt = 50
    """Steps between checkpoints; one is also saved at the end. 0: no checkpoints."""
    keep: PositiveInt = 3
    """Number of newest checkpoints to keep."""
    asynchronous: bool = True
    """Writes checkpoints in the background, from a copy in host memory."""
    resume: str = "auto"
    """Checkpoint to resume from. auto: the newest one in the run directory, if any; never: start
    over; or the folder of a checkpoint."""
    export_hf: Literal["never", "end"] | PositiveInt = "never"
    """Exports a Hugging Face model: never, at the end, or every N steps and at the end."""
    export_format: Literal["bf16", "same"] = "bf16"
    """Format of exported weights. bf16: as trained (in train.dtype); same: rounded to the block
    format of model.path, if it has one."""


def check_resume(config: Config) -> None:
    """Raises FileNotFoundError if checkpoint.resume names a folder that is not a checkpoint."""
    resume = config.checkpoint.resume
    if resume in ("auto", "never") or (Path(resume) / "metadata.json").is_file():
        return
    raise FileNotFoundError(
        f"checkpoint.resume={resume} is not a checkpoint (no metadata.json); "
        "use auto, never, or a folder such as checkpoints/step_100"
    )
