"""Mistakes in the objective and the trainer."""

OPTIONS = "unit/algorithms/test_options.py"
OBJECTIVE = "unit/algorithms/test_objective.py"
OPTIMIZER = "unit/trainer/test_optimizer.py"
LEARNER = "unit/trainer/test_learner.py"
ROUTERS = "unit/trainer/test_router_losses.py"
LOGPROBS = "unit/trainer/test_logprobs.py"
TEACHERS = "unit/trainer/test_teachers.py"
CONVERSATIONS = "unit/data/test_conversations.py"
RANKS = "dist/test_trainer.py"

TRAINER = [
    (
        "algorithms/objective.py",
        "advantages_M - algorithm.distill_coef * log_ratio_M",
        "advantages_M + algorithm.distill_coef * log_ratio_M",
        f"{TEACHERS}::test_the_gradient_is_that_of_the_kl_divergence",
    ),
    (
        "rewards/served_model.py",
        '["prompt_logprobs"][t + 1 - start]',
        '["prompt_logprobs"][t - start]',
        f"{TEACHERS}::test_a_model_beside_the_policy_and_a_served_one_agree",
    ),
    (
        "trainer/logprobs.py",
        "z_CV.exp_().mul_(grad_T[tokens, None])",
        "z_CV.exp_()",
        f"{LOGPROBS}::test_extra_labels_against_plain_fp64",
    ),
    (
        "trainer/logprobs.py",
        "column_CK += shard.start + columns.start",
        "column_CK += shard.start",
        f"{LOGPROBS}::test_top_tokens_are_those_of_all_logits",
    ),
    (
        "algorithms/kl.py",
        "return torch.cat([logprobs_TK, rest_T1.log()], 1)",
        "return logprobs_TK.log_softmax(1)",
        "unit/algorithms/test_teacher_divergence.py::test_value_and_gradient_are_those_of_plain_softmaxes",
    ),
    (
        "algorithms/kl.py",
        "(teacher_TR + math.log(beta), student_TR + math.log(1 - beta))",
        "(student_TR + math.log(beta), teacher_TR + math.log(1 - beta))",
        "unit/algorithms/test_teacher_divergence.py::test_value_and_gradient_are_those_of_plain_softmaxes",
    ),
    (
        "trainer/learner.py",
        "ids_TK >= self.trainer.shape.vocab",
        "ids_TK > self.trainer.shape.vocab",
        f"{TEACHERS}::test_a_teachers_tokens_that_the_policy_does_not_have_are_padding",
    ),
    (
        "trainer/reference.py",
        "    trained.onload_weights()\n",
        "",
        f"{TEACHERS}::test_a_model_beside_the_policy_and_a_served_one_agree",
    ),
    (
        "data/conversations.py",
        "if not whole.startswith(text) or len(text) < cuts[-1]:",
        "if len(text) < cuts[-1]:",
        f"{CONVERSATIONS}::test_what_cannot_be_determined_is_refused",
    ),
    (
        "data/conversations.py",
        "number % 2 == 1 and place <= last",
        "number % 2 == 1",
        f"{CONVERSATIONS}::test_the_end_token_is_the_last_that_is_learned",
    ),
    (
        "stages/sft.py",
        "(lowest, since + 1)",
        "(loss, since + 1)",
        "unit/stages/test_sft.py::test_patience_counts_from_the_lowest_loss",
    ),
    (
        "trainer/learner.py",
        "batch = replace(batch, old_logprobs=outputs.logprobs_T)",
        "pass",
        f"{LEARNER}::test_two_epochs_are_two_updates_by_hand",
    ),
    (
        "trainer/learner.py",
        'f"{seed} {trainer.scheduler.step} {epoch}"',
        'f"{seed} {epoch}"',
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
        "        units_of_group = [list(part) for _, part in by_group]\n",
        "        units_of_group = [[rows] for _, part in by_group for rows in part]\n",
        "unit/data/test_packing.py::test_shuffled_groups_stay_whole",
    ),
    (
        "algorithms/advantages.py",
        "return batch.rows.spread(batch.rows.first(return_T)) if total else return_T",
        "return return_T",
        "unit/algorithms/test_formulas.py::test_returns_are_the_double_loop_and_skip_holes",
    ),
    (
        "processes/torchrun_watch.py",
        'serves = env.is_main and get_env("TORCHELASTIC_USE_AGENT_STORE") != "True"',
        "serves = False",
        "dist/test_nodes.py::test_a_failure_on_one_node_ends_the_other_and_is_said[False]",
    ),
    (
        "trainer/rope.py",
        "table(*args, **kwargs)[rotary.positions]",
        "table(*args, **kwargs)",
        f"{LEARNER}::test_shared_prefixes_change_no_update",
    ),
    (
        "trainer/microbatch.py",
        "order = sorted(range(len(rows)), key=[row.tolist() for row in rows].__getitem__)",
        "order = list(range(len(rows)))",
        "unit/trainer/test_microbatch.py::test_shared_prefixes_are_computed_once[1]",
    ),
    (
        "platform/device.py",
        "            mallopt(option, value)",
        "            pass",
        "unit/platform/test_device.py::test_freed_memory_is_kept[True]",
    ),
    (
        "trainer/context_parallel.py",
        "slot_P[stack.key_RK]",
        "stack.key_RK % len(slot_P.unique())",
        f"{LEARNER}::test_shared_prefixes_change_no_update",
    ),
    (
        "algorithms/objective.py",
        "    rewards_N, baseline_N = (\n"
        '        clipped(x_N.double(), "raw") for x_N in (batch.rewards, batch.baseline)\n'
        "    )\n",
        '    rewards_N = clipped(batch.rewards.double(), "raw")\n'
        "    baseline_N = batch.baseline.double()\n",
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
        "loss_M = loss_M * weights_M",
        "pass",
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
        "parity/gate.py",
        "rounding_floor(seen_K, noise_DK, error=LOG_SOFTMAX_ERROR)",
        "rounding_floor(seen_K, noise_DK)",
        "unit/parity/test_rounding.py::test_rounding_is_below_the_bound_and_faults_are_above",
    ),
    (
        "parity/gate.py",
        "min(DRAWS, ceil(ENOUGH / max(1, len(seen_K))))",
        "DRAWS",
        "unit/parity/test_rounding.py::test_a_large_batch_needs_fewer_draws[0.1-1]",
    ),
    (
        "parity/statistics.py",
        "(noise_DK * 2**0.5)",
        "noise_DK",
        "unit/parity/test_statistics.py::test_quantiles_and_floor_by_hand",
    ),
    (
        "parity/statistics.py",
        "diff.double().abs().flatten(), nan=torch.inf",
        "diff.double().abs().flatten(), nan=0.0",
        "unit/parity/test_statistics.py::test_quantiles_and_floor_by_hand",
    ),
    (
        "parity/statistics.py",
        "return MAX_EXCESS * (1 + 2 / max(count, 1) ** 0.5) ** 2",
        "return MAX_EXCESS",
        "unit/parity/test_statistics.py::test_excess_by_hand",
    ),
    (
        "parity/gate.py",
        "is_doubtful or not excess.is_explained",
        "not excess.is_explained",
        "unit/parity/test_gate.py::test_the_floor_is_measured_again_where_half_the_limit_is_used_up_but_not_every_time",
    ),
    (
        "parity/gate.py",
        "prompts if self.is_moe else None",
        "None",
        "unit/parity/test_gate.py::test_with_experts_prompts_are_independent_and_their_tokens_are_not",
    ),
    (
        "parity/gate.py",
        "score[-self.max_tokens :]",
        "score[: self.max_tokens]",
        "unit/parity/test_gate.py::test_the_probe_scores_what_the_engine_added_at_temperature_1",
    ),
    (
        "parity/gate.py",
        "if self._is_within(worst, worst.found.max):",
        "if True:",
        "unit/parity/test_gate.py::test_a_probe_that_is_off_is_refused_with_its_distance",
    ),
    (
        "parity/gate.py",
        "self.floor = self.measure(batch).of_policy",
        "self.floor = self.floor or self.measure(batch).of_policy",
        "unit/parity/test_gate.py::test_a_batch_is_compared_with_an_earlier_floor_and_refused_with_its_own",
    ),
    (
        "parity/cause.py",
        "logprobs_T, outputs_NT8 = self._run(batch, names, replaced=replaced)",
        "logprobs_T, outputs_NT8 = self._run(batch, names)",
        "unit/parity/test_cause.py::test_what_differs_by_itself_is_named_and_what_follows_is_not",
    ),
    (
        "parity/cause.py",
        "engine_K - scale * trainer_K",
        "engine_K - trainer_K",
        "unit/parity/test_cause.py::test_what_differs_by_itself_is_named_and_what_follows_is_not",
    ),
    (
        "parity/cause.py",
        "is_fitted = left.median < 0.2 * unfitted",
        "is_fitted = left.median <= unfitted",
        "unit/parity/test_cause.py::test_tokens_that_agree_when_scored_again_point_to_decoding",
    ),
    (
        "parity/cause.py",
        "        is_fitted = left.median < 0.2 * unfitted or (\n"
        "            left.median < 0.5 * unfitted and Excess(left, floor).is_explained\n"
        "        )\n",
        "        is_fitted = left.median < 0.2 * unfitted or (left.median < 0.5 * unfitted and False)\n",
        "unit/parity/test_cause.py::test_a_temperature_may_leave_what_rounding_explains",
    ),
    (
        "parity/cause.py",
        "if not scored[rank].is_explained:",
        "if True:",
        "unit/parity/test_cause.py::test_another_temperature_is_named",
    ),
    (
        "parity/gate.py",
        "enumerate(masks) if mask_L.any()]",
        "enumerate(masks)]",
        "unit/parity/test_gate.py::test_rows_for_the_cause_are_sampled_ones_and_begin_with_the_worst",
    ),
    (
        "stages/rl.py",
        "        trained.memory.offload_all()\n    engine = start_engine(rank)",
        "    engine = start_engine(rank)",
        "unit/trainer/test_start_order.py::test_start_up_in_order",
    ),
    (
        "weights/sync/checksum.py",
        "np.from_dlpack(words)",
        "words.numpy()",
        "unit/weights/test_checksum.py::test_the_memory_of_what_was_summed_can_be_offloaded",
    ),
    (
        "run/engine.py",
        "share * total - used",
        "share * total",
        "unit/trainer/test_start_order.py::test_start_up_in_order",
    ),
    (
        "run/phases.py",
        "        if self.engine is not None:\n            self._settle()\n",
        "        if self.engine is not None:\n",
        "unit/run/test_phases.py::test_a_sleeping_engine_does_not_count_and_parts_count_for_their_phase",
    ),
    (
        "weights/sync/publish.py",
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
        'if f"{key}/low" in keys and "/" in key}',
        'if "/" in key}',
        "unit/telemetry/test_report.py::test_evaluation_sets_have_a_panel_and_are_compared",
    ),
    (
        "weights/sync/publish.py",
        "self.probe.check()",
        "pass",
        "unit/weights/test_publish.py::test_a_probe_that_is_off_is_refused_and_asked_again",
    ),
    (
        "parity/sublayers.py",
        "hooks.enter_context(place.register_forward_hook(plant))",
        "place.register_forward_hook(plant)",
        "unit/parity/test_rounding.py::test_rounding_is_below_the_bound_and_faults_are_above",
    ),
    (
        "trainer/trainer.py",
        "grad_norm, skipped = take_step(",
        "self.scheduler.step += 1\n        grad_norm, skipped = take_step(",
        f"{LEARNER}::test_the_learning_rate_advances_once_a_batch",
    ),
    (
        "trainer/learner.py",
        "            if needs_old:\n                old_T",
        "            if True:\n                old_T",
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
        "logprobs_T = batch.old_logprobs if index == 0 else self.trainer.logprobs(batch)",
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
        "alpha=1 / self.temperature",
        "alpha=1.0",
        f"{LOGPROBS}::test_values_and_gradients",
    ),
]
