"""Sections `sync` and `checks`: the weight sync, and the checks of trainer against engine."""

from typing import Literal

from pydantic import PositiveFloat, PositiveInt

from megarl.config.section import Section


class Sync(Section):
    """The weight sync."""

    atomic: bool = True
    """Stages received weights until the checksums of all ranks match, so that a failed sync leaves
    the engine's weights intact. Staged weights are on the device while there is room, then on the
    host. False saves memory, but after a failed sync the engine refuses prompts."""
    round_bytes: PositiveInt = 512 << 20
    """Maximum number of bytes that a rank sends or receives in one round."""


class Checks(Section):
    """Checks that stop a run if trainer and engine disagree."""

    max_logprob_diff: PositiveFloat | None = None
    """Maximum difference of a token's log-prob between trainer and engine, in nats; null: the
    difference that rounding explains, measured for the model."""
    probe: Literal["first", "always"] = "first"
    """Syncs after which the engine scores a probe: the first sync, or every sync."""
