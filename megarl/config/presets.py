"""Presets: named sets of values for `algorithm`, overridden by explicit settings.

Plain data, no torch.

Values are those of the papers cited; settings not listed have the schema's defaults, for example no
KL. Two settings that no paper specifies are the same in every preset: token-level truncated
importance sampling with cap 2 (`tis`) corrects the engine's deviation from the trainer's log-probs,
except in `grpo_paper`; `dual_clip` is off unless listed.
"""

import yaml

PRESETS = yaml.safe_load("""
shared:
  tis: &tis {correction: tis, correction_options: {cap: 2.0}}
  clip: &clip {loss: ppo_clip, clip_low: 0.2, clip_high: 0.2, dual_clip: null}
  ppo: &ppo {<<: [*clip, *tis]}
  group: &group {advantage: grpo, advantage_options: {std: unbiased, eps: 1.0e-6}}
  group_ppo: &group_ppo
    <<: [*group, *ppo]
    clip_high: 0.28
    aggregation: token-mean
    filter_zero_std: true
  reinforce_ppo: &reinforce_ppo {<<: *ppo, dual_clip: 10.0, aggregation: token-mean}
  kl_reward: &kl_reward {kl: {estimator: k1, where: reward, coef: 0.001}}
  reward_to_go: &reward_to_go
    <<: *tis
    advantage_options: {gamma: 1.0, whiten: false}
    loss: reinforce
    aggregation: seq-mean-token-sum

# Common practice in large runs: the group's mean and std (DeepSeekMath, arXiv 2402.03300,
# 4.1.2) with DAPO's clip-higher, token-mean and dynamic sampling (arXiv 2503.14476, 3.1 to
# 3.3), dual clip at 10 (arXiv 1912.09729).
grpo: {<<: *group_ppo, dual_clip: 10.0}
# DeepSeekMath, arXiv 2402.03300: equation 3 (a mean over responses of means over tokens),
# equation 4 (k3), and 4.2 (coefficient 0.04). The paper gives neither the kind of std nor a
# clip range; the latter is PPO's.
grpo_paper:
  <<: [*group, *clip]
  aggregation: seq-mean-token-mean
  kl: {estimator: k3, where: loss, coef: 0.04}
  correction: none
# DAPO, arXiv 2503.14476: clip-higher (3.1), dynamic sampling (3.2), token-level loss (3.3),
# overlong shaping over the last 4096 of 20480 tokens (3.4, 4.1): a fifth; no KL (2.3).
dapo: {<<: *group_ppo, overlong: {buffer: 0.2, factor: 1.0}}
# Dr. GRPO, arXiv 2503.20783, 3.2: no division by std or response length, no KL; the constant is
# rollout.max_tokens.
dr_grpo: {<<: *ppo, advantage: dr_grpo, aggregation: seq-mean-token-sum-norm}
# GSPO, arXiv 2507.18071: equation 5 (a row's ratio, a mean over responses), 5.1 (the loss's
# bounds); no KL.
gspo: {<<: [*group, *tis], loss: gspo, aggregation: seq-mean-token-mean}
# CISPO, MiniMax-M1, arXiv 2506.13585, 3.1: clipped importance weights, no lower bound, a mean
# over tokens, no KL. The paper does not give its upper bound; a weight of at most 5 is
# ScaleRL's, arXiv 2510.13786.
cispo: {<<: [*group, *tis], loss: cispo, aggregation: token-mean}
# RLOO, arXiv 2402.14740, 3.2: a response is one action, so token losses are summed; KL in the
# reward (equation 2) with the coefficient for rule-based rewards. The clip takes effect only
# from the second update on a batch.
rloo: {<<: [*ppo, *kl_reward], advantage: rloo, aggregation: seq-mean-token-sum}
# Williams 1992: the reward-to-go times the gradient of log pi, no baseline, no discount.
reinforce: {<<: *reward_to_go, advantage: reinforce}
# REINFORCE++, arXiv 2501.03262: KL in the reward of every token, summed to the end, whitened
# over the batch; no group is needed. 0.001 with rule-based rewards, 0.01 with a reward model
# (its authors' settings).
reinforce_pp:
  <<: [*reinforce_ppo, *kl_reward]
  advantage: reinforce_pp
  advantage_options: {gamma: 1.0, whiten: true}
# REINFORCE++-baseline, arXiv 2501.03262: the group's mean, then whitened over the batch; KL in
# the loss with the gradient of k2. 0.001 is from its authors' script.
reinforce_pp_baseline:
  <<: *reinforce_ppo
  advantage: reinforce_pp_baseline
  advantage_options: {whiten: true}
  kl: {estimator: k2, where: loss, coef: 0.001}
# PPO, arXiv 1707.06347, with a critic: GAE (arXiv 1506.02438, equation 16) with gamma = lambda
# = 1, whitened over the batch, KL in the reward. Coefficient (for a reward model) and learning
# rates, which no preset sets, are those of REINFORCE++'s authors (arXiv 2501.03262): 5e-7 for
# the policy (train.lr), 9e-6 for the critic (critic.lr).
ppo:
  <<: *ppo
  advantage: gae
  advantage_options: {gamma: 1.0, lam: 1.0, whiten: true}
  aggregation: token-mean
  kl: {estimator: k1, where: reward, coef: 0.01}
# On-policy distillation, arXiv 2306.13649 and 2306.08543: KL(policy || teacher). Rewards are
# optional.
distill:
  <<: *reward_to_go
  advantage: reinforce
  aggregation: token-mean
  distill_coef: 1.0
# ReMax, arXiv 2310.10505, 4: the reward-to-go minus the greedy response's reward, which costs
# one more sample per prompt; KL in the reward (4.2), with the coefficient for rule-based
# rewards.
remax: {<<: [*reward_to_go, *kl_reward], advantage: remax}
""")
del PRESETS["shared"]
