"""What the trainer changes on a chunk that Megatron-Core or Megatron-Bridge has built."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from megarl.layout import Layout, Parallel
from megarl.trainer.model import patch_chunk


def test_every_parameter_has_the_training_dtype() -> None:
    chunk: Any = torch.nn.Linear(2, 2, dtype=torch.bfloat16)
    chunk.softmax_offset = torch.nn.Parameter(torch.tensor([0.1, 0.2], dtype=torch.float32))
    chunk.config = SimpleNamespace(params_dtype=torch.bfloat16)
    chunk.post_process = False
    patch_chunk(chunk, Layout.of(Parallel(), 1, 0))
    assert {parameter.dtype for parameter in chunk.parameters()} == {torch.bfloat16}
