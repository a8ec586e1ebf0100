"""Finds where a response's thoughts end, by the tags that reasoning models write.

prompt's last tokens, decoded --opened_tag--> the tag that the prompt leaves open, or ""
that tag + response --after_thoughts--> the text that may contain answers, code and verdicts
"""

import re

# opening tag -> closing tag, which precedes the answer
TAGS = {
    "<think>": "</think>",
    "<thinking>": "</thinking>",
    "<thought>": "</thought>",
    "<seed:think>": "</seed:think>",
    "<mm:think>": "</mm:think>",
    "[THINK]": "[/THINK]",
    "<|START_THINKING|>": "<|END_THINKING|>",
    "<|begin_of_thought|>": "<|end_of_thought|>",
    "<|inner_prefix|>": "<|inner_suffix|>",
    "<longcat_think>": "</longcat_think>",
    "<reasoning>": "</reasoning>",
    "\u25c1think\u25b7": "\u25c1/think\u25b7",
    "<|channel>thought": "<channel|>",
    # gpt-oss (harmony)
    "<|channel|>analysis<|message|>": "<|channel|>final<|message|>",
    "<|channel|>commentary<|message|>": "<|channel|>final<|message|>",
}
PROMPT_TOKENS = 100  # tokens at the end of a prompt that are searched for an open tag
_OPENING = "|".join(map(re.escape, TAGS))
_CLOSING = "|".join(map(re.escape, dict.fromkeys(TAGS.values())))
# an open tag at the end of the prompt, or at the start of a line that the template begins
_OPENED = re.compile(rf"({_OPENING})\s*\Z|(?<=[>\]\n\u25b7])({_OPENING})[^<\[]*\Z")
_TAG = re.compile(rf"({_OPENING})|({_CLOSING})")


def opened_tag(prompt: str) -> str:
    """Returns the tag of thoughts that the end of a prompt opens, or "".

    The response must close them. `prompt` is decoded with its special tokens.
    """
    match = _OPENED.search(prompt)
    if match is None:
        return ""
    return match[1] or match[2]


def after_thoughts(text: str) -> str | None:
    """Returns the text after the last thoughts, or None if they never end."""
    end = 0
    is_open = False
    for match in _TAG.finditer(text):
        is_open = match[1] is not None
        if not is_open:
            end = match.end()
    if is_open:
        return None
    return text[end:]


def is_thought_and_answer(text: str) -> bool:
    """Returns True if a text is a single thought with both tags, followed by an answer."""
    tags = [match[0] for match in _TAG.finditer(text)]
    return (
        len(tags) == 2
        and TAGS.get(tags[0]) == tags[1]
        and text.lstrip().startswith(tags[0])
        and not text.rstrip().endswith(tags[1])
    )
