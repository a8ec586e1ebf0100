"""Mistakes in the checks of files from elsewhere: checkpoints, configs, models, tasks, shared memory, locks."""

PICKLES = "unit/checkpoint/test_pickles.py"
STATE = "unit/checkpoint/test_state.py"
CONVERT = "unit/checkpoint/test_convert.py"
LOAD = "unit/config/test_load.py"
VALIDATE = "unit/config/test_validate.py"
HEADERS = "unit/models/test_headers.py"
SHM = "unit/processes/test_shared_memory.py"
SPAWN = "unit/processes/test_spawn.py"
CHAT = "unit/data/test_chat.py"

MALFORMED = f"{HEADERS}::test_a_malformed_header"
JSON = "unit/platform/test_json_text.py::test_what_is_refused_names_the_place"
TRAP = f"{LOAD}::test_yaml_that_is_a_trap_is_one_line_at_once"

UNTRUSTED = [
    (
        "patches/checkpoints.py",
        "if is_dtype or path in ALLOWED:",
        'if is_dtype or module.startswith("torch") or path in ALLOWED:',
        f"{PICKLES}::test_a_name_that_no_checkpoint_contains_is_refused",
    ),
    (
        "patches/checkpoints.py",
        'map_location="cpu", weights_only=True',
        'map_location="cpu", weights_only=False',
        f"{PICKLES}::test_an_object_that_runs_code_is_refused",
    ),
    (
        "patches/checkpoints.py",
        "    load_object(value, planner.metadata.storage_data[read_item.storage_index].relative_path)\n",
        "",
        f"{STATE}::test_a_crafted_checkpoint_runs_nothing",
    ),
    (
        "patches/checkpoints.py",
        '"load": load_pickle}',
        "}",
        f"{PICKLES}::test_a_name_that_no_checkpoint_contains_is_refused",
    ),
    (
        "checkpoint/pickles.py",
        "if place.relative_path not in files:",
        "if False:",
        f"{STATE}::test_a_manifest_that_covers_less_is_not_whole",
    ),
    (
        "checkpoint/state.py",
        "            check_pickles(folder)\n",
        "",
        f"{STATE}::test_a_crafted_checkpoint_runs_nothing",
    ),
    (
        "checkpoint/pickles.py",
        "return load_pickle(stream)",
        "return pickle.load(stream)",
        f"{CONVERT}::test_a_crafted_record_of_an_interrupted_conversion_runs_nothing",
    ),
    (
        "checkpoint/files.py",
        "    missing = sorted(required - expected.keys())\n",
        "    missing = []\n",
        f"{STATE}::test_a_manifest_that_covers_less_is_not_whole",
    ),
    (
        "checkpoint/files.py",
        '*(path.name for path in folder.glob("*.distcp"))',
        "",
        f"{STATE}::test_a_manifest_that_covers_less_is_not_whole",
    ),
    ("config/load.py", "    except RecursionError:", "    except KeyboardInterrupt:", TRAP),
    ("config/load.py", "MAX_NODES = 100_000", "MAX_NODES = 1_000_000", TRAP),
    (
        "config/section.py",
        "allow_inf_nan=False",
        "allow_inf_nan=True",
        f"{LOAD}::test_values_that_are_refused",
    ),
    (
        "config/launch.py",
        "pattern=NAME, max_length=200",
        "pattern=NAME",
        f"{LOAD}::test_values_that_are_refused",
    ),
    (
        "models/config_json.py",
        "if heads % kv_heads:",
        "if False:",
        f"{VALIDATE}::test_a_config_json_is_refused_by_file_key_and_value",
    ),
    (
        "models/registry.py",
        ") > MAX_EXPERTS:",
        ") > 10**12:",
        f"{VALIDATE}::test_a_config_json_is_refused_by_file_key_and_value",
    ),
    (
        "models/headers.py",
        '        safe_open(file, framework="numpy")\n',
        "",
        MALFORMED,
    ),
    ("platform/json_text.py", "object_pairs_hook=_unique", "", MALFORMED),
    ("models/headers.py", 'or "/" in file ', "", f"{HEADERS}::test_a_malformed_index"),
    (
        "platform/json_text.py",
        "    except RecursionError:",
        "    except KeyboardInterrupt:",
        JSON,
    ),
    ("platform/json_text.py", "return bool(level)", "return False", JSON),
    (
        "processes/shared_memory.py",
        'SHM.glob(f"{prefix}*")',
        'SHM.glob(f"{MARK}*")',
        f"{SHM}::test_only_the_jobs_own",
    ),
    (
        "processes/shared_memory.py",
        "        if not _is_locked(prefix):\n",
        "        if True:\n",
        f"{SHM}::test_the_dead_leave_nothing_and_the_living_are_left_alone",
    ),
    (
        "processes/shared_memory.py",
        "                OSError\n",
        "                KeyError\n",
        f"{SHM}::test_files_that_are_traps",
    ),
    (
        "processes/spawn.py",
        " | os.O_NOFOLLOW",
        "",
        f"{SPAWN}::test_a_lock_that_is_a_link_is_not_followed",
    ),
    (
        "processes/spawn.py",
        "for handle in (file, directory):",
        "for handle in (file,):",
        f"{SPAWN}::test_a_folder_has_one_run_though_its_lock_is_removed_or_reached_by_a_link",
    ),
    (
        "data/user_code.py",
        "if threading.current_thread() is not threading.main_thread():",
        "if False:",
        f"{CHAT}::test_a_template_renders_in_a_servers_thread",
    ),
    (
        "data/tokenizer.py",
        "with alarm(TEMPLATE_TIMEOUT_S):",
        "with alarm(60.0):",
        f"{CHAT}::test_a_template_that_is_a_trap_is_refused_in_time",
    ),
    (
        "data/tokenizer.py",
        "if len(text) > MAX_PROMPT_CHARACTERS:",
        "if False:",
        f"{CHAT}::test_a_template_that_is_a_trap_is_refused_in_time",
    ),
]
