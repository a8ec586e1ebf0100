"""Forms of right answers, each with its cheat, from two tables: one was written without sight of the code."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from megarl.rewards.answers import extract_answer
from megarl.rewards.interface import ScoreRequest
from megarl.rewards.rules import Accuracy

HERE = Path(__file__).parent


def read_pairs(name: str) -> list[tuple[object, str, float]]:
    """(reference, response, verdict): each form in a box, and each right form as the reference of its own reference."""
    pairs = []
    for group in yaml.safe_load((HERE / name).read_text(encoding="utf-8")):
        reference = group["reference"]
        for key, verdict in (("right", 1.0), ("wrong", 0.0)):
            boxes = [f"\\boxed{{{form}}}" for form in group.get(key, [])]
            responses = [*boxes, *group.get(f"responses_{key}", [])]
            pairs += [(reference, response, verdict) for response in responses]
        if isinstance(reference, str):
            forms = {*group.get("right", [])} - {*group.get("one_way", []), reference}
            pairs += [(form, f"\\boxed{{{reference}}}", 1.0) for form in sorted(forms)]
    return pairs


@pytest.mark.parametrize(("name", "count"), [("answers_blind.yaml", 2500), ("answers.yaml", 1000)])
def test_pairs(name: str, count: int) -> None:
    pairs = read_pairs(name)
    assert len(pairs) >= count
    requests = [
        ScoreRequest(
            str(row), "", response, reference, final_answer=extract_answer(response, "auto")
        )
        for row, (reference, response, _) in enumerate(pairs)
    ]
    scores = [score.value for score in Accuracy(30.0)(requests)]
    assert [pair for pair, score in zip(pairs, scores, strict=True) if score != pair[2]] == []
