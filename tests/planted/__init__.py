"""Mistakes that tests/mutants.py plants: (file below megarl/, source text, replacement, test below tests/)."""

from planted.algorithms import ALGORITHMS
from planted.batches import BATCHES
from planted.gpu import GPU
from planted.jail import JAIL
from planted.judging import JUDGED
from planted.models import MODELS
from planted.system import SYSTEM
from planted.trainer import TRAINER
from planted.untrusted import UNTRUSTED
from planted.verdict import VERDICTS

__all__ = ["MUTANTS", "SMALLEST"]

MUTANTS = [*ALGORITHMS, *BATCHES, *GPU, *JAIL, *JUDGED, *MODELS, *SYSTEM, *TRAINER, *UNTRUSTED, *VERDICTS]
SMALLEST = [*ALGORITHMS[:4], *BATCHES[:4], *SYSTEM[:3]]
