"""Generated code on a problem's tests: right and wrong answers, every format of tests, and code that cheats."""

from __future__ import annotations

import json

import pytest

from megarl.config.schema import Reward
from megarl.rewards.code import extract_code, make_code
from megarl.rewards.interface import ScoreRequest

ADD = "def add(a, b):\n    return a + b\n"
PROGRAM = "print(sum(map(int, input().split())))"
STDIO = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}
CALLS = {"inputs": [[1, 2], [3, 4]], "outputs": [[3], [7]], "fn_name": "add"}
CHECK = (
    "METADATA = {'author': 'x'}\n"
    "def check(candidate):\n"
    "    assert candidate(1, 2) == 3, 'small'\n"
    "    for i in range(3):\n"
    "        assert candidate(i, 1) == i + 1\n"
)


def score_all(pairs, **options):
    """[(code, tests)] -> [(value, cause)]"""
    reward = make_code(Reward(name="code", options={"time_s": 20.0, **options}))
    cases = [
        ScoreRequest(
            f"{row}/0",
            "p",
            f"<think>```python\n1/0\n```</think>So:\n```python\n{code}\n```\n",
            extra={"tests": tests},
        )
        for row, (code, tests) in enumerate(pairs)
    ]
    return [(score.value, score.cause) for score in reward(cases)]


def test_right_answers_in_every_format():
    pairs = [
        (PROGRAM, STDIO),
        (PROGRAM, json.dumps(STDIO)),
        (PROGRAM, [{"input": "1 2", "output": "3", "testtype": "stdin"}, {"input": "3 4", "output": "7"}]),
        ("import sys\nprint(*sys.stdin)\nsys.exit(0)", {"inputs": [["a", "b"]], "outputs": [["a", " b"]]}),
        ("import threading\nthreading.Thread(target=lambda: print(input())).start()", [{"input": "a", "output": "a"}]),
        ("print(7)\nexit()\nprint(8)", {"inputs": [""], "outputs": ["7"]}),
        ("print(0.1 + 0.2, 'x  ')\n\nprint()", {"inputs": [""], "outputs": ["0.3 x"]}),
        ("import sys\nsys.stdout.reconfigure(encoding='utf-8')\nprint('é')", {"inputs": [""], "outputs": ["é"]}),
        ("import io, sys\nsys.stdout = io.TextIOWrapper(sys.stdout.buffer)\nprint(7)", {"inputs": [""], "outputs": ["7"]}),
        ("import sys\nprint(7)\nsys.stdout.close()", {"inputs": [""], "outputs": ["7"]}),
        ("print('\\udcff')", {"inputs": [""], "outputs": ["\ufffd"]}),
        ("def f(n): return [10**9] * n", {"inputs": [[200_000]], "outputs": [[10**9] * 200_000], "fn_name": "f"}),
        ("def f(n): return [10**9] * n", [f"assert f(120_000) == {[10**9] * 120_000}"]),
        (ADD, CALLS),
        (ADD, CALLS | {"outputs": [3, 7]}),
        ("class Solution:\n    def add(self, a: List[int], b) -> Optional[int]:\n        return a + b", CALLS),
        (ADD, [{"input": "1\n2", "output": "3", "testtype": "functional", "fn_name": "add"}]),
        ("def add():\n    return ((1, 2), {'a': 0})", CALLS | {"inputs": [[]], "outputs": [[[1, 2], {"a": 0}]]}),
        ("def f():\n    return 2**20000", ["assert f() == 2**20000", "assert f() % 7 == 4"]),
        (ADD, ["assert add(1, 2) == 3", "assert add([2], [1]) == [2, 1] and not add(0, 0)"]),
        (ADD, "assert sorted(add([2], [1])) == [1, 2]\nassert math.isclose(add(1, .5), 1.5, rel_tol=1e-9)\n"),
        (ADD, ["x = [add(n, 1) for n in range(3)]\nassert x == [1, 2, 3]", "assert abs(add(.1, .2) - .3) < 1e-9"]),
        ("def f():\n    return {1, 2}, (3,), {4: 5}", ["assert f() == ({2, 1}, (3,), {4: 5})"]),
        (ADD, CHECK + "check(add)"),
        (ADD, "def test_add():\n    assert add(1, 2) == 3\ndef test_more():\n    assert add('a', 'b') == 'ab'\n"),
        ("import numpy as np\ndef f():\n    return np.arange(3) * np.float32(2)", ["assert f() == [0, 2, 4]"]),
    ]  # fmt: skip
    assert score_all(pairs) == [(1.0, "")] * len(pairs)


def test_wrong_answers_and_partial_credit():
    pairs = [
        ("print(3)", STDIO),
        ("print(3); print(4)", STDIO),
        ("def add(a, b):\n    return 3", CALLS),
        ("def add(a, b):\n    return 3", CHECK + "check(add)"),
        ("def sub(a, b):\n    return 3", CALLS),
        ("def add(a):\n    return 3", ["assert add(1, 2) == 3", "assert add(1) == 3"]),
        (
            "def add(a, b):\n    return 3",
            ["try:\n    add(1, 1)\nexcept ValueError:\n    raise\nassert add(0, 0) == 0"],
        ),
        ("x = (", STDIO),
        ("x = (", ["assert f(1)"]),
        ("1 / 0", STDIO),
        ("(" * 10_000, CALLS),
        ("print(3)\n1 / 0", STDIO),
        ("def f():\n    return 1.0000001", {"inputs": [[]], "outputs": [1], "fn_name": "f"}),
        ("print(1000001)", {"inputs": [""], "outputs": ["1000000"]}),
        ("def add(a, b):\n    return 4", ["assert add(1, 2) == 3", "assert True", "print('ok')"]),
    ]
    wrong, failed, syntax = "wrong_answer", "exception", "syntax"
    causes = [
        wrong,
        wrong,
        wrong,
        wrong,
        failed,
        failed,
        wrong,
        syntax,
        syntax,
        failed,
        syntax,
        failed,
        wrong,
        wrong,
        wrong,
    ]
    values = [0.5, 0.0, 0.5, 0.5, 0.0, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert score_all(pairs, credit="fraction") == list(zip(values, causes, strict=True))
    assert score_all(pairs[:4]) == [(0.0, wrong)] * 4


CHEATS = {
    "equals everything": """
class E:
    def __eq__(self, other): return True
def add(a, b): return E()""",
    "an int that equals everything": """
class E(int):
    def __eq__(self, other): return True
def add(a, b): return E(9)""",
    "a list that equals everything": """
class E(list):
    def __eq__(self, other): return True
    def __iter__(self): return iter([3])
def add(a, b): return E()""",
    "leaves": "import sys; sys.exit(0)",
    "leaves at once": "import os; os._exit(0)",
    "leaves when called": "import os\ndef add(a, b): os._exit(0)",
    "patches": """
import builtins, math
math.isclose = lambda *a, **k: True
sorted = builtins.sorted = lambda x: [1, 2]
builtins.AssertionError = ValueError
def add(a, b): return 9""",
    "reads the tests": """
import json, os
assert '3]' not in str([open(file).read() for file in os.listdir()])
def add(a, b): return json.load(open('requests.json'))[0].get('expected')""",
    "reads the frames": """
import sys
def add(a, b):
    frame = sys._getframe()
    while frame := frame.f_back:
        for request in frame.f_locals.get('requests', ()):
            if set(request) - {'call', 'arguments', 'expression'}: return 3""",
    "writes the report": """
import os
for fd in range(3, 20):
    for line in (b'{"number": 0, "value": null}', b'{"end": "sandbox"}', b'{"missing": {"a": "b"}}', b'{"end": [[]]}'):
        try: os.write(fd, line + b'\\n')
        except OSError: pass
def add(a, b): return 0""",
    "claims that the sandbox failed": """
import os
for fd in range(3, 20):
    try: os.write(fd, b'{"end": "sandbox"}\\n')
    except OSError: pass
os._exit(0)""",
}


@pytest.mark.parametrize(
    "tests",
    [
        CALLS,
        [
            "assert add(1, 2) == 3",
            "assert sorted(add([2], [1])) == [1, 2]",
            "assert math.isclose(add(1, 2), 3)",
        ],
    ],
    ids=["calls", "assertions"],
)
def test_code_that_cheats_gets_nothing(tests):
    found = dict(
        zip(
            CHEATS,
            score_all([(code, tests) for code in CHEATS.values()], credit="fraction", time_s=2.0),
            strict=True,
        )
    )
    assert {name: value for name, (value, _) in found.items()} == dict.fromkeys(CHEATS, 0.0)
    assert all(
        cause in ("wrong_answer", "exited", "exception", "forbidden", "timeout")
        for _, cause in found.values()
    ), found


@pytest.mark.parametrize(
    "tests",
    [None, "", "[]", [], {}, 7, {"inputs": ["1"], "outputs": []}, {"inputs": "1", "outputs": "1"}, ["assert ("], [3], ["assert True"], ["assert sum([1]) == 7"],
     "def check(candidate):\n    assert candidate(1) == 1", [{"input": "1", "output": "1", "testtype": "functional"}]],
)  # fmt: skip
def test_tests_that_are_none_leave_the_sample_out(tests):
    assert score_all([(ADD, tests)]) == [(None, "bad_tests")]


@pytest.mark.parametrize(
    ("response", "code"),
    [
        ("```python\nx\n```", "x\n"),
        ("a\n```\ny\n```\nb\n```py\nz\n```\nc", "z\n"),
        ("```python\nx\n```\nand\n```python\ncut", "cut"),
        ("```python\nx = '```'\n```\nprints\n```\n2\n```", "x = '```'\n"),
        ("````python\nx\n```\ny\n````", "x\n```\ny\n"),
        ("1. so:\n   ```python\n   if x:\n       y\n   ```", "if x:\n    y\n"),
        ("```python3.12\nx\n```", "x\n"),
        ('```python title="a.py"\nx\n```', "x\n"),
        ("~~~python\nx\n~~~", "x\n"),
        ("```cpp\nx\n```", ""),
        ("<think>```python\nx\n```</think> print(1)", "print(1)"),
        ("```x = 1```", "x = 1"),
        ("", ""),
        ("```" * 30_000, ""),
    ],
)
def test_which_code_is_meant(response, code):
    assert extract_code(response) == code


def test_no_code_is_the_policys_fault():
    assert score_all([("", STDIO)]) == [(0.0, "no_code")]


@pytest.mark.parametrize(
    "code", ["while True: pass", "import os, time; os.closerange(0, 99); time.sleep(60)"]
)
def test_time_is_bounded_for_all_samples_together(code):
    reward = make_code(
        Reward(name="code", options={"total_s": 1.0, "concurrency": 2, "time_s": 1.5})
    )
    case = ScoreRequest("0/0", "p", code, extra={"tests": STDIO})
    scores = [(score.value, score.cause) for score in reward([case] * 6)]
    # those that used the time, those that had none
    assert scores == [(0.0, "timeout")] * 2 + [(None, "not_run")] * 4


def test_one_call_cannot_take_the_time_of_all():
    tests = {
        "inputs": [[n, 1] for n in range(10)],
        "outputs": [n + 1 for n in range(10)],
        "fn_name": "add",
    }
    slow = "import time\ndef add(a, b):\n    time.sleep({} * (a == 5))\n    return a + b"
    assert score_all([(slow.format(5), tests), (slow.format(0.2), tests)], time_s=2.0) == [
        (0.0, "timeout"),
        (1.0, ""),
    ]
