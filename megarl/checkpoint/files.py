"""A run's checkpoint folders: which exist, and whether their files are still as written. Reads no tensors.

runs/<name>/checkpoints/step_<n>/ *.distcp, .metadata, common.pt, metadata.json
                                  manifest.json: {"files": {name: {"bytes": n, "sha256": hex}}}, written last
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megarl.platform.atomic import write_atomic
from megarl.platform.json_text import parse_json

MANIFEST = "manifest.json"
REQUIRED = (".metadata", "common.pt", "metadata.json")

Sums = dict[str, dict[str, Any]]  # file name -> {"bytes": n, "sha256": hex}


def steps(folder: Path) -> list[int]:
    """Steps of the checkpoints, ascending; a folder still being written has another name."""
    names = [path.name.removeprefix("step_") for path in folder.glob("step_*") if path.is_dir()]
    return sorted(int(name) for name in names if name.isdecimal())


def sums(folder: Path, names: Iterable[str]) -> Sums:
    """Size and checksum of files, read back from disk."""
    read = {}
    for name in names:
        with (folder / name).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            read[name] = {"bytes": size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
    return read


def write_manifest(folder: Path, expected: Sums) -> None:
    write_atomic(folder / MANIFEST, json.dumps({"files": dict(sorted(expected.items()))}, indent=1))


def manifest(folder: Path) -> Sums:
    """Reads the manifest. Raises ValueError if it is missing or damaged, or lacks a file that a resume reads."""
    try:
        files = parse_json((folder / MANIFEST).read_bytes())["files"]
        expected = {
            name: {"bytes": int(file["bytes"]), "sha256": str(file["sha256"])}
            for name, file in files.items()
        }
    except FileNotFoundError:
        raise ValueError(f"{MANIFEST} is missing") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{MANIFEST} cannot be read") from None
    required = {*REQUIRED, *(path.name for path in folder.glob("*.distcp"))}
    if missing := sorted(required - expected.keys()):
        raise ValueError(f"{MANIFEST} does not list {', '.join(missing[:4])}")
    return expected


def differences(folder: Path, expected: Sums) -> list[str]:
    """Describes each file that is missing or differs from `expected`."""
    wrong = []
    for name, entry in expected.items():
        if not (folder / name).is_file():
            wrong.append(f"{name} is missing")
        elif (size := (folder / name).stat().st_size) != entry["bytes"]:
            wrong.append(f"{name} has {size} bytes instead of {entry['bytes']}")
        elif sums(folder, [name])[name] != entry:
            wrong.append(f"{name} does not match its checksum")
    return wrong
