"""Mistakes in what becomes a batch: tasks, packing, rollouts and rewards."""

COLLATE = "unit/data/test_collate.py"
PACKING = "unit/data/test_packing.py"
TASKS = "unit/data/test_tasks.py"
DATASETS = "unit/data/test_hf_dataset.py"
SCHEDULE = "unit/rollout/test_schedule.py"
EXCHANGE = "unit/rollout/test_exchange.py"
SHAPING = "unit/rollout/test_reward_shaping.py"
ANSWERS = "unit/rewards/test_answers.py"
LOOP = "e2e/test_loop.py"
CHAT = "unit/data/test_chat.py"
RULES = "unit/rewards/test_rules.py"
SCORER = "unit/rewards/test_scorer.py"
MATHS = "unit/rewards/test_maths.py"

CURRICULUM = "unit/rollout/test_curriculum.py"
PARTS = "unit/algorithms/test_reward_parts.py"

BATCHES = [
    (
        "rollout/schedule.py",
        "prompts.observe(batch.generated)",
        "pass",
        f"{CURRICULUM}::test_prompts_follow_the_rewards_of_earlier_ones",
    ),
    (
        "data/ledger.py",
        "self.stream.observe(groups)",
        "pass",
        f"{CURRICULUM}::test_prompts_follow_the_rewards_of_earlier_ones",
    ),
    (
        "data/collate.py",
        "sample.rewards.get(name, nan)",
        "sample.rewards.get(name, 0.0)",
        f"{PARTS}::test_parts_go_with_their_rows",
    ),
    (
        "data/collate.py",
        "return {name: taken(part) for name, part in value.items()}",
        "return value",
        f"{PARTS}::test_parts_go_with_their_rows",
    ),
    (
        "data/collate.py",
        "mask=_shifted(_flat([trainable for _, trainable in rows], torch.bool), cu_seqlens)",
        "mask=_flat([trainable for _, trainable in rows], torch.bool)",
        f"{COLLATE}::test_shift_labels_mask_and_logprobs",
    ),
    (
        "data/collate.py",
        "positions[bisect_left(positions, start + t) - 1], reward)",
        "positions[-1], reward)",
        f"{COLLATE}::test_step_rewards_on_masked_tokens_move_back",
    ),
    (
        "data/tasks.py",
        "& 0x7FFFFFFF",
        "",
        f"{SCHEDULE}::test_seeds_are_31_bits_all_different_and_the_same_in_every_process",
    ),
    (
        "data/thoughts.py",
        "        and text.lstrip().startswith(tags[0])\n",
        "",
        f"{RULES}::test_format",
    ),
    (
        "data/collate.py",
        'mask_truncated and sample.finish == "length"',
        "mask_truncated",
        f"{COLLATE}::test_what_was_cut_takes_no_part_when_masked",
    ),
    (
        "data/collate.py",
        "positions[-1] if positions and sample.has_outcome else -1",
        "positions[-1] if positions else -1",
        f"{COLLATE}::test_an_outcome_of_zero_is_a_step_and_a_mere_sum_of_steps_is_none",
    ),
    (
        "data/packing.py",
        "return lengths * ATTENTION_LENGTH + lengths * lengths",
        "return lengths * ATTENTION_LENGTH",
        f"{PACKING}::test_a_long_row_weighs_more_than_its_tokens",
    ),
    (
        "data/packing.py",
        "return layout.pp.size if layout.vpp.size > 1 else 1",
        "return 1",
        f"{PACKING}::test_interleaved_pipelines_get_a_multiple_of_their_stages",
    ),
    (
        "data/packing.py",
        "by_cost = [()] * (num_bins - len(by_cost)) + by_cost",
        "by_cost = list(by_cost)",
        f"{PACKING}::test_fewer_rows_than_ranks_leaves_empty_microbatches",
    ),
    (
        "data/packing.py",
        "for row in range(1, len(groups)) if groups[row] != groups[row - 1]]",
        "for row in range(1, len(groups))]",
        f"{PACKING}::test_invariants",
    ),
    (
        "data/prompts.py",
        '_order(f"{self.seed}/{part}/{epoch}", size)',
        '_order(f"{self.seed}/{part}", size)',
        f"{TASKS}::test_every_epoch_is_a_new_order_of_all_problems",
    ),
    (
        "data/prompts.py",
        "        self.position = position\n",
        "        self.position = 0\n",
        f"{TASKS}::test_a_stream_resumes_where_it_stood",
    ),
    (
        "data/prompts.py",
        "self._drawn.append(counts[part] * size + part)",
        "self._drawn.append(counts[part] * size)",
        "unit/data/test_tasks.py::test_a_stream_draws_from_every_part",
    ),
    (
        "data/prompts.py",
        "key=lambda part: (counts[part] + 0.5) / self.sources[part].weight",
        "key=lambda part: counts[part]",
        f"{TASKS}::test_a_mixture_keeps_its_proportions_at_every_length",
    ),
    (
        "data/prompts.py",
        "if not repeat and source.size is not None and number >= source.size:",
        "if False:",
        f"{TASKS}::test_without_repeats_a_stream_ends_when_every_problem_was_seen",
    ),
    (
        "data/tasks.py",
        "keep = [_words_of(problem) not in held_out for",
        "keep = [True for",
        f"{DATASETS}::test_problems_of_the_evaluation_split_are_not_trained_on",
    ),
    (
        "data/tasks.py",
        "[not value for value in is_eval]",
        "[True for _ in is_eval]",
        f"{DATASETS}::test_a_part_is_held_out_whatever_the_order_of_the_rows",
    ),
    (
        "data/tasks.py",
        "[*eval_tasks, *others]",
        "others",
        f"{DATASETS}::test_problems_of_evaluation_sets_and_other_parts_are_not_trained_on",
    ),
    (
        "data/tasks.py",
        'check(source, key != "eval")',
        "pass",
        f"{DATASETS}::test_rows_of_an_evaluation_set_are_checked_too",
    ),
    (
        "data/rows.py",
        "if item is not None and item != []}",
        "}",
        f"{DATASETS}::test_columns",
    ),
    (
        "commands/downloads.py",
        'options, {"revision": COMMIT})',
        "options, {})",
        f"{DATASETS}::test_a_dataset_of_the_hub_is_pinned_to_its_commit_and_read_offline",
    ),
    (
        "data/collate.py",
        "torch.arange(tokens.numel()) >= len(prompt.tokens)",
        "torch.arange(tokens.numel()) >= 0",
        "unit/data/test_tokenizer.py::test_examples_learn_the_answer_and_its_end_only",
    ),
    (
        "algorithms/objective.py",
        'compared = {"dr_grpo", "grpo_process"}',
        'compared = {"dr_grpo"}',
        f"{SCHEDULE}::test_steps_that_differ_are_spread_where_tokens_have_advantages_of_their_own",
    ),
    (
        "rollout/sampling.py",
        "/{prompt_id}/{index}",
        "/{prompt_id}",
        f"{SCHEDULE}::test_seeds_are_31_bits_all_different_and_the_same_in_every_process",
    ),
    (
        "rollout/schedule.py",
        "for sample in scored if sample.index < self.samples_per_prompt)",
        "for sample in scored)",
        f"{SCHEDULE}::test_the_greedy_sample_is_the_baseline_and_is_not_trained",
    ),
    (
        "rollout/schedule.py",
        "{sample.prompt_id} {sample.index} ",
        "",
        f"{SCHEDULE}::test_digest_sees_which_sample_it_is",
    ),
    (
        "rollout/exchange.py",
        "[group[piece::pieces] for piece in range(min(pieces, len(group)))]",
        "[[request] for request in group]",
        f"{EXCHANGE}::test_a_prompts_samples_share_a_replica_and_no_replica_is_idle",
    ),
    (
        "rollout/exchange.py",
        "heappush(loads, (count + 1, tokens + len(group[0].prompt.tokens), replica))",
        "heappush(loads, (count + 1, replica, replica))",
        f"{EXCHANGE}::test_a_prompts_samples_share_a_replica_and_no_replica_is_idle",
    ),
    (
        "rollout/exchange.py",
        "parts[(self.replica.rank - hop) % self.replica.size]",
        "parts[(self.replica.rank + hop) % self.replica.size]",
        "unit/benchmarks/test_ranks512.py",
    ),
    (
        "rollout/vllm/engine.py",
        "if is_over or (samples and steps_left <= 0):",
        "if is_over:",
        "unit/rollout/vllm/test_engine.py::test_samples_are_returned_as_they_are_finished",
    ),
    (
        "rollout/vllm/engine.py",
        "POLL_STEPS if self._ranks is not None and timeout_s is None else 1",
        "1",
        "unit/rollout/vllm/test_engine.py::test_ranks_agree_once_in_several_steps",
    ),
    (
        "rollout/vllm/engine.py",
        "if self.receiver.version != self._version:",
        "if False:",
        "unit/rollout/vllm/test_engine.py::test_weights_that_change_under_a_request_are_seen",
    ),
    (
        "rollout/vllm/engine.py",
        "if largest != -negated_least:",
        "if False:",
        "unit/rollout/vllm/test_engine.py::test_the_first_rank_decides_what_a_replica_samples",
    ),
    (
        "rollout/vllm/engine.py",
        "if item not in first:",
        "if False:",
        "unit/rollout/vllm/test_engine.py::test_the_first_rank_decides_what_a_replica_samples",
    ),
    (
        "rollout/sampling.py",
        "seen.add(request.key)",
        "pass",
        "unit/rollout/test_sampling.py::test_a_request_runs_once",
    ),
    (
        "rollout/sampling.py",
        "if key not in running or keys.count(key) > 1:",
        "if key not in running:",
        "unit/split/test_engines.py::test_what_is_aborted_comes_back_once_from_engines_and_from_lost_ones",
    ),
    (
        "rollout/sampling.py",
        'later = f"/{turn}" if turn else ""',
        'later = ""',
        "unit/rollout/test_sampling.py::test_turns_have_seeds_of_their_own",
    ),
    (
        "rollout/sampling.py",
        "sample.versions[sample.trainable & (sample.versions != version)]",
        "sample.versions[sample.trainable & (sample.versions > version)]",
        "unit/rollout/test_sampling.py::test_samples_of_other_weights_are_refused",
    ),
    (
        "rollout/vllm/async_engine.py",
        "if self._tasks.pop(request.key, None):  # not aborted",
        "if [self._tasks.pop(request.key, None)]:",
        "unit/rollout/vllm/test_async_engine.py::test_an_aborted_request_comes_back_once_with_its_tokens_so_far",
    ),
    (
        "split/engines.py",
        "[request for request in self.unassigned if request.key not in keys]",
        "self.unassigned",
        "unit/split/test_engines.py::test_what_is_aborted_comes_back_once_from_engines_and_from_lost_ones",
    ),
    (
        "types.py",
        "return [*self.prompt.tokens, *later]",
        "return [*self.prompt.tokens]",
        "unit/rollout/test_sampling.py::test_earlier_turns_are_part_of_the_prompt",
    ),
    (
        "rollout/vllm/arguments.py",
        "prompt_tokens_computed=skipped - (output.num_cached_tokens or 0)",
        "prompt_tokens_computed=skipped",
        "unit/rollout/vllm/test_engine.py::test_a_stop_token_ends_the_response_and_stays_in_it",
    ),
    (
        "rewards/scorer.py",
        "[scores.get(request.id, late) for request in requests]",
        "[*scores.values()]",
        f"{SCORER}::test_a_slow_reward_scores_what_is_finished_while_others_are_generated",
    ),
    (
        "rewards/scorer.py",
        "scores = self.scores.copy()",
        "scores = {}",
        f"{SCORER}::test_what_a_reward_scored_before_it_hung_is_kept",
    ),
    (
        "rollout/exchange.py",
        "sorted(samples, key=lambda sample: sample.key)",
        "samples",
        f"{EXCHANGE}::test_one_process_sorts_and_scores",
    ),
    (
        "rollout/exchange.py",
        'row["step_rewards"] = tuple(map(tuple, row["step_rewards"]))',
        "pass",
        f"{EXCHANGE}::test_round_trip_is_exact",
    ),
    (
        "rollout/exchange.py",
        "raise ERRORS[kind](",
        "raise RuntimeError(",
        f"{EXCHANGE}::test_errors_keep_their_kind",
    ),
    (
        "rollout/reward_shaping.py",
        "(max_tokens - buffer), 0), buffer) / buffer * factor",
        "(max_tokens - buffer), 0), buffer) * factor",
        f"{SHAPING}::test_dapos_formula",
    ),
    (
        "rollout/reward_shaping.py",
        "            step_rewards=(),\n",
        "",
        f"{SHAPING}::test_what_was_cut_gets_the_reward_asked_for_and_no_steps",
    ),
    (
        "rewards/reading.py",
        'text.strip().rstrip(".\\u3002").rstrip()',
        "text.strip()",
        "unit/rewards/test_answer_pairs.py::test_pairs[answers_blind.yaml-2500]",
    ),
    (
        "rewards/reading.py",
        'without_marks(text.strip().rstrip(".\\u3002"))',
        "without_marks(text)",
        "unit/rewards/test_answer_pairs.py::test_pairs[answers.yaml-1000]",
    ),
    (
        "rewards/answers.py",
        "text = after_thoughts(response)",
        "text = response",
        f"{ANSWERS}::test_places",
    ),
    (
        "rewards/scorer.py",
        "total = weight * value + 0.0",
        "total = value + 0.0",
        f"{SCORER}::test_weighted_sum_and_each_reward_by_name",
    ),
    (
        "rewards/scorer.py",
        "tokens = sample.tokens[sample.trainable].tolist()",
        "tokens = sample.tokens.tolist()",
        f"{SCORER}::test_text_is_decoded_from_the_trainable_tokens",
    ),
    (
        "rewards/scorer.py",
        "prompt = self._prompts[sample.prompt_id]",
        "prompt = next(iter(self._prompts.values()))",
        f"{SCORER}::test_prompts_are_matched_by_id",
    ),
    (
        "rewards/remote.py",
        "values[name] = entry.get(key)",
        "values[ids[len(values)]] = entry.get(key)",
        "unit/rewards/test_remote.py::test_order_is_by_id_and_requests_overlap",
    ),
    (
        "rewards/remote.py",
        "if isinstance(value, bool) or not isinstance(value, int | float):",
        "if not isinstance(value, int | float):",
        "unit/rewards/test_remote.py::test_a_bad_answer_is_counted_under_its_own_name_and_not_asked_again",
    ),
    (
        "data/rows.py",
        'f"{problem.text} {problem.answer}".encode()',
        "pass",
        f"{TASKS}::test_half_of_a_surrogate_pair_is_refused_by_line",
    ),
    (
        "rewards/remote.py",
        "verify=self.certificates",
        'verify=self.url.startswith("https:")',
        "unit/rewards/test_remote.py::test_certificates_are_always_verified",
    ),
    (
        "rewards/remote.py",
        "trust_env=False",
        "trust_env=True",
        "unit/rewards/test_remote.py::test_proxies_in_the_environment_are_not_used",
    ),
    (
        "rewards/remote.py",
        "repr(redact(str(value))[:most])",
        "repr(str(value)[:most])",
        "unit/rewards/test_remote.py::test_logs_show_a_servers_text_escaped_and_without_secrets",
    ),
    (
        "rewards/remote.py",
        "if not valid or not url.isprintable()",
        "if not valid or not url.strip().isprintable()",
        "unit/rewards/test_remote.py::test_urls_that_are_refused",
    ),
    (
        "rewards/judge.py",
        "re.escape(MARK + tag)",
        "re.escape(MARK)",
        "unit/rewards/test_judge.py::test_a_judge_that_quotes_a_verdict_of_the_response",
    ),
    (
        "rewards/judge.py",
        "repr((request.prompt, request.response, request.answer))",
        "repr((request.prompt, request.answer))",
        "unit/rewards/test_judge.py::test_a_response_cannot_close_its_tags",
    ),
    (
        "rewards/process.py",
        "ends.append(low - 1)",
        "ends.append(low)",
        "unit/rewards/test_process.py::test_emoji_over_tokens_and_a_token_over_steps",
    ),
    (
        "rewards/answers.py",
        'text.rfind("<answer>", 0, max(text.rfind("</answer>"), 0))',
        'text.find("<answer>")',
        f"{ANSWERS}::test_places",
    ),
    (
        "rewards/answers.py",
        "if brace > start and",
        "if start < 0 and brace > start and",
        f"{ANSWERS}::test_places",
    ),
    (
        "rewards/answers.py",
        '(place == "auto" and "<answer>" in text)',
        '(place == "auto" and "</answer>" in text)',
        f"{ANSWERS}::test_places",
    ),
    (
        "rewards/answers.py",
        'BRACE = re.compile(r"\\\\.|[{}]", re.DOTALL)',
        'BRACE = re.compile(r"[{}]")',
        f"{ANSWERS}::test_places",
    ),
    (
        "rewards/answers.py",
        "if text is None:",
        'if text is None and place == "auto":',
        f"{ANSWERS}::test_a_response_that_is_cut_off_while_thinking_has_no_answer",
    ),
    (
        "rewards/rules.py",
        "if text is None:",
        "if text is None and answer is None:",
        f"{RULES}::test_without_a_final_answer_no_judge_is_asked",
    ),
    (
        "rewards/scorer.py",
        "final_answer=extract_answer(opening + text, self._scorer.answer)",
        "final_answer=text",
        f"{SCORER}::test_the_place_of_the_answer_holds_for_every_judge",
    ),
    (
        "data/tokenizer.py",
        "ids.add(tokens[0])",
        "pass",
        f"{CHAT}::test_a_text_of_one_token_ends_a_response_like_eos",
    ),
    (
        "data/tokenizer.py",
        "if pieces != [text]:",
        "if len(tokens) != 1:",
        f"{CHAT}::test_a_text_outside_the_vocabulary_is_not_one_token",
    ),
    (
        "data/tokenizer.py",
        'if system_prompt and messages[0]["role"] != "system":',
        "if system_prompt:",
        f"{CHAT}::test_messages_keep_a_system_message_of_their_own",
    ),
    (
        "data/tokenizer.py",
        "variables - ALWAYS_GIVEN - set",
        "variables - set",
        f"{CHAT}::test_refusals",
    ),
    (
        "rollout/vllm/arguments.py",
        "finish = answer.finish_reason",
        'finish = "stop" if response[-1] == 2 else "length"',
        "unit/rollout/vllm/test_engine.py::test_a_stop_token_ends_the_response_and_stays_in_it",
    ),
    (
        "run/engine.py",
        "stop_token_ids(rank.tokenizer, rank.config.rollout.stop)",
        "rank.tokenizer.eos",
        f"{LOOP}::test_a_stop_text_ends_responses",
    ),
    (
        "run/data.py",
        "answer=config.task.answer",
        'answer="auto"',
        f"{LOOP}::test_a_stop_text_ends_responses",
    ),
    (
        "rollout/vllm/arguments.py",
        "has_chunked_prefill = False",
        "has_chunked_prefill = None",
        f"{LOOP}::test_a_stop_text_ends_responses",
    ),
]
