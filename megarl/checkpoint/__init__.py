"""Weights and run state on disk. Import it before megatron.core, to run that without a GPU."""

from megarl.patches import checkpoints
from megarl.patches import megatron as megatron_on_cpu

megatron_on_cpu.install()
checkpoints.install()
