"""Which samples of a step are written, what a line holds, and how many files stay."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megarl.config.schema import SampleFiles
from megarl.data.collate import collate
from megarl.telemetry.sample_files import SampleWriter, choose_samples, sample_files
from megarl.types import Group, Prompt, Sample, ScoredBatch


def sample(prompt_id: int, index: int, reward: float, length: int = 3, text: str = "ok") -> Sample:
    tokens = torch.arange(2 + length)
    finish = "length" if length > 3 else "stop"
    parts = {"accuracy": reward, "format": 1.0}
    zeros = torch.zeros(2 + length)
    return Sample(
        prompt_id, index, tokens, tokens >= 2, zeros, zeros.int(), finish, text, reward, parts
    )


def group(prompt_id: int, *rewards: float, text: str = "ok") -> Group:
    samples = tuple(
        sample(prompt_id, i, reward, 3 + i % 2, text) for i, reward in enumerate(rewards)
    )
    return Group(Prompt(prompt_id, (0, 1), f"ask {prompt_id}", "4"), samples)


def scored(groups: list[Group]) -> ScoredBatch:
    """Every trained token of row i has advantage i, every other one a value that must not count."""
    batch = collate(groups, temperature=1.0, mask_truncated=True)
    row_T = torch.repeat_interleave(torch.arange(batch.num_rows), batch.cu_seqlens.diff()).float()
    fields = {name: getattr(batch, name) for name in batch.__dataclass_fields__}
    advantages = torch.where(batch.mask, row_T, 1e9)
    return ScoredBatch(
        **fields, advantages=advantages, old_logprobs=None, ref_logprobs=None, kl_coef=0.0
    )


def lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def test_the_best_the_worst_and_others() -> None:
    samples = [sample(i, 0, reward=float(i * 37 % 100)) for i in range(100)]
    chosen = choose_samples(samples, 8, seed="0/0")
    rewards = sorted(samples[i].reward for i in chosen)
    assert chosen == sorted(set(chosen)) and len(chosen) == 8
    assert rewards[:2] == [0, 1] and rewards[-2:] == [98, 99]
    assert not set(rewards[2:-2]) & {0, 1, 98, 99}
    assert chosen == choose_samples(samples, 8, seed="0/0")
    assert chosen != choose_samples(samples, 8, seed="0/1")
    assert choose_samples(samples, 100, seed="0/0") == list(range(100))
    assert [len(choose_samples(samples, count, seed="0")) for count in (1, 2, 3, 5, 99)] == [
        1,
        2,
        3,
        5,
        99,
    ]
    ties = [sample(i, 0, reward=1.0) for i in range(100)]
    assert max(choose_samples(ties, 4, seed="0/0")) > 10, (
        "equal rewards: not always the first prompts"
    )


def test_a_line(tmp_path: Path) -> None:
    groups = [group(3, 1.0, 0.0), group(4, 0.5)]
    writer = SampleWriter(tmp_path, SampleFiles(), seed=0, start=0)
    writer.write(7, groups, scored(groups))
    first, second, third = lines(tmp_path / "step_000007.jsonl")
    assert first == {
        "prompt_id": 3,
        "index": 0,
        "prompt": "ask 3",
        "response": "ok",
        "answer": "4",
        "reward": 1.0,
        "rewards": {"accuracy": 1.0, "format": 1.0},
        "length": 3,
        "truncated": False,
        "finish": "stop",
        "versions": [[0, 3]],
        "advantage": 0.0,
    }
    assert (second["length"], second["truncated"], second["advantage"]) == (4, True, None), (
        "masked: not trained on"
    )
    assert (third["prompt_id"], third["advantage"]) == (4, 2.0)


def test_text_that_is_not_utf_8(tmp_path: Path) -> None:
    SampleWriter(tmp_path, SampleFiles(), seed=0, start=0).write(
        0, [group(0, 1.0, text="a\ud83d\u2028\x00b")], None
    )
    file = tmp_path / "step_000000.jsonl"
    assert json.loads(file.read_bytes().decode())["response"] == "a\ud83d\u2028\x00b"
    assert file.read_bytes().count(b"\n") == 1


@pytest.mark.parametrize("every", [1, 3])
def test_files_are_bounded_and_a_resumed_run_repeats_its_own(tmp_path: Path, every: int) -> None:
    settings = SampleFiles(every=every, max_samples=4, keep=10)

    def run(start: int, end: int, text: str) -> list[int]:
        writer = SampleWriter(tmp_path, settings, seed=0, start=start)
        assert all(step < start for step in sample_files(tmp_path)), (
            "a repeated step may be empty now"
        )
        for step in range(start, end):
            writer.write(step, [group(step, *[i / 8 for i in range(8)], text=text)], None)
            assert len(list(tmp_path.iterdir())) <= 10
        return list(sample_files(tmp_path))

    assert run(0, 300, "first") == list(range(0, 300, every))[-10:]
    assert all(len(lines(file)) == 4 for file in sample_files(tmp_path).values())
    steps = run(294, 300, "again")
    assert steps == list(range(0, 300, every))[-10:]
    texts = [lines(file)[0]["response"] for file in sample_files(tmp_path).values()]
    assert texts == ["first" if step < 294 else "again" for step in steps]
    assert run(0, 1, "anew") == [0], "a run from the start has no past"


def test_steps_of_seven_digits_are_the_newest(tmp_path: Path) -> None:
    writer = SampleWriter(tmp_path, SampleFiles(keep=2), seed=0, start=0)
    for step in (999_998, 999_999, 1_000_000):
        writer.write(step, [group(0, 1.0)], None)
    assert [file.name for file in sample_files(tmp_path).values()] == [
        "step_999999.jsonl",
        "step_1000000.jsonl",
    ]


def test_off(tmp_path: Path) -> None:
    SampleWriter(tmp_path, SampleFiles(every=0), seed=0, start=0).write(0, [group(0, 1.0)], None)
    SampleWriter(tmp_path, SampleFiles(), seed=0, start=0).write(0, [], None)
    assert not list(tmp_path.iterdir())
