"""Mistakes in what a model folder or an adapter is read as."""

KEYS = "unit/models/test_config_keys.py"
JSON = "unit/platform/test_json_text.py"


def report(name: str) -> str:
    return f"corpus/test_corpus.py::test_report[{name}]"


FOLDERS = [
    (
        "platform/json_text.py",
        "    if len(values) < len(pairs):\n",
        "    if False:\n",
        f"{JSON}::test_what_is_refused_names_the_place",
    ),
    (
        "models/headers.py",
        "twice = min(tensors.keys() & header, default=None)",
        "twice = None",
        report("which_files_one_tensor_in_two_shards"),
    ),
    (
        "models/headers.py",
        "        files = [WHOLE]\n",
        "        pass\n",
        report("which_files_another_format_beside_the_model"),
    ),
    (
        "models/headers.py",
        "if names and whole.is_file() and WHOLE not in files:",
        "if False:",
        report("which_files_an_index_that_does_not_list_the_whole_model"),
    ),
    (
        "models/headers.py",
        " == 1 and first == second",
        " == 1 and first[:64] == second[:64]",
        report("untied_head_in_the_last_shard"),
    ),
    (
        "models/headers.py",
        "return len({(x.shape, x.dtype) for x in tensors}) == 1 and ",
        "return len({x.shape for x in tensors}) == 1 and len(first) != len(second) or ",
        report("untied_head_rounded_in_another_dtype"),
    ),
    (
        "commands/conversion.py",
        "    if shape.tied:\n        check_tied(folder.tensors)\n",
        "",
        report("untied_head_that_convert_would_drop"),
    ),
    (
        "trainer/trainer.py",
        "        check_weights(folder, shape, table)\n",
        "",
        "unit/trainer/test_load.py::test_a_trainer_refuses_a_head_that_is_not_tied",
    ),
    (
        "models/weights.py",
        "if name not in expected and name not in ignored and",
        "if name not in expected and name not in tensors and",
        report("which_files_more_layers_than_config_json"),
    ),
    (
        "models/config_json.py",
        "if all(map(self.raw.get, ROPES)):",
        "if False:",
        report("two_keys_rope_scaling_beside_rope_parameters"),
    ),
    (
        "models/config_json.py",
        "if alone[0].rope(**options) != alone[1].rope(**options):",
        "if self.raw[ROPES[0]] != self.raw[ROPES[1]]:",
        report("two_keys_rope_scaling_that_means_the_same"),
    ),
    (
        "models/config_json.py",
        "            self.only(**{SCALED[1]: scaling[SCALED[1]]})  # transformers prefers it\n",
        "",
        f"{KEYS}::test_what_transformers_applies_is_read_or_refused[gpt_oss]",
    ),
    (
        "models/config_json.py",
        "    per_layer_config ",
        "",
        report("two_keys_layers_of_their_own_size"),
    ),
    (
        "models/config_json.py",
        "if self.raw[name] != self.raw[present[0]]:",
        "if False:",
        report("two_keys_number_of_experts"),
    ),
    (
        "models/config_json.py",
        "return self._checked(key, value, type(value) is bool, ",
        "return self._checked(key, bool(value), True, ",
        report("untied_head_flag_that_is_text"),
    ),
    (
        "models/registry.py",
        "and name != family.architecture:",
        "and name in (None,):",
        report("two_keys_architecture_of_a_classifier"),
    ),
    (
        "models/headers.py",
        "if stream.read(len(POINTER)) == POINTER:",
        "if False:",
        report("which_files_a_pointer_of_git_lfs"),
    ),
    (
        "models/weights.py",
        "if name in shapes and name not in in_blocks and tensor.dtype not in FLOATS:",
        "if False:",
        report("which_files_integers_that_config_json_does_not_describe"),
    ),
    (
        "models/config_json.py",
        "(factors[1] or factors[0] not in (None, 1))",
        "factors[1]",
        "unit/config/test_validate.py::test_yarns_factors_that_transformers_and_vllm_read_differently",
    ),
    (
        "config/model.py",
        "            chosen > shape.experts\n            or ",
        "            ",
        "unit/config/test_validate.py::test_more_experts_per_token_than_experts",
    ),
    (
        "data/user_code.py",
        "except (Exception, SystemExit) as error:",
        "except Exception as error:",
        report("reward_that_ends_the_process"),
    ),
    (
        "data/tokenizer.py",
        "        if config.family in CONFIG_MAPPING:\n",
        "        if False:\n",
        report("two_keys_layer_types_of_a_pruned_model"),
    ),
    (
        "models/llama.py",
        "    config.no_window()\n",
        "",
        report("two_keys_window_that_only_vllm_applies"),
    ),
    (
        "models/formats.py",
        "    _accept(weights)\n",
        "",
        "unit/models/test_formats.py::test_a_key_that_is_not_known_is_refused",
    ),
    (
        "data/tokenizer.py",
        "if max(ends, default=0) >= vocab > 0:",
        "if max(ends, default=0) > vocab > 0:",
        report("tokenizer_larger_than_the_model_end_token_in_generation_config"),
    ),
    (
        "data/tokenizer.py",
        "if last >= self.vocab > 0:",
        "if False:",
        report("tokenizer_larger_than_the_model_and_a_prompt_needs_it"),
    ),
    (
        "data/tokenizer.py",
        "if inner.vocab_size > vocab > 0:",
        "if False:",
        report("tokenizer_of_another_model"),
    ),
    (
        "data/tokenizer.py",
        'return self.check(self.inner(text, add_special_tokens=special)["input_ids"])',
        'return tuple(self.inner(text, add_special_tokens=special)["input_ids"])',
        "unit/data/test_tokenizer.py::test_a_conversation_with_a_token_beyond_the_vocabulary",
    ),
    (
        "commands/preflight.py",
        "self.is_tokenized and self._tokenizer.exceeds_model",
        "False",
        report("tokenizer_larger_than_the_model_and_one_of_many_needs_it"),
    ),
    (
        "config/lora.py",
        "if value and key not in accepted:",
        "if value and key in ():",
        report("adapter_of_a_later_peft"),
    ),
    (
        "config/lora.py",
        '    "init_lora_weights": (True, False, None, "gaussian"),\n',
        '    "init_lora_weights": (True, False, None, "gaussian", "pissa"),\n',
        report("adapter_of_a_base_that_pissa_changed"),
    ),
    (
        "models/hub.py",
        " or not any(map(target.is_relative_to, places)):",
        ":",
        report("link_out_of_the_models_folder"),
    ),
    (
        "models/hub.py",
        '    if home.parent.name == "snapshots":\n',
        "    if False:\n",
        report("link_into_the_blobs_of_a_hub_cache"),
    ),
    (
        "models/hub.py",
        'places.append(home.parents[1] / "blobs")',
        "places.append(home.parents[1])",
        report("link_out_of_a_hub_cache"),
    ),
]
