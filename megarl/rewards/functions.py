"""Calls Python functions as rewards.

``f(prompt, response, answer, final_answer, tokens, finish, opening, **extra) -> float``

`answer` is the reference; `final_answer` is the part of the response to compare with the reference
(None if the response has nothing where `task.answer` looks). `tokens` are the response's token ids,
and `finish` is "stop" or "length". `opening` is the tag, for example <think>, of thoughts that the
prompt opens ("" if none). `extra` has the reward's options and the problem's other fields (among
them a function `score`, if the task judges answers itself). A function may omit any of these
parameters and must not require any other. It may also return a dictionary whose `score` is the
reward.

The functions of a module are called one at a time in a separate process (jail/workers.py). The
process keeps their state until a call times out or ends the process. It receives copies of the
arguments and shares nothing with the run's process: no process group, no tracker, no state that a
task has left in a module.
"""

import inspect
import pickle
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megarl.config.section import check_options
from megarl.data.rows import Fields
from megarl.data.user_code import import_function
from megarl.jail.workers import worker_of
from megarl.platform.env import clean_logs
from megarl.rewards.interface import Score, ScoreError, ScoreRequest, try_score

SUPPLIED = [*ScoreRequest("", "", "").arguments()]  # arguments available for every sample
# names of arguments, which cannot be options
ARGUMENTS = {*SUPPLIED, "score", "steps"}
UNUSABLE = (
    inspect.isclass,
    inspect.iscoroutinefunction,
    inspect.isasyncgenfunction,
    inspect.isgeneratorfunction,
)
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _call(path: str, arguments: Fields) -> Any:
    """Calls the function at `path`; runs in the module's process."""
    clean_logs()
    return import_function(path, setting="")(**arguments)


@dataclass
class FunctionReward:
    """Scores a batch by calling a function for each sample; `timeout_s` limits one call.

    Raises ValueError, naming the reward, for an option that the function does not take, and for
    coroutine functions, generator functions and classes, whose calls return no number.
    """

    path: str
    options: Fields
    setting: str  # config key of the path, for errors
    name: str
    timeout_s: float
    context: Collection[str] = ()  # names of the keyword arguments that `call` adds

    def __post_init__(self) -> None:
        function = import_function(self.path, setting=self.setting)
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError):  # some callables written in C have no signature
            parameters = ()
        for kind in UNUSABLE:
            if kind(function) or kind(type(function).__call__):
                raise ValueError(
                    f"rewards: name={self.name!r} is not a plain function ({kind.__name__}); "
                    "name one that returns a number"
                )
        self.required = {
            f"{p.name}{' by position' * (p.kind is p.POSITIONAL_ONLY)}"
            for p in parameters
            if p.default is p.empty and p.kind not in VARIADIC
        }
        self.accepted = None  # names of the function's parameters; None: any keyword
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

    def check(self, answer: str | None, extra: Fields) -> None:
        """Raises ScoreError if the function requires an argument that the problem's samples do not
        have, or takes a field that cannot be sent to its process.
        """
        known = [*SUPPLIED, *self.context, *extra, *self.options]
        missing = sorted(self.required.difference(known))
        if missing:
            there = f"there are {', '.join(known)}"
            raise ScoreError("signature", f"it demands {', '.join(missing)}, but {there}")
        try:
            pickle.dumps(self._accept(extra))
        except Exception as error:  # noqa: BLE001 (pickling runs code of the values)
            raise ScoreError(
                "signature", f"a field cannot be sent to the function's process: {error}"
            ) from None

    def call(self, request: ScoreRequest, **context: Any) -> Any:
        """Returns the function's result.

        Raises CallError if the function takes too long or raises an error.
        """
        arguments = self._accept({**request.arguments(), **context, **self.options})
        worker = worker_of(self.path.rpartition(":" if ":" in self.path else ".")[0])
        return worker.call(_call, self.path, arguments, timeout_s=self.timeout_s)

    def _accept(self, arguments: Fields) -> dict[str, Any]:
        return {
            name: value
            for name, value in arguments.items()
            if self.accepted is None or name in self.accepted
        }
