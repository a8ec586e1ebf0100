"""Runs reasoning-gym's judges in separate processes; some of them evaluate answers as Python.

    trainer: TaskJudge(name, options, entry) + text --JudgePool--> child
    child: in the expected form? -> score_answer -> float

Nine judges call `eval` or sympy's parse_expr, so an answer could set its own verdict even in a
separate process. These judges only get answers in a harmless form: for `eval`, literals or text
that Python cannot parse; for parse_expr, arithmetic with the names of the problem. Any other answer
is replaced by NONSENSE. Answers to the arithmetic puzzles are also checked exactly, because
puzzle24 accepts numbers other than the given ones, and truncates 24.9 to 24.
"""

import ast
import operator
import re
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from megarl.jail.judging import JudgePool, Verdict

GymEntry = Mapping[str, Any]  # an entry of a reasoning-gym dataset: one problem
TIMEOUT_S = 10.0  # CPU seconds per answer if a reward function calls the judge
NONSENSE = "?"
TOKEN = re.compile(r"\s|[0-9]+(?:\.[0-9]+)?|[A-Za-z_]\w*|[-+*/^()]")
FUNCTIONS = (
    "sin cos tan sec csc cot asin acos atan sinh cosh tanh asinh acosh atanh exp log ln sqrt "
    "Abs abs"
)
OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
POOL = JudgePool("megarl.data.task_judge:make_judge", "megarl.data.task_judge:import_reasoning_gym")


@dataclass(frozen=True)
class TaskJudge:
    """The judge of one problem: ``judge(text) -> float``.

    Returns 0 for a text that crashes the judge. Raises RuntimeError if the judge cannot start.
    """

    name: str
    options: Mapping[str, Any]
    entry: GymEntry = field(repr=False)

    def __call__(self, text: str) -> float:
        verdict = judge_answers([(self, text)], timeout_s=TIMEOUT_S)[0]
        if verdict.value is None:
            raise RuntimeError(verdict.detail)
        return verdict.value


def judge_answers(answers: Sequence[tuple[TaskJudge, str]], *, timeout_s: float) -> list[Verdict]:
    """Returns one verdict per (judge, text), in order.

    `timeout_s` limits the CPU seconds for one answer.
    """
    rows_of_task = {}
    for row, (judge, _) in enumerate(answers):
        rows_of_task.setdefault(f"{judge.name} {judge.options}", []).append(row)
    verdicts = {}
    for rows in rows_of_task.values():
        judge, _ = answers[rows[0]]
        items = [(text, judge.entry) for judge, text in map(answers.__getitem__, rows)]
        task = (judge.name, judge.options)
        verdicts |= zip(rows, POOL.judge(task, items, timeout_s=timeout_s), strict=True)
    return [verdicts[row] for row in range(len(answers))]


# --- the judge's process --------------------------------------------------------------------------


def import_reasoning_gym() -> Any:
    with warnings.catch_warnings():
        # a package that it imports warns once per installation
        warnings.simplefilter("ignore", SyntaxWarning)
        import reasoning_gym
    return reasoning_gym


def make_judge(
    context: tuple[str, Mapping[str, Any]],
) -> Callable[[str, GymEntry], float | Verdict]:
    name, options = context
    dataset = import_reasoning_gym().create_dataset(name, **options)

    def judge(text: str, entry: GymEntry) -> float | Verdict:
        task = entry.get("metadata", {}).get("source_dataset") or name  # for composite datasets
        is_safe = text == entry["answer"] or all(
            FORMS[kind](text, entry) for kind in {name, task} & FORMS.keys()
        )
        score = float(dataset.score_answer(text if is_safe else NONSENSE, entry=entry))
        if not is_safe:
            return Verdict(
                score, "refused", f"{text[:60]!r} is not in the form of an answer to {task}"
            )
        return (
            min(score, INEXACT[task])
            if task in INEXACT and not solves(text, entry["metadata"])
            else score
        )

    return judge


def is_inert(text: str, entry: GymEntry) -> bool:
    """Returns True if ``eval`` of the text, stripped or not, can only return a literal or fail."""
    for expression in (text.lstrip(" \t"), text.strip()):
        try:
            ast.parse(expression, mode="eval")
        except (SyntaxError, ValueError):
            continue
        try:
            ast.literal_eval(expression)
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
            return False
    return True


def is_expression(text: str, entry: GymEntry) -> bool:
    """Returns True if the text has only numbers, operators, parentheses and names of the problem:
    no attribute, index or other function.
    """
    problem = entry["metadata"]
    tokens = TOKEN.findall(text)
    names = problem.get("variables")  # empty if the product is a number
    if names is None:
        names = [*FUNCTIONS.split(), "C", "E", "pi", problem["variable"]]
    words = {token for token in tokens if token[0].isalpha() or token[0] == "_"}
    return "".join(tokens) == text and words <= {*map(str, names)}


def is_arithmetic(text: str, entry: GymEntry) -> bool:
    return (
        re.fullmatch(r"[-+*/()0-9 ]*", text) is not None and "**" not in text and "//" not in text
    )


def solves(text: str, problem: Mapping[str, Any]) -> bool:
    """Returns True if an arithmetic expression equals the target exactly and uses each given
    number once.
    """
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        used = Counter(node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
        return _value(tree) == problem.get("target", 24) and used == Counter(problem["numbers"])
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return False


def _value(tree: ast.AST) -> Fraction:
    match tree:
        case ast.Constant(value=int(number)):
            return Fraction(number)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in OPERATIONS:
            return OPERATIONS[type(operation)](_value(left), _value(right))
    raise ValueError(f"{type(tree).__name__} is not arithmetic")


FORMS: dict[str, Callable[[str, GymEntry], bool]] = {
    **dict.fromkeys(("binary_matrix", "n_queens", "spiral_matrix", "string_insertion"), is_inert),
    **dict.fromkeys(
        ("simple_integration", "intermediate_integration", "polynomial_multiplication"),
        is_expression,
    ),
    **dict.fromkeys(("countdown", "puzzle24"), is_arithmetic),
}
# reasoning-gym's scores for an expression with a wrong value
INEXACT = {"countdown": 0.05, "puzzle24": 0.01}
