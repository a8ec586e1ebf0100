"""One core a test process, and no test reads what a surrounding job left in the environment.

MEGARL_PLAIN_CPU=1 hides AMX, AVX-512 and bf16 from the tests and all that they start.
"""

from __future__ import annotations

import logging
import runpy
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megarl.platform.env import get_env, set_env

set_env(OMP_NUM_THREADS=1, TOKENIZERS_PARALLELISM="false")
# rank programs import the benchmarks, which are not installed
ROOT = Path(__file__).resolve().parents[1]
PATHS = [str(ROOT), get_env("PYTHONPATH")]
if get_env("MEGARL_PLAIN_CPU"):
    PATHS.insert(0, str(ROOT / "tests/plain_cpu"))
    runpy.run_path(f"{PATHS[0]}/sitecustomize.py")
set_env(PYTHONPATH=":".join(filter(None, PATHS)))

# a handler keeps the captured stream of the test that imported its library
logging.raiseExceptions = False
if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # a shell's background job: what tests interrupt would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--curves", help="folder for the learning curves of tests/e2e/test_algorithms.py"
    )


@pytest.fixture(autouse=True)
def outside_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MEGARL_JOB_ID",
        "MEGARL_LAUNCHED",
    ):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def make_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a file system of a size, such as "1m", and returns its folder; one a test."""
    folder = tmp_path / "disk"

    def mount(size: str) -> Path:
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "megarl-test", folder]
        if subprocess.run(command, capture_output=True).returncode:
            pytest.skip("mounting a file system needs root")
        return folder

    yield mount
    if folder.is_mount():
        subprocess.run(["umount", "-l", folder], check=True)


@pytest.fixture
def small_disk(make_disk: Callable[[str], Path]) -> Path:
    return make_disk("1m")
