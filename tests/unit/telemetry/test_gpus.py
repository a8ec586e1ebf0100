"""GPU metrics, read by the real nvidia-ml-py from a shared library that stands in for the driver's."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megarl.telemetry.gpus import open_gpus

READ = """
import json, sys, time
import megarl.telemetry.gpus
megarl.telemetry.gpus.INTERVAL_S = 0.01
gpus = megarl.telemetry.gpus.open_gpus([int(gpu) if gpu.isdigit() else gpu for gpu in sys.argv[1:]])
if gpus is None:
    print("null")
else:
    first = gpus.take()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and gpus._readings["power_w"][-1:] < [1000.0]:
        time.sleep(0.01)
    print(json.dumps([first, gpus.take()]))
    gpus.close()
"""


def read(library: Path, *uuids: str) -> tuple[Any, str]:
    pytest.importorskip("pynvml")
    env = {**os.environ, "LD_LIBRARY_PATH": str(library), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", READ, *uuids], env=env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not (gcc := shutil.which("gcc")):
        pytest.skip("needs gcc")
    folder = tmp_path_factory.mktemp("nvml")
    source = Path(__file__).with_name("nvml.c")
    subprocess.run(
        [gcc, "-shared", "-fPIC", "-o", str(folder / "libnvidia-ml.so.1"), str(source)], check=True
    )
    return folder


def test_two_gpus(library: Path) -> None:
    (first, second), stderr = read(library, "aaa", "bbb")
    assert first["gpu/memory_gb/mean"] == 20.0 and first["gpu/memory_gb/max"] == 30.0
    assert first["gpu/utilization/mean"] == 0.75 and first["gpu/utilization/max"] == 1.0
    assert (first["gpu/sm_clock_mhz/mean"], first["gpu/memory_clock_mhz/mean"]) == (1980, 2619)
    assert (first["gpu/temperature_c/mean"], first["gpu/temperature_c/max"]) == (50, 60)
    assert first["gpu/ecc_errors/max"] == first["gpu/ecc_errors/mean"] == 2, (
        "the second GPU has no ECC"
    )
    assert first["gpu/throttled/mean"] == 0.5, "a power cap is no fault"
    assert first["gpu/power_w/mean"] < first["gpu/power_w/max"] < second["gpu/power_w/mean"], (
        "since the last call"
    )
    assert second["gpu/power_w/max"] - second["gpu/power_w/mean"] > 200, (
        "the thread read more than once"
    )
    assert second.keys() == first.keys() and "shutdown" in stderr


def test_what_no_gpu_reports_is_left_out(library: Path) -> None:
    (first, _), _ = read(library, "bbb")
    assert first["gpu/memory_gb/mean"] == first["gpu/memory_gb/max"] == 30.0
    assert not [key for key in first if "ecc" in key]


def test_gpus_by_index(library: Path) -> None:
    (first, _), _ = read(library, "1")
    assert first["gpu/memory_gb/mean"] == first["gpu/memory_gb/max"] == 30.0
    assert read(library, "2") == (None, "")


def test_without_a_gpu_or_a_driver_there_is_nothing(library: Path, tmp_path: Path) -> None:
    assert read(library, "ccc") == (None, "")
    assert read(library) == (None, "")
    assert read(tmp_path, "aaa") == (None, ""), "no driver"


def test_a_cpu_imports_nothing() -> None:
    assert open_gpus([]) is None
    code = "from megarl.telemetry.gpus import open_gpus; import sys; open_gpus([]); assert 'pynvml' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
