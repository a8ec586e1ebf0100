"""scripts/install.sh with stand-ins for Python, pip, uv and the driver: which commands it runs for a GPU."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
PYTHON = """#!/usr/bin/env bash
echo "$(basename "$0") $*" >>commands.txt
case "$*" in
  --version) echo "Python 3.12.4" ;;
  "-m venv .venv") mkdir -p .venv/bin && cp "$0" .venv/bin/python && cp "$0" .venv/bin/uv ;;
  *" install "*vllm==*) if [ "$(basename "$0")" = python ]; then exit $REFUSED; fi ;;
esac
"""


@pytest.mark.parametrize("refused", [0, 1])
def test_any_certifi_where_the_index_lacks_the_one_of_vllm(tmp_path: Path, refused: int) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "bin").mkdir()
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "scripts/install.sh").write_bytes((SCRIPTS / "install.sh").read_bytes())
    for name, text in {
        "python3.12": PYTHON,
        "nvidia-smi": "#!/bin/sh\n",
        "gcc": "#!/bin/sh\n",
    }.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "REFUSED": str(refused),
    }
    environment.pop("MEGARL_PYTHON", None)
    run = subprocess.run(
        ["bash", "scripts/install.sh"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    commands = [
        line for line in (tmp_path / "commands.txt").read_text().splitlines() if " install " in line
    ]
    by_pip = [command for command in commands if command.startswith("python ")]
    by_uv = [command for command in commands if command.startswith("uv ")]
    if not refused:
        assert len(by_pip) == 2 and "vllm==" in by_pip[0] and ".[gpu]" in by_pip[1] and not by_uv
        return
    assert (tmp_path / ".venv/overrides.txt").read_text() == "certifi\n"
    assert len(by_pip) == 2 and "vllm==" in by_pip[0] and by_pip[1].endswith(" uv")
    assert (
        len(by_uv) == 2
        and "vllm==" in by_uv[0]
        and by_uv[1].endswith("--no-build-isolation -e .[gpu]")
    )
    assert all("--override .venv/overrides.txt" in command for command in by_uv)
