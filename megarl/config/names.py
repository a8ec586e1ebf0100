"""Names a config may use for functions that live above it, so that a config is judged without importing torch.

The names equal the keys of the dict of the same name in `megarl.algorithms`, and behind each name stand the options
of its function; a test holds them together.
"""

from __future__ import annotations

__all__ = ["ADVANTAGES", "AGGREGATIONS", "CORRECTIONS", "GROUP_ADVANTAGES", "LOSSES", "NOT_IN_THE_LOOP"]

_WHITENED = ("whiten", "std", "eps")
_CLIP = ("clip_low", "clip_high")

ADVANTAGES: dict[str, tuple[str, ...]] = {
    "reinforce": ("gamma", *_WHITENED),
    "rloo": ("singleton",),
    "reinforce_pp": ("gamma", *_WHITENED),
    "reinforce_pp_baseline": (*_WHITENED, "singleton"),
    "grpo": ("std", "eps", "singleton", "scale", "leave_one_out"),
    "grpo_process": ("std", "eps", "singleton"),
    "dr_grpo": ("singleton",),
    "remax": ("gamma", *_WHITENED),
    "gae": ("gamma", "lam", *_WHITENED),
    "opo": ("singleton",),
    "gpg": ("singleton",),
}
LOSSES: dict[str, tuple[str, ...]] = {
    "ppo_clip": (*_CLIP, "dual_clip"),
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
    "token-mean",
    "token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "prompt-mean",
)
CORRECTIONS: dict[str, tuple[str, ...]] = {
    "none": (),
    "tis": ("cap", "floor"),
    "seq_tis": ("cap", "floor"),
    "icepop": ("low", "high"),
    "seq_mask": ("low", "high"),
    "opsm": ("delta",),
}
GROUP_ADVANTAGES = ("grpo", "grpo_process", "dr_grpo", "rloo", "opo", "gpg")  # zero for a group of one
NOT_IN_THE_LOOP = {  # a function of megarl.algorithms for which the loop does not yet make what it needs
    "gae": "a critic's values",
    "remax": "a greedy sample a prompt",
    "clip_cov": "a selection of tokens over the batch",
    "kl_cov": "a selection of tokens over the batch",
}
