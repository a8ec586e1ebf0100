"""Resolves the packages of a GPU installation, and checks or writes docker/constraints-gpu.txt.

    python -m benchmarks.gpu_packages             exits with 1 if a user's resolution, or the file, would not work
    python -m benchmarks.gpu_packages --write     also renews the file
    python -m benchmarks.gpu_packages --import    imports CUDA's vLLM, Megatron-Core and Transformer Engine

The resolver is uv's, for Python 3.12 on Linux x86_64; nothing is downloaded but metadata (half a minute). First it
resolves the extras `gpu` and `dev` of pyproject.toml without the file, as users do who install the package, and then
with it, as scripts/install.sh and the images do.

--import looks at what is installed here. Without a driver, as while an image is built, it stands in for libcuda with
one that has no device (gpu_stubs.py); it then needs gcc.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "docker" / "constraints-gpu.txt"
PYTHON = "3.12"
PLATFORM = "x86_64-manylinux_2_28"
MODULES = (
    "vllm.platforms.cuda",
    "vllm.model_executor.models.qwen3",
    "flashinfer",  # vLLM imports it when it builds a model; it does not import beside a wrong cuda-python
    "megatron.core",
    "transformer_engine.pytorch",
)
HEADER = """\
# The packages of a GPU installation: the extras gpu and dev of pyproject.toml, resolved for Python {python} on Linux x86_64.
# scripts/install.sh and the files in docker/ install these versions. Made, and to be renewed, by
#   python -m benchmarks.gpu_packages --write
# pyproject.toml: {fingerprint}
"""
Versions = Mapping[str, str]  # package -> version


def requirements(pyproject: str) -> list[Requirement]:
    """Returns megarl's own requirements on a GPU: the dependencies, and the extras that need no other project."""
    project = tomllib.loads(pyproject)["project"]
    extras = project["optional-dependencies"]
    lines = list(project["dependencies"])
    for name in sorted(extras.keys() - {"cpu"}):
        lines += extras[name]
    found = [Requirement(line) for line in lines]
    return [requirement for requirement in found if requirement.name != project["name"]]


def fingerprint(pyproject: str) -> str:
    """Returns a checksum of the requirements, which the constraints file repeats."""
    lines = sorted(map(str, requirements(pyproject)))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def read_versions(text: str) -> dict[str, str]:
    """Returns the pins of a requirements file. Raises ValueError for a line that is none, or a package twice."""
    versions: dict[str, str] = {}
    for line in text.splitlines():
        line = line.partition("#")[0].strip()
        if not line:
            continue
        name, _, version = line.partition("==")
        name = canonicalize_name(name)
        if not version or name in versions:
            raise ValueError(f"{line}: a line must be NAME==VERSION, each package once")
        versions[name] = version
    return versions


def problems(versions: Versions, wanted: Sequence[Requirement]) -> list[str]:
    """Returns what would not work if these versions were installed together; empty if nothing is known."""
    found = []
    for requirement in wanted:
        version = versions.get(canonicalize_name(requirement.name))
        if version is None:
            found.append(f"{requirement.name} is missing")
        elif not requirement.specifier.contains(version, prereleases=True):
            found.append(f"{requirement.name} {version} is not {requirement.specifier}")
    pair = [versions.get(name, "0") for name in ("cuda-python", "cuda-bindings")]
    python, bindings = map(Version, pair)
    if python.release[:2] != bindings.release[:2]:
        found.append(
            f"cuda-python {python} and cuda-bindings {bindings}: the files of one overwrite the other's, and no CUDA "
            "model of vLLM can be built; they must have the same major and minor version"
        )
    return found


def resolve(*options: str) -> str:
    """Returns uv's resolution as a requirements file. Raises CalledProcessError if there is none."""
    uv = shutil.which("uv") or str(Path(sys.executable).with_name("uv"))
    command = [uv, "pip", "compile", "pyproject.toml", "--quiet", "--no-header", "--no-annotate"]
    command += ["--extra", "gpu", "--extra", "dev", "--no-emit-package", "megarl"]
    command += ["--python-version", PYTHON, "--python-platform", PLATFORM, *options]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


def import_installed() -> list[str]:
    """Imports MODULES in a process; returns what is wrong with the packages that are installed here."""
    from benchmarks.gpu_stubs import build_driver, environment

    versions = {
        canonicalize_name(package.metadata["Name"]): package.version
        for package in metadata.distributions()
    }
    found = problems(versions, [Requirement(line) for line in ("torch", "vllm", "megatron-core")])
    with tempfile.TemporaryDirectory() as folder:
        settings = None
        try:
            ctypes.CDLL("libcuda.so.1")
        except OSError:
            build_driver(Path(folder))
            settings = environment(Path(folder))
        code = f"import {', '.join(MODULES)}"
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code], env=settings, check=False
        )
    if done.returncode:
        found.append(f"`{code}` ends with {done.returncode}; see above")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--import", action="store_true", dest="imports")
    args = parser.parse_args()
    found = import_installed() if args.imports else check_resolution(must_write=args.write)
    print(*found, sep="\n")
    return 1 if found else 0


def check_resolution(must_write: bool) -> list[str]:
    pyproject = (ROOT / "pyproject.toml").read_text()
    wanted = requirements(pyproject)
    newest = resolve()
    found = problems(read_versions(newest), wanted)
    if must_write and not found:
        FILE.write_text(HEADER.format(python=PYTHON, fingerprint=fingerprint(pyproject)) + newest)
    pinned = resolve("--constraint", str(FILE))
    kept = read_versions(FILE.read_text())
    resolved = read_versions(pinned)
    for name in sorted(kept.keys() | resolved.keys()):
        if kept.get(name) != resolved.get(name):
            found.append(f"{name}: {kept.get(name)} in {FILE.name}, {resolved.get(name)} with it")
    for name, version in read_versions(newest).items():
        if kept.get(name, version) != version:
            print(f"{name}: {kept[name]} here, {version} without the file")
    print(f"{len(resolved)} packages; {len(found)} problems")
    return found


if __name__ == "__main__":
    sys.exit(main())
