"""Hides AMX, AVX-512 and bf16 from torch, oneDNN, vLLM and megarl: the processor is then that of most laptops.

In front of PYTHONPATH it acts on every Python process; tests/conftest.py puts it there if MEGARL_PLAIN_CPU is set.
"""

import builtins
import io
import os
import re
import sys
from importlib.machinery import PathFinder

os.environ.update(ATEN_CPU_CAPABILITY="avx2", ONEDNN_MAX_CPU_ISA="AVX2", DNNL_MAX_CPU_ISA="AVX2")
HIDDEN = re.compile(r"\b(?:amx|avx512|avx10|avx_vnni)\w*|\bbf16\b")
open_file = io.open


def open_without_flags(file, mode="r", *args, **kwargs):
    if str(file) != "/proc/cpuinfo":
        return open_file(file, mode, *args, **kwargs)
    with open_file(file) as real:
        text = HIDDEN.sub("", real.read())
    return io.BytesIO(text.encode()) if "b" in mode else io.StringIO(text)


class HideFromTorch:
    """Filters what torch.cpu answers, by which vLLM chooses its kernels."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch.cpu":
            return None
        spec = PathFinder.find_spec(name, path, target)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            ask = module.get_capabilities
            module.get_capabilities = lambda: {
                flag: bool(value) and not HIDDEN.match(flag) if isinstance(value, bool) else value
                for flag, value in ask().items()
            }

        spec.loader.exec_module = exec_module
        return spec


io.open = builtins.open = open_without_flags
sys.meta_path.insert(0, HideFromTorch())
