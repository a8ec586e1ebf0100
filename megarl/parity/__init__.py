"""Finding where two computations of the same batch first differ.

Importing it prepares Megatron-Core for a CPU.
"""

from megarl.patches import megatron as megatron_on_cpu

megatron_on_cpu.install()
