"""Training on Megatron-Core. Without a GPU, importing this package prepares Megatron-Core to run on the CPU."""

import logging
import warnings

from megarl.platform import megatron_on_cpu

megatron_on_cpu.install()
# Megatron-Core's warnings are meant for authors of training scripts, and every rank would repeat them.
logging.getLogger("megatron.core").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core")
