"""The types of the training loop: Prompt -> Sample -> Group -> TrainBatch -> ScoredBatch ->
StepReport.

N = rows (samples) of a batch, T = tokens of all rows end to end, L = tokens of one sample (prompt
and response), M = tokens of the rows of one micro-batch. Tensors live on the CPU; a rank moves only
its own micro-batches to its device.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor

from megarl.platform.device import to_device

Finish = Literal["stop", "length", "abort"]
FINISH: tuple[Finish, ...] = ("stop", "length", "abort")  # TrainBatch.finish indexes this


class CheckFailed(RuntimeError):
    """A check refuses to continue (exit code 3). Raised on every rank of the run."""


class Terminated(CheckFailed):
    """SIGTERM has arrived (exit code 143). Raised on every rank of the run."""


SampleKey = tuple[int, int]  # prompt id, sample index


@dataclass(frozen=True)
class Prompt:
    """One question. `prompt_id` is its position in the task's endless stream, so it is unique."""

    prompt_id: int
    tokens: tuple[int, ...]
    text: str
    answer: Any = None  # data.rows.reference
    extra: Mapping[str, Any] = field(default_factory=dict)
    learned: tuple[bool, ...] = ()  # of `tokens`, where these are a whole example of stage sft


@dataclass(frozen=True)
class Request:
    """A sample to draw: number `index` of the prompt's samples, with its own random seed."""

    prompt: Prompt
    index: int
    seed: int
    temperature: float  # 0: greedy
    prefix: Tensor | None = None  # [L] int64, earlier turns: what comes after the prompt
    turn: int = 0  # responses in `prefix`

    @property
    def key(self) -> SampleKey:
        return self.prompt.prompt_id, self.index

    @property
    def tokens(self) -> list[int]:
        """Those to continue."""
        later = [] if self.prefix is None else self.prefix.tolist()
        return [*self.prompt.tokens, *later]


@dataclass(frozen=True)
class Routes:
    """The experts chosen for the tokens of one row, in each layer that has experts; only a layer's
    owner has them.

    A token with one expert K times has no known route: the last of a sample, which the engine never
    computed.
    """

    owners: tuple[int, ...]  # rank, by layer
    checksums: tuple[int, ...]  # weights.checksum.row_checksums, by layer
    # [layers, L, K], of route_dtype; layers first, of which a rank reads its own
    experts: Tensor | None = None


Choices = tuple[Routes | None, ...]  # recorded in a forward pass, by row; empty: not recorded


def route_dtype(num_experts: int) -> torch.dtype:
    """Returns the smallest dtype that holds the index of an expert."""
    return torch.uint8 if num_experts <= 256 else torch.int16


@dataclass(frozen=True)
class Sample:
    """One response with its prompt in front; element l of every tensor describes ``tokens[l]``."""

    prompt_id: int
    index: int  # among the samples of the prompt
    tokens: Tensor  # [L] int64
    trainable: Tensor  # [L] bool: True where the policy sampled the token
    rollout_logprobs: Tensor  # [L] fp32, of tokens[l]; 0 where not trainable
    versions: Tensor  # [L] int32, of the weights that sampled tokens[l]; -1 where not trainable
    finish: Finish
    text: str = ""  # the response, decoded
    reward: float | None = None  # None: not scored (yet, or the reward failed)
    rewards: Mapping[str, float] = field(default_factory=dict)  # each reward, unweighted
    # (token index, reward of the step that ends there)
    step_rewards: tuple[tuple[int, float], ...] = ()
    # False: `reward` is the sum of the steps, which are trained on instead
    has_outcome: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)
    prompt_tokens_computed: int = 0  # by the engine; its prefix cache had the others
    choices: Routes | None = None  # of the layers that sampled it; None: not recorded

    @property
    def key(self) -> SampleKey:
        return self.prompt_id, self.index

    def without_reward(self, cause: str, detail: str = "") -> "Sample":
        """Returns the sample to drop; it is counted as `cause`."""
        return replace(self, reward=None, extra={**self.extra, "dropped": cause, "detail": detail})


SAMPLE_TENSORS = {  # [L] of a Sample
    "tokens": torch.int64,
    "rollout_logprobs": torch.float32,
    "versions": torch.int32,
    "trainable": torch.bool,
}


@dataclass(frozen=True)
class Group:
    """The scored samples of one prompt."""

    prompt: Prompt
    samples: tuple[Sample, ...]
    baseline: float | None = None  # reward of the greedy sample (ReMax)


@dataclass(frozen=True)
class Rollout:
    """The samples of one step, the same on every rank."""

    groups: tuple[Group, ...]  # those to train on
    generated: tuple[Group, ...]  # every scored group, including those that were filtered out
    counts: Mapping[str, int]  # samples and groups left out, by cause
    digest: str  # sha256 over prompt id, sample index and tokens of `groups`


@dataclass(frozen=True, kw_only=True)
class TokenBatch:
    """Everything a forward pass needs.

    Rows lie end to end and are shifted once: ``labels[t] = tokens[t + 1]``.
    """

    tokens: Tensor  # [T] int64
    labels: Tensor  # [T] int64; 0 and never used at the last position of a row
    mask: Tensor  # [T] bool: True where labels[t] is learned; False at the last position of a row
    cu_seqlens: Tensor  # [N + 1] int64
    temperature: float  # of the softmax
    # [T, K] int32: other tokens whose log-probs a loss reads; any ids if masked
    extra_labels: Tensor | None = None
    # by row, what the policy's layers are to choose; empty: they choose themselves
    choices: Choices = ()

    @property
    def num_rows(self) -> int:
        return self.cu_seqlens.numel() - 1

    @property
    def num_tokens(self) -> int:
        return self.tokens.numel()

    @property
    def lengths_N(self) -> Tensor:
        return self.cu_seqlens.diff()

    def fields_of(self, kind: type["TokenBatch"]) -> dict[str, Any]:
        """Returns the fields that a batch of `kind` has too, for one of another type."""
        return {field.name: getattr(self, field.name) for field in fields(kind)}


@dataclass(frozen=True, kw_only=True)
class PreferenceBatch(TokenBatch):
    """Responses, some preferred to others.

    Rows of one prompt are consecutive, and share a micro-batch.
    """

    group: Tensor  # [N] int64, dense ids of prompts
    # [P, 2] int64: row of the better response, row of the worse one, both of one group
    pairs: Tensor
    margins: Tensor  # [P] fp32: 0 where the data give none


@dataclass(frozen=True, kw_only=True)
class StepBatch(TokenBatch):
    """Solutions in steps.

    Here `mask` is True at the last token of each step itself, where its score is.
    """

    is_right: Tensor  # [T] bool: the step that ends here is right


@dataclass(frozen=True, kw_only=True)
class TrainBatch(TokenBatch):
    """A rollout batch with its rewards; `mask` is True where the policy sampled the label."""

    rollout_logprobs: Tensor  # [T] fp32, of labels[t]
    token_rewards: Tensor  # [T] fp32, outcome reward on the last True position of each row
    # [T] bool: a process-reward step, or the whole row with its outcome, ends here
    step_ends: Tensor
    outcome_at: Tensor  # [N] int64: position of each row's outcome reward in [T]; -1: it has none
    rewards: Tensor  # [N] fp32, of the whole row
    baseline: Tensor  # [N] fp32
    group: Tensor  # [N] int64, dense ids 0..G-1
    prompt_id: Tensor  # [N] int64
    finish: Tensor  # [N] int64, index into FINISH
    versions: Tensor  # [T] int32, of the weights that sampled labels[t]; -1 where the mask is False
    # [N] fp32 of each reward by name, unweighted; NaN: the sample has none of this name
    reward_parts: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ScoredBatch(TrainBatch):
    """A batch with its advantages."""

    advantages: Tensor  # [T] fp32
    # [T] fp32, the trainer's before the update; None: those of the update's own forward
    old_logprobs: Tensor | None = None
    # [T] fp32; None: no reference term, or the reference is the policy itself
    ref_logprobs: Tensor | None = None
    kl_coef: float  # of this batch, in the reward and in the loss
    teacher_logprobs: Tensor | None = None  # [T] fp32; None: the objective has no teacher
    # [T, K] fp32, of extra_labels, its likeliest tokens; -inf: padding
    teacher_top_logprobs: Tensor | None = None
    old_values: Tensor | None = None  # [T] fp32, the critic's before the update; None: no critic
    returns: Tensor | None = None  # [T] fp32, the critic's targets; None: no critic


@dataclass(frozen=True)
class TokenScores:
    """What the trainer computes of ``labels`` before an update: fp32 on every rank, 0 where the
    mask is False.
    """

    old_logprobs: Tensor | None = None  # [T]; None: those of the update's own forward
    # [T]; None: no reference term, or the reference is the policy itself
    ref_logprobs: Tensor | None = None
    teacher_logprobs: Tensor | None = None  # [T]; None: the objective has no teacher
    # [T, K] int32: its likeliest tokens; None: the objective reads none
    extra_labels: Tensor | None = None
    teacher_top_logprobs: Tensor | None = None  # [T, K]; -inf: padding
    # [T]: V of the state before each label, with critic.bootstrap_truncated also after a row's
    # last; None: no critic
    old_values: Tensor | None = None
    choices: Choices | None = None  # of the pass that computed old_logprobs; None: not recorded

    def known(self) -> dict[str, Any]:
        """Returns the fields that are not None; ScoredBatch has them too."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class TokenOutputs:
    """Outputs of a forward pass.

    Those of its head are fp32, for each position; None: the head does not compute it.
    """

    logprobs_T: Tensor | None = None  # of the label
    entropy_T: Tensor | None = None  # nats
    values_T: Tensor | None = None  # one number per token: a critic's value, a reward model's score
    gates_T: Tensor | None = None  # logit of a token's weight in the score of its row
    # int64: the K likeliest tokens, where the head was asked for them
    extra_labels_TK: Tensor | None = None
    extra_logprobs_TK: Tensor | None = None  # of these, or of the batch's `extra_labels`
    choices: Choices | None = None  # of its layers; None: not recorded
    # of the batch's choices: the shares that differ from the model's own, and that are missing
    metrics: Mapping[str, float] = field(default_factory=dict)

    def tensors(self) -> dict[str, Tensor]:
        """Returns what the head has computed, by field."""
        return {name: x for name, x in vars(self).items() if isinstance(x, Tensor)}


@dataclass(frozen=True)
class MicrobatchRows:
    """The rows of one micro-batch as a loss sees them: whole rows end to end, M positions; it may
    have no rows.
    """

    rows: tuple[int, ...]  # R row indices of the batch
    index: Tensor  # [M] int64, on the CPU: where each position lies in the batch's [T]
    cu_seqlens: Tensor  # [R + 1] int64
    mask: Tensor  # [M] bool

    def select(self, x_T: Tensor) -> Tensor:
        """[M, ...], on the device: these rows of a [T, ...] tensor of the batch."""
        return to_device(x_T[self.index], self.mask.device)


@dataclass(frozen=True)
class TokenLosses:
    """The losses of one micro-batch, and sums to report."""

    loss: Tensor  # [M] with gradient, unweighted, 0 where the mask is False
    # name -> 0-d, a sum over the micro-batch; the same names for every micro-batch
    sums: Mapping[str, Tensor]
    count: Tensor  # 0-d: the divisor of the sums, once both are summed over micro-batches and ranks


Loss = Callable[[TokenOutputs, MicrobatchRows], TokenLosses]


@dataclass(frozen=True)
class MicrobatchPlan:
    """Assigns rows to micro-batches: ``rows[update][dp_rank][microbatch]`` has row indices.

    Each row is in one update, in which every dp rank has the same number of micro-batches; some may
    be empty.
    """

    rows: tuple[tuple[tuple[tuple[int, ...], ...], ...], ...]
    num_tokens: tuple[int, ...]  # trainable tokens of each update, over all ranks
    efficiency: float  # real tokens / (tokens of the fullest rank's micro-batches x dp ranks), 0..1

    def updates(self) -> tuple["MicrobatchPlan", ...]:
        """A plan for each update alone."""
        updates = zip(self.rows, self.num_tokens, strict=True)
        return tuple(
            MicrobatchPlan((rows,), (num_tokens,), self.efficiency) for rows, num_tokens in updates
        )


@dataclass(frozen=True)
class ObjectiveState:
    """The state of the objective between steps; saved with checkpoints."""

    kl_coef: float
    reward_stats: tuple[float, float, float] = (
        0.0,
        0.0,
        0.0,
    )  # n, mean, M2 of all outcome rewards so far
    held_out: tuple[float, int] = (
        math.inf,
        0,
    )  # stage sft: the lowest held-out loss, and evaluations since
    has_learned: bool = False  # without an engine: an update was not skipped


@dataclass(frozen=True)
class UpdateReport:
    """One optimizer step, the same on every rank."""

    loss: float
    grad_norm: float
    lr: float
    skipped: bool  # True: the gradient was not finite, or no token was trained; nothing changed
    metrics: Mapping[str, float] = field(default_factory=dict)  # clip_frac, entropy, kl/ref ...


@dataclass(frozen=True)
class StepReport:
    """The updates made on one batch."""

    updates: tuple[UpdateReport, ...]
    # of the whole step: logprob_diff/mean ...
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class PublishReport:
    """One weight sync."""

    version: int
    num_tensors: int
    bytes_kept: int  # stored by all engine ranks together
    bytes_received: int  # sent from one process to another
    verified: bool
    seconds: float
