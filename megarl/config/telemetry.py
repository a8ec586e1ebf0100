"""Section `telemetry`: trackers, sample files and profiles, in addition to a run's metrics."""

from pydantic import Field, NonNegativeInt, PositiveInt

from megarl.config.section import Config, Section, refuse


class SampleFiles(Section):
    """Files rollouts/step_<n>.jsonl with the best, the worst and random samples of a step."""

    every: NonNegativeInt = 1
    """Steps between files; 0: no files."""
    max_samples: PositiveInt = 64
    """Maximum number of samples in a file."""
    keep: PositiveInt = 100
    """Number of newest files to keep."""


class Profile(Section):
    """A profile by torch's profiler: profile_rank<r>.json in the run directory, a Chrome trace."""

    steps: tuple[NonNegativeInt, NonNegativeInt]
    """First and last step to profile."""
    ranks: tuple[NonNegativeInt, ...] = (0,)
    """Ranks to profile."""


class Telemetry(Section):
    """Trackers, sample files, and a profile."""

    tensorboard: bool = False
    """Writes TensorBoard event files to the run directory."""
    wandb: str | None = Field(default=None, pattern=r"^[^/\\#?%:[:cntrl:]]{1,128}$")
    """Weights & Biases project; null: off. WANDB_MODE, WANDB_ENTITY and WANDB_DIR set the rest."""
    rollouts: SampleFiles = SampleFiles()
    """Sample files."""
    profile: Profile | None = None
    """Profile of some steps, in the colocated topology; null: off."""


def check_profile(config: Config, world: int) -> None:
    """Raises ValueError if the profile has steps or ranks that the run does not have."""
    profile = config.telemetry.profile
    if profile is None:
        return
    first, last = profile.steps
    shown = f"telemetry.profile: steps={[first, last]} ranks={list(profile.ranks)}"
    steps = config.train.steps
    ranks = profile.ranks
    refuse(
        (config.launch.is_split, f"{shown} is for launch.topology=colocated; remove it"),
        (
            not first <= last < steps or max(ranks, default=0) >= world,
            f"{shown}, but the run has steps 0 to {steps - 1}, in this order, and ranks 0 to "
            f"{world - 1}; choose from these",
        ),
    )
