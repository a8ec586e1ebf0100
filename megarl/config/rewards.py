"""Section `rewards`: the rewards of a sample, and its check."""

from megarl.config.section import Config, Options, Section


class Reward(Section):
    """One reward. The reward of a sample is the weighted sum of all rewards."""

    name: str
    """accuracy, format, code, judge, process or model; a URL; or the dotted path of a function."""
    weight: float = 1.0
    """Weight in the sum; 0: the reward is recorded but not trained on."""
    options: Options = {}
    """Options of this reward."""


def has_weight(rewards: tuple[Reward, ...]) -> bool:
    return any(reward.weight for reward in rewards)


def check_rewards(config: Config) -> None:
    """Raises ValueError if no reward has a weight and there is no distillation."""
    if not has_weight(config.rewards) and not config.algorithm.distill_coef:
        raise ValueError(
            "rewards is empty, or every weight is 0; add one, e.g. rewards: [{name: accuracy}]"
        )
