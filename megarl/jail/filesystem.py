"""The files of untrusted code: a root of its own with Python and an empty folder, and Landlock over it.

    new mount namespace --tmpfs--> / --bind mounts--> what is readable
                                   `--> the folder: another tmpfs, whose bytes and files the kernel limits

Nothing else exists there, not even names, sizes and times of other files. Where the kernel refuses the namespace (in
some containers), Landlock alone denies reading and writing other files, but not `stat`; the caller measures the folder.
"""

from __future__ import annotations

import ctypes
import os
import struct

from megarl.jail.syscalls import LIBC, check

MAX_FILES = 1000  # in the folder
DEVICES = ("/dev/null", "/dev/urandom")
CLONE_NEWNS, CLONE_NEWUSER = 0x20000, 0x10000000
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE, MNT_DETACH = (
    2,
    4,
    8,
    0x1000,
    0x4000,
    0x40000,
    2,
)
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}


def enter_mount_namespace() -> bool:
    """Returns whether this took a user namespace, as it does without root. Raises OSError if the kernel refuses."""
    user, group = os.geteuid(), os.getegid()
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
    """Replace / by a root with the readable paths, two devices and `folder`, empty and writable.

    Needs a mount namespace. Raises OSError, and leaves / and `folder` as they were, if the kernel refuses.
    """
    root = folder  # the new root is built on it
    _mount("none", "/", "", MS_REC | MS_PRIVATE)
    _mount_tmpfs(root, 1 << 20, 1000)
    try:
        bound: list[str] = []
        for path in sorted({*readable, *DEVICES}):
            if not os.path.exists(path) or any(path.startswith(f"{above}/") for above in bound):
                continue
            os.makedirs(
                root + (path if os.path.isdir(path) else os.path.dirname(path)), exist_ok=True
            )
            if not os.path.isdir(path):
                os.close(os.open(root + path, os.O_CREAT | os.O_WRONLY))
            _mount(path, root + path, "", MS_BIND | MS_REC)
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
    options = f"size={size_bytes},nr_inodes={files + 1},mode=700"
    _mount("tmpfs", folder, "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, options)


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    words = [os.fsencode(text) for text in (source, target, kind)]
    check(LIBC.mount(*words, ctypes.c_ulong(flags), os.fsencode(options)))


WRITE_FILE, READ_FILE, READ_DIR, REMOVE_FILE, MAKE_REG, TRUNCATE = (
    1 << bit for bit in (1, 2, 3, 5, 8, 14)
)
RIGHTS = {
    1: 13,
    2: 14,
    3: 15,
    4: 15,
}  # number of access rights by Landlock version; 16 from version 5
NETWORK, SCOPE = (
    0b11,
    0b11,
)  # TCP bind and connect, from version 4; abstract sockets and signals, from version 6


def landlock(folder: str, readable: list[str]) -> None:
    """Allow only to read below `readable`, and to read and write files in `folder`. Raises OSError without Landlock."""
    create, add, restrict = 444, 445, 446
    version = check(LIBC.syscall(create, None, 0, 1))
    known = (1 << RIGHTS.get(version, 16)) - 1
    handled = struct.pack("=QQQ", known, NETWORK, SCOPE)[
        : 24 if version >= 6 else 16 if version >= 4 else 8
    ]
    rules = check(LIBC.syscall(create, ctypes.create_string_buffer(handled), len(handled), 0))
    allowed = [(path, READ_FILE | READ_DIR) for path in readable]
    allowed += [(folder, READ_FILE | READ_DIR | WRITE_FILE | REMOVE_FILE | MAKE_REG | TRUNCATE)]
    allowed += zip(DEVICES, (READ_FILE | WRITE_FILE, READ_FILE), strict=True)
    for path, rights in allowed:
        if not os.path.exists(path):
            continue
        rights &= known if os.path.isdir(path) else READ_FILE | WRITE_FILE
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        check(
            LIBC.syscall(
                add,
                rules,
                1,
                ctypes.create_string_buffer(struct.pack("=Qi", rights, descriptor)),
                0,
            )
        )
        os.close(descriptor)
    check(LIBC.syscall(restrict, rules, 0))
    os.close(rules)
