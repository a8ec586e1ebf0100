"""Training on Megatron-Core. Where there is no GPU, importing this package prepares Megatron-Core for the CPU."""

import logging
import warnings

from megarl.platform import megatron_on_cpu

megatron_on_cpu.install()
# Megatron-Core's warnings address authors of training scripts, and would appear once per rank.
logging.getLogger("megatron.core").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core")
