"""scripts/install.sh with stand-ins for Python, pip, uv and the driver: which commands it runs for a GPU."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = ("scripts/install.sh", "docker/constraints-gpu.txt", "pyproject.toml")
PYTHON = """#!/usr/bin/env bash
echo "$(basename "$0") $*" >>commands.txt
case "$*" in
  --version) echo "Python $VERSION" ;;
  *"version_info < (3, 12)"*) [ "$VERSION" != 3.11.9 ] ;;
  "-m venv .venv") mkdir -p .venv/bin && cp "$0" .venv/bin/python && cp "$0" .venv/bin/uv ;;
  *" install "*" vllm "*) if [ "$(basename "$0")" = python ]; then exit $REFUSED; fi ;;
  *gpu_packages*) exit $BROKEN ;;
esac
"""
DEFAULT = {"VERSION": "3.12.4", "REFUSED": "0", "BROKEN": "0"}


def install(folder: Path, **how: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Runs the script on a node with a GPU; returns its result and the commands that it ran."""
    for name in FILES:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes((ROOT / name).read_bytes())
    (folder / "bin").mkdir()
    for name, text in {
        "python3.12": PYTHON,
        "nvidia-smi": "#!/bin/sh\n",
        "gcc": "#!/bin/sh\n",
    }.items():
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    environment = os.environ | DEFAULT | how | {"PATH": path}
    environment.pop("MEGARL_PYTHON", None)
    done = subprocess.run(
        ["bash", "scripts/install.sh"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return done, (folder / "commands.txt").read_text().splitlines()


@pytest.mark.parametrize("refused", ["0", "1"])
def test_any_certifi_where_the_index_lacks_the_one_of_vllm(tmp_path: Path, refused: str) -> None:
    """Pip and uv install the versions of the constraints, uv without that of certifi."""
    done, ran = install(tmp_path, REFUSED=refused)
    assert done.returncode == 0, done.stdout + done.stderr
    commands = [line for line in ran if " install " in line]
    by_pip = [command for command in commands if command.startswith("python ")]
    by_uv = [command for command in commands if command.startswith("uv ")]
    pinned = "--constraint docker/constraints-gpu.txt"
    if refused == "0":
        assert len(by_pip) == 2 and " vllm " in by_pip[0] and ".[gpu]" in by_pip[1] and not by_uv
        assert all(pinned in command for command in by_pip)
        return
    assert (tmp_path / ".venv/overrides.txt").read_text() == "certifi\n"
    assert len(by_pip) == 2 and " vllm " in by_pip[0] and by_pip[1].endswith(" uv")
    assert (
        len(by_uv) == 2
        and " vllm " in by_uv[0]
        and by_uv[1].endswith("--no-build-isolation -e .[gpu]")
    )
    given = "--override .venv/overrides.txt --constraint .venv/constraints.txt"
    assert all(given in command for command in by_uv)
    constraints = (ROOT / "docker/constraints-gpu.txt").read_text().splitlines()
    left = (tmp_path / ".venv/constraints.txt").read_text().splitlines()
    assert len(left) == len(constraints) - 1 and not [x for x in left if x.startswith("certifi=")]


def test_packages_that_do_not_import_together_end_the_installation(tmp_path: Path) -> None:
    done, ran = install(tmp_path, BROKEN="1")
    assert done.returncode == 1 and "do not work together" in done.stderr
    assert ran[-1] == "python -m benchmarks.gpu_packages --import"
    assert not (tmp_path / ".venv/.megarl").exists(), "the next run must install again"


def test_python_311_with_a_gpu_is_refused(tmp_path: Path) -> None:
    done, ran = install(tmp_path, VERSION="3.11.9")
    assert done.returncode == 1 and "need Python 3.12" in done.stderr
    assert "MEGARL_PYTHON" in done.stderr and "--cpu" in done.stderr
    assert not [line for line in ran if "venv .venv" in line or " install " in line]
