"""Hostile code in the jail: each is stopped, named, and changes nothing outside."""

from __future__ import annotations

import glob
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from megarl.config.schema import Reward
from megarl.jail import jailed, sandbox
from megarl.jail.sandbox import Limits, missing_limits
from megarl.rewards.code import make_code
from megarl.rewards.interface import ScoreRequest
from tests.unit.jail.crippled import (
    FIRST_LANDLOCK,
    NO_ANSWER,
    NO_NAMESPACE,
    NO_SECCOMP,
    crippled_server,
)
from tests.unit.jail.programs import run_program

pytestmark = pytest.mark.skipif(
    bool(missing_limits()), reason=f"cannot enforce limits: {missing_limits()}"
)

SECRET = "hunter2-of-the-trainer"
OUTSIDE = str(Path(__file__).resolve())
NO_FILE = "forbidden|exception"  # without a root of its own: it is there, and forbidden
HOSTILE = {  # code: the name it is counted under
    "import os\nwhile True: os.fork()": "forbidden",
    "import os\nwhile True:\n    try: os.fork()\n    except BaseException: pass": "forbidden",
    "import subprocess; subprocess.run(['ls'])": "forbidden",
    "import os; os.system('ls')": "forbidden",
    "import os; os.execv('/bin/ls', ['ls'])": "forbidden",
    "import multiprocessing as m; p = m.Process(target=print); p.start()": "forbidden",
    "import socket; socket.create_connection(('127.0.0.1', 1))": "forbidden",
    "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM)": "forbidden",
    "import socket; socket.socket(socket.AF_UNIX).connect('/var/run/docker.sock')": "forbidden",
    "import urllib.request; urllib.request.urlopen('http://127.0.0.1')": "forbidden",
    "open('/tmp/evil', 'w').write('x')": "forbidden",
    "open('../evil', 'w').write('x')": "forbidden",
    f"open({OUTSIDE!r}).read()": NO_FILE,
    f"import os; os.open({OUTSIDE!r}, os.O_RDONLY | os.O_TRUNC)": "forbidden",
    f"import os; os.truncate({OUTSIDE!r}, 0)": "forbidden",
    f"import os; os.unlink({OUTSIDE!r})": NO_FILE,
    f"import os; os.chmod({OUTSIDE!r}, 0)": "forbidden",
    f"import os; os.rename({OUTSIDE!r}, 'mine')": NO_FILE,
    f"import os; os.link({OUTSIDE!r}, 'mine')": "forbidden",
    f"import os; os.symlink({OUTSIDE!r}, 'mine'); print(open('mine').read())": "forbidden",
    "import os; os.mkdir('deep')": "forbidden",
    "import os, shutil; shutil.rmtree(os.getcwd()); print('done')": "forbidden",
    "import os; print(open(f'/proc/{os.getppid()}/environ').read())": NO_FILE,
    "import os; print(open(f'/proc/{os.getppid()}/mem').read())": NO_FILE,
    "import os; os.kill(os.getppid(), 9)": "forbidden",
    "import os, resource; resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (1, 1))": "forbidden",
    "import os, fcntl; fcntl.fcntl(0, fcntl.F_SETOWN, os.getppid())": "forbidden",
    "import os; os.sched_setaffinity(os.getppid(), {0})": "forbidden",
    "import ctypes; ctypes.CDLL(None).ptrace(16, 1, 0, 0)": "forbidden",
    "import ctypes; ctypes.CDLL(None).unshare(0x10000000)": "forbidden",
    "import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1))": "exception",
    "import mmap; mmap.mmap(-1, 4 << 30)": "exception",
    "x = []\nwhile True: x.append(bytearray(1 << 20))": "memory",
    "x = 'a'\nwhile True: x += x": "memory",
    "while True: print('x' * 10_000)": "output",
    "import os\nwhile True: os.write(1, b'x' * 10_000)": "output",
    "open('a', 'w').write('x' * (3 << 20))": "disk",
    "i = 0\nwhile True:\n    open(str(i), 'w').write('x' * 100_000)\n    i += 1": "disk",
    "while True: pass": "timeout",
    "import time; time.sleep(60)": "timeout",
    "import signal, time\nfor s in range(1, 32):\n    try: signal.signal(s, signal.SIG_IGN)\n    except OSError: pass\n"
    "time.sleep(60)": "timeout",
    "import contextlib, os, time\nwhile True:\n    time.sleep(0.1)\n    for fd in range(3, 99):\n"
    "        with contextlib.suppress(OSError): os.write(fd, b'{}\\n')": "timeout",
    "import os\nwhile True:\n    for fd in range(3, 64):\n"
    "        try: os.write(fd, b'x')\n        except OSError: pass": "output|timeout",
    "import os, time; os.closerange(0, 99); time.sleep(60)": "timeout",
    "import threading\nthreading.Thread(target=threading.Event().wait).start()": "timeout",
    "import ctypes; ctypes.string_at(0)": "crashed",
    "import os; os.abort()": "crashed",
    "import os; os._exit(0)": "wrong_answer",
    "import os; print(sorted(os.environ.items()), os.listdir())": "wrong_answer",
}


def test_hostile_code_is_named_and_nothing_is_left(monkeypatch):
    """All in one batch with a good one at each end: the order stays, the others go on."""
    monkeypatch.setenv("SECRET", SECRET)
    good = "print(int(input()) + 1)"
    codes = [good, *HOSTILE, good]
    before = Path(OUTSIDE).stat()
    options = {"time_s": 2.0, "memory_mb": 96, "disk_mb": 2, "output_kb": 64, "concurrency": 6}
    reward = make_code(Reward(name="code", options=options))
    cases = [
        ScoreRequest(f"{row}/0", "p", code, extra={"tests": TESTS})
        for row, code in enumerate(codes)
    ]
    found = reward(cases)
    named = {code: score.cause for code, score in zip(codes, found, strict=True)}
    assert {
        code: cause
        for code, cause in named.items()
        if cause not in HOSTILE.get(code, "").split("|")
    } == {}
    assert [score.value for score in found] == [1.0, *[0.0] * len(HOSTILE), 1.0]
    after = Path(OUTSIDE).stat()
    assert (after.st_size, after.st_mode, after.st_mtime) == (
        before.st_size,
        before.st_mode,
        before.st_mtime,
    )
    assert not glob.glob(f"{tempfile.gettempdir()}/evil")
    assert not running()


TESTS = {"inputs": ["41\n"], "outputs": ["42\n"]}


def children(parent: int) -> list[int]:
    found = []
    for stat in glob.glob("/proc/[0-9]*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):
            if int(Path(stat).read_text().rpartition(")")[2].split()[1]) == parent:
                found.append(int(Path(stat).parent.name))
    return found


def running() -> list[int]:
    """The jailed processes."""
    return children(sandbox.SERVER.process.pid) if sandbox.SERVER.process else []


def test_no_folder_is_left(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    start = time.monotonic()
    for code in (
        "open('a', 'w')",
        "import time; time.sleep(60)",
        "import os; os.unlink('solution.py')",
    ):
        run_program(code, "", Limits(time_s=0.3))
    assert time.monotonic() - start < 30
    assert not list(tmp_path.iterdir())


def test_the_environment_and_the_arguments_tell_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("SECRET", SECRET)
    monkeypatch.setattr(sandbox, "SERVER", crippled_server(tmp_path))
    run = run_program(
        "import os, sys; print(os.environ, sys.argv, sys.orig_argv, os.listdir())", "", Limits()
    )
    text = run.output.decode()
    assert "HOME" in text and SECRET not in text
    assert (
        run_program("print(hash('a'), {'b', 'a', 'c'})", "", Limits()).output
        == run_program("print(hash('a'), {'b', 'a', 'c'})", "", Limits()).output
    )  # the same reward in every run


def test_a_forged_report_buys_no_time():
    code = (
        "import os, time\nfor _ in range(8):\n    time.sleep(0.3)\n    for fd in range(3, 64):\n"
        "        try: os.write(fd, b'{\"number\": 0}\\n')\n        except OSError: pass\n"
    )
    start = time.monotonic()
    assert run_program(code, "", Limits(time_s=0.8)).kind == "timeout"
    assert time.monotonic() - start < 1.8


def test_the_seconds_of_cpu_are_those_of_all_threads():
    """NumPy releases the GIL: four threads take the time of one, four times as fast."""
    code = "import hashlib, threading\n" + (
        "for _ in range(4): threading.Thread(target=hashlib.pbkdf2_hmac, args=('sha256', b'', b'', 10**9)).start()"
    )
    start = time.monotonic()
    assert run_program(code, "", Limits(time_s=1.0)).kind == "timeout"
    assert time.monotonic() - start < 4


def test_harmless_things_work():
    code = (
        "import asyncio, threading, tempfile, json, os, sys\n"
        "asyncio.run(asyncio.sleep(0))\n"
        "out = []\n"
        "thread = threading.Thread(target=out.append, args=(1,)); thread.start(); thread.join()\n"
        "open('a', 'w').write('x'); os.remove('a')\n"
        "tempfile.TemporaryFile().close()\n"
        "sys.setrecursionlimit(10_000)\n"
        "def deep(n): return n and 1 + deep(n - 1)\n"
        "print(out, deep(5000), input(), sys.stdin.read(), __name__)"
    )
    run = run_program(code, "a\nb\n", Limits(time_s=20))
    assert (run.kind, run.output.decode().split()) == ("", ["[1]", "5000", "a", "b", "__main__"])


def test_the_parents_death_ends_the_code(tmp_path):
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from megarl.jail.sandbox import *\n"
        "JailedProcess('import time; time.sleep(60)', Limits(time_s=60), stdin='').run()"
    )
    root = str(Path(sandbox.__file__).parents[2])
    environment = {"TMPDIR": str(tmp_path), "PATH": "/usr/bin"}
    with subprocess.Popen([sys.executable, "-c", script, root], env=environment) as parent:
        deadline = time.monotonic() + 30
        jailed = []
        while not jailed:
            assert time.monotonic() < deadline and parent.poll() is None
            jailed = [code for server in children(parent.pid) for code in children(server)]
            time.sleep(0.02)
        parent.kill()
    while any(Path(f"/proc/{pid}").exists() for pid in jailed):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_parent_that_died_before_is_noticed():
    if (pid := os.fork()) == 0:
        jailed.die_with(os.getppid() + 1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def test_a_server_that_ends_leaves_the_sample_out_and_starts_again():
    with ThreadPoolExecutor(2) as pool:
        run = pool.submit(run_program, "import time; time.sleep(9)", "", Limits(time_s=20))
        while not running():
            time.sleep(0.02)
        assert sandbox.SERVER.process is not None
        sandbox.SERVER.process.kill()
        assert (run.result().kind, "ended" in run.result().detail) == ("sandbox", True)
        programs = pool.map(
            lambda number: run_program(f"print({number})", "", Limits(time_s=20)), range(20)
        )
    assert [program.output for program in programs] == [b"%d\n" % number for number in range(20)]


def test_a_machine_that_cannot_limit_is_refused_or_warned_of(monkeypatch, caplog):
    missing = {"files (Landlock)": "Function not implemented"}
    monkeypatch.setattr("megarl.rewards.code.missing_limits", lambda: missing)
    with pytest.raises(
        ValueError,
        match=r"cannot enforce limits: files \(Landlock\): Function not implemented; use Linux",
    ):
        make_code(Reward(name="code"))
    reward = make_code(Reward(name="code", options={"sandbox": "best_effort"}))
    assert "files (Landlock)" in caplog.text
    assert reward([ScoreRequest("0/0", "p", "print(42)", extra={"tests": TESTS})])[0].value == 1.0


def test_a_jail_that_never_answers_is_refused(tmp_path, monkeypatch):
    """Not even best_effort runs where every sample would be left out."""
    monkeypatch.setattr(sandbox, "SERVER", crippled_server(tmp_path, NO_ANSWER))
    for mode in ("strict", "best_effort"):
        with pytest.raises(
            ValueError, match=r"all: a program does not answer \(no output.*; check"
        ):
            make_code(Reward(name="code", options={"sandbox": mode}))


def test_signals_that_the_parent_ignores_or_blocks():
    """As after `trap '' CHLD` or under some schedulers."""
    script = (
        "import signal, sys; sys.path.insert(0, sys.argv[1])\n"
        "numbers = (signal.SIGCHLD, signal.SIGPROF, signal.SIGXCPU)\n"
        "for number in numbers: signal.signal(number, signal.SIG_IGN)\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, numbers)\n"
        "from megarl.jail.sandbox import *\n"
        "run = JailedProcess('print(1)', Limits(time_s=20), stdin='').run()\n"
        "print(missing_limits(), run.output)"
    )
    root = str(Path(sandbox.__file__).parents[2])
    done = subprocess.run([sys.executable, "-c", script, root], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("{} b'1\\n'\n", "")


def test_a_limit_that_fails_when_the_code_starts_leaves_the_sample_out(tmp_path, monkeypatch):
    """The jail without its system calls: strict runs nothing, best_effort runs and still counts."""
    monkeypatch.setattr(sandbox, "SERVER", crippled_server(tmp_path, NO_SECCOMP))
    monkeypatch.setattr("megarl.rewards.code.missing_limits", dict)
    case = ScoreRequest("0/0", "p", "print(42)", extra={"tests": TESTS})
    strict = make_code(Reward(name="code"))([case])[0]
    assert (strict.value, strict.cause) == (None, "sandbox") and "seccomp" in strict.detail
    assert (
        make_code(Reward(name="code", options={"sandbox": "best_effort"}))([case])[0].value == 1.0
    )


@pytest.mark.long
def test_the_first_landlock_has_no_say_on_truncation_but_the_jail_has(tmp_path, monkeypatch):
    """Linux 5.13 to 6.1."""
    older = tmp_path / "older"
    older.write_text("text")
    monkeypatch.setattr(
        sandbox, "SERVER", crippled_server(tmp_path / "package", NO_NAMESPACE, FIRST_LANDLOCK)
    )
    monkeypatch.setattr(sandbox, "SYSTEM", (*sandbox.SYSTEM, str(tmp_path)))
    assert (
        run_program(f"print(open({str(older)!r}).read())", "", Limits(time_s=20)).output
        == b"text\n"
    )
    for code in (
        f"import os; os.open({str(older)!r}, os.O_RDONLY | os.O_TRUNC)",
        f"import os; os.truncate({str(older)!r}, 0)",
        f"open({str(older)!r}, 'w')",
        f"import os; os.link({str(older)!r}, 'mine')",
    ):
        assert run_program(code, "", Limits(time_s=20)).kind == "forbidden", code
    assert older.read_text() == "text"


@pytest.mark.long
def test_bombs_of_every_kind_at_once():
    """Many samples at a time, all of them bad: threads, memory, output, disk. The machine answers meanwhile."""
    bombs = [
        "import threading, time\nthreading.stack_size(32768)\n"
        "while True: threading.Thread(target=time.sleep, args=(9,)).start()",
        "x = []\nwhile True: x.append(bytearray(1 << 22))",
        "while True: print('x' * 1_000_000)",
        "i = 0\nwhile True:\n    i += 1\n    open(str(i % 900), 'a').write('x' * 50_000)",
        "import os\nwhile True:\n    try: os.fork()\n    except BaseException: pass",
        "print('x' * (1 << 30))",
        "import sys\nfor _ in range(1 << 10): sys.stdout.write('x' * (1 << 20))",
        "import zlib; zlib.decompress(zlib.compress(b'0' * (100 << 20)) * 1); x = b'0' * (1 << 40)",
    ]
    reward = make_code(Reward(name="code", options={"time_s": 2.0, "concurrency": 8}))
    start = time.monotonic()
    found = reward(
        [
            ScoreRequest(f"{n}/0", "p", bomb, extra={"tests": TESTS})
            for n, bomb in enumerate(bombs * 4)
        ]
    )
    assert {score.value for score in found} == {0.0}
    causes = {score.cause for score in found}
    assert {"memory", "output", "disk", "forbidden"} <= causes <= {
        "memory", "output", "disk", "forbidden", "timeout", "exception", "crashed"
    }  # fmt: skip
    assert time.monotonic() - start < 60
    assert not running()


def test_a_trainer_with_many_open_files():
    """Descriptors above 1023, which select() cannot wait for, and a limit the child must live with."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    held = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
    try:
        assert run_program("print(1)", "", Limits(time_s=20)).output == b"1\n"
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
