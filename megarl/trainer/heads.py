"""Heads compute outputs from the hidden states of the last stage: log-probs of labels, or one number per token.

A head reads only the positions it selects, so prompts cost no logits.
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


@dataclass(frozen=True, slots=True)
class HeadOptions:
    """Options shared by all micro-batches of a pass."""

    tensor_group: ProcessGroup
    temperature: float
    entropy: bool


class Head(Protocol):
    """A head for `Trainer.build`. `S` is the number of positions it reads in a micro-batch."""

    @property
    def is_tensor_parallel(self) -> bool:
        """True if each tensor rank computes a partial gradient of the hidden states, to be summed over the ranks."""
        ...

    def fields(self, *, entropy: bool) -> tuple[str, ...]:
        """Returns the names of the fields of TokenOutputs that `read` computes."""
        ...

    def positions(self, batch: TokenBatch) -> Tensor:
        """Returns [T] bool: the positions to read."""
        ...

    def attach(self, model: GPTModel) -> None:
        """Adds the head's parameters to the last model chunk, after the weights are loaded."""
        ...

    def read(self, model: GPTModel, hidden_SH: Tensor, labels_S: Tensor, options: HeadOptions) -> TokenOutputs:
        """Returns outputs [S] fp32; every tensor rank has the whole `hidden_SH`."""
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
        """Adds nothing: `read` uses the model's output layer, or the tied embedding."""

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
    """A critic: a linear layer from the hidden state to one value at each trained position, initialised to 0.

    Its parameters, `value_head.weight` and `value_head.bias`, are replicated on all tensor ranks.
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
    """A reward model: one number per row, at its last position; 0 elsewhere."""

    def positions(self, batch: TokenBatch) -> Tensor:
        is_last_T = torch.zeros_like(batch.mask)
        is_last_T[batch.cu_seqlens[1:][batch.cu_seqlens.diff() > 0] - 1] = True
        return is_last_T
