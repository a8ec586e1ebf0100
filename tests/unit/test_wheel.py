"""The wheel is all that a run needs: `megarl train` works from another folder, without the repository."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import megarl

ROOT = Path(__file__).parents[2]
CONFIGS = ("quickstart_sft", "quickstart")
BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("source")
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "megarl", source / "megarl", ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    out = source / "dist"
    run([sys.executable, "-c", BUILD, str(out)], source, PYTHONPATH="")
    (wheel,) = out.glob("*.whl")
    return wheel


def run(command: list[str], folder: Path, **values: str) -> str:
    env = {**os.environ, **values}
    done = subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=550, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def user_folder(folder: Path) -> Path:
    (folder / "configs").mkdir(parents=True)
    for name in CONFIGS:
        shutil.copy(ROOT / "configs" / f"{name}.yaml", folder / "configs")
    return folder


def test_a_wheel_has_all_files_and_starts(wheel: Path, tmp_path: Path) -> None:
    assert wheel.name == f"megarl-{megarl.__version__}-py3-none-any.whl"
    unpacked = tmp_path / "unpacked"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(unpacked)
    files = (path for path in (ROOT / "megarl").rglob("*") if path.is_file())
    needed = {path.relative_to(ROOT) for path in files if "__pycache__" not in path.parts}
    packed = {path.relative_to(unpacked) for path in unpacked.rglob("*") if path.is_file()}
    assert {path for path in packed if path.parts[0] == "megarl"} == needed

    command = "import megarl.cli; print(megarl.__file__); raise SystemExit(megarl.cli.main())"
    arguments = ["train", "configs/quickstart_sft.yaml", "--dry-run"]
    said = run(
        [sys.executable, "-c", command, *arguments],
        user_folder(tmp_path / "outside"),
        PYTHONPATH=str(unpacked),
    )
    assert said.startswith(f"{unpacked}/megarl/__init__.py") and "processes  2" in said


@pytest.mark.long
@pytest.mark.exhaustive
def test_an_installed_wheel_runs_the_quickstart(wheel: Path, tmp_path: Path) -> None:
    """In an environment of its own, which takes the other packages from this one."""
    environment = tmp_path / "environment"
    run([sys.executable, "-m", "venv", str(environment)], tmp_path)
    (packages,) = environment.glob("lib/python*/site-packages")
    (packages / "others.pth").write_text(f"{Path(pytest.__file__).parents[1]}\n")
    python = str(environment / "bin" / "python")
    run([python, "-m", "pip", "install", "--no-deps", "--no-index", "-I", str(wheel)], tmp_path)
    folder = user_folder(tmp_path / "outside")
    where = run([python, "-c", "import megarl; print(megarl.__file__)"], folder, PYTHONPATH="")
    assert where.startswith(str(packages))
    script = str(environment / "bin" / "megarl")
    for name, *values in (
        ("quickstart_sft", "train.steps=40", "eval.size=16", "sft.until_accuracy=null"),
        ("quickstart", "train.steps=2", "train.prompts_per_step=8", "eval.size=16"),
    ):
        run([script, "train", f"configs/{name}.yaml", *values], folder, PYTHONPATH="")
    for name in ("quickstart-sft", "quickstart"):
        written = {path.name for path in (folder / "runs" / name).iterdir()}
        assert {"report.html", "report.png", "metrics.jsonl", "hf", "exit.json"} <= written
