"""Mistakes in config, command line, telemetry, platform, jail, launcher, checkpoint and stages."""

LOAD = "unit/config/test_load.py"
VALIDATE = "unit/config/test_validate.py"
TELEMETRY = "unit/telemetry/test_telemetry.py"
TRACKERS = "unit/telemetry/test_trackers.py"
SAMPLES = "unit/telemetry/test_sample_files.py"
GPUS = "unit/telemetry/test_gpus.py"
REPORT = "unit/telemetry/test_report.py"
SHM = "unit/platform/test_shm.py"
JAIL = "unit/jail/test_sandbox.py"
STATE = "unit/checkpoint/test_state.py"
SPAWN = "unit/launch/test_spawn.py"
EVALUATION = "unit/stages/test_evaluation.py"

HUB = "unit/launch/test_hub_model.py"
TOKENIZER = "unit/data/test_tokenizer.py"

SYSTEM = [
    (
        "models/hub.py",
        '("*/*", "consolidated*")',
        '("consolidated*",)',
        f"{HUB}::test_a_plan_and_a_dry_run_need_the_small_files_once",
    ),
    (
        "models/hub.py",
        '("*/*", "consolidated*")',
        '("*/*",)',
        f"{HUB}::test_a_plan_and_a_dry_run_need_the_small_files_once",
    ),
    ("platform/hub.py", "revision=self.revision,", "revision=None,", f"{HUB}::test_each_mistake_is_one_line"),
    (
        "models/hub.py",
        "if patterns == WEIGHTS and not any",
        "if False and not any",
        f"{HUB}::test_each_mistake_is_one_line",
    ),
    ("platform/hub.py", "case errors.GatedRepoError():", "case KeyError():", f"{HUB}::test_each_mistake_is_one_line"),
    (
        "platform/hub.py",
        "case OSError() if error.errno is not None:",
        "case KeyError():",
        f"{HUB}::test_a_cache_that_cannot_be_written",
    ),
    ("platform/hub.py", "(OSError, HTTPError,", "(OSError,", f"{HUB}::test_a_download_that_breaks_off"),
    (
        "launch/downloads.py",
        "commit.read() or revision",
        "revision",
        f"{HUB}::test_one_rank_of_a_node_asks_and_all_have_its_commit",
    ),
    (
        "launch/downloads.py",
        "if env.is_main and commit !=",
        "if commit !=",
        f"{HUB}::test_one_rank_of_a_node_asks_and_all_have_its_commit",
    ),
    (
        "launch/downloads.py",
        "(*SMALL, *CODE) if model",
        "SMALL if model",
        f"{HUB}::test_a_plan_and_a_dry_run_need_the_small_files_once",
    ),
    (
        "launch/downloads.py",
        "revision or commits.get(name)",
        "revision",
        f"{HUB}::test_a_resumed_run_keeps_its_commit",
    ),
    ("config/load.py", 'model.pop("revision", None)', "pass", f"{HUB}::test_another_path_drops_the_files_revision"),
    (
        "config/validate.py",
        "if model.revision is not None and (",
        "if False and (",
        f"{HUB}::test_each_mistake_is_one_line",
    ),
    (
        "cli.py",
        "            download_weights(config, env)",
        "            pass",
        f"{HUB}::test_a_plan_and_a_dry_run_need_the_small_files_once",
    ),
    (
        "data/tokenizer.py",
        "if code and not trust_remote_code:",
        "if False:",
        f"{TOKENIZER}::test_the_models_code_runs_only_if_trusted",
    ),
    ("data/tokenizer.py", 'stream.read(1) == b"\\n"', "False", f"{TOKENIZER}::test_a_missing_package_is_named"),
    (
        "data/tokenizer.py",
        'if files == ["tokenizer.json"]:',
        'if "tokenizer_config.json" not in files:',
        f"{TOKENIZER}::test_vocabulary_and_merges",
    ),
    (
        "checkpoint/hf_folder.py",
        "in (*SMALL, *CODE) for",
        "in SMALL for",
        "unit/checkpoint/test_hf.py::test_files_of_config_and_tokenizer_are_copied",
    ),
    (
        "launch/preflight.py",
        "        check_tokenizer(folder,",
        "        str(folder) or check_tokenizer(folder,",
        "unit/launch/test_preflight.py::test_a_tokenizer_that_cannot_be_loaded_is_refused_before_a_process_starts",
    ),
    (
        "config/load.py",
        "return _merge(preset, explicit)",
        "return _merge(explicit, preset)",
        f"{LOAD}::test_explicit_values_win_over_any_preset",
    ),
    (
        "telemetry/metrics.py",
        '"reward/std": pstdev(rewards)',
        '"reward/std": fmean(rewards)',
        f"{TELEMETRY}::test_rollout_metrics_by_hand",
    ),
    (
        "stages/evaluation.py",
        'sample.rewards["accuracy"] >= 1.0',
        'sample.rewards["accuracy"] > 0',
        f"{EVALUATION}::test_partial_credit_is_not_right",
    ),
    (
        "stages/evaluation.py",
        "request_seed(self.run_seed, -1, prompt.prompt_id, index)",
        "request_seed(self.run_seed, -1, prompt.prompt_id, 0)",
        f"{EVALUATION}::test_a_set_with_several_samples_has_pass_at_k_and_intervals_of_problems",
    ),
    (
        "config/load.py",
        "if key in RENAMED:",
        "if False:",
        f"{LOAD}::test_a_renamed_key_is_refused_with_its_new_name",
    ),
    (
        "config/load.py",
        'model.pop("create", None)',
        "pass",
        f"{LOAD}::test_path_on_the_command_line_replaces_create",
    ),
    (
        "config/load.py",
        'key = key.rpartition(".")[0]',
        'key = ""',
        f"{LOAD}::test_errors_in_a_file_name_its_line",
    ),
    (
        "config/validate.py",
        '("top_k", (-1, 0)), ("min_p", (0.0,))',
        '("top_k", (-1, 0))',
        f"{VALIDATE}::test_refusals",
    ),
    (
        "config/validate.py",
        'if algorithm.use_rollout_logprobs and algorithm.correction != "none":',
        "if False:",
        f"{VALIDATE}::test_refusals",
    ),
    (
        "config/validate.py",
        "if world % product:",
        "if False:",
        f"{VALIDATE}::test_refusals",
    ),
    (
        "telemetry/metrics.py",
        'if line["step"] < start]',
        'if line["step"] <= start]',
        f"{TELEMETRY}::test_resume_drops_the_steps_done_again_and_a_torn_line",
    ),
    (
        "telemetry/metrics.py",
        "sum(update.skipped for update in updates)",
        "len(updates)",
        f"{TELEMETRY}::test_update_metrics_by_hand",
    ),
    (
        "telemetry/timeline.py",
        'lead = "\\n" if self._is_empty else ",\\n"',
        'lead = "\\n"',
        f"{TELEMETRY}::test_timeline_is_whole_json_after_every_flush",
    ),
    (
        "platform/shm.py",
        "if path.name.startswith(prefix):",
        "if path.name.startswith(MARK):",
        f"{SHM}::test_only_the_jobs_own",
    ),
    (
        "platform/shm.py",
        'if not Path(f"/proc/{pid}").exists() for name',
        "for name",
        f"{SHM}::test_the_dead_leave_nothing",
    ),
    (
        "jail/sandbox.py",
        "env=environment |",
        "env=dict(os.environ) | environment |",
        f"{JAIL}::test_the_environment_and_the_arguments_tell_nothing",
    ),
    (
        "jail/sandbox.py",
        "shutil.rmtree(folder, ignore_errors=True)",
        "pass",
        f"{JAIL}::test_no_folder_is_left",
    ),
    (
        "jail/sandbox.py",
        "if missing and self.limits.strict:",
        "if False:",
        f"{JAIL}::test_a_limit_that_fails_when_the_code_starts_leaves_the_sample_out",
    ),
    (
        "launch/exit_codes.py",
        "return REFUSED",
        "return DEFECT",
        f"{SPAWN}::test_first_failure_is_said_once",
    ),
    (
        "launch/exit_codes.py",
        "if frames and frames[-1].filename.startswith(PACKAGE):",
        "if frames:",
        f"{SPAWN}::test_a_defect_shows_the_last_lines_and_where_its_peer_was",
    ),
    (
        "stages/evaluation.py",
        "or step == self.last_step",
        "",
        f"{EVALUATION}::test_a_run_is_one_line_of_shares",
    ),
    (
        "checkpoint/files.py",
        "for step in steps(folder)[:-keep]:",
        "for step in steps(folder)[: -keep - 1]:",
        f"{STATE}::test_names_come_last_and_only_the_newest_stay",
    ),
    (
        "checkpoint/files.py",
        "elif sums(folder, [name])[name] != entry:",
        "elif False:",
        f"{STATE}::test_a_damaged_checkpoint_is_skipped_by_name",
    ),
    (
        "checkpoint/state.py",
        'state["step"] = state["step"].clone()',
        "pass",
        f"{STATE}::test_everything_comes_back_as_it_was_when_it_was_saved",
    ),
    (
        "checkpoint/state.py",
        'np.random.set_state(state["numpy"])',
        "pass",
        f"{STATE}::test_everything_comes_back_as_it_was_when_it_was_saved",
    ),
    (
        "checkpoint/state.py",
        "self.prompts.restore(",
        "dict(",
        f"{STATE}::test_everything_comes_back_as_it_was_when_it_was_saved",
    ),
    (
        "telemetry/trackers.py",
        "purge_step=start",
        "purge_step=None",
        f"{TRACKERS}::test_tensorboard_has_every_number_once",
    ),
    (
        "telemetry/trackers.py",
        "add_scalar(name, value, step)",
        "add_scalar(name, value, step + 1)",
        f"{TRACKERS}::test_tensorboard_has_every_number_once",
    ),
    (
        "telemetry/trackers.py",
        "self._writer.flush()",
        "pass",
        f"{TRACKERS}::test_tensorboard_is_complete_when_a_run_is_killed",
    ),
    (
        "telemetry/trackers.py",
        "self._running.pop(name, None)",
        "pass",
        f"{TRACKERS}::test_a_tracker_that_fails_is_dropped_with_one_line",
    ),
    (
        "telemetry/trackers.py",
        "if not start or not file.is_file():",
        "if True:",
        f"{TRACKERS}::test_wandb_offline",
    ),
    (
        "telemetry/trackers.py",
        'if row["step"] < start:',
        "if False:",
        f"{TRACKERS}::test_wandb_offline",
    ),
    (
        "telemetry/log.py",
        "self._trackers.log(step, metrics)",
        "self._trackers.log(step + 1, metrics)",
        f"{TELEMETRY}::test_every_metric_reaches_the_trackers_at_its_step",
    ),
    (
        "telemetry/sample_files.py",
        "[: -self._settings.keep]",
        "[: -self._settings.keep - 1]",
        f"{SAMPLES}::test_files_are_bounded_and_a_resumed_run_repeats_its_own",
    ),
    (
        "telemetry/sample_files.py",
        "if _step(file) >= start:",
        "if _step(file) > start:",
        f"{SAMPLES}::test_files_are_bounded_and_a_resumed_run_repeats_its_own",
    ),
    (
        "telemetry/sample_files.py",
        "[scored.mask[span]]",
        "",
        f"{SAMPLES}::test_a_line",
    ),
    (
        "telemetry/sample_files.py",
        'text.encode("utf-8", errors="replace")',
        "text",
        f"{SAMPLES}::test_text_that_is_not_utf_8",
    ),
    (
        "telemetry/metrics.py",
        '.split("\\n") if file',
        ".splitlines() if file",
        f"{REPORT}::test_sampled_text_stays_text",
    ),
    (
        "telemetry/report.py",
        "html.escape(str(values['response']))",
        "str(values['response'])",
        f"{REPORT}::test_sampled_text_stays_text",
    ),
    (
        "telemetry/report.py",
        "reverse=True)",
        "reverse=False)",
        f"{REPORT}::test_the_best_and_the_worst_samples_of_the_last_file",
    ),
    (
        "telemetry/report.py",
        "if len(set(row)) > 1]",
        "]",
        f"{REPORT}::test_a_comparison_of_two_runs",
    ),
    (
        "telemetry/gpus.py",
        "with suppress(self._nvml.NVMLError):  # not supported",
        "with suppress(KeyError):  # not supported",
        f"{GPUS}::test_two_gpus",
    ),
    (
        "telemetry/gpus.py",
        "nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED",
        "nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED",
        f"{GPUS}::test_two_gpus",
    ),
    (
        "launch/preflight.py",
        "check_trackers(config.telemetry)",
        "pass",
        "unit/launch/test_preflight.py::test_trackers_are_checked_for_the_runs_that_use_them",
    ),
]
