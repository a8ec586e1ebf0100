"""Samples get their rewards: a weighted sum of named parts, none of which can stop the run, or hold it up for ever.

    samples --> cases --+--> rules: here, one sample at a time, each call limited ----+--> verdicts --weights--> reward
                        +--> code, servers, judges: meanwhile, on their own threads --+

A verdict without a value leaves the sample out: reward None, the cause in extra["dropped"]. A verdict with a value and
a cause, as code that ran for ever and is worth 0, is in extra["counted"]. Both are `reward/<name>/<cause>`.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from megarl.config.schema import Reward
from megarl.rewards.catalog import check_rewards, make_part
from megarl.rewards.functions import Rule
from megarl.rewards.limits import TooSlow, WorkerFailed, limited
from megarl.rewards.outcome import Case, Part, Verdict, left_out
from megarl.rewards.process import Process
from megarl.types import Prompt, Sample

__all__ = ["Scorer", "make_scorer"]

log = logging.getLogger(__name__)


def make_scorer(
    rewards: Sequence[Reward], *, timeout_s: float = 10.0, decode: Callable[[Sequence[int]], str] | None = None
) -> Scorer:
    """The scorer of a config's rewards.

    Args:
        timeout_s: Time limit of one rule on one sample.
        decode: Text of a response's token ids. With it, `score` fills in `Sample.text`; process rewards need it.

    Raises ValueError when a reward cannot be found or made.
    """
    check_rewards(rewards)
    parts = tuple(_Weighted(reward.name, reward.weight, make_part(reward, decode or _no_text)) for reward in rewards)
    return Scorer(parts, timeout_s, decode)


def _no_text(tokens: Sequence[int]) -> str:
    raise ValueError("no tokenizer was given")


@dataclass(frozen=True, slots=True)
class _Weighted:
    name: str
    weight: float
    part: Part | Rule

    @property
    def is_local(self) -> bool:
        return isinstance(self.part, Rule) or (isinstance(self.part, Process) and self.part.is_local)


@dataclass(frozen=True)
class Scorer:
    """roles.Rewards. Each cause is logged once, with the first sample that met it."""

    parts: tuple[_Weighted, ...]
    timeout_s: float  # of one rule and one sample
    decode: Callable[[Sequence[int]], str] | None = None  # None: the samples' texts are used as they are
    seen: set[str] = field(default_factory=set)

    def score(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> list[Sample]:
        if self.decode is not None:
            texts = [self.decode(sample.tokens[sample.trainable].tolist()) for sample in samples]
            samples = [replace(sample, text=text) for sample, text in zip(samples, texts, strict=True)]
        by_id = {prompt.prompt_id: prompt for prompt in prompts}
        cases = [_case(by_id[sample.prompt_id], sample) for sample in samples]
        meanwhile = {part.name: _Meanwhile(part, cases) for part in self.parts if not part.is_local}
        verdicts = {part.name: self._here(part, cases) for part in self.parts if part.is_local}
        verdicts |= {name: waiting.verdicts() for name, waiting in meanwhile.items()}
        return [
            self._scored(sample, {part.name: verdicts[part.name][row] for part in self.parts})
            for row, sample in enumerate(samples)
        ]

    def _here(self, weighted: _Weighted, cases: Sequence[Case]) -> list[Verdict]:
        part = weighted.part
        return [self._ruled(part, case) for case in cases] if isinstance(part, Rule) else _asked(part, cases)

    def _ruled(self, rule: Rule, case: Case) -> Verdict:
        try:
            value = float(limited(rule.function, rule.arguments(case), timeout_s=self.timeout_s))
        except TooSlow:
            return Verdict(None, "timeout", f"took longer than {self.timeout_s} s")
        except WorkerFailed as error:
            return Verdict(None, "error", f"raised {error}")
        except (Exception, SystemExit) as error:  # noqa: BLE001 (a user's code may fail in any way)
            return Verdict(None, "error", f"raised {type(error).__name__}: {error}")
        return Verdict(value)

    def _scored(self, sample: Sample, verdicts: dict[str, Verdict]) -> Sample:
        counted = []
        for name, verdict in verdicts.items():
            if verdict.value is None:
                return self._dropped(sample, f"reward/{name}/{verdict.cause}", verdict.why)
            if not math.isfinite(verdict.value):
                return self._dropped(sample, f"reward/{name}/nan", f"returned {verdict.value}")
            if verdict.cause:
                counted.append(f"reward/{name}/{verdict.cause}")
                self._tell(counted[-1], sample, f"is worth {verdict.value}", verdict.why)
        values = {name: verdict.value for name, verdict in verdicts.items() if verdict.value is not None}
        total, steps = 0.0, []
        for part in self.parts:
            placed = verdicts[part.name].steps
            if placed is None:
                total += part.weight * values[part.name]
            else:
                steps += [(index, part.weight * reward) for index, reward in placed]
        if not all(map(math.isfinite, (total, *(reward for _, reward in steps)))):
            return self._dropped(sample, "reward/total/nan", f"the weighted sum of {values} is {total}")
        at = sample.trainable.nonzero().flatten().tolist() if steps else []
        extra = {**sample.extra, "counted": counted} if counted else sample.extra
        placed_steps = tuple((at[index], reward) for index, reward in steps)
        has_outcome = any(verdicts[part.name].steps is None and part.weight for part in self.parts)
        if not has_outcome:  # what the steps are worth on average, for whoever looks at one number
            total = sum(part.weight * values[part.name] for part in self.parts)
        return replace(
            sample, reward=total, rewards=values, step_rewards=placed_steps, has_outcome=has_outcome, extra=extra
        )

    def _dropped(self, sample: Sample, cause: str, why: str) -> Sample:
        self._tell(cause, sample, "is left out", why)
        return replace(sample, reward=None, extra={**sample.extra, "dropped": cause})

    def _tell(self, cause: str, sample: Sample, what: str, why: str) -> None:
        if cause not in self.seen:
            self.seen.add(cause)
            log.warning(
                "%s: prompt %d, sample %d %s: the reward %s (later ones are only counted)",
                cause, sample.prompt_id, sample.index, what, why,
            )  # fmt: skip


def _case(prompt: Prompt, sample: Sample) -> Case:
    return Case(
        id=f"{sample.prompt_id}/{sample.index}",
        prompt=prompt.text,
        response=sample.text,
        answer=prompt.answer,
        tokens=tuple(sample.tokens[sample.trainable].tolist()),
        finish=sample.finish,
        extra=prompt.extra,
    )


def _asked(part: Part, cases: Sequence[Case]) -> list[Verdict]:
    try:
        return part(cases)
    except Exception as error:  # a defect of a part's must not end the run
        log.exception("a reward failed")
        return left_out(cases, "error", f"raised {type(error).__name__}: {error}")


class _Meanwhile:
    """One part at work on a thread of its own, for no longer than it said."""

    def __init__(self, weighted: _Weighted, cases: Sequence[Case]) -> None:
        assert not isinstance(weighted.part, Rule)
        self.name, self.part, self.cases = weighted.name, weighted.part, cases
        self.found: list[Verdict] | None = None
        self.deadline = time.monotonic() + self.part.total_s
        self.thread = threading.Thread(target=self._work, name=f"reward {self.name}", daemon=True)
        self.thread.start()

    def _work(self) -> None:
        self.found = _asked(self.part, self.cases)

    def verdicts(self) -> list[Verdict]:
        self.thread.join(max(self.deadline - time.monotonic(), 0))
        if self.found is None:
            why = f"{self.name} had not scored {len(self.cases)} samples after {self.part.total_s:.0f} s, and was left"
            return left_out(self.cases, "timeout", why)
        return self.found
