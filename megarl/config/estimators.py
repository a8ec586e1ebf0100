"""Names and options of the functions in `megarl.algorithms`, so that a config is checked without importing torch.

Each dict maps the keys of the dict of the same name in `megarl.algorithms` to the options of its functions.
"""

from __future__ import annotations

_WHITENED = ("whiten", "std", "eps")
_CLIP = ("clip_low", "clip_high")

ADVANTAGES: dict[str, tuple[str, ...]] = {
    "reinforce": ("gamma", "total", *_WHITENED),
    "rloo": ("singleton", *_WHITENED),
    "reinforce_pp": ("gamma", *_WHITENED),
    "reinforce_pp_baseline": ("singleton", *_WHITENED),
    "grpo": ("singleton", "scale", "leave_one_out", *_WHITENED),
    "grpo_process": ("singleton", *_WHITENED),
    "dr_grpo": ("singleton", *_WHITENED),
    "remax": ("gamma", *_WHITENED),
    "gae": ("gamma", "lam", *_WHITENED),
    "opo": ("singleton", *_WHITENED),
    "gpg": ("singleton", *_WHITENED),
}
LOSSES: dict[str, tuple[str, ...]] = {
    "ppo_clip": (*_CLIP, "dual_clip", "ratio"),
    "gspo": _CLIP,
    "cispo": _CLIP,
    "reinforce": (),
    "gpg": (),
    "sapo": ("tau_pos", "tau_neg"),
    "gmpo": _CLIP,
    "clip_cov": _CLIP,
    "kl_cov": ("kl_coef",),
    "sft": (),
}
AGGREGATIONS = (
    "token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "prompt-mean",
)  # fmt: skip
CORRECTIONS: dict[str, tuple[str, ...]] = {
    "none": (),
    "tis": ("cap", "floor"),
    "seq_tis": ("cap", "floor"),
    "icepop": ("low", "high"),
    "seq_mask": ("low", "high"),
    "opsm": ("delta",),
}
SELECT: dict[str, tuple[str, ...]] = {
    "clip_cov": ("share", "low", "high"),
    "kl_cov": ("share",),
}  # plus the bounds
LOSS_BOUNDS = (*_CLIP, "dual_clip")  # options of a loss that are keys of `algorithm` itself
CLIPS: dict[str, dict[str, float]] = {  # the defaults of each loss's bounds
    "ppo_clip": {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 10.0},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4},
    "cispo": {"clip_low": 1.0, "clip_high": 4.0},
    "gmpo": {"clip_low": 0.4, "clip_high": 0.4},
    "clip_cov": {"clip_low": 0.2, "clip_high": 0.2},
}
GROUP_ADVANTAGES = (
    "grpo",
    "grpo_process",
    "dr_grpo",
    "rloo",
    "opo",
    "gpg",
)  # zero for a group of one sample
TOKEN_ADVANTAGES = (
    "reinforce",
    "reinforce_pp",
    "remax",
    "grpo_process",
    "gae",
)  # may differ within a response
ENGINE_STAGES = ("rl", "iterative_grpo", "iterative_dpo", "best_of_n")
STAGES_OF_SECTIONS = {  # section of the config -> the stages that read it
    "sft": ("sft",),
    "dpo": ("dpo", "iterative_dpo"),
    "reward_model": ("reward_model",),
    "iterative": ("iterative_grpo",),
}
