"""Reads human or model feedback on responses from the rows of a task: preferences and step labels.

Does not import torch: all rows are checked before ranks start.

    {"prompt": ..., "chosen": ..., "rejected": ..., "margin": 1.0}   one pair; margin is optional
    {"prompt": ..., "responses": [...]}                              a ranking, best first
    {"prompt": ..., "responses": [...], "ranks": [2, 1, 1]}          1 is best; equal ranks: no pair
    {"prompt": ..., "responses": [...], "scores": [0.1, 0.9, 0.9]}   the highest is best
    {"prompt": ..., "completions": ["step 1", "step 2"], "labels": [true, false]}   steps, as in TRL

A response is text or a list of chat messages that ends with the assistant's. The list may begin
with the prompt's messages. Empty responses are refused. Equal responses form no pair.
"""

import math
from collections.abc import Sequence
from typing import Any, cast

from megarl.config.section import short
from megarl.data.rows import Fields, Problem, Source, messages_of, read_content


def check_feedback(source: Source, *, steps: bool, ignore_media: bool = False) -> list[str]:
    """Returns a list of at most one warning: that in some problems all responses are tied, so that
    nothing is learned.

    Raises ValueError, with file and line, for a problem without a ranking (with `steps`: without
    labelled steps), or if the responses of all problems are tied.
    """
    tied = []
    for problem in source.problems():
        where = problem.where
        if steps:
            labelled_steps(problem.extra, where)
            continue
        responses = ranked_responses(problem.extra, problem.text, where, ignore_media=ignore_media)
        if len({*responses[1]}) == 1:
            tied.append(where)
    if not tied:
        return []
    size = source.size or 1
    note = (
        f"{tied[0]}: no response is better than another, as texts, ranks or scores are equal: "
        f"nothing is learned of {len(tied)} of {size} rows"
    )
    if len(tied) == size:
        raise ValueError(f"{note}; correct them")
    return [f"{note}, of which this is the first"]


def ranked_responses(
    extra: Fields, text: str, where: str, *, ignore_media: bool
) -> tuple[list[str], list[float], float]:
    """Returns the responses to the prompt `text`, their ranks (lowest is best) and the margin of
    the pairs. Responses with equal texts all get the rank of the first one. Raises ValueError.
    """
    keys = [key for key in ("chosen", "rejected", "responses") if extra.get(key) is not None]
    margin = 0.0
    sign = 1.0
    if keys == ["chosen", "rejected"]:
        values = [extra[key] for key in keys]
        numbers = [0.0, 1.0]
        if extra.get("margin") is not None:
            margin = _numbers([extra["margin"]], 1, f"{where}: margin")[0]
    elif keys == ["responses"]:
        values = extra["responses"]
        if not isinstance(values, Sequence) or isinstance(values, str) or len(values) < 2:
            raise ValueError(
                f"{where}: responses must be a list of two or more, best first, not "
                f"{str(values)[:60]!r}"
            )
        orders = [key for key in ("ranks", "scores") if extra.get(key) is not None]
        if len(orders) > 1:
            raise ValueError(
                f"{where} has ranks and scores, which may contradict each other; keep one"
            )
        keys *= len(values)
        numbers = range(len(values))
        for key in orders:
            numbers = _numbers(extra[key], len(values), f"{where}: {key}")
            sign = -1.0 if key == "scores" else 1.0
    else:
        raise ValueError(
            f"{where} has {' and '.join(keys) or 'no responses'}, but preferences are learned from "
            "`chosen` and `rejected`, or from `responses`; write one or the other in every row (a "
            f"null is no response; this row's columns: {', '.join(extra) or 'none'})"
        )
    texts = [
        _response(value, f"{where}: {key}", prompt=text, ignore_media=ignore_media)
        for key, value in zip(keys, values, strict=True)
    ]
    ranks = {}
    for text, number in zip(texts, numbers, strict=True):
        ranks.setdefault(text, sign * number)
    return texts, [ranks[text] for text in texts], margin


def _numbers(values: Any, count: int, where: str) -> list[float]:
    is_list = isinstance(values, Sequence) and not isinstance(values, str) and len(values) == count
    if not is_list or not all(
        isinstance(value, int | float) and math.isfinite(value) for value in values
    ):
        raise ValueError(
            f"{where} must be {count} finite numbers, one for each response, not {str(values)[:60]}"
        )
    return [float(value) for value in values]


def _response(value: Any, where: str, *, prompt: str, ignore_media: bool) -> str:
    """Returns the text of a response.

    Raises ValueError unless the value is text, or the assistant's message, which may follow the
    prompt's messages.
    """
    content = read_content(value, where, ignore_media=ignore_media)
    *before, last = messages_of(content, "assistant")
    if last["role"] != "assistant" or not last["content"].strip():
        raise ValueError(
            f"{where} must be text, or messages that end with the assistant's, not "
            f"{short(value)}; correct it"
        )
    others = sorted(last.keys() - {"role", "content"})
    if others:
        raise ValueError(
            f"{where} has a message with {', '.join(others)}, which would not be learned; write it "
            "into the content, as the model writes it, or remove it"
        )
    both = Problem(tuple(before)).text
    if before and before != messages_of(prompt) and prompt != both:
        raise ValueError(
            f"{where} begins with {len(before)} messages that are not the prompt's, {short(both)}; "
            "write all of them as the prompt, and a response as one message, alone or after them"
        )
    return last["content"]


def labelled_steps(extra: Fields, where: str) -> list[tuple[str, bool]]:
    """Returns (text, is right) for each step of a response. Raises ValueError."""
    texts, labels = (cast(Any, extra.get(key)) for key in ("completions", "labels"))
    are_lists = (
        isinstance(texts, Sequence)
        and isinstance(labels, Sequence)
        and 0 < len(texts) == len(labels)
    )
    are_texts = are_lists and all(isinstance(text, str) and text.strip() for text in texts)
    if not are_texts or any(label not in (0, 1) for label in labels):
        raise ValueError(
            f"{where} has completions={str(texts)[:60]} and labels={str(labels)[:60]}, but a "
            "process reward model learns from a list of texts, and true or false for each; correct "
            "the row"
        )
    return [(text, bool(label)) for text, label in zip(texts, labels, strict=True)]
