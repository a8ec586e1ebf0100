"""Mistakes in what is learned from preferences."""

LOSSES = "unit/algorithms/test_preference.py"
DATA = "unit/data/test_preferences.py"
DPO = "unit/stages/test_dpo.py"

COLLATE = "unit/data/test_collate.py"

PREFERENCES = [
    (
        "data/collate.py",
        "outcome_N - shift_N, -1)",
        "outcome_N, -1)",
        f"{COLLATE}::test_rows_of_a_batch_are_the_batch_of_these_rows",
    ),
    (
        "algorithms/preference.py",
        "-logsigmoid(better_P - worse_P - margins)",
        "-logsigmoid(better_P - worse_P + margins)",
        f"{LOSSES}::test_bradley_terry_is_openrlhfs",
    ),
    (
        "algorithms/preference.py",
        "-(1 - flipped) * logsigmoid(beta * h_P) - flipped * logsigmoid(-beta * h_P)",
        "-logsigmoid(beta * h_P)",
        f"{LOSSES}::test_dpo_is_the_peers",
    ),
    (
        "algorithms/preference.py",
        "count_G.sum().expand(num_groups)",
        "count_G * num_groups",
        f"{LOSSES}::test_the_loss_is_the_mean_over_all_pairs_however_they_are_packed",
    ),
    (
        "algorithms/preference.py",
        "count_G * (count_G > 0).sum() if by_prompt",
        "count_G * num_groups if by_prompt",
        f"{LOSSES}::test_every_pair_or_every_prompt_counts_equally",
    ),
    (
        "algorithms/preference.py",
        "(rows.cu_seqlens[1:] - 1)[pairs[:, 0]]",
        "(rows.cu_seqlens[1:] - 1)[pairs[:, 1]] * 0",
        f"{LOSSES}::test_the_loss_is_the_mean_over_all_pairs_however_they_are_packed",
    ),
    (
        "algorithms/preference.py",
        "if rewards[best] > rewards[worst] else []",
        "if len(rows) > 1 else []",
        f"{LOSSES}::test_the_best_and_the_worst_of_each_prompt",
    ),
    (
        "data/preferences.py",
        "if labels[i] > labels[j]",
        "if labels[i] >= labels[j]",
        f"{DATA}::test_formats",
    ),
    (
        "data/feedback.py",
        "    for problem in source.problems():",
        "    for problem in [source.problem(0)]:",
        f"{DATA}::test_every_row_is_checked_before_ranks_start",
    ),
    (
        "stages/dpo.py",
        "self.known.setdefault(key, logprob)",
        "self.known[key] = 0.0",
        f"{DPO}::test_the_reference_is_the_first_model_and_the_loss_that_of_the_formula",
    ),
    (
        "stages/dpo.py",
        "with self.reference.in_use():",
        "if True:",  # the current model as the reference, right in step 1 only
        f"{DPO}::test_the_reference_is_the_first_model_and_the_loss_that_of_the_formula",
    ),
    (
        "data/prompts.py",
        'self.kept.update(state.get("kept", {}))',
        "pass",
        f"{DPO}::test_a_response_is_scored_once_and_resumed",
    ),
]
