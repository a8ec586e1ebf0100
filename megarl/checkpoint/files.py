"""The folders of a run's checkpoints: which are there, what each file must be, which is whole. No tensors here.

runs/<name>/checkpoints/step_<n>/ *.distcp, .metadata, common.pt, metadata.json
                                  manifest.json: {"files": {name: {"bytes": n, "sha256": hex}}}, written last
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from megarl.platform.atomic import write_atomic

__all__ = ["Sums", "differences", "manifest", "prune", "staging", "steps", "sums", "sweep", "write_manifest"]

MANIFEST = "manifest.json"

Sums = Mapping[str, tuple[int, str]]  # file name -> size in bytes, sha256


def steps(folder: Path) -> list[int]:
    """Steps of the checkpoints, ascending: one that is being written has another name."""
    names = [path.name.removeprefix("step_") for path in folder.glob("step_*") if path.is_dir()]
    return sorted(int(name) for name in names if name.isdecimal())


def staging(folder: Path, step: int) -> Path:
    return folder / f".step_{step}.part"


def sweep(folder: Path) -> None:
    """Remove what runs that were killed had begun to write."""
    for path in folder.glob(".step_*.part"):
        shutil.rmtree(path, ignore_errors=True)


def prune(folder: Path, keep: int) -> None:
    for step in steps(folder)[:-keep]:
        shutil.rmtree(folder / f"step_{step}", ignore_errors=True)


def sums(folder: Path, names: Iterable[str]) -> dict[str, tuple[int, str]]:
    """Read back from disk."""
    found = {}
    for name in names:
        with (folder / name).open("rb") as file:
            found[name] = (os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest())
    return found


def write_manifest(folder: Path, all_sums: Sums) -> None:
    files = {name: {"bytes": size, "sha256": digest} for name, (size, digest) in sorted(all_sums.items())}
    write_atomic(folder / MANIFEST, json.dumps({"files": files}, indent=1))


def manifest(folder: Path) -> dict[str, tuple[int, str]]:
    """Raises ValueError, naming the file and what is wrong with it."""
    file = folder / MANIFEST
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        return {name: (int(told["bytes"]), str(told["sha256"])) for name, told in values["files"].items()}
    except FileNotFoundError:
        raise ValueError(f"{MANIFEST} is not there") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{MANIFEST} cannot be read") from None


def differences(folder: Path, expected: Sums) -> list[str]:
    """What is wrong with the named files, each with its name."""
    wrong = []
    for name, (size, digest) in expected.items():
        file = folder / name
        if not file.is_file():
            wrong.append(f"{name} is not there")
        elif (found := file.stat().st_size) != size:
            wrong.append(f"{name} has {found} bytes instead of {size}")
        elif sums(folder, [name])[name][1] != digest:
            wrong.append(f"{name} is not what was written (checksum)")
    return wrong
