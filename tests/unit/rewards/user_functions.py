"""Reward functions of the tests; each is called in a process that imports this module."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
import urllib.request
from pathlib import Path

CALLS = []


def names(response, tokens, level, bonus=0.0):
    assert (response, tokens, level) == ("17", [5, 6, 8], 3)
    return 1.0 + bonus


def everything(prompt, **others):
    assert set(others) == {
        "response",
        "answer",
        "final_answer",
        "tokens",
        "finish",
        "level",
        "opening",
    }
    return len(prompt)


def record(file, response, final_answer):
    """Notes what it was called with, as a line of a file."""
    with Path(file).open("a") as lines:
        print(json.dumps([response, final_answer]), file=lines)
    return 0.0


def raises(response):
    raise KeyError("no such test")


def leaves(response):
    sys.exit(3)


def dies(response):
    os.abort()


def text(response):
    return "good"


def nothing(response):
    return None


def without_score(response):
    return {"acc": 1.0}


def demanding(missing):
    return 1.0


def nan(response):
    return float("nan")


def infinite(response):
    return float("inf")


def nan_tensor(response):
    import torch

    return torch.tensor(float("nan"))


def large(response):
    return 1e308


def hangs(response):
    """Swallows every Exception, as much code does."""
    while True:
        with contextlib.suppress(Exception):
            time.sleep(0.01)


def parses_for_ever(response):
    return float(bool(re.match(r"(a+)+$", "a" * 40 + "b")))


def reciprocal(response):
    return 1 / (int(response) - 1)


def reference(answer):
    return float(answer)


def has_opening(opening):
    return float(opening == "<think>")


def half(score, final_answer):
    """Half of what the task's own judge gives."""
    return score(final_answer) / 2


def asks(response, url):
    with urllib.request.urlopen(url, b'{"samples": []}') as answer:
        json.load(answer)
    return 1.0


def counts(response):
    """The number of calls so far, also of `counts_too`; 'sleep' takes too long."""
    CALLS.append(response)
    if response == "sleep":
        time.sleep(60)
    return {"score": len(CALLS), "pid": os.getpid()}


counts_too = counts


def one_score(steps):
    return [1.0]


def a_number(steps):
    return 1.0


def nan_step(steps):
    return [1.0, float("nan")]


def text_step(steps):
    return [1.0, "2"]


def fails(steps):
    return 1 / 0


def infinite_tensor(steps):
    import torch

    return torch.tensor([1.0, float("inf")])
