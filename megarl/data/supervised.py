"""Batches of prompts with reference answers, for supervised training on the answer and the end token after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megarl.data.collate import collate
from megarl.data.tokenizer import Tokenizer
from megarl.types import Group, Prompt, Sample, TrainBatch

__all__ = ["Examples"]


@dataclass(frozen=True)
class Examples:
    """Makes the TrainBatch of prompts: mask True on the answers, all rewards 0.

    Raises ValueError for a prompt without an answer.
    """

    tokenizer: Tokenizer
    temperature: float = 1.0  # of the distribution whose likelihood is maximised

    def __call__(self, prompts: Sequence[Prompt]) -> TrainBatch:
        groups = [Group(prompt, (self._example(prompt),)) for prompt in prompts]
        return collate(groups, temperature=self.temperature)

    def _example(self, prompt: Prompt) -> Sample:
        if prompt.answer is None:
            raise ValueError(
                f"problem {prompt.prompt_id} has no answer ({prompt.text[:40]!r}), and stage: sft learns from answers; "
                "give each row of the task an answer"
            )
        answer = self.tokenizer.encode_answer(prompt.answer)
        tokens = torch.tensor([*prompt.tokens, *answer])
        trainable = torch.arange(tokens.numel()) >= len(prompt.tokens)
        none = torch.zeros(tokens.numel())
        return Sample(prompt.prompt_id, 0, tokens, trainable, none, (0, 0), "stop", prompt.answer, reward=0.0)
