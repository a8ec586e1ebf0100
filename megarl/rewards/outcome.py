"""What a reward is asked and what it says: Case -> Verdict. Plain data, no tensors, so that it can be sent anywhere.

    Sample + Prompt --scorer--> Case --a part (rule, code, URL, judge, process)--> Verdict --scorer--> Sample.reward

A verdict without a value leaves its sample out: the reward is to blame, not the policy. A verdict with a value and a
cause counts: the policy is to blame (its code ran for ever, say), which is worth 0 and has a name in the metrics.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Protocol, TypeVar

from pydantic import ValidationError

from megarl.config.schema import Reward, Section

__all__ = ["Case", "Part", "Steps", "Verdict", "left_out", "options_of", "unknown_option"]

S = TypeVar("S", bound=Section)
Steps = tuple[tuple[int, float], ...]  # (index into the response's tokens, reward of the step that ends there)


@dataclass(frozen=True, slots=True)
class Case:
    """One sample, as rewards see it."""

    id: str  # "<prompt id>/<sample index>", unique in a call
    prompt: str
    response: str
    answer: str | None = None
    tokens: tuple[int, ...] = ()  # of the response
    finish: str = "stop"
    extra: Mapping[str, Any] = field(default_factory=dict)  # what the task says of the problem

    def arguments(self) -> dict[str, Any]:
        """By name, for a function of a user's; what the task says never hides what was sampled."""
        return {
            **self.extra,
            "prompt": self.prompt,
            "response": self.response,
            "answer": self.answer,
            "tokens": list(self.tokens),
            "finish": self.finish,
        }


@dataclass(frozen=True, slots=True)
class Verdict:
    """`value` None: the sample is left out. `cause` is one word for the metrics (reward/<name>/<cause>)."""

    value: float | None
    cause: str = ""
    why: str = ""  # one sentence for the log
    steps: Steps | None = None  # a process reward's: these are the reward, `value` is only their mean


class Part(Protocol):
    """One reward of a config. Called from a thread of its own; never raises, keeps the order."""

    @property
    def total_s(self) -> float:
        """Seconds after which it is no longer waited for."""
        ...

    def __call__(self, cases: Sequence[Case]) -> list[Verdict]: ...


def left_out(cases: Sequence[Case], cause: str, why: str) -> list[Verdict]:
    return [Verdict(None, cause, why) for _ in cases]


def options_of(section: type[S], reward: Reward) -> S:
    """A reward's options as its own closed section.

    Raises ValueError with the values and the remedy.
    """
    if unknown := next((name for name in reward.options if name not in section.model_fields), None):
        raise unknown_option(reward.name, unknown, list(section.model_fields))
    try:
        return section.model_validate(reward.options)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        if first["type"] == "missing":
            raise ValueError(f"rewards: name={reward.name!r} needs the option {key}; give it a value") from None
        allowed = first["msg"].removeprefix("Value error, ").replace("Input should be", "it should be")
        where = f"option {key}={first['input']!r}" if key else "options"
        raise ValueError(f"rewards: name={reward.name!r}, {where} refused: {allowed}") from None


def unknown_option(reward: str, unknown: str, known: Sequence[str]) -> ValueError:
    near = get_close_matches(unknown, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"it takes {', '.join(known) or 'none'}; remove it"
    return ValueError(f"rewards: name={reward!r} has no option {unknown!r}; {hint}")
