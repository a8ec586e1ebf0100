"""Mistakes in the verdict on generated code."""

VERDICT = "unit/rewards/test_code_verdict.py"
CAUSED = f"{VERDICT}::test_what_the_code_causes_is_worth_nothing_and_named"
STRICT = f"{VERDICT}::test_values_are_compared_strictly"
REFUSED = f"{VERDICT}::test_tests_that_the_solution_would_decide_are_refused_by_name"
ATTACKS = f"{VERDICT}::test_no_attack_passes_tests_of_any_shape"
TABLE = "unit/jail/test_verdict.py"
HELD = f"{TABLE}::test_no_attack_decides_a_verdict"
RIGHT = f"{TABLE}::test_right_code_is_accepted_or_its_tests_refused_by_name"

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
    ("jail/influence.py", "if len([*filter(self.of, operands)]) > 1:", "if False:", HELD),
    ("jail/influence.py", "if isinstance(node.op, CANCELLING):", "if False:", HELD),
    ("jail/influence.py", "_changed(*_children(node, SINKS))", "set()", HELD),
    ("jail/influence.py", "yield from self._passed(node)", "pass", HELD),
    ("jail/influence.py", "_roots(*_mutated(node))", "set()", HELD),
    ("jail/influence.py", "if nodes(node, RETURNING):", "if False:", HELD),
    (
        "jail/influence.py",
        "if _mentioned(call.func, *arguments) & self.unsafe:",
        "if False:",
        HELD,
    ),
    ("jail/influence.py", "if given and not is_changed_again", "if False", HELD),
    ("jail/influence.py", "return self._counts(control) and (", "return False and (", HELD),
    ("jail/influence.py", "return is_caught and", "return False and", HELD),
    ("jail/influence.py", "return not names <= CONTEXTS", "return False", HELD),
    ("jail/influence.py", ".difference(self._parameters(node) or ())", "", RIGHT),
    ("jail/influence.py", "if results == sides[-1:] and", "if False and", RIGHT),
    ("jail/proxies.py", "link.refusal or verdict", "verdict", HELD),
    (
        "jail/proxies.py",
        'if "Exception" not in reply["raised"] or CONTROL.intersection(reply["raised"]):',
        "if False:",
        HELD,
    ),
    ("jail/proxies.py", "if name in PLAIN and not self._is_instance:", "if False:", ATTACKS),
    (
        "jail/proxies.py",
        "isinstance(error, Unjudgeable) and not link.num_replies",
        "isinstance(error, Unjudgeable)",
        HELD,
    ),
    ("jail/proxies.py", 'other is not None and _refuse(self, "==")', "other is not None", HELD),
    (
        "jail/proxies.py",
        "is_instance = kind in self.names and kind[0].isupper()",
        "is_instance = True",
        HELD,
    ),
    ("jail/values.py", "if depth > MAX_DEPTH:", "if False:", CAUSED),
    ("jail/sessions.py", "or not is_encoded(reply", "or is_encoded(reply", CAUSED),
    ("jail/sandbox.py", "BY_SIGNAL.get(-status,", "BY_SIGNAL.get(signal.Signals(-status),", CAUSED),
]
