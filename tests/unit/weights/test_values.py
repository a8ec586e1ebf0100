"""Control values of ranks: what megarl sends arrives as it was, and nothing else is built or run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megarl.models.shards import ShardSlice
from megarl.parity.statistics import Quantiles
from megarl.types import CheckFailed, Routes
from megarl.weights.sync.transports.values import carry, gather_values


class Crafted:
    """A pickle that touches a file when it is loaded."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


@pytest.fixture(autouse=True)
def _one_rank() -> Any:
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_values_arrive_as_they_were() -> None:
    values = [
        None, 3, 0.5, "text", [1, "a"], (1, None), {"a": {"bytes": 3}}, torch.float32,
        Quantiles(0.1, 0.2, 0.3, 4), ShardSlice("a.weight", (0, 1), (2, 3), "b.weight", 5, (3, 1)),
    ]  # fmt: skip
    assert gather_values(values) == [values]


def test_tensors_arrive_as_they_were() -> None:
    carry(Routes)
    routes = Routes((0, 1), (7, 2**63 + 1), torch.arange(24, dtype=torch.uint8).view(2, 4, 3))
    ((got, state),) = gather_values(
        [routes, {"layer": torch.full((2,), torch.nan, dtype=torch.bfloat16)}]
    )
    assert (got.owners, got.checksums) == (routes.owners, routes.checksums)
    assert got.experts.dtype == torch.uint8
    assert got.experts.equal(routes.experts)
    assert state["layer"].dtype == torch.bfloat16
    assert state["layer"].isnan().all()


def test_what_is_no_value_is_refused_without_running_it(tmp_path: Path) -> None:
    with pytest.raises(
        CheckFailed, match="rank 0 sent what is not a value of megarl, and it was not run"
    ):
        gather_values({"errors": [Crafted(tmp_path / "ran")]})
    assert not (tmp_path / "ran").exists()
    dist.all_gather_object([None], Crafted(tmp_path / "ran"))  # as torch.distributed's own would
    assert (tmp_path / "ran").exists()
