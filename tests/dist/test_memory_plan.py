"""The plan of memory against bytes alive in real trainers of four ranks, on a device that a CPU stands for."""

from __future__ import annotations

import pytest

from benchmarks.memory_plan import CASES, compare, run

QUICK = (  # on every change
    "dense, tensor 2, pipeline 2, full recompute",
    "experts, tensor 2, expert 2",
)


@pytest.mark.parametrize(
    "names", [QUICK, pytest.param((), marks=[pytest.mark.long, pytest.mark.exhaustive])]
)
def test_the_plan_is_what_lives_on_the_device(names: tuple[str, ...]) -> None:
    cases = [case for case in CASES if not names or case.name in names]
    found = run(cases)
    assert len(found) >= 2
    for case in cases:
        for name, (counted, plan) in compare(case, found[case.name]).items():
            print(case.name, name, counted, plan)
            if name.startswith(("weights", "gradients", "optimizer")):
                assert plan == counted, (case.name, name)
            else:
                assert plan == pytest.approx(counted, rel=0.1), (case.name, name)
