"""The built-in rewards: text or tokens -> float.

accuracy: final answer --the task has a judge--> the judge's score, 0 to 1
                       --decided by maths.py---> 0 or 1
                       --undecided-------------> math-verify, in a separate process --> 0 or 1
"""

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from megarl.data.rows import Fields
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
MAX_NAME = 24  # most characters before the \boxed{} of a reference, for example "x = "


@cache
def check_math_verify() -> None:
    """Raises ValueError if math-verify misreads mathematics with the installed antlr4 runtime.

    math-verify accepts three versions of it. One, 4.9.3, which omegaconf requires, misreads 50\\%,
    so the check parses an example with any version but the tested one.
    """
    installed = "not installed"
    with suppress(PackageNotFoundError):
        installed = version(PARSER)
    if installed == "4.13.2":  # the tested version
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
    """Scores the final answer with the task's own judge; without one, 1 if it equals the reference.

    Answer and reference are compared as text and as mathematics (maths.py); the answer must equal
    one of a list of references. A response scores 0 if it has no final answer, or if the judge
    raises an error, runs out of memory, or takes more than `timeout_s` CPU seconds. A `score` that
    is not callable is a column of the task's file, and is ignored.
    """

    timeout_s: float = 10.0

    def __call__(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        scores = [Score(0.0)] * len(requests)
        # row -> arguments of the judge
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
            elif callable(judge):  # a user's function
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

    def check(self, answer: object, extra: Fields) -> None:
        """Raises ScoreError if the problem has no usable reference.

        That is, if the reference is not a text, a number or a list, has an unbalanced brace, or is
        a whole solution. Problems with a judge are not checked.
        """
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
    """Returns 1.0 if the response is one <think>...</think> followed by an answer, else 0.0.

    `opening` is the tag of thoughts that the prompt opens, if any.
    """
    return float(is_thought_and_answer(opening + response))


def even_fraction(*, tokens: Sequence[int]) -> float:
    """Returns the share of even ids among the response's tokens, which varies for random models."""
    return sum(token % 2 == 0 for token in tokens) / max(len(tokens), 1)


BUILT_IN = {"format": f"{__name__}:format_think"}
