"""Weights and run state on disk. Importing it first lets Megatron-Core run on a CPU if there is no GPU."""

from megarl.platform import megatron_on_cpu

megatron_on_cpu.install()
