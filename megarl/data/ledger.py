"""The ledger of a run: what becomes of every prompt, at every moment and across crashes.

    taken --> generating --> complete --> trained, filtered (cause) or dropped (cause)
      ^                         '-------> carried over, to a later step
      '---- a run that starts again takes over what its checkpoint has settled, and carries over the rest

ledger.jsonl has an event per line, written by rank 0 and never changed: `start` of each process, and with the ids of
prompts `taken`, `generating`, `complete`, `carried` and, once a step is trained, `settled`. A step is settled before a
checkpoint after it can be complete. `audit` reads the file alone, and balances it.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from megarl.telemetry.metrics import read_jsonl
from megarl.telemetry.sample_files import sample_files

if TYPE_CHECKING:  # an audit needs no torch
    from megarl.roles import Prompts
    from megarl.types import Prompt

LEDGER = "ledger.jsonl"
EVENTS = ("start", "taken", "generating", "complete", "carried", "settled")
SHOWN = 8  # ids in a message


@dataclass
class Ledger:
    """roles.Prompts: the prompts of `stream`, in whose state a prompt counts as taken once it is settled."""

    stream: Prompts
    _open: dict[int, Prompt] = field(default_factory=dict)  # taken and not settled
    _carried: dict[int, Prompt] = field(
        default_factory=dict
    )  # to be taken again, before the stream goes on
    _settled: set[int] = field(default_factory=set)  # not before the first prompt that is not
    _last: int = -1  # of those that were ever settled
    _file: TextIO | None = None

    def open(self, file: Path, *, step: int, max_staleness: int = 0) -> None:
        """From here on events go to `file`; `step` steps are done. Only rank 0 calls it."""
        self._file, state = file.open("a", encoding="utf-8"), self.state()
        self._file.write("\n")  # the process before may have been killed in the middle of a line
        cursor = {"position": state["position"], "settled": _runs(state.get("settled", ()))}
        self._write("start", step=step, **cursor, max_staleness=max_staleness)

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
        positions = {"start": before["position"], "to": after["position"]}
        too_long = after.get("skipped", 0) - before.get("skipped", 0)
        self._write(
            "taken", ids=_runs(p.prompt_id for p in prompts), **positions, too_long=too_long
        )
        return prompts

    def put_back(self, prompts: Sequence[Prompt]) -> None:
        """Carries these over: `take` returns them again, before others."""
        if not prompts:
            return
        self._carried |= {prompt.prompt_id: self._open.pop(prompt.prompt_id) for prompt in prompts}
        self._write("carried", ids=_runs(prompt.prompt_id for prompt in prompts))
        behind = max([self._last, *self._open])
        if last := [
            self._carried.pop(number) for number in sorted(self._carried) if number > behind
        ]:
            self.stream.put_back(last)

    def note(self, event: str, step: int, ids: Iterable[int], **values: Any) -> None:
        """Records that prompts are `generating` or `complete`."""
        self._write(event, step=step, ids=_runs(ids), **values)

    def settle(self, step: int, outcomes: Mapping[str, Sequence[int]], **values: Any) -> None:
        """The prompts of a step by outcome: "trained", "filtered/CAUSE" or "dropped/CAUSE"; on disk when it returns."""
        ids = {number for numbers in outcomes.values() for number in numbers}
        for number in ids:
            del self._open[number]
        self._last = max([self._last, *ids])
        first = min([*self._open, *self._carried, self.stream.state()["position"]])
        self._settled = {number for number in self._settled | ids if number >= first}
        runs = {name: _runs(numbers) for name, numbers in outcomes.items() if numbers}
        self._write("settled", step=step, outcomes=runs, **values)
        if self._file is not None:
            os.fsync(self._file.fileno())

    def state(self) -> dict[str, Any]:
        """That of the stream before the first prompt that is not settled, and the settled ones behind it."""
        state, waiting = dict(self.stream.state()), [*self._open, *self._carried]
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


def _runs(ids: Iterable[int]) -> list[list[int]]:
    """[first, last] of the runs of these numbers."""
    runs: list[list[int]] = []
    for number in sorted(ids):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return runs


def _ids(runs: Sequence[Sequence[int]]) -> list[int]:
    return [number for first, last in runs for number in range(first, last + 1)]


@dataclass
class Audit:
    """A replay of a ledger, which trusts nothing that its writer knew."""

    states: dict[int, str] = field(
        default_factory=dict
    )  # of every prompt: its last event, or its outcome
    steps: dict[int, int] = field(default_factory=dict)  # of those that are settled
    too_long: set[int] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)
    starts: int = 0
    head: int = 0  # the first position that was never taken
    first: int = 0  # position at which the file begins
    max_staleness: int = 0
    is_settled: set[tuple[int, str]] = field(default_factory=set)  # step, by whom

    @classmethod
    def of(cls, file: Path) -> Audit:
        self, torn = cls(), 0
        handlers = {name: getattr(self, f"_{name}") for name in EVENTS}
        for number, line in enumerate(file.read_bytes().decode(errors="replace").split("\n"), 1):
            if not line:
                continue
            try:
                event = json.loads(line)
                handler = handlers[event.pop("event")]
                if torn and handler != self._start:
                    self.problems.append(f"line {torn} of {file.name} is damaged")
                torn = 0
                handler(**event)
            except (ValueError, KeyError, TypeError, AttributeError):
                torn = number  # perhaps the last line of a process that was killed
        return self

    def _start(
        self, step: int, position: int, settled: list[list[int]], max_staleness: int
    ) -> None:
        self.starts, self.max_staleness = self.starts + 1, max_staleness
        if self.starts == 1:
            self.first = self.head = position
            self.steps = dict.fromkeys(_ids(settled), -1)  # by another run
        done = {number for number, at in self.steps.items() if at < step}
        saved = {*range(self.first, position), *_ids(settled)}
        self._need(
            saved - done - self.too_long,
            f"are done in the checkpoint of step {step}, but were never settled",
        )
        self._need(
            done - saved, f"were settled before step {step}, whose checkpoint will take them again"
        )
        for number in self.states.keys() - done:
            self.states[number] = "carried"
            self.steps.pop(number, None)
        self.is_settled = {(at, by) for at, by in self.is_settled if at < step}

    def _taken(self, ids: list[list[int]], start: int, to: int, too_long: int) -> None:
        taken = set(_ids(ids))
        self._need(range(self.head, start), "were passed over")
        gaps = {
            number
            for number in range(start, to)
            if number not in taken and number not in self.steps
        }
        if len(gaps) != too_long:
            self._need(gaps, f"were not taken; {too_long} of them were too long")
        self.too_long |= gaps
        again = {number for number in taken if self.states.get(number, "carried") != "carried"}
        self._need(again, "were taken twice")
        self.head = max(self.head, to)
        self.states |= dict.fromkeys(taken, "taken")

    def _generating(self, step: int, ids: list[list[int]], version: int) -> None:
        self._move(_ids(ids), ("taken",), "generating")
        if not 0 <= step - version <= self.max_staleness:
            self.problems.append(
                f"prompts of step {step} were sampled by version {version}: {self.max_staleness=}"
            )

    def _complete(self, step: int, ids: list[list[int]]) -> None:
        self._move(_ids(ids), ("generating",), "complete")

    def _carried(self, ids: list[list[int]]) -> None:
        self._move(_ids(ids), ("taken", "generating", "complete"), "carried")

    def _settled(
        self,
        step: int,
        outcomes: dict[str, list[list[int]]],
        by: str = "policy",
        oldest: int | None = None,
    ) -> None:
        if (step, by) in self.is_settled:
            self.problems.append(f"step {step} was settled twice")
        self.is_settled.add((step, by))
        for outcome, runs in outcomes.items():
            self._move(_ids(runs), ("complete",), outcome)
            self.steps |= dict.fromkeys(_ids(runs), step)
        if oldest is not None and step - oldest > self.max_staleness:
            self.problems.append(
                f"step {step} trained tokens of version {oldest}: older than {self.max_staleness=}"
            )

    def _move(self, ids: Sequence[int], states: Sequence[str], state: str) -> None:
        for was in {self.states.get(number, "never taken") for number in ids} - set(states):
            wrong = [number for number in ids if self.states.get(number, "never taken") == was]
            self._need(wrong, f"became {state}, but were {was}")
        self.states |= dict.fromkeys(ids, state)

    def _need(self, wrong: Iterable[int], text: str) -> None:
        """There must be none."""
        if numbers := sorted(wrong):
            more = f" and {len(numbers) - SHOWN} more" if len(numbers) > SHOWN else ""
            self.problems.append(f"prompts {', '.join(map(str, numbers[:SHOWN]))}{more} {text}")

    def __str__(self) -> str:
        counts = Counter(state.partition("/")[0] for state in self.states.values())
        causes = Counter(state for state in self.states.values() if "/" in state)
        named = {"trained": 0, "filtered": 0, "dropped": 0, "carried": 0} | counts
        parts = [
            f"{count} {'carried over' if name == 'carried' else name}"
            for name, count in named.items()
        ]
        text = (
            f"{len(self.states)} prompts taken = {' + '.join(parts)}; {len(self.too_long)} too long"
        )
        return f"{text}; {self.starts} starts" + "".join(
            f"\n  {name}: {n}" for name, n in sorted(causes.items())
        )


def audit(folder: Path) -> Audit:
    """Replays the ledger of a run, and compares its samples on disk with it. Raises ValueError if it has none."""
    if not (file := folder / LEDGER).is_file():
        raise ValueError(f"{folder} has no {LEDGER}; stages that sample write one")
    report = Audit.of(file)
    trained = {
        (n, step)
        for n, step in report.steps.items()
        if not report.states.get(n, "").startswith("filtered")
    }
    for step, samples in sample_files(folder / "rollouts").items():
        rows, limit = read_jsonl(samples, prompt_id=int, versions=list), report.max_staleness
        untrained = {row["prompt_id"] for row in rows if (row["prompt_id"], step) not in trained}
        report._need(untrained, f"are in {samples.name}, but were not trained at step {step}")
        old = {
            row["prompt_id"]
            for row in rows
            for v, _ in row["versions"]
            if not 0 <= step - v <= limit
        }
        report._need(old, f"have tokens in {samples.name} that are staler than {limit}")
    return report
