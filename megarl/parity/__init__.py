"""Finds where two computations of the same batch first differ.

Without a GPU, importing this package prepares Megatron-Core for the CPU.
"""

from megarl.patches import megatron as megatron_on_cpu

megatron_on_cpu.install()
