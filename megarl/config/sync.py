"""`sync` and `checks`: how weights move to the engine, and when a run refuses to continue."""

from typing import Literal

from pydantic import PositiveFloat, PositiveInt

from megarl.config.section import Section


class Sync(Section):
    """The weight sync."""

    atomic: bool = True
    """Stages received weights until all ranks' checksums match, so that a failed sync leaves the
    engine's weights intact. They are on the device while it has room, else on the host. False saves
    memory: after a failed sync the engine refuses prompts."""
    round_bytes: PositiveInt = 512 << 20
    """Bytes that a rank sends and receives at most in one round."""


class Checks(Section):
    """Refusals to continue when trainer and engine disagree."""

    max_logprob_diff: PositiveFloat | None = None
    """Largest difference of a token's log-prob between trainer and engine, in nats; null: what
    rounding explains, measured for the model."""
    probe: Literal["first", "always"] = "first"
    """Syncs after which the engine scores a probe: the first one, or all."""
