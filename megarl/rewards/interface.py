"""The interface between the scorer and rewards: plain data without tensors, which can be sent to any process.

    Sample + Prompt --scorer--> ScoreRequest --a reward (function, code, URL, judge, process)--> Score --> Sample.reward

A score without a value drops its sample, because the reward failed. One with a value and a cause is trained on: the
policy failed (its code exceeded the time limit, for example), and the metrics count the cause.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from megarl.config.section import Reward, did_you_mean

log = logging.getLogger(__name__)
Options = TypeVar("Options", bound=BaseModel)
Decode = Callable[[Sequence[int]], str]  # token ids -> text

UNREACHABLE = (
    "no_connection",
    "broken",
)  # causes: the server gave no answer, or stopped in the middle of one


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """The fields of a sample and its problem that rewards use."""

    id: str  # "<prompt id>/<sample index>", unique within a call
    prompt: str
    response: str
    answer: str | None = None
    tokens: tuple[int, ...] = ()  # of the response
    finish: str = "stop"
    extra: Mapping[str, Any] = field(default_factory=dict)  # the problem's other fields
    prompt_tokens: tuple[int, ...] = ()
    final_answer: str | None = (
        None  # what judges compare with `answer` (answers.py); None: the response has none
    )

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of a reward function; the sample's fields take precedence over the problem's."""
        fields = {
            name: getattr(self, name)
            for name in ("prompt", "response", "answer", "final_answer", "finish")
        }
        return {**self.extra, **fields, "tokens": list(self.tokens)}


@dataclass(frozen=True, slots=True)
class Score:
    """`value` None drops the sample. The metrics count `cause`, one word, as reward/<name>/<cause>."""

    value: float | None
    cause: str = ""
    detail: str = ""  # one sentence for the log
    # (index into the response's tokens, reward of the step that ends there); if set, `value` is only their mean
    steps: tuple[tuple[int, float], ...] | None = None


class ScoreError(Exception):
    """A sample could not be scored, for the reason `cause`."""

    def __init__(self, cause: str, detail: str) -> None:
        super().__init__(detail)
        self.cause = cause


@dataclass(frozen=True, slots=True)
class BatchReward:
    """One reward of a config. Calling it scores a batch in order and never raises.

    The scorer waits `total_s` seconds for its thread; None: it runs on the calling one, and limits each sample's time.
    """

    name: str
    weight: float
    score: Callable[[Sequence[ScoreRequest]], list[Score]]
    total_s: float | None = None
    # of a problem's answer and other fields; raises ScoreError if no response to the problem can be scored
    check: Callable[[str | None, Mapping[str, Any]], object] | None = None

    def __call__(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        try:
            return self.score(requests)
        except (Exception, SystemExit) as error:  # a bug in a reward must not end the run
            log.exception("reward %s failed", self.name)
            return [Score(None, "error", f"raised {type(error).__name__}: {error}")] * len(requests)


def try_score(score: Callable[..., Score], *args: Any) -> Score:
    """Returns ``score(*args)``, or for any error, a ScoreError among `args` included, a score without a value."""
    try:
        if error := next((arg for arg in args if isinstance(arg, ScoreError)), None):
            raise error
        return score(*args)
    except ScoreError as error:
        return Score(None, error.cause, str(error))
    except (Exception, SystemExit) as error:  # noqa: BLE001 (user code may fail in any way)
        return Score(None, "error", f"raised {type(error).__name__}: {error}")


def parse_options(section: type[Options], reward: Reward) -> Options:
    """Validates a reward's options. Raises ValueError with the values and the remedy."""
    check_options(reward.name, reward.options, section.model_fields)
    try:
        return section.model_validate(reward.options)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        if first["type"] == "missing":
            raise ValueError(
                f"rewards: name={reward.name!r} needs the option {key}; set it"
            ) from None
        allowed = (
            first["msg"].removeprefix("Value error, ").replace("Input should be", "it should be")
        )
        where = f"option {key}={first['input']!r} is invalid" if key else "invalid options"
        raise ValueError(f"rewards: name={reward.name!r}, {where}: {allowed}") from None


def check_options(reward: str, options: Iterable[str], known: Collection[str]) -> None:
    if unknown := next((name for name in options if name not in known), None):
        remedy = did_you_mean(unknown, known, f"it takes {', '.join(known) or 'none'}; remove it")
        raise ValueError(f"rewards: name={reward!r} has no option {unknown!r}; {remedy}")
