"""Mistakes in what rows, templates and media are taken for."""

CORPUS = "corpus/test_corpus.py::test_report"
ROWS_OF = "unit/data/test_rows.py"

ROWS = [
    (
        "data/rows.py",
        "if isinstance(value, float):",
        "if False:",
        f"{ROWS_OF}::test_a_reference_is_text_as_exact_as_it_was_read",
    ),
    (
        "data/rows.py",
        "value is None or value != value",
        "value is None",
        f"{CORPUS}[reference_is_nan]",
    ),
    (
        "data/rows.py",
        '"utf-8-sig" if number == 1 else "utf-8"',
        '"utf-8"',
        f"{CORPUS}[messages_byte_order_mark]",
    ),
    (
        "data/rows.py",
        'if extra.get(name) and extra[name] != "[]":\n            raise',
        "if False:\n            raise",
        f"{CORPUS}[messages_with_a_system_column]",
    ),
    (
        "data/rows.py",
        "for name in MEDIA if extra.get(name)",
        "for name in ()",
        f"{CORPUS}[media_column_of_images]",
    ),
    (
        "data/media.py",
        'refuse_media(f"the model {folder}", names, ignore=ignore)',
        "names.clear()",
        f"{CORPUS}[media_model_with_a_processor]",
    ),
    (
        "data/hf_dataset.py",
        '{"json": read_rows, "csv": read_cells}',
        '{"csv": read_cells}',
        f"{CORPUS}[reference_is_a_date_in_json]",
    ),
    (
        "data/hf_dataset.py",
        "isinstance(value, float) and kind(value) == value",
        "False",
        f"{CORPUS}[reference_is_single_precision_in_parquet]",
    ),
    (
        "data/feedback.py",
        "prompt != both:",
        "False:",
        f"{CORPUS}[pair_context_has_a_system_message]",
    ),
    (
        "data/feedback.py",
        "[ranks[text] for text in texts], margin",
        "[sign * number for number in numbers], margin",
        f"{CORPUS}[nothing_learned_pair_of_equal_responses]",
    ),
    (
        "data/conversations.py",
        "if not any(mask[1:]):",
        "if False:",
        f"{CORPUS}[nothing_learned_generation_tags_around_another_role]",
    ),
    (
        "data/tokenizer.py",
        "else tokens[:end]",
        "else tokens",
        f"{CORPUS}[prompt_end_of_a_post_processor]",
    ),
    (
        "data/tokenizer.py",
        "ends = [end for end in self.turn_end if end in self.eos]",
        "ends = []",
        f"{CORPUS}[turn_end_of_a_completion]",
    ),
    (
        "data/tokenizer.py",
        "if content not in text:",
        'if role == "system" and content not in text:',
        f"{CORPUS}[messages_of_a_role_that_the_template_drops]",
    ),
    (
        "data/prompts.py",
        "        if before != self._data:",
        "        if len(before) != len(self._data):",
        f"{CORPUS}[changed_data_of_the_same_size]",
    ),
    (
        "commands/preflight.py",
        "stream.take(1)",
        "pass",
        f"{CORPUS}[nothing_learned_every_prompt_too_long]",
    ),
    (
        "stages/offline.py",
        "if run.start < run.steps and not run.state.has_learned:",
        "if False:",
        "unit/stages/test_sft.py::test_a_run_whose_every_update_was_skipped_is_refused_at_its_end",
    ),
    (
        "stages/sft.py",
        "[sums_N(batch.mask.long()) > 0]",
        "",
        f"{ROWS_OF}::test_rows_without_a_learned_token_do_not_raise_the_mean",
    ),
    (
        "stages/offline.py",
        "if not all(update.skipped for update in report.updates):",
        "if not report.updates[0].skipped:\n                pass\n            if False:",
        "unit/stages/test_sft.py::test_a_run_whose_every_update_was_skipped_is_refused_at_its_end",
    ),
    (
        "data/feedback.py",
        "    if len(tied) == size:",
        "    if False:",
        f"{CORPUS}[nothing_learned_pairs_all_equal]",
    ),
    (
        "data/feedback.py",
        "ranks.setdefault(text, sign * number)",
        "ranks[text] = sign * number",
        "unit/data/test_preferences.py::test_equal_responses_have_the_rank_of_the_first",
    ),
    (
        "data/tokenizer.py",
        'if key not in ("role", "content") and key not in template:',
        "if False:",
        f"{CORPUS}[messages_with_a_weight]",
    ),
    (
        "data/rows.py",
        " or MESSAGES_AS_TEXT.fullmatch(value):",
        ":",
        f"{CORPUS}[messages_as_json_text]",
    ),
    (
        "data/rows.py",
        "if None in cells:",
        "if False:",
        f"{CORPUS}[table_with_a_field_too_many]",
    ),
    (
        "data/feedback.py",
        "    if others:",
        "    if False:",
        f"{CORPUS}[pair_with_reasoning_content]",
    ),
    (
        "data/conversations.py",
        "if completion is None and not is_answered:",
        "if problem.answer is not None or completion is None and not is_answered:",
        f"{CORPUS}[answer_beside_a_completion]",
    ),
    (
        "data/tokenizer.py",
        "        if tokens and tokens[-1] in self.eos:",
        "        if False:",
        f"{CORPUS}[turn_end_in_the_response]",
    ),
    (
        "data/tokenizer.py",
        "if content.startswith(mark) or content.endswith(mark):",
        "if False:",
        f"{CORPUS}[prompt_rendered_already]",
    ),
    (
        "commands/preflight.py",
        "            if len(long) == len(lengths):",
        "            if False:",
        f"{CORPUS}[pair_of_responses_that_are_all_too_long]",
    ),
]
