"""Mistakes in the verdict on generated code."""

VERDICT = "unit/rewards/test_code_verdict.py"
CAUSED = f"{VERDICT}::test_what_the_code_causes_is_worth_nothing_and_named"
STRICT = f"{VERDICT}::test_values_are_compared_strictly"
REFUSED = f"{VERDICT}::test_tests_that_the_solution_would_decide_are_refused_by_name"
ATTACKS = f"{VERDICT}::test_no_attack_passes_tests_of_any_shape"

VERDICTS = [
    ("jail/code_tests.py", "and _close(actual, expected)", "and actual == expected", STRICT),
    (
        "jail/code_tests.py",
        "return isinstance(actual, int) and actual == expected",
        "return actual == expected",
        STRICT,
    ),
    (
        "jail/code_tests.py",
        "EXPECTED_FLOAT.fullmatch(expected)",
        "FLOAT.fullmatch(expected)",
        STRICT,
    ),
    ("jail/code_tests.py", "is_wrapped = all(", "is_wrapped = any(", STRICT),
    (
        "jail/python_tests.py",
        "with ONE_PARSER:",
        "if True:",
        f"{VERDICT}::test_threads_read_tests_at_once",
    ),
    ("jail/python_tests.py", "if sides and all(", "if False and all(", REFUSED),
    ("jail/python_tests.py", "if entry and (others", "if False and (others", REFUSED),
    (
        "jail/python_tests.py",
        'call.keywords.append(ast.keyword("_in_place", ast.Constant(True)))',
        "pass",
        f"{VERDICT}::test_right_code_passes_tests_of_every_shape",
    ),
    (
        "rewards/code.py",
        "if time.monotonic() >= deadline:",
        "if False:",
        "unit/rewards/test_code.py::test_time_is_bounded_for_all_samples_together",
    ),
    ("jail/proxies.py", "level=0 if is_class else None", "level=0", ATTACKS),
    ("jail/proxies.py", "or name in PREDICATES", "", ATTACKS),
    ("jail/values.py", "if depth > MAX_DEPTH:", "if False:", CAUSED),
    ("jail/sessions.py", "or not is_encoded(reply", "or is_encoded(reply", CAUSED),
    ("jail/sandbox.py", "BY_SIGNAL.get(-status,", "BY_SIGNAL.get(signal.Signals(-status),", CAUSED),
]
