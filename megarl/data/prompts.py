"""A task's problems as an endless stream of tokenised prompts; its position is one number.

Source -> order (a fresh permutation each epoch) -> tokens -> Prompt(prompt_id = position in the stream)
"""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megarl.data.tasks import Source
from megarl.data.tokenizer import Encode
from megarl.types import Prompt

log = logging.getLogger(__name__)

MAX_SKIPS = 1000  # consecutive prompts that are too long


@dataclass
class PromptStream:
    """roles.Prompts. Depends on the task and the seed alone, so it is the same on every rank."""

    source: Source
    encode: Encode  # question -> tokens (tokenizer.prompt_encoder)
    max_tokens: int  # longer prompts are skipped and counted
    seed: int = 0
    position: int = 0
    skipped: int = 0
    _order: tuple[int, list[int]] = field(default=(-1, []), repr=False)  # epoch, its permutation

    def take(self, count: int) -> list[Prompt]:
        """The next `count` prompts. Raises ValueError if too many prompts in a row are longer than `max_tokens`."""
        taken: list[Prompt] = []
        skips = 0
        while len(taken) < count:
            problem = self.source.problem(self._index(self.position))
            tokens = self.encode(problem.question)
            text = problem.question
            if not isinstance(text, str):  # chat messages
                text = "\n".join(f"{message['role']}: {message['content']}" for message in text)
            prompt = Prompt(self.position, tokens, text, problem.answer, problem.extra)
            self.position += 1
            if 0 < len(tokens) <= self.max_tokens:
                taken.append(prompt)
                skips = 0
                continue
            skips, self.skipped = skips + 1, self.skipped + 1
            if self.skipped == 1:
                log.warning("skipped a prompt of %d tokens; prompts must have 1 to %d", len(tokens), self.max_tokens)
            if skips == min(MAX_SKIPS, self.source.size or MAX_SKIPS):
                raise ValueError(
                    f"{skips} prompts in a row are empty or longer than rollout.max_prompt_tokens={self.max_tokens} "
                    f"(the last has {len(tokens)}); raise it, or choose a task with shorter prompts"
                )
        return taken

    def state(self) -> dict[str, Any]:
        return {"position": self.position, "skipped": self.skipped}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.position, self.skipped = int(state["position"]), int(state["skipped"])

    def _index(self, position: int) -> int:
        """Index of the problem at `position`; a finite task is shuffled each epoch, an endless one is not."""
        size = self.source.size
        if size is None:
            return position
        epoch, index = divmod(position, size)
        if self._order[0] != epoch:
            order = list(range(size))
            random.Random(f"{self.seed}/{epoch}").shuffle(order)
            self._order = (epoch, order)
        return self._order[1][index]
