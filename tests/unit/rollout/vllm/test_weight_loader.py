"""What an engine with dummy weights has, beside weights, that no sync moves."""

from __future__ import annotations

from torch import nn
from vllm.model_executor.layers.attention.attention import set_default_quant_scales

from megarl.rollout.vllm.weight_loader import reset_cache_scales


def test_scales_of_the_cache_are_those_of_a_model_that_was_loaded() -> None:
    """On a GPU they were random in an engine with FP8 weights: seen by benchmarks.gpu_check."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Module())
    set_default_quant_scales(model[1], register_buffer=True)
    for buffer in model.buffers():
        buffer.fill_(0.3)
    model[1]._k_scale_float = 0.3
    reset_cache_scales(model)
    assert all(float(buffer) == 1 for buffer in model.buffers()) and model[1]._k_scale_float == 1
