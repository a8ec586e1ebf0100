"""The ledger of a run: records the state of every prompt, also across crashes.

    taken --> generating --> complete --> trained, filtered (cause) or dropped (cause)
      ^                         '-------> carried over to a later step
      '---- a resumed run takes prompts again unless its checkpoint counts them as settled

ledger.jsonl has one event per line. Rank 0 appends them and never changes a line. `start` records
each start of the run; `taken`, `generating`, `complete`, `carried` and, after a step is trained,
`settled` have ids of prompts. A step is settled before the checkpoint that follows it is complete.
The ledger's state is the data cursor in a checkpoint. `megarl audit` (telemetry/audit.py) reads the
file alone.
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, TextIO

from megarl.roles import Prompts
from megarl.types import Group, Prompt


@dataclass
class Ledger:
    """Implements roles.Prompts: yields the prompts of `stream` and records what happens to them.

    In its state, unlike the stream's, a prompt counts as taken only after it is settled.
    """

    stream: Prompts
    _open: dict[int, Prompt] = field(default_factory=dict)  # taken, neither settled nor carried
    # taken again before new prompts of the stream
    _carried: dict[int, Prompt] = field(default_factory=dict)
    _settled: set[int] = field(default_factory=set)  # settled ids after the first unsettled one
    _last: int = -1  # the largest id that was ever settled
    _file: TextIO | None = None

    def open(self, file: Path, *, step: int, max_staleness: int = 0) -> None:
        """Appends a `start` event to `file`, and all later events. Only rank 0 calls this.

        `step` is the number of finished steps.
        """
        state = self.state()
        self._file = file.open("a", encoding="utf-8")
        self._file.write("\n")  # an earlier process may have been killed in the middle of a line
        self._write(
            "start",
            step=step,
            position=state["position"],
            settled=ranges_of(state.get("settled", ())),
            max_staleness=max_staleness,
        )

    @property
    def kept(self) -> dict[str, float]:
        return self.stream.kept

    def take(self, count: int) -> list[Prompt]:
        prompts = [self._carried.pop(number) for number in sorted(self._carried)[:count]]
        before = self.stream.state()
        while len(prompts) < count:
            fresh = self.stream.take(count - len(prompts))
            prompts += [prompt for prompt in fresh if prompt.prompt_id not in self._settled]
        self._open |= {prompt.prompt_id: prompt for prompt in prompts}
        after = self.stream.state()
        self._write(
            "taken",
            ids=ranges_of(prompt.prompt_id for prompt in prompts),
            start=before["position"],
            to=after["position"],
            too_long=after.get("skipped", 0) - before.get("skipped", 0),
        )
        return prompts

    def put_back(self, prompts: Sequence[Prompt]) -> None:
        """Carries prompts over: `take` returns them again, before new ones."""
        if not prompts:
            return
        self._carried |= {prompt.prompt_id: self._open.pop(prompt.prompt_id) for prompt in prompts}
        self._write("carried", ids=ranges_of(prompt.prompt_id for prompt in prompts))
        behind = max([self._last, *self._open])
        last = [number for number in sorted(self._carried) if number > behind]
        if last:
            self.stream.put_back([self._carried.pop(number) for number in last])

    def observe(self, groups: Sequence[Group]) -> None:
        self.stream.observe(groups)

    def note(self, event: str, step: int, ids: Iterable[int], **values: int) -> None:
        """Records that prompts are `generating` or `complete`."""
        self._write(event, step=step, ids=ranges_of(ids), **values)

    def settle(
        self, step: int, outcomes: Mapping[str, Sequence[int]], **values: int | str | None
    ) -> None:
        """Records the ids of a step's prompts by outcome, and syncs the file to disk.

        Outcomes are "trained", "filtered/CAUSE" and "dropped/CAUSE".
        """
        ids = set(chain.from_iterable(outcomes.values()))
        for number in ids:
            del self._open[number]
        self._last = max([self._last, *ids])
        first = min([*self._open, *self._carried, self.stream.state()["position"]])
        self._settled = {number for number in self._settled | ids if number >= first}
        runs = {name: ranges_of(numbers) for name, numbers in outcomes.items() if numbers}
        self._write("settled", step=step, outcomes=runs, **values)
        if self._file is not None:
            os.fsync(self._file.fileno())

    def state(self) -> dict[str, Any]:
        """Returns the stream's state at the first unsettled prompt and the ids settled after it."""
        state = dict(self.stream.state())
        waiting = [*self._open, *self._carried]
        position = state["position"]
        first = min([*waiting, position])
        behind = sorted(number for number in self._settled if number >= first)
        skipped = position - first - len(waiting) - sum(number < position for number in behind)
        state |= {"position": first, "skipped": state.get("skipped", 0) - skipped}
        return state | ({"settled": behind} if behind else {})

    def restore(self, state: Mapping[str, Any]) -> None:
        self.stream.restore(state)
        self._settled = set(state.get("settled", ()))
        self._last = max([int(state["position"]) - 1, *self._settled])

    def _write(self, event: str, **values: Any) -> None:
        if self._file is not None:
            self._file.write(json.dumps({"event": event, **values}) + "\n")
            self._file.flush()


def ranges_of(ids: Iterable[int]) -> list[list[int]]:
    """Returns [first, last] of each run of consecutive numbers."""
    ranges = []
    for number in sorted(ids):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ranges
