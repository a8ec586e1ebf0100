"""Plants mistakes in megarl, one at a time, and demands that the test named for each fails.

    python tests/mutants.py [--only TEXT] [--jobs N] [--smallest]

Each entry of tests/planted/ is (file, source text, replacement, test). The text must occur exactly once in the file. It
is replaced in a temporary copy of the repository, never in the working tree; pytest then runs the test there and must
fail in it (exit code 1), not in collection. First all named tests must pass without a mistake. Exit code: 0 if every
mistake is caught, 1 if one survives or an entry is out of date, 2 if the tests fail without a mistake.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from planted import MUTANTS, SMALLEST

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("megarl", "tests", "benchmarks", "configs", "scripts", "docs", "README.md", "pyproject.toml")
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


def run_pytest(tree: Path, tests: Sequence[str], *options: str) -> subprocess.CompletedProcess[str]:
    """Run tests of `tree` against the package of `tree`. Raises subprocess.TimeoutExpired."""
    env = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=line", *options]
    command += [f"tests/{test}" for test in tests]
    return subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, timeout=TIMEOUT_S * len(tests))


@contextmanager
def copies(num_copies: int) -> Iterator[SimpleQueue[Path]]:
    """Copies of the repository in a temporary folder."""
    trees: SimpleQueue[Path] = SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="megarl-mutants-") as folder:
        for number in range(num_copies):
            tree = Path(folder) / str(number)
            for name in COPIED:
                if (ROOT / name).is_dir():
                    shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
                else:
                    shutil.copy(ROOT / name, tree / name)
            trees.put(tree)
        yield trees


def judge(mutant: Mutant, trees: SimpleQueue[Path]) -> Verdict:
    """Plant one mistake in a free copy, run its test, restore the copy."""
    tree = trees.get()
    path = tree / "megarl" / mutant.file
    original = path.read_text(encoding="utf-8") if path.exists() else ""
    try:
        if (count := original.count(mutant.source)) != 1:
            return Verdict(mutant, False, f"source text occurs {count} times")
        path.write_text(original.replace(mutant.source, mutant.replacement), encoding="utf-8")
        done = run_pytest(tree, [mutant.test], "-x")
        last_line = (done.stdout.strip().splitlines() or [done.stderr.strip()])[-1]
        reason = "caught" if done.returncode == 1 else "SURVIVES" if done.returncode == 0 else f"broken: {last_line}"
        return Verdict(mutant, done.returncode == 1, reason)
    except subprocess.TimeoutExpired:
        return Verdict(mutant, False, f"no result in {TIMEOUT_S} s")
    finally:
        if original:
            path.write_text(original, encoding="utf-8")
        trees.put(tree)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", metavar="TEXT", default="", help="only mutants whose file, text or test contains TEXT"
    )
    parser.add_argument("--jobs", metavar="N", type=int, default=1, help="tests to run at once (default: 1)")
    parser.add_argument("--smallest", action="store_true", help="a few fast ones")
    args = parser.parse_args()
    mutants = [Mutant(*entry) for entry in (SMALLEST if args.smallest else MUTANTS)]
    mutants = [
        mutant for mutant in mutants if any(args.only in text for text in (mutant.file, mutant.name, mutant.test))
    ]
    if not mutants:
        parser.error(f"no mutant contains --only={args.only!r}")

    with copies(args.jobs) as trees:
        tree = trees.get()
        unplanted = run_pytest(tree, sorted({mutant.test for mutant in mutants}))
        trees.put(tree)
        if unplanted.returncode != 0:
            print(unplanted.stdout[-3000:], unplanted.stderr[-1000:], "Tests fail without a mistake.", sep="\n")
            return 2
        verdicts = []
        with ThreadPoolExecutor(args.jobs) as pool:
            for verdict in pool.map(lambda mutant: judge(mutant, trees), mutants):
                print(f"{verdict.reason:10} {verdict.mutant.name}  [{verdict.mutant.test}]", flush=True)
                verdicts.append(verdict)
    survivors = [verdict for verdict in verdicts if not verdict.is_caught]
    print(f"{len(verdicts) - len(survivors)} of {len(verdicts)} caught")
    for verdict in survivors:
        mutant = verdict.mutant
        print(f"{verdict.reason}: megarl/{mutant.name}\n  {mutant.source!r}\n  tests/{mutant.test}")
    return 1 if survivors else 0


if __name__ == "__main__":
    raise SystemExit(main())
