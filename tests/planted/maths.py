"""Mistakes in the maths that changed nothing which a test compared, and their like."""

FORMULAS = "unit/algorithms/test_formulas.py"
OPTIONS = "unit/algorithms/test_options.py"
OBJECTIVE = "unit/algorithms/test_objective.py"
ORACLES = "unit/algorithms/test_oracles.py"
CRITIC = "unit/algorithms/test_critic.py"
HOSTILE = "unit/algorithms/test_hostile.py"
PREFERENCE = "unit/algorithms/test_preference.py"
DIVERGENCE = "unit/algorithms/test_teacher_divergence.py"
SCHEDULE = "unit/rollout/test_schedule.py"
SHAPING = "unit/rollout/test_reward_shaping.py"
METRICS = "unit/telemetry/test_telemetry.py"
OPTIMIZER = "unit/trainer/test_optimizer.py"
LEARNER = "unit/trainer/test_learner.py"
FP8 = "unit/trainer/test_fp8.py"

UNTRAINED = f"{OPTIONS}::test_rows_without_a_trained_token_do_not_count_for_the_coefficient"
DUAL = f"{OBJECTIVE}::test_clip_frac_counts_the_tokens_beyond_the_dual_clip"
BOUNDS = f"{OBJECTIVE}::test_clip_frac_counts_the_tokens_a_bound_acts_on"
ADAPTS = f"{OBJECTIVE}::test_kl_to_the_old_policy_needs_no_reference_and_adapts_after_the_updates"
TAUGHT = f"{OPTIONS}::test_the_teachers_log_ratio_is_part_of_each_advantage"
NORMALISED = (
    f"{OPTIONS}::test_rewards_are_normalised_by_all_seen_so_far_and_clipped_at_the_stage_asked_for"
)
MISSING = f"{FORMULAS}::test_a_missing_rollout_log_prob_corrects_nothing"
CHOSEN = f"{FORMULAS}::test_clip_cov_chooses_at_least_one_token_and_none_that_is_clipped"
OPSM = f"{ORACLES}::test_opsm_drops_what_the_engine_held_more_likely"
GPG = f"{ORACLES}::test_gpgs_factor_is_the_share_of_samples_whose_group_differs"
ALONE = f"{ORACLES}::test_gpg_counts_a_group_of_one_where_its_raw_reward_is_its_advantage"
TIES = f"{ORACLES}::test_a_heads_weights_are_the_same_in_both_directions_at_ties"
CUT = f"{CRITIC}::test_a_cut_response_goes_on_with_the_value_after_its_last_token"
SPREAD = f"{SCHEDULE}::test_spread_is_that_of_the_advantages"
SAME_SPREAD = f"{SCHEDULE}::test_groups_with_spread_are_those_with_advantages"
FLAT = f"{SCHEDULE}::test_groups_without_spread_are_counted_whether_or_not_they_are_replaced"
SKIPPED = f"{SCHEDULE}::test_prompts_whose_updates_were_all_skipped_are_not_trained"
SAMPLED = f"{METRICS}::test_what_was_sampled_has_means_of_its_own"
RATES = f"{OPTIMIZER}::test_after_the_warm_up_rates_are_megatrons_and_transformers"
WHOLE = f"{OPTIMIZER}::test_without_clipping_a_step_has_the_whole_gradient_or_none"
SELECTED = f"{LEARNER}::test_tokens_are_selected_by_the_policy_before_each_update"
NO_TOKENS = f"{FP8}::test_a_product_of_no_tokens_has_no_rows_and_no_gradient"

MATHS = [
    # KL
    (
        "algorithms/objective.py",
        "kl_T.double())[rows.num_tokens_N > 0].mean()",
        "kl_T.double()).mean()",
        UNTRAINED,
    ),
    (
        "algorithms/kl.py",
        "num_rows = int((Rows.of(batch.mask, batch.cu_seqlens).num_tokens_N > 0).sum())",
        "num_rows = batch.num_rows",
        UNTRAINED,
    ),
    ("algorithms/objective.py", 'kl.against != "old" or ', "", ADAPTS),
    ("algorithms/objective.py", "updates[-1].metrics", "updates[0].metrics", ADAPTS),
    (
        "algorithms/objective.py",
        'ratio_T.detach() if term.estimator in ("k2", "k3+") else ratio_T',
        "ratio_T",
        f"{OPTIONS}::test_off_policy_kl_has_the_gradient_of_the_ratio_times_delta",
    ),
    (
        "algorithms/objective.py",
        'sums["kl/loss"] = batch.kl_coef *',
        'sums["kl/loss"] = algorithm.kl.coef *',
        f"{OPTIONS}::test_the_coefficient_follows_its_target_from_the_next_batch_on",
    ),
    (
        "algorithms/objective.py",
        "advantages_M - algorithm.distill_coef",
        "advantages_M + algorithm.distill_coef",
        TAUGHT,
    ),
    ("algorithms/objective.py", ", value_clamp=LOG_RATIO_LIMIT)", ")", TAUGHT),
    (
        "algorithms/kl.py",
        "clamp(min=REST_FLOOR)",
        "clamp(min=1e-30)",
        f"{DIVERGENCE}::test_what_fp32_leaves_of_a_whole_distribution_is_no_divergence",
    ),
    # clips and selections
    (
        "algorithms/losses.py",
        "advantages_T > 0, ratio_T > 1 + clip_high,",
        "advantages_T > 0, ratio_T > 1 + clip_low,",
        BOUNDS,
    ),
    (
        "algorithms/losses.py",
        "(advantages_T < 0) & (ratio_T < 1 - clip_low)",
        "(advantages_T < 0) & (ratio_T < 1 - clip_high)",
        BOUNDS,
    ),
    (
        "algorithms/losses.py",
        "clipped_T = clipped_T | ((advantages_T < 0) & (ratio_T > dual_clip))",
        "pass",
        DUAL,
    ),
    ("algorithms/losses.py", "(ratio_T > dual_clip))", "(ratio_T > 1 + clip_high))", DUAL),
    (
        "algorithms/losses.py",
        "gap_T = torch.where(gap_T.abs() < ROUNDING, gap_T.detach(), gap_T)",
        "pass",
        f"{FORMULAS}::test_kl_cov_takes_no_sign_from_rounding",
    ),
    (
        "algorithms/losses.py",
        "(covariance_T < high) & ~clipped_T)",
        "(covariance_T < high))",
        CHOSEN,
    ),
    (
        "algorithms/losses.py",
        "num_chosen = max(int(share * int(tokens.mask_T.sum())), 1)",
        "num_chosen = int(share * int(tokens.mask_T.sum()))",
        CHOSEN,
    ),
    (
        "algorithms/losses.py",
        "torch.randperm(candidates_C.numel(), generator=generator, device=candidates_C.device)",
        "torch.arange(candidates_C.numel(), device=candidates_C.device)",
        CHOSEN,
    ),
    (
        "trainer/learner.py",
        "1000 * self.trainer.scheduler.step + index",
        "1000 * self.trainer.scheduler.step",
        SELECTED,
    ),
    (
        "trainer/learner.py",
        "self.seed + 1000 * self.trainer.scheduler.step + index",
        "self.seed + index",
        SELECTED,
    ),
    # the engine's log-probs
    (
        "algorithms/corrections.py",
        "gap_T = tokens.old_logprobs_T - log_ratio_T - tokens.logprobs_T",
        "gap_T = tokens.old_logprobs_T - tokens.logprobs_T",
        OPSM,
    ),
    (
        "algorithms/corrections.py",
        "rollout_logprobs_T.isfinite()",
        "(~rollout_logprobs_T.isnan())",
        MISSING,
    ),
    (
        "algorithms/objective.py",
        "mask_T & rollout_T.isfinite()",
        "mask_T & ~rollout_T.isnan()",
        f"{OPTIONS}::test_bypass_takes_the_engines_log_probs_and_does_not_correct_again",
    ),
    (
        "algorithms/objective.py",
        '("tis", "seq_tis", "icepop")',
        '("tis", "icepop")',
        f"{OPTIONS}::test_rows_of_a_truncated_product_count_as_clipped",
    ),
    (
        "algorithms/corrections.py",
        "((mean_N >= low) & (mean_N <= high))",
        "(mean_N <= high)",
        f"{FORMULAS}::test_corrections_by_hand",
    ),
    (
        "config/algorithm.py",
        'correction not in ("none", "opsm")',
        'correction != "none"',
        f"{ORACLES}::test_opsm_is_allowed_beside_the_engines_log_probs",
    ),
    # rewards and advantages
    (
        "algorithms/advantages.py",
        "Groups.of(torch.zeros_like(groups.group_V), groups.size_V > 0)",
        "Groups.of(torch.zeros_like(groups.group_V), groups.size_V > 1)",
        f"{FORMULAS}::test_the_batchs_deviation_is_of_every_row",
    ),
    ("algorithms/advantages.py", "(batch.groups.size_V > 0).sum() /", "learns_N.numel() /", ALONE),
    (
        "algorithms/advantages.py",
        "learns_N |= batch.groups.size_V == 1",
        "pass",
        ALONE,
    ),
    ("algorithms/rows.py", "self.sum(self.centre(x_V) != 0) > 0", "self.centre(x_V) != 0", GPG),
    (
        "algorithms/advantages.py",
        '(rows.sum(x.abs()) if key.endswith("_T") else x.abs()) <= limit',
        "rows.num_tokens_N > 0",
        f"{HOSTILE}::test_a_row_whose_value_or_baseline_is_out_of_range_takes_no_part",
    ),
    ("algorithms/objective.py", " & rewards_N.isfinite()", "", NORMALISED),
    (
        "algorithms/objective.py",
        "(position_N,), step_N + rewards_N",
        "(position_N,), rewards_N",
        f"{OPTIONS}::test_a_step_that_ends_with_the_outcome_keeps_its_reward",
    ),
    ("algorithms/critic.py", '== FINISH.index("length")', '!= FINISH.index("stop")', CUT),
    ("algorithms/critic.py", "= values_T[end_N]", "= values_T[end_N - 1]", CUT),
    (
        "algorithms/reward_model.py",
        'extreme_N.scatter_reduce(0, row_T, masked_T, f"a{kind}")',
        "torch.segment_reduce(masked_T, kind, offsets=rows.cu_seqlens)",
        TIES,
    ),
    (
        "rollout/reward_shaping.py",
        'sample.finish == "length" and',
        'sample.finish != "stop" and',
        f"{SHAPING}::test_what_was_cut_gets_the_reward_asked_for_and_no_steps",
    ),
    (
        "data/collate.py",
        'mask_truncated and sample.finish == "length"',
        'mask_truncated and sample.finish != "stop"',
        "unit/data/test_collate.py::test_only_what_reached_the_token_limit_is_masked",
    ),
    (
        "data/preferences.py",
        "torch.tensor([sample.reward or 0.0 for sample in samples]).tolist()",
        "[sample.reward or 0.0 for sample in samples]",
        "unit/data/test_preferences.py::test_rewards_that_differ_by_rounding_are_not_ranked",
    ),
    # spread
    (
        "algorithms/objective.py",
        '_clipped(algorithm, batch.rewards, "raw").float()',
        "batch.rewards",
        SPREAD,
    ),
    ("rollout/schedule.py", 'algorithm.truncated == "mask"', "False", SPREAD),
    (
        "algorithms/objective.py",
        '        compared = {"grpo_process"}',
        '        compared = {"dr_grpo", "grpo_process"}',
        SAME_SPREAD,
    ),
    (
        "algorithms/objective.py",
        '        compared = {"dr_grpo"}',
        "        pass",
        SAME_SPREAD,
    ),
    ("rollout/schedule.py", "not self.has_spread(group)", "not has_spread(group)", FLAT),
    (
        "config/algorithm.py",
        "            clip is not None\n            and algorithm.filter_zero_std",
        "            False\n            and algorithm.filter_zero_std",
        "unit/config/test_validate.py::test_refusals",
    ),
    (
        "algorithms/preference.py",
        "Groups.of(batch.group, is_trained_N).centre(batch.rewards)",
        "batch.rewards.double()",
        f"{PREFERENCE}::test_the_best_and_the_worst_of_each_prompt",
    ),
    (
        "telemetry/metrics.py",
        "_sample_metrics(generated).items()",
        "_sample_metrics(rollout.groups).items()",
        SAMPLED,
    ),
    (
        "telemetry/metrics.py",
        '.get("groups/flat", 0) / len(generated)',
        '.get("groups/flat", 0) / len(rollout.groups)',
        SAMPLED,
    ),
    (
        "telemetry/metrics.py",
        "fmean([row[name] for row in rows if name in row])",
        "fmean([row.get(name, 0.0) for row in rows])",
        f"{METRICS}::test_rollout_metrics_by_hand",
    ),
    # prompts
    ("rollout/schedule.py", "all(one.skipped for one", "any(one.skipped for one", SKIPPED),
    (
        "rollout/schedule.py",
        '            outcome = "dropped/update_skipped"\n',
        "            pass\n",
        SKIPPED,
    ),
    (
        "rollout/schedule.py",
        "prompts.kept.get(name, 0.0) / 2 + number",
        "prompts.kept.get(name, 0.0) + number",
        f"{SCHEDULE}::test_the_share_of_kept_groups_forgets_half_of_earlier_steps",
    ),
    (
        "rollout/schedule.py",
        'max(size, 2 ** batch.counts["rollout/refills"])',
        "size",
        f"{SCHEDULE}::test_each_refill_asks_for_twice_as_many_where_earlier_steps_promised_more",
    ),
    (
        "rollout/schedule.py",
        "sample.versions[sample.trainable].unique()",
        "sample.versions[sample.trainable][-1:]",
        f"{SCHEDULE}::test_the_oldest_version_is_of_every_trained_token",
    ),
    (
        "data/prompts.py",
        '        self.kept.update(state.get("kept", {}))\n',
        "",
        "unit/data/test_tasks.py::test_a_stream_resumes_where_it_stood",
    ),
    # the trainer
    (
        "trainer/learner.py",
        "needs_entropy=objective.algorithm.entropy_coef != 0",
        "needs_entropy=False",
        f"{LEARNER}::test_an_entropy_bonus_is_computed_where_entropy_is_not_reported",
    ),
    ("trainer/optimizer.py", "if found_inf or not math.isfinite(norm):", "if found_inf:", WHOLE),
    ("trainer/optimizer.py", "    if clip_grad > 0:", "    if clip_grad >= 0:", WHOLE),
    (
        "trainer/optimizer.py",
        "max(1, train.steps - train.warmup_steps)",
        "max(1, train.steps - 1 - train.warmup_steps)",
        RATES,
    ),
    (
        "trainer/lora.py",
        "weight.float().addmm(self.wide().float(), self.a.float(), alpha=self.scale)",
        "weight + self.scale * (self.wide() @ self.a)",
        "unit/trainer/test_lora.py::test_adapters_are_added_in_fp32_and_rounded_once",
    ),
    (
        "trainer/fp8.py",
        ".nan_to_num(0.0, 0.0, 0.0)",
        "",
        f"{FP8}::test_delayed_scales_change_with_updates_only_and_are_saved",
    ),
    (
        "trainer/fp8.py",
        "            if row.any():\n                each.history",
        "            if True:\n                each.history",
        f"{FP8}::test_delayed_scales_change_with_updates_only_and_are_saved",
    ),
    (
        "trainer/trainer.py",
        "(every > 0 and self.scheduler.step % every == 0)",
        "every > 0",
        f"{LEARNER}::test_an_entropy_bonus_is_computed_where_entropy_is_not_reported",
    ),
    ("trainer/fp8.py", "len(weight_NK))", "-1)", NO_TOKENS),
    ("trainer/fp8.py", "        if not x.numel():\n            return x.float()\n", "", NO_TOKENS),
]
