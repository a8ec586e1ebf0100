"""Weights and run state on disk. Import it before megatron.core, to run that without a GPU."""

from megarl.checkpoint import pickles
from megarl.patches import megatron as megatron_on_cpu

megatron_on_cpu.install()
pickles.install()
