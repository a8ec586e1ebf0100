"""Finding where two computations of the same batch first differ. Importing it prepares Megatron-Core for a CPU."""

from megarl.platform import megatron_on_cpu

megatron_on_cpu.install()
