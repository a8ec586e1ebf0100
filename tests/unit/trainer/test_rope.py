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
    ("kind", "rope", "known"),  # of frequencies 1, 8, 16, 24 and 31, by the papers' formulas
    [
        (
            GptOssConfig,
            YARN | {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
            [0.823488, 0.178428, 0.0201909, 0.00118218, 0.000303587],
        ),
        (
            GptOssConfig,
            YARN | {"beta_fast": 20.0, "beta_slow": 2.0, "truncate": True},
            [0.823488, 0.19724, 0.0176305, 0.00118218, 0.000303587],
        ),
        (LlamaConfig, LLAMA3, [0.823488, 0.211474, 0.0400807, 0.00118218, 0.000303587]),
    ],
)
def test_frequencies(kind: Any, rope: dict[str, Any], known: list[float]) -> None:
    config = kind(rope_parameters=rope, head_dim=64, max_position_embeddings=4096)
    config.architectures = ["any"]
    shape = parse_model(config.to_dict(), "test")
    frequencies, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, "cpu")
    assert_close(scaled_frequencies(shape), frequencies)
    assert frequencies[[1, 8, 16, 24, 31]].tolist() == pytest.approx(known, rel=1e-5)
    assert yarn_factor(shape) == pytest.approx(factor)
