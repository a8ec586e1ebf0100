"""The ledger balances whatever a run does and wherever it is killed; an audit names the prompts that do not."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megarl.cli import main
from megarl.config.run_dir import LEDGER
from megarl.data.ledger import Ledger
from megarl.telemetry.audit import audit
from megarl.types import Prompt


class Stream:
    """roles.Prompts: some positions have prompts that are too long."""

    def __init__(self) -> None:
        self.position = self.skipped = 0
        self.kept: dict[str, float] = {}

    def take(self, count: int) -> list[Prompt]:
        taken = []
        while len(taken) < count:
            if self.position % 7 == 3:
                self.skipped += 1
            else:
                taken.append(Prompt(self.position, (1,), ""))
            self.position += 1
        return taken

    def put_back(self, prompts) -> None:
        first = prompts[0].prompt_id
        self.skipped -= self.position - first - len(prompts)
        assert self.skipped == sum(number % 7 == 3 for number in range(first)), (
            "only the last ones can be put back"
        )
        self.position = first

    def observe(self, groups) -> None:
        pass

    def state(self) -> dict[str, Any]:
        return {"position": self.position, "skipped": self.skipped}

    def restore(self, state) -> None:
        self.position, self.skipped = state["position"], state["skipped"]


class Killed(Exception):
    pass


class Run:
    """Batches of four prompts for the steps from `start` on, `ahead` of them at a time; saves every second step."""

    def __init__(
        self,
        folder: Path,
        state: dict[str, Any] | None,
        start: int,
        draw: random.Random,
        ahead: int,
    ) -> None:
        self.ledger, self.draw, self.ahead, self.start = Ledger(Stream()), draw, ahead, start
        if state:
            self.ledger.restore(json.loads(json.dumps(state)))
        self.ledger.open(folder / LEDGER, step=start, max_staleness=ahead)
        self.saved = (start, state)
        self.trained: dict[int, list[int]] = {}
        self.open: dict[int, list[Prompt]] = {}

    def begin(self, step: int, version: int, count: int) -> None:
        prompts = self.ledger.take(count)
        self.ledger.note("generating", step, [p.prompt_id for p in prompts], version=version)
        self.open.setdefault(step, []).extend(prompts)

    def go(self, steps: int, events: int) -> None:
        for step in range(self.start, steps):
            for ahead in range(step, min(step + self.ahead + 1, steps)):
                if ahead not in self.open:
                    self.begin(ahead, step, 4)
            for _ in range(self.draw.randrange(3)):  # of any batch that is open: it needs more
                self.begin(self.draw.choice(sorted(self.open)), step, self.draw.randint(1, 3))
            events = self.count(events)
            batch = self.open.pop(step)
            self.ledger.note("complete", step, [p.prompt_id for p in batch])
            used = self.draw.randint(1, len(batch))
            self.ledger.put_back(batch[used:])
            events = self.count(events)
            ids = [p.prompt_id for p in batch[:used]]
            cut = self.draw.randint(0, len(ids))
            self.ledger.settle(
                step, {"trained": ids[:cut], "filtered/no_spread": ids[cut:]}, oldest=step
            )
            self.trained[step] = ids
            if step % 2:
                self.saved = (step + 1, self.ledger.state())
            events = self.count(events)

    def count(self, events: int) -> int:
        if not events:
            raise Killed
        return events - 1


def killed_runs(
    folder: Path, kills: list[int], seed: int, ahead: int, steps: int = 12
) -> dict[int, list[int]]:
    """The prompts of each step, of the last time that it was trained."""
    state, start, trained = None, 0, {}
    for events in [*kills, 10**9]:
        run = Run(folder, state, start, random.Random(f"{seed}/{start}"), ahead)
        try:
            run.go(steps, events)
        except Killed:
            with (folder / LEDGER).open("a") as out:
                out.write('{"event": "taken", "ids": [[3' * (events % 2))
        trained |= run.trained
        (start, state) = run.saved
    return trained


@example(
    kills=[5], seed=0, ahead=2
)  # resumes with batches that are settled behind the cursor, and settles all before
@given(
    kills=st.lists(st.integers(0, 14), max_size=5), seed=st.integers(0, 99), ahead=st.integers(0, 3)
)
def test_it_balances_wherever_a_run_is_killed(
    tmp_path_factory: pytest.TempPathFactory, kills: list[int], seed: int, ahead: int
) -> None:
    folder = tmp_path_factory.mktemp("run")
    trained = killed_runs(folder, kills, seed, ahead)
    report = audit(folder)
    assert not report.problems
    used = Counter(number for ids in trained.values() for number in ids)
    assert set(used.values()) == {1}, "none is used twice"
    left = {number for number, state in report.states.items() if state == "carried"}
    assert not left & used.keys() and report.starts == len(kills) + 1
    assert used.keys() | left | report.too_long == set(range(report.head)), "none is lost"
    assert {number for number in range(report.head) if number % 7 == 3} == report.too_long


def test_the_cursor_is_that_of_what_was_trained() -> None:
    """Of a prefix it is a number; a batch that was trained before an earlier one's refill is listed."""
    ledger = Ledger(Stream())
    first, second = ledger.take(4), ledger.take(4)  # 0 1 2 4, 5 6 7 8
    ledger.settle(0, {"trained": [p.prompt_id for p in first]})
    assert ledger.state() == {"position": 5, "skipped": 1}
    ledger.take(3)  # 9 11 12: of another step
    ledger.settle(1, {"trained": [p.prompt_id for p in second[1:]]})
    assert ledger.state() == {"position": 5, "skipped": 1, "settled": [6, 7, 8]}
    again = Ledger(Stream())
    again.restore(ledger.state())
    again.take(1)
    again.settle(2, {"trained": [5]})
    assert [p.prompt_id for p in again.take(3)] == [9, 11, 12], (
        "those behind the cursor are not forgotten"
    )


FAULTS = {
    "the checkpoint's cursor is that of what was taken": (
        ("position", 6),
        "are done in the checkpoint",
    ),
    "the checkpoint repeats what it has trained": (("position", 0), "will take them again"),
    "prompts are passed over": (("start", 9), "were passed over"),
    "an id vanishes on the way": (("ids", [[5, 6]]), "were not taken"),
    "an id is taken twice": (("ids", [[0, 0], [5, 7]]), "were taken twice"),
    "a token is too old": (("oldest", -1), "older than"),
    "generated for a later step": (("version", -1), "were sampled by version -1"),
    "trained before it was complete": (("event", "gone"), "became trained, but were generating"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_audit_names_the_prompts_that_do_not_balance(tmp_path: Path, capsys, fault: str) -> None:
    ledger = Ledger(Stream())
    ledger.open(tmp_path / LEDGER, step=0)
    for step in range(2):
        ids = [p.prompt_id for p in ledger.take(3)]
        ledger.note("generating", step, ids, version=step)
        ledger.note("complete", step, ids)
        ledger.settle(step, {"trained": ids}, oldest=step)
    again = Ledger(Stream())
    again.restore({"position": 3, "skipped": 0})  # the checkpoint after step 0
    again.open(tmp_path / LEDGER, step=1)
    assert main(["audit", str(tmp_path)]) == 0, capsys.readouterr().err
    assert (
        "6 prompts taken = 3 trained + 0 filtered + 0 dropped + 3 carried over"
        in capsys.readouterr().out
    )
    (key, value), message = FAULTS[fault]
    rows = [json.loads(line) for line in (tmp_path / LEDGER).read_text().splitlines() if line]
    at = {"position": -1, "oldest": 8, "version": 2, "event": 3}.get(key, 5)
    assert key in rows[at]
    rows[at][key] = value
    (tmp_path / LEDGER).write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["audit", str(tmp_path)]) == 3
    assert message in capsys.readouterr().err


def test_the_samples_on_disk_are_those_of_the_ledger(tmp_path: Path, capsys) -> None:
    ledger = Ledger(Stream())
    ledger.open(tmp_path / LEDGER, step=0)
    ledger.take(3)
    ledger.note("generating", 0, [0, 1, 2], version=0)
    ledger.note("complete", 0, [0, 1, 2])
    ledger.settle(0, {"trained": [0, 1], "filtered/no_spread": [2]}, oldest=0)
    (tmp_path / "rollouts").mkdir()
    file, row = tmp_path / "rollouts" / "step_000000.jsonl", {"prompt_id": 1, "versions": [[0, 5]]}
    for change, code in (
        ({}, 0),
        ({"prompt_id": 2}, 3),
        ({"prompt_id": 4}, 3),
        ({"versions": [[-1, 5]]}, 3),
    ):
        file.write_text(json.dumps(row | change))
        assert main(["audit", str(tmp_path)]) == code, change
    assert (
        main(["audit", str(tmp_path / "rollouts")]) == 2
        and "has no ledger.jsonl" in capsys.readouterr().err
    )


def test_an_audit_needs_no_torch(tmp_path: Path) -> None:
    Ledger(Stream()).open(tmp_path / LEDGER, step=0)
    code = (
        f"import sys; from megarl.cli import main; assert main(['audit', {str(tmp_path)!r}]) == 0"
    )
    subprocess.run([sys.executable, "-c", f"{code}; assert 'torch' not in sys.modules"], check=True)
