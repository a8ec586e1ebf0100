"""Limits the system calls of untrusted code by a seccomp filter, which the code cannot remove.

Calls that Python, glibc and NumPy need are allowed, some for certain arguments only. Calls to start
processes, use the network, trace or use kernel queues kill the process with SIGSYS. Every other
call fails with EPERM or, if it is newer than Linux 5.0, with ENOSYS, so that libraries fall back to
an older call.
"""

import ctypes
import os
import struct
from typing import NamedTuple

LIBC = ctypes.CDLL(None, use_errno=True)
PR_SET_SECCOMP = 22
SECCOMP_MODE_FILTER = 2
ARCHES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
KILL = 0x80000000
EPERM = 0x00050001
ENOSYS = 0x00050026
ALLOW = 0x7FFF0000
FIRST_RECENT = 424  # from here: calls since Linux 5.1, with the same number on all architectures
X32 = 0x40000000  # x32 calls have other numbers than x86_64 calls


Numbers = tuple[int, int]  # call numbers on x86_64 and aarch64; -1: does not exist
Instruction = tuple[int, int, int, int]  # BPF: (code, jump if true, jump if false, operand)


def _parse_table(text: str) -> dict[str, Numbers]:
    """Parses entries "name x86_64 aarch64"; -1 means that the architecture lacks the call."""
    calls = {}
    for entry in text.split(","):
        name, x86_64, aarch64 = entry.split()
        calls[name] = (int(x86_64), int(aarch64))
    return calls


ALLOWED = _parse_table("""
read 0 63, write 1 64, readv 19 65, writev 20 66, pread64 17 67, pwrite64 18 68, preadv 295 69,
pwritev 296 70, lseek 8 62, close 3 57, close_range 436 436, dup 32 23, dup2 33 -1, dup3 292 24,
pipe 22 -1, pipe2 293 59, sendfile 40 71, copy_file_range 326 285, fsync 74 82, fdatasync 75 83,
ftruncate 77 46, creat 85 -1, getdents 78 -1, getdents64 217 61, getcwd 79 17, chdir 80 49,
fchdir 81 50, rename 82 -1, renameat 264 38, renameat2 316 276, unlink 87 -1, unlinkat 263 35,
umask 95 166, stat 4 -1, lstat 6 -1, fstat 5 80, newfstatat 262 79, statx 332 291, access 21 -1,
faccessat 269 48, faccessat2 439 439, readlink 89 -1, readlinkat 267 78,

poll 7 -1, ppoll 271 73, select 23 -1, pselect6 270 72, epoll_create 213 -1, epoll_create1 291 20,
epoll_ctl 233 21, epoll_wait 232 -1, epoll_pwait 281 22, eventfd 284 -1, eventfd2 290 19,
recvfrom 45 207, shutdown 48 210, getsockname 51 204, getpeername 52 205, getsockopt 55 209,

mmap 9 222, mprotect 10 226, munmap 11 215, mremap 25 216, msync 26 227, brk 12 214, futex 202 98,
set_robust_list 273 99, set_tid_address 218 96, rseq 334 293, membarrier 324 283,
sched_yield 24 124, getcpu 309 168,

rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139, rt_sigpending 127 136,
rt_sigtimedwait 128 137, rt_sigsuspend 130 133, sigaltstack 131 132, pause 34 -1, alarm 37 -1,
getitimer 36 102, setitimer 38 103, restart_syscall 219 128, time 201 -1, gettimeofday 96 169,
clock_gettime 228 113, clock_getres 229 114, nanosleep 35 101, clock_nanosleep 230 115,
times 100 153, getrusage 98 165,

getrlimit 97 163, setrlimit 160 164, uname 63 160, getrandom 318 278, getpid 39 172, gettid 186 178,
getppid 110 173, getpgrp 111 -1, getuid 102 174, geteuid 107 175, getgid 104 176, getegid 108 177,
getgroups 115 158, getresuid 118 148, getresgid 120 150, wait4 61 260, waitid 247 95, exit 60 93,
exit_group 231 94
""")
KILLED = _parse_table("""
fork 57 -1, vfork 58 -1, execve 59 221, execveat 322 281, tkill 200 130, rt_sigqueueinfo 129 138,
rt_tgsigqueueinfo 297 240, pidfd_open 434 434, pidfd_send_signal 424 424, pidfd_getfd 438 438,
ptrace 101 117, kcmp 312 272, process_vm_readv 310 270, process_vm_writev 311 271, unshare 272 97,
setns 308 268, connect 42 203, bind 49 200, listen 50 201, accept 43 202, accept4 288 242,
sendmsg 46 211, recvmsg 47 212, sendmmsg 307 269, recvmmsg 299 243, io_uring_setup 425 425,
shmget 29 194, msgget 68 186, semget 64 190, mq_open 240 180, bpf 321 280, perf_event_open 298 241,
userfaultfd 323 282, keyctl 250 219, add_key 248 217, request_key 249 218
""")

CLONE_THREAD = 0x10000
PTHREAD_FLAGS = 0x3D0F00
CLONE_DETACHED = 0x400000  # musl sets it, Linux ignores it
O_ACCMODE = 3
O_TRUNC = 0x200
O_TMPFILE = 0x400000
SOCK_FLAGS = 0x80800
ALL_BITS = 0xFFFFFFFF
# excludes locks, owners, leases and notifications
FCNTL_COMMANDS = (
    0,  # F_DUPFD
    1,  # F_GETFD
    2,  # F_SETFD
    3,  # F_GETFL
    4,  # F_SETFL
    1030,  # F_DUPFD_CLOEXEC
    1032,  # F_GETPIPE_SZ
)
IOCTL_REQUESTS = (
    0x5401,  # TCGETS: is it a terminal?
    0x802C542A,  # TCGETS2
    0x5413,  # TIOCGWINSZ
    0x541B,  # FIONREAD
    0x5421,  # FIONBIO
    0x5450,  # FIONCLEX
    0x5451,  # FIOCLEX
)
PRCTL_OPTIONS = (
    15,  # PR_SET_NAME: sets a thread's name
    16,  # PR_GET_NAME
    0x53564D41,  # PR_SET_VMA: names a memory area
)
MADVICE = (
    0,  # MADV_NORMAL
    1,  # MADV_RANDOM
    2,  # MADV_SEQUENTIAL
    3,  # MADV_WILLNEED
    4,  # MADV_DONTNEED
    8,  # MADV_FREE
    14,  # MADV_HUGEPAGE
    15,  # MADV_NOHUGEPAGE
)


class Condition(NamedTuple):
    """A check of an argument: unless (word & mask) is one of `values`, the filter returns
    `otherwise`.
    """

    word: int  # index of a 32-bit word: 2n and 2n + 1 are the low and the high half of argument n
    mask: int
    values: tuple[int, ...]
    otherwise: int


NEVER = (0, 0, (1,))  # a condition that no call meets: word & 0 is never 1


def conditional_calls(pid: int) -> dict[Numbers, list[Condition]]:
    """Returns {call numbers: conditions}: process `pid` may make a call if all conditions hold."""

    def only(argument: int, *values: int, otherwise: int = EPERM) -> list[Condition]:
        return [Condition(2 * argument, ALL_BITS, values, otherwise)]

    def open_flags(argument: int) -> list[Condition]:
        # excludes O_TRUNC with O_RDONLY, which truncates without the right to write
        modes = (0, 1, 2, O_TRUNC | 1, O_TRUNC | 2)
        return [
            Condition(2 * argument, O_ACCMODE | O_TRUNC, modes, EPERM),
            Condition(2 * argument, O_TMPFILE, (0,), EPERM),
        ]

    threads_only = Condition(0, CLONE_THREAD, (CLONE_THREAD,), KILL)
    as_pthreads = Condition(0, ALL_BITS ^ CLONE_DETACHED, (PTHREAD_FLAGS,), EPERM)
    stream_only = Condition(2, ALL_BITS ^ SOCK_FLAGS, (1,), EPERM)
    return {
        (56, 220): [threads_only, as_pthreads],  # clone
        (62, 129): only(0, pid, otherwise=KILL),  # kill
        (234, 131): only(0, pid, otherwise=KILL),  # tgkill
        (302, 261): only(0, 0, pid, otherwise=KILL),  # prlimit64
        (204, 123): only(0, 0, pid),  # sched_getaffinity
        # socket: AF_UNIX fails instead of killing, because name services try it
        (41, 198): [*only(0, 1, otherwise=KILL), Condition(*NEVER, EPERM)],
        (53, 199): [*only(0, 1), stream_only],  # socketpair
        (44, 206): [*only(4, 0), Condition(9, ALL_BITS, (0,), EPERM)],  # sendto: without an address
        (2, -1): open_flags(1),  # open
        (257, 56): open_flags(2),  # openat
        (72, 25): only(1, *FCNTL_COMMANDS),  # fcntl
        (16, 29): only(1, *IOCTL_REQUESTS),  # ioctl
        (157, 167): only(0, *PRCTL_OPTIONS),  # prctl
        (28, 233): only(2, *MADVICE),  # madvise
    }


def filter_rows() -> list[Instruction]:
    """Returns the filter for this process as BPF instructions.

    Raises OSError if the architecture is unknown.
    """
    machine = os.uname().machine
    if machine not in ARCHES:
        raise OSError(f"no system call numbers for {machine}, only for {', '.join(ARCHES)}")
    column, arch = ARCHES[machine]
    load = 0x20  # BPF_LD | W | ABS
    equal = 0x15  # BPF_JMP | JEQ
    at_least = 0x35  # BPF_JMP | JGE
    mask = 0x54  # BPF_ALU | AND
    ret = 0x06  # BPF_RET
    rows = [(load, 0, 0, 4), (equal, 1, 0, arch), (ret, 0, 0, KILL)]
    rows += [(load, 0, 0, 0), (at_least, 0, 1, X32), (ret, 0, 0, KILL)]
    calls = {
        **dict.fromkeys(ALLOWED.values(), ()),
        **dict.fromkeys(KILLED.values(), (Condition(*NEVER, KILL),)),
        **conditional_calls(os.getpid()),
    }
    for numbers, conditions in calls.items():
        number = numbers[column]
        if number < 0:
            continue
        body = []
        for word, bits, values, otherwise in conditions:
            body += [(load, 0, 0, 16 + 4 * word), (mask, 0, 0, bits)]
            body += [(equal, len(values) - place, 0, value) for place, value in enumerate(values)]
            body += [(ret, 0, 0, otherwise)]
        rows += [(equal, 0, len(body) + 1, number), *body, (ret, 0, 0, ALLOW)]
    return [*rows, (at_least, 0, 1, FIRST_RECENT), (ret, 0, 0, ENOSYS), (ret, 0, 0, EPERM)]


def install(rows: list[Instruction]) -> None:
    """Installs a filter for all later calls of this process. Raises OSError if it cannot."""
    code = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *row) for row in rows))
    header = struct.pack("@HxxxxxxP", len(rows), ctypes.addressof(code))
    program = ctypes.create_string_buffer(header)
    check(LIBC.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program, 0, 0))


def check(result: int) -> int:
    """Returns the result of a libc call. Raises OSError with the errno if it is negative."""
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return result
