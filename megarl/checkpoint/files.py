"""Lists a run's checkpoint folders, and compares their files with the manifest. Reads no tensors.

runs/<name>/checkpoints/step_<n>/
    *.distcp, .metadata, common.pt, metadata.json
    manifest.json: {"files": {name: {"bytes": n, "sha256": hex}}}, written last
"""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megarl.platform.json_text import read_json
from megarl.processes.files import write_atomic

MANIFEST = "manifest.json"
REQUIRED = (".metadata", "common.pt", "metadata.json")

Sums = dict[str, dict[str, Any]]  # file name -> {"bytes": n, "sha256": hex}


def steps(folder: Path) -> list[int]:
    """Returns the steps of the checkpoints, ascending, without the one being written."""
    numbers = [path.name.removeprefix("step_") for path in folder.glob("step_*") if path.is_dir()]
    return sorted(int(number) for number in numbers if number.isdecimal())


def sums(folder: Path, names: Iterable[str]) -> Sums:
    """Returns the size and checksum of each file, read back from disk."""
    read = {}
    for name in names:
        with (folder / name).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256")
            read[name] = {"bytes": file.tell(), "sha256": digest.hexdigest()}
    return read


def write_manifest(folder: Path, expected: Sums) -> None:
    write_atomic(folder / MANIFEST, json.dumps({"files": dict(sorted(expected.items()))}, indent=1))


def manifest(folder: Path) -> Sums:
    """Reads a checkpoint's manifest.

    Raises ValueError if it is missing or damaged, or does not list a file that a resume reads.
    """
    try:
        expected = {
            name: {"bytes": int(file["bytes"]), "sha256": str(file["sha256"])}
            for name, file in read_json(folder / MANIFEST)["files"].items()
        }
    except FileNotFoundError:
        raise ValueError(f"{MANIFEST} is missing") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{MANIFEST} cannot be read") from None
    required = {*REQUIRED, *(path.name for path in folder.glob("*.distcp"))}
    missing = sorted(required - expected.keys())
    if missing:
        raise ValueError(f"{MANIFEST} does not list {', '.join(missing[:4])}")
    return expected


def differences(folder: Path, expected: Sums) -> list[str]:
    """Describes each file that is missing or differs from `expected`."""
    wrong = []
    for name, entry in expected.items():
        if not (folder / name).is_file():
            wrong.append(f"{name} is missing")
            continue
        found = sums(folder, [name])[name]
        if found["bytes"] != entry["bytes"]:
            wrong.append(f"{name} has {found['bytes']} bytes instead of {entry['bytes']}")
        elif found != entry:
            wrong.append(f"{name} does not match its checksum")
    return wrong
