"""The interface between the scorer and rewards: plain data that can be sent to any process.

    Sample + Prompt --scorer--> ScoreRequest --a reward (function, code, URL, judge, process)-->
        Score --scorer--> Sample.reward

A score without a value means that the reward failed, and drops the sample. A score with a value and
a cause means that the policy failed (its code exceeded the time limit, for example): the sample is
trained on, and the metrics count the cause.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from megarl.config.schema import Reward
from megarl.config.section import AnySection, validate_options
from megarl.data.rows import Fields
from megarl.jail.workers import CallError

log = logging.getLogger(__name__)
Decode = Callable[[Sequence[int]], str]  # token ids -> text

# causes: the server did not answer, or the connection failed during the answer
UNREACHABLE = ("no_connection", "broken")


@dataclass(frozen=True)
class ScoreRequest:
    """Fields of a sample and its problem that rewards use."""

    id: str  # "<prompt id>/<sample index>", unique within a call
    prompt: str
    response: str
    answer: Any = None  # the task's reference (data.rows.reference)
    tokens: tuple[int, ...] = ()  # the response's token ids
    finish: str = "stop"
    extra: Fields = field(default_factory=dict)  # the problem's other fields
    prompt_tokens: tuple[int, ...] = ()
    # the part of the response to compare with `answer` (answers.py); None: there is none
    final_answer: str | None = None
    # the tag of thoughts that the prompt opens and the response must close (thoughts.py)
    opening: str = ""

    def arguments(self) -> dict[str, Any]:
        """Returns the keyword arguments for a reward function.

        The sample's fields take precedence over the problem's.
        """
        return {
            **self.extra,
            "prompt": self.prompt,
            "response": self.response,
            "answer": self.answer,
            "final_answer": self.final_answer,
            "finish": self.finish,
            "opening": self.opening,
            "tokens": list(self.tokens),
        }


@dataclass(frozen=True)
class Score:
    """The value that a reward assigns to a sample; a `value` of None drops the sample.

    `cause` is one word; the metrics count it as reward/<name>/<cause>.
    """

    value: float | None
    cause: str = ""
    detail: str = ""  # one sentence for the log
    # process rewards only: (index into the response's tokens, reward of the step that ends there);
    # `value` is their mean
    steps: tuple[tuple[int, float], ...] | None = None


class ScoreError(CallError):
    """Raised if a sample cannot be scored; `cause` is the reason in one word."""


@dataclass(frozen=True)
class BatchReward:
    """One reward of a config. Calling it returns the scores of a batch in order and never raises.

    The scorer runs a reward on a separate thread and waits up to `total_s` seconds for it. A reward
    whose `total_s` is None runs on the calling thread and limits the time of each sample itself.
    """

    name: str
    weight: float
    score: Callable[[Sequence[ScoreRequest]], list[Score]]
    total_s: float | None = None
    # check(answer, other fields of the problem) raises ScoreError if the problem cannot be scored
    check: Callable[[str | None, Fields], object] | None = None

    def __call__(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        try:
            return self.score(requests)
        except (Exception, SystemExit) as error:  # a bug in a reward must not end the run
            log.exception("reward %s failed", self.name)
            return [Score(None, "error", f"raised {type(error).__name__}: {error}")] * len(requests)


def try_score(score: Callable[..., Score], *args: Any) -> Score:
    """Returns ``score(*args)``, or a score without a value if it raises or an argument is a
    CallError.
    """
    try:
        for arg in args:
            if isinstance(arg, CallError):
                raise arg
        return score(*args)
    except CallError as error:
        return Score(None, error.cause, str(error))
    except (Exception, SystemExit) as error:  # noqa: BLE001 (user code may fail in any way)
        return Score(None, "error", f"raised {type(error).__name__}: {error}")


def parse_options(section: type[AnySection], reward: Reward) -> AnySection:
    """Returns a reward's options as `section`. Raises ValueError with the values and the remedy."""
    return validate_options(section, reward.options, f"rewards: name={reward.name!r}")
