"""Chat templates as models ship them, the settings that they read or refuse, and the texts that end a response."""

from __future__ import annotations

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from megarl.commands.random_model import random_tokenizer
from megarl.config.schema import Create, Task
from megarl.data.tokenizer import (
    HfTokenizer,
    TokenIds,
    load_tokenizer,
    prompt_encoder,
    stop_token_ids,
)

# with a system message by default, like SmolLM2's
DEFAULT_SYSTEM = """{% for message in messages %}
{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|system|>Be kind.
' }}{% endif %}{{'<|' + message['role'] + '|>' + message['content'] + '
'}}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""

# with variables, tools, macros, and an end of thinking that the model need not write, like Qwen3's and DeepSeek's
THINKING = """{%- macro show(message) %}{{ '<|' + message.role + '|>' + message.content | trim }}{% endmacro %}
{%- set ns = namespace(last=messages|length - 1) %}
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- if not reasoning_effort is defined %}{% set reasoning_effort = 'low' %}{% endif %}
{%- for message in messages %}{{ show(message) }}{% endfor %}
{%- if add_generation_prompt %}{% generation %}{{ '<|assistant|>' }}{% endgeneration %}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '(' + reasoning_effort + ')' }}{% endif %}
{%- endif %}{# max_thoughts is only mentioned #}"""

REJECTING = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
DROPPING = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"


def tokenizer_of(template: str | None) -> HfTokenizer:
    tokenizer = random_tokenizer(Create())
    assert isinstance(tokenizer, HfTokenizer)
    tokenizer.inner.chat_template = template
    return HfTokenizer(tokenizer.inner, tokenizer.eos)


def rendered(chat_template: str | None, question: Any = "1 + 1", **task: Any) -> str:
    tokenizer = tokenizer_of(chat_template)
    return tokenizer.inner.decode(prompt_encoder(tokenizer, Task(**task))(question))


def test_the_system_prompt_comes_first_and_replaces_the_templates_own() -> None:
    assert rendered(DEFAULT_SYSTEM) == "<|system|>Be kind.\n<|user|>1 + 1\n<|assistant|>"
    assert (
        rendered(DEFAULT_SYSTEM, system_prompt="Add.")
        == "<|system|>Add.\n<|user|>1 + 1\n<|assistant|>"
    )
    assert rendered(THINKING, system_prompt=" Add.\n") == "<|system|>Add.<|user|>1 + 1<|assistant|>"


def test_messages_keep_a_system_message_of_their_own() -> None:
    turns = (
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "3"},
    )
    shown = rendered(THINKING, turns, system_prompt="Add.")
    assert shown == "<|system|>Add.<|user|>1<|assistant|>2<|user|>3<|assistant|>"
    own = rendered(
        THINKING, ({"role": "system", "content": "Count."}, *turns[:1]), system_prompt="Add."
    )
    assert own == "<|system|>Count.<|user|>1<|assistant|>"


def test_template_arguments_reach_the_template() -> None:
    assert (
        rendered(THINKING, template_args={"enable_thinking": True}) == "<|user|>1 + 1<|assistant|>"
    )
    assert (
        rendered(THINKING, template_args={"enable_thinking": False})
        == "<|user|>1 + 1<|assistant|>(low)"
    )
    both = {"enable_thinking": False, "reasoning_effort": "high"}
    assert rendered(THINKING, template_args=both) == "<|user|>1 + 1<|assistant|>(high)"


@pytest.mark.parametrize(
    ("template", "task", "message"),
    [
        (
            THINKING,
            {"template_args": {"enable_thinking": False, "max_thoughts": 3}},
            "task.template_args has max_thoughts, which the model's chat template never reads (it reads "
            "enable_thinking, reasoning_effort, tools); remove max_thoughts",
        ),
        (
            DEFAULT_SYSTEM,
            {"template_args": {"enable_thinking": False}},
            "task.template_args has enable_thinking, which the model's chat template never reads (it reads no such "
            "variables); remove enable_thinking",
        ),
        (
            THINKING,
            {"template_args": {"add_generation_prompt": False}},
            "task.template_args has add_generation_prompt, which the model's chat template never reads (it reads "
            "enable_thinking, reasoning_effort, tools); remove add_generation_prompt",
        ),
        (
            None,
            {"system_prompt": "Add."},
            "task.system_prompt needs a chat template, but the model's tokenizer has none, or task.template is plain; remove it, or use a chat "
            "model",
        ),
        (
            THINKING,
            {"template_args": {"enable_thinking": True}, "template": "plain"},
            "task.template_args needs a chat template, but the model's tokenizer has none, or task.template is plain; remove it, or use a chat model",
        ),
        (
            None,
            {"template": "chat"},
            "task.template=chat, but the model's tokenizer has no chat template; use plain",
        ),
        (
            REJECTING,
            {"system_prompt": "Add."},
            "the model's chat template rejects the prompt: System role not supported",
        ),
        (
            DROPPING,
            {"system_prompt": "Add."},
            "the system message 'Add.' is not in the prompt, because the model's chat template ignores it; put it "
            "into the questions",
        ),
        (
            "{% for m in messages %}{{ m.content }}",
            {"template_args": {"a": 1}},
            "the model's chat template is not valid: Unexpected end of template.",
        ),
    ],
)
def test_refusals(template: str | None, task: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        rendered(template, **task)


MANY = "{% for _ in range(99999) %}" * 2 + "{% endfor %}" * 2


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (MANY, "took longer than 0.5 s; set task.template=plain"),
        ("{% macro f() %}{{ caller() }}{% endmacro %}" + MANY, "took longer than 0.5 s"),
        ("{{ 10 ** (10 ** 8) }}", "took longer than 0.5 s"),
        ("{{ 'aaaa' * 10 ** 4 }}", "it makes 40000 characters of it, more than 1000"),
        ("{{ 1 // 0 }}", "division"),
        ("{{ {}.x.y }}", "no attribute 'x'"),
        ("{{ " + "(" * 5000 + ")" * 5000 + " }}", "the model's chat template rejects the prompt"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ raise_exception.__globals__.os }}", "unsafe"),
        ("{{ cycler.__init__.__globals__.os.system('true') }}", "unsafe"),
        ("{% set _ = messages.append(1) %}", "unsafe"),
    ],
)
def test_a_template_that_is_a_trap_is_refused_in_time(
    monkeypatch: pytest.MonkeyPatch, template: str, message: str
) -> None:
    monkeypatch.setattr("megarl.data.tokenizer.TEMPLATE_TIMEOUT_S", 0.5)
    monkeypatch.setattr("megarl.data.tokenizer.MAX_PROMPT_CHARACTERS", 1000)
    began = time.process_time()
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        rendered(template)
    assert "\n" not in str(caught.value) and time.process_time() - began < 5


def test_a_template_renders_in_a_servers_thread() -> None:
    """`megarl serve-reward` scores in one, where no signal can limit the template's time."""
    tokenizer = tokenizer_of(DEFAULT_SYSTEM)
    with ThreadPoolExecutor(1) as pool:
        prompt = pool.submit(tokenizer.encode_prompt, "1 + 1", None).result()
    assert prompt == tokenizer.encode_prompt("1 + 1", None)


def test_the_variables_of_a_template_that_is_a_trap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jinja computes constants when it compiles."""
    monkeypatch.setattr("megarl.data.tokenizer.TEMPLATE_TIMEOUT_S", 0.5)
    with pytest.raises(ValueError, match="the model's chat template took longer"):
        rendered("{{ 10 ** (10 ** 8) }}{{ a }}", template_args={"a": 1})


def test_without_a_tokenizer_there_is_no_chat() -> None:
    with pytest.raises(
        ValueError, match=re.escape("task.system_prompt needs a chat template, but the model's")
    ):
        prompt_encoder(TokenIds((2,), 67), Task(system_prompt="Add."))


# --- texts that end a response ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> HfTokenizer:
    """A byte-level BPE with merges, trained here, so that texts are one token, several or none of it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[misc]
    inner.decoder = decoders.ByteLevel()  # type: ignore[misc]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator(["an answer is an answer\n\nan answer\n\n"] * 8, trainer)
    folder = tmp_path_factory.mktemp("merged")
    inner.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"vocab_size": 300, "eos_token_id": 0}))
    tokenizer = load_tokenizer(folder)
    assert isinstance(tokenizer, HfTokenizer)
    return tokenizer


def test_a_text_of_one_token_ends_a_response_like_eos(merged: HfTokenizer) -> None:
    ids = merged.inner.get_vocab()
    assert stop_token_ids(merged, ()) == (0,)
    assert stop_token_ids(merged, ("\n", "\n\n", "<eos>")) == tuple(
        sorted((0, ids["\u010a"], ids["\u010a\u010a"]))
    )
    characters = tokenizer_of(None)
    assert stop_token_ids(characters, ("\n", "<|user|>")) == (
        2,
        *(characters.inner.encode(t)[0] for t in ("<|user|>", "\n")),
    )
    assert stop_token_ids(TokenIds((2,), 67), ("5",)) == (2, 5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "</answer>",
            "rollout.stop has '</answer>', which the model's tokenizer splits into ['<', '/', 'an', 'sw', 'er', '>'], "
            "but a response ends with one token; choose a text that is a single token, or remove it",
        ),
        (
            "\u96f6",
            "rollout.stop has '\u96f6', which the model's tokenizer splits into ['\ufffd', '\ufffd', '\ufffd'], ",
        ),
        ("", "rollout.stop has '', which the model's tokenizer splits into [], "),
    ],
)
def test_a_text_of_several_tokens_is_refused_by_name(
    merged: HfTokenizer, text: str, message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        stop_token_ids(merged, ("\n", text))


def test_a_text_outside_the_vocabulary_is_not_one_token() -> None:
    """It would be the token of all unknown texts."""
    small = random_tokenizer(Create(vocab=20))
    with pytest.raises(
        ValueError,
        match=re.escape("'x', which the model's tokenizer splits into ['<unk>'], "),
    ):
        stop_token_ids(small, ("x",))
    with pytest.raises(
        ValueError, match=re.escape("token ids 0..66 separated by spaces, not '</s>'")
    ):
        stop_token_ids(TokenIds((2,), 67), ("</s>",))


def test_a_made_tokenizer_is_the_models(tmp_path: Path) -> None:
    from megarl.commands.random_model import create_model

    create = Create(layers=1, hidden=16, heads=2, kv_heads=1, phrases=("</answer>",))
    made, written = random_tokenizer(create), load_tokenizer(create_model(create, tmp_path))
    assert stop_token_ids(made, ("</answer>",)) == stop_token_ids(written, ("</answer>",)) == (2, 7)
    assert written.decode((*written.encode_prompt("7", "plain"), 7, 2)) == "7</answer>"
