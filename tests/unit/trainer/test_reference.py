from __future__ import annotations

import pytest
import torch

from megarl.platform.device import host_bytes
from megarl.trainer import reference as module
from megarl.trainer.reference import Reference


def test_lent_and_given_back() -> None:
    weight = torch.nn.Parameter(torch.randn(5, dtype=torch.bfloat16))
    first = weight.detach().clone()
    reference = Reference(lambda: {"weight": weight})
    with torch.no_grad():
        weight.add_(1)
    later, place = weight.detach().clone(), weight.data_ptr()
    with reference.in_use():
        assert torch.equal(weight, first)
    assert torch.equal(weight, later) and weight.data_ptr() == place


def test_an_error_within_still_gives_the_weights_back() -> None:
    weight = torch.nn.Parameter(torch.randn(5))
    reference = Reference(lambda: {"weight": weight})
    with torch.no_grad():
        weight.mul_(2)
    later = weight.detach().clone()
    with pytest.raises(RuntimeError), reference.in_use():
        raise RuntimeError
    assert torch.equal(weight, later)


def test_shared_storages_of_several_dtypes_are_exchanged_in_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "EXCHANGED_BYTES", 16)
    flat, bias = torch.randn(37, dtype=torch.bfloat16), torch.randn(3)
    parts = {"a": flat[:12].view(3, 4), "b": flat[12:30], "bias": bias}
    reference, first = Reference(lambda: parts), [flat.clone(), bias.clone()]
    flat.add_(1), bias.mul_(2)
    later = [flat.clone(), bias.clone()]
    for _ in range(2):
        with reference.in_use():
            assert torch.equal(flat, first[0]) and torch.equal(bias, first[1])
        assert torch.equal(flat, later[0]) and torch.equal(bias, later[1])


def test_weights_that_changed_in_the_meantime_are_noticed() -> None:
    weight = torch.randn(5)
    reference = Reference(lambda: {"weight": weight})
    with (
        pytest.raises(AssertionError, match="the weights changed behind"),
        reference.in_use(),
    ):
        reference._host.with_storages([weight])[0][1].add_(1)


def test_host_memory_is_pinned_for_a_gpu_only() -> None:
    assert not host_bytes(8, torch.device("cpu")).is_pinned()
    if not torch.cuda.is_available():  # it asks for pinned memory, which does not exist here
        with pytest.raises(RuntimeError):
            host_bytes(8, torch.device("cuda"))
