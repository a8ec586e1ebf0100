"""Functions as rewards.

``f(prompt, response, answer, final_answer, tokens, finish, opening, **extra) -> float``: `answer`
is the reference, `final_answer` the part of the response to compare with it (None if there is
nothing at the place `task.answer`), `tokens` the response's ids, `finish` stop or length, `opening`
the tag, as <think>, of thoughts that the prompt has opened ("" if none), and `extra` the reward's
options and the problem's other fields (among them a function `score`, if the task judges answers
itself). A function may leave out any argument.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from megarl.rewards.interface import Score, ScoreRequest, check_options, try_score
from megarl.rewards.time_limit import call_with_time_limit

# supplied for each sample, hence not accepted as options
ARGUMENTS = {
    *("prompt", "response", "answer", "final_answer", "tokens", "finish", "opening"),
    *("score", "steps"),
}


@dataclass
class FunctionReward:
    """Scores a batch on the calling thread, sample by sample; `timeout_s` limits one call.

    Raises ValueError, naming the reward, for an option that the function does not take.
    """

    function: Callable[..., Any]
    options: Mapping[str, Any]
    name: str
    timeout_s: float

    def __post_init__(self) -> None:
        try:
            parameters = inspect.signature(self.function).parameters.values()
        except (TypeError, ValueError):  # some callables written in C have no signature
            parameters = ()
        self.accepted = None  # names of the function's arguments; None: any keyword
        if parameters and not any(p.kind is p.VAR_KEYWORD for p in parameters):
            self.accepted = {p.name for p in parameters}
            check_options(self.name, self.options, sorted(self.accepted - ARGUMENTS))

    def __call__(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        return [try_score(self._score, request) for request in requests]

    def _score(self, request: ScoreRequest) -> Score:
        result = self.call(request)
        if isinstance(result, Score):
            return result
        return Score(float(result))

    def call(self, request: ScoreRequest, **context: Any) -> Any:
        """Returns the function's result.

        Raises ScoreError if it takes too long, and the function's own errors.
        """
        arguments = {**request.arguments(), **context, **self.options}
        if self.accepted is not None:
            arguments = {name: arguments[name] for name in self.accepted if name in arguments}
        return call_with_time_limit(partial(self.function, **arguments), timeout_s=self.timeout_s)
