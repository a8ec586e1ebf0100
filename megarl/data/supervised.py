"""Batches of prompts with reference answers, for supervised training on the answer and the end token after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.data.collate import token_batch
from megarl.data.tokenizer import Tokenizer
from megarl.types import Prompt, TokenBatch

__all__ = ["Examples"]


@dataclass(frozen=True)
class Examples:
    """Called with prompts, returns their batch: one row each, whose answer is learned.

    Raises ValueError for a prompt without an answer.
    """

    tokenizer: Tokenizer
    temperature: float = 1.0  # of the distribution whose likelihood is maximised

    def __call__(self, prompts: Sequence[Prompt]) -> TokenBatch:
        return token_batch([self._row(prompt) for prompt in prompts], temperature=self.temperature)

    def _row(self, prompt: Prompt) -> tuple[Tensor, Tensor]:
        if prompt.answer is None:
            raise ValueError(
                f"problem {prompt.prompt_id} has no answer ({prompt.text[:40]!r}), and stage: sft learns from answers; "
                "give each row of the task an answer"
            )
        answer = self.tokenizer.encode_answer(prompt.answer)
        tokens = torch.tensor([*prompt.tokens, *answer])
        return tokens, torch.arange(tokens.numel()) >= len(prompt.tokens)
