"""Scores samples by a weighted sum of named rewards, none of which can stop the run or block it forever.

    samples --> requests --+--> functions: on this thread, each call under a time limit -------+--> scores --> reward
                           +--> code, servers, judges: on their own threads at the same time --+

A score without a value drops the sample: its reward is None and extra["dropped"] has the cause. extra["counted"] has
the causes of scores with a value (such as 0 for code that never ended). A cause reads `reward/<name>/<cause>`.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from megarl.config.schema import AnswerPlace, Reward
from megarl.platform.env import redact
from megarl.rewards.answers import extract_answer
from megarl.rewards.catalog import make_rewards
from megarl.rewards.interface import BatchReward, Decode, Score, ScoreRequest
from megarl.rewards.time_limit import on_daemon_thread
from megarl.types import Prompt, Sample

log = logging.getLogger(__name__)


def make_scorer(
    rewards: Sequence[Reward], *, timeout_s: float = 10.0, decode: Decode | None = None, answer: AnswerPlace = "auto"
) -> Scorer:
    """Makes the scorer of a config's rewards. Raises ValueError if a reward cannot be resolved.

    `timeout_s` limits one call of a reward function. `decode` (token ids -> text) fills in `Sample.text`; process
    rewards need it. `answer` is the place of the final answer in a response.
    """
    return Scorer(tuple(make_rewards(rewards, decode, timeout_s)), decode, answer)


@dataclass(frozen=True)
class Scorer:
    """roles.Rewards. Each cause is logged once, with the first sample it affects."""

    rewards: tuple[BatchReward, ...]
    decode: Decode | None = None  # None: the samples' texts are used as they are
    answer: AnswerPlace = "auto"
    logged: set[str] = field(default_factory=set)

    def score(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> list[Sample]:
        if self.decode is not None:
            texts = [self.decode(sample.tokens[sample.trainable].tolist()) for sample in samples]
            samples = [replace(sample, text=text) for sample, text in zip(samples, texts, strict=True)]
        by_id = {prompt.prompt_id: prompt for prompt in prompts}
        requests = [_request(by_id[sample.prompt_id], sample, self.answer) for sample in samples]
        started = time.monotonic()
        pending = [
            (reward.name, reward.total_s, on_daemon_thread(partial(reward, requests)))
            for reward in self.rewards
            if reward.total_s is not None
        ]
        scores = {reward.name: reward(requests) for reward in self.rewards if reward.total_s is None}
        for name, total_s, future in pending:
            try:
                scores[name] = future.result(max(started + total_s - time.monotonic(), 0))
            except TimeoutError:
                detail = f"did not score {len(requests)} samples within {total_s:.0f} s"
                scores[name] = [Score(None, "timeout", detail)] * len(requests)
        return [
            self._scored(sample, {reward.name: scores[reward.name][row] for reward in self.rewards})
            for row, sample in enumerate(samples)
        ]

    def _scored(self, sample: Sample, scores: Mapping[str, Score]) -> Sample:
        counted = []
        for name, score in scores.items():
            if score.value is None:
                return self._dropped(sample, f"reward/{name}/{score.cause}", score.detail)
            if not math.isfinite(score.value):
                return self._dropped(sample, f"reward/{name}/nan", f"returned {score.value}")
            if score.cause:
                counted.append(f"reward/{name}/{score.cause}")
                self._log_once(counted[-1], sample, f"scored {score.value}", score.detail)
        values = {name: score.value for name, score in scores.items() if score.value is not None}
        outcomes = [reward for reward in self.rewards if scores[reward.name].steps is None]
        steps = [
            (index, reward.weight * step_reward)
            for reward in self.rewards
            for index, step_reward in scores[reward.name].steps or ()
        ]
        total = sum(reward.weight * values[reward.name] for reward in outcomes) + 0.0
        if not all(map(math.isfinite, (total, *(step_reward for _, step_reward in steps)))):
            return self._dropped(sample, "reward/total/nan", f"weighted sum of {values} is {total}")
        has_outcome = any(reward.weight for reward in outcomes)
        if not has_outcome:  # for display: the mean of the steps
            total = sum(reward.weight * values[reward.name] for reward in self.rewards)
        positions = sample.trainable.nonzero().flatten().tolist() if steps else []
        return replace(
            sample,
            reward=total,
            rewards=values,
            step_rewards=tuple((positions[index], step_reward) for index, step_reward in steps),
            has_outcome=has_outcome,
            extra={**sample.extra, "counted": counted} if counted else sample.extra,
        )

    def _dropped(self, sample: Sample, cause: str, detail: str) -> Sample:
        self._log_once(cause, sample, "is dropped", detail)
        return replace(sample, reward=None, extra={**sample.extra, "dropped": cause})

    def _log_once(self, cause: str, sample: Sample, effect: str, detail: str) -> None:
        if cause not in self.logged:
            self.logged.add(cause)
            where = f"prompt {sample.prompt_id}, sample {sample.index}"
            log.warning("%s: %s %s: %s (later cases are only counted)", cause, where, effect, redact(detail))


def _request(prompt: Prompt, sample: Sample, place: AnswerPlace) -> ScoreRequest:
    return ScoreRequest(
        id=f"{sample.prompt_id}/{sample.index}",
        prompt=prompt.text,
        response=sample.text,
        answer=prompt.answer,
        final_answer=extract_answer(sample.text, place),
        tokens=tuple(sample.tokens[sample.trainable].tolist()),
        finish=sample.finish,
        extra=prompt.extra,
    )
