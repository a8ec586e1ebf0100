"""Heads: from hidden states of the last stage, where they read, log-probs of labels or one number per token."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor
from torch.distributed import ProcessGroup

from megarl.algorithms.reward_model import response_positions, row_scores
from megarl.models.shape import ModelShape
from megarl.models.shards import Replicated, Rule, Table
from megarl.platform.json_text import parse_json
from megarl.trainer.logprobs import VocabShard, token_outputs, top_tokens
from megarl.types import MicrobatchRows, TokenBatch, TokenOutputs


@dataclass(frozen=True, slots=True)
class HeadOptions:
    """Options shared by all micro-batches of a pass."""

    tensor_group: ProcessGroup
    temperature: float
    entropy: bool
    top_k: int = 0  # log-probs of that many of the likeliest tokens too


class Head(Protocol):
    """A head for `Trainer.build`. `S` is the number of positions it reads in a micro-batch; by default trained ones."""

    @property
    def is_tensor_parallel(self) -> bool:
        """True if each tensor rank computes a partial gradient of the hidden states, to be summed over the ranks."""
        ...

    def fields(self, *, entropy: bool) -> tuple[str, ...]:
        """Returns the names of the fields of TokenOutputs that `read` computes."""
        ...

    def positions(self, batch: TokenBatch) -> Tensor:
        """Returns [T] bool: the positions to read."""
        return batch.mask

    def attach(self, model: GPTModel) -> None:
        """Adds the head's parameters, initialised, to the last model chunk; by default none."""

    def read(
        self, model: GPTModel, hidden_SH: Tensor, labels_S: Tensor, options: HeadOptions
    ) -> TokenOutputs:
        """Returns outputs [S] fp32; every tensor rank has the whole `hidden_SH`. Labels may be [S, 1 + K]."""
        ...

    def table(self, table: Table, shape: ModelShape) -> Table:
        """Returns the family's table with the tensors that a folder of the model with this head has."""
        return table


@dataclass(frozen=True, slots=True)
class VocabularyHead(Head):
    """Log-prob of each label, and entropy, by the model's output layer or its tied embedding."""

    vocab: int
    chunk: int  # tokens whose fp32 logits exist at once
    is_tensor_parallel: bool = True

    def fields(self, *, entropy: bool) -> tuple[str, ...]:
        return ("logprobs_T", "entropy_T") if entropy else ("logprobs_T",)

    def read(
        self, model: GPTModel, hidden_SH: Tensor, labels_S: Tensor, options: HeadOptions
    ) -> TokenOutputs:
        tied = model.share_embeddings_and_output_weights
        weight_VH = model.shared_embedding_or_output_weight() if tied else model.output_layer.weight
        assert weight_VH is not None
        shard, top_SK = VocabShard.of(self.vocab, len(weight_VH), options.tensor_group), None
        if options.top_k:
            top_SK = top_tokens(hidden_SH, weight_VH, shard, chunk=self.chunk, count=options.top_k)
            labels_S = torch.cat([labels_S[:, None], top_SK], 1)
        outputs = token_outputs(
            hidden_SH,
            weight_VH,
            labels_S,
            shard,
            temperature=options.temperature,
            chunk=self.chunk,
            entropy=options.entropy,
        )
        return replace(outputs, extra_labels_TK=top_SK)


@dataclass(frozen=True, slots=True)
class ValueHead:
    """A critic: a linear layer, initialised to 0, from the final norm's output to one value at each trained position.
    Its `value_head.weight` and `.bias` are replicated on all tensor ranks; in a Hugging Face folder, a token classifier
    without `lm_head`, they are `score.weight` and `.bias`."""

    is_tensor_parallel: bool = False
    outputs: ClassVar[Any] = 1
    architecture: ClassVar[Any] = "ForTokenClassification"  # of the folder, in transformers

    def fields(self, *, entropy: bool) -> tuple[str, ...]:
        return ("values_T", "gates_T")[: self.outputs]

    def positions(self, batch: TokenBatch) -> Tensor:
        return batch.mask

    def attach(self, model: GPTModel) -> None:
        weight, has_bias = next(model.parameters()), self.architecture == "ForTokenClassification"
        if not model.share_embeddings_and_output_weights:
            model.output_layer.weight = None  # of the vocabulary; a tied one is the embedding
        model.value_head = torch.nn.Linear(
            model.config.hidden_size,
            self.outputs,
            bias=has_bias,
            device=weight.device,
            dtype=weight.dtype,
        )
        for parameter in model.value_head.parameters():
            torch.nn.init.zeros_(parameter)

    def table(self, table: Table, shape: ModelShape) -> Table:
        rules: list[Rule] = [
            Replicated("score.weight", "value_head.weight", (self.outputs, shape.hidden))
        ]
        if self.architecture == "ForTokenClassification":
            rules.append(Replicated("score.bias", "value_head.bias", (self.outputs,)))
        kept = (rule for rule in table.head if rule.param != "output_layer.weight")
        return replace(table, head=(*kept, *rules))

    def read(
        self, model: GPTModel, hidden_SH: Tensor, labels_S: Tensor, options: HeadOptions
    ) -> TokenOutputs:
        linear = model.get_submodule("value_head")
        assert isinstance(linear, torch.nn.Linear)
        bias_O = None if linear.bias is None else linear.bias.float()
        outputs_SO = torch.nn.functional.linear(hidden_SH.float(), linear.weight.float(), bias_O)
        return TokenOutputs(
            **dict(zip(self.fields(entropy=False), outputs_SO.unbind(1), strict=True))
        )


@dataclass(frozen=True, slots=True)
class RewardHead(ValueHead):
    """A reward model. `scores` are one number per row; where the head does not read, outputs are 0.

    scalar    reads the last token of each row; a sequence classifier in a folder, without bias
    token     reads the response's tokens and aggregates; "weighted": a second output is the logit of a token's weight
    process   reads where `mask` is True: the last token of each step of a StepBatch. `values_T` are the scores"""

    kind: Literal["scalar", "token", "process"] = "scalar"
    aggregate: str = "last"  # of kind token: a name of `row_scores`

    @property
    def outputs(self) -> int:
        return 2 if self.aggregate == "weighted" else 1

    @property
    def architecture(self) -> str:
        return "ForSequenceClassification" if self.kind == "scalar" else "ForTokenClassification"

    def positions(self, batch: TokenBatch) -> Tensor:
        if self.kind != "scalar":
            return batch.mask if self.kind == "process" else response_positions(batch.mask)
        is_last_T = torch.zeros_like(batch.mask)
        is_last_T[batch.cu_seqlens[1:][batch.cu_seqlens.diff() > 0] - 1] = True
        return is_last_T

    def scores(self, outputs: TokenOutputs, rows: TokenBatch | MicrobatchRows) -> Tensor:
        """[N] fp32: the score of each row, from what `Trainer.forward` returned for a batch, or a loss was given."""
        return row_scores(outputs, rows.mask, rows.cu_seqlens, self.aggregate)


def load_head(folder: str | Path) -> RewardHead:
    """Returns the head of a reward model in a Hugging Face folder; another's token classifier has kind process. Pass it
    to `Trainer.build`, which loads its weights; ``head.scores(trainer.forward(batch), batch)`` are the rewards [N].
    Raises ValueError for a folder of another kind."""
    if not (file := Path(folder) / "config.json").is_file():
        raise ValueError(f"{folder} has no config.json; name the folder of a reward model")
    config = parse_json(file.read_bytes())
    if "megarl_reward_head" in config:
        return RewardHead(**config["megarl_reward_head"])
    architecture = next(iter(config.get("architectures") or ()), "unknown")
    for head in (RewardHead(kind="scalar"), RewardHead(kind="process")):
        if architecture.endswith(head.architecture):
            return head
    raise ValueError(
        f"{folder} is a {architecture}, not a reward model; use one that stage reward_model exported"
    )
