"""The interface between the scorer and rewards: plain data that can be sent to any process.

    Sample + Prompt --scorer--> ScoreRequest --a reward (function, code, URL, judge, process)-->
        Score --scorer--> Sample.reward

A score without a value drops its sample, because the reward failed. One with a value and a cause is
trained on: the policy failed (its code exceeded the time limit, for example), and the metrics count
the cause.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megarl.config.schema import Reward
from megarl.config.section import AnySection, validate_options
from megarl.jail.workers import CallError

log = logging.getLogger(__name__)
Decode = Callable[[Sequence[int]], str]  # token ids -> text

# causes: the server gave no answer, or stopped in the middle of one
UNREACHABLE = ("no_connection", "broken")


@dataclass(frozen=True)
class ScoreRequest:
    """The fields of a sample and its problem that rewards use."""

    id: str  # "<prompt id>/<sample index>", unique within a call
    prompt: str
    response: str
    answer: Any = None  # the reference, as the task has it (data.rows.reference)
    tokens: tuple[int, ...] = ()  # of the response
    finish: str = "stop"
    extra: Mapping[str, Any] = field(default_factory=dict)  # the problem's other fields
    prompt_tokens: tuple[int, ...] = ()
    # what judges compare with `answer` (answers.py); None: the response has none
    final_answer: str | None = None
    # the tag of the thoughts that the prompt has opened and the response must close (thoughts.py)
    opening: str = ""

    def arguments(self) -> dict[str, Any]:
        """Returns keyword arguments of a reward function.

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
    """The value that a reward gives a sample; None drops the sample.

    The metrics count `cause`, one word, as reward/<name>/<cause>.
    """

    value: float | None
    cause: str = ""
    detail: str = ""  # one sentence for the log
    # (index into the response's tokens, reward of the step that ends there), of process rewards;
    # `value` is only their mean
    steps: tuple[tuple[int, float], ...] | None = None


class ScoreError(CallError):
    """A sample could not be scored, for the reason `cause`."""


@dataclass(frozen=True)
class BatchReward:
    """One reward of a config. Calling it scores a batch in order and never raises.

    The scorer waits `total_s` seconds for its thread. If `total_s` is None, it runs on the calling
    thread and limits each sample's time.
    """

    name: str
    weight: float
    score: Callable[[Sequence[ScoreRequest]], list[Score]]
    total_s: float | None = None
    # takes a problem's answer and other fields; raises ScoreError if it cannot be scored
    check: Callable[[str | None, Mapping[str, Any]], object] | None = None

    def __call__(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        try:
            return self.score(requests)
        except (Exception, SystemExit) as error:  # a bug in a reward must not end the run
            log.exception("reward %s failed", self.name)
            return [Score(None, "error", f"raised {type(error).__name__}: {error}")] * len(requests)


def try_score(score: Callable[..., Score], *args: Any) -> Score:
    """Returns ``score(*args)``, or a score without a value for any error, also one among `args`."""
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
    """Validates a reward's options. Raises ValueError with the values and the remedy."""
    return validate_options(section, reward.options, f"rewards: name={reward.name!r}")
