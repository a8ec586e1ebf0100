"""Mistakes in reward models."""

SCORES = "unit/algorithms/test_reward_model.py"
MODELS = "unit/trainer/test_reward_model.py"
EXPORTED = f"{MODELS}::test_transformers_scores_the_exported_folder[llama]"

REWARD_MODELS = [
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
        "stages/reward_model.py",
        ", units=batch.group.tolist())",
        ")",
        f"{MODELS}::test_36_pairs_of_a_prompt_are_36_microbatches[last]",
    ),
    ("trainer/heads.py", "model.output_layer.weight = None", "pass", EXPORTED),
    (
        "launch/build.py",
        '{"config.json": config | {"pad_token_id": pad}, **tokenizer}',
        '{"config.json": config}',
        EXPORTED,
    ),
    (
        "trainer/load.py",
        "source.check({part.name: part.shape}, ignored=source.tensors)",
        "pass",
        f"{MODELS}::test_folders_without_a_fitting_head_are_refused",
    ),
    (
        "data/steps.py",
        "flat.mask.index_fill(0, end_K, True)",
        "flat.mask.index_fill(0, end_K - 1, True)",
        f"{MODELS}::test_steps_end_at_their_last_tokens",
    ),
    (
        "data/tokenizer.py",
        "if token is not None and token not in end)",
        "if token is not None)",
        f"{MODELS}::test_rows_are_never_padded_with_the_token_that_ends_them",
    ),
]
