"""`sft`: settings of the stage sft."""

from pydantic import Field, PositiveInt

from megarl.config.section import Config, Section, refuse


class Sft(Section):
    """Supervised fine-tuning: when to stop, and whose turns are learned."""

    until_accuracy: float | None = Field(default=None, gt=0, lt=1)
    """Sampled accuracy at which training stops; null: it never does."""
    roles: tuple[str, ...] = Field(default=("assistant",), min_length=1)
    """Roles of a conversation whose turns are learned."""
    patience: PositiveInt | None = None
    """Evaluations without a lower held-out loss after which training stops; null: it never does."""


def check_sft(config: Config) -> None:
    """Raises ValueError for settings that the stage would ignore or cannot follow."""
    patience = config.sft.patience
    evaluated = config.eval
    epochs = config.train.epochs_per_batch
    refuse(
        (
            epochs > 1,
            f"train.epochs_per_batch={epochs}, but each batch of stage: sft is new; raise "
            "train.steps",
        ),
        (
            patience is not None and not evaluated.every,
            f"sft.patience={patience} counts evaluations, but eval.every=0; set eval.every",
        ),
        (
            evaluated.every and not evaluated.size,
            f"eval.every={evaluated.every} with stage: sft needs held-out examples; set eval.size",
        ),
    )
