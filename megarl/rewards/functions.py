"""Functions as rewards.

``f(prompt, response, answer, final_answer, tokens, finish, **extra) -> float``: `answer` is the reference,
`final_answer` the part of the response to compare with it (None if there is nothing at the place `task.answer`),
`tokens` the response's ids, `finish` stop or length, and `extra` the reward's options and the problem's other fields
(among them a function `score`, if the task judges answers itself). A function may leave out any argument.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from megarl.rewards.interface import Score, ScoreRequest, check_options, try_score
from megarl.rewards.time_limit import call_with_time_limit

# supplied for each sample, hence not accepted as options
ARGUMENTS = frozenset(
    ("prompt", "response", "answer", "final_answer", "tokens", "finish", "score", "steps")
)


@dataclass(frozen=True, slots=True)
class FunctionReward:
    """Scores a batch on the calling thread, sample by sample."""

    function: Callable[..., Any]
    accepted: frozenset[str] | None  # names of the function's arguments; None: any keyword
    options: Mapping[str, Any]
    timeout_s: float  # of one call

    @classmethod
    def of(
        cls,
        function: Callable[..., Any],
        options: Mapping[str, Any],
        *,
        name: str,
        timeout_s: float,
    ) -> Self:
        """Raises ValueError, naming the reward `name`, for an option that the function does not take."""
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError):  # some callables written in C have no signature
            parameters = ()
        accepted = None
        if parameters and not any(p.kind is p.VAR_KEYWORD for p in parameters):
            accepted = frozenset(p.name for p in parameters)
            check_options(name, options, sorted(accepted - ARGUMENTS))
        return cls(function, accepted, options, timeout_s)

    def __call__(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        return [try_score(self._score, request) for request in requests]

    def _score(self, request: ScoreRequest) -> Score:
        result = self.call(request)
        return result if isinstance(result, Score) else Score(float(result))

    def call(self, request: ScoreRequest, **context: Any) -> Any:
        """Returns the function's result. Raises ScoreError if it takes too long, and the function's own errors."""
        arguments = {**request.arguments(), **context, **self.options}
        if self.accepted is not None:
            arguments = {name: arguments[name] for name in self.accepted if name in arguments}
        return call_with_time_limit(self.function, arguments, timeout_s=self.timeout_s)
