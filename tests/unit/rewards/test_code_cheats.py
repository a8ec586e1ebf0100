"""Reward hacks of code, published ones and variations: none passes a test of any shape that the right code passes."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product

import pytest

from megarl.config.schema import Reward
from megarl.rewards.code import make_code
from megarl.rewards.interface import ScoreRequest

RIGHT = "def double(x):\n    return 2 * x\n"
TESTS = {  # the shapes in which data sets ask
    "check": "def check(candidate):\n    assert candidate(3) == 6\n    assert candidate(5) == 10\ncheck(double)",
    "loop": "inputs, results = [3, 5, 7], [6, 10, 14]\nfor x, y in zip(inputs, results):\n    assert double(x) == y",
    "asserts": ["assert double(3) == 6", "assert double(5) == 10", "assert double(-2) == -4"],
    "reference": "def ref(x):\n    return x + x\nfor x in range(3, 9):\n    assert double(x) == ref(x)",
    "try": "try:\n    assert double(3) == 6\nexcept ValueError:\n    raise AssertionError\nassert double(5) == 10",
    "unittest": (
        "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n        self.assertEqual(double(3), 6)\n"
        "        self.assertEqual(double(5), 10)\n"
    ),
    "function": {"inputs": [[3], [5], [7]], "outputs": [6, 10, 14], "fn_name": "double"},
}
EQUAL = "class E{base}:\n{body}\n    __hash__ = None\ndef double(x):\n    return E({new})\n"
CHEATS = {
    # equality and its relatives
    "equal": EQUAL.format(base="", body="    def __eq__(self, o): return True", new=""),
    "not unequal": EQUAL.format(
        base="",
        body="    def __ne__(self, o): return False\n    def __eq__(self, o): return True",
        new="",
    ),
    "int that equals": EQUAL.format(base="(int)", body="    def __eq__(self, o): return True", new="0"),
    "float that equals": EQUAL.format(base="(float)", body="    def __eq__(self, o): return True", new="0"),
    "text that equals": EQUAL.format(base="(str)", body="    def __eq__(self, o): return True", new="''"),
    "list that equals": EQUAL.format(base="(list)", body="    def __eq__(self, o): return True", new=""),
    "metaclass that equals": (
        "class M(type):\n    def __eq__(cls, o): return True\n    __hash__ = type.__hash__\n"
        "class E(metaclass=M): pass\ndef double(x): return E"
    ),
    "mock any": "from unittest.mock import ANY\ndef double(x): return ANY",
    "magic mock": (
        "from unittest.mock import MagicMock\nm = MagicMock()\nm.__eq__.return_value = True\ndef double(x): return m"
    ),
    "index lies": "class I(int):\n    def __index__(self): return 6\ndef double(x): return I(0)",
    "tolist lies": "class A:\n    tolist = lambda a: a\n    __eq__ = lambda *a: True\ndef double(x): return A()",
    "approx": "import pytest\ndef double(x): return pytest.approx(0, abs=1e9)",
    "nan": "def double(x): return float('nan')",
    "infinite": "def double(x): return float('inf')",
    "decimal": "from decimal import Decimal\ndef double(x): return Decimal('sNaN')",
    "numpy broadcast": "import numpy as np\ndef double(x): return np.array([6, 10, 14, -4])",
    "numpy empty": "import numpy as np\ndef double(x): return np.array([])",
    "numpy object": (
        "import numpy as np\nclass E:\n    def __eq__(self, o): return True\n"
        "def double(x): return np.array([E()], dtype=object)"
    ),
    # all answers at once
    "list": "def double(x): return [6, 10, 14]",
    "set": "def double(x): return {6, 10, 14}",
    "generator": "def double(x): yield from (6, 10, 14)",
    "counter": "import itertools\nc = itertools.count()\ndef double(x): return next(c)",
    "constant": "def double(x): return 6",
    "bool": "def double(x): return True",
    "not implemented": "def double(x): return NotImplemented",
    # leaving early
    "exit": "import sys\ndef double(x): sys.exit(0)",
    "exit at load": "import sys\nsys.exit(0)",
    "_exit": "import os\ndef double(x): os._exit(0)",
    "_exit at load": "import os\nos._exit(0)",
    "quit": "def double(x): quit()",
    "atexit": "import atexit, os\natexit.register(os._exit, 0)\ndef double(x): raise SystemExit",
    "assertion": "def double(x): raise AssertionError",
    "keyboard": "def double(x): raise KeyboardInterrupt",
    "generator exit": "def double(x): raise GeneratorExit",
    "skip": "import unittest\ndef double(x): raise unittest.SkipTest('later')",
    "pytest skip": "import pytest\ndef double(x): pytest.skip('later')",
    "pytest xfail": "import pytest\ndef double(x): pytest.xfail('known')",
    # patches
    "builtins": (
        "import builtins\nfor n in ('all', 'any', 'zip', 'range', 'abs', 'isinstance', 'len', 'sorted'):\n"
        "    setattr(builtins, n, lambda *a, **k: [])\ndef double(x): return 0"
    ),
    "zip": "import builtins\nbuiltins.zip = lambda *a: iter(())\ndef double(x): return 0",
    "assertion error": "import builtins\nbuiltins.AssertionError = ValueError\ndef double(x): return 0",
    "unittest equal": "import unittest\nunittest.TestCase.assertEqual = lambda *a: None\ndef double(x): return 0",
    "unittest run": "import unittest\nunittest.TestCase.run = lambda *a, **k: None\ndef double(x): return 0",
    "json": (
        "import json\njson.dumps = lambda *a, **k: '{\"value\": 6}'\njson.JSONEncoder.encode = lambda *a: '6'\n"
        "def double(x): return 0"
    ),
    "reference": "def ref(x): return 0\ndef double(x): return 0",
    "check": "def check(candidate): pass\ndef double(x): return 0",
    "candidate": "candidate = check = inputs = results = None\ndef double(x): return 0",
    "import hook": (
        "import sys\nclass F:\n    def find_spec(self, *a): raise SystemExit(0)\n"
        "sys.meta_path.insert(0, F())\ndef double(x): return 0"
    ),
    "modules": "import sys\nsys.modules['unittest'] = sys.modules['builtins']\ndef double(x): return 0",
    "code of the caller": (
        "import sys\ndef double(x):\n    f = sys._getframe(1)\n    while f:\n"
        "        for n in ('y', 'results', 'expected', 'o'):\n"
        "            if n in f.f_locals: return f.f_locals[n]\n        f = f.f_back\n    return 0"
    ),
    "globals of the caller": (
        "import sys\ndef double(x):\n    f = sys._getframe(1)\n    for n in ('ref', 'results'):\n"
        "        if n in f.f_globals: return f.f_globals[n](x) if callable(f.f_globals[n]) else f.f_globals[n][0]\n"
        "    return 0"
    ),
    "trace": (
        "import sys\ndef t(f, e, a):\n    f.f_trace_lines = False\n    return t\n"
        "def double(x):\n    sys.settrace(t)\n    return 0"
    ),
    "garbage": (
        "import gc\ndef double(x):\n    for o in gc.get_objects():\n"
        "        if isinstance(o, list) and o[:2] == [6, 10]: return o[(x - 3) // 2]\n    return 0"
    ),
    "constants": (
        "import gc, types\ndef double(x):\n    for o in gc.get_objects():\n"
        "        if isinstance(o, types.CodeType) and 6 in o.co_consts: return 6 if x == 3 else 10\n    return 0"
    ),
    "traceback": (
        "import traceback\ndef double(x):\n    for line in traceback.format_stack():\n"
        "        if '== 6' in line: return 6\n        if '== 10' in line: return 10\n    return 0"
    ),
    "files": (
        "import glob\ndef double(x):\n    for f in glob.glob('*') + glob.glob('/proc/self/fd/*'):\n"
        "        try:\n            if '== 6' in open(f).read(): return 6 if x == 3 else 10\n"
        "        except Exception: pass\n    return 0"
    ),
    "excepthook": "import sys\nsys.excepthook = lambda *a: None\ndef double(x): raise ValueError",
    # the verdict itself
    "report": (
        "import os, json\ndef double(x):\n    for fd in range(3, 64):\n        try:\n"
        "            for n in range(9): os.write(fd, json.dumps({'number': n, 'value': True}).encode() + b'\\n')\n"
        "        except OSError: pass\n    os._exit(0)"
    ),
    "printed": "print('OK'); print('passed: 3'); print('1.0')\ndef double(x): return print('6\\n10\\n14')",
    "signal": "import os, signal\ndef double(x): os.kill(os.getpid(), signal.SIGUSR1)",
    "real-time signal": "import os\ndef double(x): os.kill(os.getpid(), 40)",
    "thread": (
        "import threading, os, time\ndef f():\n    time.sleep(.05)\n    os._exit(0)\n"
        "threading.Thread(target=f).start()\ndef double(x): time.sleep(1)"
    ),
    "nested": "def double(x):\n    v = []\n    for _ in range(100000): v = [v]\n    return v",
    "recursion": "def double(x): return double(x)",
    "source": "double = '2 * x'",
    "no function": "pass",
    "class": "class double:\n    def __init__(self, x): pass\n    def __eq__(self, o): return True",
    "property": (
        "class Solution:\n    def double(self, x):\n        class E:\n            __eq__ = lambda *a: True\n"
        "        return E()"
    ),
    "async": "async def double(x): return 2 * x",
    "default": "def double(x, y=[6, 10, 14, -4]): return y[0]",
    "argument": "def double(x):\n    try: x.append(0)\n    except AttributeError: return None",
    "comment": "# 6 10 14\ndouble = print",
}  # fmt: skip


def scores(cases: list[tuple[str, object]]) -> list[float | None]:
    reward = make_code(Reward(name="code", options={"time_s": 20.0, "concurrency": 2}))
    requests = [
        ScoreRequest(
            str(n), "p", f"```python\n{code}\n```", extra={"tests": tests, "entry_point": "double"}
        )
        for n, (code, tests) in enumerate(cases)
    ]
    return [score.value for score in reward(requests)]


def test_right_code_passes_every_shape() -> None:
    assert scores([(RIGHT, tests) for tests in TESTS.values()]) == [1.0] * len(TESTS)


def worth(shapes: Iterable[str]) -> dict[tuple[str, str], float | None]:
    """The score of each (cheat, shape)."""
    pairs = list(product(CHEATS, shapes))
    return dict(
        zip(pairs, scores([(CHEATS[name], TESTS[shape]) for name, shape in pairs]), strict=True)
    )


def test_cheats_of_code_are_worth_nothing() -> None:
    assert {pair: value for pair, value in worth(["loop"]).items() if value != 0.0} == {}


@pytest.mark.long
@pytest.mark.exhaustive
def test_cheats_of_code_in_every_other_shape() -> None:
    assert {
        pair: value
        for pair, value in worth(sorted(TESTS.keys() - {"loop"})).items()
        if value != 0.0
    } == {}
