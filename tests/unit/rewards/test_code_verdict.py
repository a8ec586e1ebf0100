"""Code that attacks its verdict: tests of every shape, and what the code may send, print or do to be left out."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from megarl.config.schema import Reward
from megarl.data.tasks import Problem, Source
from megarl.jail import python_tests
from megarl.jail.python_tests import read_script
from megarl.rewards.catalog import check_problems
from megarl.rewards.code import make_code
from megarl.rewards.interface import ScoreRequest

EQUAL = """
class Equal:
    def __eq__(self, other): return True
    def __getattr__(self, name):
        if name == 'tolist': raise AttributeError
        return lambda *args: True
    def __getitem__(self, index): return self
    def __sub__(self, other): return 0
    def __contains__(self, item): return True
    def __bool__(self): return True
def f(*args, **kwargs): return Equal()
g = F = Stack = Solution = f
"""
LISTS = """
class Equal(list):
    def __eq__(self, other): return True
    def __contains__(self, item): return True
    def __iter__(self): return iter([1])
def f(*args): return Equal()
g = F = f
"""
FORGED = """
import os
for descriptor in range(3, 256):
    for line in ('{"loaded": 1}', '{"verdict": "", "why": ""}', '{"number": 0, "value": true}', '{"end": ""}'):
        try: os.write(descriptor, (line + chr(10)).encode())
        except OSError: pass
"""
FORGED_RESULTS = """
import os
for descriptor in range(3, 256):
    lines = ['{"loaded": 1}', *('{"number": %%d, "value": %s}' %% number for number in range(64)), '{"end": ""}']
    try: os.write(descriptor, (chr(10).join(lines) + chr(10)).encode())
    except OSError: pass
"""
PATCHED = """
import builtins, sys
def f(*args):
    yes = lambda *args, **kwargs: True
    builtins.all, builtins.AssertionError = yes, ValueError
    for name in ('collections', 'numpy', 'unittest', 'pytest', 'math'):
        module = sys.modules.get(name)
        for item in ('Counter', 'allclose', 'isclose', 'raises', 'TestCase'):
            if hasattr(module, item): setattr(module, item, yes)
isinstance = all = range = lambda *args: ()
g = F = f
"""
GLOBALS = """
import gc, sys
def f(*args):
    frame = sys._getframe()
    while frame:
        for scope in (frame.f_globals, frame.f_locals):
            for name in ('results', 'expected', 'EXPECTED'):
                if name in scope:
                    scope[name][:] = [None] * 9
                    return scope[name][0]
        frame = frame.f_back
    for item in gc.get_objects():
        if type(item) is list and item[:2] == [987654, 3]: return item[0]
g = F = f
"""
ATTACKS = {
    "__eq__": EQUAL,
    "a list": LISTS,
    "forged reports": FORGED,
    "patches": PATCHED,
    "globals": GLOBALS,
}
ATTACKS |= {f"forged results {value}": FORGED_RESULTS % value for value in ("0", "2", "4", "5")}

PLUS = """
import numpy as np
def is_floats(x) -> bool:
    return isinstance(x, float) or (isinstance(x, (list, tuple)) and all(isinstance(i, float) for i in x))
def assertion(out, exp, atol):
    exact_match = out == exp
    if atol == 0 and is_floats(exp):
        atol = 1e-6
    if not exact_match and atol != 0:
        assert np.allclose(out, exp, rtol=1e-07, atol=atol)
    else:
        assert exact_match
def check(candidate):
    inputs = [[987653], [2]]
    results = [987654, 3]
    for i, (inp, exp) in enumerate(zip(inputs, results)):
        assertion(candidate(*inp), exp, 0)
check(f)
"""
UNITTEST = """
import unittest
class TestF(unittest.TestCase):
    def setUp(self):
        self.expected = 2
    def test_f(self):
        self.assertEqual(f(1), self.expected)
    def test_error(self):
        with self.assertRaises(TypeError):
            f('1')
if __name__ == '__main__':
    unittest.main()
"""
REFERENCE = "def ref(x):\n    return x + 1\nfor i in range(5):\n    assert f(i) == ref(i)"
LOOP = "for i in range(5):\n    assert f(i) == i + 1"
# shape: (tests, a right solution); none of them is passed by an attack, all by the solution
INCREMENT = "def f(x):\n    return x + 1"
SHAPES = {
    "loop": (LOOP, INCREMENT),
    "HumanEval+": (PLUS, INCREMENT),
    "HumanEval+ with a reference": (PLUS.replace("exp, 0)", "(lambda x: x + 1)(*inp), 0)"), INCREMENT),
    "check": ("def check(candidate):\n    assert candidate(1) == 2\n    assert candidate(3) == 4\ncheck(f)", INCREMENT),
    "try": ("try:\n    assert f(1) == 2\nexcept ZeroDivisionError:\n    raise AssertionError", INCREMENT),
    "with": ("import unittest\nwith unittest.TestCase().subTest():\n    assert f(1) == 2", INCREMENT),
    "a name set before": ("expected = [2]\nassert f(1) == expected[0]", INCREMENT),
    "'b' * 3": ("assert f(1) == 'b' * 3", "def f(x):\n    return 'bbb'"),
    "2 ** 10": ("assert f(1) == 2 ** 10", "def f(x):\n    return 1024"),
    "math.pi": ("import math\nassert f(1) == math.pi", "from math import pi\ndef f(x): return pi"),
    "Counter": ("from collections import Counter\nassert f('aab') == Counter('aab')",
                "from collections import Counter\ndef f(x): return Counter(x)"),
    "reference function": (REFERENCE, INCREMENT),
    "isinstance": ("assert isinstance(f(1), list) and f(1)[0] == 5", "def f(x): return [5]"),
    "np.allclose": ("import numpy as np\nassert np.allclose(f(1), [0.5, 1.5])", "def f(x): return [0.5, 1.5]"),
    "np, not imported": ("assert np.allclose(f(1), [0.5, 1.5])", "def f(x): return [0.5, 1.5]"),
    "all of a list": ("assert all([f(i) == i * i for i in [1, 2, 3]])", "def f(x): return x * x"),
    "all over a range": ("assert all([f(i) == i * i for i in range(1, 4)])", "def f(x): return x * x"),
    "all of a generator": ("assert all(f(i) == i * i for i in range(1, 4))", "def f(x): return x * x"),
    "a method of the result": ("assert f(1).lower() == 'x'", "def f(x): return 'X'"),
    "a predicate of the result": ("assert f(1).startswith('abc')", "def f(x): return 'abcd'"),
    "a predicate of the result, a capital": ("assert F(1).startswith('abc')", "def F(x): return 'abcd'"),
    "a count in the result": ("assert f(1).count('b')", "def f(x): return 'abc'"),
    "an item of the result": ("assert f(1)[0] == 3", "def f(x): return [3]"),
    "in the result": ("assert 3 in f(1) and 5 not in f(1)", "def f(x): return [3, 4]"),
    "in the result, a capital": ("assert 3 in F(1)", "def F(x): return [3, 4]"),
    "the difference to the result": ("assert abs(f(1) - 3.5) < 1e-6", "def f(x): return 3.5"),
    "f-string": ("assert f'{f(1)}' == '3' and repr(f(1)) == '3'", "def f(x): return 3"),
    "walrus": ("assert (y := f(1)) == 2 and y + 1 == 3", INCREMENT),
    "lambda": ("h = lambda x: f(x) * 2\nassert h(1) == 4", INCREMENT),
    "unittest": (UNITTEST, INCREMENT),
    "pytest.raises": ("import pytest\nwith pytest.raises(ValueError, match='x is 1'):\n    f(1)\nassert f(2) == 4",
                      "def f(x):\n    if x == 1: raise ValueError('x is 1')\n    return 4"),
    "pytest.raises of its class": (
        "import pytest\ndef test_f():\n    with pytest.raises(TooSmall):\n        f(1)\n    assert f(2) == 4",
        "class TooSmall(Exception): pass\ndef f(x):\n    if x == 1: raise TooSmall\n    return 4",
    ),
    "pytest.approx": ("import pytest\nassert f(1) == pytest.approx(0.3)", "def f(x): return 0.1 + 0.2"),
    "from solution import": ("from solution import f as h\ndef test_f():\n    assert h(1) == 2", INCREMENT),
    "Decimal": ("from decimal import Decimal\nassert f(1) == Decimal('0.1')",
                "from decimal import Decimal\ndef f(x): return Decimal('0.1')"),
    "Fraction": ("from fractions import Fraction\nassert f(Fraction(1, 3)) == Fraction(2, 3)",
                 "def f(x): return x * 2"),
    "complex": ("assert f(1) == 1 + 2j", "def f(x): return x + 2j"),
    "bytes": ("assert f(b'a') == b'ab'", "def f(x): return x + b'b'"),
    "nan": ("import math\nassert math.isnan(f(1))", "def f(x): return float('nan')"),
    "OrderedDict": ("assert f(1) == {1: 2}", "import collections\ndef f(x): return collections.OrderedDict({x: 2})"),
    "namedtuple": ("assert f(1) == (1, 2)",
                   "import collections\ndef f(x): return collections.namedtuple('P', 'x y')(x, 2)"),
    "deque": ("assert list(f(1)) == [1]", "import collections\ndef f(x): return collections.deque([x])"),
    "sets": ("assert f([3, 1]) == {1, 3} and f([1]) == frozenset([1])", "def f(x): return set(x)"),
    "in place": ("x = [3, 1, 2]\nf(x)\nassert x == [1, 2, 3]", "def f(x): x.sort()"),
    "in place, a dict": ("x = {1: 2}\nf(x)\nassert x == {1: 3}", "def f(x): x[1] = 3"),
    "a class": (
        "s = Stack([1])\ns.push(2)\nassert s.pop() == 2 and len(s) == 1 and s.items == [1] and 1 in s\n"
        "assert s[0] == 1 and list(s) == [1] and str(s) == 'Stack' and Stack.SIZE == 9\n"
        "s.name = 'x'\nassert s.shout() == 'X'",
        "class Stack:\n    SIZE = 9\n    def __init__(self, items): self.items = items; self.me = self\n"
        "    def push(self, item): self.items.append(item)\n    def pop(self): return self.items.pop()\n"
        "    def __len__(self): return len(self.items)\n    def __getitem__(self, at): return self.items[at]\n"
        "    def shout(self): return self.name.upper()\n"
        "    def __str__(self): return 'Stack'\n    def __iter__(self): return iter(self.items)",
    ),
    "LeetCode": ("assert Solution().f(1) == 2", "class Solution:\n    def f(self, x): return x + 1"),
    "LeetCode in place": ("x = [2, 1]\nSolution().f(x)\nassert x == [1, 2]",
                          "class Solution:\n    def f(self, x): x.sort()"),
    "keywords": ("assert f(1, y=2) == 3", "def f(x, *, y): return x + y"),
    "a large integer": ("assert f(1) == 2 ** 20000", "def f(x): return 2 ** 20000"),
    "many calls": ("assert [f(i) for i in range(2000)] == list(range(1, 2001))", INCREMENT),
}  # fmt: skip


def score_all(pairs, entry=None, **options):
    """[(code, tests)] -> [(value, cause)]"""
    reward = make_code(
        Reward(
            name="code", options={"time_s": 3.0, "credit": "fraction", "concurrency": 4, **options}
        )
    )
    requests = [
        ScoreRequest(
            f"{row}/0", "p", f"```python\n{code}\n```", extra={"tests": tests, "entry_point": entry}
        )
        for row, (code, tests) in enumerate(pairs)
    ]
    scores = reward(requests)
    assert [score.detail for score in scores if score.cause == "error"] == []
    return [(score.value, score.cause) for score in scores]


def test_right_code_passes_tests_of_every_shape():
    found = dict(
        zip(
            SHAPES,
            score_all([(code, tests) for tests, code in SHAPES.values()], time_s=20.0),
            strict=True,
        )
    )
    assert found == dict.fromkeys(SHAPES, (1.0, ""))


def judged_together() -> list[list[str]]:
    """The tests of all shapes in few problems: names of one shape may be those of results in another."""
    problems = [[]]
    for tests, _ in SHAPES.values():
        try:
            read_script((*problems[-1], tests))
            problems[-1].append(tests)
        except ValueError:
            problems.append([tests])
    return problems


@pytest.mark.parametrize("attack", ATTACKS)
def test_no_attack_passes_tests_of_any_shape(attack):
    """Credit is the share of tests passed: not one, of all shapes."""
    problems = judged_together()
    found = score_all([(ATTACKS[attack], tests) for tests in problems])
    assert [value for value, _ in found] == [0.0] * len(problems)


WRITE = """
import os, time
def write(*lines):
    for descriptor in range(3, 256):
        for line in lines:
            try: os.write(descriptor, line.encode() + b"\\n")
            except OSError: pass
"""
PRINT = [{"input": "", "output": "1"}]
CALL = {"inputs": [[1], [2], [3]], "outputs": [[2], [3], [4]], "fn_name": "f"}
DEEP = "'[' * 900 + ']' * 900"
DEEP_DICT = "'{\"dict\": [[1, ' + '[' * 800 + ']' * 800 + ']]}'"
REPLY = WRITE + "def f(x): write('{\"number\": 0, \"value\": ' + %s + '}')"
LEFT_OUT = {  # what the code causes is worth 0: it cannot choose to be left out. {attempt: (code, tests, score)}
    "signal 40": ("import os; os.kill(os.getpid(), 40)", PRINT, (0.0, "crashed")),
    "signal 40, calls": ("import os\ndef f(x): os.kill(os.getpid(), 40)", CALL, (0.0, "crashed")),
    "signal 40 in the middle": (
        "import os\ndef f(x): return x + 1 if x == 1 else os.kill(os.getpid(), 40)", CALL, (1 / 3, "crashed")),
    "a deep list by pipe": (REPLY % DEEP, CALL, (0.0, "exception")),
    "a deep dict by pipe": (REPLY % DEEP_DICT, CALL, (0.0, "exception")),
    "a deeper list by pipe": (REPLY % DEEP.replace("900", "90000"), CALL, (0.0, "exception")),
    "a deep list": ("def f(x):\n    y = []\n    for _ in range(900): y = [y]\n    return y", CALL, (0.0, "exception")),
    "a deeper list": (
        "def f(x):\n    y = []\n    for _ in range(90000): y = [y]\n    return y", CALL, (0.0, "exception")),
    "a list in itself": ("def f(x):\n    y = []\n    y.append(y)\n    return y", CALL, (0.0, "exception")),
    "'missing' by pipe": (WRITE + "def f(x): write('{\"missing\": {\"a\": \"b\"}}')", CALL, (0.0, "exception")),
    "a huge integer": ("def f(x): return 1 << (1 << 22)", CALL, (0.0, "output")),
    "a huge integer by pipe": (WRITE + "def f(x): write('{\"value\": ' + '9' * 9999 + '}')", CALL, (0.0, "exception")),
    "surrogates": ("def f(x): return chr(0xd800)", CALL, (0.0, "wrong_answer")),
    "surrogates printed": ("import sys; sys.stdout.buffer.write(b'\\xed\\xa0\\x80')", PRINT, (0.0, "wrong_answer")),
    "a huge float by pipe": (WRITE + "def f(x): write('{\"value\": 1e999999}')", CALL, (0.0, "wrong_answer")),
    "unhashable and odd tags": (
        WRITE + "def f(x): write('{\"value\": {\"set\": [[1]], \"dict\": 1}}')", CALL, (0.0, "exception")),
    "a set of lists": (
        WRITE + "def f(x): write('{\"value\": {\"set\": [[1]]}}')", ["assert f(1) == 2"], (0.0, "exception")),
    "an odd error": (WRITE + "def f(x): write('{\"raised\": [[]], \"kind\": [[]]}')", CALL, (0.0, "exception")),
    "an error by name": (
        WRITE + "def f(x): write('{\"raised\": [], \"text\": \"\", \"kind\": \"bad_tests\"}')",
        ["assert f(1) == 2"], (0.0, "exception")),
    "a missing module": ("def f(x): import no_such_module", ["assert f(1) == 2"], (0.0, "exception")),
    "closes all files and sleeps": (
        "import os, time; os.closerange(0, 99); time.sleep(60)", PRINT, (0.0, "timeout")),
    "closes all files and sleeps, calls": (
        "import os, time\ndef f(x): os.closerange(0, 99); time.sleep(60)", CALL, (0.0, "timeout")),
    "stops itself": ("import os; os.kill(os.getpid(), 19)", PRINT, (0.0, "timeout")),
    "reads no requests": (
        WRITE + "def f(x):\n    write('{\"value\": 1}')\n    time.sleep(60)",
        ["assert f('a' * 900_000) == 2"] * 2, (0.0, "wrong_answer")),
    "a flood of reports": (WRITE + "def f(x):\n    while True: write('{}' * 1000)", CALL, (0.0, "exception")),
    "a flood of small reports": (WRITE + "def f(x):\n    while True: write('')", CALL, (0.0, "exception")),
    "a value that makes the tests slow": (
        "def f(x): return 10 ** 8", ["assert 3 ** f(1) == 1"], (0.0, "timeout")),
    "one hash": (
        "def f(x): return {i * (2**61 - 1) for i in range(60_000)}", ["assert f(1) == {1}"], (0.0, "timeout")),
    "a lone surrogate in the source": ("x = '\udc80'\ndef f(x): return x", CALL, (0.0, "wrong_answer")),
    "NUL in the source": ("x = '\0'", CALL, (0.0, "syntax")),
    "exits in the tests": ("def f(x): raise SystemExit(0)", ["f(1)", "assert f(1) == 2"], (0.0, "exited")),
    "exits when loaded": ("raise SystemExit(0)", ["assert f(1) == 2"], (0.0, "exited")),
}  # fmt: skip
STRICT = {  # {attempt: (code, tests, value)}
    "an integer by a float": (
        "def f(): return 123456700.0", {"inputs": [[]], "outputs": [123456789], "fn_name": "f"}, 0),
    "a printed integer by a float": ("print(123456700.0)", [{"input": "", "output": "123456789"}], 0),
    "an integer nearly": ("def f(): return 1.0000001", {"inputs": [[]], "outputs": [1], "fn_name": "f"}, 0),
    "an integer as a float": ("def f(): return 1.0", {"inputs": [[]], "outputs": [1], "fn_name": "f"}, 0),
    "a float nearly": ("def f(): return 0.50000001", {"inputs": [[]], "outputs": [0.5], "fn_name": "f"}, 1),
    "a float by an integer": ("def f(): return 2", {"inputs": [[]], "outputs": [2.0], "fn_name": "f"}, 1),
    "a float by a text": ("def f(): return '2.0'", {"inputs": [[]], "outputs": [2.0], "fn_name": "f"}, 0),
    "a float by a huge integer": ("def f(): return 9 ** 999", {"inputs": [[]], "outputs": [2.0], "fn_name": "f"}, 0),
    "a large integer": ("def f(): return 2 ** 70", {"inputs": [[]], "outputs": [2 ** 70], "fn_name": "f"}, 1),
    "a large integer nearly": (
        "def f(): return 2 ** 70 + 1", {"inputs": [[]], "outputs": [2 ** 70], "fn_name": "f"}, 0),
    "True for 1": ("def f(): return True", {"inputs": [[]], "outputs": [1], "fn_name": "f"}, 1),
    "1e5 is a word": ("print(100000.0)", [{"input": "", "output": "1e5"}], 0),
    "0e4711 is a word": ("print(0)", [{"input": "", "output": "0e4711"}], 0),
    "1e-05 is a number": ("print(0.00001000001)", [{"input": "", "output": "1e-05"}], 1),
    "2.50 is a number": ("print('2.5', '-3')", [{"input": "", "output": "2.50 -3.0"}], 1),
    "nan is a word": ("print(float('nan'))", [{"input": "", "output": "1.0"}], 0),
    "underscores": ("print('1_0.0')", [{"input": "", "output": "10.0"}], 0),
    "nothing printed": ("import sys; sys.exit(0)", [{"input": "", "output": "1"}], 0),
    "nothing expected": ("import sys; sys.exit(0)", [{"input": "", "output": ""}], 1),
    "wrapped, all": ("def f(x): return x", {"inputs": [[1], [[2]]], "outputs": [[1], [[2]]], "fn_name": "f"}, 1),
    "wrapped, not all": ("def f(x): return 5 if x == 1 else [1, 2]",
                         {"inputs": [[1], [2]], "outputs": [[5], [1, 2]], "fn_name": "f"}, 0),
    "wrapped, LiveCodeBench": (
        "def f(x): return 5", [{"input": "1", "output": "[5]", "testtype": "functional", "fn_name": "f"}], 0),
    "a set for a list": ("def f(): return {1}", {"inputs": [[]], "outputs": [[1], [1]][:1], "fn_name": "f"}, 0),
    "a dict": ("def f(): return {2: (1,), 'a': 0.5}",
               {"inputs": [[]], "outputs": [{"a": 0.5, "2": [1]}], "fn_name": "f"}, 1),
    "a dict with more": (
        "def f(): return {'a': 1, 'b': 2}", {"inputs": [[]], "outputs": [{"a": 1}], "fn_name": "f"}, 0),
    "a str that lies": ("class S(str):\n    def __eq__(self, o): return True\ndef f(x): return S('b')",
                        ["assert f(1) == 'a'"], 0),
    "a float that lies": ("class S(float):\n    def __eq__(self, o): return True\ndef f(x): return S(2)",
                          ["assert f(1) == 1.0"], 0),
    "an int that lies": ("class S(int):\n    __eq__ = lambda *a: True\n    __index__ = lambda s: 1\n"
                         "def f(x): return S(2)", ["assert f(1) == 1"], 0),
    "tolist lies": ("class S:\n    def tolist(self): return 7\ndef f(x): return S()", ["assert f(1) == 1"], 0),
    "reads requests.json": ("print(open('requests.json').read())", PRINT, 0),
    "a solution that prints": ("print('a')\ndef f(x):\n    print(input)\n    return x + 1", CALL, 1),
    "reads its input": ("import sys\ndef f(x): return sys.stdin.read() or x + 1", CALL, 1),
    "overwrites its files": ("open('stdin.txt', 'w').write('1'); open('solution.py', 'w').write('print(1)')", PRINT, 0),
    "patches json.dumps": ("import json\njson.dumps = lambda *a: '{\"value\": 2}'\ndef f(x): return 3", CALL, 0),
    "writes to a reference's input": (
        "def f(x): x.clear()", ["def ref(x):\n    return x[0] if x else None\nx = [1]\nassert f(x) == ref(x)"], 0),
}  # fmt: skip
UNJUDGEABLE = {  # tests that the solution would decide: {tests: entry point}
    "assert f(1) == g(1)": None,
    "assert f(1) == F(1)": None,
    "class T(unittest.TestCase):\n    def test_f(self): self.assertEqual(f(1), f(2))": None,
    "assert isinstance(f(1), Point)": None,
    "try:\n    assert f(1) == 2\nexcept ZeroDivisionError:\n    pass": None,
    "import contextlib\nwith contextlib.suppress(ZeroDivisionError):\n    assert f(1) == 2": None,
    "s = Stack([1])\nassert s.me is s": None,
    "assert f(lambda x: x) == 1": None,
    "class A: pass\nassert f(A()) == 1": None,
    "assert abs(poly(f(1))) < 1e-6": "f",
    "assert f(1) == 2\nassert helper(2) == 3": "f",
    "def check(candidate):\n    assert decode(candidate(1)) == 1": "f",
}
BAD = [
    "import no_such_module\nassert f(1) == 2",
    "1 / 0\nassert f(1) == 2",
    "assert f(1) ==",
    "x = 1",
    "assert min(max(1)) == 1",
]


def test_what_the_code_causes_is_worth_nothing_and_named():
    found = score_all([(code, tests) for code, tests, _ in LEFT_OUT.values()], total_s=20.0)
    assert dict(zip(LEFT_OUT, found, strict=True)) == {
        name: score for name, (_, _, score) in LEFT_OUT.items()
    }


def test_values_are_compared_strictly():
    found = score_all(
        [(code, tests) for code, tests, _ in STRICT.values()], time_s=20.0, credit="all"
    )
    values = {name: value for name, (value, _) in zip(STRICT, found, strict=True)}
    assert values == {name: value for name, (_, _, value) in STRICT.items()}


def test_tests_that_the_solution_would_decide_are_refused_by_name():
    found = {tests: score_all([(EQUAL, tests)], entry)[0] for tests, entry in UNJUDGEABLE.items()}
    assert found == dict.fromkeys(UNJUDGEABLE, (None, "unjudgeable"))


def test_bad_tests_are_not_the_codes_fault():
    assert score_all([(EQUAL, tests) for tests in BAD]) == [(None, "bad_tests")] * len(BAD)


def test_the_expected_value_is_not_in_the_solutions_process():
    """Whatever the code can read of its own memory and files, a number that only the tests contain is not there."""
    code = """
import gc, os
def is_it(number): return isinstance(number, int) and number * 3 == 2754820935
def f(x):
    files = [open(name, errors='replace').read() for name in os.listdir()]
    words = [word for text in files for word in text.split() if word.isdigit() and is_it(int(word))]
    lists = [list(item) for item in gc.get_objects() if isinstance(item, (dict, list, tuple))]
    return next((item for items in [words, *lists] for item in items if is_it(item)), 0)
"""
    assert score_all([(code, ["n = 918273645\nassert f(1) == n"])]) == [(0.0, "wrong_answer")]


def test_threads_read_tests_at_once(monkeypatch):
    """One parses at a time: on Python 3.11, ast.parse raises SystemError if another thread parses while it collects
    garbage (CPython issue 106905), about once in a thousand reads."""
    parse, inside, counts = python_tests._parse, [], []

    def parse_slowly(text):
        inside.append(text)
        time.sleep(1e-3)
        counts.append(len(inside))
        inside.remove(text)
        return parse(text)

    def read(row):
        return read_script((f"{PLUS}\nassert f({row}) == {row + 1}",)).tests[-1].splitlines()[-1]

    monkeypatch.setattr(python_tests, "_parse", parse_slowly)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(read, range(40)))
    assert found == [f"assert f({row}) == {row + 1}" for row in range(40)]
    assert set(counts) == {1}


def test_problems_that_cannot_be_judged_are_named_at_the_start():
    rewards = [make_code(Reward(name="code"))]
    extra = [{"tests": "assert f(1) == 2"}, {"tests": "assert f(1) == g(1)"}, {"tests": "assert ("}]

    def sources(*rows):
        return lambda: [Source(lambda index: Problem("q", None, extra[rows[index]]), len(rows))]

    assert list(check_problems(rewards, sources(0))) == []
    assert list(check_problems(rewards, sources(0, 1, 2))) == [
        "rewards: name='code' cannot score 2 of 3 problems; a generated problem: unjudgeable: the solution would judge itself "
        "(tests): f(1) == g(1): both sides are the solution's; their samples are left out"
    ]
    with pytest.raises(
        ValueError,
        match=r"cannot score 1 of 1 problems; a generated problem: bad_tests: .*; correct them",
    ):
        list(check_problems(rewards, sources(2)))
