"""A function as a reward: it is called with what it names of a sample, and with its own options.

``f(prompt, response, answer, tokens, finish, **extra)``: texts, the response's token ids, stop or length; `extra` is
what the task says of the problem (at `score` a function, where the task judges answers itself).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megarl.rewards.outcome import Case, unknown_option

__all__ = ["Rule", "taken_by"]

ARGUMENTS = frozenset(("prompt", "response", "answer", "tokens", "finish", "score", "steps"))  # no options: the loop
# gives them


@dataclass(frozen=True, slots=True)
class Rule:
    function: Callable[..., Any]
    takes: frozenset[str] | None  # None: any keyword
    options: Mapping[str, Any]

    @classmethod
    def of(cls, function: Callable[..., Any], options: Mapping[str, Any], *, name: str) -> Rule:
        """Raises ValueError for an option the function does not take; `name` is the reward's."""
        takes = taken_by(function)
        if takes is not None:
            known = sorted(takes - ARGUMENTS)
            if unknown := next((option for option in options if option not in known), None):
                raise unknown_option(name, unknown, known)
        return cls(function, takes, options)

    def arguments(self, case: Case, **more: Any) -> dict[str, Any]:
        known = {**case.arguments(), **more, **self.options}
        return known if self.takes is None else {name: known[name] for name in self.takes if name in known}


def taken_by(function: Callable[..., Any]) -> frozenset[str] | None:
    """The names of the arguments a function takes; None: any."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some callables written in C tell nothing
        return None
    takes_any = not parameters or any(p.kind is p.VAR_KEYWORD for p in parameters)
    return None if takes_any else frozenset(p.name for p in parameters)
