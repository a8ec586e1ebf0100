"""Weights and run state on disk. Import this first, so that megatron.core runs without a GPU."""

from megarl.patches import checkpoints
from megarl.patches import megatron as megatron_on_cpu

megatron_on_cpu.install()
checkpoints.install()
