"""Plants mistakes in megarl, one at a time, and demands that the test named for each fails.

    python tests/mutants.py [--only TEXT ...] [--jobs N] [--smallest]

Each entry of tests/planted/ is (file, source text, replacement, test). The text must occur exactly once in the file. It
is replaced in a temporary copy of the repository, never in the working tree; pytest then runs the test there and must
fail in it (exit code 1), not in collection. Each run is forked from a process that has already imported torch.

First all named tests must pass without a mistake. Exit code: 0 if every mistake is caught, 1 if one survives or an
entry is out of date, 2 if the tests fail without a mistake.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from planted import MUTANTS, SMALLEST

ROOT = Path(__file__).resolve().parents[1]
COPIED = (
    "megarl",
    "tests",
    "benchmarks",
    "configs",
    "examples",
    "scripts",
    "docs",
    "README.md",
    "pyproject.toml",
)
TIMEOUT_S = 300


@dataclass(frozen=True, slots=True)
class Mutant:
    file: str  # below megarl/
    source: str
    replacement: str
    test: str  # pytest node below tests/

    @property
    def name(self) -> str:
        return f"{self.file}: {self.replacement.strip().splitlines()[0] if self.replacement.strip() else '(deleted)'}"


@dataclass(frozen=True, slots=True)
class Verdict:
    mutant: Mutant
    is_caught: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Run:
    """A pytest process in a copy of the repository."""

    pid: int
    log: Path
    deadline: float

    @classmethod
    def start(cls, tree: Path, tests: Sequence[str], *options: str) -> Run:
        """Forked from this process, which has imported the heavy packages but nothing of megarl."""
        log = tree.with_suffix(".log")
        sys.stdout.flush()
        if pid := os.fork():
            return cls(pid, log, time.monotonic() + TIMEOUT_S * len(tests))
        try:
            os.setsid()  # so that a time limit ends its children too
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.chdir(tree)
            os.environ |= {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
            sys.dont_write_bytecode = True
            sys.path[:] = [
                str(tree),
                *(path for path in sys.path if not path.startswith(str(ROOT / "tests"))),
            ]
            for name in [name for name in sys.modules if name.split(".")[0] == "planted"]:
                del sys.modules[name]
            import pytest

            command = [
                "-q",
                "-p",
                "no:cacheprovider",
                "--tb=line",
                "--disable-warnings",
                *options,
                *(f"tests/{test}" for test in tests),
            ]
            code = int(pytest.main(command))
            sys.stdout.flush()
        except BaseException:  # noqa: BLE001 (a fork must never return to the caller's loop)
            code = 70
        os._exit(code)

    def poll(self) -> int | None:
        """The exit code, None while it runs, -1 after its time limit."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if not pid and time.monotonic() < self.deadline:
            return None
        if not pid:
            os.killpg(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        self._kill_ranks()
        return os.waitstatus_to_exitcode(status) if pid else -1

    def _kill_ranks(self) -> None:
        """Kills the ranks that a test with a mistake started; they have sessions of their own."""
        mark = f"PYTHONPATH={self.log.with_suffix('')}\0".encode()
        for file in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):  # it has ended, or is another user's
                if mark in file.read_bytes():
                    os.kill(int(file.parent.name), signal.SIGKILL)

    def wait(self) -> int:
        while (code := self.poll()) is None:
            time.sleep(0.1)
        return code

    def last_line(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""


def copy_repository(tree: Path) -> Path:
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, tree / name)
    return tree


def place(test: str) -> tuple[str, int]:
    """Sorts tests as pytest runs a file, where some share what others would destroy."""
    file, _, name = test.partition("::")
    return file, (ROOT / "tests" / file).read_text(encoding="utf-8").find(
        f"def {name.partition('[')[0]}("
    )


def plant(mutant: Mutant, tree: Path) -> Run | str:
    """Start the test with the mistake planted, or return why that is impossible."""
    path = tree / "megarl" / mutant.file
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    if (count := text.count(mutant.source)) != 1:
        return f"source text occurs {count} times"
    path.write_text(text.replace(mutant.source, mutant.replacement), encoding="utf-8")
    return Run.start(tree, [mutant.test], "-x")


def judge_all(mutants: Sequence[Mutant], trees: Sequence[Path]) -> list[Verdict]:
    verdicts: list[Verdict] = []
    waiting, free, running = list(reversed(mutants)), list(trees), dict[Path, tuple[Mutant, Run]]()

    def judge(mutant: Mutant, is_caught: bool, reason: str) -> None:
        print(f"{reason:10} {mutant.name}  [{mutant.test}]", flush=True)
        verdicts.append(Verdict(mutant, is_caught, reason))

    while waiting or running:
        while waiting and free:
            mutant, tree = waiting.pop(), free.pop()
            run = plant(mutant, tree)
            if isinstance(run, Run):
                running[tree] = mutant, run
            else:
                judge(mutant, False, run)
                free.append(tree)
        for tree, (mutant, run) in list(running.items()):
            if (code := run.poll()) is None:
                continue
            reason = {0: "SURVIVES", 1: "caught", -1: f"no result in {TIMEOUT_S} s"}.get(code)
            judge(mutant, code == 1, reason or f"broken, exit code {code}: {run.last_line()}")
            shutil.copy(ROOT / "megarl" / mutant.file, tree / "megarl" / mutant.file)
            del running[tree]
            free.append(tree)
        time.sleep(0.05)
    return verdicts


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only",
        metavar="TEXT",
        nargs="+",
        default=[""],
        help="only mutants whose file, text or test contains a TEXT",
    )
    parser.add_argument(
        "--jobs", metavar="N", type=int, default=1, help="tests to run at once (default: 1)"
    )
    parser.add_argument("--smallest", action="store_true", help="a few fast ones")
    args = parser.parse_args()
    mutants = [Mutant(*entry) for entry in (SMALLEST if args.smallest else MUTANTS)]
    mutants = [
        mutant
        for mutant in mutants
        if any(
            only in text for only in args.only for text in (mutant.file, mutant.name, mutant.test)
        )
    ]
    if not mutants:
        parser.error(f"no mutant contains {' or '.join(args.only)}")

    os.environ["OMP_NUM_THREADS"] = "1"
    import hypothesis  # noqa: F401 (once, for all forks)
    import pytest  # noqa: F401
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="megarl-mutants-") as folder:
        trees = [copy_repository(Path(folder) / str(number)) for number in range(args.jobs)]
        unplanted = Run.start(trees[0], sorted({mutant.test for mutant in mutants}, key=place))
        if unplanted.wait() != 0:
            print(unplanted.log.read_text()[-5000:], "Tests fail without a mistake.", sep="\n")
            return 2
        verdicts = judge_all(mutants, trees)
    survivors = [verdict for verdict in verdicts if not verdict.is_caught]
    print(f"{len(verdicts) - len(survivors)} of {len(verdicts)} caught")
    for verdict in survivors:
        mutant = verdict.mutant
        print(f"{verdict.reason}: megarl/{mutant.name}\n  {mutant.source!r}\n  tests/{mutant.test}")
    return 1 if survivors else 0


if __name__ == "__main__":
    raise SystemExit(main())
