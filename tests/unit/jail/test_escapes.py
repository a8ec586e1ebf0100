"""Every way out of the jail that was tried, with a root of its own and with Landlock alone: each is a short program."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megarl.jail import jailed, sandbox, syscalls
from megarl.jail.sandbox import Limits, missing_limits
from tests.unit.jail.crippled import (
    NO_NAMESPACE,
    NO_OWN_USER,
    NO_PIVOT_ROOT,
    PLAIN_USER,
    USER_NAMESPACE,
    crippled_server,
)
from tests.unit.jail.programs import run_program

pytestmark = pytest.mark.skipif(
    bool(missing_limits()), reason=f"cannot enforce limits: {missing_limits()}"
)

LIMITS = Limits(time_s=3.0, memory_bytes=128 << 20, disk_bytes=4 << 20)
PRELUDE = """
import ctypes, errno, fcntl, mmap, os, select, signal, socket, struct, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
DGRAM, STREAM, UNIX = socket.SOCK_DGRAM, socket.SOCK_STREAM, socket.AF_UNIX
def call(number, *arguments):
    words = [ctypes.c_long(word) if isinstance(word, int) else word for word in arguments]
    result = libc.syscall(ctypes.c_long(NUMBERS.get(number, number)), *words)
    print(errno.errorcode[ctypes.get_errno()] if result < 0 else f"OK {result}")
    return result
def pair(kind=STREAM):
    return socket.socketpair(UNIX, kind)
def machine_code(code):
    memory = mmap.mmap(-1, 4096, prot=7)
    memory.write(code)
    return ctypes.CFUNCTYPE(ctypes.c_long)(ctypes.addressof(ctypes.c_char.from_buffer(memory)))()
def bare_threads(count):  # that share one stack, which holds the address of a loop around pause
    code = mmap.mmap(-1, 4096, prot=7)
    code.write(bytes.fromhex('b822000000 0f05 ebf7'))
    address = ctypes.addressof(ctypes.c_char.from_buffer(code))
    stack, number = (ctypes.c_long * 8)(*[address] * 8), ctypes.create_string_buffer(8)
    bare_threads.memory = code, stack, number  # on a busy machine some begin after the return
    return sum(libc.syscall(56, 0x3d0f00, ctypes.byref(stack), number, number, 0) > 0 for _ in range(count))
def start_threads(count):
    for number in range(count):
        try:
            threading.Thread(target=time.sleep, args=(9,), daemon=True).start()
        except RuntimeError:
            return number
def is_open(number):
    try:
        return bool(os.fstat(number))
    except OSError:
        return False
def hide(how):
    held = []
    for number in range(40):
        held.append(how(number))
        os.write(held[-1], b'x' * (4 << 20))
    time.sleep(1)
    print('LEAK', sum(os.fstat(one).st_blocks for one in held) * 512)
try:
    exec(ATTEMPT)
except Exception as error:
    print(type(error).__name__)
"""
OTHER_CALLS = {  # that the filter does not name
    "getxattr": (191, 8), "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "fallocate": (285, 47),
    "file_getattr": (468, 468), "file_setattr": (469, 469), "inotify_init1": (294, 26), "fanotify_init": (300, 262),
    "listmount": (458, 458), "statmount": (457, 457), "io_setup": (206, 0), "memfd_create": (319, 279),
    "memfd_secret": (447, 447), "clone3": (435, 435), "mount": (165, 40), "open_tree": (428, 428),
    "fsopen": (430, 430), "move_mount": (429, 429), "chroot": (161, 51), "pivot_root": (155, 41), "syslog": (103, 116),
    "sethostname": (170, 161), "reboot": (169, 142), "personality": (135, 92), "process_mrelease": (448, 448),
    "process_madvise": (440, 440), "pkey_alloc": (330, 289), "mseal": (462, 462), "get_robust_list": (274, 100),
    "move_pages": (279, 239), "quotactl": (179, 60), "swapon": (167, 224), "acct": (163, 89), "iopl": (172, None),
    "init_module": (175, 105), "statfs": (137, 43), "sysinfo": (99, 179), "timer_create": (222, 107),
    "fchmodat2": (452, 452), "mincore": (27, 232), "capset": (126, 91), "setuid": (105, 146), "seccomp": (317, 277),
    "landlock_create_ruleset": (444, 444), "flock": (73, 32), "settimeofday": (164, 170), "openat2": (437, 437),
    "clone": (56, 220), "fcntl": (72, 25), "ioctl": (16, 29), "prctl": (157, 167), "socketpair": (53, 199),
    "socket": (41, 198), "sendto": (44, 206), "kill": (62, 129), "prlimit64": (302, 261),
    "sched_getaffinity": (204, 123),
    "preadv2": (327, 286), "splice": (275, 76), "setpriority": (141, 140), "getpriority": (140, 141),
}  # fmt: skip
NUMBERS = {
    name: numbers[syscalls.ARCHES[os.uname().machine][0]]
    for name, numbers in (syscalls.KILLED | syscalls.ALLOWED | OTHER_CALLS).items()
}

NO_FILE = "PermissionError|FileNotFoundError"  # with Landlock alone it is there, and forbidden
PYTHON = Path(sys.executable).resolve()
LISTENER = "b'\\0' + b'ABSTRACT'"
NEW_FILE = "os.open(f'f{n}', os.O_CREAT | os.O_RDWR)"
ATTEMPTS = {
    # --- files
    "read": ("print(open('OUTSIDE').read())", NO_FILE),
    "read by O_PATH": ("d = os.open('OUTSIDE', os.O_PATH); print(open(f'/proc/self/fd/{d}').read())", NO_FILE),
    "read by a folder's O_PATH": ("d = os.open('HERE', os.O_PATH); os.open('canary', 0, dir_fd=d)", NO_FILE),
    "chdir, read": ("os.chdir('HERE'); print(open('canary').read())", NO_FILE),
    "openat2": ("call('openat2', -100, b'OUTSIDE', bytes(24), 24)", "ENOSYS"),
    "readlink of the parent's": ("print(os.readlink('/proc/PARENT/cwd'), os.readlink('/proc/PARENT/exe'))", NO_FILE),
    "readlink of its own": ("print(os.readlink('/proc/self/exe'))", f"{PYTHON}|FileNotFoundError"),
    "list": ("print(os.listdir('HERE'))", NO_FILE),
    "list /": ("print(os.listdir('/'))", "PermissionError"),
    "write": ("open('OUTSIDE', 'w').write('x')", NO_FILE),
    "write into Python": ("open('SITE/evil.py', 'w').write('x')", NO_FILE),
    "rename out": ("open('a', 'w'); os.rename('a', 'HERE/a')", "OSError|" + NO_FILE),
    "hard link in": ("os.link('OUTSIDE', 'mine'); print(open('mine').read())", NO_FILE),
    "symbolic link in": ("os.symlink('OUTSIDE', 'mine'); print(open('mine').read())", NO_FILE),
    "environment": ("import os; print('SECRET' in os.environ)", "False"),
    "parent's environment": ("print(open('/proc/PARENT/environ').read())", NO_FILE),
    "own environment": ("print(open('/proc/self/environ').read())", NO_FILE),
    "parent's memory": ("print(open('/proc/PARENT/mem', 'rb').read())", NO_FILE),
    "/dev/tty": ("os.open('/dev/tty', os.O_RDWR)", NO_FILE),
    "other jails' folders": ("print(os.listdir('TEMPORARY'))", "PermissionError"),
    "the jail's source": ("print(open('SOURCE').read())", NO_FILE),
    "open_by_handle_at": ("call('open_by_handle_at', -100, bytes(64), 0)", "EPERM"),
    "name_to_handle_at": ("call('name_to_handle_at', -100, b'OUTSIDE', bytes(136), bytes(8), 0)", "EPERM"),
    "getxattr": ("call('getxattr', b'OUTSIDE', b'user.note', bytes(64), 64)", "EPERM"),
    "file_setattr": ("call('file_setattr', -100, b'OUTSIDE', bytes(24), 24, 0)", "ENOSYS"),
    "file_getattr": ("call('file_getattr', -100, b'OUTSIDE', bytes(24), 24, 0)", "ENOSYS"),
    "a call of the future": ("call(700, 0, 0)", "ENOSYS"),
    "chmod": ("os.chmod('OUTSIDE', 0)", "PermissionError"),
    "fchmodat2": ("call('fchmodat2', -100, b'OUTSIDE', 0, 0)", "ENOSYS"),
    "utime": ("os.utime('OUTSIDE')", "PermissionError"),
    "truncate": ("os.truncate('OUTSIDE', 0)", "PermissionError"),
    "inotify": ("call('inotify_init1', 0)", "EPERM"),
    "fanotify": ("call('fanotify_init', 0x200, 0)", "EPERM"),
    "dnotify, lease, lock": ("for c in (1026, 1024, 6): call('fcntl', 0, c, 0)", "EPERM"),
    "flock": ("call('flock', os.open('SITE/numpy/version.py', 0), 2)", "EPERM"),
    "page cache": ("call('mincore', 0, 4096, bytes(8)); call('preadv2', 0, 0, 0, 0, 0, 8)", "EPERM"),
    "listmount, statmount": ("call('listmount', bytes(32), bytes(64), 8, 0); call('statmount')", "ENOSYS"),
    "FS_IOC_SETFLAGS": ("call('ioctl', os.open('SITE/numpy/version.py', 0), 0x40086602, bytes(8))", "EPERM"),
    "FS_IOC_SETVERSION": ("call('ioctl', os.open('SITE/numpy/version.py', 0), 0x40087602, bytes(8))", "EPERM"),
    "FS_IOC_ENABLE_VERITY": ("call('ioctl', os.open('SITE/numpy/version.py', 0), 0x40806685, bytes(128))", "EPERM"),
    "mkfifo": ("os.mkfifo('fifo')", "PermissionError"),
    "mkdir": ("os.mkdir('deep')", "PermissionError"),
    "a packaged file": ("print(open('SITE/numpy/version.py').read()[:0])", ""),
    "shared memory file": ("open('/dev/shm/evil', 'w')", NO_FILE),
    "memfd_create": ("os.memfd_create('a')", "PermissionError"),
    "memfd_secret": ("call('memfd_secret', 0)", "ENOSYS"),
    "write to its input": ("os.ftruncate(0, 1 << 30)", "OSError|PermissionError"),
    # --- sizes
    "fallocate KEEP_SIZE": ("call('fallocate', os.open('f', 66), 1, 0, 64 << 20)", "EPERM"),
    "unlinked files": (f"hide(lambda n: ({NEW_FILE}, os.unlink(f'f{{n}}'))[0])", "disk|OSError"),
    "O_TMPFILE": ("hide(lambda n: os.open('.', os.O_TMPFILE | os.O_RDWR))", "PermissionError"),
    "many files": ("for n in range(1100): open(str(n), 'w')\ntime.sleep(9)", "disk|OSError|timeout"),
    "990 files": ("for n in range(990): open(str(n), 'w')\ntime.sleep(9)", "timeout"),
    "sparse files": ("for n in range(20): os.ftruncate(os.open(str(n), 66), 4 << 20)", ""),
    "disk full": ("for n in range(4): open(str(n), 'w').write('x' * (2 << 20))\ntime.sleep(1)", "disk|OSError"),
    "io_setup": ("call('io_setup', 60000, bytes(8))", "EPERM"),
    "pipes of 1 MB": ("fcntl.fcntl(os.pipe()[0], 1031, 1 << 20)", "PermissionError"),
    "200 threads": ("threading.stack_size(1 << 16); print(start_threads(200))", str(jailed.MAX_THREADS - 1)),
    # --- other sockets
    **{
        f"socket {family}, {kind}": (f"socket.socket({family}, {kind})", "forbidden")
        for family, kind in ((2, 1), (2, 2), (10, 1), (16, 3), (17, 3), (38, 5), (40, 1))
    },
    "unix socket": ("socket.socket(UNIX)", "PermissionError"),
    "unix socket, high bits": ("call('socket', 0x1_0000_0001, 1, 0)", "EPERM"),
    "datagram pair to abstract": (f"pair(DGRAM)[0].sendto(b'SENT', {LISTENER})", "PermissionError"),
    "datagram pair to a path": ("pair(DGRAM)[0].sendto(b'SENT', 'HERE/listener')", "PermissionError"),
    "datagram pair, connected": (f"a = pair(DGRAM)[0]; a.connect({LISTENER}); a.send(b'SENT')", "PermissionError"),
    "SEQPACKET, RAW, other flags": ("for k in (5, 3, 1 << 32 | 2): call('socketpair', 1, k, 0, bytes(8))", "EPERM"),
    "open file by SCM_RIGHTS": ("a, b = pair(); socket.recv_fds(a, 16, 4)", "forbidden"),
    "sent file by SCM_RIGHTS": ("a, b = pair(); socket.send_fds(a, [b'x'], [0])", "forbidden"),
    "stream pair, connect": (f"pair()[0].connect({LISTENER})", "forbidden"),
    "stream pair, bind": ("pair()[0].bind('mine')", "forbidden"),
    "stream pair, listen": ("pair()[0].listen()", "forbidden"),
    "stream pair, sendto": (f"pair()[0].sendto(b'SENT', {LISTENER})", "PermissionError"),
    "sendto, high half of the address": ("call('sendto', pair()[0].fileno(), b'x', 1, 0, 1 << 32, 16)", "EPERM"),
    "connect(AF_UNSPEC)": ("libc.connect(pair()[0].fileno(), bytes(16), 16)", "forbidden"),
    "stream pair": ("a, b = pair(); a.sendall(b'1'); print(b.recv(1))", "b'1'"),
    "io_uring": ("call('io_uring_setup', 8, bytes(128))", "forbidden"),
    # --- processes
    "fork": ("os.fork()", "forbidden"),
    "vfork": ("libc.vfork()", "forbidden"),
    "clone(SIGCHLD)": ("call('clone', 17, 0)", "forbidden"),
    "clone(THREAD|NEWUSER)": ("call('clone', 0x10013d00 | 0x10000 | 0x10000000, 0)", "EPERM"),
    "clone(THREAD) without its own memory": ("call('clone', 0x10000, 0)", "EPERM"),
    "clone, high bits": ("call('clone', 1 << 32 | 17, 0)", "forbidden"),
    "clone3": ("call('clone3', bytes(88), 88)", "ENOSYS"),
    "execve": ("os.execv('/bin/sh', ['sh'])", "forbidden"),
    "execveat": ("call('execveat', 0, b'', 0, 0, 0x1000)", "forbidden"),
    "setsid": ("os.setsid()", "PermissionError"),
    "setpgid": ("os.setpgid(0, 0)", "PermissionError"),
    "ptrace": ("libc.ptrace(16, PARENT, 0, 0)", "forbidden"),
    "process_vm_readv": ("call('process_vm_readv', PARENT, bytes(16), 1, bytes(16), 1, 0)", "forbidden"),
    "kill": ("os.kill(PARENT, 0)", "forbidden"),
    "kill all": ("os.kill(-1, 0)", "forbidden"),
    "kill the group": ("os.kill(0, 0)", "forbidden"),
    "killpg": ("os.killpg(os.getpgid(0), 0)", "PermissionError|forbidden"),
    "pidfd": ("os.pidfd_open(PARENT)", "forbidden"),
    "rt_sigqueueinfo": ("call('rt_sigqueueinfo', PARENT, 0, bytes(128))", "forbidden"),
    "F_SETOWN": ("fcntl.fcntl(0, fcntl.F_SETOWN, PARENT)", "PermissionError"),
    "F_SETOWN, high bits": ("call('fcntl', 0, 1 << 32 | 8, PARENT)", "EPERM"),
    "FIOSETOWN, SIOCSPGRP, TIOCSTI": ("for r in (0x8901, 0x8902, 0x5412): call('ioctl', 0, r, bytes(8))", "EPERM"),
    "timer_create": ("call('timer_create', 0, bytes(64), bytes(8))", "EPERM"),
    "PR_SET_PDEATHSIG": ("call('prctl', 1, 0, 0, 0, 0)", "EPERM"),
    "PR_SET_DUMPABLE": ("call('prctl', 4, 0, 0, 0, 0)", "EPERM"),
    "PR_SET_NAME": ("call('prctl', 15, b'name', 0, 0, 0)", "OK 0"),
    "scheduler": ("os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))", "PermissionError"),
    "parent's scheduler": ("os.sched_setaffinity(PARENT, {0})", "PermissionError"),
    "parent's affinity": ("call('sched_getaffinity', PARENT, 8, bytes(8))", "EPERM"),
    "priority": ("call('setpriority', 0, PARENT, 5); call('getpriority', 0, PARENT)", "EPERM"),
    "raise a limit": ("import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1))", "ValueError"),
    "parent's limit": ("import resource; resource.prlimit(PARENT, 0, (1, 1))", "forbidden"),
    "seconds of CPU": ("import resource as r; signal.signal(24, print); r.setrlimit(0, (9, 9))", "ValueError"),
    "get_robust_list": ("call('get_robust_list', PARENT, bytes(8), bytes(8))", "EPERM"),
    "move_pages": ("call('move_pages', PARENT, 0, 0, 0, 0, 0)", "EPERM"),
    "kcmp": ("call('kcmp', PARENT, PARENT, 0, 0, 0)", "forbidden"),
    "process_mrelease, process_madvise": ("call('process_mrelease', 0, 0); call('process_madvise')", "ENOSYS"),
    "kills itself by signal 40": ("os.kill(os.getpid(), 40)", "crashed"),
    "signals ignored": ("for s in {*range(1, 32)} - {9, 19}: signal.signal(s, 1)\ntime.sleep(9)", "timeout"),
    "main ends, a thread sleeps": ("threading.Thread(target=time.sleep, args=(9,)).start()", "timeout"),
    # --- the machine
    "unshare": ("libc.unshare(0x10000000)", "forbidden"),
    "setns": ("call('setns', 0, 0)", "forbidden"),
    "mount": ("call('mount', b'tmpfs', b'.', b'tmpfs', 0, 0)", "EPERM"),
    "new mounts": ("call('open_tree', -100, b'.', 1); call('fsopen', b'tmpfs', 0); call('move_mount')", "ENOSYS"),
    "chroot, pivot_root": ("call('chroot', b'.'); call('pivot_root', b'.', b'.')", "EPERM"),
    "bpf": ("call('bpf', 0, bytes(64), 64)", "forbidden"),
    "keys": ("call('keyctl', 0, -3, 0, 0, 0)", "forbidden"),
    "perf_event_open": ("call('perf_event_open', bytes(128), 0, -1, -1, 0)", "forbidden"),
    "userfaultfd": ("call('userfaultfd', 0)", "forbidden"),
    "shmget": ("call('shmget', 0, 4096, 0o1600)", "forbidden"),
    "mq_open": ("call('mq_open', b'evil', 66, 0o600, 0)", "forbidden"),
    "syslog": ("call('syslog', 3, bytes(64), 64)", "EPERM"),
    "setuid, capset": ("call('setuid', 65534); call('capset', bytes(8), bytes(24))", "EPERM"),
    "seccomp, Landlock": ("call('seccomp', 1, 0, bytes(16)); call('landlock_create_ruleset', 0, 0, 1)", "EPERM ENOSYS"),
    "clock": ("call('settimeofday', bytes(16), 0)", "EPERM"),
    "sethostname, reboot": ("call('sethostname', b'a', 1); call('reboot', 0, 0, 0, 0)", "EPERM"),
    "personality": ("call('personality', -1)", "EPERM"),
    "pkey_alloc, mseal": ("call('pkey_alloc', 0, 0); call('mseal', 0, 0, 0)", "EPERM ENOSYS"),
    "quotactl, swapon, acct": ("call('quotactl'); call('swapon', b'a', 0); call('acct', 0)", "EPERM"),
    "init_module": ("call('init_module', 0, 0, 0)", "EPERM"),
    "statfs, sysinfo": ("call('statfs', b'/', bytes(256)); call('sysinfo', bytes(256))", "EPERM"),
    "load average": ("print(os.getloadavg())", "OSError"),
    "descriptors": ("print([n for n in range(64) if is_open(n)][:3], sum(map(is_open, range(64))))", "[0, 1, 2] 4"),
    "specification": (
        "f = sys._getframe()\nwhile f:\n    if 'cpu' + '_s' in str(f.f_locals): print('LEAK', f)\n    f = f.f_back\n"
        "print(sys.argv, sys.orig_argv)",
        "['solution.py'] ['']",
    ),
}  # fmt: skip
if os.uname().machine == "x86_64":
    ATTEMPTS |= {
        "int 0x80": (r"print(machine_code(b'\xb8\x14\0\0\0\xcd\x80\xc3'))", "forbidden"),
        "x32": ("call(0x40000000 | 39)", "forbidden"),
        "iopl": ("call('iopl', 3)", "EPERM"),
        "3,000 threads by clone": ("print(bare_threads(3000))", str(jailed.MAX_THREADS - 1)),
    }
WITH_OWN_ROOT = {  # Landlock does not cover them
    "stat": ("print(os.stat('OUTSIDE'))", "FileNotFoundError"),
    "lstat, statx of folders": ("print(os.path.isdir('HERE'), os.path.isdir('/etc/ssl'))", "False"),
    "stat above the root": ("print(os.stat('/..OUTSIDE'))", "FileNotFoundError"),
    "access": (
        "print(os.access('OUTSIDE', 0), os.path.exists('OUTSIDE'), os.path.exists('/root/.bashrc'))",
        "False",
    ),
    "chdir": ("os.chdir('HERE')", "FileNotFoundError"),
    "/proc, /sys": ("print(os.path.exists('/proc/self'), os.path.exists('/sys'))", "False"),
}


@pytest.fixture(scope="module")
def outside(tmp_path_factory) -> Iterator[Path]:
    """A folder with a file and two sockets that answer."""
    folder = tmp_path_factory.mktemp("outside")
    (folder / "canary").write_text("CANARY")
    os.setxattr(folder / "canary", b"user.note", b"CANARY")
    listeners = [socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(2)]
    for listener, name in zip(listeners, (str(folder / "listener"), f"\0{folder}"), strict=True):
        listener.bind(name)
        listener.setblocking(False)
    yield folder
    for listener in listeners:
        with pytest.raises(BlockingIOError):  # nothing arrived
            listener.recv(100)
        listener.close()


def run_all(attempts: dict[str, tuple[str, str]], outside: Path) -> dict[str, str]:
    """What each attempt came to, if it is none of the expected outcomes."""
    places = {
        "OUTSIDE": str(outside / "canary"), "HERE": str(outside), "ABSTRACT": str(outside), "PARENT": str(os.getpid()),
        "TEMPORARY": tempfile.gettempdir(),
        "SITE": sysconfig.get_paths()["purelib"], "SOURCE": jailed.__file__,
    }  # fmt: skip

    def outcome(attempt: str) -> str:
        for name, place in places.items():
            attempt = attempt.replace(name, place)
        run = run_program(f"NUMBERS, ATTEMPT = {NUMBERS}, {attempt!r}\n{PRELUDE}", "", LIMITS)
        return run.kind or " ".join(dict.fromkeys(run.output.decode().split()))

    before = (outside / "canary").stat()
    with ThreadPoolExecutor(8) as pool:
        outcomes = dict(
            zip(
                attempts,
                pool.map(outcome, [attempt for attempt, _ in attempts.values()]),
                strict=True,
            )
        )
    assert (outside / "canary").stat() == before
    assert sorted(file.name for file in outside.iterdir()) == ["canary", "listener"]
    return {
        name: found for name, found in outcomes.items() if found not in attempts[name][1].split("|")
    }


MACHINES = {  # what of the jail works there; as for a plain user, who may not read Python's folder below /root here
    "root": (),
    "a user namespace": (USER_NAMESPACE,),
    "a plain user": (PLAIN_USER,),
    "no root of its own": (NO_PIVOT_ROOT,),
    "Landlock alone": (NO_NAMESPACE,),
}
HAS_NAMESPACES = (
    subprocess.run(["unshare", "-Urm", "true"], stderr=subprocess.DEVNULL).returncode == 0
)
HAVE_ROOTS = ("root", "a user namespace", "a plain user")
SHORT = ("root", "Landlock alone")
IMPORTED = (
    "ctypes",
    "errno",
    "fcntl",
    "mmap",
    "resource",
    "select",
    "signal",
    "socket",
    "struct",
    "threading",
)


@pytest.mark.parametrize(
    "machine",
    [pytest.param(name, marks=() if name in SHORT else pytest.mark.long) for name in MACHINES],
)
def test_nothing_escapes(outside, monkeypatch, tmp_path, machine):
    if machine == "a plain user" and os.geteuid():
        pytest.skip("needs root, to become another user")
    monkeypatch.setenv("SECRET", "CANARY")
    server = crippled_server(tmp_path, *MACHINES[machine], modules=IMPORTED)
    monkeypatch.setattr(sandbox, "SERVER", server)
    has_own_root = (
        run_program("import os; print(os.path.exists('/proc/self'))", "", LIMITS).output
        == b"False\n"
    )
    assert has_own_root == (machine in HAVE_ROOTS and HAS_NAMESPACES)
    assert run_all(ATTEMPTS | (WITH_OWN_ROOT if has_own_root else {}), outside) == {}
    server.stop()


def test_threads_are_counted_where_the_kernel_does_not(monkeypatch, tmp_path):
    """As for a plain user without namespaces, whose other processes RLIMIT_NPROC counts as well."""
    monkeypatch.setattr(sandbox, "SERVER", crippled_server(tmp_path, NO_NAMESPACE, NO_OWN_USER))
    code = "import threading, time\nthreading.stack_size(1 << 16)\n"
    code += "for _ in range({}): threading.Thread(target=time.sleep, args=({},)).start()"
    assert run_program(code.format(jailed.MAX_THREADS, 9), "", LIMITS).kind == "threads"
    assert run_program(code.format(jailed.MAX_THREADS - 1, 0.4), "", LIMITS).kind == ""
