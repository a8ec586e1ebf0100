"""Compared responses become rows and pairs, or an error that names the problem and the remedy."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sample_rows import sample

from megarl.commands.preflight import preflight
from megarl.config.load import parse_config
from megarl.data.feedback import check_feedback
from megarl.data.preferences import preference_batch, rankings
from megarl.data.tasks import Problem, Source
from megarl.data.tokenizer import TokenIds
from megarl.platform.env import Env
from megarl.types import Group, Prompt

EOS = 9
IDS = TokenIds((EOS,), vocab=20)
CHAT = "user: 1 2"  # as prompts.py joins messages


def prompt(number: int = 0, text: str = "1 2", **extra: Any) -> Prompt:
    return Prompt(number, (1, 2), text, extra=extra)


def said(text: str, *before: dict[str, str]) -> list[dict[str, str]]:
    return [*before, {"role": "assistant", "content": text}]


QUESTION = {"role": "user", "content": "1 2"}
FORMATS = [  # question, fields -> responses, pairs, margins
    ("1 2", {"chosen": "3", "rejected": "4 5"}, [[3], [4, 5]], [[0, 1]], [0]),
    ("1 2", {"chosen": "3", "rejected": "4", "margin": 0.5}, [[3], [4]], [[0, 1]], [0.5]),
    (
        "1 2",
        {"chosen": "3", "rejected": "4", "margin": None, "responses": None},
        [[3], [4]],
        [[0, 1]],
        [0],
    ),
    ("1 2", {"chosen": said("3"), "rejected": said("4")}, [[3], [4]], [[0, 1]], [0]),
    (
        "1 2",
        {"chosen": said("3", QUESTION), "rejected": said("4", QUESTION)},
        [[3], [4]],
        [[0, 1]],
        [0],
    ),
    (
        CHAT,
        {"chosen": said("3", QUESTION), "rejected": said("4", QUESTION)},
        [[3], [4]],
        [[0, 1]],
        [0],
    ),
    ("1 2", {"responses": ["3", "4", "5"]}, [[3], [4], [5]], [[0, 1], [0, 2], [1, 2]], [0, 0, 0]),
    (
        "1 2",
        {"responses": ["3", "4", "5"], "ranks": [2, 1, 2]},
        [[3], [4], [5]],
        [[1, 0], [1, 2]],
        [0, 0],
    ),
    (
        "1 2",
        {"responses": ["3", "4", "5"], "scores": [0.1, 7, 0.1]},
        [[3], [4], [5]],
        [[1, 0], [1, 2]],
        [0, 0],
    ),
    ("1 2", {"responses": [said("3"), said("4")], "scores": [-1, 1]}, [[3], [4]], [[1, 0]], [0]),
    ("1 2", {"responses": ["3", "4"], "ranks": [1, 1]}, [], [], []),
]


@pytest.mark.parametrize(("text", "extra", "responses", "pairs", "margins"), FORMATS)
def test_formats(text: str, extra: dict, responses: list, pairs: list, margins: list) -> None:
    batch = preference_batch(IDS, [prompt(text=text, **extra)])
    rows = [
        row.tolist() for row in batch.tokens.split(batch.cu_seqlens.diff().tolist()) if len(row)
    ]
    assert rows == [[1, 2, *response, EOS] for response in responses], (
        "ended like answers of stage sft"
    )
    learned = (
        [row.tolist() for row in batch.labels[batch.mask].split([len(row) - 2 for row in rows])]
        if rows
        else []
    )
    assert learned == [[*response, EOS] for response in responses]
    assert batch.pairs.tolist() == pairs and batch.pairs.shape[1] == 2
    assert batch.margins.tolist() == margins and batch.group.tolist() == [0] * len(rows)


@pytest.mark.parametrize("ignore_media", [False, True])
def test_a_text_keeps_what_looks_like_a_placeholder_unless_media_are_ignored(
    ignore_media: bool,
) -> None:
    """Answers about HTML have <image> as well; the prompt keeps it, too."""
    pair = prompt(chosen="write <image>", rejected="4")
    tokenizer: Any = SimpleNamespace(encode_answer=lambda text: tuple(text.encode()))
    batch = preference_batch(tokenizer, [pair], ignore_media=ignore_media)
    text = bytes(batch.tokens.tolist()).decode()
    assert ("<image>" in text) != ignore_media


def test_rows_of_a_prompt_are_consecutive_and_tied_prompts_leave_no_gap() -> None:
    nine = {"responses": [str(number) for number in range(3, 12)]}
    batch = preference_batch(
        IDS,
        [
            prompt(0, **nine),
            prompt(1, responses=["3", "4"], ranks=[1, 1]),
            prompt(2, chosen="5", rejected="6"),
        ],
    )
    assert batch.group.tolist() == [0] * 9 + [1] * 2
    assert len(batch.pairs) == 37 and batch.pairs[-1].tolist() == [9, 10], "36 of nine responses"
    assert preference_batch(IDS, []).num_rows == 0


def test_equal_responses_have_the_rank_of_the_first() -> None:
    """Nothing can tell them apart; a pair of them would only dilute the mean."""
    batch = preference_batch(
        IDS, [prompt(responses=["3", "4", "3"]), prompt(chosen="5", rejected="5")]
    )
    assert batch.pairs.tolist() == [[0, 1], [2, 1]] and batch.num_rows == 3


ERRORS = [
    ({}, "has no responses, but preferences are learned from `chosen` and `rejected`"),
    ({"chosen": "3"}, "has chosen, but"),
    ({"chosen": "3", "rejcted": "4"}, "this row's columns: chosen, rejcted)"),
    (
        {"rejected": None},
        "(a null is no response; this row's columns: rejected)",
    ),
    (
        {"chosen": "3", "rejected": "4", "responses": ["3", "4"]},
        "has chosen and rejected and responses, but",
    ),
    (
        {"chosen": "3", "rejected": 4},
        "rejected must be text, or messages",
    ),
    ({"chosen": "3", "rejected": [QUESTION]}, "messages that end with the assistant's"),
    (
        {"chosen": "3", "rejected": said("4", {"role": "user", "content": "7"})},
        "1 messages that are not the prompt's",
    ),
    (
        {"chosen": "3", "rejected": said("4", QUESTION, *said("5"))},
        "2 messages that are not the prompt's",
    ),
    ({"chosen": "3", "rejected": "4", "margin": "big"}, "margin must be 1 finite numbers"),
    ({"responses": "3 4"}, "responses must be a list of two or more, best first"),
    ({"responses": ["3"]}, "two or more"),
    (
        {"responses": ["3", "4"], "ranks": [1]},
        "ranks must be 2 finite numbers, one for each response",
    ),
    ({"responses": ["3", "4"], "scores": [1, float("nan")]}, "scores must be 2 finite numbers"),
    (
        {"responses": ["3", "4"], "scores": [1, 2], "ranks": [1, 2]},
        "which may contradict each other; keep one",
    ),
]


@pytest.mark.parametrize(("extra", "message"), ERRORS, ids=lambda value: str(value)[:40])
def test_errors_name_the_problem(extra: dict, message: str) -> None:
    with pytest.raises(ValueError) as error:
        preference_batch(IDS, [prompt(number=41, **extra)])
    assert str(error.value).startswith("problem 41 ('1 2')") and message in str(error.value)


PAIR, STEPS = {"chosen": "3", "rejected": "4"}, {"completions": ["3", "4"], "labels": [True, False]}


@pytest.mark.parametrize("stage", ["dpo", "reward_model", "process"])
@pytest.mark.parametrize("kind", ["jsonl", "hf", "eval", "mixture"])
def test_every_row_is_checked_before_ranks_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str, kind: str
) -> None:
    """A run may come to the last row after days."""
    right, wrong = (
        (STEPS, STEPS | {"labels": [True]})
        if stage == "process"
        else (PAIR, PAIR | {"rejected": None})
    )

    def task(last: dict[str, Any]) -> dict[str, Any]:
        lines = [
            json.dumps({"prompt": f"{number}?", **extra})
            for number, extra in enumerate([right] * 3 + [last])
        ]
        (tmp_path / "rows.jsonl").write_text("\n".join([*lines[:2], "", *lines[2:]]))
        (tmp_path / "right.jsonl").write_text(json.dumps({"prompt": "right?", **right}))
        names = {name: f"jsonl:{tmp_path / name}.jsonl" for name in ("rows", "right")}
        if kind == "hf":
            datasets = pytest.importorskip("datasets", reason="datasets is in the dev extra")
            monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
            return {"name": f"hf:{tmp_path / 'rows.jsonl'}", "options": {"held_out": 0}}
        if kind == "eval":
            return {"name": names["right"], "options": {"eval_file": str(tmp_path / "rows.jsonl")}}
        return (
            {"mixture": [{"name": name} for name in names.values()]}
            if kind == "mixture"
            else {"name": names["rows"]}
        )

    def check(last: dict[str, Any]) -> None:
        sections: dict[str, Any] = {"stage": "reward_model" if stage == "process" else stage}
        sections |= {
            "reward_model": {"process": stage == "process"},
            "eval": {"every": int(kind == "eval"), "size": 4},
        }
        preflight(parse_config({"model": {"create": {}}, "task": task(last), **sections}), Env())

    check(right)
    where = f"{tmp_path}/rows.jsonl: line 5"
    says = (
        "has completions=['3', '4'] and labels=[True], but"
        if stage == "process"
        else "has chosen, but"
    )
    with pytest.raises(ValueError, match=re.escape(f"{where} {says}")):
        check(wrong)


def test_an_endless_task_is_checked_by_its_first_problem() -> None:
    with pytest.raises(
        ValueError, match="a generated problem has no responses, but preferences are learned from"
    ):
        check_feedback(Source(lambda index: Problem(f"{index}?"), None), steps=False)


def test_rewards_that_differ_by_rounding_are_not_ranked() -> None:
    def group(*rewards: float) -> Group:
        samples = [sample(".xx", index=i, reward=reward) for i, reward in enumerate(rewards)]
        return Group(Prompt(0, (), ""), tuple(samples))

    assert rankings([group(0.3, 0.1 + 0.2)]) == rankings([group(0.7, 0.7)]) == []
    (ranking,) = rankings([group(0.1, 0.3, 0.2)], "best_worst")
    assert ranking.labels == (pytest.approx(0.3), pytest.approx(0.1))
