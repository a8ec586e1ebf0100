"""An endless stream of a task's problems as tokenised prompts; its position is one number.

Sources -> mixture (by weight) -> order (a fresh permutation each epoch) -> tokens ->
Prompt(prompt_id = position)
"""

import logging
import math
import random
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from typing import Any

from megarl.data.rows import Problem, errors_of
from megarl.data.tasks import Source
from megarl.data.tokenizer import Example
from megarl.types import Group, Prompt

log = logging.getLogger(__name__)

MAX_SKIPS = 1000  # consecutive prompts that are empty or too long


@dataclass
class PromptStream:
    """Implements roles.Prompts. Depends on tasks and seed only, so it is the same on every rank."""

    sources: Sequence[Source]  # several sources are a mixture
    encode: Callable[[Problem], Example]  # conversations.example_encoder
    max_tokens: int  # longer prompts are skipped and counted
    seed: int = 0
    position: int = 0
    skipped: int = 0
    kept: dict[str, float] = field(default_factory=dict)  # values of a stage, kept in the state
    accepts_changes: bool = False  # True: the data may differ from those of the restored state
    # for each position so far: number within its part x number of parts + part
    _drawn: "array[int]" = field(default_factory=partial(array, "q"))
    _counts: Counter[int] = field(default_factory=Counter)  # part -> its positions in `_drawn`

    def take(self, count: int, *, repeat: bool = True) -> list[Prompt]:
        """Returns the next `count` prompts.

        Without `repeat`, no problem is returned twice, so there may be fewer prompts. Raises
        ValueError if too many consecutive prompts are empty or longer than `max_tokens`.
        """
        taken = []
        unseen = sum(math.inf if source.size is None else source.size for source in self.sources)
        skips = 0
        max_skips = min(MAX_SKIPS, unseen)
        while len(taken) < count and (repeat or unseen):
            part, number = self._next()
            source = self.sources[part]
            if not repeat and source.size is not None and number >= source.size:
                continue
            unseen -= 1
            problem = source.problem(self._index(part, number))
            with errors_of(problem.where):
                tokens, learned = self.encode(problem)
            if 0 < len(tokens) <= self.max_tokens:
                taken.append(
                    Prompt(
                        self.position - 1,
                        tokens,
                        problem.text,
                        problem.answer,
                        problem.extra,
                        learned,
                    )
                )
                skips = 0
                continue
            skips += 1
            self.skipped += 1
            if self.skipped == 1:
                log.warning(
                    f"skipped a prompt of {len(tokens)} tokens; "
                    f"prompts must have 1 to {self.max_tokens}"
                )
            if skips == max_skips:
                raise ValueError(
                    f"{skips} prompts in a row are empty or longer than rollout.max_prompt_tokens="
                    f"{self.max_tokens} ({problem.where} has {len(tokens)}); raise it, or choose a "
                    "task with shorter prompts"
                )
        return taken

    def put_back(self, prompts: Sequence[Prompt]) -> None:
        """Rewinds the stream by `prompts`, the last ones taken: `take` returns them again."""
        if prompts:
            first = prompts[0].prompt_id
            self.skipped -= self.position - first - len(prompts)
            self.position = first

    def observe(self, groups: Sequence[Group]) -> None:
        """Does nothing: the order of prompts does not depend on rewards."""

    def state(self) -> dict[str, Any]:
        return {
            "position": self.position,
            "skipped": self.skipped,
            "kept": dict(self.kept),
            "data": self._data,
        }

    @cached_property
    def _data(self) -> list[tuple[int | None, str]]:
        """(size, digest of the questions) of each source; the order of prompts depends on both."""
        return [(source.size, source.digest()) for source in self.sources]

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores the position. Raises ValueError if the data differ from those of the state,
        unless `accepts_changes`.
        """
        position = int(state["position"])
        before = [tuple(source) for source in state.get("data", self._data)]
        if before != self._data:
            sizes = [" + ".join(str(size) for size, _ in data) for data in (before, self._data)]
            change = f"the task's problems are not those that the run began with ({sizes[0]} of "
            change += f"them then, {sizes[1]} now)"
            if not self.accepts_changes:
                raise ValueError(
                    f"{change}; restore the data, pass --resume-changed to continue with the new, "
                    "or start over with checkpoint.resume=never"
                )
            # printed, not logged: shows on the terminal of rank 0
            print(f"megarl: {change}: up to {position} prompts already taken may come again")
        self.position = position
        self.skipped = int(state["skipped"])
        self.kept.update(state.get("kept", {}))

    def _next(self) -> tuple[int, int]:
        """Returns the part at `position` and the position within that part's stream, and advances.

        Problem n of a part is due at time (n + 1/2) / weight, as in Webster's apportionment. The
        count of a part always differs from its exact share by at most half the number of parts.
        """
        size = len(self.sources)
        counts = self._counts
        self.position += 1
        while len(self._drawn) < self.position:
            part = min(
                range(size), key=lambda part: (counts[part] + 0.5) / self.sources[part].weight
            )
            self._drawn.append(counts[part] * size + part)
            counts[part] += 1
        number, part = divmod(self._drawn[self.position - 1], size)
        return part, number

    def _index(self, part: int, number: int) -> int:
        """Returns the index of a part's problem `number`.

        A finite source is shuffled in each epoch, an endless one is not.
        """
        size = self.sources[part].size
        if size is None:
            return number
        epoch, index = divmod(number, size)
        return _order(f"{self.seed}/{part}/{epoch}", size)[index]


@lru_cache(maxsize=64)  # at least the current epoch of every part
def _order(seed: str, size: int) -> list[int]:
    """Returns a permutation of `size` problems."""
    order = list(range(size))
    random.Random(seed).shuffle(order)
    return order
