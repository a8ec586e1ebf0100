"""The switch that hides instruction sets reaches this process's children, and torch, vLLM and megarl."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PLAIN = Path(__file__).resolve().parents[2] / "plain_cpu"
ASK = """
import torch
from megarl.platform.env import has_bf16_products
cpu = torch.cpu
print(cpu._is_avx512_supported(), cpu._is_avx512_bf16_supported(), cpu._is_amx_tile_supported(),
      cpu._is_vnni_supported(), has_bf16_products(), torch.backends.cpu.get_cpu_capability())
"""


def test_instruction_sets_are_hidden() -> None:
    path = os.pathsep.join([str(PLAIN), *sys.path])
    command = [sys.executable, "-c", ASK]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False"] * 5 + ["AVX2"], done.stdout
