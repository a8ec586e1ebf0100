"""Which tokens of a conversation are learned: rendered turn by turn, or by the template's own tags; else refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from megarl.commands.random_model import random_tokenizer
from megarl.config.schema import Create, Task
from megarl.data.collate import supervised_batch
from megarl.data.conversations import example_encoder
from megarl.data.prompts import PromptStream
from megarl.data.tasks import Problem, load_sources
from megarl.data.tokenizer import HfTokenizer, TokenIds, prompt_encoder

TURNS = ("user", "a?"), ("assistant", "b."), ("user", "c?"), ("assistant", "d.")
TAGGED = (
    "{% for m in messages %}{{ '|' + m.role + '|' }}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}~"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
# keeps thoughts in the last turn only, as Qwen3's does
FORGETFUL = (
    "{% for m in messages %}{{ '|' + m.role + '|' }}{% if m.role == 'assistant' and not loop.last %}"
    "{{ m.content.split('=')[-1] }}{% else %}{{ m.content }}{% endif %}{{ '<eos>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '|assistant|' }}{% endif %}"
)


def messages(*turns: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in turns]


def tokenizer_of(template: str | None = "") -> HfTokenizer:
    """Characters; `template` "": that of created models, <|role|>content and <eos> after the assistant's."""
    tokenizer = random_tokenizer(Create())
    assert isinstance(tokenizer, HfTokenizer)
    if template != "":
        tokenizer.inner.chat_template = template
    return HfTokenizer(tokenizer.inner, tokenizer.eos)


def learned(
    problem: Problem,
    chat_template: str | None = "",
    roles: tuple[str, ...] = ("assistant",),
    **task: Any,
) -> str:
    """The text of the example, learned parts in brackets."""
    tokenizer = tokenizer_of(chat_template)
    example = example_encoder(tokenizer, Task(**task), roles)(problem)
    assert example is not None
    shown, inside = "", False
    for token, is_learned in zip(*example, strict=True):
        shown += ("[" if is_learned else "]") * (is_learned != inside) + tokenizer.inner.decode(
            [token]
        )
        inside = is_learned
    return shown + "]" * inside


def of(*turns: tuple[str, str], **extra: Any) -> Problem:
    return Problem(tuple(messages(*turns)), None, extra)


U, A, S = "<|user|>", "<|assistant|>", "<|system|>"


@pytest.mark.parametrize(
    ("problem", "options", "shown"),
    [
        (of(*TURNS), {}, f"{U}a?{A}[b.<eos>]{U}c?{A}[d.<eos>]"),
        (of(*TURNS), {"roles": ("user", "assistant")}, f"[{U}a?]{A}[b.<eos>{U}c?]{A}[d.<eos>]"),
        (of(*TURNS), {"system_prompt": "e"}, f"{S}e{U}a?{A}[b.<eos>]{U}c?{A}[d.<eos>]"),
        (of(*TURNS[:2], completion=messages(*TURNS[2:])), {}, f"{U}a?{A}b.<eos>{U}c?{A}[d.<eos>]"),
        (
            Problem("a?", None, {"completion": messages(TURNS[1])}),
            {"system_prompt": "e"},
            f"{S}e{U}a?{A}[b.<eos>]",
        ),
        (Problem("a?", None, {"completion": "b."}), {"template": "plain"}, "a?[b.<eos>]"),
        (of(*TURNS), {"chat_template": TAGGED}, "|user|a?|assistant|[b.~]|user|c?|assistant|[d.~]"),
        (
            of(*TURNS),
            {"chat_template": FORGETFUL},
            "|user|a?<eos>|assistant|[b.<eos>]|user|c?<eos>|assistant|[d.<eos>]",
        ),
    ],
)
def test_the_learned_tokens(problem: Problem, options: dict[str, Any], shown: str) -> None:
    assert learned(problem, **options) == shown


def test_the_end_token_is_the_last_that_is_learned() -> None:
    """What the template puts behind it is never sampled."""
    newline = FORGETFUL.replace("'<eos>'", "'<eos>;'")
    assert learned(of(*TURNS[:2]), newline) == "|user|a?<eos>;|assistant|[b.<eos>];"


def test_a_single_turn_is_the_prompt_and_the_answer_of_a_task() -> None:
    tokenizer = tokenizer_of()
    tokens, _ = example_encoder(tokenizer, Task(), ("assistant",))(of(*TURNS[:2]))
    assert tokens == (*prompt_encoder(tokenizer, Task())("a?"), *tokenizer.encode_answer("b."))
    prompt = (prompt_encoder(tokenizer, Task())("a?"), ())
    assert example_encoder(tokenizer, Task(), ("assistant",))(Problem("a?", "b.")) == prompt
    assert example_encoder(tokenizer, Task())(Problem("a?", None, {"completion": "b."})) == prompt


@pytest.mark.parametrize(
    ("problem", "template", "message"),
    [
        (
            of(TURNS[0], ("assistant", "x=b."), *TURNS[2:]),
            FORGETFUL,
            "renders turn 2 or one before it",
        ),
        (of(TURNS[0]), "", "has none of sft.roles=['assistant'], but user"),
        (of(*TURNS), None, "needs a chat template"),
        (
            Problem("a?", None, {"completion": 5}),
            "",
            "completion must be text, or messages",
        ),
    ],
)
def test_what_cannot_be_determined_is_refused(
    problem: Problem, template: str | None, message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        learned(problem, template)


def test_a_model_without_a_tokenizer_has_no_conversations() -> None:
    with pytest.raises(ValueError, match="needs a chat template"):
        example_encoder(TokenIds((2,), 67), Task(), ("assistant",))(of(*TURNS))


def test_rows_of_a_file_become_a_batch(tmp_path: Path) -> None:
    rows = [
        {"messages": messages(*TURNS)},
        {"prompt": messages(TURNS[0]), "completion": messages(TURNS[1])},
        {"prompt": "a?", "completion": "b."},
        {"prompt": "a?", "answer": "b."},
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tokenizer, task = tokenizer_of(), Task(name=f"jsonl:{tmp_path}/rows.jsonl")
    encode = example_encoder(tokenizer, task, ("assistant",))
    stream = PromptStream(load_sources(task), encode, max_tokens=64)
    batch = supervised_batch(tokenizer, stream.take(4))
    end = tokenizer.eos[0]
    counts = [
        int((batch.labels[row] == end).where(batch.mask[row], 0).sum())
        for row in map(slice, *spans(batch))
    ]
    assert sorted(counts) == [1, 1, 1, 2] and int(batch.mask.sum()) == 5 * 3


def spans(batch: Any) -> tuple[list[int], list[int]]:
    return batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist()
