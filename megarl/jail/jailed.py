"""Runs generated code, having first taken away from itself what that code must not have. A script, standard library
only, started by `megarl.jail.sandbox` in an empty folder with an empty environment:

    python jailed.py '{"folder": ..., "mode": "stdio" | "calls" | "probe", limits ...}'

    limits -> solution.py runs -> stdio: as a program; what it prints is judged by whoever started this
                               -> calls: requests.json is worked off, one JSON line a request on the report pipe
The expected answers are never in this process, so nothing here can find them, and to leave early passes no test.

What is taken away, irrevocably and inherited by every thread: capabilities; memory, CPU seconds, file sizes, open
files (rlimits); every file outside Python's own and the folder (Landlock); sockets, processes, signals to others,
changes of other files' modes, tracing, kernel keys (seccomp). A forbidden system call ends the process with SIGSYS; a
forbidden file is a PermissionError. The code may make threads. The folder takes files, no folders.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import struct
import sys
import types
from typing import Any

LAZY_ANNOTATIONS = annotations.compiler_flag  # List[int] in a signature needs no import
LIBC = ctypes.CDLL(None, use_errno=True)
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 1, 38, 22, 2

# --- system calls: number on x86_64, number on aarch64 (None: there is none), as of Linux 6.16 --------------------

ARCHES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
KILL, EPERM, ENOSYS, ALLOW = 0x80000000, 0x00050001, 0x00050026, 0x7FFF0000
END = {  # processes, tracing, keys, queues and memory that no rlimit counts: the process ends
    "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281), "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424), "pidfd_getfd": (438, 438), "ptrace": (101, 117), "kcmp": (312, 272),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "unshare": (272, 97), "setns": (308, 268),
    "io_uring_setup": (425, 425), "shmget": (29, 194), "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "keyctl": (250, 219),
    "add_key": (248, 217), "request_key": (249, 218),
}  # fmt: skip
REFUSE = {  # what libraries try in passing, and Landlock does not rule: an OSError
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "setpriority": (141, 140), "ioprio_set": (251, 30),
    "migrate_pages": (256, 238), "move_pages": (279, 239), "process_madvise": (440, 440), "truncate": (76, 45),
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, None),
    "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54), "utime": (132, None), "utimes": (235, None),
    "futimesat": (261, None), "utimensat": (280, 88), "setxattr": (188, 5), "lsetxattr": (189, 6),
    "fsetxattr": (190, 7), "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
    "setxattrat": (463, 463), "removexattrat": (466, 466),
}  # fmt: skip
ABSENT = {"clone3": (435, 435), "openat2": (437, 437)}  # their flags lie in memory; libc falls back to the old ones
CLONE_THREAD, O_ACCMODE, O_TRUNC, WHOLE = 0x10000, 3, 0x200, 0xFFFFFFFF


def conditional(pid: int) -> list[tuple[tuple[int | None, int | None], int, int, tuple[int, ...], int, int]]:
    """(numbers, argument, mask, values, action when (argument & mask) is one of them, action otherwise)."""
    own = (0, pid)
    scheduling = ((203, 122), (144, 119), (142, 118), (314, 274))  # sched_set{affinity,scheduler,param,attr}
    return [
        ((56, 220), 0, CLONE_THREAD, (CLONE_THREAD,), ALLOW, KILL),  # clone: a thread, no process
        ((62, 129), 0, WHOLE, (pid,), ALLOW, KILL),  # kill
        ((234, 131), 0, WHOLE, (pid,), ALLOW, KILL),  # tgkill
        ((41, 198), 0, WHOLE, (1,), EPERM, KILL),  # socket: AF_UNIX, which name services try, or any other
        ((302, 261), 0, WHOLE, own, ALLOW, KILL),  # prlimit64
        *((numbers, 0, WHOLE, own, ALLOW, EPERM) for numbers in scheduling),
        ((2, None), 1, O_ACCMODE | O_TRUNC, (O_TRUNC,), EPERM, ALLOW),  # open: empties a file without writing to it
        ((257, 56), 2, O_ACCMODE | O_TRUNC, (O_TRUNC,), EPERM, ALLOW),  # openat
        ((72, 25), 1, WHOLE, (8, 10, 15), EPERM, ALLOW),  # fcntl F_SETOWN, F_SETSIG, F_SETOWN_EX: signals to others
        ((16, 29), 1, WHOLE, (0x8901, 0x8902, 0x5412), EPERM, ALLOW),  # ioctl FIOSETOWN, SIOCSPGRP, TIOCSTI
    ]


def seccomp() -> None:
    """Raises OSError when this kernel, or this machine's architecture, cannot."""
    machine = os.uname().machine
    if machine not in ARCHES:
        raise OSError(f"no list of system calls for {machine}; there is one for {', '.join(ARCHES)}")
    column, arch = ARCHES[machine]
    load, equal, above, mask, end = 0x20, 0x15, 0x35, 0x54, 0x06  # BPF_LD|W|ABS, BPF_JMP|JEQ|K, JGE, ALU|AND, RET
    code = [(load, 0, 0, 4), (equal, 1, 0, arch), (end, 0, 0, KILL), (load, 0, 0, 0), (above, 0, 1, 0x40000000)]
    code += [(end, 0, 0, KILL)]  # x32, another numbering of the same calls
    for names, action in ((END, KILL), (REFUSE, EPERM), (ABSENT, ENOSYS)):
        for numbers in names.values():
            if (number := numbers[column]) is not None:
                code += [(equal, 0, 1, number), (end, 0, 0, action)]
    for numbers, argument, bits, values, inside, outside in conditional(os.getpid()):
        if (number := numbers[column]) is None:
            continue
        tests = [row for value in values for row in ((equal, 0, 1, value), (end, 0, 0, inside))]
        body = [(load, 0, 0, 16 + 8 * argument), (mask, 0, 0, bits), *tests, (end, 0, 0, outside)]
        code += [(equal, 0, len(body), number), *body]
    code += [(end, 0, 0, ALLOW)]
    rows = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *row) for row in code))
    program = struct.pack("@HxxxxxxP", len(code), ctypes.addressof(rows))
    _check(LIBC.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.create_string_buffer(program), 0, 0))


# --- files --------------------------------------------------------------------------------------------------------

WRITE_FILE, READ_FILE, READ_DIR, REMOVE_FILE, MAKE_REG, TRUNCATE = (1 << bit for bit in (1, 2, 3, 5, 8, 14))
RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}  # by Landlock version: this many rights; from 5 on, 16


def landlock(folder: str, readable: list[str]) -> None:
    """Read below `readable`, read and write files in `folder`, nothing else. Raises OSError when the kernel cannot."""
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
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
        _check(LIBC.syscall(add, rules, 1, ctypes.create_string_buffer(struct.pack("=Qi", rights, opened)), 0))
        os.close(opened)
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
    limits = {
        "AS": spec["memory_bytes"],
        "CPU": spec["cpu_s"],
        "FSIZE": spec["disk_bytes"],
        "NOFILE": 64,
        "CORE": 0,
        "MEMLOCK": 0,
    }
    for name, most in limits.items():
        number = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(number)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(number, (most, most + (name == "CPU")))  # SIGXCPU first, SIGKILL a second later


def take_away(spec: dict[str, Any]) -> dict[str, str]:
    """Everything above, in the order that works; which of it this machine refused, and how."""
    missing = {}

    def attempt(what: str, function: Any, *arguments: Any) -> None:
        try:
            function(*arguments)
        except (OSError, ValueError, AttributeError) as error:
            missing[what] = str(error)

    attempt("parent's death", lambda: _check(LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)))
    attempt("privileges", lambda: _check(LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)))
    attempt("capabilities", drop_capabilities)
    attempt("files (Landlock)", landlock, spec["folder"], spec["readable"])
    attempt("memory, time, sizes (rlimits)", set_rlimits, spec)
    attempt("network and processes (seccomp)", seccomp)
    if "network and processes (seccomp)" in missing:  # next best, where the user is not root: no process, no thread
        attempt("processes (rlimits)", lambda: resource.setrlimit(resource.RLIMIT_NPROC, (0, 0)))
    return missing


# --- what runs inside ---------------------------------------------------------------------------------------------


def kind_of(error: BaseException) -> str:
    if isinstance(error, MemoryError):
        return "memory"
    if isinstance(error, PermissionError) or (isinstance(error, OSError) and error.errno == 18):  # EXDEV: a link out
        return "forbidden"
    if isinstance(error, OSError) and error.errno in (27, 28):  # EFBIG, ENOSPC
        return "disk"
    if isinstance(error, AssertionError):
        return "wrong_answer"
    if isinstance(error, SystemExit):
        return "exited"
    return "exception"


def run_stdio(source: str) -> str:
    """The solution as a program. The kind of its failure, or nothing."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    sys.argv = ["solution.py"]
    reserve = bytearray(1 << 20)
    try:
        program = compile(source, "solution.py", "exec", LAZY_ANNOTATIONS, dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return "syntax"
    try:
        exec(program, module.__dict__)
        sys.stdout.flush()
    except SystemExit:
        pass  # how many programs end
    except BaseException as error:  # noqa: BLE001 (generated code may raise anything)
        del reserve
        return kind_of(error)
    return ""


def plain(value: Any) -> Any:
    """As JSON with tags for what JSON lacks. Raises TypeError for what is no plain data."""
    if value is None or isinstance(value, (bool, str, float)):
        return str.__str__(value) if isinstance(value, str) else value
    if isinstance(value, int):
        return int.__index__(value) if -(2**63) <= value < 2**63 else {"int": int.__format__(value, "x")}
    kind: Any
    for kind in (tuple, list, set, frozenset):
        if isinstance(value, kind):
            return {"set" if kind is frozenset else kind.__name__: [plain(item) for item in kind.__iter__(value)]}
    if isinstance(value, dict):
        return {"dict": [[plain(key), plain(item)] for key, item in dict.items(value)]}
    if type(value).__module__ == "collections":  # deque
        return {"list": [plain(item) for item in value]}
    if hasattr(value, "tolist"):  # NumPy
        return plain(value.tolist())
    raise TypeError(f"a {type(value).__name__} is no plain data")


def answer(request: dict[str, Any], space: dict[str, Any]) -> dict[str, Any]:
    try:
        if "statement" in request:
            exec(request["statement"], space)
            return {"value": True}
        if "expression" in request:
            found = eval(request["expression"], space)
        else:
            name = request["call"]
            function = space[name] if name in space else getattr(space["Solution"](), name)
            found = function(*request["arguments"])
        return {"value": plain(found)}
    except BaseException as error:  # noqa: BLE001 (generated code may raise anything)
        return {"error": kind_of(error), "why": f"{type(error).__name__}: {error}"[:200]}


def run_calls(source: str, requests: list[dict[str, Any]], report: int) -> str:
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    try:
        program = compile(source, "solution.py", "exec", LAZY_ANNOTATIONS, dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return "syntax"
    try:
        exec(program, module.__dict__)
    except BaseException as error:  # noqa: BLE001 (generated code may raise anything)
        return kind_of(error)
    write(report, {"loaded": True})
    for number, request in enumerate(requests):
        write(report, {"number": number, **answer(request, module.__dict__)})
    return ""


def write(report: int, line: dict[str, Any], dumps: Any = json.dumps, send: Any = os.write) -> None:
    try:
        data = dumps(line).encode() + b"\n"
    except (ValueError, RecursionError, MemoryError) as error:
        data = dumps({"number": line.get("number"), "error": "exception", "why": type(error).__name__}).encode() + b"\n"
    while data:
        data = data[send(report, data) :]


def main() -> None:
    spec = json.loads(sys.argv[1])
    report = spec["report"]
    with open("solution.py", encoding="utf-8", errors="surrogateescape") as file:
        source = file.read()
    requests = []
    if spec["mode"] == "calls":
        with open("requests.json", encoding="utf-8") as file:
            requests = json.load(file)
    sys.path += spec["packages"]
    missing = take_away(spec)
    write(report, {"missing": missing})
    if spec["mode"] == "probe" or (missing and spec["strict"]):
        return
    kind = run_stdio(source) if spec["mode"] == "stdio" else run_calls(source, requests, report)
    write(report, {"end": kind})
    if spec["mode"] == "calls":
        os._exit(0)  # a program's threads are waited for, as Python does


if __name__ == "__main__":
    main()
