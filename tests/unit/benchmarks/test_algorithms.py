"""The smallest case of `python -m benchmarks algorithms`."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.algorithms import ALGORITHMS, compare, draw, findings, right_so_far, summary, train


@pytest.mark.parametrize(
    ("steps", "scores"),
    [
        (["1", "2"], [1, 1]),
        (["1", "3"], [1, 0]),
        (["2", "2"], [0, 0]),
        (["1", "2", "0"], [1, 1, 0]),
        ([], []),
    ],
)
def test_digits_are_right_while_they_begin_the_answer(steps: list[str], scores: list[float]):
    assert right_so_far("5 + 7", steps, "12") == scores


def test_claims_are_compared_seed_by_seed():
    def run(rewards: list[float], seconds: float) -> dict:
        return {
            "tokens": [1000.0 * step for step in range(1, 41)],
            "reward": rewards,
            "wall_s": seconds,
        }

    calm, wild = (
        [0.5 + 0.01 * step for step in range(40)],
        [0.5 + 0.1 * (step % 2) for step in range(40)],
    )
    runs = {"ppo": [run(calm, 80.0), run(calm, 120.0)], "grpo": [run(wild, 8.0), run(wild, 9.0)]}
    ours = [run(calm, 100.0), run(calm, 150.0)]
    slow = findings(runs | {"reinforce_pp": ours, "reinforce_pp_baseline": ours}, 40000.0)
    assert (
        [line.split(";")[0] for line in slow]
        == [
            "reinforce_pp_baseline steadier than grpo: in 2 of 2 seeds",
            "reinforce_pp faster than ppo: in 0 of 2 seeds",  # it is not compared with grpo, which draws other prompts
            "reinforce_pp_baseline faster than ppo: in 0 of 2 seeds",
        ]
    )
    (line,) = findings({"ppo": runs["ppo"][:1], "reinforce_pp": [run(calm, 40.0)]}, 40000.0)
    assert (
        line
        == "reinforce_pp faster than ppo: in 1 of 1 seeds; ms a token 1.000-1.000 against 2.000-2.000"
    )


@pytest.mark.long
@pytest.mark.exhaustive
def test_algorithms_are_compared_at_equal_tokens(tmp_path: Path):
    names, small = (
        ["ppo", "grpo_process"],
        ["train.prompts_per_step=8", "eval.size=8", "launch.processes=1", "parallel.tensor=1"],
    )
    model = (
        train(
            "quickstart_sft", tmp_path, "sft", "train.steps=30", "sft.until_accuracy=null", *small
        )
        / "hf"
    )
    file = tmp_path / "runs.json"
    by_name, end = compare(names, [1], "train.steps=7", *small, model=model, file=file)
    assert compare(names, [1], "no such key", model=model, file=file) == (
        by_name,
        end,
    )  # nothing runs again
    ppo, process = (by_name[name][0] for name in names)
    assert (
        end == min(run["tokens"][-1] for run in (ppo, process))
        and len(ppo["reward"]) == len(process["reward"]) == 7
    )
    assert ppo["tokens"][0] < process["tokens"][0]  # one sample of each of 8 prompts, and eight
    assert len(ppo["held_out"]) == len(process["held_out"]) == 2
    header, *lines = summary(by_name, end)
    assert [line.split()[0] for line in lines] == names and len(
        {len(line) for line in (header, *lines)}
    ) <= 2
    draw(by_name, end, tmp_path / "algorithms.png")
    assert (tmp_path / "algorithms.png").stat().st_size > 10_000
    assert set(names) < set(ALGORITHMS)
