"""Problems of HumanEval's shape, written for the benchmark: a right solution and five to ten assertions each."""

from __future__ import annotations

__all__ = ["PROBLEMS"]

# name: (solution, [(arguments, result)])
_SOLVED: dict[str, tuple[str, list[tuple[str, str]]]] = {
    "add_up": (
        "def add_up(xs):\n    return sum(xs)",
        [
            ("[1, 2, 3]", "6"), ("[]", "0"), ("[-1, 1]", "0"), ("[5]", "5"), ("[10, 20]", "30"),
        ],
    ),
    "longest": (
        "def longest(words):\n    return max(words, key=len, default=None)",
        [
            ("[]", "None"), ("['a', 'bb']", "'bb'"), ("['x']", "'x'"), ("['aa', 'bb']", "'aa'"),
            ("['', 'a', 'abc']", "'abc'"),
        ],
    ),
    "is_palindrome": (
        "def is_palindrome(text):\n    return text == text[::-1]",
        [
            ("''", "True"), ("'aba'", "True"), ("'ab'", "False"), ("'zbcd'", "False"), ("'xyx'", "True"),
            ("'aaaaa'", "True"),
        ],
    ),
    "gcd": (
        "def gcd(a, b):\n    while b:\n        a, b = b, a % b\n    return a",
        [
            ("3, 7", "1"), ("10, 15", "5"), ("49, 14", "7"), ("144, 60", "12"), ("0, 4", "4"),
        ],
    ),
    "primes": (
        "def primes(n):\n    return [p for p in range(2, n) if all(p % d for d in range(2, p))]",
        [
            ("2", "[]"), ("10", "[2, 3, 5, 7]"), ("3", "[2]"), ("20", "[2, 3, 5, 7, 11, 13, 17, 19]"), ("0", "[]"),
        ],
    ),
    "fib": (
        "def fib(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a",
        [
            ("10", "55"), ("1", "1"), ("8", "21"), ("11", "89"), ("12", "144"), ("100", "354224848179261915075"),
        ],
    ),
    "vowels": (
        "def vowels(text):\n    return sum(c in 'aeiouAEIOU' for c in text)",
        [
            ("''", "0"), ("'abcde'", "2"), ("'Alone'", "3"), ("'key'", "1"), ("'bye'", "1"), ("'rhythm'", "0"),
        ],
    ),
    "rotate": (
        "def rotate(xs, n):\n    n = n % len(xs) if xs else 0\n    return xs[n:] + xs[:n]",
        [
            ("[1, 2, 3], 1", "[2, 3, 1]"), ("[], 3", "[]"), ("[1], 9", "[1]"), ("[1, 2], 2", "[1, 2]"),
            ("[1, 2, 3], -1", "[3, 1, 2]"),
        ],
    ),
    "word_count": (
        "def word_count(text):\n    words = text.split()\n    return {w: words.count(w) for w in words}",
        [
            ("'a b a'", "{'a': 2, 'b': 1}"), ("''", "{}"), ("'x'", "{'x': 1}"), ("'b b b'", "{'b': 3}"),
            ("'a  c'", "{'a': 1, 'c': 1}"),
        ],
    ),
    "common": (
        "def common(a, b):\n    return sorted(set(a) & set(b))",
        [
            ("[1, 4, 3], [5, 3, 1]", "[1, 3]"), ("[], [1]", "[]"), ("[2], [2]", "[2]"),
            ("[4, 3, 2, 8], [3, 2, 4]", "[2, 3, 4]"), ("[1, 1], [1]", "[1]"),
        ],
    ),
    "mean": (
        "def mean(xs):\n    return sum(xs) / len(xs)",
        [
            ("[1.0, 2.0]", "1.5"), ("[4]", "4.0"), ("[0.5, 1.5, 2.5]", "1.5"), ("[1, 2, 3, 4]", "2.5"),
            ("[-1, 1]", "0.0"),
        ],
    ),
    "flip": (
        "def flip(text):\n    return text.swapcase()",
        [
            ("''", "''"), ("'Hello!'", "'hELLO!'"), ("'aB'", "'Ab'"), ("'123'", "'123'"), ("'These'", "'tHESE'"),
        ],
    ),
    "binary": (
        "def binary(n):\n    return bin(n)[2:]",
        [
            ("0", "'0'"), ("15", "'1111'"), ("32", "'100000'"), ("103", "'1100111'"), ("1", "'1'"),
        ],
    ),
    "triangle": (
        "def triangle(a, b, c):\n    a, b, c = sorted((a, b, c))\n    return a + b > c",
        [
            ("3, 4, 5", "True"), ("1, 2, 3", "False"), ("1, 1, 9", "False"), ("2, 2, 3", "True"),
            ("5, 12, 13", "True"),
        ],
    ),
    "pairs": (
        "def pairs(xs):\n    return list(zip(xs, xs[1:]))",
        [
            ("[1, 2, 3]", "[(1, 2), (2, 3)]"), ("[]", "[]"), ("[1]", "[]"), ("'abc'", "[('a', 'b'), ('b', 'c')]"),
            ("[0, 0]", "[(0, 0)]"),
        ],
    ),
    "unique": (
        "def unique(xs):\n    return sorted(set(xs))",
        [
            ("[5, 3, 5, 2]", "[2, 3, 5]"), ("[]", "[]"), ("[1, 1]", "[1]"), ("[9, 0, 123]", "[0, 9, 123]"),
            ("[-1, 1]", "[-1, 1]"),
        ],
    ),
    "digits": (
        "def digits(n):\n    return sum(int(d) for d in str(abs(n)))",
        [
            ("123", "6"), ("-45", "9"), ("0", "0"), ("999", "27"), ("1000", "1"), ("-1", "1"),
        ],
    ),
    "caesar": (
        "def caesar(text, k):\n    return ''.join(chr((ord(c) - 97 + k) % 26 + 97) for c in text)",
        [
            ("'abc', 1", "'bcd'"), ("'xyz', 3", "'abc'"), ("'', 5", "''"), ("'hi', 4", "'lm'"),
            ("'asdf', 4", "'ewhj'"), ("'gf', 4", "'kj'"), ("'et', 4", "'ix'"),
        ],
    ),
    "running_max": (
        "def running_max(xs):\n    return [max(xs[:i + 1]) for i in range(len(xs))]",
        [
            ("[]", "[]"), ("[1, 2, 3]", "[1, 2, 3]"), ("[3, 1, 2]", "[3, 3, 3]"), ("[1, 3, 2, 5]", "[1, 3, 3, 5]"),
            ("[0]", "[0]"),
        ],
    ),
    "brackets": (
        "def brackets(text):\n    depth = 0\n    for c in text:\n        depth += 1 if c == '(' else -1\n"
        "        if depth < 0:\n            return False\n    return depth == 0",
        [
            ("''", "True"), ("'()'", "True"), ("'(()'", "False"), ("')('", "False"), ("'(()())'", "True"),
            ("')'", "False"), ("'((()))'", "True"), ("'(()()((())))'", "True"), ("'('", "False"), ("'()()'", "True"),
        ],
    ),
}  # fmt: skip

PROBLEMS = [  # (entry point, solution, tests)
    (
        name,
        solution,
        "def check(candidate):\n"
        + "".join(f"    assert candidate({a}) == {r}\n" for a, r in cases)
        + f"check({name})\n",
    )
    for name, (solution, cases) in _SOLVED.items()
]
