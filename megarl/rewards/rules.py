"""Rewards that are rules: text or tokens -> float. No torch, and heavy parsers only when they are first needed.

A reward is a function ``f(prompt, response, answer, tokens, finish, **extra) -> float`` that may leave out any
argument it does not need: `prompt` and `response` are texts, `answer` is the task's, `tokens` are the response's
ids, `finish` is stop or length; `extra` is what the task says of the problem (at `score` a function, where the
task judges answers itself) and the reward's own options.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Any

from megarl.config.schema import Reward
from megarl.data.user_code import import_function, is_dotted

__all__ = [
    "BUILT_IN", "accuracy", "check_rewards", "even_fraction", "final_answer", "format_think", "reward_function",
    "taken_by",
]  # fmt: skip

ARGUMENTS = frozenset(("prompt", "response", "answer", "tokens", "finish", "score"))  # no options: the loop gives them


def accuracy(*, response: str, answer: str | None, score: Callable[[str], float] | None = None) -> float:
    """The task's own scorer where it has one; else 1 when the final answer is the reference, as text or as maths.

    A `score` that cannot be called is no scorer but a column of the task's file, and is not looked at.
    """
    given = final_answer(response)
    if callable(score):
        return float(score(given))
    if answer is None:
        raise ValueError("the problem has no answer to compare with")
    return float(_normal(given) == _normal(answer) or _equal_maths(given, answer))


def format_think(*, response: str) -> float:
    """1 when the response is one <think>...</think> and then an answer, else 0."""
    once = response.count("<think>") == 1 and response.count("</think>") == 1
    return float(once and re.fullmatch(r"\s*<think>.*</think>.*\S.*", response, re.DOTALL) is not None)


def even_fraction(*, tokens: Sequence[int]) -> float:
    """The share of even ids among the response's tokens: a pure function of them, for models that know nothing."""
    return sum(token % 2 == 0 for token in tokens) / max(len(tokens), 1)


def final_answer(response: str) -> str:
    """What follows the thinking; of that, the last <answer>...</answer> or \\boxed{...} where there is one."""
    text = response.rpartition("</think>")[2]
    if tagged := re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL):
        return tagged[-1].strip()
    return (_boxed(text) or text).strip()


def _boxed(text: str) -> str | None:
    """The inside of the last \\boxed{...} whose braces balance."""
    start = text.rfind("\\boxed{")
    while start >= 0:
        depth, begin = 0, start + len("\\boxed")
        for place in range(begin, len(text)):
            depth += (text[place] == "{") - (text[place] == "}")
            if depth == 0:
                return text[begin + 1 : place]
        start = text.rfind("\\boxed{", 0, start)
    return None


def _normal(text: str) -> str:
    return " ".join(text.split()).rstrip(".")


def _equal_maths(given: str, answer: str) -> bool:
    import math_verify

    # its own time limits want the process's one alarm, which the scorer holds for the whole sample
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # and it warns of that at every call
    gold, target = (math_verify.parse(f"\\boxed{{{text}}}", parsing_timeout=0) for text in (answer, given))
    return bool(math_verify.verify(gold, target, timeout_seconds=None))


BUILT_IN: dict[str, Callable[..., float]] = {"accuracy": accuracy, "format": format_think}


def reward_function(reward: Reward) -> Callable[..., float]:
    """The function a reward's name stands for.

    Raises ValueError with the values and the remedy.
    """
    if reward.name in BUILT_IN:
        return BUILT_IN[reward.name]
    if "://" in reward.name:
        raise ValueError(f"rewards: name={reward.name!r} is a URL, which this version cannot call; give a function")
    if is_dotted(reward.name):
        return import_function(reward.name, setting="rewards: name")
    near = get_close_matches(reward.name, BUILT_IN, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(BUILT_IN)}; or write package.module:function"
    raise ValueError(f"rewards: name={reward.name!r} is unknown; {hint}")


def taken_by(function: Callable[..., Any]) -> frozenset[str] | None:
    """The names of the arguments a function takes; None: any."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some callables written in C tell nothing
        return None
    takes_any = not parameters or any(p.kind is p.VAR_KEYWORD for p in parameters)
    return None if takes_any else frozenset(p.name for p in parameters)


def check_rewards(rewards: Sequence[Reward]) -> None:
    """Every reward can be found, takes its options and is named once; asked before anything starts."""
    for reward in rewards:
        _check_options(reward, taken_by(reward_function(reward)))
    names = [reward.name for reward in rewards]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"rewards: name={twice!r} is given twice; add the weights, or wrap one in a function of yours")


def _check_options(reward: Reward, takes: frozenset[str] | None) -> None:
    if takes is None:
        return
    known = sorted(takes - ARGUMENTS)
    if unknown := next((name for name in reward.options if name not in known), None):
        near = get_close_matches(unknown, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"it takes {', '.join(known) or 'none'}; remove it"
        raise ValueError(f"rewards: name={reward.name!r} has no option {unknown!r}; {hint}")
