"""A reward's name in a config becomes what computes it, with its options judged before anything starts.

accuracy, format         --> a function of rules.py
code, judge, process     --> a part of the module of that name
package.module:function  --> the user's
a URL                    --> a server (remote.py)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from difflib import get_close_matches

from megarl.config.schema import Reward
from megarl.data.user_code import import_function, is_dotted
from megarl.rewards.code import make_code
from megarl.rewards.functions import Rule
from megarl.rewards.judge import make_judge
from megarl.rewards.outcome import Part
from megarl.rewards.process import Decode, make_process
from megarl.rewards.remote import make_remote
from megarl.rewards.rules import BUILT_IN

__all__ = ["check_rewards", "make_part"]

PARTS: dict[str, Callable[[Reward], Part]] = {"code": make_code, "judge": make_judge}
NAMES = (*BUILT_IN, *PARTS, "process")


def make_part(reward: Reward, decode: Decode) -> Part | Rule:
    """What computes a reward; `decode` makes text of token ids.

    Raises ValueError with the values and the remedy.
    """
    if reward.name in PARTS:
        return PARTS[reward.name](reward)
    if reward.name == "process":
        return make_process(reward, decode)
    if reward.name in BUILT_IN:
        return Rule.of(BUILT_IN[reward.name], reward.options, name=reward.name)
    if "://" in reward.name:
        return make_remote(reward)
    if is_dotted(reward.name):
        return Rule.of(import_function(reward.name, setting="rewards: name"), reward.options, name=reward.name)
    near = get_close_matches(reward.name, NAMES, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(NAMES)}; or write package.module:function"
    raise ValueError(f"rewards: name={reward.name!r} is unknown; {hint}")


def check_rewards(rewards: Sequence[Reward]) -> None:
    """Every reward can be found, takes its options and is named once; asked before anything starts."""
    names = [reward.name for reward in rewards]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"rewards: name={twice!r} is given twice; add the weights, or wrap one in a function of yours")
    for reward in rewards:
        make_part(reward, lambda tokens: "")
