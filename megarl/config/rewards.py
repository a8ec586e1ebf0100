"""`rewards`: what scores a sample."""

from megarl.config.section import Config, Options, Section


class Reward(Section):
    """One reward; a sample's reward is the weighted sum of all."""

    name: str
    """accuracy, format, code, judge, process or model; a URL; or the dotted path of a function."""
    weight: float = 1.0
    """Factor in the sum; 0 measures a reward without training on it."""
    options: Options = {}
    """Settings of this kind of reward."""


def has_weight(rewards: tuple[Reward, ...]) -> bool:
    return any(reward.weight for reward in rewards)


def check_rewards(config: Config) -> None:
    """Raises ValueError if nothing scores the samples, and no teacher does."""
    if not has_weight(config.rewards) and not config.algorithm.distill_coef:
        raise ValueError(
            "rewards is empty, or every weight is 0; add one, e.g. rewards: [{name: accuracy}]"
        )
