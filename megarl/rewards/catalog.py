"""Resolves the rewards of a config by name and checks their options, before anything starts.

accuracy                 --> rules.py, with judges in separate processes
format                   --> a function of rules.py
code, judge, process     --> the module of that name
model                    --> model.py, which runs after the scorer, once all ranks have all samples
package.module:function  --> the user's function
a URL                    --> a server (remote.py)
"""

from collections.abc import Callable, Iterator, Sequence

from megarl.config.schema import Reward
from megarl.config.section import Section, did_you_mean
from megarl.data.tasks import Source
from megarl.data.user_code import is_dotted
from megarl.rewards.code import make_code
from megarl.rewards.functions import FunctionReward
from megarl.rewards.interface import BatchReward, Decode, ScoreError, parse_options
from megarl.rewards.judge import make_judge
from megarl.rewards.process import Splitter, make_process
from megarl.rewards.remote import make_remote
from megarl.rewards.rules import BUILT_IN, Accuracy, check_math_verify

MAX_CHECKED = 1000  # problems checked per source
NAMES = ("accuracy", *BUILT_IN, "code", "judge", "process", "model")


class ModelOptions(Section):
    # None: start from the policy's weights and a zero head (stage iterative_grpo trains both)
    path: str | None = None
    splitter: Splitter = "paragraph"  # for a process reward model


def make_rewards(
    rewards: Sequence[Reward], decode: Decode | None = None, timeout_s: float = 10.0
) -> list[BatchReward]:
    """Returns the scorer's rewards.

    `timeout_s` limits one call of a reward function; process rewards need `decode`. The options of
    `model` are checked, but it is not returned. Raises ValueError if a reward is unknown, rejects
    its options or is listed twice.
    """
    names = [reward.name for reward in rewards]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(
                f"rewards: name={name!r} is listed twice; "
                "combine the weights, or wrap one in a function"
            )
    for reward in rewards:
        if reward.name == "model":
            parse_options(ModelOptions, reward)
    return [_make_reward(reward, decode, timeout_s) for reward in rewards if reward.name != "model"]


def _make_reward(reward: Reward, decode: Decode | None, timeout_s: float) -> BatchReward:
    name = reward.name
    if name == "code":
        return make_code(reward)
    if name == "judge":
        return make_judge(reward)
    if name == "accuracy":
        parse_options(Section, reward)  # accuracy has no options
        check_math_verify()
        accuracy = Accuracy(timeout_s)
        return BatchReward(name, reward.weight, accuracy, check=accuracy.check)
    if name == "process":
        return make_process(reward, decode or (lambda tokens: ""))
    if "://" in name:
        return make_remote(reward)
    if name in BUILT_IN or is_dotted(name):
        path = BUILT_IN.get(name, name)
        score = FunctionReward(path, reward.options, "rewards: name", name, timeout_s)
        return BatchReward(name, reward.weight, score, check=score.check)
    remedy = did_you_mean(
        name, NAMES, f"choose from {', '.join(NAMES)}, or write package.module:function"
    )
    raise ValueError(f"rewards: name={name!r} is unknown; {remedy}")


def check_problems(
    rewards: Sequence[BatchReward], load: Callable[[], Sequence[Source]]
) -> Iterator[str]:
    """Yields a warning for each reward and source with problems that the reward cannot score.

    Only the first 1,000 problems of a source are checked. Raises ValueError if a reward can score
    none of them.
    """
    checks = [(reward.name, reward.check) for reward in rewards if reward.check]
    if not checks:
        return
    for source in load():
        problems = [source.problem(n) for n in range(min(source.size or 1, MAX_CHECKED))]
        for name, check in checks:
            refused = []
            for problem in problems:
                try:
                    check(problem.answer, problem.extra)
                except ScoreError as error:
                    refused.append(f"{problem.where}: {error.cause}: {error}")
            if not refused:
                continue
            summary = (
                f"rewards: name={name!r} cannot score {len(refused)} of {len(problems)} problems; "
                f"{refused[0]}"
            )
            if len(refused) == len(problems):
                raise ValueError(f"{summary}; correct them, or choose another reward")
            yield f"{summary}; their samples are left out"
