"""A fork server whose jail lacks a limit, as on another machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megarl.jail import jailed, sandbox
from megarl.jail.fork_server import ForkServer

# file, text, replacement
NO_NAMESPACE = (
    "filesystem.py",
    "    user = os.geteuid()\n",
    "    raise OSError\n",
)
NO_PIVOT_ROOT = ("filesystem.py", "PIVOT_ROOT[os.uname().machine]", "9999")
USER_NAMESPACE = ("filesystem.py", "LIBC.unshare(CLONE_NEWNS) == 0", "False")
PLAIN_USER = (
    "jailed.py",
    "    parent = os.getppid()\n",
    "    parent = os.getppid()\n"
    "    os.setresuid(4000, 4000, 4000)\n"
    "    check(LIBC.prctl(4, 1, 0, 0, 0))\n",  # PR_SET_DUMPABLE, as in a process that its user started
)
NO_OWN_USER = ("jailed.py", "os.setresuid(", "raise OSError(")
NO_ANSWER = (
    "untrusted.py",
    "        exec(program, ",
    "        os._exit(3)\n        exec(program, ",
)
NO_SECCOMP = ("syscalls.py", 'ARCHES = {"x86_64"', 'ARCHES = {"pdp11"')
FIRST_LANDLOCK = ("filesystem.py", "    known = (1 <<", "    version = 1\n    known = (1 <<")


def crippled_server(
    folder: Path, *changes: tuple[str, str, str], modules: Sequence[str] = ()
) -> ForkServer:
    """Runs a copy of the package in `folder`, with texts replaced, and preloads more modules."""
    package = folder / "megarl" / "jail"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    for file in Path(jailed.__file__).parent.glob("*.py"):
        (package / file.name).write_text(file.read_text())
    for name, old, new in changes:
        text = (package / name).read_text()
        assert text.count(old) == 1, f"{name} has {old!r} {text.count(old)} times"
        (package / name).write_text(text.replace(old, new))
    return ForkServer(modules=(*sandbox.SERVER.modules, *modules), path=(str(folder),))
