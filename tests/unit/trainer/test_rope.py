"""Stretched rotary frequencies against transformers' own."""

from __future__ import annotations

from typing import Any

import pytest
from torch.testing import assert_close
from transformers import GptOssConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megarl.models.registry import parse_model
from megarl.trainer.rope import scaled_frequencies, yarn_factor

YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 8.0,
    "original_max_position_embeddings": 512,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}


@pytest.mark.parametrize(
    ("kind", "rope"),
    [
        (GptOssConfig, YARN | {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}),
        (GptOssConfig, YARN | {"beta_fast": 20.0, "beta_slow": 2.0, "truncate": True}),
        (LlamaConfig, LLAMA3),
    ],
)
def test_frequencies(kind: Any, rope: dict[str, Any]) -> None:
    config = kind(rope_parameters=rope, head_dim=64, max_position_embeddings=4096)
    config.architectures = ["any"]
    shape = parse_model(config.to_dict(), "test")
    frequencies, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, "cpu")
    assert_close(scaled_frequencies(shape), frequencies)
    assert yarn_factor(shape) == pytest.approx(factor)
