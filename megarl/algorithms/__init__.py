"""The maths of RL: pure functions of flat [T] tensors, independent of any backend."""

from megarl.algorithms.advantages import ADVANTAGES, returns
from megarl.algorithms.aggregation import AGGREGATIONS, WEIGHTS
from megarl.algorithms.corrections import CORRECTIONS
from megarl.algorithms.kl import KL
from megarl.algorithms.losses import LOSSES, SELECT, VALUE_LOSSES
from megarl.algorithms.whitening import Stats, whiten, whiten_stats

__all__ = [
    "ADVANTAGES",
    "AGGREGATIONS",
    "CORRECTIONS",
    "KL",
    "LOSSES",
    "SELECT",
    "VALUE_LOSSES",
    "WEIGHTS",
    "Stats",
    "returns",
    "whiten",
    "whiten_stats",
]
