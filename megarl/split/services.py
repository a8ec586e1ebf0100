"""What both sides of a weight sync, and an engine, can be asked in the split topology.

    ranks.service.score(batch)                         waits for the value, of this type
    ranks.begin(lambda rank: rank.transfer(version))   only begins the call

Both are attribute calls through a proxy (proxy.py), so a type checker sees the name, the arguments
and the value; a rank's are those of trainer_rank.TrainerRank.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from megarl.types import Request, SampleKey


class SyncService(Protocol):
    """The two sides of a weight sync; ranks and workers meet in each call."""

    def join(self, group: Mapping[str, Any]) -> Any:
        """Joins the process group of the sync; `group`: the values of a SyncGroup."""

    def transfer(self, version: int) -> Any:
        """Sends or receives `version`."""

    def end(self, version: int, committed: bool) -> Any:
        """Commits the version, or gives it up."""


class EngineService(SyncService, Protocol):
    """The methods of rollout.vllm.async_engine.AsyncEngine."""

    def submit(self, requests: Sequence[Request]) -> None: ...
    def poll(self) -> Any: ...
    def abort(self, keys: Sequence[SampleKey]) -> Any: ...
    def drop(self) -> None: ...
    def open(self, version: int) -> None: ...
    def complete(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Tensor]: ...
    def score(self, rows: Sequence[Sequence[int]]) -> list[Tensor]: ...
