"""The environment of processes that train, by layout and GPU."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.config.load import parse_config
from megarl.platform.env import compute_capability
from megarl.run import rank_process
from megarl.run.rank_process import trainer_variables

NAME = "CUDA_DEVICE_MAX_CONNECTIONS"
HOPPER, BLACKWELL, NO_GPU = (9, 0), (10, 0), (0, 0)


@pytest.mark.parametrize(
    ("parallel", "capability", "expected"),
    [
        ({"tensor": 2}, HOPPER, {NAME: "1"}),
        ({"context": 2}, HOPPER, {NAME: "1"}),
        ({"tensor": 2}, NO_GPU, {NAME: "1"}),
        ({"tensor": 2}, BLACKWELL, {}),
        ({"tensor": 2}, (12, 0), {}),
        ({}, HOPPER, {}),
        ({"pipeline": 2, "expert": 2}, HOPPER, {}),
    ],
)
def test_kernels_run_in_launch_order_where_megatron_needs_it(
    parallel: dict[str, int],
    capability: tuple[int, int],
    expected: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(NAME, raising=False)
    monkeypatch.setattr(rank_process, "compute_capability", lambda: capability)
    config = parse_config({"model": {"create": {}}, "parallel": parallel})
    assert trainer_variables(config) == expected
    monkeypatch.setenv(NAME, "32")
    assert trainer_variables(config) == dict.fromkeys(expected, "32"), "the user's value stays"


def test_the_capability_is_asked_of_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    class NVMLError(Exception):
        pass

    def fail() -> None:
        raise NVMLError

    nvml: Any = SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda index: f"gpu {index}",
        nvmlDeviceGetCudaComputeCapability=lambda handle: [9, 0] if handle == "gpu 0" else [],
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert compute_capability() == HOPPER
    nvml.nvmlInit = fail
    assert compute_capability() == NO_GPU
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert compute_capability() == NO_GPU
