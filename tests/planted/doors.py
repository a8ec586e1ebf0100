"""Mistakes in what else opens or breaks: text of models in logs, secrets, servers, packages, functions, config values."""

SECRETS = "unit/test_secrets.py"
SERVED = "unit/commands/test_serve_reward.py"
PACKAGES = "unit/platform/test_packages.py"
CATALOG = "unit/rewards/test_catalog.py"
SCORER = "unit/rewards/test_scorer.py"
LOAD = "unit/config/test_load.py"
REPORT = "unit/telemetry/test_report.py"

SHOWN = f"{SECRETS}::test_what_is_replaced"
CUT = f"{SECRETS}::test_a_secret_on_a_cut_is_not_shown_in_part"
ENCODED = f"{SECRETS}::test_a_variables_secret_in_each_encoding"
LINES = f"{SECRETS}::test_text_of_a_model_stays_on_its_own_lines"
REFUSED = f"{LOAD}::test_values_that_are_refused"
DEMANDED = f"{CATALOG}::test_what_a_function_demands_is_known_before_a_run"

DOORS = [
    ("platform/env.py", "or name in SECRET_NAMES:", "or False:", SHOWN),
    ("platform/env.py", "words = PASSWORD.findall(value)", "words = []", SHOWN),
    ("platform/env.py", 'return FORMS.sub(r"\\g<start>***", text)', "return text", SHOWN),
    ("platform/env.py", "{1,3})?+", "{1,3})?", SHOWN),
    (
        "platform/env.py",
        'return re.sub(r"\\n(?!  )", "\\n  ", escape_hidden(redact(text)))',
        "return escape_hidden(redact(text))",
        LINES,
    ),
    (
        "platform/env.py",
        "elif len(head) <= MAX_CHARS:",
        "else:",
        f"{SECRETS}::test_a_text_of_any_length_is_logged_at_once",
    ),
    ("platform/env.py", "head = head[:-MAX_CHARS]", "pass", CUT),
    (
        "platform/env.py",
        "_log_part(text[-READ_CHARS:])[MAX_CHARS:]",
        "_log_part(text[-READ_CHARS:])",
        CUT,
    ),
    (
        "platform/env.py",
        "_log_part(text[:READ_CHARS])",
        "_log_part(text)",
        f"{SECRETS}::test_a_text_of_any_length_is_logged_at_once",
    ),
    ("platform/env.py", "or char in FILLERS", "", LINES),
    ("platform/env.py", "category(char) in HIDDEN", "False", LINES),
    ("platform/env.py", "quote_plus(secret), unquote(secret)", "quote_plus(secret)", ENCODED),
    ("platform/env.py", "quoted = [repr(secret)[1:-1], json", "quoted = [json", ENCODED),
    ("platform/env.py", '*(word for word in value.split() if "-----" not in word)', "", ENCODED),
    (
        "telemetry/report.py",
        "return escape_hidden(value)",
        "return value",
        f"{REPORT}::test_sampled_text_stays_text",
    ),
    (
        "models/hub.py",
        "if not file.is_file() or not any",
        "if not any",
        "corpus/test_corpus.py::test_report[link_to_itself]",
    ),
    ("platform/env.py", "        if self.exc_info:\n", "        if False:\n", LINES),
    ("processes/exit_codes.py", "{log_text(text)}", "{text}", LINES),
    (
        "platform/env.py",
        "if sys.modules.get(name, name) is None:",
        "if False:",
        f"{PACKAGES}::test_a_module_that_import_refuses_is_not_installed",
    ),
    (
        "platform/env.py",
        "        except ImportError:\n            return None\n",
        "",
        f"{PACKAGES}::test_a_command_that_needs_it_is_refused",
    ),
    (
        "commands/preflight.py",
        'require("launch.topology=split", "ray")',
        "pass",
        f"{PACKAGES}::test_a_command_that_needs_it_is_refused",
    ),
    (
        "commands/serve_reward.py",
        '"uvicorn", "starlette")',
        ")",
        f"{PACKAGES}::test_a_command_that_needs_it_is_refused",
    ),
    (
        "commands/reward_server.py",
        "elif start > len(tokens):",
        "elif False:",
        f"{SERVED}::test_a_prompt_is_no_longer_than_its_tokens",
    ),
    (
        "commands/reward_server.py",
        "lambda: self.cycle or transport.abort()",
        "lambda: None",
        f"{SERVED}::test_slow_clients_are_closed",
    ),
    (
        "commands/reward_server.py",
        "async with asyncio.timeout(BODY_S):",
        "if True:",
        f"{SERVED}::test_slow_clients_are_closed",
    ),
    (
        "commands/reward_server.py",
        "length = max(length, len(body))",
        "pass",
        f"{SERVED}::test_a_request_of_no_size_or_a_large_one_is_refused",
    ),
    ("rewards/functions.py", "and p.kind not in VARIADIC", "", DEMANDED),
    (
        "rewards/functions.py",
        "known = [*SUPPLIED, *self.context, *extra, *self.options]",
        "known = [*SUPPLIED, *self.context, *extra, *self.options, *self.required]",
        DEMANDED,
    ),
    (
        "rewards/functions.py",
        "or kind(type(function).__call__)",
        "",
        f"{CATALOG}::test_what_returns_no_number_is_no_reward",
    ),
    (
        "rewards/functions.py",
        "pickle.dumps(self._accept(extra))",
        "pass",
        f"{SCORER}::test_what_cannot_be_sent_to_a_function_is_refused_before_a_run",
    ),
    (
        "rewards/functions.py",
        'self.path.rpartition(":" if ":" in self.path else ".")[0]',
        "self.path",
        f"{SCORER}::test_functions_of_a_module_share_their_state_until_one_is_late",
    ),
    (
        "rewards/functions.py",
        "    clean_logs()\n",
        "",
        "unit/test_secrets.py::test_a_users_function_that_raises_with_a_secret",
    ),
    (
        "rewards/process.py",
        "check = scorer.check",
        "pass",
        f"{CATALOG}::test_what_a_step_scorer_demands_is_known_before_a_run",
    ),
    (
        "rewards/rules.py",
        'texts = [] if callable(extra.get("score")) else texts_of(answer)',
        "texts = texts_of(answer)",
        f"{CATALOG}::test_accuracy_needs_an_answer_or_a_judge",
    ),
    (
        "config/section.py",
        "for item in value if isinstance(value, list | tuple) else (value,):",
        "for item in (value,):",
        REFUSED,
    ),
    ("config/section.py", "if isinstance(item, bool) and", "if False and", REFUSED),
    (
        "config/section.py",
        'if "str" in kind and (is_float or is_id):',
        'if "str" in kind and is_id:',
        REFUSED,
    ),
    ("config/load.py", "if key in lines:", "if False:", REFUSED),
    (
        "telemetry/curves.py",
        "if means is not values:",
        "if False:",
        f"{REPORT}::test_a_long_curve_is_thinned_and_keeps_its_extremes",
    ),
    (
        "telemetry/curves.py",
        'axes.plot(steps, values, "-", color',
        "axes.plot(steps, values, color",
        f"{REPORT}::test_a_run_has_the_same_line_in_every_panel",
    ),
    (
        "telemetry/log.py",
        "if self._out.tell() > MAX_BYTES:",
        "if False:",
        "unit/telemetry/test_telemetry.py::test_the_timeline_is_begun_anew_when_it_is_large",
    ),
    (
        "rollout/schedule.py",
        "if detail and not self._first_drop:",
        "if detail:",
        "unit/rollout/test_schedule.py::test_an_empty_step_quotes_why_its_first_sample_was_dropped",
    ),
]
