"""The system calls of untrusted code, as a seccomp filter that the process and its threads cannot remove.

What Python, glibc and NumPy need is allowed, some of it for certain arguments only. Starting processes, the network,
tracing and kernel queues kill the process with SIGSYS. Every other call fails: with EPERM, or with ENOSYS from Linux
5.1 on, so that libraries fall back to an older call.
"""

from __future__ import annotations

import ctypes
import os
import struct
from typing import NamedTuple

LIBC = ctypes.CDLL(None, use_errno=True)
PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
ARCHES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
KILL, EPERM, ENOSYS, ALLOW = 0x80000000, 0x00050001, 0x00050026, 0x7FFF0000
FIRST_RECENT = 424  # calls since Linux 5.1, with one number on every architecture
X32 = 0x40000000  # x32 numbers the same calls differently

ALLOWED = {  # number on x86_64, number on aarch64 (None: does not exist)
    "read": (0, 63), "write": (1, 64), "readv": (19, 65), "writev": (20, 66), "pread64": (17, 67),
    "pwrite64": (18, 68), "preadv": (295, 69), "pwritev": (296, 70), "lseek": (8, 62), "close": (3, 57),
    "close_range": (436, 436), "dup": (32, 23), "dup2": (33, None), "dup3": (292, 24), "pipe": (22, None),
    "pipe2": (293, 59), "sendfile": (40, 71), "copy_file_range": (326, 285), "fsync": (74, 82),
    "fdatasync": (75, 83), "ftruncate": (77, 46), "creat": (85, None), "getdents": (78, None),
    "getdents64": (217, 61), "getcwd": (79, 17), "chdir": (80, 49), "fchdir": (81, 50), "rename": (82, None),
    "renameat": (264, 38), "renameat2": (316, 276), "unlink": (87, None), "unlinkat": (263, 35), "umask": (95, 166),
    "stat": (4, None), "lstat": (6, None), "fstat": (5, 80), "newfstatat": (262, 79), "statx": (332, 291),
    "access": (21, None), "faccessat": (269, 48), "faccessat2": (439, 439), "readlink": (89, None),
    "readlinkat": (267, 78),
    "poll": (7, None), "ppoll": (271, 73), "select": (23, None), "pselect6": (270, 72), "epoll_create": (213, None),
    "epoll_create1": (291, 20), "epoll_ctl": (233, 21), "epoll_wait": (232, None), "epoll_pwait": (281, 22),
    "eventfd": (284, None), "eventfd2": (290, 19), "recvfrom": (45, 207), "shutdown": (48, 210),
    "getsockname": (51, 204), "getpeername": (52, 205), "getsockopt": (55, 209),
    "mmap": (9, 222), "mprotect": (10, 226), "munmap": (11, 215), "mremap": (25, 216), "msync": (26, 227),
    "brk": (12, 214), "futex": (202, 98), "set_robust_list": (273, 99), "set_tid_address": (218, 96),
    "rseq": (334, 293), "membarrier": (324, 283), "sched_yield": (24, 124), "getcpu": (309, 168),
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "rt_sigpending": (127, 136),
    "rt_sigtimedwait": (128, 137), "rt_sigsuspend": (130, 133), "sigaltstack": (131, 132), "pause": (34, None),
    "alarm": (37, None), "getitimer": (36, 102), "setitimer": (38, 103), "restart_syscall": (219, 128),
    "time": (201, None), "gettimeofday": (96, 169), "clock_gettime": (228, 113), "clock_getres": (229, 114),
    "nanosleep": (35, 101), "clock_nanosleep": (230, 115), "times": (100, 153), "getrusage": (98, 165),
    "getrlimit": (97, 163), "setrlimit": (160, 164), "uname": (63, 160), "getrandom": (318, 278),
    "getpid": (39, 172), "gettid": (186, 178), "getppid": (110, 173), "getpgrp": (111, None), "getuid": (102, 174),
    "geteuid": (107, 175), "getgid": (104, 176), "getegid": (108, 177), "getgroups": (115, 158),
    "getresuid": (118, 148), "getresgid": (120, 150), "wait4": (61, 260), "waitid": (247, 95), "exit": (60, 93),
    "exit_group": (231, 94),
}  # fmt: skip
KILLED = {
    "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281), "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424), "pidfd_getfd": (438, 438), "ptrace": (101, 117), "kcmp": (312, 272),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "unshare": (272, 97), "setns": (308, 268),
    "connect": (42, 203), "bind": (49, 200), "listen": (50, 201), "accept": (43, 202), "accept4": (288, 242),
    "sendmsg": (46, 211), "recvmsg": (47, 212), "sendmmsg": (307, 269), "recvmmsg": (299, 243),
    "io_uring_setup": (425, 425), "shmget": (29, 194), "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "keyctl": (250, 219),
    "add_key": (248, 217), "request_key": (249, 218),
}  # fmt: skip

CLONE_THREAD, PTHREAD_FLAGS, CLONE_DETACHED = (
    0x10000,
    0x3D0F00,
    0x400000,
)  # musl sets the last, Linux ignores it
O_ACCMODE, O_TRUNC, O_TMPFILE, SOCK_FLAGS, ALL_BITS = 3, 0x200, 0x400000, 0x80800, 0xFFFFFFFF
FCNTL_COMMANDS = (
    0,
    1,
    2,
    3,
    4,
    1030,
    1032,
)  # duplicates, flags, size of a pipe; no locks, owners, leases, notices
IOCTL_REQUESTS = (
    0x5401,
    0x802C542A,
    0x5413,
    0x541B,
    0x5421,
    0x5450,
    0x5451,
)  # terminal?, its size, FION*, FIO*CLEX
PRCTL_OPTIONS = (15, 16, 0x53564D41)  # names of threads and of memory
MADVICE = (0, 1, 2, 3, 4, 8, 14, 15)  # NORMAL to DONTNEED, FREE, HUGEPAGE, NOHUGEPAGE


class Condition(NamedTuple):
    """`otherwise` is the action unless (word & mask) is one of the values."""

    word: int  # of 32 bits: 2n and 2n + 1 are the low and the high half of argument n
    mask: int
    values: tuple[int, ...]
    otherwise: int


def conditional_calls(pid: int) -> dict[tuple[int | None, int | None], list[Condition]]:
    """Calls which process `pid` may make if all their conditions hold, by their numbers."""

    def only(argument: int, *values: int, otherwise: int = EPERM) -> list[Condition]:
        return [Condition(2 * argument, ALL_BITS, values, otherwise)]

    def open_flags(
        argument: int,
    ) -> list[Condition]:  # O_TRUNC with O_RDONLY truncates without the right to write
        modes = (0, 1, 2, O_TRUNC | 1, O_TRUNC | 2)
        return [
            Condition(2 * argument, O_ACCMODE | O_TRUNC, modes, EPERM),
            Condition(2 * argument, O_TMPFILE, (0,), EPERM),
        ]

    threads_only = Condition(0, CLONE_THREAD, (CLONE_THREAD,), KILL)
    return {
        (56, 220): [
            threads_only,
            Condition(0, ALL_BITS ^ CLONE_DETACHED, (PTHREAD_FLAGS,), EPERM),
        ],  # clone
        (62, 129): only(0, pid, otherwise=KILL),  # kill
        (234, 131): only(0, pid, otherwise=KILL),  # tgkill
        (302, 261): only(0, 0, pid, otherwise=KILL),  # prlimit64
        (204, 123): only(0, 0, pid),  # sched_getaffinity
        (41, 198): [
            *only(0, 1, otherwise=KILL),
            Condition(0, 0, (1,), EPERM),
        ],  # socket: name services try AF_UNIX
        (53, 199): [
            *only(0, 1),
            Condition(2, ALL_BITS ^ SOCK_FLAGS, (1,), EPERM),
        ],  # socketpair: streams
        (44, 206): [*only(4, 0), Condition(9, ALL_BITS, (0,), EPERM)],  # sendto: without an address
        (2, None): open_flags(1),  # open
        (257, 56): open_flags(2),  # openat
        (72, 25): only(1, *FCNTL_COMMANDS),
        (16, 29): only(1, *IOCTL_REQUESTS),
        (157, 167): only(0, *PRCTL_OPTIONS),
        (28, 233): only(2, *MADVICE),
    }


def filter_rows() -> list[tuple[int, int, int, int]]:
    """The filter of this process as BPF instructions. Raises OSError if its architecture is unknown."""
    machine = os.uname().machine
    if machine not in ARCHES:
        raise OSError(f"no system call numbers for {machine}, only for {', '.join(ARCHES)}")
    column, arch = ARCHES[machine]
    load, equal, at_least, mask, ret = (
        0x20,
        0x15,
        0x35,
        0x54,
        0x06,
    )  # BPF_LD|W|ABS, JMP|JEQ, JMP|JGE, ALU|AND, RET
    rows = [(load, 0, 0, 4), (equal, 1, 0, arch), (ret, 0, 0, KILL)]
    rows += [(load, 0, 0, 0), (at_least, 0, 1, X32), (ret, 0, 0, KILL)]
    for calls, action in ((ALLOWED, ALLOW), (KILLED, KILL)):
        for numbers in calls.values():
            if (number := numbers[column]) is not None:
                rows += [(equal, 0, 1, number), (ret, 0, 0, action)]
    for numbers, conditions in conditional_calls(os.getpid()).items():
        if (number := numbers[column]) is None:
            continue
        body = []
        for word, bits, values, otherwise in conditions:
            body += [(load, 0, 0, 16 + 4 * word), (mask, 0, 0, bits)]
            body += [(equal, len(values) - place, 0, value) for place, value in enumerate(values)]
            body += [(ret, 0, 0, otherwise)]
        rows += [(equal, 0, len(body) + 1, number), *body, (ret, 0, 0, ALLOW)]
    return [*rows, (at_least, 0, 1, FIRST_RECENT), (ret, 0, 0, ENOSYS), (ret, 0, 0, EPERM)]


def install(rows: list[tuple[int, int, int, int]]) -> None:
    """Filter the calls of this process from now on. Raises OSError if the kernel does not support it."""
    code = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *row) for row in rows))
    program = ctypes.create_string_buffer(
        struct.pack("@HxxxxxxP", len(rows), ctypes.addressof(code))
    )
    check(LIBC.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program, 0, 0))


def check(result: int) -> int:
    """The result of a libc call, or its OSError if it is negative."""
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
