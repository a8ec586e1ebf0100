"""Runs untrusted code after irrevocably dropping every right that it must not have.

The sandbox asks a fork server for a process that runs `run`; only the standard library:

    source, requests are read --> drop_rights() --> the code runs (untrusted.py)

Dropped for every thread: capabilities; memory, CPU seconds, threads, file sizes and open files beyond the rlimits; all
files outside Python's own and the folder (filesystem.py), which raise PermissionError; system calls that Python does
not need (syscalls.py): a new process, a socket (unless a pair of streams) or a signal to others ends it with SIGSYS.
Files can be created in the folder, subfolders cannot.
"""

from __future__ import annotations

import atexit
import os
import resource
import signal
import struct
import sys
import threading
from contextlib import suppress
from typing import Any

from megarl.jail import untrusted
from megarl.jail.filesystem import enter_mount_namespace, landlock, private_root
from megarl.jail.syscalls import LIBC, check, filter_rows, install

PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38
MAX_THREADS = 64
REAL_USERS = 0x70000000  # plus the process id: a real user id that no other process has


def set_rlimits(spec: dict[str, Any], is_counted: bool) -> None:
    limits = {
        "AS": spec["memory_bytes"],
        "CPU": spec["cpu_s"],
        "FSIZE": spec["disk_bytes"],
        "NOFILE": 64,
    }
    limits |= {"CORE": 0, "MEMLOCK": 0} | ({"NPROC": MAX_THREADS} if is_counted else {})
    for name, limit in limits.items():
        number = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(number)[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(
            number, (limit, limit + (name == "CPU"))
        )  # SIGXCPU first, SIGKILL a second later


def die_with(parent: int) -> None:
    """Kill this process when `parent` dies, even if that was before this call."""
    check(LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def separate_user() -> bool:
    """Give this process a real user id of its own, so that RLIMIT_NPROC counts its threads; root's are never counted.

    The effective user id, which decides access to files, stays. Returns False without root.
    """
    with suppress(OSError):
        os.setresuid(REAL_USERS + os.getpid(), -1, -1)
        return True
    return False


def drop_rights(spec: dict[str, Any]) -> dict[str, str]:
    """Apply every limit, in the required order. Returns the limits that this machine lacks, each with its error.

    `spec` has `folder`, afterwards the empty current folder, `readable` paths, `memory_bytes`, `cpu_s`, `disk_bytes`.
    The process must have one thread.
    """
    missing, parent = {}, os.getppid()

    def attempt(limit: str, function: Any, *arguments: Any) -> None:
        try:
            function(*arguments)
        except (OSError, ValueError, AttributeError) as error:
            missing[limit] = str(error)

    is_counted = separate_user()
    with suppress(OSError):  # Landlock confines the code without it
        is_counted |= enter_mount_namespace()
        private_root(spec["folder"], spec["readable"], spec["disk_bytes"])
    os.chdir(spec["folder"])
    attempt("privileges", lambda: check(LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)))
    attempt(
        "capabilities", lambda: check(LIBC.capset(struct.pack("=Ii", 0x20080522, 0), bytes(24)))
    )  # to none
    attempt("files (Landlock)", landlock, spec["folder"], spec["readable"])
    attempt("memory, time, sizes (rlimits)", set_rlimits, spec, is_counted)
    attempt("kill with the parent (pdeathsig)", die_with, parent)
    attempt("network and processes (seccomp)", lambda: install(filter_rows()))
    if "network and processes (seccomp)" in missing:  # no processes, no threads
        attempt("processes (rlimits)", lambda: resource.setrlimit(resource.RLIMIT_NPROC, (0, 0)))
    return missing


def run(spec: dict[str, Any], stdin: int, stdout: int, report: int) -> None:
    """The whole life of a jailed process: a job of the fork server."""
    os.dup2(stdin, 0)
    os.dup2(stdout, 1)
    os.closerange(3, report)
    os.closerange(report + 1, 64)
    os.environ.update(HOME=spec["folder"], TMPDIR=spec["folder"])  # to what little the server has
    os.chdir(spec["folder"])
    spec["report"] = report
    untrusted.main(spec, drop_rights)
    wait_for_threads = threading._shutdown  # pyright: ignore[reportAttributeAccessIssue] (as Python itself at exit)
    for step in (wait_for_threads, atexit._run_exitfuncs, sys.stdout.flush):
        with suppress(BaseException):
            step()
