"""Restricts the files of untrusted code: a private root with Python and an empty folder, Landlock.

    new mount namespace --tmpfs--> / --bind mounts--> readable paths
                                   `--> the folder: another tmpfs with limited bytes and files

Other files do not exist in this root; even their names, sizes and times are hidden. If the kernel
refuses the namespace (in some containers), Landlock alone denies reading and writing other files,
but not `stat`, and the caller limits the folder's size.
"""

import ctypes
import os
import struct

from megarl.jail.syscalls import LIBC, check

MAX_FILES = 1000  # file limit of the folder
DEVICES = ("/dev/null", "/dev/urandom")
CLONE_NEWNS = 0x20000
CLONE_NEWUSER = 0x10000000
MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 0x40000
MNT_DETACH = 2
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
LANDLOCK_CREATE_RULESET = 444
LANDLOCK_ADD_RULE = 445
LANDLOCK_RESTRICT_SELF = 446
WRITE_FILE = 1 << 1
READ_FILE = 1 << 2
READ_DIR = 1 << 3
REMOVE_FILE = 1 << 5
MAKE_REG = 1 << 8
TRUNCATE = 1 << 14
RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}  # Landlock version -> number of access rights; later: 16
NETWORK = 0b11  # TCP bind and connect, from Landlock version 4
SCOPE = 0b11  # abstract sockets and signals, from Landlock version 6


def enter_mount_namespace() -> bool:
    """Enters a new mount namespace; returns True if this needed a user namespace (without root).

    Raises OSError if the kernel refuses.
    """
    user = os.geteuid()
    group = os.getegid()
    if LIBC.unshare(CLONE_NEWNS) == 0:
        return False
    check(LIBC.unshare(CLONE_NEWNS | CLONE_NEWUSER))
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{user} {user} 1"),
        ("gid_map", f"{group} {group} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    return True


def private_root(folder: str, readable: list[str], disk_bytes: int) -> None:
    """Replaces / by a root with the readable paths, two devices and an empty, writable `folder`.

    Requires a private mount namespace. If the kernel refuses, raises OSError and leaves / and
    `folder` unchanged.
    """
    root = folder  # the new root is mounted here until it replaces /
    _mount("none", "/", "", MS_REC | MS_PRIVATE)
    _mount_tmpfs(root, 1 << 20, 1000)
    try:
        bound = []
        for path in sorted({*readable, *DEVICES}):
            if any(path.startswith(f"{above}/") for above in bound) or not os.path.exists(path):
                continue
            target = root + path
            if os.path.isdir(path):
                os.makedirs(target, exist_ok=True)
            else:
                os.makedirs(os.path.dirname(target), exist_ok=True)
                os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
            _mount(path, target, "", MS_BIND | MS_REC)
            bound.append(path)
        os.makedirs(root + folder)
        _mount_tmpfs(root + folder, disk_bytes, MAX_FILES)
        os.chdir(root)
        check(LIBC.syscall(PIVOT_ROOT[os.uname().machine], b".", b"."))
        check(LIBC.umount2(b".", MNT_DETACH))  # the old root, which lies on top of the new one
        os.chdir("/")
    except (OSError, KeyError) as error:
        LIBC.umount2(os.fsencode(root), MNT_DETACH)
        os.chdir("/")
        raise OSError(f"cannot make a root of its own: {error}") from error


def _mount_tmpfs(folder: str, size_bytes: int, files: int) -> None:
    flags = MS_NOSUID | MS_NODEV | MS_NOEXEC
    _mount("tmpfs", folder, "tmpfs", flags, f"size={size_bytes},nr_inodes={files + 1},mode=700")


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    words = map(os.fsencode, (source, target, kind))
    check(LIBC.mount(*words, ctypes.c_ulong(flags), os.fsencode(options)))


def landlock(folder: str, readable: list[str]) -> None:
    """Restricts this process to reading below `readable`, and to reading and writing in `folder`.

    Raises OSError if the kernel has no Landlock.
    """
    version = check(LIBC.syscall(LANDLOCK_CREATE_RULESET, None, 0, 1))
    known = (1 << RIGHTS.get(version, 16)) - 1
    handled = struct.pack("=Q", known)
    if version >= 4:
        handled += struct.pack("=Q", NETWORK)
    if version >= 6:
        handled += struct.pack("=Q", SCOPE)
    attributes = ctypes.create_string_buffer(handled)
    rules = check(LIBC.syscall(LANDLOCK_CREATE_RULESET, attributes, len(handled), 0))

    allowed = [(path, READ_FILE | READ_DIR) for path in readable]
    allowed += [(folder, READ_FILE | READ_DIR | WRITE_FILE | REMOVE_FILE | MAKE_REG | TRUNCATE)]
    allowed += zip(DEVICES, (READ_FILE | WRITE_FILE, READ_FILE), strict=True)
    for path, rights in allowed:
        if not os.path.exists(path):
            continue
        if os.path.isdir(path):
            rights &= known
        else:
            rights &= READ_FILE | WRITE_FILE
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = ctypes.create_string_buffer(struct.pack("=Qi", rights, descriptor))
        check(LIBC.syscall(LANDLOCK_ADD_RULE, rules, 1, rule, 0))
        os.close(descriptor)
    check(LIBC.syscall(LANDLOCK_RESTRICT_SELF, rules, 0))
    os.close(rules)
