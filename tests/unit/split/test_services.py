"""The services are what ranks and engines implement, and a proxy calls them by name."""

from __future__ import annotations

from inspect import Parameter, signature
from typing import Any, cast

import pytest

from megarl.rollout.vllm.async_engine import AsyncEngine
from megarl.split.proxy import Proxy
from megarl.split.services import EngineService, SyncService
from megarl.split.trainer_rank import TrainerRank


def methods(service: type) -> dict[str, list[str]]:
    """The methods that a service declares, and their parameters."""
    members = {name: member for base in service.__mro__ for name, member in vars(base).items()}
    return {
        name: parameters(member)
        for name, member in members.items()
        if callable(member) and not name.startswith("_")
    }


def parameters(function: Any) -> list[str]:
    of = signature(function).parameters.values()
    return [each.name for each in of if each.kind is Parameter.POSITIONAL_OR_KEYWORD]


@pytest.mark.parametrize(
    ("service", "implementation"), [(SyncService, TrainerRank), (EngineService, AsyncEngine)]
)
def test_every_method_is_implemented_with_the_same_parameters(
    service: type, implementation: type
) -> None:
    assert methods(SyncService).keys() <= methods(service).keys()
    assert len(methods(EngineService)) > 8
    for name, names in methods(service).items():
        assert parameters(getattr(implementation, name)) == names, name


def test_a_proxy_calls_by_name() -> None:
    asked = list[tuple[Any, ...]]()
    rank = cast(TrainerRank, Proxy(lambda *call: asked.append(call)))
    rank.end(3, True)
    rank.close()
    assert asked == [("end", 3, True), ("close",)]
