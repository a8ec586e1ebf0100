"""Mistakes in what judges responses: the fork server, the judges' processes, task judges and mathematics."""

FORK_SERVER = "unit/jail/test_fork_server.py"
WORKERS = "unit/jail/test_workers.py"
JUDGING = "unit/jail/test_judging.py"
JUDGES = "unit/data/test_task_judge.py"
MATHS = "unit/rewards/test_maths.py"

PAIRS = "unit/rewards/test_answer_pairs.py::test_pairs[answers.yaml-1000]"
THOUGHTS = "unit/rewards/test_thoughts.py"

JUDGED = [
    (
        "rewards/maths.py",
        'if candidate.lower() in ("", "nan"):',
        "if not candidate:",
        PAIRS,
    ),
    (
        "rewards/maths.py",
        "return gold == other or abs(gold - other) <= 1e-4 * abs(gold)",
        "return True",
        PAIRS,
    ),
    (
        "rewards/maths.py",
        'if unit not in ("", our_unit) and (our_unit or "#" in unit):',
        "if False:",
        PAIRS,
    ),
    (
        "rewards/maths.py",
        "letter != right_letter or OTHER_CHOICE.search(text) or",
        "letter != right_letter or",
        PAIRS,
    ),
    (
        "rewards/maths.py",
        "(scale or _is_whole(value))",
        "scale",
        PAIRS,
    ),
    (
        "rewards/maths.py",
        'not (is_equation or "+" in name)',
        "not is_equation",
        "unit/rewards/test_answer_pairs.py::test_pairs[answers_blind.yaml-2500]",
    ),
    (
        "rewards/reading.py",
        "(?P<name>{NAMES})",
        r"(?P<name>[^\W\d_]+)",
        PAIRS,
    ),
    (
        "rewards/maths.py",
        "(is_name and not text)",
        "False",
        PAIRS,
    ),
    (
        "rewards/maths.py",
        "(line for line in CLASSES if line & tokens)",
        "CLASSES",
        PAIRS,
    ),
    (
        "rewards/maths.py",
        'if theirs and re.search("[A-Za-z]", COMMAND.sub("", candidate)):',
        "if False:",
        PAIRS,
    ),
    (
        "rewards/maths.py",
        "if len(lines) > 1 and all(lines):",
        "if False:",
        PAIRS,
    ),
    (
        "rewards/maths.py",
        "            sides.reverse()",
        "            pass",
        PAIRS,
    ),
    (
        "rewards/answers.py",
        'if place == "boxed" or BOXED in text:',
        'if place == "boxed":',
        "unit/rewards/test_answers.py::test_places",
    ),
    (
        "data/thoughts.py",
        "    if is_open:\n        return None\n",
        "",
        f"{THOUGHTS}::test_every_family_has_an_end",
    ),
    (
        "rewards/scorer.py",
        "opening = opened_tag(end)",
        'opening = ""',
        f"{THOUGHTS}::test_rewards_know_what_the_prompt_opened",
    ),
    (
        "rewards/code.py",
        'text = after_thoughts(response) or ""',
        "text = response",
        f"{THOUGHTS}::test_what_was_thought_is_no_code_and_no_verdict",
    ),
    (
        "data/tokenizer.py",
        "if one.special and one.content in self.stop",
        "if False",
        "corpus/test_corpus.py::test_report[thoughts_and_a_stop_text]",
    ),
    (
        "data/tokenizer.py",
        "[token for token in tokens if token not in self.hidden],",
        "[token for token in tokens if token not in self.hidden], skip_special_tokens=True,",
        "corpus/test_corpus.py::test_report[thoughts_between_special_tokens]",
    ),
    (
        "data/task_judge.py",
        "    if names is None:",
        "    if not names:",
        f"{JUDGES}::test_a_product_without_a_variable",
    ),
    (
        "jail/fork_server.py",
        "env=ENVIRONMENT if self.is_clean else None,",
        "env=None,",
        f"{FORK_SERVER}::test_a_child_has_nothing_of_the_caller_and_nothing_of_its_siblings",
    ),
    (
        "jail/fork_server.py",
        ', os.sysconf("SC_OPEN_MAX")]',
        "]",
        f"{FORK_SERVER}::test_a_child_has_nothing_of_the_caller_and_nothing_of_its_siblings",
    ),
    (
        "jail/fork_server.py",
        "ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)",
        "pass",
        f"{FORK_SERVER}::test_server_and_children_end_with_the_caller",
    ),
    (
        "jail/fork_server.py",
        "                    # whatever it left behind; its own id is not reused before waitpid\n"
        "                    os.killpg(pid, signal.SIGKILL)\n",
        "                    pass\n",
        f"{FORK_SERVER}::test_what_a_child_leaves_behind_is_killed",
    ),
    (
        "jail/fork_server.py",
        "self.process is None or self.process.poll() is not None:",
        "self.process is None:",
        f"{FORK_SERVER}::test_a_fork_of_the_caller_starts_its_own_server",
    ),
    (
        "jail/fork_server.py",
        'settings = {"stdout": sys.stdout}',
        'settings = {"cwd": "/"}',
        f"{WORKERS}::test_a_worker_has_the_callers_environment_folder_and_search_path",
    ),
    (
        "jail/workers.py",
        "self._process is None or self._process[1].poll():",
        "self._process is None:",
        "unit/jail/test_workers.py::test_a_process_that_ended_between_calls_costs_none",
    ),
    (
        "jail/workers.py",
        "sys.path[:] = path",
        "pass",
        f"{WORKERS}::test_a_worker_has_the_callers_environment_folder_and_search_path",
    ),
    (
        "jail/workers.py",
        "or _receive(connection, timeout_s)",
        "or _receive(connection, START_S)",
        f"{WORKERS}::test_a_call_that_is_late_is_stopped_and_another_process_takes_over",
    ),
    (
        "jail/workers.py",
        'arguments = pickle.loads(task)\n                connection.send_bytes(b"")\n',
        'arguments = connection.send_bytes(b"") or pickle.loads(task)\n',
        f"{WORKERS}::test_importing_a_function_is_no_part_of_its_time",
    ),
    (
        "jail/workers.py",
        "                raise\n            self._process = child, connection\n",
        "                raise\n",
        f"{WORKERS}::test_a_worker_is_used_again_and_tells_what_was_raised",
    ),
    (
        "jail/judging.py",
        "drop_rights(spec)",
        "dict(spec)",
        f"{JUDGING}::test_a_judge_has_no_rights_and_a_child_starts_clean",
    ),
    (
        "jail/judging.py",
        "batch[len(verdicts) :]",
        "batch",
        f"{JUDGING}::test_many_that_end_it_in_a_row",
    ),
    (
        "jail/judging.py",
        "signal.setitimer(signal.ITIMER_PROF, timeout_s)",
        "signal.setitimer(signal.ITIMER_PROF, 0)",
        f"{JUDGING}::test_a_text_that_ends_its_judge_is_worth_0_and_harms_no_other",
    ),
    (
        "jail/judging.py",
        'Verdict(None, "no_judge", str(error))',
        'Verdict(0.0, "no_judge", str(error))',
        f"{JUDGING}::test_a_judge_that_cannot_start_leaves_the_text_without_a_value",
    ),
    (
        "rewards/maths.py",
        "if is_mathematics(answer) and _is_comparable(candidate, answer):",
        "if _is_comparable(candidate, answer):",
        f"{MATHS}::test_letters_of_a_word_in_another_order_are_another_word",
    ),
    (
        "rewards/maths.py",
        "others = [side for side in others if not NAME.fullmatch(side)]",
        "others = []",
        f"{MATHS}::test_forms_of_an_answer",
    ),
    (
        "rewards/maths.py",
        "return is_left(gold[0]) or not is_left(parsed[0][0])",
        "return True",
        f"{MATHS}::test_forms_of_an_answer",
    ),
    (
        "rewards/maths.py",
        "all(PLAIN.fullmatch(token) for token in _tokens(text) - known)",
        "True",
        f"{MATHS}::test_forms_of_an_answer",
    ),
    (
        "rewards/maths.py",
        "(INCOMPLETE.fullmatch(text) or MISREAD.search(text))",
        "INCOMPLETE.fullmatch(text)",
        f"{MATHS}::test_forms_of_an_answer",
    ),
    (
        "rewards/rules.py",
        "with alarm(self.timeout_s):",
        "with alarm(60.0):",
        "unit/rewards/test_rules.py::test_a_users_scorer_that_hangs_is_stopped",
    ),
    (
        "rewards/rules.py",
        "elif isinstance(judge, TaskJudge):",
        "elif False:",
        f"{JUDGES}::test_a_mixture_of_tasks_and_references_is_judged_in_one_call",
    ),
    (
        "data/task_judge.py",
        'is_safe = text == entry["answer"] or all(',
        'is_safe = text != entry["answer"] or all(',
        f"{JUDGES}::test_an_answer_runs_no_code",
    ),
    (
        "data/task_judge.py",
        'and not solves(text, entry["metadata"])',
        "and not text",
        f"{JUDGES}::test_puzzles_want_exactly_their_numbers_and_their_target",
    ),
    (
        "data/task_judge.py",
        'used == Counter(problem["numbers"])',
        'set(used) == set(problem["numbers"])',
        f"{JUDGES}::test_puzzles_want_exactly_their_numbers_and_their_target",
    ),
    (
        "data/task_judge.py",
        "and words <= {*map(str, names)}",
        "",
        f"{JUDGES}::test_names_that_are_not_the_problems_are_refused",
    ),
    (
        "data/task_judge.py",
        'for expression in (text.lstrip(" \\t"), text.strip()):',
        'for expression in (text.lstrip(" \\t"),):',
        f"{JUDGES}::test_an_answer_runs_no_code[spiral_matrix]",
    ),
]
