"""Converts text to token ids and back; the engine only gets ids.

If a model folder has no tokenizer, for example a tiny test model's, a text is a list of ids:
"5 17 3".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any

from jinja2 import meta

from megarl.config.schema import Task
from megarl.config.section import Options, short
from megarl.data.rows import ChatMessage, TextOrMessages, messages_of
from megarl.data.user_code import Alarm, alarm
from megarl.models.config_json import ConfigReader, read_config
from megarl.platform.env import require

# vocabularies that transformers can only convert with an extra package
MODELS = ("tokenizer.model", "tiktoken.model")
FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", *MODELS)
Ids = tuple[int, ...]  # of tokens
Encode = Callable[[TextOrMessages], Ids]
# (tokens of a whole example, mask of the learned ones); the mask of a prompt is ()
Example = tuple[Ids, tuple[bool, ...]]
ALWAYS_GIVEN = {"messages", "add_generation_prompt"}  # task.template_args cannot set these

TEMPLATE_TIMEOUT_S = 10.0  # limit for rendering one prompt
MAX_PROMPT_CHARACTERS = 1 << 24


def check_tokenizer(folder: Path, *, trust_remote_code: bool) -> None:
    """Raises ValueError if a tokenizer needs code that is not trusted, or a missing package."""
    auto_map = read_config(folder / "tokenizer_config.json").raw.get("auto_map")
    if (folder / "tokenizer.json").is_file():
        return
    # older files have a list
    code = auto_map.get("AutoTokenizer") if isinstance(auto_map, dict) else auto_map
    if code and not trust_remote_code:
        raise ValueError(
            f"{folder}: the tokenizer is code ({code}); set model.trust_remote_code=true to run it"
        )
    for name in MODELS:
        file = folder / name
        if code or not file.is_file():
            continue
        # a protobuf file begins with the tag of its first field; tiktoken's is a text file
        is_protobuf = file.read_bytes()[:1] == b"\n"
        packages = ("sentencepiece", "google.protobuf") if is_protobuf else ("tiktoken",)
        require(str(file), *packages)


def _vocabulary(folder: Path) -> tuple[int, set[int]]:
    """Returns the model's vocabulary size (0 if unknown) and the end tokens of its config files.

    Raises ValueError for an end token that the model does not have.
    """
    vocab = read_config(folder / "config.json").count("vocab_size")
    eos = set()
    for name in ("config.json", "generation_config.json"):
        ends = read_config(folder / name).token_ids("eos_token_id")
        if max(ends, default=0) >= vocab > 0:
            raise ValueError(
                f"{folder / name}: eos_token_id has {max(ends)}, but config.json has "
                f"vocab_size={vocab}; correct one of them"
            )
        eos |= {*ends}
    return vocab, eos


def load_tokenizer(
    path: str | Path,
    *,
    trust_remote_code: bool = False,
    template: str | None = None,
    stop: Sequence[str] = (),
) -> Tokenizer:
    """Loads the tokenizer in folder `path`; its `eos` includes those of generation_config.json.

    If `template` (task.template) is plain, an answer ends with the tokenizer's own end token.
    `stop` lists texts that also end a response. Raises ValueError.
    """
    folder = Path(path)
    check_tokenizer(folder, trust_remote_code=trust_remote_code)
    vocab, eos = _vocabulary(folder)
    files = [name for name in FILES if (folder / name).is_file()]
    if not files:
        return TokenIds(tuple(sorted(eos)), vocab)
    import transformers

    _check_class(read_config(folder / "config.json"))
    try:
        if files == ["tokenizer.json"]:
            inner = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / files[0]))
        else:
            inner = transformers.AutoTokenizer.from_pretrained(
                folder, trust_remote_code=trust_remote_code
            )
    except (ImportError, KeyError, OSError, TypeError, ValueError) as error:
        remedy = "install what it needs, or repair its files"
        if "trust_remote_code" in str(error):
            remedy = "set model.trust_remote_code=true"
        raise ValueError(
            f"{folder}: the tokenizer cannot be loaded from {', '.join(files)} ({error!r}); "
            f"{remedy}"
        ) from error
    templates = inner.chat_template
    if isinstance(templates, dict) and "default" not in templates:
        raise ValueError(f"{folder}: name a chat template default, of {', '.join(templates)}")
    if inner.vocab_size > vocab > 0:
        sizes = f"a vocabulary of {inner.vocab_size}, but config.json has vocab_size={vocab}"
        raise ValueError(f"{folder}: the tokenizer has {sizes}; use the tokenizer of this model")
    own: Any = inner.eos_token_id
    ends = tuple(sorted(eos | {own} - {None}))
    tokenizer = HfTokenizer(inner, ends, stop, vocab=vocab, is_plain=template == "plain")
    tokenizer.check(ends)
    return tokenizer


def _check_class(config: ConfigReader) -> None:
    """Raises ValueError if the config class of transformers rejects the config.json."""
    from transformers import CONFIG_MAPPING

    try:
        if config.family in CONFIG_MAPPING:
            CONFIG_MAPPING[config.family](**config.raw)
    except Exception as error:  # noqa: BLE001 (a config class may raise anything)
        raise config.error(f"transformers rejects it ({error}); correct it") from None


def prompt_encoder(tokenizer: Tokenizer, task: Task) -> Encode:
    """Returns an encoder of questions. Raises ValueError if a task setting would have no effect."""
    settings = {"system_prompt": task.system_prompt, "template_args": task.template_args}
    chat = {key: value for key, value in settings.items() if value}
    if chat and (task.template == "plain" or not tokenizer.chat_template):
        raise ValueError(
            f"task.{next(iter(chat))} needs a chat template, but the model's tokenizer has none, "
            "or task.template is plain; remove it, or use a chat model"
        )
    if task.template_args and isinstance(tokenizer, HfTokenizer):
        known = tokenizer.template_variables()
        for name in task.template_args:
            if name not in known:
                raise ValueError(
                    f"task.template_args has {name}, which the model's chat template never reads "
                    f"(it reads {', '.join(known) or 'no such variables'}); remove {name}"
                )
    return partial(tokenizer.encode_prompt, template=task.template, **chat)


def stop_token_ids(tokenizer: Tokenizer, stop: Sequence[str]) -> Ids:
    """Returns every token id that ends a response: each EOS, and the tokens of the texts `stop`.

    Raises ValueError for a text that is not a single token: the engine would cut such a text off,
    and the trainer would not see its tokens.
    """
    ids = set(tokenizer.eos)
    for text in stop:
        tokens = tokenizer.encode(text)
        pieces = [tokenizer.text_of(token) for token in tokens]
        if pieces != [text]:
            raise ValueError(
                f"rollout.stop has {text!r}, which the model's tokenizer splits into "
                f"{pieces}, but a response ends with one token; choose a text that is a single "
                "token, or remove it"
            )
        ids.add(tokens[0])
    return tuple(sorted(ids))


def end_warnings(tokenizer: Tokenizer, stop: Sequence[str]) -> Iterator[str]:
    """Yields warnings if responses, or answers to learn, would not end with an end token."""
    ends = stop_token_ids(tokenizer, stop)
    if not ends:
        yield (
            "the model's folder names no end token (eos_token_id), so every response runs to "
            "rollout.max_tokens, and no end is learned; set rollout.stop, or add it to "
            "generation_config.json"
        )
    elif isinstance(tokenizer, HfTokenizer):
        turn_end = tokenizer.turn_end
        if turn_end and not {*turn_end} & {*ends}:
            tokens = tokenizer.inner.convert_ids_to_tokens([turn_end[0], *tokenizer.eos])
            end, *own = filter(None, tokens)
            yield (
                f"the chat template ends a turn with {end!r}, which is no end token of the model "
                f"({', '.join(own)}), so a response that is written like one runs to "
                f"rollout.max_tokens; set rollout.stop=[{end!r}]"
            )


def pad_token(tokenizer: Tokenizer) -> tuple[int, str | None]:
    """Returns a padding token and its text (None without a tokenizer).

    It is never the token that ends an answer: transformers scores the last token that is not
    padding, which must be the end token.
    """
    end = tokenizer.encode_answer("")
    if isinstance(tokenizer, TokenIds):
        return next(token for token in reversed(range(tokenizer.vocab)) if token not in end), None
    inner = tokenizer.inner
    first = (inner.pad_token_id, inner.unk_token_id, inner.bos_token_id, *inner.all_special_ids)
    others = reversed(range(len(inner)))
    pad = next(token for token in (*first, *others) if token not in (None, *end))
    return pad, inner.convert_ids_to_tokens(pad)


@contextmanager
def _limited(problem: str) -> Iterator[None]:
    """Guards code that runs a model's chat template, a program in Jinja's sandbox.

    Raises ValueError if the template fails or takes longer than TEMPLATE_TIMEOUT_S.
    """
    try:
        with alarm(TEMPLATE_TIMEOUT_S):
            yield
    except Alarm:
        raise ValueError(
            f"the model's chat template took longer than {TEMPLATE_TIMEOUT_S} s; set "
            "task.template=plain, or choose another model"
        ) from None
    except Exception as error:  # noqa: BLE001 (a template can fail like any program)
        raise ValueError(
            f"the model's chat template {problem}: {error or type(error).__name__}"
        ) from None


@dataclass(eq=False)
class HfTokenizer:
    """A Hugging Face tokenizer."""

    inner: Any
    eos: Ids  # ids of the tokens that end a response, except those of `stop`
    stop: Sequence[str] = ()
    vocab: int = 0  # the model's vocab_size; 0: unknown
    is_plain: bool = False

    def __post_init__(self) -> None:
        inner = self.inner
        added = inner.added_tokens_decoder.items()
        stops = (id for id, one in added if one.special and one.content in self.stop)
        self.hidden = {*self.eos, *stops}
        self.chat_template: str | None = inner.get_chat_template() if inner.chat_template else None
        self.exceeds_model = max(inner.get_vocab().values()) >= self.vocab > 0

    @property
    def turn_end(self) -> Ids:
        """Tokens that the chat template writes after an assistant's turn; () if unknown."""
        return self._around[1]

    @cached_property
    def marks(self) -> list[str]:
        """Special tokens that the chat template writes around a question and an answer."""
        added = self.inner.added_tokens_decoder
        tokens = dict.fromkeys(chain.from_iterable(self._around))
        return [added[token].content for token in tokens if token in added and added[token].special]

    @cached_property
    def _around(self) -> list[Ids]:
        """Tokens that the chat template puts before the first user text, and after the last answer.

        Both are empty without a template, or if it refuses the two messages that are tried.
        """
        if self.is_plain or not self.chat_template:
            return [(), ()]
        turns = [("user", "question"), ("assistant", "answer")]
        try:
            text = self._render([{"role": role, "content": text} for role, text in turns])
        except ValueError:
            return [(), ()]
        return [
            self.encode(text.partition("question")[0]),
            self.encode(text.rpartition("answer")[2]),
        ]

    def encode(self, text: str, *, special: bool = False) -> Ids:
        """Encodes a text; with `special`, adds the special tokens of its post-processor."""
        return self.check(self.inner(text, add_special_tokens=special)["input_ids"])

    def encode_prompt(
        self,
        question: TextOrMessages,
        template: str | None,
        *,
        system_prompt: str | None = None,
        template_args: Options | None = None,
    ) -> Ids:
        """Encodes a question as plain text, or in the chat template up to the start of the answer.

        If `template` is None, the chat template is used if there is one. Raises ValueError if the
        chat template is missing, rejects a message or drops one.
        """
        messages = messages_of(question)
        if template == "plain" or not (template or self.chat_template):
            text = "\n".join(message["content"] for message in messages)
            tokens = self.encode(text, special=True)
            own = self.encode(text)
            for end in range(len(own), len(tokens) + 1):
                start = tokens[: end - len(own)]
                # drops special tokens at the end, because an answer follows, and a doubled start
                if tokens[:end] == start + own:
                    return own if own[: len(start)] == start else tokens[:end]
            return tokens
        if not self.chat_template:
            raise ValueError(
                "task.template=chat, but the model's tokenizer has no chat template; use plain"
            )
        if messages[-1]["role"] == "assistant":
            raise ValueError(
                "the prompt ends with the assistant's turn, which is the answer; end it with the "
                "user's, or learn the answer with stage: sft"
            )
        if system_prompt and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": system_prompt}, *messages]
        text = self.render(messages, generation=True, **(template_args or {}))
        self._check_contents(messages, text)
        return self.encode(text)

    def _check_contents(self, messages: Sequence[ChatMessage], text: str) -> None:
        """Raises ValueError if the rendered `text` lacks a message."""
        for message in messages:
            role = message["role"]
            content = message["content"].strip()
            if role == "assistant":  # a template may drop the thoughts of earlier answers
                content = re.split(r"[>\]\n]\s*", content)[-1]
            if content not in text:
                raise ValueError(
                    f"the {role} message {message['content']!r} is not in the prompt, because the "
                    f"model's chat template ignores it; put it into the questions"
                )

    def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        generation: bool = False,
        **template_args: Any,
    ) -> str:
        """Renders messages in the chat template; with `generation`, up to the start of the
        assistant's next turn.
        """
        self._check_messages(messages)
        return self._render(messages, add_generation_prompt=generation, **template_args)

    def _render(self, messages: Sequence[ChatMessage], **template_args: Any) -> str:
        with _limited("rejects the prompt"):
            text = self.inner.apply_chat_template(list(messages), tokenize=False, **template_args)
            if len(text) > MAX_PROMPT_CHARACTERS:
                raise ValueError(
                    f"it makes {len(text)} characters of it, more than {MAX_PROMPT_CHARACTERS}"
                )
        return text

    def _check_messages(self, messages: Sequence[ChatMessage]) -> None:
        """Raises ValueError if a message has a key that the template never reads, or special tokens
        that the template writes itself.
        """
        template = self.chat_template or ""
        for message in messages:
            content = message["content"].strip()
            for mark in self.marks:
                if content.startswith(mark) or content.endswith(mark):
                    raise ValueError(
                        f"the {message['role']} message {short(content)} has {mark!r} at its start "
                        "or end, which the model's chat template writes itself; remove it, or, if "
                        "the prompts are rendered already, set task.template=plain"
                    )
        for key in chain.from_iterable(messages):
            if key not in ("role", "content") and key not in template:
                raise ValueError(
                    f"a message has {key!r}, which the model's chat template never reads; remove "
                    f"{key!r} from the messages"
                )

    def encode_tagged(self, messages: list[Any], **kw: Any) -> Example:
        """Returns the tokens of a conversation, and a mask of those inside the template's
        {% generation %} tags.
        """
        self._check_contents(messages, self.render(messages, **kw))
        with _limited("rejects the conversation"):
            turns = self.inner.apply_chat_template(
                messages, return_dict=True, return_assistant_tokens_mask=True, **kw
            )
        return self.check(turns["input_ids"]), tuple(map(bool, turns["assistant_masks"]))

    def template_variables(self) -> list[str]:
        """Returns the variables that the chat template reads, except those that are always set."""
        # transformers compiles it with its own extensions of Jinja
        from transformers.utils.chat_template_utils import _compile_jinja_template

        assert self.chat_template is not None
        with _limited("is not valid"):
            environment = _compile_jinja_template(self.chat_template).environment
            variables = meta.find_undeclared_variables(environment.parse(self.chat_template))
        return sorted(variables - ALWAYS_GIVEN - set(self.inner.special_tokens_map))

    def encode_answer(self, text: str) -> Ids:
        """Encodes the text and adds the end token, unless the text already ends with one, like a
        finished response. The end token is the one that ends a turn in the chat template, if it is
        in `eos`, else the tokenizer's own.
        """
        tokens = self.encode(text)
        if tokens and tokens[-1] in self.eos:
            return tokens
        ends = [end for end in self.turn_end if end in self.eos]
        ends += [end for end in (self.inner.eos_token_id, *self.eos) if end is not None]
        return (*tokens, *ends[:1])

    def text_of(self, token: int) -> str:
        return self.inner.decode([token], clean_up_tokenization_spaces=False)

    def check(self, tokens: Iterable[int]) -> Ids:
        """Returns the tokens. Raises ValueError if one is not in the model's vocabulary."""
        checked = tuple(tokens)
        last = max(checked, default=0)
        if last >= self.vocab > 0:
            raise ValueError(
                f"the tokenizer, of {len(self.inner)} tokens, writes "
                f"{self.inner.convert_ids_to_tokens(last)!r} as {last}, but config.json has "
                f"vocab_size={self.vocab}; use the tokenizer of this model, or resize the model's "
                "embeddings"
            )
        return checked

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text for rewards: without end tokens, with other special tokens ([THINK])."""
        return self.inner.decode(
            [token for token in tokens if token not in self.hidden],
            clean_up_tokenization_spaces=False,
        )


@dataclass(frozen=True)
class TokenIds:
    """A tokenizer for models without one: a text is a list of token ids separated by spaces."""

    chat_template = None
    exceeds_model = False

    eos: Ids
    vocab: int

    def encode_prompt(self, question: TextOrMessages, template: str | None) -> Ids:
        if template == "chat" or not isinstance(question, str):
            raise ValueError(
                "without a tokenizer there is no chat template; use task.template: plain and text "
                "prompts"
            )
        return self.encode(question)

    def encode_answer(self, text: str) -> Ids:
        return (*self.encode(text), *self.eos[:1])

    def text_of(self, token: int) -> str:
        return str(token)

    def decode(self, tokens: Sequence[int]) -> str:
        return " ".join(map(str, tokens))

    def encode(self, text: str) -> Ids:
        for word in text.split():
            if not word.isdecimal() or int(word) >= self.vocab:
                raise ValueError(
                    f"the model has no tokenizer, so text must be token ids 0..{self.vocab - 1} "
                    f"separated by spaces, not {word!r}; use a model with a tokenizer, or a task "
                    "of ids (megarl.data.tasks:random_tokens)"
                )
        return tuple(map(int, text.split()))


Tokenizer = HfTokenizer | TokenIds


def check_vocabulary(own: Tokenizer, other: Tokenizer, name: str) -> None:
    """Raises ValueError, naming the other model, unless both have the same vocabulary."""
    mine, others = (
        x.inner.get_vocab() if isinstance(x, HfTokenizer) else {"": x.vocab} for x in (own, other)
    )
    if differ := len(mine.items() ^ others.items()):
        raise ValueError(
            f"{name} has another tokenizer than the policy ({differ} entries differ); use one with "
            "it, or a server"
        )
