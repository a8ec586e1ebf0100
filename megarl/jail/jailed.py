"""Runs untrusted code after irrevocably dropping every right that it must not have.

This script uses only the standard library. `megarl.jail.sandbox` starts it in an empty folder and environment:

    python jailed.py '{"folder": ..., "mode": "stdio" | "calls" | "probe", limits ...}'

    drop_rights() -> solution.py runs -> stdio: as a program; the parent compares what it prints
                                      -> calls: executes requests.json, one JSON line per request on the report pipe

The expected answers are never in this process: the code cannot read them, and exiting early passes no test.

Dropped for every thread: capabilities; memory, CPU seconds, file sizes and open files beyond the rlimits; all files
outside Python's own and the folder (Landlock); sockets, processes, signals to others, changes to the modes of other
files, tracing, kernel keys (seccomp). A forbidden system call kills the process with SIGSYS; a forbidden file raises
PermissionError. Threads are allowed. Files can be created in the folder, subfolders cannot.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import resource
import signal
import struct
import sys
from typing import Any

LIBC = ctypes.CDLL(None, use_errno=True)
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 1, 38, 22, 2

# --- system calls: number on x86_64, number on aarch64 (None: does not exist), as of Linux 6.16 -------------------

ARCHES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
KILL, EPERM, ENOSYS, ALLOW = 0x80000000, 0x00050001, 0x00050026, 0x7FFF0000
KILLED = {  # processes, tracing, keys, queues and memory that no rlimit counts: the process is killed
    "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281), "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424), "pidfd_getfd": (438, 438), "ptrace": (101, 117), "kcmp": (312, 272),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "unshare": (272, 97), "setns": (308, 268),
    "io_uring_setup": (425, 425), "shmget": (29, 194), "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "keyctl": (250, 219),
    "add_key": (248, 217), "request_key": (249, 218),
}  # fmt: skip
REFUSED = {  # attempted by harmless libraries and not covered by Landlock: an OSError
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "setpriority": (141, 140), "ioprio_set": (251, 30),
    "migrate_pages": (256, 238), "move_pages": (279, 239), "process_madvise": (440, 440), "truncate": (76, 45),
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, None),
    "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54), "utime": (132, None), "utimes": (235, None),
    "futimesat": (261, None), "utimensat": (280, 88), "setxattr": (188, 5), "lsetxattr": (189, 6),
    "fsetxattr": (190, 7), "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
    "setxattrat": (463, 463), "removexattrat": (466, 466),
}  # fmt: skip
ABSENT = {"clone3": (435, 435), "openat2": (437, 437)}  # seccomp cannot read their flags; libc uses the older calls
CLONE_THREAD, O_ACCMODE, O_TRUNC, ALL_BITS = 0x10000, 3, 0x200, 0xFFFFFFFF


def conditional_calls(pid: int) -> list[tuple[tuple[int | None, int | None], int, int, tuple[int, ...], int, int]]:
    """(numbers, argument, mask, values, action if (argument & mask) is one of the values, action otherwise)."""
    own_pids = (0, pid)
    scheduling = ((203, 122), (144, 119), (142, 118), (314, 274))  # sched_set{affinity,scheduler,param,attr}
    return [
        ((56, 220), 0, CLONE_THREAD, (CLONE_THREAD,), ALLOW, KILL),  # clone: threads only
        ((62, 129), 0, ALL_BITS, (pid,), ALLOW, KILL),  # kill
        ((234, 131), 0, ALL_BITS, (pid,), ALLOW, KILL),  # tgkill
        ((41, 198), 0, ALL_BITS, (1,), EPERM, KILL),  # socket: name services try AF_UNIX
        ((302, 261), 0, ALL_BITS, own_pids, ALLOW, KILL),  # prlimit64
        *((numbers, 0, ALL_BITS, own_pids, ALLOW, EPERM) for numbers in scheduling),
        ((2, None), 1, O_ACCMODE | O_TRUNC, (O_TRUNC,), EPERM, ALLOW),  # open: truncates without write access
        ((257, 56), 2, O_ACCMODE | O_TRUNC, (O_TRUNC,), EPERM, ALLOW),  # openat
        ((72, 25), 1, ALL_BITS, (8, 10, 15), EPERM, ALLOW),  # fcntl F_SETOWN, F_SETSIG, F_SETOWN_EX: signals to others
        ((16, 29), 1, ALL_BITS, (0x8901, 0x8902, 0x5412), EPERM, ALLOW),  # ioctl FIOSETOWN, SIOCSPGRP, TIOCSTI
    ]


def seccomp() -> None:
    """Install the system call filter. Raises OSError if the kernel or the architecture does not support it."""
    machine = os.uname().machine
    if machine not in ARCHES:
        raise OSError(f"no system call numbers for {machine}, only for {', '.join(ARCHES)}")
    column, arch = ARCHES[machine]
    load, equal, above, mask, ret = 0x20, 0x15, 0x35, 0x54, 0x06  # BPF_LD|W|ABS, BPF_JMP|JEQ|K, JGE, ALU|AND, RET
    code = [(load, 0, 0, 4), (equal, 1, 0, arch), (ret, 0, 0, KILL), (load, 0, 0, 0), (above, 0, 1, 0x40000000)]
    code += [(ret, 0, 0, KILL)]  # x32 numbers the same calls differently
    for calls, action in ((KILLED, KILL), (REFUSED, EPERM), (ABSENT, ENOSYS)):
        for numbers in calls.values():
            if (number := numbers[column]) is not None:
                code += [(equal, 0, 1, number), (ret, 0, 0, action)]
    for numbers, argument, bits, values, inside, outside in conditional_calls(os.getpid()):
        if (number := numbers[column]) is None:
            continue
        tests = [row for value in values for row in ((equal, 0, 1, value), (ret, 0, 0, inside))]
        body = [(load, 0, 0, 16 + 8 * argument), (mask, 0, 0, bits), *tests, (ret, 0, 0, outside)]
        code += [(equal, 0, len(body), number), *body]
    code += [(ret, 0, 0, ALLOW)]
    rows = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *row) for row in code))
    program = struct.pack("@HxxxxxxP", len(code), ctypes.addressof(rows))
    _check(LIBC.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.create_string_buffer(program), 0, 0))


# --- files --------------------------------------------------------------------------------------------------------

WRITE_FILE, READ_FILE, READ_DIR, REMOVE_FILE, MAKE_REG, TRUNCATE = (1 << bit for bit in (1, 2, 3, 5, 8, 14))
RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}  # number of access rights by Landlock version; 16 from version 5


def landlock(folder: str, readable: list[str]) -> None:
    """Allow reading below `readable`, reading and writing files in `folder`, and nothing else.

    Raises OSError if the kernel does not support Landlock.
    """
    create, add, restrict = 444, 445, 446
    version = _check(LIBC.syscall(create, None, 0, 1))
    known = (1 << RIGHTS.get(version, 16)) - 1
    rules = _check(LIBC.syscall(create, ctypes.create_string_buffer(struct.pack("=Q", known)), 8, 0))
    allowed = [(path, READ_FILE | READ_DIR) for path in readable]
    allowed += [(folder, READ_FILE | READ_DIR | WRITE_FILE | REMOVE_FILE | MAKE_REG | TRUNCATE)]
    for path, rights in [*allowed, ("/dev/null", READ_FILE | WRITE_FILE), ("/dev/urandom", READ_FILE)]:
        if not os.path.exists(path):
            continue
        rights &= known if os.path.isdir(path) else READ_FILE | WRITE_FILE
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        _check(LIBC.syscall(add, rules, 1, ctypes.create_string_buffer(struct.pack("=Qi", rights, descriptor)), 0))
        os.close(descriptor)
    _check(LIBC.syscall(restrict, rules, 0))
    os.close(rules)


def _check(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


# --- all limits ---------------------------------------------------------------------------------------------------


def drop_capabilities() -> None:
    header, nothing = struct.pack("=Ii", 0x20080522, 0), bytes(24)
    _check(LIBC.capset(ctypes.create_string_buffer(header), ctypes.create_string_buffer(nothing)))


def set_rlimits(spec: dict[str, Any]) -> None:
    limits = {"AS": spec["memory_bytes"], "CPU": spec["cpu_s"], "FSIZE": spec["disk_bytes"]}
    for name, limit in (limits | {"NOFILE": 64, "CORE": 0, "MEMLOCK": 0}).items():
        number = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(number)[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(number, (limit, limit + (name == "CPU")))  # SIGXCPU first, SIGKILL a second later


def drop_rights(spec: dict[str, Any]) -> dict[str, str]:
    """Apply every limit, in the required order. Returns the limits that this machine lacks, each with its error."""
    missing = {}

    def attempt(limit: str, function: Any, *arguments: Any) -> None:
        try:
            function(*arguments)
        except (OSError, ValueError, AttributeError) as error:
            missing[limit] = str(error)

    attempt("kill with the parent (pdeathsig)", lambda: _check(LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)))
    attempt("privileges", lambda: _check(LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)))
    attempt("capabilities", drop_capabilities)
    attempt("files (Landlock)", landlock, spec["folder"], spec["readable"])
    attempt("memory, time, sizes (rlimits)", set_rlimits, spec)
    attempt("network and processes (seccomp)", seccomp)
    if "network and processes (seccomp)" in missing:  # fallback, with no effect for root: no processes, no threads
        attempt("processes (rlimits)", lambda: resource.setrlimit(resource.RLIMIT_NPROC, (0, 0)))
    return missing


def main() -> None:
    spec = json.loads(sys.argv[1])
    sys.path.insert(0, spec["scripts"])
    untrusted = importlib.import_module("untrusted")
    del sys.path[0]
    untrusted.main(spec, drop_rights)


if __name__ == "__main__":
    main()
