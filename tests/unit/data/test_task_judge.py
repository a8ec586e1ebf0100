"""reasoning-gym's judges: an answer runs no code, reads no reference, replaces no judge; honest ones are unharmed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from megarl.config.schema import Task
from megarl.data.task_judge import FORMS, POOL, TaskJudge, is_arithmetic, judge_answers, solves
from megarl.data.tasks import load_task
from megarl.jail.fork_server import ENVIRONMENT
from megarl.rewards.interface import ScoreRequest
from megarl.rewards.rules import Accuracy

with warnings.catch_warnings():
    warnings.simplefilter("ignore", SyntaxWarning)
    gym = pytest.importorskip("reasoning_gym")

from reasoning_gym.factory import DATASETS

NAMES = sorted(set(DATASETS) - {"composite"})
EVALUATE = sorted(FORMS)
GARBAGE = "banana ?"
CANARY = "CANARY_OF_THE_TRAINER"


@cache
def dataset(name: str) -> Any:
    return gym.create_dataset(name, seed=0)


@cache
def judges(name: str, count: int = 3) -> list[TaskJudge]:
    return [TaskJudge(name, {"seed": 0}, dataset(name)[index]) for index in range(count)]


def judge(
    name: str, *texts: str, index: int = 0, timeout_s: float = 20.0
) -> list[tuple[float | None, str]]:
    own = judges(name)[index]
    answers = [(own, text) for text in texts]
    return [(v.value, v.cause) for v in judge_answers(answers, timeout_s=timeout_s)]


def direct(name: str, text: str, index: int = 0) -> float | None:
    """What reasoning-gym says, in this process; None if it raises."""
    try:
        return float(dataset(name).score_answer(text, entry=judges(name)[index].entry))
    except Exception:  # noqa: BLE001 (some of its judges raise at odd answers)
        return None


def honest(entry: dict[str, Any]) -> list[str]:
    answer = str(entry["answer"])
    wrong = [
        "0",
        "1",
        "-7",
        "3/4",
        "yes",
        "[1, 2]",
        "['a']",
        "1 2 3",
        "the answer",
        '{"a": 1}',
        "True",
        "A",
        "(1, 2)",
        "x",
        "1e999",
    ]
    return [answer, f"{answer}.", answer.lower(), answer[:-1] or "0", f"It is {answer}", *wrong]


def assert_as_reasoning_gym(name: str) -> None:
    cases = [
        (own, text)
        for own in judges(name)
        for text in honest(own.entry)
        if not is_refused(name, text, own)
    ]
    verdicts = judge_answers(cases, timeout_s=20.0)
    for (own, text), verdict in zip(cases, verdicts, strict=True):
        try:
            expected = float(dataset(name).score_answer(text, entry=own.entry))
        except Exception as error:  # noqa: BLE001
            assert (verdict.value, verdict.cause) == (0.0, "raised"), (text, error)
            assert type(error).__name__ in verdict.detail
            continue
        assert (verdict.value, verdict.cause) == (expected, ""), text


def is_refused(name: str, text: str, own: TaskJudge) -> bool:
    return name in FORMS and text != own.entry["answer"] and not FORMS[name](text, own.entry)


@pytest.mark.parametrize(
    "name", [*EVALUATE, "chain_sum", "boxnet", "coin_flip", "game_of_life", "prime_factorization"]
)
def test_honest_answers_get_what_reasoning_gym_gives(name):
    assert_as_reasoning_gym(name)


@pytest.mark.long
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", NAMES)
def test_honest_answers_get_what_reasoning_gym_gives_for_every_dataset(name):
    assert_as_reasoning_gym(name)


def exploits(folder: Path) -> list[str]:
    """Python and sympy expressions that would leave a trace, or would win if they were evaluated."""
    shell = f"env > {folder}/shell"
    patch = "lambda *a, **k: 1.0"
    judged = "__import__('sys')._getframe(1).f_locals"
    return [
        f"__import__('os').system({shell!r})",
        *(
            f"{space}__import__('os').system({shell!r})"
            for space in ("\n", " \n ", "\u00a0", "\x0c", "\u2003\n")
        ),
        f"open({str(folder / 'file')!r}, 'w').write('x')",
        f"().__class__.__base__.__subclasses__()[-1].__init__.__globals__['system']({shell!r})",
        f"[c for c in ().__class__.__base__.__subclasses__() if c.__name__ == 'Popen'][0]({shell!r}, shell=True)",
        f'exec("import os; os.system({shell!r})")',
        f"[setattr(type(self), 'score_answer', {patch})]",
        f"setattr(__import__('reasoning_gym').dataset.ProceduralDataset, 'score_answer', {patch})",
        f"[setattr(c, 'score_answer', {patch}) for c in type(self).__base__.__subclasses__()]",
        f"__import__('builtins').__dict__.__setitem__('float', {patch})",
        f"__import__('megarl.jail.judging').jail.judging.__dict__.__setitem__('_line', {patch})",
        "__import__('os').write(3, b'1.0\\n1.0\\n1.0\\n')",
        "[__import__('os').write(fd, b'1.0\\n1.0\\n1.0\\n') for fd in range(64)]",
        f"{judged}['entry']['answer']",
        "entry['answer']",
        "oracle_answer",
        "oracle_answer.split()",
        "\u00a0oracle_answer.split()",
        "entry['metadata']['solution']",
        "[entry['metadata']['valid_answers'][0].split()]",
        "valid_solutions[0]",
        "[row.split() for row in valid_solutions[0].split(chr(10))]",
        "[list(row) for row in oracle_answer.splitlines()]",
        "list(oracle_answer)",
        "(lambda: oracle_answer)()",
        "f'{oracle_answer}'",
        "Integral(sin(x), x)",
        "integrate(x, x)",
        "S(metadata['integrand'])",
        'sympify(\'__import__("os").system("true")\')',
        "expand((x + 1)*(x + 2))",
        "x.func",
        "x[0]",
        "1 if True else 0",
        "24 == 24",
        "len('aaaaaaaaaaaaaaaaaaaaaaaa')",
        "len('" + "a" * 24 + "') + False*(1 + 2 + 3 + 4)",
        "24 + 0*x",
        "Rational(24)",
        "__import__('time').sleep(60)",
        "exit()",
        "quit()",
        "(yield 1)",
        "{**entry}",
        "[*oracle_answer]",
        "1; import os",
        "@eval",
        "\\x00",
        "é" * 10,
        "\ud800",
    ]


def assert_nothing_gained(name: str, folder: Path) -> None:
    texts = exploits(folder)
    plain = judge(name, GARBAGE)[0][0]
    before = dict(vars(type(dataset(name))))
    verdicts = judge(name, *texts)
    # other judges give a little for texts of some forms; that of game_of_life_halting takes any text for right
    allowed = (
        {plain, 0.0}
        if name in FORMS
        else {plain, *(value for value, _ in verdicts if value is not None and value < 1)}
    )
    assert {value for value, _ in verdicts} <= allowed, verdicts
    assert not list(folder.iterdir()), "code ran"
    assert dict(vars(type(dataset(name)))) == before, "the judge was replaced"
    assert judge(name, GARBAGE, str(judges(name)[0].entry["answer"]))[0][0] == plain, (
        "the next sample gained"
    )


@pytest.mark.parametrize("name", [*EVALUATE, "chain_sum"])
def test_an_answer_runs_no_code(name, tmp_path, monkeypatch):
    monkeypatch.setenv(CANARY, "secret")
    assert_nothing_gained(name, tmp_path)


@pytest.mark.parametrize(
    "name", ["polynomial_multiplication", "simple_integration", "intermediate_integration"]
)
def test_names_that_are_not_the_problems_are_refused(name):
    assert [
        cause for _, cause in judge(name, "exit()", "1 + input()", "entry", "x + quit (1)")
    ] == ["refused"] * 4


def test_a_product_without_a_variable():
    problem = {"source_dataset": "polynomial_multiplication", "variables": []}
    task = TaskJudge("polynomial_multiplication", {}, {"answer": "6", "metadata": problem})
    verdicts = judge_answers([(task, text) for text in ("6", "5", "2*3", "x")], timeout_s=30.0)
    assert [(verdict.value, verdict.cause) for verdict in verdicts] == [
        (1.0, ""),
        (0.0, ""),
        (1.0, ""),
        (0.0, "refused"),
    ]


@pytest.mark.long
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", NAMES)
def test_an_answer_runs_no_code_in_any_dataset(name, tmp_path, monkeypatch):
    monkeypatch.setenv(CANARY, "secret")
    assert_nothing_gained(name, tmp_path)


def test_the_judges_process_has_nothing_of_the_trainer():
    assert judge("chain_sum", "1")[0][0] is not None
    assert POOL.server.process is not None
    folder = Path(f"/proc/{POOL.server.process.pid}")
    assert {row.partition("=")[0] for row in folder.joinpath("environ").read_text().split("\0")} - {
        ""
    } <= {*ENVIRONMENT}
    files = {os.readlink(file) for file in folder.joinpath("fd").iterdir()}
    assert all(
        path == "/dev/null" or path.startswith(("socket:", "anon_inode:")) for path in files
    ), files


def puzzle(name: str, numbers: list[int], target: int = 24) -> TaskJudge:
    entry = {
        "question": "?",
        "answer": "none",
        "metadata": {"numbers": numbers, "target": target, "source_dataset": name},
    }
    return TaskJudge(name, {"seed": 0}, entry)


@pytest.mark.parametrize(
    ("text", "numbers", "value"),
    [
        ("4 * 6 * 1 * 1", [4, 6, 1, 1], 1.0),
        ("(4 + 2) * (5 - 1)", [1, 2, 4, 5], 1.0),
        (" 8 / (3 - 8/3) ", [8, 8, 3, 3], 1.0),
        ("-(1 - 9) * 3 * 1", [1, 9, 3, 1], 1.0),
        ("6 * 4 * 1 * 1", [4, 6, 2, 1], 0.0),  # other numbers
        ("4 * 6 * 1", [4, 6, 1, 1], 0.0),  # one is missing
        ("4 * 6 + 1 - 1", [4, 6, 1], 0.0),  # one twice
        ("9 * 8 / 3 + 1/2", [9, 8, 3, 1, 2], 0.0),  # 24.5
        ("24", [4, 6, 1, 1], 0.0),
        ("4 * 61 - 1", [4, 6, 1, 1], 0.0),
        ("4 ** 2 + 8 * 1", [4, 2, 8, 1], 0.0),
        ("5 // 2 * 12 * 1", [5, 2, 12, 1], 0.0),
        ("4!", [4], 0.0),
        ("4 * 6 * 1 * 1 == 24", [4, 6, 1, 1], 0.0),
        ("1 / 0 + 4 * 6", [1, 0, 4, 6], 0.0),
        ("(" * 5000 + "1", [1], 0.0),
        ("-" * 50_000 + "1", [1], 0.0),
        ("9" * 5000, [9], 0.0),
        ("", [1], 0.0),
    ],
)
def test_puzzles_want_exactly_their_numbers_and_their_target(text, numbers, value):
    assert solves(text, {"numbers": numbers, "target": 24}) == bool(value)
    for name, wrong in (("countdown", (0.0, 0.01, 0.05)), ("puzzle24", (0.0, 0.01))):
        (verdict,) = judge_answers([(puzzle(name, numbers), text)], timeout_s=10.0)
        if value and len(numbers) == 4:
            assert verdict.value == 1.0, (name, verdict)
        else:
            assert verdict.value in wrong, (name, verdict)


@pytest.mark.parametrize(
    "text",
    ["4*6*1*1 # 9", "4*6*1*1\n", "4*6*x", "4*6*1.0", "4\u00d76", "4^2", "4;6", "'4'", "\uff14*6"],
)
def test_puzzles_have_numbers_and_four_operators_only(text):
    assert not is_arithmetic(text, {})


def test_a_countdown_that_is_nearly_right_is_wrong():
    """reasoning-gym accepts a hundred-thousandth of the target."""
    own, near = puzzle("countdown", [999, 1, 1000, 250], 1000), "999 + 1 + 1/250 * 1000 / 1000"
    assert judge_answers([(own, "999 + 1*1000/1000 + 1/250")], timeout_s=10.0)[0].value == 0.05
    assert not solves(near, own.entry["metadata"])


def test_slow_and_large_answers_are_worth_0_and_harm_no_other():
    right = str(judges("intermediate_integration")[0].entry["answer"])
    slow = ["9**9**9**9**9", "x**" * 500 + "x", "(" * 10_000 + "x", "9" * 50_000]
    first, *others, last = judge("intermediate_integration", right, *slow, right, timeout_s=0.5)
    assert first == last == (1.0, "")
    assert [value for value, _ in others] == [0.0] * len(slow)
    assert others[0][1] in ("timeout", "memory")


def test_a_mixture_of_tasks_and_references_is_judged_in_one_call():
    own = [judges(name)[index] for index in range(3) for name in ("chain_sum", "countdown")]
    requests = [
        ScoreRequest(
            "", "", "", None, final_answer=str(judge.entry["answer"]), extra={"score": judge}
        )
        for judge in own
    ]
    requests.insert(1, ScoreRequest("", "", "", "17", final_answer="17"))
    requests.append(ScoreRequest("", "", "", "17", final_answer=r"\frac{34}{2}"))
    requests.append(ScoreRequest("", "", "", "17", final_answer=None, extra={"score": own[0]}))
    requests.append(replace(requests[-1], final_answer="exit()", extra={"score": own[1]}))
    scores = Accuracy(20.0)(requests)
    assert [score.value for score in scores[:-1]] == [1.0] * 8 + [0.0]
    assert [score.cause for score in scores[-2:]] == ["no_answer", "refused"]


def test_a_dataset_of_the_judge_with_other_options():
    task = Task(name="reasoning_gym:chain_sum", options={"min_terms": 2, "max_terms": 2})
    problem = load_task(task).problem(0)
    assert problem.extra["score"](problem.answer) == 1.0
    broken = TaskJudge("chain_sum", {"min_terms": "two"}, problem.extra["score"].entry)
    verdict = judge_answers([(broken, "1")], timeout_s=5.0)[0]
    assert (verdict.value, verdict.cause) == (None, "no_judge"), "our fault, not the answer's"
    with pytest.raises(RuntimeError, match="did not start"):
        broken("1")


CALLER = """
import time
from megarl.config.schema import Task
from megarl.data.task_judge import POOL
from megarl.data.tasks import load_task
problem = load_task(Task(name="reasoning_gym:chain_sum")).problem(0)
print(problem.extra["score"](problem.answer), POOL.server.process.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.long
def test_the_judges_end_with_the_trainer():
    caller = subprocess.Popen([sys.executable, "-c", CALLER], stdout=subprocess.PIPE, text=True)
    assert caller.stdout is not None
    value, pid = caller.stdout.readline().split()
    assert float(value) == 1.0
    caller.kill()
    caller.wait()
    caller.stdout.close()
    deadline = time.monotonic() + 20
    while (
        Path(f"/proc/{pid}").exists() and "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    ):
        assert time.monotonic() < deadline
        time.sleep(0.05)
