"""Reinforcement learning of large language models: Megatron-Core trains, vLLM samples."""

__version__ = "0.1.0"
