"""Names a config may use for functions that live above it, so that a config is judged without importing torch.

Each tuple equals the keys of the dict of the same name in `megarl.algorithms`; a test holds them together.
"""

from __future__ import annotations

__all__ = ["ADVANTAGES", "AGGREGATIONS", "CORRECTIONS", "GROUP_ADVANTAGES", "LOSSES", "NOT_IN_THE_LOOP"]

ADVANTAGES = (
    "reinforce",
    "rloo",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "grpo",
    "grpo_process",
    "dr_grpo",
    "remax",
    "gae",
    "opo",
    "gpg",
)
LOSSES = ("ppo_clip", "gspo", "cispo", "reinforce", "gpg", "sapo", "gmpo", "clip_cov", "kl_cov", "sft")
AGGREGATIONS = (
    "token-mean",
    "token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "prompt-mean",
)
CORRECTIONS = ("none", "tis", "seq_tis", "icepop", "seq_mask", "opsm")
GROUP_ADVANTAGES = ("grpo", "grpo_process", "dr_grpo", "rloo", "opo", "gpg")  # zero for a group of one
NOT_IN_THE_LOOP = {  # a function of megarl.algorithms for which the loop does not yet make what it needs
    "gae": "a critic's values",
    "remax": "a greedy sample a prompt",
    "clip_cov": "a selection of tokens over the batch",
    "kl_cov": "a selection of tokens over the batch",
}
