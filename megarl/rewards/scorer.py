"""Samples get their rewards: a weighted sum of named functions, none of which can stop the run.

sample --each reward, under an alarm--> {name: value} --weights--> reward
             \\--raises, too slow, not a finite number--> reward None, the cause in extra["dropped"]
"""

from __future__ import annotations

import logging
import math
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from megarl.config.schema import Reward
from megarl.rewards.rules import check_rewards, reward_function, taken_by
from megarl.types import Prompt, Sample

__all__ = ["Scorer", "make_scorer"]

log = logging.getLogger(__name__)


class _TooSlow(BaseException):
    """Not an Exception, so that code which swallows those cannot swallow it."""


@dataclass(frozen=True, slots=True)
class _Part:
    name: str
    weight: float
    options: Mapping[str, Any]
    function: Callable[..., float]
    takes: frozenset[str] | None  # None: any keyword

    def value(self, known: Mapping[str, Any]) -> float:
        arguments = {**known, **self.options}
        if self.takes is not None:
            arguments = {name: value for name, value in arguments.items() if name in self.takes}
        return float(self.function(**arguments))


def make_scorer(rewards: Sequence[Reward], *, timeout_s: float = 10.0) -> Scorer:
    """Raises ValueError when a reward cannot be found."""
    check_rewards(rewards)
    return Scorer(tuple(_part(reward) for reward in rewards), timeout_s)


def _part(reward: Reward) -> _Part:
    function = reward_function(reward)
    return _Part(reward.name, reward.weight, reward.options, function, taken_by(function))


@dataclass(frozen=True)
class Scorer:
    """roles.Rewards. Each cause is logged once, with the first sample that met it."""

    parts: tuple[_Part, ...]
    timeout_s: float  # of all rewards of one sample; enforced on the main thread only
    seen: set[str] = field(default_factory=set)

    def score(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> list[Sample]:
        by_id = {prompt.prompt_id: prompt for prompt in prompts}
        return [self._scored(by_id[sample.prompt_id], sample) for sample in samples]

    def _scored(self, prompt: Prompt, sample: Sample) -> Sample:
        known = {
            **prompt.extra,
            "prompt": prompt.text,
            "response": sample.text,
            "answer": prompt.answer,
            "tokens": sample.tokens[sample.trainable].tolist(),
            "finish": sample.finish,
        }
        values: dict[str, float] = {}
        for part in self.parts:
            try:
                with _alarm(self.timeout_s):
                    value = part.value(known)
            except _TooSlow:
                return self._dropped(sample, part.name, "timeout", f"took longer than {self.timeout_s} s")
            except (Exception, SystemExit) as error:  # noqa: BLE001 (a user's code may fail in any way)
                return self._dropped(sample, part.name, "error", f"raised {type(error).__name__}: {error}")
            if not math.isfinite(value):
                return self._dropped(sample, part.name, "nan", f"returned {value}")
            values[part.name] = value
        total = sum(part.weight * values[part.name] for part in self.parts)
        if not math.isfinite(total):
            return self._dropped(sample, "total", "nan", f"the weighted sum of {values} is {total}")
        return replace(sample, reward=total, rewards=values)

    def _dropped(self, sample: Sample, name: str, kind: str, what: str) -> Sample:
        cause = f"reward/{name}/{kind}"
        if cause not in self.seen:
            self.seen.add(cause)
            log.warning(
                "%s: prompt %d, sample %d is left out: the reward %s (later ones are only counted)",
                cause, sample.prompt_id, sample.index, what,
            )  # fmt: skip
        return replace(sample, reward=None, extra={**sample.extra, "dropped": cause})


@contextmanager
def _alarm(timeout_s: float) -> Iterator[None]:
    """Raise _TooSlow here after `timeout_s` seconds. Signals reach the main thread only; elsewhere nothing is set."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def too_slow(number: int, frame: object) -> None:
        raise _TooSlow

    before = signal.signal(signal.SIGALRM, too_slow)
    signal.setitimer(signal.ITIMER_REAL, timeout_s, 1.0)  # again each second, should the code catch it
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
