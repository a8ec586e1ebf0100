"""The built-in rewards: text or tokens -> float.

accuracy: final answer --equal text or number--> 1
                       --else--> the task's own judge, or math-verify, in its own process --> 0 to 1
"""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from megarl.data.task_judge import TaskJudge, judge_answers
from megarl.data.thoughts import is_thought_and_answer
from megarl.data.user_code import Alarm, alarm
from megarl.jail.judging import JudgePool
from megarl.jail.workers import TimeLimitExceeded
from megarl.rewards.interface import Score, ScoreError, ScoreRequest, try_score
from megarl.rewards.maths import compare, texts_of
from megarl.rewards.reading import BALANCED

MATHS = JudgePool("megarl.rewards.maths:make_judge", "megarl.rewards.maths:import_math_verify")
PARSER = "antlr4-python3-runtime"
MAX_NAME = 24  # characters before the \boxed{} of a reference, as "x = "


@cache
def check_math_verify() -> None:
    """Raises ValueError if math-verify misreads with the parser that is installed, by trying it.

    Of the three versions that it takes, 4.9.3, which omegaconf asks for, reads no 50\\%.
    """
    installed = "not installed"
    with suppress(PackageNotFoundError):
        installed = version(PARSER)
    if installed == "4.13.2":  # that of the tests
        return
    half = ("\\frac{1}{2}", "50\\%", "0.5")
    (verdict,) = MATHS.judge(None, [([half],)], timeout_s=60.0)
    if verdict.value != 1.0:
        raise ValueError(
            f"rewards: name='accuracy': math-verify misreads 50\\% ({PARSER} is {installed}; "
            f"{verdict.detail or 'hydra-core and omegaconf install 4.9.3'}); "
            f"pip install {PARSER}==4.13.2, in an environment without them"
        )


@dataclass(frozen=True)
class Accuracy:
    """The result of the task's own judge, or 1 if the final answer equals the reference.

    They are compared as text and as mathematics (maths.py); of a list of references, one must be
    equal. A response scores 0 without a final answer, or if its judge raises an error, runs out of
    memory, or takes more than `timeout_s` CPU seconds. A `score` that is not callable is a column
    of the task's file, and is ignored.
    """

    timeout_s: float = 10.0

    def __call__(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        scores = [Score(0.0)] * len(requests)
        # by row
        judged = {}
        maths = {}
        for row, request in enumerate(requests):
            text = request.final_answer
            judge = request.extra.get("score")
            if text is None:
                scores[row] = Score(
                    0.0, "no_answer", "there is nothing at the place that task.answer names"
                )
            elif isinstance(judge, TaskJudge):
                judged[row] = (judge, text)
            elif callable(judge):  # the user's own
                scores[row] = try_score(self._call, judge, text)
            else:
                try:
                    self.check(request.answer, {})
                    result = compare(text, request.answer)
                except ScoreError as error:
                    scores[row] = Score(None, error.cause, str(error))
                    continue
                if isinstance(result, bool):
                    scores[row] = Score(float(result))
                else:
                    maths[row] = (result,)
        verdicts = judge_answers([*judged.values()], timeout_s=self.timeout_s)
        verdicts += MATHS.judge(None, [*maths.values()], timeout_s=self.timeout_s)
        for row, verdict in zip([*judged, *maths], verdicts, strict=True):
            scores[row] = Score(verdict.value, verdict.cause, verdict.detail)
        return scores

    def check(self, answer: object, extra: Mapping[str, Any]) -> None:
        """Raises ScoreError for a problem that cannot be scored."""
        texts = [] if callable(extra.get("score")) else texts_of(answer)
        for text in texts:
            if "\\" in text and not re.fullmatch(BALANCED, re.sub(r"\\[{}]", "", text)):
                raise ScoreError(
                    "error",
                    f"the answer {text[-40:]!r} has a brace without its other; change "
                    "task.options.answer_pattern, or write the answer alone",
                )
            if text.find("#### ") > 0 or text.find("\\boxed") > MAX_NAME:
                raise ScoreError(
                    "error",
                    f"the answer is a whole solution, {text[-40:]!r}, which no final answer "
                    "equals; set task.options.answer_pattern, for example to '#### (.+)' or "
                    r"'\\boxed\{(.+)\}', or write the answer alone",
                )

    def _call(self, judge: Callable[[str], float], text: str) -> Score:
        try:
            with alarm(self.timeout_s):
                return Score(float(judge(text)))
        except Alarm:
            raise TimeLimitExceeded(self.timeout_s) from None


def format_think(*, response: str, opening: str = "") -> float:
    """Returns 1 if the response is one <think>...</think> followed by an answer, else 0.

    `opening` is the tag that the prompt has opened, if any.
    """
    return float(is_thought_and_answer(opening + response))


def even_fraction(*, tokens: Sequence[int]) -> float:
    """Returns the share of even ids among the response's tokens; random models vary in it."""
    return sum(token % 2 == 0 for token in tokens) / max(len(tokens), 1)


BUILT_IN = {"format": f"{__name__}:format_think"}
