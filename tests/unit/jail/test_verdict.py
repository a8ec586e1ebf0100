"""Attacks on the verdict of tests in Python, and right code in as many shapes: held, accepted or refused by name."""

from __future__ import annotations

from megarl.config.schema import Reward
from megarl.jail.code_tests import read_tests
from megarl.rewards.code import make_code
from megarl.rewards.interface import ScoreRequest

FIVE = "def f(*a): return 5\ndef g(*a): return 5\n"
CASE = "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n        {}\n"
SAME = "def f(*a, **k): return 77\ndef g(*a, **k): return 77\n"
EMPTY = (
    "def f(*a): return []\ndef g(*a): return []\nclass Solution:\n    def f(self, *a): return []\n"
)
EQUAL = (
    "class E:\n    def __eq__(self, o): return True\n    __ne__ = lambda s, o: False\n    __hash__ = lambda s: 1\n"
    "    __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __eq__\n    __sub__ = __rsub__ = lambda s, o: 0\n"
    "    __abs__ = __float__ = __int__ = __index__ = lambda s: 0\n    __len__ = lambda s: 1\n"
    "    def __getattr__(self, n):\n        if n.startswith('__') or n == 'tolist': raise AttributeError(n)\n"
    "        return lambda *a: True\n"
    "def f(*a): return E()\ng = F = f\n"
)
NAMED = (
    "class Yes:\n    def __call__(self, *a): return [] if '{0}' == 'reshape' else True\n"
    "class P(tuple): _fields = ('{0}',)\ndef f(*a): return P([Yes()])\n"
)
ITSELF = (
    "class Solution:\n    def f(self, *a): return self\n    def __contains__(self, x): return True\n"
    "    def startswith(self, *a): return True\n    isdigit = startswith\n"
)
ZIP = "xs, rs = [1, 2], [2, 4]\nfor x, r in zip(xs, map(f, xs)):\n    assert r == 2 * x"


def raising(error: str) -> str:
    return f"def f(*a): raise {error}\ng = f\n"


# name: (tests, a solution that is wrong)
ATTACKS = {
    # both sides are the solution's, through names
    "a name": ("expected = g(5)\nassert f(5) == expected", FIVE),
    "two names": ("a = g(5)\nb = a\nassert f(5) == b", FIVE),
    "a name before": ("r = f(5)\nassert r == g(5)", FIVE),
    "both are names": ("r = f(5)\ne = g(5)\nassert e == r", FIVE),
    "annotated": ("e: int = g(5)\nassert f(5) == e", FIVE),
    "augmented": ("e = 0\ne += g(5)\nassert f(5) == e", FIVE),
    "walrus": ("assert (e := g(5)) is not None\nassert f(5) == e", FIVE),
    "a tuple": ("a, b = g(5), 1\nassert f(5) == a", FIVE),
    "a star": ("a, *b = [1, g(5)]\nassert f(5) == b[0]", FIVE),
    "a loop": ("for e in [g(5)]:\n    assert f(5) == e", FIVE),
    "a comprehension": ("assert [f(5)] == [e for e in [g(5)]]", FIVE),
    "inside a comprehension": ("assert all(f(x) == e for x, e in zip([1], [g(1)]))", FIVE),
    "with": ("import contextlib\nwith contextlib.nullcontext(g(5)) as e:\n    assert f(5) == e", FIVE),
    "match": ("match g(5):\n    case e:\n        assert f(5) == e", FIVE),
    "match, a part": ("match [g(5), 1]:\n    case [e, *_]:\n        assert f(5) == e", FIVE),
    "except": (
        "try:\n    g(5)\nexcept ValueError as error:\n    e = str(error)\ntry:\n    f(5)\n"
        "except ValueError as error:\n    assert str(error) == e",
        raising("ValueError('x')"),
    ),
    "a list": ("es = []\nes.append(g(5))\nassert f(5) == es[0]", FIVE),
    "a list, another name": ("es = [[]]\nrow = es[0]\nrow.append(g(5))\nassert [f(5)] == es[0]", FIVE),
    "a dict": ("d = {}\nd['e'] = g(5)\nassert f(5) == d['e']", FIVE),
    "setdefault": ("d = {}\nd.setdefault('e', g(5))\nassert f(5) == d['e']", FIVE),
    "an attribute": (
        "import types\nns = types.SimpleNamespace()\nns.e = g(5)\nassert f(5) == ns.e", FIVE),
    "an attribute of a class": ("class C: pass\nC.e = g(5)\nassert f(5) == C.e", FIVE),
    "a class body": ("class C:\n    e = g(5)\nassert f(5) == C.e", FIVE),
    "a return": ("def h():\n    return g(5)\nassert f(5) == h()", FIVE),
    "a return of a name": ("def h(x):\n    y = g(x)\n    return y\nassert f(5) == h(5)", FIVE),
    "a generator": ("def h():\n    yield g(5)\nassert f(5) == next(h())", FIVE),
    "a generator of a generator": ("def h():\n    yield from [g(5)]\nassert f(5) == next(h())", FIVE),
    "a parameter": ("def h(a, b):\n    assert a == b\nh(f(5), g(5))", FIVE),
    "a parameter by name": ("def h(a, b=0):\n    assert a == b\nh(f(5), b=g(5))", FIVE),
    "parameters, a star": ("def h(a, b):\n    assert a == b\nh(*[f(5), g(5)])", FIVE),
    "parameters, a dict": ("def h(a, b):\n    assert a == b\nh(**{'a': f(5), 'b': g(5)})", FIVE),
    "a default": ("def h(a, b=g(5)):\n    assert a == b\nh(f(5))", FIVE),
    "a lambda": ("eq = lambda a, b: a == b\nassert eq(f(5), g(5))", FIVE),
    "a lambda at once": ("assert (lambda a, b: a == b)(f(5), g(5))", FIVE),
    "a function as a value": ("def eq(a, b):\n    return a == b\nassert all(map(eq, map(f, [5]), map(g, [5])))", FIVE),
    "a closure": ("def h():\n    e = g(5)\n    def i():\n        return e\n    return i\nassert f(5) == h()()", FIVE),
    "a global": ("def h():\n    global e\n    e = g(5)\nh()\nassert f(5) == e", FIVE),
    "a branch": ("e = 5 if g(5) == 5 else 1\nassert f(5) == e", FIVE),
    "a branch that assigns": ("if g(5) == 5:\n    e = 5\nelse:\n    e = 1\nassert f(5) == e", FIVE),
    "self": (
        "import unittest\nclass T(unittest.TestCase):\n    def setUp(self):\n        self.e = g(5)\n"
        "    def test(self):\n        self.assertEqual(f(5), self.e)", FIVE),
    "in place": ("x = [1]\nf(x)\nassert x == g(5)", "def f(x): x.clear()\ndef g(x): return []"),
    # one side looks free
    "a difference": ("assert f(5) - g(5) == 0", FIVE),
    "a difference, negated": ("assert not f(5) - g(5)", FIVE),
    "a difference in steps": ("d = f(5)\nd -= g(5)\nassert d == 0", FIVE),
    "a quotient": ("assert f(5) / g(5) == 1", FIVE),
    "close": ("import math\nassert math.isclose(f(5), g(5))", FIVE),
    "allclose": ("import numpy as np\nassert np.allclose(f(5), g(5))", FIVE),
    "operator": ("import operator\nassert operator.eq(f(5), g(5))", FIVE),
    "a set": ("assert len({f(5), g(5)}) == 1", FIVE),
    "in a list": ("assert f(5) in [g(5)]", FIVE),
    "count": ("assert [f(5)].count(g(5)) == 1", FIVE),
    "is": ("assert f(5) is g(5)", FIVE),
    "dunder": ("assert f(5).__eq__(g(5))", FIVE),
    "type": ("assert type(f(5)) == type(g(5))", FIVE),
    "assertEqual, another name": ("import unittest\neq = unittest.TestCase().assertEqual\neq(f(5), g(5))", FIVE),
    "HumanEval/38": (
        "def check(candidate):\n    for s in ('abc', 'defg'):\n        encoded = encode(s)\n"
        "        assert candidate(encoded) == s\ncheck(decode)",
        "def encode(s): return s\ndecode = encode",
    ),
    "a round trip": ("assert decode(encode('abc')) == 'abc'", "def encode(s): return s\ndecode = encode"),
    "a round trip, names": ("e = encode('abc')\nd = decode(e)\nassert d == 'abc'", "encode = decode = str"),
    # no assertion runs
    "nothing to loop over": ("for a, b in zip(f(5), [1, 2]):\n    assert a == b", EMPTY),
    "nothing to loop over, a name": ("r = f(5)\nfor a, b in zip(r, [1, 2]):\n    assert a == b", EMPTY),
    "all of nothing": ("assert all(a == b for a, b in zip(f(5), [1, 2]))", EMPTY),
    "if": ("r = f(5)\nif r:\n    assert r == [1, 2]", EMPTY),
    "continue": ("for x in (1, 2):\n    r = f(x)\n    if not r:\n        continue\n    assert r == [x]", EMPTY),
    "while": ("r = f(5)\nwhile r:\n    assert r.pop() == 1", EMPTY),
    "try, then": ("try:\n    r = f(5)\n    assert r == 2\nexcept ValueError:\n    pass", raising("ValueError")),
    "try": ("try:\n    assert f(5) == 2\nexcept ValueError:\n    pass", raising("ValueError")),
    "try, all": ("try:\n    assert f(5) == 2\nexcept ValueError:\n    pass", raising("BaseException")),
    "suppress": (
        "import contextlib\nwith contextlib.suppress(ValueError):\n    assert f(5) == 2", raising("ValueError")),
    "suppress, then": (
        "import contextlib\nwith contextlib.suppress(ValueError):\n    r = f(5)\n    assert r == 2",
        raising("ValueError"),
    ),
    # exceptions that end something
    **{
        f"zip, {error.splitlines()[0]}": (ZIP, raising(error))
        for error in ("StopIteration", "StopAsyncIteration", "GeneratorExit", "KeyboardInterrupt", "SystemExit(0)")
    },
    "zip, a subclass": (ZIP, "class E(StopIteration): pass\n" + raising("E")),
    "zip, a subclass of SystemExit": (ZIP, "class E(SystemExit): pass\n" + raising("E(0)")),
    "zip, the other way": (ZIP.replace("zip(xs, map(f, xs))", "zip(xs, [*map(f, xs)])"), raising("StopIteration")),
    "caught and forgotten": (
        "def h(x):\n    try:\n        return f(x)\n    except BaseException:\n        return 10\nassert h(5) == 10",
        raising("StopIteration"),
    ),
    "a generator's end": ("def h():\n    yield f(5)\nassert list(h()) == []", raising("StopIteration")),
    "next": ("it = iter(map(f, [5]))\nassert next(it, 10) == 10", raising("StopIteration")),
    "by pipe": (
        ZIP,
        "import os\ndef f(x):\n    for d in range(3, 64):\n        try: os.write(d, b'{\"raised\": "
        "[\"StopIteration\", \"Exception\"], \"text\": \"\", \"kind\": \"exception\"}\\n')\n        except OSError: pass",
    ),
    # what evaluates
    "eval": ("assert eval(f(3)) == 9", "def f(x): return '3 * 3'"),
    "eval, a name": ("e = eval\nr = f(3)\nassert e(r) == 9", "def f(x): return '3 * 3'"),
    "eval, a map": ("assert list(map(eval, f(3))) == [9]", "def f(x): return ['9']"),
    "eval, a parameter": ("def h(e, x):\n    return e(x)\nassert h(eval, f(3)) == 9", "def f(x): return '9'"),
    "exec": ("ns = {}\nexec(f(3), ns)\nassert ns['r'] == 9", "def f(x): return 'r = 9'"),
    "compile": ("code = compile(f(3), 'x', 'eval')\nassert eval(code) == 9", "def f(x): return '9'"),
    "getattr": ("import math\nassert getattr(math, f(3))(9) == 3", "def f(x): return 'sqrt'"),
    "import_module": (
        "import importlib\nassert importlib.import_module(f(3)).pi > 3", "def f(x): return 'math'"),
    "__import__": ("assert __import__(f(3)).pi > 3", "def f(x): return 'math'"),
    "a template": ("assert f(3).format(9) == '9'", "def f(x): return '{0}'"),
    "a template, a name": ("t = f(3)\nassert t.format_map({'a': 9}) == '9'", "def f(x): return '{a}'"),
    "a format": ("assert f'{9:{f(3)}}' == '9'", "def f(x): return 'd'"),
    "a pattern of unittest": (CASE.format("self.assertRegex('abc', f(3))"), "def f(x): return '.*'"),
    "a template of string": ("import string\nassert string.Template(f(3)).substitute(a=9) == '9'", "def f(x): return '$a'"),
    "a template, %": ("assert f(3) % {'a': 9} == '9'", "def f(x): return '%(a)s'"),
    "an exit status": ("import sys\nsys.exit(f(3))", "def f(x): return 0"),
    "a pattern": ("import re\nassert re.fullmatch(f(3), 'abc')", "def f(x): return '.*'"),
    "a shell": ("import os\nassert os.system(f(3)) == 0", "def f(x): return 'true'"),
    "open": ("assert open(f(3))", "def f(x): return '/dev/null'"),
    "pickle": ("import pickle\nassert pickle.loads(f(3)) == 9", "def f(x): return b'I9\\n.'"),
    # objects
    **{
        f"an object, {test}": (f"import math\nassert {test}", EQUAL)
        for test in (
            "f(5) == 2", "2 == f(5)", "not f(5) != 2", "f(5) > 3", "3 < f(5)", "f(5) in [1, 2]", "[f(5)] == [2]",
            "f(5) in {2: 3}", "2 in f(5)", "abs(f(5) - 3.5) < 1e-6", "abs(3.5 - f(5)) < 1e-6", "f(5).count(3)",
            "f(5).startswith('abc')", "f(5).issubset({1})", "F(5).startswith('abc')", "2 in F(5)", "f(5)[0] == 2",
            "sorted([f(5), 1]) == 2", "f.__doc__", "callable(f(5))", "(f(5), 1) == (2, 1)", "{1: f(5)} == {1: 2}",
            "math.isclose(f(5), 3.5)", "f(5) is True", "hash(f(5)) == 1", "max(f(5), 3) == 2", "len(f(5)) == 2",
        )
    },
    # more of each
    "nested for": ("for e in g(5):\n    for x in [5]:\n        assert f(x) == e", "def f(*a): return 5\ndef g(*a): return [5]"),
    "dict comp": ("d = {k: g(k) for k in [5]}\nassert all(f(k) == d[k] for k in d)", FIVE),
    "dict items": ("d = {5: g(5)}\nfor k, v in d.items():\n    assert f(k) == v", FIVE),
    "swap": ("a, b = f(5), g(5)\na, b = b, a\nassert a == b", FIVE),
    "global assigned in fn": ("e = 1\ndef h():\n    global e\n    e = g(5)\nh()\nassert f(5) == e", FIVE),
    "nonlocal": ("def h():\n    e = 1\n    def i():\n        nonlocal e\n        e = g(5)\n    i()\n    return e\nassert f(5) == h()", FIVE),
    "mutable default": ("def h(acc=[]):\n    acc.append(g(5))\n    return acc\nassert [f(5)] == h()", FIVE),
    "helper mutates": ("def h(d):\n    d['e'] = g(5)\nd = {}\nh(d)\nassert f(5) == d['e']", FIVE),
    "helper appends to arg": ("def h(d, v):\n    d.append(v)\nd = []\nh(d, g(5))\nassert [f(5)] == d", FIVE),
    "class instance attr": ("class C:\n    def __init__(self):\n        self.e = g(5)\nassert f(5) == C().e", FIVE),
    "class method": ("class C:\n    def e(self):\n        return g(5)\nassert f(5) == C().e()", FIVE),
    "property": ("class C:\n    @property\n    def e(self):\n        return g(5)\nassert f(5) == C().e", FIVE),
    "partial": ("import functools\nh = functools.partial(g, 5)\nassert f(5) == h()", FIVE),
    "reduce": ("import functools\ne = functools.reduce(lambda a, x: g(x), [1, 2], 0)\nassert f(5) == e", FIVE),
    "sorted key": ("e = sorted([1, 5], key=g)[0]\nassert f(5) == g(5)", FIVE),
    "starmap": ("import itertools\nes = list(itertools.starmap(g, [(5,)]))\nassert f(5) == es[0]", FIVE),
    "zip dict": ("d = dict(zip([5], map(g, [5])))\nassert f(5) == d[5]", FIVE),
    "f-string": ("e = f'{g(5)}'\nassert str(f(5)) == e", FIVE),
    "join": ("e = ','.join(str(g(x)) for x in [5])\nassert str(f(5)) == e", FIVE),
    "ifexp both": ("assert (f(5) if True else 0) == g(5)", FIVE),
    "and": ("assert f(5) and f(5) == g(5)", FIVE),
    "not ne": ("assert not f(5) != g(5)", FIVE),
    "chained": ("assert f(5) == 5 - 0 if False else f(5) == g(5)", FIVE),
    "tuple cmp": ("assert (f(5), 1) == (g(5), 1)", FIVE),
    "raise if": ("if f(5) != g(5):\n    raise AssertionError", FIVE),
    "raise if diff": ("r = f(5)\ne = g(5)\nif r - e:\n    raise AssertionError", FIVE),
    "match value": ("e = g(5)\nmatch f(5):\n    case x if x == e:\n        pass\n    case _:\n        raise AssertionError", FIVE),
    "while loop": ("i = 0\nwhile i < 1:\n    e = g(5)\n    assert f(5) == e\n    i += 1", FIVE),
    "del": ("e = [g(5), 1]\ndel e[1]\nassert [f(5)] == e", FIVE),
    "update": ("d = {}\nd.update(e=g(5))\nassert f(5) == d['e']", FIVE),
    "ior": ("d = {}\nd |= {'e': g(5)}\nassert f(5) == d['e']", FIVE),
    "slice assign": ("e = [1]\ne[:] = [g(5)]\nassert [f(5)] == e", FIVE),
    "deque rotate": ("from collections import deque\nq = deque()\nq.appendleft(g(5))\nassert f(5) == q[0]", FIVE),
    "setattr": ("class C: pass\nsetattr(C, 'e', g(5))\nassert f(5) == C.e", FIVE),
    "globals": ("globals()['e'] = g(5)\nassert f(5) == e", FIVE + "e = 5"),
    "setUpClass": ("import unittest\nclass T(unittest.TestCase):\n    @classmethod\n    def setUpClass(cls):\n        cls.e = g(5)\n    def setUp(self):\n        self.setUpClass()\n    def test(self):\n        self.assertEqual(f(5), self.e)", FIVE),
    "assertEqual helper": ("import unittest\nclass T(unittest.TestCase):\n    def same(self, a, b):\n        self.assertEqual(a, b)\n    def test(self):\n        self.same(f(5), g(5))", FIVE),
    "assertAlmostEqual": ("import unittest\nclass T(unittest.TestCase):\n    def test(self):\n        self.assertAlmostEqual(f(5), g(5))", FIVE),
    "assertIn": ("import unittest\nclass T(unittest.TestCase):\n    def test(self):\n        self.assertIn(f(5), [g(5)])", FIVE),
    "assertTrue": ("import unittest\nclass T(unittest.TestCase):\n    def test(self):\n        self.assertTrue(f(5) == g(5))", FIVE),
    "approx": ("import pytest\nassert f(5) == pytest.approx(g(5))", FIVE),
    "parametrize": ("import pytest\n@pytest.mark.parametrize('x, e', [(5, g(5))])\ndef test_f(x, e):\n    assert f(x) == e", FIVE),
    "fixture": ("import pytest\nE = g(5)\ndef test_f():\n    assert f(5) == E", FIVE),
    "same function twice": ("assert f(5) == f(5)", FIVE),
    "idempotent": ("r = f(5)\nassert f(r) == r", FIVE),
    "len both": ("assert len(f(5)) == len(g(5))", EMPTY),
    "len name": ("n = len(f(5))\nassert len(g(5)) == n", EMPTY),
    "issubset": ("assert set(f(5)).issubset(g(5))", EMPTY),
    "difference_update": ("s = {5}\ns -= {f(5)}\nassert not s", "def f(x): return x"),
    "any": ("assert any(f(x) == g(x) for x in [5])", FIVE),
    "set of results": ("rs = [f(5), g(5)]\nassert len(set(rs)) == 1", FIVE),
    "max==min": ("rs = [f(x) for x in [1,2]]\nassert max(rs) == min(rs)", FIVE),
    "all equal first": ("rs = [f(x) for x in [1,2]]\nassert all(r == rs[0] for r in rs)", FIVE),
    "Counter": ("from collections import Counter\nassert Counter([f(5)]) == Counter([g(5)])", FIVE),
    "np diff": ("import numpy as np\nassert np.abs(np.array(f(5)) - np.array(g(5))).max() < 1e-6", FIVE),
    "np all": ("import numpy as np\nassert np.all(np.equal(f(5), g(5)))", FIVE),
    "cmp lambda map": ("assert all(map(lambda p: p[0] == p[1], zip(map(f, [5]), map(g, [5]))))", FIVE),
    "filter": ("assert not list(filter(lambda x: f(x) != g(x), [5]))", FIVE),
    "list comp if": ("assert not [x for x in [5] if f(x) != g(x)]", FIVE),
    "nested def": ("def check(candidate):\n    def inner(x):\n        e = g(x)\n        return candidate(x) == e\n    assert inner(5)\ncheck(f)", FIVE),
    "recursion": ("def h(n):\n    if n == 0:\n        return g(5)\n    return h(n - 1)\nassert f(5) == h(3)", FIVE),
    "loop over dict of functions": ("fs = {'f': f, 'g': g}\nassert fs['f'](5) == fs['g'](5)", FIVE),
    "list of functions": ("rs = [h(5) for h in (f, g)]\nassert rs[0] == rs[1]", FIVE),
    "try assign": ("try:\n    e = g(5)\nexcept Exception:\n    e = 0\nassert f(5) == e", FIVE),
    "return early": ("def t():\n    r = f(5)\n    if not r:\n        return\n    assert r == [1]\nt()", EMPTY),
    "return early test": ("def test_f():\n    r = f(5)\n    if r is None:\n        return\n    assert r == [1]", "def f(x): pass"),
    "break": ("for x in (1, 2):\n    r = f(x)\n    if not r:\n        break\n    assert r == [x]", EMPTY),
    "sys.exit": ("import sys\nif not f(5):\n    sys.exit(0)\nassert f(5) == [1]", EMPTY),
    "skipTest": ("import unittest\nclass T(unittest.TestCase):\n    def test(self):\n        if not f(5):\n            self.skipTest('no')\n        self.assertEqual(f(5), [1])", EMPTY),
    "loop enumerate": ("for i, r in enumerate(f(5)):\n    assert r == i", EMPTY),
    "loop keys": ("for k in f(5):\n    assert k == 1", "def f(x): return {}"),
    "loop items": ("for k, v in f(5).items():\n    assert v == 1", "def f(x): return {}"),
    "loop zip_longest ok": ("import itertools\nfor a, b in zip(f(5), [1]):\n    assert a == b", EMPTY),
    "loop helper": ("def h(rs, es):\n    for r, e in zip(rs, es):\n        assert r == e\nh(f(5), [1])", EMPTY),
    "all helper": ("def h(rs, es):\n    return all(r == e for r, e in zip(rs, es))\nassert h(f(5), [1])", EMPTY),
    "all map": ("import operator\nassert all(map(operator.eq, f(5), [1]))", EMPTY),
    "range len": ("r = f(5)\nfor i in range(len(r)):\n    assert r[i] == [1, 2][i]", EMPTY),
    "range len all": ("r = f(5)\nassert all(r[i] == [1, 2][i] for i in range(len(r)))", EMPTY),
    "not any": ("assert not any(a != b for a, b in zip(f(5), [1]))", EMPTY),
    "StopIteration in attr": ("p = P()\nfor a, b in zip([1], (p.x for _ in [1])):\n    assert b == 2", "class P:\n    @property\n    def x(self): raise StopIteration"),
    "StopIteration in iter": ("b = B()\nassert [x for x in b] == []", "class B:\n    def __iter__(self): raise StopIteration"),
    "getitem eq": ("b = B()\nb.x\nassert b[0] == 2", "class E:\n    def __eq__(self, o): return True\nclass B:\n    x = 0\n    def __getitem__(self, k): return E()"),
    "method eq": ("b = B()\nassert b.get() == 2", "class B:\n    def get(self): return B()\n    def __eq__(self, o): return True"),
    "method in": ("b = B()\nassert b.get() in [2]", "class B:\n    def get(self): return B()\n    def __eq__(self, o): return True"),
    "method sub": ("b = B()\nassert abs(b.get() - 2) < 1e-6", "class B:\n    def get(self): return B()\n    def __sub__(self, o): return 0"),
    "method add": ("b = B()\nassert b.get() + 1 == 3", "class B:\n    def get(self): return B()\n    def __add__(self, o): return 3"),
    "method add in place": ("b = B()\nr = b.get()\nr += 1\nassert r == 3", "class B:\n    def get(self): return B()\n    def __iadd__(self, o): return 3"),
    "method radd": ("b = B()\nassert 1 + b.get() == 3", "class B:\n    def get(self): return B()\n    def __radd__(self, o): return 3"),
    "method count": ("b = B()\nassert b.get().count(2)", "class E:\n    def count(self, o): return True\nclass B:\n    def get(self): return E()"),
    "hash key": ("b = B()\nd = {}\nd[b.get()] = 1\nassert d", "class E: pass\nclass B:\n    def get(self): return E()"),
    "namedtuple eq": ("assert f(1) == (1, 2)", "from collections import namedtuple\nclass P(namedtuple('P', 'x y')):\n    def __eq__(self, o): return True\ndef f(x): return P(0, 0)"),
    "record field count": ("assert f(1).count(5)", "from collections import namedtuple\ndef f(x):\n    class P(tuple):\n        _fields = ('count',)\n    return P([lambda *a: True])"),
    "record names odd": ("assert f(1) == (1, 2)", "class P(tuple):\n    _fields = (['x'], 5)\ndef f(x): return P((0, 0))"),
    "pipe record": ("assert f(1) == (1, 2)", "import os\ndef f(x):\n    for d in range(3, 64):\n        try: os.write(d, b'{\"value\": {\"record\": [[\"x\", 1], [[], 3]]}}\\n')\n        except OSError: pass"),
    "pipe object": ("assert f(1) == 2", "import os\ndef f(x):\n    for d in range(3, 64):\n        try: os.write(d, b'{\"value\": {\"object\": [7, \"F\"]}}\\n')\n        except OSError: pass"),
    "given back to itself": ("assert f(f(5)) == 5", "def f(x): return x"),
    "a branch that returns": ("def h():\n    if g(5) == 5:\n        return 5\n    return 1\nassert f(5) == h()", FIVE),
    "a count of turns": (
        "n = m = 0\nfor x in f(5):\n    n += 1\nfor x in g(5):\n    m += 1\nassert n == m", EMPTY),
    "a flag in a loop": ("ok = True\nfor a, b in zip(f(5), [1]):\n    if a != b:\n        ok = False\nassert ok", EMPTY),
    "a flag in a loop over it": ("ok = True\nfor a in f(5):\n    if a != 1:\n        ok = False\nassert ok", EMPTY),
    "a helper's loop": (
        "def h(rs):\n    for r in rs:\n        if r != 1:\n            return False\n    return True\nassert h(f(5))", EMPTY),
    "try, else": ("try:\n    r = f(5)\nexcept ValueError:\n    pass\nelse:\n    assert r == 2", raising("ValueError")),
    "with, its own": (
        "import contextlib\n@contextlib.contextmanager\ndef quiet():\n    try:\n        yield\n    except ValueError:\n"
        "        pass\nwith quiet():\n    assert f(5) == 2", raising("ValueError")),
    "try, a group": ("try:\n    assert f(5) == 2\nexcept* ValueError:\n    pass", raising("ValueError")),
    "heappush": ("import heapq\nh = []\nheapq.heappush(h, g(5))\nassert f(5) == h[0]", FIVE),
    "a format by a function": ("assert format(9, f(3)) == '9'", "def f(x): return 'd'"),
    "a global of a parameter": (
        "def h(x):\n    global e\n    e = x\ndef k():\n    return e\nh(g(5))\nassert f(5) == k()", FIVE),
    "raises wrong": ("import pytest\nwith pytest.raises(ValueError):\n    f(1)", raising("StopIteration")),
    # what a call changes, other names of it, what a branch assigns; no comparison runs; results that agree
    'heapq.heappush': ('import heapq\nh=[]\nheapq.heappush(h, g(5))\nassert f(5) == h[0]', SAME),
    'bisect.insort': ('import bisect\nh=[]\nbisect.insort(h, g(5))\nassert f(5) == h[0]', SAME),
    'operator.setitem': ("import operator\nd={}\noperator.setitem(d,'e',g(5))\nassert f(5) == d['e']", SAME),
    'list.append(h, x) unbound': ('h=[]\nlist.append(h, g(5))\nassert f(5) == h[0]', SAME),
    'deque.extendleft': ('from collections import deque\nh=deque()\nh.extendleft([g(5)])\nassert f(5) == h[0]', SAME),
    'bound method alias add=h.append': ('h=[]\nadd=h.append\nadd(g(5))\nassert f(5) == h[0]', SAME),
    'list(map(h.append,...))': ('h=[]\nlist(map(h.append, [g(5)]))\nassert f(5) == h[0]', SAME),
    'd.__setitem__': ("d={}\nd.__setitem__('e', g(5))\nassert f(5) == d['e']", SAME),
    'loop count: for _ in range(g(5)): n+=1': ('n=0\nfor _ in range(g(5)):\n    n += 1\nassert f(5) == n', SAME),
    'try/else decides expected': ('e=77\ntry:\n    g(5)\nexcept ValueError:\n    pass\nelse:\n    e=77\nassert f(5) == e', SAME),
    'try body after the call': ('e=1\ntry:\n    g(5)\n    e=77\nexcept ValueError:\n    pass\nassert f(5) == e', SAME),
    'put/get helpers over a shared list': ('box=[]\ndef put(x): box.append(x)\ndef get(): return box[0]\nput(g(5))\nassert f(5) == get()', SAME),
    'default argument': ('def get(e=g(5)): return e\nassert f(5) == get()', SAME),
    'decorator replaces the reference': ('def use(fn):\n    return lambda x: g(x)\n@use\ndef ref(x): return 0\nassert f(5) == ref(5)', SAME),
    'alias chain c=b=a': ('a=[]\nb=a\nc=b\nc.append(g(5))\nassert f(5) == a[0]', SAME),
    'alias in dict': ("a=[]\nd={'k': a}\nd['k'].append(g(5))\nassert f(5) == a[0]", SAME),
    'alias by tuple assignment': ('a=[]\nb, n = a, 1\nb.append(g(5))\nassert f(5) == a[0]', SAME),
    'alias by loop target': ('a=[]\nfor b in (a,):\n    b.append(g(5))\nassert f(5) == a[0]', SAME),
    'alias by function result': ('a=[]\ndef get(): return a\nget().append(g(5))\nassert f(5) == a[0]', SAME),
    'alias as default parameter': ('a=[]\ndef put(x, store=a): store.append(x)\nput(g(5))\nassert f(5) == a[0]', SAME),
    'walrus alias': ('a=[]\n(b := a).append(g(5))\nassert f(5) == a[0]', SAME),
    'redefined helper': ('box=[]\ndef put(x): box.append(x)\nput(g(5))\ndef put(y): pass\nassert f(5) == box[0]', SAME),
    'early return chosen by g': ('def ref(n):\n    if g(n): return 77\n    return 78\nassert f(5) == ref(5)', SAME),
    'yield chosen by g': ('def ref(n):\n    for i in range(n):\n        if g(i): yield i\nassert f(5) == list(ref(5))', 'def g(i): return False\ndef f(n): return []'),
    'xs.sort(key=g)': ('xs=[5,77]\nxs.sort(key=g)\nassert f(5) == xs[0]', 'def g(x): return -x\ndef f(x): return 77'),
    'del xs[g(0)]': ('xs=[5,77]\ndel xs[g(0)]\nassert f(5) == xs[0]', 'def g(x): return 0\ndef f(x): return 77'),
    'xs.pop(g(0))': ('xs=[5,77]\nxs.pop(g(0))\nassert f(5) == xs[0]', 'def g(x): return 0\ndef f(x): return 77'),
    'short circuit statement g(5) and xs.clear()': ('xs=[5]\ng(5) and xs.clear()\nassert f(5) == xs', 'def g(x): return True\ndef f(x): return []'),
    'conditional expression statement': ('xs=[5]\nxs.append(1) if g(5) else xs.append(2)\nassert f(5) == xs', 'def g(x): return True\ndef f(x): return [5,1]'),
    'pytest.raises as info, value compared': ('import pytest\nwith pytest.raises(ValueError) as info:\n    g(-1)\nassert f(5) == str(info.value)', "def g(x): raise ValueError('x')\ndef f(x): return 'x'"),
    'assertRaises as cm, value compared': ('import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n        with self.assertRaises(ValueError) as cm:\n            g(-1)\n        self.assertEqual(f(5), str(cm.exception))', "def g(x): raise ValueError('x')\ndef f(x): return 'x'"),
    "eval of an exception's text": ('import pytest\nwith pytest.raises(ValueError) as info:\n    f(5)\nassert eval(str(info.value)) == 6', "def f(x): raise ValueError('6')"),
    'operator.eq(*pair)': ('import operator\npair=(f(5), g(5))\nassert operator.eq(*pair)', SAME),
    'assertEqual(*pair)': ('import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n        pair=(f(5), g(5))\n        self.assertEqual(*pair)', SAME),
    'results.count(results[0])': ('r=[f(5), g(5)]\nassert r.count(r[0]) == 2', SAME),
    'statistics.pstdev of both': ('import statistics\nassert statistics.pstdev([f(5), g(5)]) == 0', SAME),
    'np.ptp of both': ('import numpy as np\nassert np.ptp([f(5), g(5)]) == 0', SAME),
    'len of a dict of both': ('assert len({f(5): 1, g(5): 2}) == 1', SAME),
    's=set([..]); len(s)': ('s=set([f(5), g(5)])\nassert len(s) == 1', SAME),
    's.add twice': ('s=set()\ns.add(f(5))\ns.add(g(5))\nassert len(s) == 1', SAME),
    'len of set comprehension': ('assert len({h(5) for h in (f, g)}) == 1', SAME),
    'len(frozenset)': ('assert len(frozenset([f(5), g(5)])) == 1', SAME),
    'dict.fromkeys': ('assert len(dict.fromkeys([f(5), g(5)])) == 1', SAME),
    'groupby': ('import itertools\nassert len(list(itertools.groupby([f(5), g(5)]))) == 1', SAME),
    'symmetric_difference of one function': ('assert set(f([1,2])).symmetric_difference(f([2,1])) == set()', EMPTY),
    'issubset of one function': ('assert set(f([1,2])).issubset(f([1,2]))', EMPTY),
    'assertAlmostEqual delta from the solution': ('import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n        self.assertAlmostEqual(f(5), 6, delta=g(5))', 'def f(x): return 7\ndef g(x): return 1e9'),
    'pytest.approx tolerance from the solution': ('import pytest\nassert f(5) == pytest.approx(6, abs=g(5))', 'def f(x): return 7\ndef g(x): return 1e9'),
    'np.isclose atol from g': ('import numpy as np\nassert np.isclose(f(5), 6, atol=g(5))', 'def f(x): return 7\ndef g(x): return 1e9'),
    'class __eq__ calls g': ('class E:\n    def __eq__(self, o): return o == g(5)\nassert E() == f(5)', SAME),
    'class __contains__ with g': ('class E:\n    def __contains__(self, o): return g(o)\nassert f(5) in E()', 'def f(x): return 1\ndef g(x): return True'),
    'nonlocal, again': ('def outer():\n    e=0\n    def inner():\n        nonlocal e\n        e=g(5)\n    inner()\n    return e\nassert f(5) == outer()', SAME),
    'global': ('E=0\ndef setup():\n    global E\n    E=g(5)\nsetup()\nassert f(5) == E', SAME),
    'class body': ('class E:\n    v=g(5)\nassert f(5) == E.v', SAME),
    'generator function': ('def ref():\n    yield g(5)\nassert f(5) == next(ref())', SAME),
    'walrus in a comprehension': ('[e := g(x) for x in [5]]\nassert f(5) == e', SAME),
    'dict unpacking': ("d={**{'e': g(5)}}\nassert f(5) == d['e']", SAME),
    'set unpacking': ('s=[*[g(5)]]\nassert [f(5)] == s', SAME),
    'functools.partial': ('from functools import partial\ne=partial(g,5)\nassert f(5) == e()', SAME),
    'functools.reduce': ('from functools import reduce\ne=reduce(lambda a,b: g(b),[1,5])\nassert f(5) == e', SAME),
    'f-string, again': ("e=f'{g(5)}'\nassert str(f(5)) == e", SAME),
    'match case': ('match g(5):\n    case e: pass\nassert f(5) == e', SAME),
    'match hides the assert': ('match f(5):\n    case None:\n        pass\n    case r:\n        assert r == 6', 'def f(x): return None'),
    'print to buffer': ('import io\nb=io.StringIO()\nprint(g(5), file=b)\nassert str(f(5)) == b.getvalue().strip()', SAME),
    'json round trip': ("import json\ne=json.loads(json.dumps({'a': g(5)}))\nassert f(5) == e['a']", SAME),
    'operator.iadd': ('import operator\nh=[]\noperator.iadd(h,[g(5)])\nassert f(5) == h[0]', SAME),
    'setdefault result': ("d={}\nd.setdefault('x', []).append(g(5))\nassert f(5) == d['x'][0]", SAME),
    'defaultdict(list)': ("from collections import defaultdict\nd=defaultdict(list)\nd['x'].append(g(5))\nassert f(5) == d['x'][0]", SAME),
    'ChainMap alias': ("from collections import ChainMap\na={}\nc=ChainMap(a)\nc['e']=g(5)\nassert f(5) == a['e']", SAME),
    'lambda stores': ('box=[0]\nput=lambda x: box.__setitem__(0,x)\nput(g(5))\nassert f(5) == box[0]', SAME),
    'partial(box.append)': ('from functools import partial\nbox=[]\np=partial(box.append)\np(g(5))\nassert f(5) == box[0]', SAME),
    'np.copyto': ('import numpy as np\na=np.zeros(1)\nnp.copyto(a, g(5))\nassert f(5) == a[0]', SAME),
    'a.fill': ('import numpy as np\na=np.zeros(1)\na.fill(g(5))\nassert f(5) == a[0]', SAME),
    'ufunc out=': ('import numpy as np\na=np.zeros(1)\nnp.add(g(5), 0, out=a)\nassert f(5) == a[0]', SAME),
    'unittest setUpClass': ('import unittest\nclass T(unittest.TestCase):\n    @classmethod\n    def setUpClass(cls): cls.e=g(5)\n    def test_a(self): self.assertEqual(f(5), self.e)', SAME),
    'itertools.accumulate(func=g)': ('import itertools\ne=list(itertools.accumulate([1,5],g))\nassert f(5) == e[1]', SAME),
    'assert in keyword order': ("import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n        self.assertEqual(msg='x', first=f(5), second=g(5))", SAME),
    'counter subtract': ("from collections import Counter\nc=Counter()\nc.subtract({'a': g(5)})\nassert -f(5) == c['a']", SAME),
    'sum of mismatches over zip': ('assert sum(a != b for a, b in zip(f([1,2]), [2,3])) == 0', EMPTY),
    'list of mismatches is empty': ('assert [1 for a, b in zip(f([1,2]), [2,3]) if a != b] == []', EMPTY),
    'not mismatches': ('bad=[a for a, b in zip(f([1,2]), [2,3]) if a != b]\nassert not bad', EMPTY),
    'sum of abs differences': ('assert sum(abs(a-b) for a, b in zip(f([1,2]), [2.0,3.0])) < 1e-6', EMPTY),
    'False not in list': ('assert False not in [a == b for a, b in zip(f([1,2]), [2,3])]', EMPTY),
    'max(default=0)': ('assert max((abs(a-b) for a, b in zip(f([1,2]), [2,3])), default=0) < 1', EMPTY),
    'reduce and': ('from functools import reduce\nassert reduce(lambda p, q: p and q[0] == q[1], zip(f([1,2]), [2,3]), True)', EMPTY),
    'helper check_one in a loop over zip': ('def check_one(a, b):\n    assert a == b\nfor a, b in zip(f([1,2]), [2,3]):\n    check_one(a, b)', EMPTY),
    'helper in a comprehension': ('def check_one(a, b):\n    assert a == b\n[check_one(a, b) for a, b in zip(f([1,2]), [2,3])]', EMPTY),
    'list(map(check_one, f(xs), expected))': ('def check_one(a, b):\n    assert a == b\nlist(map(check_one, f([1,2]), [2,3]))', EMPTY),
    'all(map(lambda e: next(it)==e))': ('it=iter(f([1,2]))\nassert all(map(lambda e: next(it) == e, [2,3]))', EMPTY),
    'else: return before the assertion': ('def test_f():\n    r = f(5)\n    if r is not None:\n        x = 1\n    else:\n        return\n    assert r == 6', 'def f(x): return None'),
    'else: continue in a loop': ('for x in [1,2]:\n    r = f(x)\n    if r:\n        pass\n    else:\n        continue\n    assert r == x + 1', 'def f(x): return 0'),
    'except*': ('try:\n    assert f(5) == 6\nexcept* ValueError:\n    pass', "def f(x): raise ValueError('x')"),
    'own context manager swallows': ('class Ignore:\n    def __enter__(self): return self\n    def __exit__(self, *a): return True\nwith Ignore():\n    r = f(5)\n    assert r == 6', "def f(x): raise ValueError('x')"),
    'contextmanager function swallows': ('import contextlib\n@contextlib.contextmanager\ndef ignore():\n    try:\n        yield\n    except ValueError:\n        pass\nwith ignore():\n    r = f(5)\n    assert r == 6', "def f(x): raise ValueError('x')"),
    'ternary assert': ('assert (f(5) == 6) if f(5) is not None else True', 'def f(x): return None'),
    'takewhile': ('import itertools\nfor x in itertools.takewhile(lambda x: f(x), [1,2]):\n    assert f(x) == x + 1', 'def f(x): return 0'),
    'filter(f) as loop': ('for x in filter(f, [1,2]):\n    assert f(x) == x + 1', 'def f(x): return 0'),
    'while with a flag': ('ok = f(1)\ni = 0\nwhile ok and i < 2:\n    assert f(i) == i + 1\n    i += 1', 'def f(x): return 0'),
    'retyped ModuleNotFoundError left out': ("try:\n    r = f(5)\nexcept Exception as e:\n    raise type(e)('wrapped')\nassert r == 6", "def f(x): raise ModuleNotFoundError('x')"),
    'raise ValueError in a comprehension source': ('assert all(f(i) == i + 1 for i in range(3))', 'def f(x): raise StopIteration'),
    'dict comparison through items': ("for k, v in f(5).items():\n    assert {'a': 1}[k] == v", 'def f(x): return {}'),
    'results loop through a name': ('rs = [f(i) for i in range(3)]\nfor i, r in enumerate(rs):\n    assert r == i + 1', 'def f(x): raise StopIteration'),
    'string.Formatter().format(f(5))': ('import string\nassert string.Formatter().format(f(5), 6) == str(6)', "def f(x): return '{0}'"),
    'np.bmat evaluates a name': ('import numpy as np\nexpected=np.matrix([[6]])\nassert (np.bmat(f(5)) == expected).all()', "def f(x): return 'expected'"),
    'str.format(f(5), ..)': ('assert str.format(f(5), 6) == str(6)', "def f(x): return '{0}'"),
    'percent with a tuple by name': ('args=(6,)\nassert f(5) % args == str(6)', "def f(x): return '%s'"),
    'expected via closure list comp': ('e=[h(5) for h in [g]]\nassert [f(5)] == e', SAME),
    'sorted of both, ends': ('r=sorted([f(5),g(5)])\nassert r[0] is r[-1]', SAME),
    'xs remove': ('xs=[5,77]\nxs.remove(g(5))\nassert f(5) == xs[0]', 'def g(x): return 5\ndef f(x): return 77'),
    'sum of abs differences, entry': ('xs=[1,2,3]\nexpected=[2.0,3.0,4.0]\nassert sum(abs(a-b) for a, b in zip(f(xs), expected)) < 1e-6', EMPTY),
    'check(candidate) + helper in a loop over zip': ('def close(a, b):\n    assert abs(a-b) < 1e-6\ndef check(candidate):\n    for got, want in zip(candidate([1,2]), [2.0,3.0]):\n        close(got, want)\ncheck(f)', EMPTY),
    'unittest helper self.check in a loop': ('import unittest\nclass T(unittest.TestCase):\n    def same(self, a, b): self.assertEqual(a, b)\n    def test_a(self):\n        for a, b in zip(f([1,2]), [2,3]): self.same(a, b)', EMPTY),
    'np.sum of squared zip errors': ('import numpy as np\nerr=[(a-b)**2 for a, b in zip(f([1,2]), [2,3])]\nassert np.sum(err) < 1e-9', EMPTY),
    'count of matches equals len(result)': ('got=f([1,2])\nok=[a == b for a, b in zip(got, [2,3])]\nassert ok.count(False) == 0', EMPTY),
    "error message of f against f's text, one function": ('import pytest\nwith pytest.raises(ValueError) as e:\n    f(-1)\nassert str(e.value) == f(1)', "def f(x):\n    if x < 0: raise ValueError('x')\n    return 'x'"),
    'permutation invariance through a name': ('s=set()\nfor p in [(1,2),(2,1)]:\n    s.add(f(p))\nassert len(s) == 1', 'def f(x): return 0'),
    "S4: chosen 'bad_tests' needs raise type(e)": ('try:\n    r=f(1)\nexcept Exception as e:\n    raise type(e)(str(e)) from None\nassert r == 2', "def f(x): raise ModuleNotFoundError('x')"),
    'more, ret': ('def get(): return a\na=[]\nb=get()\nb.append(g(5))\nassert f(5)==a[0]', SAME),
    'more, kwargs': ('def put(x, d): d.append(x)\na=[]\nput(d=a, x=g(5))\nassert f(5)==a[0]', SAME),
    'more, nested': ('def put(x):\n    def inner(y): a.append(y)\n    inner(x)\na=[]\nput(g(5))\nassert f(5)==a[0]', SAME),
    'more, boolop': ('xs=[5]\nassert g(5) or xs.append(1)\nassert f(5) == xs', SAME),
    'more, exc2': ("msg=''\ntry:\n    g(-1)\n    assert False\nexcept ValueError as e:\n    msg = str(e)\nassert f(5)==msg", SAME),
    'more, raises': ('import pytest\ne = pytest.raises(ValueError, g, -1)\nassert str(e.value) == f(1)', SAME),
    'more, handler_ret': ('def t():\n    try:\n        r=f(5)\n    except ValueError:\n        return\n    assert r==6\nt()', SAME),
    'more, delta': ('import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n        self.assertAlmostEqual(f(5), 6, g(5))', SAME),
    'more, withself': ('import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n        with self.assertRaises(ValueError) as self.cm:\n            g(1)\n        self.assertEqual(f(5), str(self.cm.exception))', SAME),
    'more, alias3': ('import copy\na=[[1]]\nb=copy.copy(a)\nb[0].append(g(5))\nassert f(5)==a[0][1]', SAME),
    'more, gen': ('def gen():\n    x = yield\n    a.append(x)\n    yield\na=[]\ng2=gen()\nnext(g2)\ng2.send(g(5))\nassert f(5)==a[0]', SAME),
    'more, attr': ('a=[]\nclass N: pass\nn=N()\nn.x=a\nn.x.append(g(5))\nassert f(5)==a[0]', SAME),
    'more, glob': ('e=5\ndef set_(x):\n    global e\n    e = x\nset_(g(5))\nassert f(5)==e', SAME),
    'more, lam': ("store={}\nput=lambda k, v: store.update({k: v})\nput('e', g(5))\nassert f(5)==store['e']", SAME),
    'more, rebind2': ('h=[]\nindex=h.append\nindex(g(5))\nassert f(5)==h[0]', SAME),
    'more, rebind3': ('h=[]\nlen=h.append\nlen(g(5))\nassert f(5)==h[0]', SAME),
    'more, mapp': ('h=[]\nsorted([g(5)], key=h.append)\nassert f(5)==h[0]', SAME),
    'more, mx2': ('h=[]\nmax([g(5)], key=lambda x: h.append(x) or 0)\nassert f(5)==h[0]', SAME),
    'more, cmps': ('import functools\nassert functools.reduce(lambda a,b: a==b, [f(5), g(5)])', SAME),
    'more, join': ("assert len(set(''.join([str(f(5)), str(g(5))]))) == 1", SAME),
    'more, retry': ('for _ in range(3):\n    try:\n        r=f(5)\n        break\n    except Exception:\n        pass\nassert r==6', SAME),
    'more, helper': ('def same(xs):\n    for x in xs:\n        assert x == 2\nsame(f(5))', SAME),
    'more, helper2': ('def same(xs):\n    return [x for x in xs if x != 2]\nassert same(f(5)) == []', SAME),
    'more, matchc': ('a=[]\nmatch a:\n    case b: b.append(g(5))\nassert f(5)==a[0]', SAME),
    'allclose of nothing': ('import numpy as np\nassert np.allclose(f(5), 6)', EMPTY),
    'allclose of nothing, a list': ('import numpy as np\nassert np.allclose(f(5), [6])', EMPTY),
    # named tuples and instances of Solution that answer like plain data; NumPy, which compares nothing with anything
    **{
        f"a named tuple, {name}": (test, NAMED.format(name))
        for name, test in {
            "startswith": "assert f(5).startswith('abc')", "isdigit": CASE.format("self.assertTrue(f(5).isdigit())"),
            "issubset": "assert f(5).issubset({1})", "reshape": "import numpy as np\nassert np.allclose(f(5), 2.5)",
            "__array_interface__": "import numpy as np, pytest\nassert f(5) == pytest.approx(2.5)",
        }.items()
    },
    **{
        f"a solution that is its result, {test}": (test, ITSELF)
        for test in (
            "assert 3 in Solution().f(5)", "assert Solution().f(5).startswith('abc')", "s = Solution()\nassert s.f(5).isdigit()",
            "import unittest\nclass T(unittest.TestCase):\n    def setUp(self):\n        self.s = Solution()\n"
            "    def test(self):\n        self.assertIn(3, self.s.f(5))",
            "def check(candidate):\n    assert 3 in candidate(5)\ncheck(Solution().f)",
        )
    },
    **{
        f"nothing, {test}": (f"import numpy as np\n{test}", EMPTY)
        for test in (
            "np.testing.assert_array_equal(f(5), 6)", "np.testing.assert_almost_equal(f(5), 6.5)",
            "np.testing.assert_equal(f(5), np.array(6))", "np.testing.assert_array_less(f(5), 6)",
            "assert np.isclose(f(5), 6).all()", "import numpy\nassert numpy.isclose(f(5), 6).all()",
            "from numpy import isclose\nassert isclose(Solution().f(5), 6).all()", "from numpy.testing import assert_array_equal as e\ne(f(5), 6)",
            "from numpy.testing import assert_array_equal\nassert_array_equal(f(5), 6)",
            "np.testing.assert_allclose(actual=f(5), desired=6)", "assert np.allclose(*(f(5), 6))",
        )
    },
    **{
        f"nothing, {test}": (f"import numpy as np\n{test}", EMPTY)
        for test in (
            "assert np.allclose([6], f(5))", "assert np.isclose(6, f(5)).all()", "np.testing.assert_array_equal([6], f(5))",
            "np.testing.assert_array_equal(6, Solution().f(5))",
        )
    },
    "nothing is expected": ("import numpy as np\nassert np.allclose(f(5), [])", SAME),
    "an object that reshapes itself": (
        "import numpy as np\nassert np.allclose(f(5), 6)", "class A:\n    def reshape(self, *a): return []\ndef f(x): return A()"),
    "an object that changes its items": (
        "import numpy as np\nassert np.allclose(f(5), 6)",
        "class A:\n    n = 0\n    def __len__(self): return 1\n    def __getitem__(self, k): return 1\n"
        "    def __iter__(self):\n        A.n += 1\n        return iter([1] * (A.n < 2))\ndef f(x): return [A()]"),
    "a method that another class calls": (
        "class H:\n    @classmethod\n    def same(cls, a, b):\n        assert a == b\nH.same(f(5), g(5))", FIVE),
    "a method by its class": (
        "import unittest\nclass T(unittest.TestCase):\n    def same(self, a, b):\n        self.assertEqual(a, b)\n"
        "    def test(self):\n        T.same(self, f(5), g(5))", FIVE),
    "the second of several arguments": ("def h(*a):\n    assert f(5) == a[1]\nh(1, g(5))", FIVE),
    "the rest of the arguments": ("def h(x, *rest):\n    assert x == rest[1]\nh(f(5), 1, g(5))", FIVE),
    "the error that is handled": (
        "import sys\ntry:\n    g(5)\n    assert False\nexcept ValueError:\n    e = str(sys.exc_info()[1])\n"
        "try:\n    f(5)\n    assert False\nexcept ValueError as x:\n    assert str(x) == e", raising("ValueError('x')")),
    "a slice": ("assert [1, 2, 3][f(5):g(5)] == []", FIVE),
    # assertions that never run, or compare nothing
    **{
        f"never run, {test}": (test, SAME)
        for test in (
            "def run():\n    assert f(1) == 2\nCASES = []\nif __name__ == '__main__':\n    run()",
            "assert f(1) == 77\nif __name__ == '__main__':\n    assert f(1) == 2",
            "def run():\n    assert f(1) == 2\nprint('ok')", "def test_a():\n    assert f(1) == 77\ndef testB():\n    assert f(1) == 2",
            "import unittest\nclass Mixin:\n    def test_b(self):\n        self.assertEqual(f(1), 2)\n"
            "class T(Mixin, unittest.TestCase):\n    def test_a(self):\n        self.assertEqual(f(1), 77)",
            "class TestF:\n    def check(self):\n        assert f(1) == 2\n    def test_a(self):\n        assert f(1) == 77",
            "assert f(1) == 77\nimport doctest\ndoctest.testmod()", "f(1) == 2", "assert f(1) == 77\nf(1) == 2",
            "def test_f():\n    return f(1) == 2", "print(f(1) == 2)", "assert (f(1) == 2, 'wrong')",
        )
    },
    **{
        f"nan, {test}": (test, "def f(*a): return float('nan')")
        for test in (
            "if abs(f(1) - 2.5) > 1e-6:\n    raise AssertionError", "assert not abs(f(1) - 2.5) > 1e-6",
            CASE.format("self.assertFalse(abs(f(1) - 2.5) > 1e-6)"), "assert abs(f(1) - 2.5) < 1e-6",
            "assert min(2.5, f(1)) == 2.5", "assert max(2.5, f(1)) == 2.5",
        )
    },
    "control flow where anything is expected": (
        "import pytest\nwith pytest.raises(BaseException):\n    f(-1)", "def f(x): raise KeyboardInterrupt"),
    "pandas": ("import pandas as pd\nassert f(1).equals(pd.Series([1]))",
               "class A:\n    def equals(self, o): return True\ndef f(x): return A()"),
    **{
        f"caught, {test}": (test, SAME)
        for test in (
            "def h():\n    assert f(1) == 2\ndef run(t):\n    try:\n        t()\n    except AssertionError:\n        print('FAIL')\nrun(h)",
            "def h():\n    assert f(1) == 2\nfor t in [h]:\n    try:\n        t()\n    except Exception as e:\n        print(e)",
            "def h():\n    assert f(1) == 2\ntry:\n    h()\nexcept:\n    pass",
            "def h():\n    assert f(1) == 2\ndef run():\n    try:\n        h()\n    finally:\n        return\nrun()",
            "try:\n    f(-1)\n    assert False\nexcept Exception:\n    pass",
            CASE.format("try:\n            f(-1)\n            self.fail('x')\n        except Exception:\n            pass"),
            "import pytest\nwith pytest.raises(AssertionError):\n    assert f(1) == 2",
            "import threading\ndef h():\n    assert f(1) == 2\nt = threading.Thread(target=h)\nt.start()\nt.join()",
            "def quiet(t):\n    def inner():\n        try:\n            t()\n        except AssertionError:\n            pass\n"
            "    return inner\n@quiet\ndef h():\n    assert f(1) == 2\nh()",
        )
    },
    "caught by a handler of another error": (
        "def h():\n    assert f(1) == 2\ntry:\n    h()\nexcept ValueError:\n    pass", raising("ValueError")),
    "expected of a helper that asserts": (
        "import pytest\ndef h():\n    assert f(1) == 2\nwith pytest.raises(AssertionError):\n    h()", SAME),
    "all of nothing, itself": ("assert all(f(5))", EMPTY),
    "s.add twice, another name": ("s=set()\ns.add(f(5))\ns.add(g(5))\nt=s\nassert len(t) == 1", SAME),
    "a method's first parameter is not self": (
        "class H:\n    def same(this, a, b):\n        assert a == b\nH().same(f(5), g(5))", FIVE),
    "the second argument is a message": (CASE.format("self.assertTrue(f(1), 2)"), SAME),
    "the second argument is a message, by name": (CASE.format("e = 2; self.assertTrue(f(1), e)"), SAME),
    "an argument that cannot be sent, by an earlier result": (
        "import math\nr = f(5)\nassert r == 3\nassert r == 2 or f(math.sqrt) == 2", "def f(x): return 3"),
    "a context variable": ("import contextvars\nv = contextvars.ContextVar('v')\nv.set(g(5))\nassert f(5) == v.get()", FIVE),
    # to be left out, not 0
    "an unhashable result": ("assert {f(5)} == {3}", "def f(x): return [3]"),
    "an object for a key": ("d = {3: 1}\nassert d[f(5)] == 1", EQUAL),
    "an object given back": ("r = f(5)\nassert f(r) == 1", EQUAL),
    "and an argument that cannot be sent": (
        "import math\nassert f(5) == 3 and f(math.sqrt) == 2", "def f(x): return 3"),
    "an argument that cannot be sent": (
        "import math\nassert f(5) == 2 or f(math.sqrt) == 2", "def f(x): return 3"),
    "a missing module": ("assert f(5) == 2", raising("ModuleNotFoundError('x')")),
}  # fmt: skip

INCREMENT = "def f(x): return x + 1\n"
POINT = (
    "class Point:\n    ORIGIN = 0\n    def __init__(self, x, y=0): self.x = x; self.y = y\n"
    "    def __eq__(self, o): return (self.x, self.y) == (o.x, o.y)\n    __hash__ = lambda s: 1\n"
    "    def __add__(self, o): return Point(self.x + o.x, self.y + o.y)\n"
    "    def __iadd__(self, o): self.x += o.x; return self\n"
    "    def __mul__(self, k): return Point(self.x * k, self.y * k)\n    def __bool__(self): return bool(self.x)\n"
    "    def __neg__(self): return Point(-self.x, -self.y)\n    def __abs__(self): return abs(self.x)\n"
    "    def __float__(self): return float(self.x)\n    def __repr__(self): return f'Point({self.x}, {self.y})'\n"
    "    def __format__(self, spec): return format(self.x, spec)\n"
    "    def __enter__(self): return self\n    def __exit__(self, *a): return False\n"
    "    @staticmethod\n    def zero(): return Point(0)\n    @classmethod\n    def of(cls, x): return cls(x)\n"
    "    @property\n    def size(self): return self.x\n    def moved(self, d): return Point(self.x + d, self.y)\n"
    "    def dot(self, o): return self.x * o.x\n"
)
BAG = (
    "class Bag:\n    def __init__(self, items): self.data = list(items)\n    def __contains__(self, x): return x in self.data\n"
    "    def __len__(self): return len(self.data)\n    def __getitem__(self, k): return self.data[k]\n"
    "    def __setitem__(self, k, v): self.data[k] = v\n    def __delitem__(self, k): del self.data[k]\n"
    "    def __iter__(self): return iter(self.data)\n    def __reversed__(self): return iter(self.data[::-1])\n"
    "    def add(self, x): self.data.append(x)\n    def count(self, x): return self.data.count(x)\n"
)
TRIE = (
    "class Trie:\n    def __init__(self): self.words = []\n    def insert(self, w): self.words.append(w)\n"
    "    def startswith(self, p): return any(w.startswith(p) for w in self.words)\n"
)
NODE = (
    "class Node:\n    def __init__(self, v, next=None): self.v = v; self.next = next\n"
    "def build(vs): return Node(vs[0], build(vs[1:])) if vs else None\n"
    "class Nodes:\n    def __init__(self, vs): self.vs = vs\n    def __iter__(self): return (Node(v) for v in self.vs)\n"
)
STACK = "class Stack:\n    def __init__(self): self.d=[]\n    def push(self,x): self.d.append(x)\n    def pop(self):\n        if not self.d: raise IndexError('empty')\n        return self.d.pop()\n    def is_empty(self): return not self.d\n    def __len__(self): return len(self.d)\n    def size(self): return len(self.d)\n    def peek(self): return self.d[-1]\n"
DEDUP = "def dedup(nums):\n    nums[:] = sorted(set(nums))\n    return len(nums)\n"
LIST = "class ListNode:\n    def __init__(self, val=0, next=None): self.val=val; self.next=next\ndef reverse_list(head):\n    prev=None\n    while head:\n        head.next, prev, head = prev, head, head.next\n    return prev\nclass Solution:\n    def reverseList(self, head): return reverse_list(head)\n"
RIGHT = {
    "a result by name": ("r = f(1)\nassert r == 2", INCREMENT),
    "an expected value by name": ("e = 2\nassert f(1) == e", INCREMENT),
    "a name again": ("r = f(1)\nassert r == 2\nr = 3\nassert f(2) == r", INCREMENT),
    "a table": ("for x, e in [(1, 2), (3, 4)]:\n    r = f(x)\n    assert r == e, f'{r} is not {e}'", INCREMENT),
    "results collected": (
        "rs = []\nfor x in range(3):\n    rs.append(f(x))\nassert rs == [1, 2, 3]", INCREMENT),
    "results and expectations": (
        "rs = [f(x) for x in range(3)]\nfor r, e in zip(rs, [1, 2, 3]):\n    assert r == e", INCREMENT),
    "a map": (ZIP, "def f(x): return 2 * x"),
    "a reference": ("def ref(x):\n    return x + 1\nfor x in range(4):\n    e = ref(x)\n    assert f(x) == e", INCREMENT),
    "a helper for both": ("def norm(x):\n    return sorted(x)\nassert norm(f([2, 1])) == norm([1, 2])", "def f(x): return x"),
    "a lambda for both": ("norm = lambda x: sorted(x)\nassert norm(f([2, 1])) == norm([1, 2])", "def f(x): return x"),
    "a helper that asserts": ("def same(a, b, tol=0):\n    assert abs(a - b) <= tol\nsame(f(1), 2)", INCREMENT),
    "random": ("import random\nfor _ in range(3):\n    x = random.randint(0, 9)\n    assert f(x) == x + 1", INCREMENT),
    "a type": ("r = f(1)\nassert isinstance(r, int) and type(r) == int and r == 2", INCREMENT),
    "None": ("assert f(1) is None", "def f(x): pass"),
    "a predicate": ("assert f(4)\nassert not f(3)", "def f(x): return x % 2 == 0"),
    "a sum of results": ("assert f(1) + f(2) == 5", INCREMENT),
    "a chain": ("assert 1 < f(1) <= 2", INCREMENT),
    "a set of a result": ("assert set(f(1)) == {1, 2}", "def f(x): return (1, 2)"),
    "an index from itself": ("r = f(1)\nassert r[len(r) - 1] == 2", "def f(x): return [1, 2]"),
    "a capital function": ("assert F(1) == [1]\nr = F(2)\nassert r == [2]", "def F(x): return [x]"),
    "nan": ("import math\nassert math.isnan(f(1))", "def f(x): return float('nan')"),
    "a message of an error": ("try:\n    f(1)\n    assert False\nexcept ValueError as e:\n    assert str(e) == 'x'",
                              "def f(x): raise ValueError('x')"),
    "raises": ("import pytest\nwith pytest.raises(ZeroDivisionError):\n    f(0)\nassert f(1) == 1", "def f(x): return 1 // x"),
    "assertRaises": (CASE.format("self.assertRaises(ValueError, int, 'x'); self.assertRaises(TypeError, f, 'x')"), INCREMENT),
    "a message": (CASE.format("r = f(1); self.assertEqual(r, 2, f'{r}'); self.assertTrue(r, f'{r}')"), INCREMENT),
    "subTest": (CASE.format("\n        for x in (1, 2):\n            with self.subTest(x=x):\n"
                            "                self.assertEqual(f(x), x + 1)"), INCREMENT),
    "if wrong, raise": ("r = f(1)\nif r != 2:\n    raise AssertionError(r)", INCREMENT),
    "in place, again": ("x = [2, 1]\nf(x)\nassert x == [1, 2]\nx = [4, 3]\nf(x)\nassert x == [3, 4]", "def f(x): x.sort()"),
    "a slice for an argument": ("b = Bag([1, 2, 3])\nassert b[1:] == [2, 3] and b.data == [1, 2, 3]", BAG),
    "format": ("assert '{:.2f}'.format(f(1)) == '2.00' and '%d' % f(1) == '2'", INCREMENT),
    "literal_eval": ("import ast\nassert ast.literal_eval(f(1)) == [1]", "def f(x): return '[1]'"),
    "JSON": ("import json\nassert json.loads(f(1)) == [1]", "def f(x): return '[1]'"),
    "decorated": ("def twice(t):\n    return t\n@twice\ndef test_f():\n    assert f(1) == 2", INCREMENT),
    "a closure": ("add = adder(2)\nassert add(3) == 5 and adder(1)(1) == 2", "def adder(n): return lambda x: x + n"),
    "a date": ("import datetime\nassert f(datetime.date(2020, 1, 2)) == 2", "def f(d): return d.day"),
    "a function": ("assert f(lambda x: x + 1) == 2", "def f(g): return g(1)"),
    "a dataclass for a case": (
        "import collections\nCase = collections.namedtuple('Case', 'x e')\nfor c in [Case(1, 2)]:\n    assert f(c.x) == c.e",
        INCREMENT),
    "a case with an input": (
        "import collections\nCase = collections.namedtuple('Case', 'input e')\nfor c in [Case(1, 2)]:\n"
        "    assert f(c.input) == c.e", INCREMENT),
    "allclose to an array": (
        "import numpy as np\nassert np.allclose(f(1), np.array([0.3]))", "def f(x): return [0.1 + 0.2]"),
    "a set of results": ("assert {f(x) for x in (1, 2)} == {2, 3}", INCREMENT),
    # classes and objects
    "objects that are equal": ("assert Point(1, 2) == Point(1, 2)", POINT),
    "objects that differ": ("a, b = Point(1), Point(2)\nassert a != b and a.x == 1", POINT),
    "equal to its text": ("p = Point(1)\nassert p.x == 1 and p == 'Point(1, 0)'", POINT),
    "x in bag": ("bag = Bag([1, 2])\nassert 1 in bag and 3 not in bag and bag.data == [1, 2]", BAG),
    "startswith": ("trie = Trie()\ntrie.insert('apple')\nassert trie.startswith('app') and not trie.startswith('b')", TRIE),
    "iteration": ("b = Bag([1, 2])\nassert list(b) == [1, 2] and [x for x in b] == [1, 2] and sorted(b) == [1, 2]", BAG),
    "iteration over objects": ("assert [n.v for n in Nodes([1, 2])] == [1, 2]", NODE),
    "a loop over objects": ("ns = Nodes([1, 2])\nvs = []\nfor n in ns:\n    vs.append(n.v)\nassert vs == [1, 2]", NODE),
    "reversed": ("b = Bag([1, 2])\nassert list(reversed(b)) == [2, 1] and b.count(1) == 1", BAG),
    "len": ("b = Bag([1, 2])\nb.add(3)\nassert len(b) == 3", BAG),
    "items": ("b = Bag([1, 2])\nb[0] = 5\ndel b[1]\nassert b[0] == 5 and len(b) == 1", BAG),
    "bool": ("assert Point(1)\nassert not Point(0)\np = Point(2)\nassert bool(p) and p.x == 2", POINT),
    "arithmetic": ("p = Point(1, 2) + Point(3, 4)\nassert p.x == 4 and p.y == 6", POINT),
    "arithmetic by name": ("a = Point(1, 2)\nb = Point(3, 4)\nc = a + b\nassert (c.x, c.y) == (4, 6) and str(c) == 'Point(4, 6)'", POINT),
    "arithmetic in place": ("a = Point(1)\na += Point(3)\nassert a.x == 4", POINT),
    "arithmetic with a number": ("p = Point(1, 2) * 3\nassert p.x == 3", POINT),
    "negative": ("p = -Point(1)\nassert p.x == -1 and abs(Point(3)) == 3 and float(Point(2)) == 2.0", POINT),
    "text": ("p = Point(1)\nassert str(p) == 'Point(1, 0)' and repr(p) == 'Point(1, 0)' and f'{p}' == '1'", POINT),
    "bytes of an object": ("p = Packed(1)\nassert bytes(p) == b'v' and p.x == 1",
        "class Packed:\n    def __init__(self, x): self.x = x\n    def __index__(self): return self.x\n"
        "    def __bytes__(self): return b'v'\n"),
    "a format of an object": ("p = Point(1.5)\nassert f'{p:.2f}' == '1.50' and p.x == 1.5", POINT),
    "hash": ("assert hash(Point(1)) == hash(Point(1))", POINT),
    "objects in a set": ("assert len({Point(1), Point(1)}) == 1", POINT),
    "a key": ("p = Point(1)\nd = {p: 2}\nassert d[p] == 2 and p.x == 1", POINT),
    "a context": ("with Point(1) as p:\n    assert p.x == 1", POINT),
    "an attribute that is set": ("p = Point(1)\np.x = 5\nassert p.x == 5\np.name = 'a'\nassert p.name == 'a'", POINT),
    "an attribute that is deleted": ("p = Point(1)\ndel p.x\nassert not hasattr(p, 'x')", POINT),
    "of a class": ("assert Point.ORIGIN == 0 and Point.zero().x == 0 and Point.of(3).size == 3", POINT),
    "a method that returns an object": ("p = Point(1).moved(2)\nassert p.x == 3 and Point(1).moved(1).moved(1).x == 3", POINT),
    "an object for an argument": ("a = Point(2)\nb = Point(3)\nassert a.dot(b) == 6", POINT),
    "an object from a function": ("head = build([1, 2])\nassert head.v == 1 and head.next.v == 2 and head.next.next is None", NODE),
    "not None": ("head = build([1, 2])\nassert head != None and head.next is not None and head.v == 1", NODE),
    "nested objects": ("n = Node(1, Node(2))\nassert n.next.v == 2 and n.next.next is None", NODE),
    "isinstance": ("assert isinstance(Point(1), Point)", POINT),
    "an instance": ("p = Point(1)\nassert type(p).__name__ == 'Point' and p.x == 1", POINT),
    "a copy": ("import copy\np = Point(1)\nq = copy.deepcopy(p)\nq.x = 2\nassert p.x == 1", POINT),
    "a sum of objects": ("p = sum([Point(1), Point(2)], Point(0))\nassert p.x == 3", POINT),
    "the least": ("p = min([Point(3), Point(1)], key=lambda p: p.x)\nassert p.x == 1", POINT),
    "sorted": ("ps = sorted([Point(3), Point(1)], key=lambda p: p.x)\nassert [p.x for p in ps] == [1, 3]", POINT),
    "a named tuple": ("p = f(1)\nassert p.x == 1", "from collections import namedtuple\ndef f(x): return namedtuple('P', 'x')(x)"),
    "a dataclass": ("p = make(1)\nassert p.x == 1",
                    "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\ndef make(x): return P(x)"),
    "an iterator": ("it = Count(2)\nassert next(it) == 2 and next(it) == 1",
                    "class Count:\n    def __init__(self, n): self.n = n + 1\n    def __iter__(self): return self\n"
                    "    def __next__(self):\n        self.n -= 1\n        if not self.n: raise StopIteration\n        return self.n"),
    "an iterator to its end": ("assert list(Count(2)) == [2, 1]",
                    "class Count:\n    def __init__(self, n): self.n = n + 1\n    def __iter__(self): return self\n"
                    "    def __next__(self):\n        self.n -= 1\n        if not self.n: raise StopIteration\n        return self.n"),
    "a lower-case class": ("s = stack()\ns.push(1)\nassert s.top() == 1",
                           "class stack:\n    def __init__(self): self.d = []\n    def push(self, x): self.d.append(x)\n"
                           "    def top(self): return self.d[-1]"),
    "asynchronous": ("import asyncio\nassert asyncio.run(f(1)) == 2", "async def f(x): return x + 1"),
    "asynchronous tests": ("async def test_f():\n    assert await f(1) == 2\nassert True", "async def f(x): return x + 1"),
    "expects an exit": ("import pytest\nwith pytest.raises(SystemExit):\n    f(1)", "def f(x): raise SystemExit"),
    "expects an end": ("import pytest\nwith pytest.raises(StopIteration):\n    f(1)", "def f(x): raise StopIteration"),
    "an error's text": ("try:\n    f(1)\n    assert False\nexcept KeyError as e:\n    assert str(e) == \"'k'\"",
                        "def f(x): return {}['k']"),
    "an error's attribute": ("try:\n    f(1)\n    assert False\nexcept Odd as e:\n    assert e.code == 5",
                             "class Odd(Exception): code = 5\ndef f(x): raise Odd"),
    # as people write them
    "unittest setUp": ("import unittest\nclass T(unittest.TestCase):\n    def setUp(self):\n        self.stack = Stack()\n    def test_push(self):\n        self.stack.push(1)\n        self.stack.push(2)\n        self.assertEqual(self.stack.pop(), 2)\n        self.assertEqual(len(self.stack), 1)\n        self.assertFalse(self.stack.is_empty())\n    def test_err(self):\n        with self.assertRaises(IndexError):\n            self.stack.pop()\n        self.assertTrue(self.stack.is_empty())", STACK),
    "pytest functions": ("import pytest\ndef test_push():\n    stack = Stack()\n    stack.push(1)\n    assert stack.pop() == 1\ndef test_err():\n    stack = Stack()\n    with pytest.raises(IndexError, match='empty'):\n        stack.pop()\ndef test_many():\n    s = Stack()\n    for i in range(5):\n        s.push(i)\n    assert s.size() == 5\n    for i in reversed(range(5)):\n        assert s.pop() == i", STACK),
    "pytest class": ("class TestStack:\n    def test_push(self):\n        stack = Stack()\n        stack.push(1)\n        assert stack.pop() == 1", STACK),
    "pytest class + other": ("class TestStack:\n    def test_push(self):\n        stack = Stack()\n        stack.push(1)\n        assert stack.pop() == 1\ndef test_b():\n    assert Stack().is_empty()", STACK),
    "fixture": ("import pytest\n@pytest.fixture\ndef stack():\n    return Stack()\ndef test_a(stack):\n    stack.push(1)\n    assert stack.pop() == 1", STACK),
    "to_list": ("def to_list(node):\n    out = []\n    while node:\n        out.append(node.val)\n        node = node.next\n    return out\nassert to_list(reverse_list(ListNode(1, ListNode(2)))) == [2, 1]\nassert to_list(Solution().reverseList(ListNode(1, ListNode(2)))) == [2, 1]", LIST),
    "build": ("def build(vals):\n    head = ListNode(vals[0])\n    cur = head\n    for v in vals[1:]:\n        cur.next = ListNode(v)\n        cur = cur.next\n    return head\nhead = build([1, 2, 3])\nr = reverse_list(head)\nassert r.val == 3 and r.next.val == 2", LIST),
    "lru": ("cache = LRU(2)\ncache.put(1, 1)\ncache.put(2, 2)\nassert cache.get(1) == 1\ncache.put(3, 3)\nassert cache.get(2) == -1", "from collections import OrderedDict\nclass LRU:\n    def __init__(s,n): s.n=n; s.d=OrderedDict()\n    def get(s,k):\n        if k not in s.d: return -1\n        s.d.move_to_end(k); return s.d[k]\n    def put(s,k,v):\n        s.d[k]=v; s.d.move_to_end(k)\n        if len(s.d)>s.n: s.d.popitem(last=False)\n"),
    "cases dicts": ("cases = [{'in': [1, 2], 'out': 3}, {'in': [3, 4], 'out': 7}]\nfor c in cases:\n    got = add(*c['in'])\n    assert got == c['out'], f\"{c['in']}: {got} != {c['out']}\"", "def add(a,b): return a+b"),
    "parametrize": ("import pytest\n@pytest.mark.parametrize('a,b,e', [(1, 2, 3), (3, 4, 7)])\ndef test_add(a, b, e):\n    assert add(a, b) == e", "def add(a,b): return a+b"),
    "sorted results": ("r = add(1, 2)\nassert isinstance(r, int)\nassert r > 0\nassert r == 3", "def add(a,b): return a+b"),
    "property": ("r = add([3, 1], [2])\nassert len(r) == 3\nassert sorted(r) == [1, 2, 3]\nassert r[0] == 3 and r[-1] == 2", "def add(a,b): return a+b"),
    "len and all": ("r = add([3, 1], [2])\nassert len(r) == 3 and all(isinstance(x, int) for x in r)", "def add(a,b): return a+b"),
    "close list": ("r = add([3.0], [2.0])\nfor a, b in zip(r, [3.0, 2.0]):\n    assert abs(a - b) < 1e-9", "def add(a,b): return a+b"),
    "main": ("import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n        self.assertListEqual(add([1], [2]), [1, 2])\n        self.assertDictEqual({1: 2}, {1: 2})\n        self.assertIsInstance(add(1, 2), int)\n        self.assertAlmostEqual(add(0.1, 0.2), 0.3, places=5)\n        self.assertCountEqual(add([2], [1]), [1, 2])\n        self.assertIsNotNone(add(1, 2))\n        self.assertGreater(add(1, 2), 2)\n        self.assertRaises(TypeError, add, 1, 'a')\n        self.assertIn(1, add([1], [2]))\nif __name__ == '__main__':\n    unittest.main()", "def add(a,b): return a+b"),
    "bank": ("acc = Account('Bob', 100)\nacc.deposit(50)\nassert acc.balance == 150\nassert acc.owner == 'Bob'\ntry:\n    acc.withdraw(500)\n    assert False, 'no error'\nexcept ValueError as e:\n    assert 'funds' in str(e)\nother = Account('Al', 0)\nacc.transfer(other, 50)\nassert acc.balance == 100 and other.balance == 50", "class Account:\n    def __init__(s,o,b): s.owner=o; s.balance=b\n    def deposit(s,a): s.balance+=a\n    def withdraw(s,a):\n        if a>s.balance: raise ValueError('no funds')\n        s.balance-=a\n    def transfer(s,o,a): s.withdraw(a); o.deposit(a)\n"),
    "graph": ("g = Graph()\ng.add_edge('a', 'b')\ng.add_edge('b', 'c')\nassert g.neighbors('a') == ['b']\nassert g.bfs('a') == ['a', 'b', 'c']\nassert 'c' in g.nodes", "class Graph:\n    def __init__(s): s.e={}\n    def add_edge(s,a,b): s.e.setdefault(a,[]).append(b); s.e.setdefault(b,[])\n    def neighbors(s,a): return s.e[a]\n    @property\n    def nodes(s): return set(s.e)\n    def bfs(s,a):\n        out=[a]\n        for x in out: out+= [y for y in s.e[x] if y not in out]\n        return out\n"),
    "matrix obj": ("m = Matrix([[1, 2], [3, 4]])\nn = Matrix([[1, 0], [0, 1]])\np = m * n\nassert p.rows == [[1, 2], [3, 4]]\nassert m[0] == [1, 2]\nassert m[0][1] == 2", "class Matrix:\n    def __init__(s,r): s.rows=r\n    def __getitem__(s,i): return s.rows[i]\n    def __mul__(s,o): return Matrix([[sum(a*b for a,b in zip(r,c)) for c in zip(*o.rows)] for r in s.rows])\n"),
    "enum": ("assert Color.RED.value == 1\nassert Color.RED.name == 'RED'", "import enum\nclass Color(enum.Enum):\n    RED = 1\n"),
    "inherit": ("d = Dog('Rex')\nassert d.speak() == 'Rex says woof'\nassert isinstance(d, Animal)", "class Animal:\n    def __init__(s,n): s.n=n\nclass Dog(Animal):\n    def speak(s): return s.n+' says woof'\n"),
    "stdout": ("import io, contextlib\nbuf = io.StringIO()\nwith contextlib.redirect_stdout(buf):\n    hello()\nassert buf.getvalue() == 'hi\\n'", "def hello(): print('hi')"),
    "MBPP set": ("assert set(similar((3, 4, 5, 6),(5, 7, 4, 10))) == set((4, 5))", "def similar(a,b): return tuple(set(a)&set(b))"),
    "in place + return": ("nums = [1, 1, 2]\nk = dedup(nums)\nassert k == 2\nassert nums[:k] == [1, 2]", "def dedup(n):\n    n[:] = sorted(set(n)); return len(n)"),
    "in place + return, literal": ("nums = [1, 1, 2]\nassert dedup(nums) == 2\nassert nums[:2] == [1, 2]", "def dedup(n):\n    n[:] = sorted(set(n)); return len(n)"),
    "in place, sorted copy": ("nums = [3, 1, 2]\nexpected = sorted(nums)\nsort(nums)\nassert nums == expected", "def sort(n): n.sort()"),
    "in place through loop": ("for case in ([3, 1], [2, 1]):\n    nums = case[:]\n    sort(nums)\n    assert nums == sorted(case)", "def sort(n): n.sort()"),
    "a reference encoder": (
        "def encode(s):\n    return s[::-1]\nfor s in ('abc', 'de'):\n    assert decode(encode(s)) == s",
        "def decode(s): return s[::-1]"),
    # classes that become others, exceptions, generators, what pytest would do
    'cm.exception.code (unittest)': ('import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n        with self.assertRaises(MyErr) as cm:\n            f(1)\n        self.assertEqual(cm.exception.code, 3)', "class MyErr(Exception):\n    def __init__(self, c): super().__init__('x'); self.code=c\ndef f(x): raise MyErr(3)"),
    'pytest.raises as info; info.value.code': ('import pytest\nwith pytest.raises(MyErr) as info:\n    f(1)\nassert info.value.code == 3', "class MyErr(Exception):\n    def __init__(self, c): super().__init__('x'); self.code=c\ndef f(x): raise MyErr(3)"),
    'assertEqual(nums, ..) after a used result': ('import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n        nums=[3,2,2,3]\n        k=f(nums, 3)\n        self.assertEqual(k, 2)\n        self.assertEqual(nums[:k], [2,2])', 'def f(n, v):\n    n[:] = [x for x in n if x != v]\n    return len(n)'),
    'in place by a method of an instance, assertEqual': ('import unittest\nclass T(unittest.TestCase):\n    def setUp(self): self.s=Solution()\n    def test_a(self):\n        nums=[1,2,3]\n        self.s.rotate(nums, 1)\n        self.assertEqual(nums, [3,1,2])', 'class Solution:\n    def rotate(self, n, k): n[:] = n[-k:]+n[:-k]'),
    'r = f(x); assert not x': ('x=[1,2]\nr=f(x)\nassert not x', 'def f(x):\n    r=list(x); x.clear(); return r'),
    'r = f(x); assert len(x) == 0': ('x=[1,2]\nr=f(x)\nassert len(x) == 0', 'def f(x):\n    r=list(x); x.clear(); return r'),
    'deque argument': ('from collections import deque\nassert f(deque([1,2])) == 1', 'def f(d): return d.popleft()'),
    'Counter argument': ("from collections import Counter\nassert f(Counter('aab')) == [('a',2)]", 'def f(c): return c.most_common(1)'),
    'OrderedDict argument': ("from collections import OrderedDict\nassert f(OrderedDict([('a',1),('b',2)])) == ['b','a']", "def f(d):\n    d.move_to_end('a')\n    return list(d)"),
    'defaultdict argument': ('from collections import defaultdict\nassert f(defaultdict(int)) == 0', "def f(d): return d['x']"),
    'array argument, x + 1': ('import numpy as np\nassert (f(np.array([1,2])) == np.array([2,3])).all()', 'def f(x): return x + 1'),
    'array result .shape': ('import numpy as np\nassert f(3).shape == (3,)', 'import numpy as np\ndef f(n): return np.zeros(n)'),
    'array result .tolist()': ('assert f(3).tolist() == [0,0,0]', 'import numpy as np\ndef f(n): return np.zeros(n)'),
    'array result .sum()': ('assert f(3).sum() == 3', 'import numpy as np\ndef f(n): return np.ones(n)'),
    'isinstance np.ndarray': ('import numpy as np\nassert isinstance(f(3), np.ndarray)', 'import numpy as np\ndef f(n): return np.ones(n)'),
    'Counter result most_common': ("assert f('aab').most_common(1) == [('a',2)]", 'from collections import Counter\ndef f(s): return Counter(s)'),
    'deque result == deque': ('from collections import deque\nassert f(1) == deque([1])', 'from collections import deque\ndef f(x): return deque([x])'),
    'deque result popleft': ('assert f(1).popleft() == 1', 'from collections import deque\ndef f(x): return deque([x])'),
    'isinstance Counter': ("from collections import Counter\nassert isinstance(f('a'), Counter)", 'from collections import Counter\ndef f(s): return Counter(s)'),
    'namedtuple _asdict': ("assert f()._asdict() == {'x': 1}", "from collections import namedtuple\ndef f(): return namedtuple('P','x')(1)"),
    'date result == date': ('from datetime import date\nassert f(2020) == date(2020,1,1)', 'from datetime import date\ndef f(y): return date(y,1,1)'),
    'timedelta result == timedelta': ('import datetime\nassert f(2) == datetime.timedelta(days=2)', 'import datetime\ndef f(y): return datetime.timedelta(days=y)'),
    'Path result == Path': ("from pathlib import Path\nassert f('a') == Path('a')", 'from pathlib import Path\ndef f(y): return Path(y)'),
    'date argument': ('from datetime import date\nassert f(date(2020,1,2)) == 2', 'def f(d): return d.day'),
    're.Match result': ("assert f('ab1').group(0) == '1'", "import re\ndef f(s): return re.search('[0-9]', s)"),
    'closure result': ('add5=f(5)\nassert add5(3) == 8', 'def f(x): return lambda y: x+y'),
    'builtin function as argument': ("assert apply(len, 'abc') == 3", 'def apply(fn, x): return fn(x)'),
    'builtin function after another call, unittest': ("import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n        self.assertEqual(my_map(str, []), [])\n    def test_b(self):\n        self.assertEqual(twice(1), 2)\n        self.assertEqual(my_map(str, [1]), ['1'])", 'def my_map(fn, x): return [fn(i) for i in x]\ndef twice(x): return 2*x'),
    'call with a builtin after a reply, one assert': ("assert twice(1) == 2 and my_map(str, [1]) == ['1']", 'def my_map(fn, x): return [fn(i) for i in x]\ndef twice(x): return 2*x'),
    'decorator of the solution on a test function': ('@memo\ndef fib(n): return n if n < 2 else fib(n-1)+fib(n-2)\nassert fib(10) == 55', 'def memo(fn):\n    c={}\n    def w(n):\n        if n not in c: c[n]=fn(n)\n        return c[n]\n    return w'),
    'Mock argument': ('from unittest.mock import Mock\nm=Mock()\nf(m)\nm.assert_called_once()', 'def f(m): m()'),
    'endless fibonacci generator': ('g=fib()\nassert [next(g) for _ in range(5)] == [0,1,1,2,3]', 'def fib():\n    a,b=0,1\n    while True:\n        yield a\n        a,b=b,a+b'),
    'endless primes generator': ('g=primes()\nassert [next(g) for _ in range(4)] == [2,3,5,7]', 'def primes():\n    n=2\n    while True:\n        if all(n % d for d in range(2,n)): yield n\n        n+=1'),
    'generator of 20000': ('assert sum(f(20000)) == 199990000', 'def f(n):\n    yield from range(n)'),
    'map object of 20000': ('assert len(list(f(range(20000)))) == 20000', 'def f(x): return map(str, x)'),
    'generator that raises later': ('import pytest\ng=f()\nassert next(g) == 1\nwith pytest.raises(ValueError):\n    next(g)', "def f():\n    yield 1\n    raise ValueError('x')"),
    'generator.send': ('g=f()\nnext(g)\nassert g.send(3) == 6', 'def f():\n    x = yield\n    while True:\n        x = yield 2*x'),
    'pytest.param': ("import pytest\n@pytest.mark.parametrize('x, y', [pytest.param(1, 2, id='a')])\ndef test_f(x, y):\n    assert f(x) == y", 'def f(x): return x+1'),
    'autouse fixture in a class': ('import pytest\nclass TestF:\n    @pytest.fixture(autouse=True)\n    def prepare(self):\n        self.k=2\n    def test_a(self):\n        assert f(1) == self.k', 'def f(x): return x+1'),
    'setup_class': ('class TestF:\n    @classmethod\n    def setup_class(cls):\n        cls.k=2\n    def test_a(self):\n        assert f(1) == self.k', 'def f(x): return x+1'),
    'TestCase through a base class with setUp': ('import unittest\nclass Base(unittest.TestCase):\n    def setUp(self): self.k=2\nclass TestF(Base):\n    def test_a(self): self.assertEqual(f(1), self.k)', 'def f(x): return x+1'),
    'unittest.expectedFailure': ('import unittest\nclass T(unittest.TestCase):\n    @unittest.expectedFailure\n    def test_a(self): self.assertEqual(f(1), 3)\n    def test_b(self): self.assertEqual(f(1), 2)', 'def f(x): return x+1'),
    'xfail': ('import pytest\n@pytest.mark.xfail\ndef test_a():\n    assert f(1) == 3\ndef test_b():\n    assert f(1) == 2', 'def f(x): return x+1'),
    'pytest.mark.skip': ('import pytest\n@pytest.mark.skip\ndef test_a():\n    assert f(1) == 3\ndef test_b():\n    assert f(1) == 2', 'def f(x): return x+1'),
    'pytest.warns': ('import pytest\nwith pytest.warns(UserWarning):\n    f(1)', "import warnings\ndef f(x): warnings.warn('x')"),
    'file written by the tests': ("with open('t.txt','w') as h:\n    h.write('abc')\nassert f('t.txt') == 3", 'def f(p): return len(open(p).read())'),
    'os.environ set by the tests': ("import os\nos.environ['X']='1'\nassert f() == '1'", "import os\ndef f(): return os.environ['X']"),
    'UnicodeDecodeError expected': ("import pytest\nwith pytest.raises(UnicodeDecodeError):\n    f(b'\\xff')", "def f(b): return b.decode('utf-8')"),
    'ValueError, raised as UnicodeDecodeError': ("import pytest\nwith pytest.raises(ValueError):\n    f(b'\\xff')", "def f(b): return b.decode('utf-8')"),
    'json.JSONDecodeError expected': ("import json, pytest\nwith pytest.raises(json.JSONDecodeError):\n    f('{')", 'import json\ndef f(s): return json.loads(s)'),
    'decimal.InvalidOperation expected': ("import decimal, pytest\nwith pytest.raises(decimal.InvalidOperation):\n    f('x')", 'import decimal\ndef f(s): return decimal.Decimal(s)'),
    'statistics.StatisticsError expected': ('import statistics, pytest\nwith pytest.raises(statistics.StatisticsError):\n    f([])', 'import statistics\ndef f(s): return statistics.mean(s)'),
    'error of the solution, and its base class named too': ('import pytest\nwith pytest.raises(NotFound):\n    f(1)\nwith pytest.raises(AppError):\n    f(1)', "class AppError(Exception): pass\nclass NotFound(AppError): pass\ndef f(x): raise NotFound('x')"),
    'error of the solution, and its builtin base': ('import pytest\nwith pytest.raises(NegErr):\n    f(1)\nwith pytest.raises(ValueError):\n    f(1)', "class NegErr(ValueError): pass\ndef f(x): raise NegErr('x')"),
    'issubclass(MyErr, ValueError)': ('import pytest\nassert issubclass(MyErr, ValueError)\nwith pytest.raises(MyErr):\n    f(1)', "class MyErr(ValueError): pass\ndef f(x): raise MyErr('x')"),
    'a variable of the solution': ('assert result == 5', 'result = 5'),
    'a constant beside a function': ('assert f(1) == 2\nassert LIMIT == 10', 'LIMIT = 10\ndef f(x): return x+1'),
    'sorted objects': ('assert sorted([P(2), P(1)])[0].x == 1', "class P:\n    def __init__(self, x): self.x = x\n    def __eq__(self, o): return self.x == getattr(o,'x',o)\n    def __lt__(self, o): return self.x < o.x\n    def __hash__(self): return hash(self.x)\n    def __add__(self, o): return P(self.x + (o.x if isinstance(o,P) else o))\n"),
    'max of objects': ('assert max([P(2), P(1)]).x == 2', "class P:\n    def __init__(self, x): self.x = x\n    def __eq__(self, o): return self.x == getattr(o,'x',o)\n    def __lt__(self, o): return self.x < o.x\n    def __hash__(self): return hash(self.x)\n    def __add__(self, o): return P(self.x + (o.x if isinstance(o,P) else o))\n"),
    'objects in a set by add': ('s=set()\ns.add(P(1))\ns.add(P(1))\nassert len(s) == 1 and P(1).x == 1', "class P:\n    def __init__(self, x): self.x = x\n    def __eq__(self, o): return self.x == getattr(o,'x',o)\n    def __lt__(self, o): return self.x < o.x\n    def __hash__(self): return hash(self.x)\n    def __add__(self, o): return P(self.x + (o.x if isinstance(o,P) else o))\n"),
    'object as a key set later': ("d={}\nd[P(1)]='a'\nassert d[P(1)] == 'a' and P(1).x == 1", "class P:\n    def __init__(self, x): self.x = x\n    def __eq__(self, o): return self.x == getattr(o,'x',o)\n    def __lt__(self, o): return self.x < o.x\n    def __hash__(self): return hash(self.x)\n    def __add__(self, o): return P(self.x + (o.x if isinstance(o,P) else o))\n"),
    'object + number == number': ('assert (P(5) + 1).x == 6', "class P:\n    def __init__(self, x): self.x = x\n    def __eq__(self, o): return self.x == getattr(o,'x',o)\n    def __lt__(self, o): return self.x < o.x\n    def __hash__(self): return hash(self.x)\n    def __add__(self, o): return P(self.x + (o.x if isinstance(o,P) else o))\n"),
    'object < object, no attribute': ('assert P(5) < P(6)', "class P:\n    def __init__(self, x): self.x = x\n    def __eq__(self, o): return self.x == getattr(o,'x',o)\n    def __lt__(self, o): return self.x < o.x\n    def __hash__(self): return hash(self.x)\n    def __add__(self, o): return P(self.x + (o.x if isinstance(o,P) else o))\n"),
    'LeetCode tree': ('root=TreeNode(1)\nroot.left=TreeNode(2)\nassert Solution().maxDepth(root) == 2', 'class TreeNode:\n    def __init__(self, v=0, l=None, r=None): self.val=v; self.left=l; self.right=r\nclass Solution:\n    def maxDepth(self, r): return 0 if r is None else 1+max(self.maxDepth(r.left), self.maxDepth(r.right))'),
    'LeetCode list': ('r=Solution().rev(ListNode(1, ListNode(2)))\nassert r.val == 2 and r.next.val == 1 and r.next.next is None', 'class ListNode:\n    def __init__(self, v=0, n=None): self.val=v; self.next=n\nclass Solution:\n    def rev(self, h):\n        p=None\n        while h: h.next, p, h = p, h, h.next\n        return p'),
    'assertRaises(ValueError, f, -1)': ('import unittest\nclass T(unittest.TestCase):\n    def test_a(self): self.assertRaises(ValueError, f, -1)', "def f(x): raise ValueError('x')"),
    'subTest, again': ('import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n        for i in range(3):\n            with self.subTest(i=i): self.assertEqual(f(i), i+1)', 'def f(x): return x+1'),
    'sorted(xs, key=f)': ('assert sorted([3,1,2], key=f) == [3,2,1]', 'def f(x): return -x'),
    'filter(f, xs)': ('assert list(filter(f, range(5))) == [0,2,4]', 'def f(x): return x % 2 == 0'),
    'json.loads of the result': ("import json\nassert json.loads(f({'a': 1})) == {'a': 1}", 'import json\ndef f(x): return json.dumps(x)'),
    'ast.literal_eval of the result': ('import ast\nassert ast.literal_eval(f([1])) == [1]', 'def f(x): return repr(x)'),
    'cache_info': ('f(1)\nf(1)\nassert f.cache_info().hits == 1', 'import functools\n@functools.lru_cache(None)\ndef f(x): return x'),
    'import solution': ('import solution\nassert solution.f(1) == 2', 'def f(x): return x+1'),
    'except ValueError with assert False': ('try:\n    f(-1)\n    assert False\nexcept ValueError:\n    pass', "def f(x): raise ValueError('x')"),
    'try/except/else raise': ("try:\n    f(-1)\nexcept ValueError:\n    pass\nelse:\n    raise AssertionError('no error')", "def f(x): raise ValueError('x')"),
    'if f(5) != 6: raise': ("if f(5) != 6:\n    raise AssertionError('x')", 'def f(x): return x+1'),
    'type(f(1)) is int': ('assert type(f(1)) is int and f(1) == 2', 'def f(x): return x+1'),
    'bytearray in place': ("x=bytearray(b'ab')\nf(x)\nassert x == bytearray(b'ba')", 'def f(x): x.reverse()'),
    'set in place': ('x={1,2}\nf(x)\nassert x == {2}', 'def f(x): x.discard(1)'),
    'str subclass Enum value': ("assert f() == 'red'", "from enum import Enum\nclass C(str, Enum):\n    RED='red'\ndef f(): return C.RED"),
    # what is compared, sent and run since
    "in place by keyword": ("nums = [3, 1]\nsort(nums=nums)\nassert nums == [1, 3]", "def sort(nums): nums.sort()"),
    "in place, used at once": ("nums = [2, 1, 1]\nassert dedup(nums) == 2 and nums == [1, 2]", DEDUP),
    "in place, a tuple": ("nums = [2, 1, 1]\nk = dedup(nums)\nassert (k, nums) == (2, [1, 2])", DEDUP),
    "in place, copied later": ("nums = [2, 1, 1]\nk = dedup(nums)\nc = nums[:]\nassert k == 2\nassert c == [1, 2]", DEDUP),
    "GeneratorType": ("import types\nassert isinstance(f(3), types.GeneratorType)", "def f(n):\n    yield from range(n)"),
    "assertIsInstance Counter": (
        "from collections import Counter\n" + CASE.format("self.assertIsInstance(f('a'), Counter)"),
        "from collections import Counter\ndef f(s): return Counter(s)"),
    "assertEqual date": (
        "from datetime import date\n" + CASE.format("self.assertEqual(f(2020), date(2020, 1, 1))"),
        "from datetime import date\ndef f(y): return date(y, 1, 1)"),
    "assertEqual Counter": (
        "from collections import Counter\n" + CASE.format("self.assertEqual(f('aab'), Counter('aab'))"),
        "from collections import Counter\ndef f(s): return Counter(s)"),
    "array .T": ("assert f(2).T[0][0] == 1", "import numpy as np\ndef f(n): return np.eye(n)"),
    "numpy.testing": (
        "import numpy as np\nnp.testing.assert_array_equal(f(2), np.array([[1, 0], [0, 1]]))\n"
        "np.testing.assert_allclose(f(1), [[1.0]])\nnp.testing.assert_allclose(f(1), 1)\nnp.testing.assert_equal(f(1), [[1.0]])",
        "import numpy as np\ndef f(n): return np.eye(n)"),
    "numpy.testing of a dict": ("import numpy as np\nnp.testing.assert_equal(f(), {'a': 1.0, 'b': [1, 2]})", "def f(): return {'a': 1.0, 'b': [1, 2]}"),
    "numpy.testing of nothing": ("import numpy as np\nnp.testing.assert_array_equal(f([]), [])", "def f(x): return x"),
    "np.isclose": ("import numpy as np\nassert np.isclose(f(1), 0.3) and np.isclose(f(1), 0.3).all()", "def f(x): return 0.1 + 0.2"),
    "the expected value first": (
        "import numpy as np\nfrom math import isclose\nassert np.allclose([0.3], f(1)) and isclose(0.3, f(1)[0])\n"
        "np.testing.assert_allclose([0.3], f(1))\nnp.testing.assert_array_equal(0.1 + 0.2, f(1))",
        "def f(x): return [0.1 + 0.2]"),
    "functions of the tests, named as NumPy's": (
        "def assert_attribute(o, x):\n    assert o.x == x\ndef assert_args(args, e):\n    assert f(*args).y == e\n"
        "assert_attribute(f(1), 1)\nassert_args((1,), [2, 3])",
        "class P:\n    x = 1\n    y = [2, 3]\ndef f(n): return P()"),
    "allclose to one": ("import numpy as np\nassert np.allclose(f(3), 0)", "def f(n): return [0.0] * n"),
    "pandas argument": ("import pandas as pd\nassert f(pd.Series([1, 2])) == 1.5", "def f(s): return s.mean()"),
    "keys": ("assert f({'a': 1}) == {'a'} and list(f({'b': 1})) == ['b']", "def f(d): return d.keys()"),
    "keys as arguments": ("assert f({'a': 1}.keys(), {'a': 2, 'b': 3}.keys()) == {'a'}", "def f(a, b): return a & b"),
    "60 dicts in each other": (
        "r = f(60)\nassert r['n']['n']['v'] == 2",
        "def f(n):\n    r = None\n    for i in range(n, -1, -1): r = {'v': i, 'n': r}\n    return r"),
    "types that a decorator checks": (
        "import pytest\nassert add(1, 2) == 3\nwith pytest.raises(TypeError):\n    add('a', 2)",
        "def checked(fn):\n    def inner(*a):\n        for v, t in zip(a, fn.__annotations__.values()):\n"
        "            if not isinstance(v, t): raise TypeError\n        return fn(*a)\n    return inner\n"
        "@checked\ndef add(a: int, b: int): return a + b"),
    "a class derived by the tests": (
        "class Mine(Shape):\n    def area(self):\n        return 7\nassert Mine().describe() == 'area 7'",
        "class Shape:\n    def describe(self): return f'area {self.area()}'"),
    "a named tuple of an object": (
        "assert f().p.x == 1 and f().title == 'a'",
        "from collections import namedtuple\nclass P: x = 1\ndef f(): return namedtuple('R', 'p title')(P(), 'a')"),
    "helpers with more arguments": (
        "class H:\n    @classmethod\n    def same(cls, a, b, *message):\n        assert a == b, message\nH.same(f(1), 2, 'a', 'b')", INCREMENT),
    "a guard": ("def main():\n    assert f(1) == 2\nif __name__ == '__main__':\n    main()\n    print('ok')", INCREMENT),
    "a guard that calls tests": ("def test_a():\n    assert f(1) == 2\ndef main():\n    test_a()\nif __name__ == '__main__':\n    main()", INCREMENT),
    "tests in a loop": ("def test_a():\n    assert f(1) == 2\nfor t in (test_a,):\n    t()", INCREMENT),
    "a guard with unittest": (CASE.format("self.assertEqual(f(1), 2)") + "if __name__ == '__main__':\n    unittest.main()", INCREMENT),
    "a difference, negated": ("if abs(f(1) - 2) > 1e-6:\n    raise AssertionError", INCREMENT),
    "an order, twice negated": ("if not 1 < f(1) < 3:\n    raise AssertionError", INCREMENT),
    "except AssertionError: raise": (
        "try:\n    f(-1)\n    assert False\nexcept AssertionError:\n    raise\nexcept Exception:\n    pass", "def f(x): raise ValueError"),
    "a reference that fails": (
        "def ref(x):\n    if x < 0:\n        raise ValueError\n    return x + 1\ntry:\n    e = ref(1)\nexcept Exception:\n    e = None\n"
        "assert f(1) == e", INCREMENT),
    "warnings that are recorded": (
        "import warnings\nwith warnings.catch_warnings(record=True) as w:\n    f(1)\nassert len(w) == 1", "import warnings\ndef f(x): warnings.warn('x')"),
    "input, patched": ("import builtins\nbuiltins.input = lambda: '5'\nassert f() == 5", "def f(): return int(input())"),
    "a file for the tests": ("import os\nsave('a.txt')\nassert os.path.isfile('a.txt')", "def save(p): open(p, 'w').write('x')"),
    "threads": (
        "import threading\nc = Tally()\ndef work():\n    for _ in range(20):\n        c.add()\n"
        "ts = [threading.Thread(target=work) for _ in range(4)]\nfor t in ts:\n    t.start()\nfor t in ts:\n    t.join()\nassert c.n == 80",
        "class Tally:\n    def __init__(s): s.n = 0\n    def add(s): s.n += 1"),
}  # fmt: skip


# of the right ones: the solution could decide the verdict, as far as names tell; or only it could compare, hash or
# copy its objects; or it would get what cannot be sent
REFUSED = set(
    """a date|a function|objects that are equal|objects that differ|equal to its text|arithmetic with a number|hash|
    objects in a set|a key|a context|an attribute that is deleted|isinstance|an instance|a copy|a sum of objects|
    the least|sorted|asynchronous|asynchronous tests|expects an exit|expects an end|an error's attribute|fixture|len and all|close list|
    inherit|stdout|in place + return|in place + return, literal|in place, sorted copy|in place through loop|
    a name again|results and expectations|a map|a lambda for both|arithmetic|arithmetic by name|
    arithmetic in place|matrix obj|a sum of results|to_list|parametrize|iteration|iteration over objects|
    a loop over objects|an iterator|
    cm.exception.code (unittest)|pytest.raises as info; info.value.code|
    assertEqual(nums, ..) after a used result|in place by a method of an instance, assertEqual|
    r = f(x); assert not x|r = f(x); assert len(x) == 0|deque argument|Counter argument|OrderedDict argument|
    defaultdict argument|array argument, x + 1|array result .shape|array result .tolist()|array result .sum()|
    isinstance np.ndarray|Counter result most_common|deque result == deque|deque result popleft|
    isinstance Counter|namedtuple _asdict|date result == date|timedelta result == timedelta|
    Path result == Path|date argument|builtin function as argument|
    builtin function after another call, unittest|call with a builtin after a reply, one assert|
    decorator of the solution on a test function|Mock argument|endless fibonacci generator|
    endless primes generator|generator that raises later|generator.send|pytest.param|
    autouse fixture in a class|setup_class|unittest.expectedFailure|xfail|pytest.mark.skip|pytest.warns|
    file written by the tests|os.environ set by the tests|json.JSONDecodeError expected|
    decimal.InvalidOperation expected|statistics.StatisticsError expected|issubclass(MyErr, ValueError)|
    a variable of the solution|a constant beside a function|sorted objects|max of objects|
    objects in a set by add|object as a key set later|object + number == number|object < object, no attribute|
    filter(f, xs)|import solution|bytearray in place|
    in place by keyword|in place, used at once|in place, a tuple|in place, copied later|GeneratorType|
    assertIsInstance Counter|assertEqual date|array .T|pandas argument|a class derived by the tests|
    a difference, negated|warnings that are recorded|input, patched|a file for the tests|threads""".replace(
        "\n    ", ""
    ).split("|")
)


def outcomes(cases: dict[str, tuple[str, str]]) -> dict[str, tuple[float | None, str]]:
    """The score and cause of each case; whatever is left out is refused before anything runs."""
    reward = make_code(Reward(name="code", options={"time_s": 20.0, "concurrency": 2}))
    requests = [
        ScoreRequest(name, "p", f"```python\n{code}\n```", extra={"tests": tests})
        for name, (tests, code) in cases.items()
    ]
    return {
        name: (score.value, score.detail)
        for name, score in zip(cases, reward(requests), strict=True)
    }


def refused(tests: str) -> bool:
    try:
        read_tests(tests)
    except ValueError:
        return True
    return False


def test_no_attack_decides_a_verdict() -> None:
    found = outcomes(ATTACKS)
    assert {name: score for name, score in found.items() if score[0] not in (0.0, None)} == {}
    left_out = {name for name, (value, _) in found.items() if value is None}
    assert left_out == {name for name, (tests, _) in ATTACKS.items() if refused(tests)}


def test_right_code_is_accepted_or_its_tests_refused_by_name() -> None:
    found = outcomes(RIGHT)
    unjudgeable = {name for name, (tests, _) in RIGHT.items() if refused(tests)}
    assert unjudgeable == REFUSED
    wrong = {name: score for name, score in found.items() if score[0] != 1.0}
    assert wrong.keys() == REFUSED, wrong
