from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megarl.platform import env
from megarl.platform.device import pick_device
from megarl.platform.env import count_gpus, has_bf16_products


@pytest.mark.skipif(torch.cuda.is_available(), reason="of machines without a GPU")
def test_without_a_gpu_it_is_the_cpu() -> None:
    assert pick_device(3) == torch.device("cpu")


@pytest.mark.parametrize(
    "files", [["proc/gpus/0000:1b:00.0", "proc/gpus/0000:1c:00.0"], ["dev/nvidia0", "dev/nvidia1"]]
)
def test_gpus_are_counted_where_the_driver_lists_them(
    files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [*files, "dev/nvidiactl", "dev/nvidia-uvm"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    folders = (
        (tmp_path / folder, pattern)
        for (_, pattern), folder in zip(env.GPU_FILES, ("proc/gpus", "dev"), strict=True)
    )
    monkeypatch.setattr(env, "GPU_FILES", tuple(folders))
    monkeypatch.setattr(env, "version", lambda _: "2.14.0+cu130")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert count_gpus() == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert count_gpus() == 1
    monkeypatch.setattr(env, "version", lambda _: "2.13.0+cpu")
    assert count_gpus() == 0


FAULTS = """
import resource, torch
from megarl.platform.device import KEEP_FREED, set_malloc
if {keep}: set_malloc(KEEP_FREED)
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20): torch.zeros(1 << 24)  # 16,384 pages
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults(); print(faults())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc")
@pytest.mark.parametrize("keep", [True, False])
def test_freed_memory_is_kept(keep: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FAULTS.format(keep=keep)], capture_output=True, text=True, check=True
    )
    assert (int(done.stdout) < 16384) is keep, done.stdout


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("flags\t\t: fpu avx512f avx512_bf16", True),
        ("flags\t\t: fpu amx_bf16 amx_tile", True),
        ("Features\t: fp asimd bf16", True),
        ("flags\t\t: fpu avx512f avx512_bf16_like", False),
        ("bogomips\t: 1", True),  # not told
    ],
)
def test_bf16_products_by_the_flags_of_the_cpu(line: str, expected: bool, tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{line}\nprocessor\t: 1\n{line}\n")
    assert has_bf16_products(str(tmp_path / "cpuinfo")) is expected
    assert has_bf16_products(str(tmp_path / "missing"))
