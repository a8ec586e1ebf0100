"""Encodes examples of stage sft that have several turns or a completion, and marks the tokens to
learn.

    {"messages": [...]}                       learns the turns of sft.roles
    {"prompt": [...], "completion": [...]}    learns the completion's turns of sft.roles
    {"prompt": "...", "completion": "..."}    learns the completion and the end token

As in TRL, a completion, or messages that end with the assistant's, are learned instead of `answer`.
Rows without a token to learn are refused.

A template may render a turn differently if other turns follow it. So the conversation, rendered as
a whole, must begin with the turns before a learned turn as rendered alone, and also with those up
to its end. The text in between is encoded by itself, as an engine samples it. A template with
{% generation %} tags marks the assistant's turns itself.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise

from megarl.config.schema import Task
from megarl.config.section import short
from megarl.data.rows import Problem, messages_of, read_content, reference_text
from megarl.data.thoughts import PROMPT_TOKENS, TAGS, after_thoughts, opened_tag
from megarl.data.tokenizer import Example, HfTokenizer, Tokenizer, prompt_encoder

GENERATION_TAG = re.compile(r"\{%-?\s*generation\b")


def example_encoder(
    tokenizer: Tokenizer, task: Task, roles: Sequence[str] = ()
) -> Callable[[Problem], Example]:
    """Returns an encoder of prompts or, with `roles` (stage sft), of whole examples."""
    encode = prompt_encoder(tokenizer, task)

    def example(problem: Problem) -> Example:
        question = problem.question
        if not roles:
            return encode(question), ()
        completion = problem.extra.get("completion") or None
        is_answered = not isinstance(question, str) and question[-1]["role"] in roles
        if completion is None and not is_answered:
            if problem.answer is not None:
                prompt = encode(question)
                _check_thoughts(tokenizer, prompt, reference_text(problem.answer))
                return prompt, ()
            if isinstance(question, str):
                raise ValueError(
                    "it has no answer, but stage: sft trains on answers; write `answer`, "
                    f"`completion` or `messages` (it has {', '.join(problem.extra) or 'no more'})"
                )
        messages = messages_of(question)
        first = 0
        if completion is not None:
            content = read_content(completion, "completion", ignore_media=task.ignore_media)
            if isinstance(content, str):
                prompt = encode(question)
                _check_thoughts(tokenizer, prompt, content)
                answer = tokenizer.encode_answer(content)
                return _learned((*prompt, *answer), (False,) * len(prompt) + (True,) * len(answer))
            first = len(messages)
            messages += content
        if task.system_prompt and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": task.system_prompt}, *messages]
            first += 1
        learned = [turn for turn in range(first, len(messages)) if messages[turn]["role"] in roles]
        if not learned:
            present = [message["role"] for message in messages]
            raise ValueError(
                f"a conversation has none of sft.roles={list(roles)}, but {', '.join(present)}; "
                "correct one of them"
            )
        if (
            task.template == "plain"
            or not isinstance(tokenizer, HfTokenizer)
            or not tokenizer.chat_template
        ):
            raise ValueError("a conversation needs a chat template; use a chat model")
        if (
            GENERATION_TAG.search(tokenizer.chat_template)
            and completion is None
            and tuple(roles) == ("assistant",)
        ):
            return _learned(*tokenizer.encode_tagged(messages, **task.template_args))
        render = partial(tokenizer.render, **task.template_args)
        return _learned(*_by_turns(tokenizer, render, messages, learned))

    return example


def _check_thoughts(tokenizer: Tokenizer, prompt: Sequence[int], answer: str) -> None:
    """Raises ValueError if the answer reopens, or never closes, thoughts that the prompt opens."""
    tag = opened_tag(tokenizer.decode(prompt[-PROMPT_TOKENS:]))
    if tag and (answer.lstrip().startswith(tag) or after_thoughts(tag + answer) is None):
        raise ValueError(
            f"the prompt ends with {tag}, so {short(answer)} would be learned as a thought; write "
            f"the thoughts without {tag}, and {TAGS[tag]} behind them"
        )


def _learned(tokens: tuple[int, ...], mask: tuple[bool, ...]) -> Example:
    """Returns (tokens, mask). Raises ValueError if no token is learned.

    The first token does not count, because nothing predicts it.
    """
    if not any(mask[1:]):
        raise ValueError(
            "no token of it would be learned: the template's {% generation %} tags enclose none, "
            "or the text has no tokens; use a template that marks the assistant's turns, or "
            "remove the row"
        )
    return tokens, mask


def _by_turns(
    tokenizer: HfTokenizer,
    render: Callable[..., str],
    messages: Sequence[Mapping[str, str]],
    learned: Sequence[int],
) -> Example:
    whole = render(messages)
    cuts = [0]
    if messages[learned[0]]["role"] == "assistant" and not learned[0]:
        raise ValueError(
            "the conversation starts with the assistant's turn; begin with a user's or a system's, "
            "of which the model's template makes a prompt"
        )
    for turn in learned:
        is_reply = messages[turn]["role"] == "assistant"
        before = render(messages[:turn], generation=is_reply) if turn else ""
        for text in (before, render(messages[: turn + 1])):
            if not whole.startswith(text) or len(text) < cuts[-1]:
                raise ValueError(
                    f"the model's chat template renders turn {turn + 1} or one before it "
                    f"differently once others follow, {short(text)}; split the conversation, or "
                    "use a template with generation tags"
                )
            cuts.append(len(text))
    tokens = []
    mask = []
    for number, (start, end) in enumerate(pairwise([*cuts, len(whole)])):
        part = tokenizer.encode(whole[start:end])
        # an engine samples nothing after an end token, so the tokens after it are not learned
        last = max(
            (place for place, token in enumerate(part) if token in tokenizer.eos), default=len(part)
        )
        tokens += part
        mask += [number % 2 == 1 and place <= last for place in range(len(part))]
    if tokenizer.inner.decode(tokens) != tokenizer.inner.decode(tokenizer.encode(whole)):
        raise ValueError(
            "the tokenizer adds text to a turn encoded by itself; use a template with generation "
            "tags"
        )
    return tuple(tokens), tuple(mask)
