"""NOT Transformer Engine: an empty stand-in, for tests on machines without a GPU.

Megatron-Bridge imports classes of Transformer Engine whether it uses them or not. With this folder on the path they
are empty ones. Megatron-Core is told the truth, that there is none, and takes its own layers.
"""

import sys

if "megatron.bridge" not in sys.modules:  # Megatron-Core asks
    raise ModuleNotFoundError("this is a stand-in for Megatron-Bridge alone")


class _Empty(type):
    def __getattr__(cls, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Empty(name, (), {})


def __getattr__(name: str):
    if name.startswith("__"):
        raise AttributeError(name)
    return _Empty(name, (), {})
