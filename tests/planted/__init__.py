"""Mistakes that tests/mutants.py plants: (file below megarl/, source text, replacement, test below tests/)."""

from planted.algorithms import ALGORITHMS
from planted.batches import BATCHES
from planted.critic import CRITIC
from planted.device_memory import DEVICE_MEMORY
from planted.documentation import DOCUMENTED
from planted.doors import DOORS
from planted.folders import FOLDERS
from planted.formats import FORMATS
from planted.fp8 import FP8
from planted.gpu import GPU
from planted.iterative import ITERATIVE
from planted.jail import JAIL
from planted.judging import JUDGED
from planted.lora import LORA
from planted.maths import MATHS
from planted.models import MODELS
from planted.preferences import PREFERENCES
from planted.refills import REFILLS
from planted.reward_models import REWARD_MODELS
from planted.routes import ROUTES
from planted.rows import ROWS
from planted.split import SPLIT
from planted.stages import STAGES
from planted.staleness import STALE
from planted.system import SYSTEM
from planted.trainer import TRAINER
from planted.untrusted import UNTRUSTED
from planted.verdict import VERDICTS
from planted.watching import WATCHING

__all__ = ["MUTANTS", "SMALLEST"]

MUTANTS = [
    *ALGORITHMS,
    *BATCHES,
    *CRITIC,
    *DEVICE_MEMORY,
    *DOCUMENTED,
    *DOORS,
    *FP8,
    *FOLDERS,
    *FORMATS,
    *GPU,
    *ITERATIVE,
    *JAIL,
    *JUDGED,
    *LORA,
    *MATHS,
    *MODELS,
    *PREFERENCES,
    *REFILLS,
    *REWARD_MODELS,
    *ROUTES,
    *ROWS,
    *STAGES,
    *STALE,
    *SPLIT,
    *SYSTEM,
    *TRAINER,
    *UNTRUSTED,
    *VERDICTS,
    *WATCHING,
]
SMALLEST = [*ALGORITHMS[:4], *BATCHES[:4], *SYSTEM[:3]]
