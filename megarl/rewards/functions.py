"""Functions as rewards.

``f(prompt, response, answer, final_answer, tokens, finish, opening, **extra) -> float``: `answer`
is the reference, `final_answer` the part of the response to compare with it (None if there is
nothing at the place `task.answer`), `tokens` the response's ids, `finish` stop or length, `opening`
the tag, as <think>, of thoughts that the prompt has opened ("" if none), and `extra` the reward's
options and the problem's other fields (among them a function `score`, if the task judges answers
itself). A function may leave out any argument; one that it demands must be among these. It may also
return a dictionary whose `score` is the reward.
"""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from megarl.config.section import check_options
from megarl.rewards.interface import Score, ScoreError, ScoreRequest, try_score
from megarl.rewards.time_limit import call_with_time_limit

SUPPLIED = [*ScoreRequest("", "", "").arguments()]  # for each sample
# not accepted as options
ARGUMENTS = {*SUPPLIED, "score", "steps"}
UNUSABLE = (
    inspect.isclass,
    inspect.iscoroutinefunction,
    inspect.isasyncgenfunction,
    inspect.isgeneratorfunction,
)
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass
class FunctionReward:
    """Scores a batch on the calling thread, sample by sample; `timeout_s` limits one call.

    Raises ValueError, naming the reward, for an option that the function does not take, and for
    functions that return no number when they are called: of coroutines, generators or objects.
    """

    function: Callable[..., Any]
    options: Mapping[str, Any]
    name: str
    timeout_s: float
    context: Collection[str] = ()  # further arguments of `call`

    def __post_init__(self) -> None:
        try:
            parameters = inspect.signature(self.function).parameters.values()
        except (TypeError, ValueError):  # some callables written in C have no signature
            parameters = ()
        for kind in UNUSABLE:
            if kind(self.function) or kind(type(self.function).__call__):
                raise ValueError(
                    f"rewards: name={self.name!r} is not a plain function ({kind.__name__}); "
                    "name one that returns a number"
                )
        self.required = {
            f"{p.name}{' by position' * (p.kind is p.POSITIONAL_ONLY)}"
            for p in parameters
            if p.default is p.empty and p.kind not in VARIADIC
        }
        self.accepted = None  # names of the function's arguments; None: any keyword
        if parameters and not any(p.kind is p.VAR_KEYWORD for p in parameters):
            self.accepted = {p.name for p in parameters}
            check_options(
                f"rewards: name={self.name!r}", self.options, sorted(self.accepted - ARGUMENTS)
            )

    def __call__(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        return [try_score(self._score, request) for request in requests]

    def _score(self, request: ScoreRequest) -> Score:
        result = self.call(request)
        if isinstance(result, Mapping):
            result = result["score"]
        return Score(float(result))

    def check(self, answer: str | None, extra: Mapping[str, Any]) -> None:
        """Raises ScoreError if the function demands what no sample of a problem has."""
        known = [*SUPPLIED, *self.context, *extra, *self.options]
        missing = sorted(self.required.difference(known))
        if missing:
            there = f"there are {', '.join(known)}"
            raise ScoreError("signature", f"it demands {', '.join(missing)}, but {there}")

    def call(self, request: ScoreRequest, **context: Any) -> Any:
        """Returns the function's result.

        Raises ScoreError if it takes too long, and the function's own errors.
        """
        arguments = {**request.arguments(), **context, **self.options}
        if self.accepted is not None:
            arguments = {name: arguments[name] for name in self.accepted if name in arguments}
        return call_with_time_limit(partial(self.function, **arguments), timeout_s=self.timeout_s)
