"""Runs untrusted code after irrevocably dropping every right that it must not have.

The sandbox asks a fork server for a process that calls `run`. The modes (standard library only):

    spec --> drop_rights() --> stdio      a program
                               solution   functions, called by JSON lines; replies on `report`
                               tests      statements in JSON lines (proxies.py)

Every thread loses capabilities. Rlimits limit memory, CPU seconds, threads, file sizes and open
files. Files other than Python's and those in the folder (filesystem.py) raise PermissionError. Of
system calls, those that Python does not need fail (syscalls.py): starting a process, opening a
socket (except a pair of streams) or sending a signal to others ends the process with SIGSYS. The
code can create files in the folder, but no subfolders.
"""

import atexit
import builtins
import os
import resource
import signal
import struct
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from megarl.jail.filesystem import enter_mount_namespace, landlock, private_root
from megarl.jail.proxies import run_tests
from megarl.jail.syscalls import LIBC, check, filter_rows, install
from megarl.jail.untrusted import load, serve, write
from megarl.jail.values import JailMessage

PR_SET_PDEATHSIG = 1
PR_SET_NO_NEW_PRIVS = 38
MAX_THREADS = 64
REAL_USERS = 0x70000000  # + process id: a real user id that no other process has
CAPABILITY_VERSION_3 = 0x20080522
SECCOMP = "network and processes (seccomp)"


def set_rlimits(spec: JailMessage, is_counted: bool) -> None:
    limits = {
        resource.RLIMIT_AS: spec["memory_bytes"],
        resource.RLIMIT_CPU: spec["cpu_s"],
        resource.RLIMIT_FSIZE: spec["disk_bytes"],
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
    }
    if is_counted:
        limits[resource.RLIMIT_NPROC] = MAX_THREADS
    for number, limit in limits.items():
        hard = resource.getrlimit(number)[1]
        if hard != resource.RLIM_INFINITY:
            limit = min(limit, hard)
        # the soft CPU limit sends SIGXCPU, the hard one SIGKILL a second later
        resource.setrlimit(number, (limit, limit + int(number == resource.RLIMIT_CPU)))


def die_with(parent: int) -> None:
    """Makes the kernel kill this process when `parent` dies; also if it died before this call."""
    check(LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def drop_rights(spec: JailMessage) -> dict[str, str]:
    """Applies every limit in the required order.

    `spec` has `folder` (an empty folder, which becomes the current one), `readable` (paths),
    `memory_bytes`, `cpu_s` and `disk_bytes`. The process must have one thread. Returns {limit that
    this machine cannot enforce: error}.
    """
    missing = {}
    parent = os.getppid()

    def attempt(limit: str, function: Callable[..., object], *arguments: Any) -> None:
        try:
            function(*arguments)
        except (OSError, ValueError, AttributeError) as error:
            missing[limit] = str(error)

    is_counted = False
    # RLIMIT_NPROC counts the threads of a real user id, but not root's, so this process gets a
    # unique one. The effective user id, which controls access to files, does not change.
    with suppress(OSError):
        os.setresuid(REAL_USERS + os.getpid(), -1, -1)
        is_counted = True
    with suppress(OSError):  # without a private root, Landlock confines the code
        is_counted |= enter_mount_namespace()
        private_root(spec["folder"], spec["readable"], spec["disk_bytes"])
    os.chdir(spec["folder"])
    attempt("privileges", lambda: check(LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)))
    header = struct.pack("=Ii", CAPABILITY_VERSION_3, 0)
    attempt("capabilities", lambda: check(LIBC.capset(header, bytes(24))))
    attempt("files (Landlock)", landlock, spec["folder"], spec["readable"])
    attempt("memory, time, sizes (rlimits)", set_rlimits, spec, is_counted)
    attempt("kill with the parent (pdeathsig)", die_with, parent)
    attempt(SECCOMP, lambda: install(filter_rows()))
    if SECCOMP in missing:  # then forbid new processes and threads by an rlimit
        attempt("processes (rlimits)", resource.setrlimit, resource.RLIMIT_NPROC, (0, 0))
    return missing


def run(spec: JailMessage, stdin: int, stdout: int, report: int) -> None:
    """Runs a jailed process from start to end; the target of the fork server's job.

    `stdin` is a program's standard input, or else a pipe with requests; descriptor 0 then stays the
    server's /dev/null.
    """
    if spec["mode"] == "stdio":
        os.dup2(stdin, 0)
        os.close(stdin)
    os.dup2(stdout, 1)
    os.close(stdout)
    # a new text layer: the server's stdout was /dev/null, which unlike a pipe is seekable
    sys.stdout = os.fdopen(1, "w", errors="surrogateescape", closefd=False)
    sys.__stdout__ = sys.stdout
    os.environ.update(HOME=spec["folder"], TMPDIR=spec["folder"])  # added to ENVIRONMENT
    os.chdir(spec["folder"])
    mode = spec["mode"]
    source = spec["source"].encode("utf-8", "replace").decode()
    sys.path += spec["packages"]
    missing = drop_rights(spec)
    write(report, {"missing": missing})
    is_refused = missing and spec["strict"]
    spec.clear()  # the code could read it in the callers' frames
    if is_refused:
        return
    if mode == "stdio":
        sys.argv = ["solution.py"]
        builtins.__dict__.update(exit=sys.exit, quit=sys.exit)  # like Python's site module
        kind = load(source, "__main__")[1]
        if kind == "exited":  # sys.exit is not a failure
            kind = ""
        write(report, {"end": kind})
        # the steps of Python's own exit
        wait_for_threads = threading._shutdown  # pyright: ignore[reportAttributeAccessIssue]
        for step in (wait_for_threads, atexit._run_exitfuncs, sys.stdout.flush):
            with suppress(BaseException):
                step()
        return
    requests = os.fdopen(stdin, "rb")
    if mode == "solution":
        write(report, {"end": serve(source, requests, report)})
    else:
        run_tests(requests, report)
    os._exit(0)  # does not wait for the solution's threads
