"""vLLM's worker extension in engines with expert parallelism: each process that imports it patches
vLLM.
"""

from megarl.patches.vllm import install_expert_parallel
from megarl.rollout.vllm.async_engine import WorkerExtension as WorkerExtension

install_expert_parallel()
