"""What the last stage computes from hidden states: log-probs of labels, or one number a token.

A head reads only the positions it asks for, so prompts cost no logits. Its outputs are gathered over the context
ranks (forward.py), so a loss sees whole rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor
from torch.distributed import ProcessGroup

from megarl.trainer.logprobs import VocabShard, token_outputs
from megarl.types import TokenBatch, TokenOutputs

__all__ = ["Head", "HeadOptions", "RewardHead", "ValueHead", "VocabularyHead"]


@dataclass(frozen=True, slots=True)
class HeadOptions:
    """The same for every micro-batch of a pass."""

    tensor_group: ProcessGroup
    temperature: float
    entropy: bool  # wanted in an update, not in a forward pass


class Head(Protocol):
    """A head for `Trainer.build`. `S` = positions it reads of a micro-batch."""

    @property
    def is_tensor_parallel(self) -> bool:
        """True: the gradient it gives to hidden states is one tensor rank's part of a sum."""
        ...

    def fields(self, *, entropy: bool) -> tuple[str, ...]:
        """Which fields of TokenOutputs `read` fills."""
        ...

    def positions(self, batch: TokenBatch) -> Tensor:
        """[T] bool: the positions it reads."""
        ...

    def attach(self, model: GPTModel) -> None:
        """Add its own parameters to the chunk that ends the pipeline, after the weights are loaded."""
        ...

    def read(self, model: GPTModel, hidden_SH: Tensor, labels_S: Tensor, options: HeadOptions) -> TokenOutputs:
        """Outputs [S] fp32 of hidden states that every tensor rank has whole."""
        ...


@dataclass(frozen=True, slots=True)
class VocabularyHead:
    """Log-prob of each label, and entropy."""

    vocab: int
    chunk: int  # tokens whose fp32 logits exist at once
    is_tensor_parallel: bool = True

    def fields(self, *, entropy: bool) -> tuple[str, ...]:
        return ("logprobs_T", "entropy_T") if entropy else ("logprobs_T",)

    def positions(self, batch: TokenBatch) -> Tensor:
        return batch.mask

    def attach(self, model: GPTModel) -> None:
        """It reads the model's own output layer, or the tied embedding."""

    def read(self, model: GPTModel, hidden_SH: Tensor, labels_S: Tensor, options: HeadOptions) -> TokenOutputs:
        tied = model.share_embeddings_and_output_weights
        weight_VH = model.shared_embedding_or_output_weight() if tied else model.output_layer.weight
        assert weight_VH is not None
        return token_outputs(
            hidden_SH,
            weight_VH,
            labels_S,
            VocabShard.of(self.vocab, weight_VH.shape[0], options.tensor_group),
            temperature=options.temperature,
            chunk=self.chunk,
            entropy=options.entropy,
        )


@dataclass(frozen=True, slots=True)
class ValueHead:
    """A critic: a linear map of the hidden state to one number where a label is learned. It starts at 0.

    Its parameters, `value_head.weight` and `value_head.bias`, are the same on all tensor ranks.
    """

    is_tensor_parallel: bool = False

    def fields(self, *, entropy: bool) -> tuple[str, ...]:
        return ("values_T",)

    def positions(self, batch: TokenBatch) -> Tensor:
        return batch.mask

    def attach(self, model: GPTModel) -> None:
        weight = next(model.parameters())
        model.value_head = torch.nn.Linear(model.config.hidden_size, 1, device=weight.device, dtype=weight.dtype)
        for parameter in model.value_head.parameters():
            torch.nn.init.zeros_(parameter)

    def read(self, model: GPTModel, hidden_SH: Tensor, labels_S: Tensor, options: HeadOptions) -> TokenOutputs:
        linear = model.get_submodule("value_head")
        assert isinstance(linear, torch.nn.Linear)
        weight_1H, bias_1 = linear.weight.float(), linear.bias.float()
        return TokenOutputs(values_T=torch.nn.functional.linear(hidden_SH.float(), weight_1H, bias_1)[:, 0])


@dataclass(frozen=True, slots=True)
class RewardHead(ValueHead):
    """A reward model: one number a row, at its last position; 0 elsewhere."""

    def positions(self, batch: TokenBatch) -> Tensor:
        is_last_T = torch.zeros_like(batch.mask)
        is_last_T[batch.cu_seqlens[1:][batch.cu_seqlens.diff() > 0] - 1] = True
        return is_last_T
