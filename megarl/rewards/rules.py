"""The built-in rewards: text or tokens -> float.

accuracy: final answer --equal text or number--> 1
                       --else--> the task's own judge, or math-verify, in its own process --> 0 to 1
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from megarl.data.task_judge import TaskJudge, judge_answers
from megarl.jail.judging import JudgePool
from megarl.rewards.interface import Score, ScoreError, ScoreRequest, try_score
from megarl.rewards.maths import compare
from megarl.rewards.time_limit import call_with_time_limit

MATHS = JudgePool("megarl.rewards.maths:make_judge", "megarl.rewards.maths:import_math_verify")


@dataclass(frozen=True)
class Accuracy:
    """The result of the task's own judge, or 1 if the final answer equals the reference.

    They are compared as text and as mathematics. A response scores 0 without a final answer, or if
    its judge raises an error, runs out of memory, or takes more than `timeout_s` CPU seconds. A
    `score` that is not callable is a column of the task's file, and is ignored.
    """

    timeout_s: float = 10.0

    def __call__(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        scores = [Score(0.0)] * len(requests)
        # by row
        judged = {}
        maths = {}
        for row, request in enumerate(requests):
            text = request.final_answer
            answer = request.answer
            judge = request.extra.get("score")
            if text is None:
                scores[row] = Score(
                    0.0, "no_answer", "there is nothing at the place that task.answer names"
                )
            elif isinstance(judge, TaskJudge):
                judged[row] = (judge, text)
            elif callable(judge):  # the user's own
                scores[row] = try_score(self._call, judge, text)
            elif answer is None:
                scores[row] = Score(None, "error", "the problem has no answer to compare with")
            elif isinstance(equal := compare(text, answer), bool):
                scores[row] = Score(float(equal))
            else:
                maths[row] = (equal, answer)
        verdicts = judge_answers([*judged.values()], timeout_s=self.timeout_s)
        verdicts += MATHS.judge(None, [*maths.values()], timeout_s=self.timeout_s)
        for row, verdict in zip([*judged, *maths], verdicts, strict=True):
            scores[row] = Score(verdict.value, verdict.cause, verdict.detail)
        return scores

    def check(self, answer: str | None, extra: Mapping[str, Any]) -> None:
        """Raises ScoreError if there is nothing to compare an answer with."""
        if answer is None and not callable(extra.get("score")):
            raise ScoreError("error", "the problem has no answer to compare with")

    def _call(self, judge: Callable[[str], float], text: str) -> Score:
        return Score(float(call_with_time_limit(partial(judge, text), timeout_s=self.timeout_s)))


def format_think(*, response: str) -> float:
    """Returns 1 if the response is one <think>...</think> followed by an answer, else 0."""
    before, opened, rest = response.partition("<think>")
    _, closed, after = rest.partition("</think>")
    return float(
        bool(opened and closed)
        and "<think>" not in rest
        and "</think>" not in after
        and not before.strip()
        and bool(after.strip())
    )


def even_fraction(*, tokens: Sequence[int]) -> float:
    """Returns the share of even ids among the response's tokens; random models vary in it."""
    return sum(token % 2 == 0 for token in tokens) / max(len(tokens), 1)


BUILT_IN: dict[str, Callable[..., float | Score]] = {"format": format_think}
