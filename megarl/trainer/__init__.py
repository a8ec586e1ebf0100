"""The policy being trained. Importing anything here first gives Megatron-Core its host, where there is no GPU."""

import logging
import warnings

from megarl.platform import megatron_on_cpu

megatron_on_cpu.install()
# What it warns of is meant for writers of training scripts, and comes once a rank.
logging.getLogger("megatron.core").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core")
