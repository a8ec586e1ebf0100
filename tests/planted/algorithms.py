"""Mistakes in the maths."""

FORMULAS = "unit/algorithms/test_formulas.py"
PROPERTIES = "unit/algorithms/test_properties.py"
ENUMERATION = "unit/algorithms/test_enumeration.py"
HOSTILE = "unit/algorithms/test_hostile.py"
ROWS = "unit/algorithms/test_rows.py"
GOLDEN = "unit/algorithms/test_golden.py"

PASS_AT_K = "unit/algorithms/test_pass_at_k.py"

ALGORITHMS = [
    (
        "algorithms/rows.py",
        "torch.cat([cu_seqlens, changes])",
        "cu_seqlens",
        f"{ROWS}::test_sums_and_spreads_are_plain_loops",
    ),
    (
        "algorithms/rows.py",
        "x_T = x_T.to(at_least_fp32(x_T.dtype))\n",
        "\n",
        f"{ROWS}::test_half_precision_is_summed_in_fp32_or_as_told",
    ),
    (
        "algorithms/rows.py",
        "return centred_V * self.size_V / (self.size_V - 1).clamp(min=1)",
        "return centred_V",
        f"{ENUMERATION}::test_rloo_is_unbiased",
    ),
    (
        "algorithms/rows.py",
        "y_L[:-reach] += decay**reach * y_L[reach:]",
        "y_L[:-reach] += decay * y_L[reach:]",
        f"{FORMULAS}::test_returns_are_the_double_loop_and_skip_holes",
    ),
    (
        "algorithms/losses.py",
        "-advantages_T * ratio_T, -advantages_T * ratio_T.clamp(1 - clip_low, 1 + clip_high)",
        "-advantages_T * ratio_T, -advantages_T * ratio_T.clamp(1 - clip_high, 1 + clip_low)",
        f"{FORMULAS}::test_ppo_clip_is_the_piecewise_weight",
    ),
    (
        "algorithms/kl.py",
        "return value_T.detach() + (k2_T - k2_T.detach())",
        "return value_T + (k2_T - k2_T.detach())",
        f"{ENUMERATION}::test_the_expected_gradient_is_that_of_the_kl",
    ),
    (
        "algorithms/rows.py",
        "return (total_V / (size_V - (0 if biased else 1)).clamp(min=1)).sqrt()",
        "return (total_V / size_V.clamp(min=1)).sqrt()",
        f"{FORMULAS}::test_three_answers_right_wrong_right",
    ),
    (
        "algorithms/rows.py",
        "torch.where((self.size_V > 0) & (self.sum(differs_V) > 0), centred_V, 0)",
        "torch.where(self.size_V > 0, centred_V, 0)",
        f"{FORMULAS}::test_scores_that_differ_by_rounding_are_equal",
    ),
    (
        "algorithms/rows.py",
        "next_K.index_fill(0, ends_N - 1, 0)",
        "next_K",
        f"{FORMULAS}::test_gae_at_its_ends",
    ),
    (
        "algorithms/advantages.py",
        "gamma * batch.rows.next(values_T) - values_T",
        "gamma * batch.rows.next(values_T)",
        f"{FORMULAS}::test_gae_at_its_ends",
    ),
    (
        "algorithms/advantages.py",
        "groups.sum(length_N * centred_N)",
        "groups.sum(centred_N)",
        f"{GOLDEN}::test_entries[basic-f64]",
    ),
    (
        "algorithms/advantages.py",
        'WHITENED = ("reinforce_pp", "reinforce_pp_baseline", "gae")',
        'WHITENED = ("reinforce_pp_baseline", "gae")',
        f"{FORMULAS}::test_reinforce_pp_is_whitened_over_tokens_of_the_whole_batch",
    ),
    (
        "algorithms/advantages.py",
        "- batch.rows.spread(baseline_N.double())",
        "+ batch.rows.spread(baseline_N.double())",
        f"{GOLDEN}::test_entries[basic-f64]",
    ),
    (
        "algorithms/advantages.py",
        "if not takes_part_N.all():",
        "if False:",
        f"{HOSTILE}::test_a_row_out_of_range_leaves_the_others_alone",
    ),
    (
        "algorithms/whitening.py",
        "self.m2 + other.m2 + delta * delta * self.n * other.n / n",
        "self.m2 + other.m2",
        f"{PROPERTIES}::test_statistics_merge_to_those_of_the_whole",
    ),
    (
        "algorithms/whitening.py",
        "return clean(x_T.to(dtype), mask_T.bool())",
        "return x_T.to(dtype)",
        f"{HOSTILE}::test_any_reward_has_an_advantage",
    ),
    (
        "algorithms/losses.py",
        "        loss_T = torch.where(\n"
        "            advantages_T < 0, torch.minimum(loss_T, -advantages_T * dual_clip), loss_T\n"
        "        )\n",
        "        loss_T = loss_T\n",
        f"{FORMULAS}::test_ppo_clip_is_the_piecewise_weight",
    ),
    (
        "algorithms/losses.py",
        "-tokens.ratio_T.detach().clamp(1 - clip_low",
        "-tokens.ratio_T.clamp(1 - clip_low",
        f"{FORMULAS}::test_cispo_keeps_every_gradient",
    ),
    (
        "algorithms/losses.py",
        "rows.spread(rows.mean(tokens.log_ratio_T.detach()))",
        "rows.spread(rows.sum(tokens.log_ratio_T.detach()))",
        f"{GOLDEN}::test_entries[basic-f64]",
    ),
    (
        "algorithms/losses.py",
        "clean(x_T.to(dtype), mask_T) for x_T in inputs",
        "x_T.to(dtype) for x_T in inputs",
        f"{PROPERTIES}::test_nothing_at_masked_positions_reaches_losses_or_gradients",
    ),
    (
        "algorithms/losses.py",
        "        torch.maximum(\n",
        "        torch.minimum(\n",
        f"{PROPERTIES}::test_value_loss_has_no_gradient_where_the_clip_acts",
    ),
    (
        "algorithms/aggregation.py",
        "(rows.num_tokens_N > 0).sum().clamp(min=1)",
        "rows.num_tokens_N.numel()",
        f"{FORMULAS}::test_aggregations_by_hand",
    ),
    (
        "algorithms/aggregation.py",
        "groups.sum(rows.num_tokens_N).clamp(min=1)",
        "rows.num_tokens_N.clamp(min=1)",
        f"{FORMULAS}::test_prompt_mean_weighs_prompts_alike",
    ),
    (
        "algorithms/corrections.py",
        "return likelihood_ratio(log_ratio_T).clamp(floor, cap)",
        "return likelihood_ratio(log_ratio_T).clamp(floor)",
        f"{FORMULAS}::test_corrections_by_hand",
    ),
    (
        "algorithms/corrections.py",
        "tokens.rows.mean(gap_T) > delta",
        "tokens.rows.mean(-gap_T) > delta",
        f"{FORMULAS}::test_opsm_drops_negative_tokens_of_rows_that_lost_likelihood",
    ),
    (
        "algorithms/losses.py",
        "(advantages_T - advantages_T.sum() / num_tokens)",
        "advantages_T",
        f"{FORMULAS}::test_selection_is_by_covariance_about_both_means",
    ),
    (
        "algorithms/kl.py",
        "min(max(mean / term.target - 1, -0.2), 0.2)",
        "mean / term.target - 1",
        f"{GOLDEN}::test_adaptive_kl",
    ),
    (
        "parity/statistics.py",
        "trainer - engine, nan=torch.inf",
        "trainer - engine, nan=0.0",
        "unit/parity/test_statistics.py::test_nan_is_infinite_and_an_empty_batch_agrees",
    ),
    (
        "parity/statistics.py",
        "kl=float(k3.mean())",
        "kl=float(signed.mean())",
        "unit/parity/test_statistics.py::test_by_hand",
    ),
    (
        "parity/gate.py",
        "rounding=2**-0.5",
        "rounding=0.0",
        "unit/parity/test_rounding.py::test_rounded_logits_of_a_bf16_engine_are_below_the_bound",
    ),
    (
        "algorithms/pass_at_k.py",
        "math.comb(samples - correct, k) / math.comb(samples, k)",
        "(1 - correct / samples) ** k",  # biased
        f"{PASS_AT_K}::test_pass_at_k_is_the_share_of_subsets_with_a_correct_sample",
    ),
    (
        "algorithms/pass_at_k.py",
        "min(max(n * of_one / spread, n), n * samples)",
        "n * samples",  # as if samples of one problem were independent
        f"{PASS_AT_K}::test_intervals_cover_the_truth",
    ),
    (
        "algorithms/pass_at_k.py",
        "    size = n\n",
        "    size = n * samples\n",
        f"{PASS_AT_K}::test_intervals_stay_within_0_and_1_and_never_shrink_to_a_point",
    ),
]
