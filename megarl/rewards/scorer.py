"""Scores samples by a weighted sum of named rewards, none of which can block the run forever.

    samples --> requests --+--> functions: on this thread, each call under a time limit -------+--> scores --> reward
                           +--> code, servers, judges: on their own threads, while others ------+
                                are still generated

A dropped sample has the reward None and extra["dropped"] = `reward/<name>/<cause>`; extra["counted"] has the causes of
scores with a value. Only a server that no sample could reach, with all retries, stops the run, which can be resumed.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from queue import SimpleQueue

from megarl.config.schema import AnswerPlace, Reward
from megarl.platform.env import redact
from megarl.rewards.answers import extract_answer
from megarl.rewards.catalog import make_rewards
from megarl.rewards.interface import UNREACHABLE, BatchReward, Decode, Score, ScoreRequest
from megarl.rewards.time_limit import on_daemon_thread
from megarl.types import CheckFailed, Prompt, Sample

log = logging.getLogger(__name__)


def make_scorer(
    rewards: Sequence[Reward],
    *,
    timeout_s: float = 10.0,
    decode: Decode | None = None,
    answer: AnswerPlace = "auto",
) -> Scorer:
    """Makes the scorer of a config's rewards, or raises ValueError; `timeout_s` limits one call of a function."""
    return Scorer(tuple(make_rewards(rewards, decode, timeout_s)), decode, answer)


@dataclass(frozen=True)
class Scorer:
    """roles.Rewards. Each cause is logged once, with the first sample it affects."""

    rewards: tuple[BatchReward, ...]
    decode: Decode | None = None  # None: the samples' texts are used as they are
    answer: AnswerPlace = "auto"
    logged: set[str] = field(default_factory=set)

    def start(self, prompts: Sequence[Prompt]) -> Scoring:
        return Scoring(self, prompts)

    def score(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> list[Sample]:
        return self.start(prompts).results(samples)

    def scored(self, sample: Sample, scores: Mapping[str, Score]) -> Sample:
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
        return sample.without_reward(cause)

    def _log_once(self, cause: str, sample: Sample, effect: str, detail: str) -> None:
        if cause not in self.logged:
            self.logged.add(cause)
            where = f"prompt {sample.prompt_id}, sample {sample.index}"
            log.warning(
                "%s: %s %s: %s (later cases are only counted)", cause, where, effect, redact(detail)
            )


class Scoring:
    """roles.Scoring: slow rewards get samples as they are added, functions all of them at the end."""

    def __init__(self, scorer: Scorer, prompts: Sequence[Prompt]) -> None:
        self._scorer = scorer
        self._prompts = {prompt.prompt_id: prompt for prompt in prompts}
        self._rows: dict[int, int] = {}  # of each sample, by its id()
        self._added: list[Sample] = []
        self._decoded: list[tuple[Sample, ScoreRequest]] = []
        self._workers = {
            reward.name: _Worker(reward) for reward in scorer.rewards if reward.total_s is not None
        }

    def add(self, samples: Sequence[Sample]) -> None:
        new = [self._decode(sample) for sample in samples]
        self._rows |= {id(sample): row for row, sample in enumerate(samples, len(self._added))}
        self._added += samples
        self._decoded += new
        for worker in self._workers.values() if new else ():
            worker.inbox.put([request for _, request in new])

    def results(self, samples: Sequence[Sample]) -> list[Sample]:
        self.add([sample for sample in samples if id(sample) not in self._rows])
        started, order = time.monotonic(), [self._rows[id(sample)] for sample in samples]
        for worker in self._workers.values():
            worker.inbox.put([])
        requests, rewards = [self._decoded[row][1] for row in order], self._scorer.rewards
        scores = {reward.name: reward(requests) for reward in rewards if reward.total_s is None}
        for name, worker in self._workers.items():
            by_row = worker.results(len(self._added), started)
            scores[name] = [by_row[row] for row in order]
            # every sample would be dropped, in the steps to come as well
            if order and all(score.cause in UNREACHABLE for score in scores[name]):
                raise CheckFailed(
                    f"the reward {redact(name)} is gone: {redact(scores[name][0].detail)}; start its server again, and "
                    "the same command resumes"
                )
        return [
            self._scorer.scored(
                self._decoded[row][0],
                {reward.name: scores[reward.name][place] for reward in rewards},
            )
            for place, row in enumerate(order)
        ]

    def _decode(self, sample: Sample) -> tuple[Sample, ScoreRequest]:
        if self._scorer.decode is not None:
            sample = replace(
                sample, text=self._scorer.decode(sample.tokens[sample.trainable].tolist())
            )
        prompt = self._prompts[sample.prompt_id]
        return sample, ScoreRequest(
            id=f"{sample.prompt_id}/{sample.index}",
            prompt=prompt.text,
            response=sample.text,
            answer=prompt.answer,
            final_answer=extract_answer(sample.text, self._scorer.answer),
            tokens=tuple(sample.tokens[sample.trainable].tolist()),
            prompt_tokens=tuple(prompt.tokens),
            finish=sample.finish,
            extra=prompt.extra,
        )


class _Worker:
    """A thread that scores batches, each of them what was handed over during the one before."""

    def __init__(self, reward: BatchReward) -> None:
        self.reward, self.scores = reward, list[Score]()
        self.inbox: SimpleQueue[list[ScoreRequest]] = SimpleQueue()  # an empty list is the end
        self.done = on_daemon_thread(self._run)

    def results(self, count: int, started: float) -> list[Score]:
        """`count` scores, in the order of the inbox; those that are not there `total_s` after `started` have none."""
        limit = self.reward.total_s or 0.0
        try:
            self.done.result(max(started + limit - time.monotonic(), 0))
        except TimeoutError:
            scores = self.scores[:]
            detail = f"did not score {count - len(scores)} samples within {limit:.0f} s"
            return scores + [Score(None, "timeout", detail)] * (count - len(scores))
        return self.scores

    def _run(self) -> None:
        while batch := self.inbox.get():
            is_last = False
            while not is_last and not self.inbox.empty():
                more = self.inbox.get()
                batch, is_last = batch + more, not more
            self.scores += self.reward(batch)
            if is_last:
                return
