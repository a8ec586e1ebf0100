"""The maths, pure functions over flat [T] tensors: each algorithm has one meaning, and takes no backend."""

from megarl.algorithms.advantages import ADVANTAGES, returns
from megarl.algorithms.corrections import CORRECTIONS
from megarl.algorithms.kl import KL
from megarl.algorithms.losses import LOSSES
from megarl.algorithms.reduce import AGGREGATIONS, WEIGHTS
from megarl.algorithms.whitening import Stats, whiten, whiten_stats

__all__ = [
    "ADVANTAGES", "AGGREGATIONS", "CORRECTIONS", "KL", "LOSSES", "WEIGHTS",
    "Stats", "returns", "whiten", "whiten_stats",
]  # fmt: skip
