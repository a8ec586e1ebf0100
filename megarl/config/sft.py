"""Section `sft` (stage sft), and its check."""

from pydantic import Field, PositiveInt

from megarl.config.section import Config, Section, refuse


class Sft(Section):
    """Supervised fine-tuning: stopping criteria, and the turns to train on."""

    until_accuracy: float | None = Field(default=None, gt=0, lt=1)
    """Sampled accuracy at which training stops; null: no such limit."""
    roles: tuple[str, ...] = Field(default=("assistant",), min_length=1)
    """Roles whose turns in a conversation are trained on."""
    patience: PositiveInt | None = None
    """Number of evaluations without a lower held-out loss after which training stops; null: no
    such limit."""


def check_sft(config: Config) -> None:
    """Raises ValueError for settings that stage sft would ignore, or that lack another setting."""
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
