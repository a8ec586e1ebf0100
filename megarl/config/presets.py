"""Presets: named sets of the values of `algorithm:`, merged under what the user writes. Plain data, no torch."""

from __future__ import annotations

from typing import Any

__all__ = ["PRESETS"]

PRESETS: dict[str, dict[str, Any]] = {
    # The group's mean and standard deviation as baseline and scale; clip-higher and token-mean of DAPO; no KL.
    "grpo": {
        "advantage": "grpo",
        "loss": "ppo_clip",
        "aggregation": "token-mean",
        "clip_low": 0.2,
        "clip_high": 0.28,
        "dual_clip": 10.0,
        "kl": {"coef": 0.0},
        "correction": "tis",
        "correction_options": {"cap": 2.0},
    },
    # No group and no critic: KL in the reward, summed to the end, whitened over the batch (arXiv 2501.03262).
    "reinforce_pp": {
        "advantage": "reinforce_pp",
        "loss": "ppo_clip",
        "aggregation": "token-mean",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "dual_clip": 10.0,
        "kl": {"estimator": "k1", "where": "reward", "coef": 0.001},
        "correction": "tis",
        "correction_options": {"cap": 2.0},
    },
}
