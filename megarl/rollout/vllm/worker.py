"""vLLM's worker extension in the split topology: each process that imports it patches vLLM."""

from megarl.patches.vllm import install_in_worker
from megarl.rollout.vllm.async_engine import WorkerExtension as WorkerExtension

install_in_worker()
