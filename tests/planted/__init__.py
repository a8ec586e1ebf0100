"""Mistakes that tests/mutants.py plants: (file below megarl/, source text, replacement, test below tests/)."""

from planted.algorithms import ALGORITHMS
from planted.batches import BATCHES
from planted.gpu import GPU
from planted.judging import JUDGED
from planted.models import MODELS
from planted.system import SYSTEM
from planted.trainer import TRAINER

__all__ = ["MUTANTS", "SMALLEST"]

MUTANTS = [*ALGORITHMS, *BATCHES, *GPU, *JUDGED, *MODELS, *SYSTEM, *TRAINER]
SMALLEST = [*ALGORITHMS[:4], *BATCHES[:4], *SYSTEM[:3]]
