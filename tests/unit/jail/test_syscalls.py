"""Every system call number of this kernel, tried under the filter: what is listed works, nothing else."""

from __future__ import annotations

import ctypes
import errno
import os
import signal

import pytest

from megarl.jail import syscalls
from megarl.jail.sandbox import Limits, missing_limits
from megarl.jail.syscalls import ALLOW, ALLOWED, ARCHES, EPERM, KILL, KILLED, X32, conditional_calls
from tests.unit.jail.programs import run_program

pytestmark = pytest.mark.skipif(
    bool(missing_limits()), reason=f"cannot enforce limits: {missing_limits()}"
)

COLUMN = ARCHES[os.uname().machine][0]
LAST = 469  # of Linux 6.18
NOT_RUN = 77  # the error of a call that the filter allows
NOT_TRIED = {
    ALLOWED["exit_group"][COLUMN],
    *((335, 336) if COLUMN == 0 else ()),
}  # Linux filters no uprobe, uretprobe
LOAD, EQUAL, RET = 0x20, 0x15, 0x06
ENOUGH_TO_REPORT = ("write", "exit_group", "brk", "mmap", "munmap")


def outcomes(numbers: list[int], arguments: tuple[int, ...]) -> dict[int, int]:
    """{number: errno, or 0 if the call did not fail, or the negative signal that it ended the process with}.

    Beneath the filter lies an older one, which fails nearly every call, so that no allowed call takes place: of two
    filters the stricter action counts, and the younger one's of two errors.
    """
    found: dict[int, int] = {}
    while len(found) < len(numbers):
        reader, writer = os.pipe()
        if (pid := os.fork()) == 0:
            try:
                try_calls([number for number in numbers if number not in found], arguments, writer)
            finally:
                os._exit(1)
        os.close(writer)
        with open(reader, "rb") as stream:
            results = stream.read()
        rest = [number for number in numbers if number not in found]
        found |= dict(zip(rest, results, strict=False))
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert status <= 0, "the filter cannot be installed"
        if status < 0:
            found[rest[len(results)]] = status
    return found


def try_calls(numbers: list[int], arguments: tuple[int, ...], report: int) -> None:
    call, words = (
        ctypes.CDLL(None, use_errno=True).syscall,
        [ctypes.c_long(word) for word in arguments],
    )
    longs = [ctypes.c_long(number) for number in numbers]
    own = syscalls.filter_rows()
    below = [(LOAD, 0, 0, 0)]
    for number in (
        *(ALLOWED[name][COLUMN] for name in ENOUGH_TO_REPORT),
        157 if COLUMN == 0 else 167,
    ):  # prctl
        assert number >= 0
        below += [(EQUAL, 0, 1, number), (RET, 0, 0, ALLOW)]
    syscalls.check(syscalls.LIBC.prctl(38, 1, 0, 0, 0))
    syscalls.install([*below, (RET, 0, 0, 0x00050000 | NOT_RUN)])
    syscalls.install(own)
    for number in longs:
        ctypes.set_errno(0)
        os.write(report, bytes([ctypes.get_errno() if call(number, *words) == -1 else 0]))
    os._exit(0)


def listed(calls: dict[str, tuple[int, int]]) -> set[int]:
    return {numbers[COLUMN] for numbers in calls.values()} - {-1}


@pytest.mark.parametrize("argument", [-1, 0])
def test_every_number(argument):
    numbers = [number for number in range(LAST + 51) if number not in NOT_TRIED]
    found = outcomes(numbers, (argument,) * 6)
    conditional = {numbers[COLUMN] for numbers in conditional_calls(os.getpid())}
    expected = dict.fromkeys(numbers, errno.EPERM) | dict.fromkeys(
        range(424, LAST + 51), errno.ENOSYS
    )
    expected |= dict.fromkeys(listed(KILLED), -signal.SIGSYS)
    assert {
        n: found[n]
        for n in numbers
        if n not in listed(ALLOWED) | conditional and found[n] != expected[n]
    } == {}
    refused = {errno.EPERM, errno.ENOSYS, -signal.SIGSYS}
    assert [n for n in sorted(listed(ALLOWED) & set(numbers)) if found[n] in refused] == []
    assert len(listed(ALLOWED) | listed(KILLED) | conditional) > 100
    if COLUMN == 0:
        few = [X32 | number for number in (*range(8), 39, 59, *range(512, 548))]
        assert set(outcomes(few, (argument,) * 6).values()) == {-signal.SIGSYS}


def decide(number: int, arguments: tuple[int, ...]) -> int:
    """The action of the filter, by its instructions."""
    words = [half for word in arguments for half in (word & 0xFFFFFFFF, word >> 32 & 0xFFFFFFFF)]
    data = {0: number, 4: ARCHES[os.uname().machine][1]} | {
        16 + 4 * index: word for index, word in enumerate(words)
    }
    rows, place, value = syscalls.filter_rows(), 0, 0
    while True:
        code, if_true, if_false, operand = rows[place]
        place += 1
        if code == LOAD:
            value = data.get(operand, 0)
        elif code == 0x54:
            value &= operand
        elif code == RET:
            return operand
        else:
            place += (
                if_true if (value == operand if code == EQUAL else value >= operand) else if_false
            )


HIGH = 1 << 32
BY_ARGUMENTS = [  # number on x86_64, arguments, action
    (56, (0x3D0F00,), ALLOW), (56, (0x7D0F00,), ALLOW), (56, (17,), KILL), (56, (HIGH | 17,), KILL),
    (56, (0x3D0F00 | 0x10000000,), EPERM), (56, (0x10000,), EPERM),
    (62, (os.getpid(), 9), ALLOW), (62, (1, 9), KILL), (62, (0, 9), KILL), (62, (-1, 9), KILL),
    (234, (os.getpid(), 1, 9), ALLOW), (234, (1, 1, 9), KILL), (302, (0, 7), ALLOW), (302, (1, 7), KILL),
    (204, (0,), ALLOW), (204, (1,), EPERM), (41, (1, 1), EPERM), (41, (2, 1), KILL), (41, (HIGH | 2, 1), KILL),
    (53, (1, 1), ALLOW), (53, (1, 0x80801), ALLOW), (53, (1, 2), EPERM), (53, (1, HIGH | 5), EPERM),
    (53, (2, 1), EPERM),
    (44, (3, 1, 1, 0, 0, 0), ALLOW), (44, (3, 1, 1, 0, 1, 16), EPERM), (44, (3, 1, 1, 0, HIGH, 16), EPERM),
    (2, (1, 0), ALLOW), (2, (1, 0o1102), ALLOW), (2, (1, 0o1000), EPERM), (2, (1, 0x410002), EPERM),
    (257, (1, 1, 0o1001), ALLOW), (257, (1, 1, 0o1000), EPERM), (257, (1, 1, 0x400002), EPERM), (257, (1, 1, 3), EPERM),
    (72, (1, 1030), ALLOW), (72, (1, 8), EPERM), (72, (1, HIGH | 8), EPERM), (72, (1, 1024), EPERM),
    (16, (1, 0x5401), ALLOW), (16, (1, 0x40086602), EPERM), (157, (15,), ALLOW), (157, (1,), EPERM),
    (157, (22,), EPERM),
    (28, (1, 1, 4), ALLOW), (28, (1, 1, 21), EPERM),
]  # fmt: skip


@pytest.mark.skipif(COLUMN != 0, reason="numbers of x86_64")
def test_the_calls_that_depend_on_their_arguments():
    wrong = [row for row in BY_ARGUMENTS if decide(row[0], row[1]) != row[2]]
    assert wrong == []
    assert {row[0] for row in BY_ARGUMENTS} == {
        numbers[0] for numbers in conditional_calls(os.getpid())
    }


@pytest.mark.skipif(COLUMN != 0, reason="numbers of x86_64")
@pytest.mark.parametrize(
    ("action", "outcome"), [(ALLOW, NOT_RUN), (EPERM, errno.EPERM), (KILL, -signal.SIGSYS)]
)
def test_the_kernel_decides_so_too(action, outcome):
    rows = [
        row
        for row in BY_ARGUMENTS
        if row[2] == action and os.getpid() not in row[1] and row[0] != 157
    ]
    wrong = [row for row in rows if outcomes([row[0]], (*row[1], 0, 0)[:6]) != {row[0]: outcome}]
    assert wrong == [] and rows


def test_the_names_are_in_one_list():
    names = [*ALLOWED, *KILLED]
    assert len(names) == len(set(names))
    for column in (0, 1):
        numbers = [
            n[column]
            for n in (*ALLOWED.values(), *KILLED.values(), *conditional_calls(1))
            if n[column] >= 0
        ]
        assert len(numbers) == len(set(numbers))


def test_ordinary_programs_run():
    runs = {code: run_program(code, "", Limits(time_s=20)) for code in ORDINARY}
    assert {
        code: run for code, run in runs.items() if (run.kind, run.output) != ("", b"ok\n")
    } == {}


ORDINARY = [
    "import numpy as np; a = np.random.rand(64, 64); np.linalg.svd(a @ a.T); np.fft.fft(a); print('ok')",
    "import threading as t; out = []; ts = [t.Thread(target=out.append, args=(i,)) for i in range(30)]\n"
    "[x.start() for x in ts]; [x.join() for x in ts]; print('ok' if len(out) == 30 else out)",
    "from concurrent.futures import ThreadPoolExecutor as P\n"
    "with P(16) as p: print('ok' if sum(p.map(abs, range(9))) == 36 else 0)",
    "import asyncio\nasync def f(): await asyncio.sleep(0.01); return 'ok'\nprint(asyncio.run(f()))",
    "import decimal, uuid, hashlib, datetime, zlib, lzma\n"
    "decimal.getcontext().prec = 50; decimal.Decimal(2).sqrt(); uuid.uuid4(); hashlib.sha256(b'').hexdigest()\n"
    "datetime.datetime.now().astimezone(); zlib.compress(b'0' * 9999); lzma.compress(b'0' * 9999); print('ok')",
    "import zoneinfo; zoneinfo.ZoneInfo('Europe/Vienna'); print('ok')",
    "import math, json, fractions, statistics, random, string, bz2, base64, array, numbers, struct; print('ok')",
    "import re, heapq, bisect, itertools, functools, collections, operator, copy, enum, dataclasses, abc; print('ok')",
    "import logging, warnings, traceback, inspect, pprint, textwrap, io, contextlib, calendar, csv; print('ok')",
    "import platform, locale, getpass, unittest, doctest, typing, types, queue; platform.system(); print('ok')",
    "import os, shutil, tempfile, pathlib\nopen('a', 'w').write('x'); os.rename('a', 'b'); shutil.copyfile('b', 'c')\n"
    "with tempfile.NamedTemporaryFile('w') as f: f.write('x'); f.flush(); open(f.name).read()\n"
    "tempfile.TemporaryFile().write(b'x'); pathlib.Path('c').unlink(); os.stat('b')\n"
    "print('ok' if 'b' in os.listdir() and 'c' not in os.listdir() else 0)",
    "import mmap, time, os\nwith open('m', 'w+b') as f: f.truncate(9999); mmap.mmap(f.fileno(), 0)[0:1] = b'x'\n"
    "time.sleep(0.01); os.cpu_count(); os.getrandom(4) if hasattr(os, 'getrandom') else 0; os.times(); print('ok')",
    "import signal\ndef late(*_): raise TimeoutError\nsignal.signal(signal.SIGALRM, late)\n"
    "try:\n    signal.setitimer(signal.ITIMER_REAL, 0.05)\n    while True: x = 1\nexcept TimeoutError: print('ok')",
    "import resource, sys, gc; resource.setrlimit(resource.RLIMIT_STACK, resource.getrlimit(resource.RLIMIT_STACK))\n"
    "sys.setrecursionlimit(10**6); gc.collect(); resource.getrusage(0); print('ok')",
    "import atexit; atexit.register(print, 'ok')",
    "import threading, time; threading.Timer(0.05, print, ['ok']).start()",
    "import sys; sys.stdout.write('ok\\n'); sys.exit(3)",
    "import socket; a, b = socket.socketpair(); a.send(b'ok'); print(b.recv(2).decode())",
]
