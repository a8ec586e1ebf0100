"""Training on Megatron-Core. Importing the package first prepares Megatron-Core for a CPU, where there is no GPU."""

import logging
import warnings

from megarl.platform import megatron_on_cpu

megatron_on_cpu.install()
# Its warnings are meant for authors of training scripts, and appear once a rank.
logging.getLogger("megatron.core").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core")
