"""Device memory and moved bytes of a step of shipped configs, counted on meta tensors: bounds, and the old order beyond them."""

from __future__ import annotations

import pytest

from benchmarks.memory_phases import HERE, SHIPPED, count_step

SMALLEST = "configs/gpu/qwen3_30b_a3b_8gpu.yaml"


@pytest.mark.parametrize("file", [SMALLEST])
def test_a_step_of_a_shipped_config_stays_within_bounds(file: str) -> None:
    now = count_step(HERE / file, SHIPPED[file])
    before = count_step(HERE / file, SHIPPED[file], is_before=True)
    share = now["rollout"]
    assert share == pytest.approx(0.7 * 80, abs=0.1)
    assert now["first probe"] < share + 0.1 < before["first probe"] - 3, "beside the KV cache"
    state = now["save, to host"]
    assert state == pytest.approx(45.8, abs=0.1)
    assert now["step, to host"] == now["step, to device"] == state, "once a step"
    assert before["step, to host"] == before["step, to device"] == pytest.approx(4 * state)
    assert now["update, to host"] == now["update, to device"] == 0, "the last of a step"
    assert now["sync, to host"] == now["sync, to device"] == 0, "weights are not offloaded"
    # with activations, which are not beside the state before
    assert 72 < before["step"] < now["step"] < 78
