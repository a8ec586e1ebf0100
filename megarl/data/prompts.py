"""A task's problems as an endless stream of tokenised prompts; where it stands is one number.

Source -> order (a fresh permutation each epoch) -> tokens -> Prompt(prompt_id = position in the stream)
"""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megarl.data.tasks import Problem, Question, Source
from megarl.data.tokenizer import Template, Tokenizer
from megarl.types import Prompt

__all__ = ["PromptStream", "question_text"]

log = logging.getLogger(__name__)

MAX_SKIPS = 1000  # prompts too long, one after the other


@dataclass
class PromptStream:
    """roles.Prompts. The same on every rank: it depends on the task and the seed alone."""

    source: Source
    tokenizer: Tokenizer
    max_tokens: int  # longer prompts are skipped, and counted
    template: Template | None = None  # None: chat where the tokenizer has one
    seed: int = 0
    position: int = 0
    skipped: int = 0
    _order: tuple[int, list[int]] = field(default=(-1, []), repr=False)  # epoch, its permutation

    def take(self, count: int) -> list[Prompt]:
        """The next `count` prompts.

        Raises ValueError when prompt after prompt is longer than `max_tokens`.
        """
        taken: list[Prompt] = []
        skips = 0
        while len(taken) < count:
            prompt = self._prompt(self.position)
            self.position += 1
            if 0 < len(prompt.tokens) <= self.max_tokens:
                taken.append(prompt)
                skips = 0
                continue
            skips, self.skipped = skips + 1, self.skipped + 1
            if self.skipped == 1:
                log.warning("a prompt of %d tokens exceeds %d and is skipped", len(prompt.tokens), self.max_tokens)
            if skips == min(MAX_SKIPS, self.source.size or MAX_SKIPS):
                raise ValueError(
                    f"{skips} prompts in a row are empty or longer than rollout.max_prompt_tokens={self.max_tokens} "
                    f"(the last has {len(prompt.tokens)}); raise it, or choose a task with shorter prompts"
                )
        return taken

    def state(self) -> dict[str, Any]:
        return {"position": self.position, "skipped": self.skipped}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.position, self.skipped = int(state["position"]), int(state["skipped"])

    def _prompt(self, position: int) -> Prompt:
        problem: Problem = self.source.problem(self._index(position))
        tokens = self.tokenizer.encode_prompt(problem.question, self.template)
        return Prompt(position, tokens, question_text(problem.question), problem.answer, problem.extra)

    def _index(self, position: int) -> int:
        """An endless task is taken as it comes; a finite one in a new order each time round."""
        size = self.source.size
        if size is None:
            return position
        epoch, place = divmod(position, size)
        if self._order[0] != epoch:
            order = list(range(size))
            random.Random(f"{self.seed}/{epoch}").shuffle(order)
            self._order = (epoch, order)
        return self._order[1][place]


def question_text(question: Question) -> str:
    """What a person would read: the text, or the messages under one another."""
    if isinstance(question, str):
        return question
    return "\n".join(f"{message['role']}: {message['content']}" for message in question)
