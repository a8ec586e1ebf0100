"""Code that attacks its verdict: tests of every shape, and what the code may send, print or do to be left out."""

from __future__ import annotations

import pytest

from megarl.config.schema import Reward
from megarl.rewards.code import make_code
from megarl.rewards.interface import ScoreRequest

EQUAL = """
class Equal:
    def __eq__(self, other): return True
    def __getattr__(self, name): return lambda *args: True
    def __getitem__(self, index): return self
    def __sub__(self, other): return 0
    def __contains__(self, item): return True
    def __array__(self, *args, **kwargs): raise Yes
    def __bool__(self): return True
def f(*args): return Equal()
g = F = f
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
for descriptor in range(3, 20):
    for line in ('{"loaded": true}', '{"verdict": ""}', '{"value": true}', '{"number": 0, "value": true}', '{"end": ""}'):
        try: os.write(descriptor, (line + chr(10)).encode())
        except OSError: pass
"""
PATCHED = """
import builtins, sys
def f(*args):
    yes = lambda *args, **kwargs: True
    builtins.isinstance, builtins.all, builtins.AssertionError = yes, yes, ValueError
    builtins.range = lambda *args: ()
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
ATTACKS = {"__eq__": EQUAL, "a list": LISTS, "forged reports": FORGED, "patches": PATCHED, "globals": GLOBALS}

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
    "check": ("def check(candidate):\n    assert candidate(1) == 2\n    assert candidate(3) == 4", INCREMENT),
    "try": ("try:\n    assert f(1) == 2\nexcept ZeroDivisionError:\n    pass", INCREMENT),
    "with": ("import contextlib\nwith contextlib.suppress(ZeroDivisionError):\n    assert f(1) == 2", INCREMENT),
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
    "array": ("import numpy as np\nassert (f(np.array([1, 2])) == np.array([2, 3])).all()",
              "import numpy as np\ndef f(x): return np.array(x) + 1"),
    "all of a list": ("assert all([f(i) == i * i for i in [1, 2, 3]])", "def f(x): return x * x"),
    "all over a range": ("assert all([f(i) == i * i for i in range(1, 4)])", "def f(x): return x * x"),
    "all of a generator": ("assert all(f(i) == i * i for i in range(1, 4))", "def f(x): return x * x"),
    "a method of the result": ("assert f(1).lower() == 'x'", "def f(x): return 'X'"),
    "a predicate of the result": ("assert f(1).startswith('abc') and F(1).startswith('abc')",
                                  "def f(x): return 'abcd'\nF = f"),
    "an item of the result": ("assert f(1)[0] == 3", "def f(x): return [3]"),
    "in the result": ("assert 3 in f(1) and 5 not in f(1)", "def f(x): return [3, 4]"),
    "in the result, a capital": ("assert 3 in F(1) and 5 not in F(1)", "def F(x): return [3, 4]"),
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
    "pytest parameters": (
        "import pytest\n@pytest.mark.parametrize('x, y', [(1, 2), (3, 4)])\ndef test_f(x, y):\n    assert f(x) == y",
        INCREMENT,
    ),
    "from solution import": ("from solution import f as h\ndef test_f():\n    assert h(1) == 2", INCREMENT),
    "except": ("try:\n    f(1)\nexcept ValueError:\n    caught = True\nassert caught",
               "def f(x): raise ValueError"),
    "Decimal": ("from decimal import Decimal\nassert f(1) == Decimal('0.1')",
                "from decimal import Decimal\ndef f(x): return Decimal('0.1')"),
    "Fraction": ("from fractions import Fraction\nassert f(Fraction(1, 3)) == Fraction(2, 3)",
                 "def f(x): return x * 2"),
    "complex": ("assert f(1) == 1 + 2j", "def f(x): return x + 2j"),
    "bytes": ("assert f(b'a') == b'ab'", "def f(x): return x + b'b'"),
    "nan": ("import math\nassert math.isnan(f(1))", "def f(x): return float('nan')"),
    "OrderedDict": ("assert f(1) == {1: 2}", "import collections\ndef f(x): return collections.OrderedDict({x: 2})"),
    "namedtuple": ("assert f(1) == (1, 2)", "import collections\ndef f(x): return collections.namedtuple('P', 'x y')(x, 2)"),
    "deque": ("assert list(f(1)) == [1]", "import collections\ndef f(x): return collections.deque([x])"),
    "sets": ("assert f([3, 1]) == {1, 3} and f([1]) == frozenset([1])", "def f(x): return set(x)"),
    "a generator": ("assert list(f(3)) == [0, 1, 2] and next(f(3)) == 0", "def f(x):\n    yield from range(x)"),
    "an endless generator": ("import itertools\nassert list(itertools.islice(f(1), 3)) == [1, 2, 3]",
                             "import itertools\ndef f(x): return itertools.count(x)"),
    "in place": ("x = [3, 1, 2]\nf(x)\nassert x == [1, 2, 3]", "def f(x): x.sort()"),
    "in place, a dict": ("x = {1: 2}\nf(x)\nassert x == {1: 3}", "def f(x): x[1] = 3"),
    "a class": (
        "s = Stack([1])\ns.push(2)\nassert s.pop() == 2 and len(s) == 1 and s.items == [1] and s.me is s and 1 in s\n"
        "assert s[0] == 1 and list(s) == [1] and str(s) == 'Stack' and Stack.SIZE == 9\ns.name = 'x'\nassert s.name == 'x'",
        "class Stack:\n    SIZE = 9\n    def __init__(self, items): self.items = items; self.me = self\n"
        "    def push(self, item): self.items.append(item)\n    def pop(self): return self.items.pop()\n"
        "    def __len__(self): return len(self.items)\n    def __getitem__(self, at): return self.items[at]\n"
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
    reward = make_code(Reward(name="code", options={"time_s": 3.0, "credit": "fraction", "concurrency": 4, **options}))
    requests = [
        ScoreRequest(f"{row}/0", "p", f"```python\n{code}\n```", extra={"tests": tests, "entry_point": entry})
        for row, (code, tests) in enumerate(pairs)
    ]
    return [(score.value, score.cause) for score in reward(requests)]


def test_right_code_passes_tests_of_every_shape():
    pairs = [(code, tests) for tests, code in SHAPES.values()]
    names = [name if name != "check" else "check" for name in SHAPES]
    entries = score_all(pairs, entry=None, time_s=20.0)
    found = dict(zip(names, entries, strict=True))
    found["check"] = score_all([SHAPES["check"][::-1]], entry="f", time_s=20.0)[0]
    assert found == dict.fromkeys(names, (1.0, ""))


@pytest.mark.parametrize("attack", ATTACKS)
def test_no_attack_passes_tests_of_any_shape(attack):
    pairs = [(ATTACKS[attack], tests) for tests, _ in SHAPES.values()]
    found = dict(zip(SHAPES, score_all(pairs, entry="f" if False else None), strict=True))
    assert {name: score for name, score in found.items() if score[0]} == {}
