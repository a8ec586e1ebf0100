"""Training on Megatron-Core. Without a GPU, importing it prepares Megatron-Core for the CPU."""

import logging
import warnings

from megarl.patches import megatron as megatron_on_cpu

megatron_on_cpu.install()
# Megatron-Core's warnings address authors of training scripts, and every rank would repeat them.
logging.getLogger("megatron.core").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core")
