"""Commands where a package is not installed, and what reward functions return."""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path
from typing import Any

import yaml

from megarl.cli import main
from megarl.config.schema import Reward
from megarl.rewards.catalog import make_rewards
from megarl.rewards.interface import ScoreRequest

ROOT = Path(__file__).resolve().parents[3]


class Hidden:
    """A finder that refuses a package, as if it were not installed."""

    def __init__(self, name: str) -> None:
        self.name = name

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if f"{name}.".startswith(f"{self.name}."):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def without_package(folder: Path) -> list[Any]:
    """The exit code of the command in hidden.yaml without its `package`, and the last line of what it prints."""
    hidden = yaml.safe_load((folder / "hidden.yaml").read_text())
    argv = [
        str(argument).replace("CONFIGS", f"{ROOT}/configs").replace("EXAMPLES", f"{ROOT}/examples")
        for argument in hidden["argv"]
    ]
    finders, error = sys.meta_path[:], io.StringIO()
    sys.meta_path.insert(0, Hidden(hidden["package"]))
    try:
        with contextlib.redirect_stderr(error):
            code = main(argv)
    finally:
        sys.meta_path[:] = finders
    return [code, error.getvalue().splitlines()[-1]]


def scores(folder: Path) -> list[float | None]:
    """The scores that the reward in reward.yaml gives the responses there."""
    given = yaml.safe_load((folder / "reward.yaml").read_text())
    [reward] = make_rewards([Reward(**given["reward"])])
    requests = [ScoreRequest(str(n), "p", text) for n, text in enumerate(given["responses"])]
    return [score.value for score in reward(requests)]
