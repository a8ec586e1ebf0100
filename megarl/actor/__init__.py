"""The policy being trained. Importing anything here first gives Megatron-Core its host, where there is no GPU."""

import logging

from megarl.platform import host

host.install()
logging.getLogger("megatron.core").setLevel(logging.ERROR)  # its warnings advise writers of training scripts, each rank
