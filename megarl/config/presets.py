"""Presets: named sets of values for `algorithm`, overridden by explicit settings.

Plain data, no torch.

Values are from the cited papers. Settings that are not listed have the schema's defaults, for
example no KL. Two settings that no paper specifies are the same in every preset: token-level
truncated importance sampling with cap 2 (`tis`) corrects the mismatch of engine and trainer
log-probs, except in `grpo_paper`; `dual_clip` is off unless listed.
"""

from typing import Any

_TIS = {"correction": "tis", "correction_options": {"cap": 2.0}}
_CLIP = {"loss": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}
_PPO = {**_CLIP, **_TIS}
_GRPO = {"advantage": "grpo", "advantage_options": {"std": "unbiased", "eps": 1e-6}}
_DAPO = {
    **_GRPO,
    **_PPO,
    "clip_high": 0.28,
    "aggregation": "token-mean",
    "filter_zero_std": True,
}
_REINFORCE_PP = {**_PPO, "dual_clip": 10.0, "aggregation": "token-mean"}
_KL_REWARD = {"kl": {"estimator": "k1", "where": "reward", "coef": 0.001}}
_REWARD_TO_GO = {
    "advantage_options": {"gamma": 1.0, "whiten": False},
    "loss": "reinforce",
    "aggregation": "seq-mean-token-sum",
    **_TIS,
}

PRESETS: dict[str, dict[str, Any]] = {
    # Common practice in large runs: the group's mean and std (DeepSeekMath, arXiv 2402.03300,
    # 4.1.2) with DAPO's clip-higher, token-mean and dynamic sampling (arXiv 2503.14476, 3.1 to
    # 3.3), dual clip at 10 (arXiv 1912.09729).
    "grpo": {**_DAPO, "dual_clip": 10.0},
    # DeepSeekMath, arXiv 2402.03300: equation 3 (a mean over responses of means over tokens),
    # equation 4 (k3), and 4.2 (coefficient 0.04). The paper specifies neither the kind of std nor
    # the clip range, which is PPO's here.
    "grpo_paper": {
        **_GRPO,
        **_CLIP,
        "aggregation": "seq-mean-token-mean",
        "kl": {"estimator": "k3", "where": "loss", "coef": 0.04},
        "correction": "none",
    },
    # DAPO, arXiv 2503.14476: clip-higher (3.1), dynamic sampling (3.2), token-level loss (3.3),
    # overlong shaping over the last 4096 of 20480 tokens, a fifth (3.4, 4.1); no KL (2.3).
    "dapo": {**_DAPO, "overlong": {"buffer": 0.2, "factor": 1.0}},
    # Dr. GRPO, arXiv 2503.20783, 3.2: no division by std or response length, no KL; the constant
    # divisor is rollout.max_tokens.
    "dr_grpo": {"advantage": "dr_grpo", **_PPO, "aggregation": "seq-mean-token-sum-norm"},
    # GSPO, arXiv 2507.18071: equation 5 (one ratio per response, a mean over responses), 5.1
    # (bounds of the loss); no KL.
    "gspo": {**_GRPO, "loss": "gspo", "aggregation": "seq-mean-token-mean", **_TIS},
    # CISPO, MiniMax-M1, arXiv 2506.13585, 3.1: clipped importance weights, no lower bound, a mean
    # over tokens, no KL. The paper does not specify the upper bound; a maximum weight of 5 is from
    # ScaleRL, arXiv 2510.13786.
    "cispo": {**_GRPO, "loss": "cispo", "aggregation": "token-mean", **_TIS},
    # RLOO, arXiv 2402.14740, 3.2: a response is one action, so token losses are summed; KL in the
    # reward (equation 2) with the coefficient for rule-based rewards. The clip has an effect only
    # from the second update of a batch on.
    "rloo": {"advantage": "rloo", **_PPO, "aggregation": "seq-mean-token-sum", **_KL_REWARD},
    # Williams 1992: the reward-to-go times the gradient of log pi, no baseline, no discount.
    "reinforce": {"advantage": "reinforce", **_REWARD_TO_GO},
    # REINFORCE++, arXiv 2501.03262: KL in the reward of every token, reward-to-go, whitened over
    # the batch; no groups. The authors use 0.001 with rule-based rewards, 0.01 with a reward model.
    "reinforce_pp": {
        "advantage": "reinforce_pp",
        "advantage_options": {"gamma": 1.0, "whiten": True},
        **_REINFORCE_PP,
        **_KL_REWARD,
    },
    # REINFORCE++-baseline, arXiv 2501.03262: minus the group's mean, then whitened over the batch;
    # KL in the loss with the gradient of k2. 0.001 is from the authors' script.
    "reinforce_pp_baseline": {
        "advantage": "reinforce_pp_baseline",
        "advantage_options": {"whiten": True},
        **_REINFORCE_PP,
        "kl": {"estimator": "k2", "where": "loss", "coef": 0.001},
    },
    # PPO, arXiv 1707.06347, with a critic: GAE (arXiv 1506.02438, equation 16) with gamma = lambda
    # = 1, whitened over the batch, KL in the reward. The coefficient (for a reward model) is from
    # the authors of REINFORCE++ (arXiv 2501.03262), who use learning rates, which no preset sets,
    # of 5e-7 for the policy (train.lr) and 9e-6 for the critic (critic.lr).
    "ppo": {
        "advantage": "gae",
        "advantage_options": {"gamma": 1.0, "lam": 1.0, "whiten": True},
        **_PPO,
        "aggregation": "token-mean",
        "kl": {"estimator": "k1", "where": "reward", "coef": 0.01},
    },
    # On-policy distillation, arXiv 2306.13649 and 2306.08543: KL(policy || teacher). Rewards are
    # optional.
    "distill": {
        **_REWARD_TO_GO,
        "advantage": "reinforce",
        "aggregation": "token-mean",
        "distill_coef": 1.0,
    },
    # ReMax, arXiv 2310.10505, 4: the reward-to-go minus the greedy response's reward, which costs
    # one more sample per prompt; KL in the reward (4.2), with the coefficient for rule-based
    # rewards.
    "remax": {"advantage": "remax", **_REWARD_TO_GO, **_KL_REWARD},
}
