"""Weights and run state on disk. Import it before megatron.core, which then runs on a CPU if there is no GPU."""

from megarl.checkpoint import pickles
from megarl.platform import megatron_on_cpu

megatron_on_cpu.install()
pickles.install()
