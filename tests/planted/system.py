"""Mistakes in config, command line, telemetry, platform, launcher, checkpoint and stages."""

LOAD = "unit/config/test_load.py"
VALIDATE = "unit/config/test_validate.py"
TELEMETRY = "unit/telemetry/test_telemetry.py"
TRACKERS = "unit/telemetry/test_trackers.py"
SAMPLES = "unit/telemetry/test_sample_files.py"
GPUS = "unit/telemetry/test_gpus.py"
TOLERANCE = "unit/telemetry/test_tolerance.py"
REPORT = "unit/telemetry/test_report.py"
STATE = "unit/checkpoint/test_state.py"
VARIABLES = "unit/run/test_rank_process.py"
SPAWN = "unit/processes/test_spawn.py"
CONFIGS = "unit/config/test_run_dir.py"
EVALUATION = "unit/stages/test_evaluation.py"

HUB = "unit/commands/test_downloads.py"
TOKENIZER = "unit/data/test_tokenizer.py"

SYSTEM = [
    (
        "models/hub.py",
        'IGNORED = ("*/*", "consolidated*")',
        'IGNORED = ("consolidated*",)',
        f"{HUB}::test_a_plan_and_a_dry_run_need_the_small_files_once",
    ),
    (
        "models/hub.py",
        'IGNORED = ("*/*", "consolidated*")',
        'IGNORED = ("*/*",)',
        f"{HUB}::test_a_plan_and_a_dry_run_need_the_small_files_once",
    ),
    (
        "platform/hub.py",
        "revision=self.revision,",
        "revision=None,",
        f"{HUB}::test_each_mistake_is_one_line",
    ),
    (
        "models/hub.py",
        "if patterns == WEIGHTS and not any",
        "if False and not any",
        f"{HUB}::test_each_mistake_is_one_line",
    ),
    (
        "platform/hub.py",
        "case errors.GatedRepoError():",
        "case KeyError():",
        f"{HUB}::test_each_mistake_is_one_line",
    ),
    (
        "platform/hub.py",
        "case OSError() if error.errno is not None:",
        "case KeyError():",
        f"{HUB}::test_a_cache_that_cannot_be_written",
    ),
    (
        "platform/hub.py",
        "(OSError, HTTPError,",
        "(OSError,",
        f"{HUB}::test_a_download_that_breaks_off",
    ),
    (
        "commands/downloads.py",
        "commit.read() or revision",
        "revision",
        f"{HUB}::test_one_rank_of_a_node_asks_and_all_have_its_commit",
    ),
    (
        "commands/downloads.py",
        "if env.is_main and commit !=",
        "if commit !=",
        f"{HUB}::test_one_rank_of_a_node_asks_and_all_have_its_commit",
    ),
    (
        "commands/downloads.py",
        "files = (*SMALL, *CODE)",
        "files = SMALL",
        f"{HUB}::test_a_plan_and_a_dry_run_need_the_small_files_once",
    ),
    (
        "commands/downloads.py",
        "entry.revision or before)",
        "entry.revision)",
        f"{HUB}::test_a_resumed_run_keeps_its_commit",
    ),
    (
        "commands/downloads.py",
        'pinned = {key: f"{name}@{COMMIT}"}',
        "pinned = {key: name}",
        f"{HUB}::test_other_models_keep_their_commits",
    ),
    (
        "commands/downloads.py",
        'if command == "train" or "path" in entry.pinned:',
        "if True:",
        f"{HUB}::test_other_models_are_downloaded_where_they_are_needed",
    ),
    (
        "config/load.py",
        'model.pop("revision", None)',
        "pass",
        f"{HUB}::test_another_path_drops_the_files_revision",
    ),
    (
        "config/validate.py",
        "if model.revision is not None and (",
        "if False and (",
        f"{HUB}::test_each_mistake_is_one_line",
    ),
    (
        "commands/start.py",
        "            download_weights(config, env, command)\n",
        "            pass\n",
        f"{HUB}::test_a_plan_and_a_dry_run_need_the_small_files_once",
    ),
    (
        "data/tokenizer.py",
        "if code and not trust_remote_code:",
        "if False:",
        f"{TOKENIZER}::test_the_models_code_runs_only_if_trusted",
    ),
    (
        "data/tokenizer.py",
        'file.read_bytes()[:1] == b"\\n"',
        "False",
        f"{TOKENIZER}::test_a_missing_package_is_named",
    ),
    (
        "data/tokenizer.py",
        'if files == ["tokenizer.json"]:',
        'if "tokenizer_config.json" not in files:',
        f"{TOKENIZER}::test_vocabulary_and_merges",
    ),
    (
        "models/hub.py",
        "map(folder.glob, (*SMALL, *CODE))",
        "map(folder.glob, SMALL)",
        "unit/checkpoint/test_hf.py::test_files_of_config_and_tokenizer_are_copied",
    ),
    (
        "commands/preflight.py",
        "settings = (has_tokenizer, ",
        "settings = (",
        "unit/commands/test_preflight.py::test_a_tokenizer_that_cannot_be_loaded_is_refused_before_a_process_starts",
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
        "request_seed(run_seed, -1, prompt.prompt_id, index)",
        "request_seed(run_seed, -1, prompt.prompt_id, 0)",
        f"{EVALUATION}::test_a_set_with_several_samples_has_pass_at_k_and_intervals_of_problems",
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
        "config/rollout.py",
        '("top_k", (-1, 0)), ("min_p", (0.0,))',
        '("top_k", (-1, 0))',
        f"{VALIDATE}::test_refusals",
    ),
    (
        "config/algorithm.py",
        'algorithm.use_rollout_logprobs and algorithm.correction not in ("none", "opsm"),',
        "False,",
        f"{VALIDATE}::test_refusals",
    ),
    (
        "config/launch.py",
        "if trainers % product:",
        "if False:",
        f"{VALIDATE}::test_refusals",
    ),
    (
        "telemetry/metrics.py",
        'if row["step"] < start:',
        'if row["step"] <= start:',
        f"{TELEMETRY}::test_resume_drops_the_steps_done_again_and_a_torn_line",
    ),
    (
        "telemetry/metrics.py",
        "sum(update.skipped for update in updates)",
        "len(updates)",
        f"{TELEMETRY}::test_update_metrics_by_hand",
    ),
    (
        "telemetry/log.py",
        'self._separator = ",\\n"',
        'self._separator = "\\n"',
        f"{TELEMETRY}::test_timeline_is_whole_json_after_every_flush",
    ),
    (
        "processes/exit_codes.py",
        '"CheckFailed": REFUSED',
        '"CheckFailed": DEFECT',
        f"{SPAWN}::test_first_failure_is_said_once",
    ),
    (
        "processes/exit_codes.py",
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
        "checkpoint/state.py",
        "for old in files.steps(self.folder)[: -self.keep]:",
        "for old in files.steps(self.folder)[: -self.keep - 1]:",
        f"{STATE}::test_names_come_last_and_only_the_newest_stay",
    ),
    (
        "checkpoint/files.py",
        "elif found != entry:",
        "elif False:",
        f"{STATE}::test_a_damaged_checkpoint_is_skipped_by_name",
    ),
    (
        "processes/heartbeat.py",
        "in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)",
        "== psutil.STATUS_ZOMBIE",
        f"{SPAWN}::test_a_stopped_rank_is_named_long_before_the_timeout",
    ),
    (
        "processes/heartbeat.py",
        "min(elapsed, 2 * self.every_s)",
        "elapsed",
        "unit/processes/test_heartbeat.py::test_time_in_which_the_launcher_did_not_look_does_not_count",
    ),
    (
        "processes/heartbeat.py",
        "os.set_inheritable(env.store_fd, False)",
        "pass",
        "unit/processes/test_heartbeat.py::test_the_store_has_no_name_and_is_not_inherited",
    ),
    *[
        (f"processes/{file}.py", text, mistake, f"unit/processes/test_heartbeat.py::{test}")
        for file, text, mistake, test in [
            ("heartbeat", "self.cpu_s < self.seconds * BUSY_CPU", "True", "test_who_is_late"),
            (
                "heartbeat",
                "return stuck, waiting",
                "return list(states), waiting",
                "test_who_is_late",
            ),
            ("heartbeat", "if place not in usual]", "]", "test_who_is_late"),
            ("heartbeat", "(state.phase, state.operation)", "state.operation", "test_who_is_late"),
            (
                "heartbeat",
                '"/megarl/rewards/" in file',
                "False",
                "test_a_sample_shows_where_the_main_thread_is",
            ),
            (
                "heartbeat",
                "p2p_communication|",
                "",
                "test_a_sample_shows_where_the_main_thread_is",
            ),
            (
                "heartbeat",
                "state.is_stuck and not state.is_limited",
                "state.is_stuck",
                "test_a_late_rank_is_named_with_its_stack_and_its_victims",
            ),
            (
                "heartbeat",
                "if (rank, how) not in self._reported:",
                "if True:",
                "test_a_late_rank_is_named_with_its_stack_and_its_victims",
            ),
        ]
    ],
    (
        "processes/spawn.py",
        "process.send_signal(signal.SIGTERM)",
        "pass",
        f"{SPAWN}::test_sigterm_reaches_ranks_that_train",
    ),
    ("run/rank_process.py", "set_env(**LOOPBACK)", "pass", f"{SPAWN}::test_done"),
    (
        "run/rank_process.py",
        "max(parallel.tensor, parallel.context) == 1",
        "parallel.tensor == 1",
        VARIABLES,
    ),
    ("run/rank_process.py", "compute_capability() >= BLACKWELL", "False", VARIABLES),
    (
        "run/rank_process.py",
        "max(parallel.tensor, parallel.context) == 1",
        "False",
        f"{SPAWN}::test_done",
    ),
    (
        "split/ray_actors.py",
        "            set_env(**trainer_variables(config))\n",
        "",
        "unit/split/test_engines.py::test_only_ranks_that_train_run_kernels_in_launch_order",
    ),
    (
        "run/rank_process.py",
        "except BaseException as",
        "except Exception as",
        f"{SPAWN}::test_first_failure_is_said_once",
    ),
    (
        "processes/exit_codes.py",
        "except OSError as error:",
        "except ValueError as error:",
        f"{SPAWN}::test_a_full_disk_is_one_line_and_keeps_its_exit_code",
    ),
    (
        "config/run_dir.py",
        "    if changes:",
        "    if False:",
        f"{CONFIGS}::test_other_settings_are_refused_by_name",
    ),
    (
        "config/run_dir.py",
        "if not changes:",
        "if True:",
        f"{CONFIGS}::test_each_part_leaves_its_config",
    ),
    (
        "run/models.py",
        "not torch.isfinite(",
        "not bool(",
        f"{STATE}::test_weights_that_are_not_finite_are_named",
    ),
    (
        "checkpoint/writer.py",
        "            shutil.rmtree(folder, ignore_errors=True)",
        "            pass",
        f"{STATE}::test_a_full_disk_is_named_and_the_older_checkpoint_stays",
    ),
    (
        "checkpoint/state.py",
        "except ValueError as difference:",
        "except KeyError as difference:",
        f"{STATE}::test_another_models_checkpoint_is_refused_with_what_differs",
    ),
    (
        "checkpoint/rank_state.py",
        "-(-(skipped + len(piece)) // row)",
        "-(-len(piece) // row)",
        "unit/checkpoint/test_rank_state.py::test_a_range_of_elements_is_read",
    ),
    (
        "checkpoint/rank_state.py",
        "elements[owners[stored]] += stored.box.numel",
        "pass",
        "unit/checkpoint/test_rank_state.py::test_a_tensor_belongs_to_one_of_its_ranks",
    ),
    (
        "checkpoint/rank_state.py",
        "shared[stored.optimizer].append(stored)",
        "shared[stored.optimizer].append(replace(stored, shard=replace(stored.shard, data=stored.shard.data.clone())))",
        f"{STATE}::test_saving_and_loading_need_room_for_one_copy",
    ),
    (
        "checkpoint/rank_state.py",
        'state["step"] = torch.tensor(float(step))',
        'state["step"] = vars(part).setdefault("shared_step", torch.tensor(float(step)))',
        f"{STATE}::test_everything_comes_back_as_it_was_when_it_was_saved",
    ),
    (
        "checkpoint/state.py",
        "(np.random.get_state, np.random.set_state)",
        "(np.random.get_state, str)",
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
        "if step >= start:",
        "if step > start:",
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
        'text.encode(errors="backslashreplace")',
        "text",
        f"{SAMPLES}::test_text_that_is_not_utf_8",
    ),
    (
        "telemetry/metrics.py",
        'with file.open("rb") as lines:',
        'for lines in [[l.encode() for l in file.read_text(errors="replace").splitlines()]]:',
        f"{REPORT}::test_sampled_text_stays_text",
    ),
    (
        "telemetry/page.html",
        "{{ sample.response }}",
        "{{ sample.response|safe }}",
        f"{REPORT}::test_sampled_text_stays_text",
    ),
    (
        "telemetry/metrics.py",
        "except (ValueError, RecursionError):",
        "except ValueError:",
        f"{TOLERANCE}::test_a_bad_line_is_left_out_and_counted",
    ),
    (
        "telemetry/metrics.py",
        'decode(errors="replace")',
        "decode()",
        f"{TOLERANCE}::test_an_odd_line_is_read",
    ),
    (
        "telemetry/metrics.py",
        "type(value) is not kind",
        "not isinstance(value, kind)",
        f"{TOLERANCE}::test_a_bad_line_is_left_out_and_counted",
    ),
    (
        "telemetry/metrics.py",
        "not abs(value) <= sys.float_info.max",
        'not abs(value) < float("inf")',
        f"{TOLERANCE}::test_an_odd_line_is_read",
    ),
    (
        "telemetry/metrics.py",
        'with replacing(file) as staging, staging.open("w"',
        'with file.open("r+"',
        f"{TOLERANCE}::test_a_kill_while_a_resumed_run_forgets_steps_loses_nothing",
    ),
    (
        "telemetry/page.html",
        "{{ sample.reward }}",
        "{{ sample.reward|safe }}",
        f"{TOLERANCE}::test_an_odd_sample_is_shown",
    ),
    (
        "telemetry/sample_files.py",
        'r"step_([0-9]{6,})\\.jsonl"',
        'r"step_([0-9]+)\\.jsonl"',
        f"{TOLERANCE}::test_stray_files_are_ignored_and_kept",
    ),
    (
        "telemetry/curves.py",
        "if lowest < value < MAX_DRAWN]",
        "if value > lowest or lowest < 0]",
        f"{TOLERANCE}::test_any_finite_number_is_drawn_or_left_out",
    ),
    (
        "telemetry/curves.py",
        "_plain(panel.title, most=60)",
        "panel.title",
        f"{TOLERANCE}::test_any_text_is_drawn",
    ),
    (
        "stages/evaluation.py",
        "forget_steps(self.file, step, result)",
        "self.file.write_text(str(result))",
        f"{EVALUATION}",
    ),
    (
        "telemetry/report.py",
        "str), key=_reward, reverse=True",
        "str), key=_reward, reverse=False",
        f"{REPORT}::test_samples_are_grouped_by_reward",
    ),
    (
        "platform/env.py",
        'text = text.replace(word, f"${secrets[word]}")',
        "pass",
        "unit/test_secrets.py::test_a_run_that_fails_with_secrets_in_its_error",
    ),
    (
        "run/rank_process.py",
        "log_text(traceback.format_exc())",
        "traceback.format_exc()",
        "unit/test_secrets.py::test_a_run_that_fails_with_secrets_in_its_error",
    ),
    (
        "processes/exit_codes.py",
        "log_text(getattr(self, name))",
        "getattr(self, name)",
        "unit/test_secrets.py::test_failures_and_warnings",
    ),
    (
        "platform/env.py",
        "return log_text(super().getMessage())",
        "return super().getMessage()",
        "unit/test_secrets.py::test_a_users_function_that_raises_with_a_secret",
    ),
    (
        "telemetry/report.py",
        "if len(set(values)) > 1 and key",
        "if key",
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
        "commands/preflight.py",
        "check_trackers(config.telemetry)",
        "pass",
        "unit/commands/test_preflight.py::test_trackers_are_checked_for_the_runs_that_use_them",
    ),
]
