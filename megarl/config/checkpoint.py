"""`checkpoint`: what is saved, how often, and what a run resumes."""

from pathlib import Path
from typing import Literal

from pydantic import NonNegativeInt, PositiveInt

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


def check_resume(config: Config) -> None:
    """Raises FileNotFoundError if checkpoint.resume is not a checkpoint."""
    resume = config.checkpoint.resume
    if resume in ("auto", "never") or (Path(resume) / "metadata.json").is_file():
        return
    raise FileNotFoundError(
        f"checkpoint.resume={resume} is not a checkpoint (no metadata.json); "
        "use auto, never, or a folder such as checkpoints/step_100"
    )
