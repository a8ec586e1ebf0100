"""Scores samples by a weighted sum of named rewards, none of which can block the run forever.

    samples --> requests --+--> functions: in processes, each call under a time limit ----+--> score
                           +--> code, servers, judges: on separate threads, while --------+
                                other samples are still generated

A dropped sample has the reward None, extra["dropped"] = `reward/<name>/<cause>` and
extra["detail"]. extra["counted"] lists the causes of scores with a value. Scoring stops the run in
one case only: no sample could reach a reward's server, despite retries. The run can be resumed.
"""

import logging
import math
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from queue import SimpleQueue

from megarl.config.schema import AnswerPlace, Reward
from megarl.data.thoughts import PROMPT_TOKENS, opened_tag
from megarl.rewards.answers import extract_answer
from megarl.rewards.catalog import make_rewards
from megarl.rewards.interface import UNREACHABLE, BatchReward, Decode, Score, ScoreRequest
from megarl.types import CheckFailed, Prompt, Sample

log = logging.getLogger(__name__)
MAX_DETAIL = 300  # characters of extra["detail"]


def make_scorer(
    rewards: Sequence[Reward],
    *,
    timeout_s: float = 10.0,
    decode: Decode | None = None,
    answer: AnswerPlace = "auto",
) -> "Scorer":
    """Returns the scorer of a config's rewards; `timeout_s` limits one call of a reward function.

    Raises ValueError if a reward or one of its options is wrong.
    """
    return Scorer(make_rewards(rewards, decode, timeout_s), decode, answer)


@dataclass(frozen=True)
class Scorer:
    """Implements roles.Rewards. Logs each cause once, with the first sample that it affects."""

    rewards: Sequence[BatchReward]
    decode: Decode | None = None  # None: use the samples' texts
    answer: AnswerPlace = "auto"
    logged: set[str] = field(default_factory=set)

    def start(self, prompts: Sequence[Prompt]) -> "Scoring":
        return Scoring(self, prompts)

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
        extra = sample.extra
        if counted:
            extra = {**extra, "counted": counted}
        scored = replace(sample, reward=0.0, has_outcome=False, extra=extra)
        for reward in self.rewards:
            scored = with_score(scored, reward.name, reward.weight, scores[reward.name])
        total = scored.reward or 0.0
        if not all(map(math.isfinite, [total, *(value for _, value in scored.step_rewards)])):
            detail = f"weighted sum of {scored.rewards} is {total}"
            return self._dropped(sample, "reward/total/nan", detail)
        return scored

    def _dropped(self, sample: Sample, cause: str, detail: str) -> Sample:
        self._log_once(cause, sample, "is dropped", detail)
        return sample.without_reward(cause, detail[:MAX_DETAIL])

    def _log_once(self, cause: str, sample: Sample, effect: str, detail: str) -> None:
        if cause not in self.logged:
            self.logged.add(cause)
            log.warning(
                f"{cause}: prompt {sample.prompt_id}, sample {sample.index} {effect}: "
                f"{detail} (later cases are only counted)"
            )


def with_score(sample: Sample, name: str, weight: float, score: Score) -> Sample:
    """Returns the sample with another score, which has a value.

    Outcome rewards add up. Without one, the total is that of the means of steps, for display only.
    """
    value = score.value or 0.0
    is_outcome = score.steps is None and weight != 0
    before = sample.reward or 0.0
    total = weight * value + 0.0  # not -0.0
    if sample.has_outcome == is_outcome:
        total += before
    elif sample.has_outcome:
        total = before
    positions = sample.trainable.nonzero().flatten().tolist()
    steps = [(positions[end], weight * step) for end, step in score.steps or ()]
    return replace(
        sample,
        reward=total,
        rewards={**sample.rewards, name: value},
        step_rewards=(*sample.step_rewards, *steps),
        has_outcome=sample.has_outcome or is_outcome,
    )


class Scoring:
    """Implements roles.Scoring: slow rewards get samples when added, functions at the end."""

    def __init__(self, scorer: Scorer, prompts: Sequence[Prompt]) -> None:
        self._scorer = scorer
        self._prompts = {prompt.prompt_id: prompt for prompt in prompts}
        self._requests = {}  # sample.key -> request
        self._workers = {
            reward.name: _Worker(reward) for reward in scorer.rewards if reward.total_s is not None
        }

    def add(self, samples: Sequence[Sample]) -> None:
        new = []
        for sample in samples:
            if sample.key in self._requests:
                continue
            prompt = self._prompts[sample.prompt_id]
            end = prompt.text
            tokens = sample.tokens[sample.trainable].tolist()
            text = sample.text
            if self._scorer.decode is not None:
                end = self._scorer.decode(prompt.tokens[-PROMPT_TOKENS:])
                text = self._scorer.decode(tokens)
            opening = opened_tag(end)
            request = ScoreRequest(
                id=f"{sample.prompt_id}/{sample.index}",
                prompt=prompt.text,
                response=text,
                answer=prompt.answer,
                final_answer=extract_answer(opening + text, self._scorer.answer),
                opening=opening,
                tokens=tuple(tokens),
                prompt_tokens=tuple(prompt.tokens),
                finish=sample.finish,
                extra=prompt.extra,
            )
            self._requests[sample.key] = request
            new.append(request)
        if new:
            for worker in self._workers.values():
                worker.inbox.put(new)

    def results(self, samples: Sequence[Sample]) -> list[Sample]:
        self.add(samples)
        started = time.monotonic()
        for worker in self._workers.values():
            worker.inbox.put([])
        requests = [self._requests[sample.key] for sample in samples]
        rewards = self._scorer.rewards
        scores = {reward.name: reward(requests) for reward in rewards if reward.total_s is None}
        for name, worker in self._workers.items():
            scores[name] = worker.results(requests, started)
            # otherwise every sample of this and later steps would be dropped
            if samples and all(score.cause in UNREACHABLE for score in scores[name]):
                raise CheckFailed(
                    f"the reward {name} is gone: {scores[name][0].detail}; "
                    "start its server again, and the same command resumes"
                )
        results = []
        for row, (sample, request) in enumerate(zip(samples, requests, strict=True)):
            by_name = {reward.name: scores[reward.name][row] for reward in rewards}
            results.append(self._scorer.scored(replace(sample, text=request.response), by_name))
        return results


class _Worker:
    """A thread that scores batches: the requests that arrived while it scored the last batch."""

    def __init__(self, reward: BatchReward) -> None:
        self.reward = reward
        self.scores = {}  # request.id -> score
        self.inbox = SimpleQueue[list[ScoreRequest]]()  # an empty list ends the thread
        self.thread = threading.Thread(target=self._run, daemon=True)  # a reward may never return
        self.thread.start()

    def results(self, requests: Sequence[ScoreRequest], started: float) -> list[Score]:
        """Returns the scores of `requests`, waiting until `total_s` after `started`.

        Requests without a score by then get a score without a value, of cause `timeout`.
        """
        limit = self.reward.total_s or 0.0
        self.thread.join(max(started + limit - time.monotonic(), 0))
        scores = self.scores.copy()
        num_late = sum(request.id not in scores for request in requests)
        late = Score(None, "timeout", f"did not score {num_late} samples within {limit:.0f} s")
        return [scores.get(request.id, late) for request in requests]

    def _run(self) -> None:
        while batch := self.inbox.get():
            is_last = False
            while not is_last and not self.inbox.empty():
                more = self.inbox.get()
                batch = batch + more
                is_last = not more
            ids = [request.id for request in batch]
            self.scores |= zip(ids, self.reward(batch), strict=False)
            if is_last:
                return
