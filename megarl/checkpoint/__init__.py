"""Weights and run state on disk. Importing anything here first gives Megatron-Core its host, where there is no GPU."""

from megarl.platform import megatron_on_cpu

megatron_on_cpu.install()
