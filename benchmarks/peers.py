"""Imports of other software to compare with. Nothing else needs it.

verl's functions live in a module that imports all of verl, which imports a few packages that these functions never
call. Those of them that are not installed are replaced by empty modules in the benchmark's process, so that
`pip install --no-deps verl==0.9.1` is enough.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from benchmarks.frame import Missing

__all__ = ["TRL", "VERL", "trl_module", "verl_core_algos", "verl_module"]

VERL, TRL = "verl==0.9.1", "trl==1.16.0"
NEVER_CALLED = ("ray", "tensordict", "omegaconf", "codetiming", "pandas", "orjson")


def verl_core_algos() -> ModuleType:
    """verl's module of advantages and losses. Raises Missing with the command that installs it."""
    return verl_module("verl.trainer.ppo.core_algos")


def verl_module(name: str) -> ModuleType:
    """Raises Missing with the command that installs verl."""
    if find_spec("verl") is None:
        raise Missing(f"not installed: pip install --no-deps {VERL}")
    sys.meta_path.append(_StandIns([name for name in NEVER_CALLED if find_spec(name) is None]))
    warnings.simplefilter("ignore")
    return import_module(name)


def trl_module(name: str) -> ModuleType:
    """Raises Missing with the command that installs TRL."""
    if find_spec("trl") is None:
        raise Missing(f"not installed: pip install --no-deps {TRL} accelerate datasets pandas")
    return import_module(name)


class _StandIns(MetaPathFinder, Loader):
    """Imports the named packages as empty modules."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> ModuleSpec | None:
        return (
            ModuleSpec(fullname, self, is_package=True)
            if fullname.partition(".")[0] in self.names
            else None
        )

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class _Anything(type):
    """Metaclass of a class usable as a base class, decorator, annotation or constant."""

    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls

    def __or__(cls, other: object) -> Any:
        return cls

    def __ror__(cls, other: object) -> Any:
        return cls

    def __call__(cls, *args: object, **kwargs: object) -> object:
        return args[0] if len(args) == 1 and callable(args[0]) else cls

    def __getitem__(cls, item: object) -> type:
        return cls


class _Nothing(metaclass=_Anything):
    pass


class _Empty(ModuleType):
    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing
