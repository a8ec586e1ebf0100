"""Mistakes in reward models."""

SCORES = "unit/algorithms/test_reward_model.py"
MODELS = "unit/trainer/test_reward_model.py"
EXPORTED = f"{MODELS}::test_transformers_scores_the_exported_folder[llama]"

SERVED = "unit/commands/test_serve_reward.py"

REWARD_MODELS = [
    (
        "commands/reward_server.py",
        "if not tokens or max(tokens) >= vocab:",
        "if not tokens:",
        f"{SERVED}::test_a_malformed_request_is_answered_with_the_reason",
    ),
    (
        "commands/reward_server.py",
        "        start = row.prompt_length\n",
        "        start = None\n",
        f"{SERVED}::test_the_response_is_what_follows_the_prompts_tokens",
    ),
    (
        "commands/reward_server.py",
        'row.finish != "stop" and response',
        "response",
        f"{SERVED}::test_a_run_gets_the_scores_of_transformers",
    ),
    (
        "commands/reward_server.py",
        "signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit())",
        "pass",
        f"{SERVED}::test_sigterm_ends_it",
    ),
    (
        "commands/serve_reward.py",
        'default="127.0.0.1"',
        'default="0.0.0.0"',
        f"{SERVED}::test_only_this_machine_can_ask_unless_told_otherwise",
    ),
    (
        "algorithms/reward_model.py",
        "return mask_T.roll(1)",
        "return mask_T",
        f"{SCORES}::test_scores_are_those_of_a_plain_loop[mean]",
    ),
    (
        "algorithms/reward_model.py",
        "outputs.values_T[cu_seqlens[1:] - 1]",
        "outputs.values_T[cu_seqlens[1:] - 2]",
        f"{SCORES}::test_scores_are_those_of_a_plain_loop[last]",
    ),
    (
        "algorithms/reward_model.py",
        "((logits_M > 0) == is_right_M)",
        "((logits_M < 0) == is_right_M)",
        f"{SCORES}::test_a_step_is_right_with_the_probability_of_its_score",
    ),
    (
        "data/packing.py",
        "if isinstance(batch, PreferenceBatch) else units",
        "if False else units",
        f"{MODELS}::test_36_pairs_of_a_prompt_are_36_microbatches[last]",
    ),
    ("trainer/heads.py", "model.output_layer.weight = None", "pass", EXPORTED),
    (
        "run/checkpoints.py",
        'config | {"pad_token_id": pad}',
        "config",
        EXPORTED,
    ),
    (
        "checkpoint/hf_folder.py",
        "source.check({part.name: part.shape}, ignored=source.tensors)",
        "pass",
        f"{MODELS}::test_folders_without_a_fitting_head_are_refused",
    ),
    (
        "data/preferences.py",
        "flat.mask.index_fill(0, end_K, True)",
        "flat.mask.index_fill(0, end_K - 1, True)",
        f"{MODELS}::test_steps_end_at_their_last_tokens",
    ),
    (
        "data/tokenizer.py",
        "if token not in (None, *end))",
        "if token is not None)",
        f"{MODELS}::test_rows_are_never_padded_with_the_token_that_ends_them",
    ),
]
