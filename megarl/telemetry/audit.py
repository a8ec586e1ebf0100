"""`megarl audit`: replays a run's ledger (data/ledger.py) from its file alone, and verifies that
every prompt is accounted for.
"""

import json
from collections import Counter
from collections.abc import Iterable, Set
from itertools import chain
from pathlib import Path

from megarl.config.run_dir import LEDGER
from megarl.telemetry.metrics import iterate_jsonl
from megarl.telemetry.sample_files import sample_files

EVENTS = "start taken generating complete carried settled"
Runs = list[list[int]]  # inclusive ranges [first, last] of ids
SHOWN = 8  # maximum number of ids in a message


def _ids(runs: Runs) -> list[int]:
    """Expands ranges into a list of ids."""
    return list(chain.from_iterable(range(first, last + 1) for first, last in runs))


class Audit:
    """A replay of a ledger file, independent of the state of the process that wrote the file.

    `problems` lists every inconsistency found; str() returns the balance.
    """

    def __init__(self, file: Path) -> None:
        """Replays `file`; damaged lines are problems, unless a new start follows them."""
        # prompt id -> its last event, or its outcome once settled
        self.states: dict[int, str] = {}
        self.steps: dict[int, int] = {}  # prompt id -> step at which it was settled
        self.too_long = set()
        self.problems = []
        self.starts = 0
        self.head = 0  # first position that was never taken
        self.first = 0  # position at which the file begins
        self.max_staleness = 0
        self.is_settled = set()  # (step, which model trained on it)
        torn = 0
        handlers = {name: getattr(self, f"_{name}") for name in EVENTS.split()}
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
                torn = number  # may be the last line of a process that was killed

    def _start(self, step: int, position: int, settled: Runs, max_staleness: int) -> None:
        self.starts += 1
        self.max_staleness = max_staleness
        if self.starts == 1:
            self.first = self.head = position
            self.steps = dict.fromkeys(_ids(settled), -1)  # settled by an earlier run
        done = {number for number, at in self.steps.items() if at < step}
        saved = {*range(self.first, position), *_ids(settled)}
        unsettled = saved - done - self.too_long
        self._report(
            unsettled, f"are done in the checkpoint of step {step}, but were never settled"
        )
        again = f"were settled before step {step}, whose checkpoint will take them again"
        self._report(done - saved, again)
        for number in self.states.keys() - done:
            self.states[number] = "carried"
            self.steps.pop(number, None)
        self.is_settled = {(at, by) for at, by in self.is_settled if at < step}

    def _taken(self, ids: Runs, start: int, to: int, too_long: int) -> None:
        taken = set(_ids(ids))
        self._report(range(self.head, start), "were passed over")
        gaps = set(range(start, to)) - taken - self.steps.keys()
        if len(gaps) != too_long:
            self._report(gaps, f"were not taken; {too_long} of them were too long")
        self.too_long |= gaps
        again = {number for number in taken if self.states.get(number, "carried") != "carried"}
        self._report(again, "were taken twice")
        self.head = max(self.head, to)
        self.states |= dict.fromkeys(taken, "taken")

    def _generating(self, step: int, ids: Runs, version: int) -> None:
        self._move(ids, {"taken"}, "generating")
        if not 0 <= step - version <= self.max_staleness:
            self.problems.append(
                f"prompts of step {step} were sampled by version {version}: {self.max_staleness=}"
            )

    def _complete(self, step: int, ids: Runs) -> None:
        self._move(ids, {"generating"}, "complete")

    def _carried(self, ids: Runs) -> None:
        self._move(ids, {"taken", "generating", "complete"}, "carried")

    def _settled(
        self,
        step: int,
        outcomes: dict[str, Runs],
        by: str = "policy",
        oldest: int | None = None,
    ) -> None:
        if (step, by) in self.is_settled:
            self.problems.append(f"step {step} was settled twice")
        self.is_settled.add((step, by))
        for outcome, runs in outcomes.items():
            self._move(runs, {"complete"}, outcome)
            self.steps |= dict.fromkeys(_ids(runs), step)
        if oldest is not None and step - oldest > self.max_staleness:
            self.problems.append(
                f"step {step} trained tokens of version {oldest}: older than {self.max_staleness=}"
            )

    def _move(self, runs: Runs, states: Set[str], state: str) -> None:
        ids = _ids(runs)
        for was in {self.states.get(number, "never taken") for number in ids} - states:
            wrong = [number for number in ids if self.states.get(number, "never taken") == was]
            self._report(wrong, f"became {state}, but were {was}")
        self.states |= dict.fromkeys(ids, state)

    def _report(self, wrong: Iterable[int], text: str) -> None:
        """Adds a problem with the ids of the prompts in `wrong`; does nothing if there are none."""
        numbers = sorted(wrong)
        if not numbers:
            return
        first = ", ".join(map(str, numbers[:SHOWN]))
        if len(numbers) > SHOWN:
            first += f" and {len(numbers) - SHOWN} more"
        self.problems.append(f"prompts {first} {text}")

    def compare(self, samples: Path, step: int) -> None:
        """Verifies a step's sample file: adds a problem for prompts that were not trained at this
        step, and for tokens that are too stale.
        """
        untrained = set()
        stale = set()
        for row in iterate_jsonl(samples, prompt_id=int, versions=list):
            prompt_id = row["prompt_id"]
            state = self.states.get(prompt_id, "")
            if self.steps.get(prompt_id) != step or state.startswith("filtered"):
                untrained.add(prompt_id)
            if any(not 0 <= step - version <= self.max_staleness for version, _ in row["versions"]):
                stale.add(prompt_id)
        self._report(untrained, f"are in {samples.name}, but were not trained at step {step}")
        self._report(
            stale, f"have tokens in {samples.name} that are staler than {self.max_staleness}"
        )

    def __str__(self) -> str:
        counts = Counter(state.partition("/")[0] for state in self.states.values())
        causes = Counter(state for state in self.states.values() if "/" in state)
        named = dict.fromkeys(("trained", "filtered", "dropped", "carried"), 0) | counts
        sums = " + ".join(f"{count} {name}" for name, count in named.items())
        lines = [
            f"{len(self.states)} prompts taken = {sums.replace(' carried', ' carried over')}; "
            f"{len(self.too_long)} too long; {self.starts} starts"
        ]
        lines += [f"  {name}: {count}" for name, count in sorted(causes.items())]
        return "\n".join(lines)


def audit(folder: Path) -> Audit:
    """Replays a run's ledger, and compares the run's sample files with it.

    Raises ValueError if the folder has no ledger.
    """
    file = folder / LEDGER
    if not file.is_file():
        raise ValueError(f"{folder} has no {LEDGER}; stages that sample write one")
    report = Audit(file)
    for step, samples in sample_files(folder / "rollouts").items():
        report.compare(samples, step)
    return report
