"""Mistakes in the verdict on generated code."""

VERDICT = "unit/rewards/test_code_verdict.py"
CAUSED = f"{VERDICT}::test_what_the_code_causes_is_worth_nothing_and_named"
STRICT = f"{VERDICT}::test_values_are_compared_strictly"
REFUSED = f"{VERDICT}::test_tests_that_the_solution_would_decide_are_refused_by_name"
ATTACKS = f"{VERDICT}::test_no_attack_passes_tests_of_any_shape"
TABLE = "unit/jail/test_verdict.py"
HELD = f"{TABLE}::test_no_attack_decides_a_verdict"
FORMATS = "unit/rewards/test_code.py::test_right_answers_in_every_format"
CREDIT = "unit/rewards/test_code.py::test_wrong_answers_and_partial_credit"
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
    ("rewards/code.py", "self._solution(len(tests), size)", "self._solution(len(tests))", FORMATS),
    ("jail/jailed.py", "sys.stdout = os.fdopen(1,", "os.fdopen(1,", FORMATS),
    ("jail/influence.py", "if len(results) > 1:", "if False:", HELD),
    ("jail/influence.py", "yield targets, self._roots(*sources)", "pass", HELD),
    (
        "jail/influence.py",
        "targets = self._roots(*_children(node, TARGETS))",
        "targets = set()",
        HELD,
    ),
    ("jail/influence.py", "yield _mentioned(argument), {parameter}", "pass", HELD),
    ("jail/influence.py", "_roots(*_mutated(node))", "set()", HELD),
    ("jail/influence.py", "if nodes(node, RETURNING):", "if False:", HELD),
    ("jail/influence.py", "if name not in PURE or not is_known:", "if False:", HELD),
    ("jail/influence.py", "if given and not is_changed_again", "if False", HELD),
    ("jail/influence.py", "return self.of(*_children(node, DECIDING))", "return False", HELD),
    ("jail/influence.py", "if any(map(_is_odd_method, body)):", "if False:", HELD),
    ("jail/influence.py", 'if name in ("min", "max") and len(call.args) > 1:', "if False:", HELD),
    ("jail/influence.py", "if not all(map(_is_text, call.args[1:])):", "if False:", HELD),
    ("jail/influence.py", "return not text.startswith((", "return False and ((", HELD),
    ("jail/influence.py", "or not CONTEXTS.issuperset(names)", "or False", HELD),
    ("jail/influence.py", "any(map(self.is_several, arguments))", "False", HELD),
    ("jail/python_tests.py", 'f"_sized({sides})"', 'f"[{sides}][0]"', HELD),
    ("jail/python_tests.py", "_check_assertions(module)", "pass", HELD),
    (
        "jail/python_tests.py",
        "_asserts(statement) and influence.of(statement)",
        "_asserts(statement)",
        CREDIT,
    ),
    (
        "jail/influence.py",
        "_bind(function, arguments)",
        "zip(_arguments(function), arguments)",
        HELD,
    ),
    ("jail/influence.py", "bool(nodes(tree, ORDERS))", "False", HELD),
    (
        "jail/influence.py",
        "return not isinstance(handler.body[-1], ast.Raise)",
        "return False",
        HELD,
    ),
    ("jail/proxies.py", "found = deepcopy(found)", "pass", HELD),
    ("jail/proxies.py", 'if kind == "Solution" and remote._target != kind:', "if False:", HELD),
    ("jail/values.py", "if name in PLAIN and callable(value):", "if False:", HELD),
    (
        "jail/influence.py",
        "_mentioned(node).difference(_arguments(node))",
        "_mentioned(node)",
        RIGHT,
    ),
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
    ("jail/sandbox.py", "or not is_value(reply", "or is_value(reply", CAUSED),
    (
        "jail/sandbox.py",
        "BY_SIGNAL.get(-self.status,",
        "BY_SIGNAL.get(signal.Signals(-self.status),",
        CAUSED,
    ),
]
