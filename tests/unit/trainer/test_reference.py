from __future__ import annotations

import pytest
import torch

from megarl.trainer.reference import Reference


def test_lent_and_given_back() -> None:
    weight = torch.nn.Parameter(torch.randn(5, dtype=torch.bfloat16))
    first = weight.detach().clone()
    reference = Reference([weight])
    with torch.no_grad():
        weight.add_(1)
    later, place = weight.detach().clone(), weight.data_ptr()
    with reference.in_place_of([weight]):
        assert torch.equal(weight, first)
    assert torch.equal(weight, later) and weight.data_ptr() == place


def test_an_error_within_still_gives_the_weights_back() -> None:
    weight = torch.nn.Parameter(torch.randn(5))
    reference = Reference([weight])
    with torch.no_grad():
        weight.mul_(2)
    later = weight.detach().clone()
    with pytest.raises(RuntimeError), reference.in_place_of([weight]):
        raise RuntimeError
    assert torch.equal(weight, later)
