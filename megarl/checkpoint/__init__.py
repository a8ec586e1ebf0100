"""Weights and run state on disk. Importing anything here first gives Megatron-Core its host, where there is no GPU."""

from megarl.platform import host

host.install()
