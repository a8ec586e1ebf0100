"""An optional package that is missing ends a command before anything starts, with the line that installs it."""

from __future__ import annotations

import importlib
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from megarl.cli import main
from megarl.platform.env import OPTIONAL, is_installed

ROOT = Path(__file__).resolve().parents[3]
DRY = ["train", str(ROOT / "configs/tiny_dense.yaml"), "--dry-run"]
NEEDED = {  # module: a command that needs it
    "torch": DRY,
    "megarl_needs_no_such_module": DRY,
    "megatron.core": DRY,
    "vllm": DRY,
    "ray": [*DRY, "launch.topology=split", "launch.processes=1", "rollout.replicas=1"],
    "datasets": [*DRY, "task.name=hf:rows.jsonl", "task.options={}"],
    "tensorboard.summary": [*DRY, "telemetry.tensorboard=true"],
    "wandb.sdk": [*DRY, "telemetry.wandb=p"],
    "uvicorn": ["serve-reward", "."],
    "starlette": ["serve-reward", "."],
}


class Hidden:
    """Hides a package from imports, as if it were not installed."""

    def __init__(self, name: str) -> None:
        self.name = name

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if f"{name}.".startswith(f"{self.name}."):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


@pytest.mark.parametrize("module", NEEDED)
def test_a_command_that_needs_it_is_refused(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [Hidden(module), *sys.meta_path])
    (tmp_path / "rows.jsonl").write_text('{"prompt": "5 6", "answer": "7"}\n')
    code = main(NEEDED[module])
    err = capsys.readouterr().err
    if module not in OPTIONAL:
        assert code == 0, err
        return
    assert code == 2 and err.endswith(f" needs {OPTIONAL[module]}\n"), err


def test_a_module_that_import_refuses_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_installed("yaml") and is_installed("yaml.loader") and not is_installed("yaml.nothing")
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ImportError):
        importlib.import_module("yaml")
    assert not is_installed("yaml") and not is_installed("yaml.loader")


def test_every_extra_that_is_named_exists() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    named = set(re.findall(r"megarl\[(\w+)\]", str(OPTIONAL)))
    assert named == {*extras} - {"dev", "docs"}  # of the repository
