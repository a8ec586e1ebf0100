"""Heads compute log-probs of labels, or values per token, from hidden states of the last stage."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from megarl.algorithms.reward_model import response_positions, row_scores
from megarl.models.shape import ModelShape
from megarl.models.shards import Replicated, Table
from megarl.platform.json_text import read_json
from megarl.trainer.logprobs import VocabShard, token_outputs, top_tokens
from megarl.trainer.parallel_groups import ProcessGroups
from megarl.types import MicrobatchRows, TokenBatch, TokenOutputs


@dataclass(frozen=True)
class HeadOptions:
    """Options shared by all micro-batches of a pass."""

    groups: ProcessGroups
    temperature: float
    entropy: bool
    top_k: int  # number of likeliest tokens whose log-probs are returned too


class Head(Protocol):
    """A head for `Trainer.build`.

    It reads S positions of a micro-batch; by default, the trained ones.
    """

    # True if each tensor rank computes a partial gradient of the hidden states
    is_tensor_parallel: ClassVar[bool]

    @property
    def outputs(self) -> int:
        """The number of outputs for each position."""
        ...

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the fields of TokenOutputs [T] that a forward pass returns."""
        ...

    def positions(self, batch: TokenBatch) -> Tensor:
        """Returns [T] bool: the positions to read."""
        return batch.mask

    def attach(self, model: GPTModel) -> None:
        """Adds the head's initialised parameters, by default none, to the last model chunk."""

    def read(
        self,
        model: GPTModel,
        hidden_SH: Tensor,
        labels_S: Tensor,
        options: HeadOptions,
    ) -> TokenOutputs:
        """Returns outputs [S] fp32 for labels [S] or [S, 1 + K].

        Every tensor rank passes the whole `hidden_SH`.
        """
        ...

    def table(self, table: Table, shape: ModelShape) -> Table:
        """Returns the family's table, adapted to the HF tensors of a model with this head."""
        return table


@dataclass(frozen=True)
class VocabularyHead(Head):
    """Log-probs of labels, and entropy, by the model's output layer or its tied embedding."""

    vocab: int
    chunk: int  # tokens whose fp32 logits exist at once
    rounding: float = 0.0  # share of the error of rounding to bf16 that is added to the logits
    is_tensor_parallel: ClassVar[bool] = True
    fields: ClassVar[tuple[str, ...]] = ("logprobs_T",)

    @property
    def outputs(self) -> int:
        return self.vocab

    def read(
        self,
        model: GPTModel,
        hidden_SH: Tensor,
        labels_S: Tensor,
        options: HeadOptions,
    ) -> TokenOutputs:
        weight_VH = model.output_layer.weight
        if model.share_embeddings_and_output_weights:
            weight_VH = model.shared_embedding_or_output_weight()
        assert weight_VH is not None
        shard = VocabShard.of(self.vocab, len(weight_VH), options.groups.tensor)
        top_SK = None
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
            rounding=self.rounding,
        )
        return replace(outputs, extra_labels_TK=top_SK)


class ValueHead:
    """A critic: a linear layer, initialised to 0, that reads the final norm's output.

    It returns one value per trained position. `value_head.weight` and `.bias` are replicated over
    tensor ranks. In a Hugging Face folder, the model is a token classifier without `lm_head`, and
    they are named `score.weight` and `.bias`.
    """

    is_tensor_parallel: ClassVar[bool] = False
    architecture: ClassVar[Any] = "ForTokenClassification"  # ending of the HF architecture's name

    @property
    def outputs(self) -> int:
        return 1

    @property
    def fields(self) -> tuple[str, ...]:
        return ("values_T", "gates_T")[: self.outputs]

    def positions(self, batch: TokenBatch) -> Tensor:
        return batch.mask

    def attach(self, model: GPTModel) -> None:
        weight = next(model.parameters())
        if not model.share_embeddings_and_output_weights:
            model.output_layer.weight = None  # drop the output layer; a tied one is the embedding
        model.value_head = torch.nn.Linear(
            model.config.hidden_size,
            self.outputs,
            bias=self._has_bias,
            device=weight.device,
            dtype=weight.dtype,
        )
        for parameter in model.value_head.parameters():
            torch.nn.init.zeros_(parameter)

    @property
    def _has_bias(self) -> bool:
        return self.architecture == "ForTokenClassification"

    def table(self, table: Table, shape: ModelShape) -> Table:
        rules = [rule for rule in table.head if rule.param != "output_layer.weight"]
        rules.append(Replicated("score.weight", "value_head.weight", (self.outputs, shape.hidden)))
        if self._has_bias:
            rules.append(Replicated("score.bias", "value_head.bias", (self.outputs,)))
        return replace(table, head=tuple(rules))

    def read(
        self,
        model: GPTModel,
        hidden_SH: Tensor,
        labels_S: Tensor,
        options: HeadOptions,
    ) -> TokenOutputs:
        linear = model.get_submodule("value_head")
        assert isinstance(linear, torch.nn.Linear)
        bias_O = linear.bias.float() if self._has_bias else None
        outputs_SO = torch.nn.functional.linear(hidden_SH.float(), linear.weight.float(), bias_O)
        outputs = zip(self.fields, outputs_SO.T, strict=True)
        return replace(TokenOutputs(), **dict(outputs))


@dataclass(frozen=True)
class RewardHead(ValueHead):
    """A reward model; `scores` reduces its outputs to one number per row.

    Outputs are 0 at positions that the head does not read. What it reads depends on `kind`:

    scalar    the last token of each row; in a Hugging Face folder, a sequence classifier without
              bias
    token     the response's tokens, whose values are aggregated; with aggregate "weighted", a
              second output is the logit of a token's weight
    process   the positions where `mask` is True, the last token of each step of a StepBatch;
              `values_T` are the scores of steps
    """

    kind: Literal["scalar", "token", "process"] = "scalar"
    aggregate: str = "last"  # for kind "token": an `aggregate` of `row_scores`

    @property
    def outputs(self) -> int:
        return 2 if self.aggregate == "weighted" else 1

    @property
    def architecture(self) -> str:
        return "ForSequenceClassification" if self.kind == "scalar" else "ForTokenClassification"

    def positions(self, batch: TokenBatch) -> Tensor:
        if self.kind == "process":
            return batch.mask
        if self.kind == "token":
            return response_positions(batch.mask)
        is_last_T = torch.zeros_like(batch.mask)
        is_last_T[batch.cu_seqlens[1:][batch.lengths_N > 0] - 1] = True
        return is_last_T

    def scores(self, outputs: TokenOutputs, rows: TokenBatch | MicrobatchRows) -> Tensor:
        """Returns [N] fp32: the score of each row.

        `outputs` come from `Trainer.forward`, or are those that a loss receives.
        """
        return row_scores(outputs, rows.mask, rows.cu_seqlens, self.aggregate)


def load_head(folder: str | Path) -> RewardHead:
    """Returns the head of a reward model in a Hugging Face folder.

    A token classifier that megarl did not train gets kind "process". Pass the head to
    `Trainer.build`, which loads its weights; ``head.scores(trainer.forward(batch), batch)`` returns
    the rewards [N]. Raises ValueError if the folder has no reward model.
    """
    file = Path(folder) / "config.json"
    if not file.is_file():
        raise ValueError(f"{folder} has no config.json; name the folder of a reward model")
    config = read_json(file)
    if "megarl_reward_head" in config:
        return RewardHead(**config["megarl_reward_head"])
    architecture = next(iter(config.get("architectures") or ()), "unknown")
    for head in (RewardHead(), RewardHead(kind="process")):
        if architecture.endswith(head.architecture):
            return head
    raise ValueError(
        f"{folder} is a {architecture}, not a reward model; "
        "use one that stage reward_model exported"
    )
