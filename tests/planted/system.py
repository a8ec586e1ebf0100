"""Mistakes in config, command line, telemetry, platform, jail, launcher, checkpoint and stages."""

LOAD = "unit/config/test_load.py"
VALIDATE = "unit/config/test_validate.py"
TELEMETRY = "unit/telemetry/test_telemetry.py"
SHM = "unit/platform/test_shm.py"
JAIL = "unit/jail/test_sandbox.py"
STATE = "unit/checkpoint/test_state.py"
SPAWN = "unit/launch/test_spawn.py"
EVALUATION = "unit/stages/test_evaluation.py"

SYSTEM = [
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
]
