"""Prints the requirements of the extra `docs`, one per line."""

import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"

if __name__ == "__main__":
    extras = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"][
        "optional-dependencies"
    ]
    print("\n".join(extras["docs"]))
