from __future__ import annotations

import pytest
import torch

from megarl.platform.device import pick_device


@pytest.mark.skipif(torch.cuda.is_available(), reason="of machines without a GPU")
def test_without_a_gpu_it_is_the_cpu_with_gloo() -> None:
    device = pick_device(3)
    assert (device.torch.type, device.backend, device.is_cuda) == ("cpu", "gloo", False)
