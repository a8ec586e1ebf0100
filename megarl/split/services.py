"""Typed interfaces of remote calls in the split topology: to engines, and to both sides of a sync.

    ranks.service.score(batch)                         waits for the value and returns it
    ranks.begin(lambda rank: rank.transfer(version))   starts the call and returns its refs

Both are method calls on a proxy (proxy.py) that is cast to an interface, so a type checker verifies
names, arguments and return values. The interface of trainer ranks is trainer_rank.TrainerRank.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from megarl.types import Request, SampleKey


class SyncService(Protocol):
    """The methods that both sides of a weight sync have; each is a collective of all trainer ranks
    and engine workers.
    """

    def join(self, group: Mapping[str, Any]) -> Any:
        """Joins the process group of the sync; `group` has the fields of a SyncGroup."""

    def transfer(self, version: int) -> Any:
        """Sends (trainer) or receives (engine) the weights of `version`."""

    def end(self, version: int, committed: bool) -> Any:
        """Commits the version, or aborts the sync if `committed` is False."""


class EngineService(SyncService, Protocol):
    """The remote methods of rollout.vllm.async_engine.AsyncEngine."""

    def submit(self, requests: Sequence[Request]) -> None: ...
    def poll(self) -> Any: ...
    def abort(self, keys: Sequence[SampleKey]) -> Any: ...
    def drop(self) -> None: ...
    def open(self, version: int) -> None: ...
    def complete(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Tensor]: ...
    def score(self, rows: Sequence[Sequence[int]]) -> list[Tensor]: ...
