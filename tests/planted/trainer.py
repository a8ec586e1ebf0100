"""Mistakes in the objective and the trainer."""

OPTIONS = "unit/algorithms/test_options.py"
OBJECTIVE = "unit/algorithms/test_objective.py"
OPTIMIZER = "unit/trainer/test_optimizer.py"
LEARNER = "unit/trainer/test_learner.py"
ROUTERS = "unit/trainer/test_router_losses.py"
LOGPROBS = "unit/trainer/test_logprobs.py"
RANKS = "dist/test_trainer.py"

TRAINER = [
    (
        "trainer/learner.py",
        "batch = replace(batch, old_logprobs=outputs.logprobs_T)",
        "pass",
        f"{LEARNER}::test_two_epochs_are_two_updates_by_hand",
    ),
    (
        "trainer/learner.py",
        'return f"{self.seed} {self.trainer.scheduler.step} {epoch}"',
        'return f"{self.seed} {epoch}"',
        f"{LEARNER}::test_every_epoch_trains_each_row_once_in_an_order_of_its_own",
    ),
    (
        "algorithms/objective.py",
        "ref_M = old_M\n",
        "ref_M = new_M.detach()\n",
        f"{OBJECTIVE}::test_kl_to_the_old_policy_needs_no_reference_and_adapts_after_the_updates",
    ),
    (
        "data/packing.py",
        "key=lambda rows: row_groups[rows[0]])]",
        "key=lambda rows: rows[0])]",
        "unit/data/test_packing.py::test_shuffled_groups_stay_whole",
    ),
    (
        "algorithms/advantages.py",
        "return batch.rows.spread(batch.rows.first(return_T)) if total else return_T",
        "return return_T",
        "unit/algorithms/test_formulas.py::test_returns_are_the_double_loop_and_skip_holes",
    ),
    (
        "launch/failure_watch.py",
        'serves = env.is_main and get_env("TORCHELASTIC_USE_AGENT_STORE") != "True"',
        "serves = False",
        "dist/test_nodes.py::test_a_failure_on_one_node_ends_the_other_and_is_said[False]",
    ),
    (
        "trainer/rope.py",
        "table(*args, **kwargs)[positions[-1]]",
        "table(*args, **kwargs)",
        f"{LEARNER}::test_shared_prefixes_change_no_update",
    ),
    (
        "trainer/context_parallel.py",
        "slot_P[stack.key_RK]",
        "stack.key_RK % len(slot_P.unique())",
        f"{LEARNER}::test_shared_prefixes_change_no_update",
    ),
    (
        "algorithms/objective.py",
        '(clipped(x_N.double(), "raw") for x_N in (batch.rewards, batch.baseline))',
        '(clipped(batch.rewards.double(), "raw"), batch.baseline.double())',
        f"{OPTIONS}::test_the_greedy_baseline_is_clipped_as_the_rewards_are",
    ),
    (
        "algorithms/objective.py",
        "for x_N in (rewards_N, baseline_N))",
        "for x_N in (rewards_N, baseline_N * 0))",
        f"{OPTIONS}::test_the_greedy_baseline_is_normalised_as_the_rewards_are",
    ),
    (
        "algorithms/objective.py",
        "mean = float(rows.mean(kl_T.double())[trained_N].mean())",
        "mean = float(kl_T.double().sum() / batch.mask.sum())",
        f"{OPTIONS}::test_the_coefficient_follows_the_mean_over_rows",
    ),
    (
        "algorithms/objective.py",
        "scored, ObjectiveState(next_coef,",
        "scored, ObjectiveState(coef,",
        f"{OPTIONS}::test_the_coefficient_follows_its_target_from_the_next_batch_on",
    ),
    (
        "algorithms/objective.py",
        "loss_M = loss_M - algorithm.entropy_coef",
        "loss_M = loss_M + algorithm.entropy_coef",
        f"{OBJECTIVE}::test_token_losses_add_up_to_the_formula",
    ),
    (
        "algorithms/objective.py",
        "loss_M + batch.kl_coef * _kl_loss(",
        "loss_M + _kl_loss(",
        f"{OBJECTIVE}::test_token_losses_add_up_to_the_formula",
    ),
    (
        "algorithms/objective.py",
        "**options, **selected) * weights_M",
        "**options, **selected)",
        f"{OBJECTIVE}::test_token_losses_add_up_to_the_formula",
    ),
    (
        "algorithms/objective.py",
        "for update in plan.updates():",
        "for update in (plan,):",
        f"{OBJECTIVE}::test_each_update_has_its_own_denominator",
    ),
    (
        "trainer/optimizer.py",
        "if clip_grad > 0:",
        "if False:",
        f"{OPTIMIZER}::test_steps_are_those_of_torchs_adamw",
    ),
    (
        "trainer/optimizer.py",
        "adam_beta1=train.betas[0],\n        adam_beta2=train.betas[1],",
        "adam_beta1=train.betas[1],\n        adam_beta2=train.betas[0],",
        f"{OPTIMIZER}::test_steps_are_those_of_torchs_adamw",
    ),
    (
        "trainer/optimizer.py",
        'group["weight_decay"] = train.weight_decay * group["wd_mult"]',
        'group["weight_decay"] = 0.0',
        f"{OPTIMIZER}::test_steps_are_those_of_torchs_adamw",
    ),
    (
        "trainer/optimizer.py",
        "return train.lr * (step + 1) / train.warmup_steps",
        "return train.lr * step / train.warmup_steps",
        f"{OPTIMIZER}::test_warm_up_then_down_to_the_last_step",
    ),
    (
        "trainer/optimizer.py",
        "norm,\n                    use_decoupled_grad",
        "max(float(p.grad.norm()) for p in parameters),\n                    use_decoupled_grad",
        f"{RANKS}::test_clipping_is_by_the_norm_of_the_whole_model",
    ),
    (
        "trainer/optimizer.py",
        "use_decoupled_grad=part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8",
        "use_decoupled_grad=False",
        "unit/trainer/test_optimizer.py::test_gradients_are_clipped_where_the_optimizer_keeps_them",
    ),
    (
        "trainer/optimizer.py",
        "def sum_of_squares(x: Tensor, *, run: int = 1024)",
        "def sum_of_squares(x: Tensor, *, run: int = 2**30)",
        "unit/trainer/test_optimizer.py::test_squares_of_many_numbers_are_summed_in_fp64",
    ),
    (
        "trainer/optimizer.py",
        "    dist.all_reduce(total)\n",
        "",
        f"{RANKS}::test_clipping_is_by_the_norm_of_the_whole_model",
    ),
    (
        "launch/parity.py",
        "rounding_floor(exact_K, torch.stack(noise), error=LOG_SOFTMAX_ERROR)",
        "rounding_floor(exact_K, torch.stack(noise))",
        "unit/trainer/test_rounding.py::test_rounding_is_below_the_bound_and_faults_are_above",
    ),
    (
        "algorithms/parity.py",
        "Quantiles.of(noise_DK * 2**0.5)",
        "Quantiles.of(noise_DK)",
        "unit/algorithms/test_parity.py::test_quantiles_and_floor_by_hand",
    ),
    (
        "algorithms/parity.py",
        "diff.double().abs().flatten(), nan=torch.inf",
        "diff.double().abs().flatten(), nan=0.0",
        "unit/algorithms/test_parity.py::test_quantiles_and_floor_by_hand",
    ),
    (
        "algorithms/parity.py",
        "return MAX_EXCESS * (1 + 2 / max(count, 1) ** 0.5) ** 2",
        "return MAX_EXCESS",
        "unit/algorithms/test_parity.py::test_excess_by_hand",
    ),
    (
        "launch/parity.py",
        "is_doubtful or not excess.is_explained",
        "not excess.is_explained",
        "unit/launch/test_parity.py::test_the_floor_is_measured_again_where_half_the_limit_is_used_up_but_not_every_time",
    ),
    (
        "launch/parity.py",
        "prompts if self.is_moe else None",
        "None",
        "unit/launch/test_parity.py::test_with_experts_prompts_are_independent_and_their_tokens_are_not",
    ),
    (
        "launch/parity.py",
        "score[-self.max_tokens :]",
        "score[: self.max_tokens]",
        "unit/launch/test_parity.py::test_the_probe_scores_what_the_engine_added_at_temperature_1",
    ),
    (
        "launch/parity.py",
        "(worst.is_explained if self.max_diff is None else worst.found.max <= self.max_diff)",
        "True",
        "unit/launch/test_parity.py::test_a_probe_that_is_off_is_refused_with_its_distance",
    ),
    (
        "launch/parity.py",
        "self.floor, self.floor_age = self.measure(batch).floor, 0",
        "self.floor, self.floor_age = self.floor or self.measure(batch).floor, 0",
        "unit/launch/test_parity.py::test_a_batch_is_compared_with_an_earlier_floor_and_refused_with_its_own",
    ),
    (
        "debug/parity_cause.py",
        "states = self._run(batch, names, replaced=replaced)",
        "states = self._run(batch, names)",
        "unit/trainer/test_parity_cause.py::test_what_differs_by_itself_is_named_and_what_follows_is_not",
    ),
    (
        "debug/parity_cause.py",
        "engine_K - scale * trainer_K",
        "engine_K - trainer_K",
        "unit/trainer/test_parity_cause.py::test_what_differs_by_itself_is_named_and_what_follows_is_not",
    ),
    (
        "debug/parity_cause.py",
        "is_fitted = left.median < 0.2 * unfitted",
        "is_fitted = left.median <= unfitted",
        "unit/trainer/test_parity_cause.py::test_tokens_that_agree_when_scored_again_point_to_decoding",
    ),
    (
        "debug/parity_cause.py",
        "Excess(left, floor).is_explained)",
        "False)",
        "unit/trainer/test_parity_cause.py::test_a_temperature_may_leave_what_rounding_explains",
    ),
    (
        "debug/parity_cause.py",
        "if not scored[rank].is_explained:",
        "if True:",
        "unit/trainer/test_parity_cause.py::test_another_temperature_is_named",
    ),
    (
        "launch/parity.py",
        "if has_tokens[row] and row != first]",
        "if row != first]",
        "unit/launch/test_parity.py::test_rows_for_the_cause_are_sampled_ones_and_begin_with_the_worst",
    ),
    (
        "launch/run_rl.py",
        """    trainer.memory.offload_all()
    engine = start_engine(rank)""",
        """    engine = start_engine(rank)
    trainer.memory.offload_all()""",
        "unit/trainer/test_start_order.py::test_start_up_in_order",
    ),
    (
        "weights/checksum.py",
        "np.from_dlpack(words)",
        "words.numpy()",
        "unit/weights/test_checksum.py::test_the_memory_of_what_was_summed_can_be_offloaded",
    ),
    (
        "launch/run_rl.py",
        "share * memory[1] - used",
        "share * memory[1]",
        "unit/trainer/test_start_order.py::test_start_up_in_order",
    ),
    (
        "launch/phases.py",
        "        if self.engine is not None:\n            self._settle()\n",
        "        if self.engine is not None:\n",
        "unit/launch/test_phases.py::test_a_sleeping_engine_does_not_count_and_parts_count_for_their_phase",
    ),
    (
        "weights/publish.py",
        "is_staged = self.is_atomic and ",
        "is_staged = self.is_atomic or ",
        "dist/test_devices.py",
    ),
    (
        "trainer/reference.py",
        "            host.copy_(held, non_blocking=True)\n",
        "",
        "unit/trainer/test_reference.py::test_shared_storages_of_several_dtypes_are_exchanged_in_pieces",
    ),
    (
        "rollout/exchange.py",
        "        self.meet()  #",
        "        pass  #",
        "dist/test_rollout_exchange.py::test_a_replica_may_be_later_than_collectives_wait",
    ),
    (
        "telemetry/curves.py",
        'if f"{key}/low" in row and "/" in key}',
        'if "/" in key}',
        "unit/telemetry/test_report.py::test_evaluation_sets_have_a_panel_and_are_compared",
    ),
    (
        "weights/publish.py",
        "self.probe.check()",
        "pass",
        "unit/weights/test_publish.py::test_a_probe_that_is_off_is_refused_and_asked_again",
    ),
    (
        "trainer/rounding.py",
        "handle.remove()",
        "pass",
        "unit/trainer/test_rounding.py::test_rounding_is_below_the_bound_and_faults_are_above",
    ),
    (
        "trainer/trainer.py",
        "grad_norm, skipped = take_step(",
        "self.scheduler.step += 1\n        grad_norm, skipped = take_step(",
        f"{LEARNER}::test_the_learning_rate_advances_once_a_batch",
    ),
    (
        "trainer/learner.py",
        "self._logprobs(batch) if needs_old else None, None",
        "self._logprobs(batch), None",
        f"{LEARNER}::test_no_forward_pass_is_made_twice",
    ),
    (
        "trainer/learner.py",
        "before_step = None if is_judged or updates else judge",
        "before_step = None",
        f"{LEARNER}::test_a_refusal_leaves_everything_untouched",
    ),
    (
        "trainer/learner.py",
        "logprobs_T = batch.old_logprobs if index == 0 else self._logprobs(batch)",
        "logprobs_T = batch.old_logprobs",
        f"{LEARNER}::test_tokens_are_selected_by_the_policy_before_each_update",
    ),
    (
        "trainer/moe.py",
        "(tokens_E.mean() - tokens_E).sign()",
        "(tokens_E - tokens_E.mean()).sign()",
        f"{ROUTERS}::test_the_bias_moves_towards_balance",
    ),
    (
        "trainer/moe.py",
        "return moe.aux_loss * aux + moe.z_loss * z",
        "return moe.z_loss * z",
        f"{ROUTERS}::test_the_gradient_of_the_routers_is_that_of_the_weighed_sum",
    ),
    (
        "trainer/moe.py",
        "z = (rows.weight_R * mean_square_lse(logits_NE, rows)).sum()",
        "z = mean_square_lse(logits_NE, rows).sum() / len(self.rows)",
        f"{ROUTERS}::test_the_gradient_of_the_routers_is_that_of_the_weighed_sum",
    ),
    (
        "trainer/moe.py",
        "aux = (balance_rows.weight_R * balance_R).sum()",
        "aux = balance_R.mean()",
        f"{ROUTERS}::test_the_gradient_of_the_routers_is_that_of_the_weighed_sum",
    ),
    (
        "trainer/moe.py",
        "dist.all_reduce(tokens_E, group=router.tp_dp_cp_group)",
        "pass",
        f"{RANKS}::test_the_routers_bias_follows_the_tokens_of_all_ranks",
    ),
    (
        "trainer/logprobs.py",
        "constant_C = grad_T[tokens] + grad_entropy_C * (entropy_T - sum_T.log())[tokens]",
        "constant_C = grad_T[tokens]",
        f"{LOGPROBS}::test_values_and_gradients",
    ),
    (
        "trainer/logprobs.py",
        "alpha=1 / self.temperature)",
        "alpha=1.0)",
        f"{LOGPROBS}::test_values_and_gradients",
    ),
]
