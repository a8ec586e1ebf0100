"""The data types of the training loop: Prompt -> Sample -> Group -> TrainBatch -> ScoredBatch ->
StepReport.

N = rows (samples) of a batch, T = tokens of all rows, concatenated, L = tokens of one sample
(prompt and response), M = tokens of all rows of one micro-batch. Tensors are on the CPU; a rank
moves only its own micro-batches to its device.
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
    """Raised, on every rank of the run, if a check refuses to continue (exit code 3)."""


class Terminated(CheckFailed):
    """Raised, on every rank of the run, after SIGTERM (exit code 143)."""


SampleKey = tuple[int, int]  # prompt id, sample index


@dataclass(frozen=True)
class Prompt:
    """One prompt. `prompt_id` is its position in the endless prompt stream, so it is unique."""

    prompt_id: int
    tokens: tuple[int, ...]
    text: str
    answer: Any = None  # reference answer (data.rows.reference)
    extra: Mapping[str, Any] = field(default_factory=dict)
    learned: tuple[bool, ...] = ()  # loss mask, if `tokens` are a complete example of stage sft


@dataclass(frozen=True)
class Request:
    """A request for one sample: sample `index` of the prompt, with its own random seed."""

    prompt: Prompt
    index: int
    seed: int
    temperature: float  # 0: greedy
    prefix: Tensor | None = None  # [L] int64, tokens of earlier turns, which follow the prompt
    turn: int = 0  # number of responses in `prefix`

    @property
    def key(self) -> SampleKey:
        return self.prompt.prompt_id, self.index

    @property
    def tokens(self) -> list[int]:
        """The tokens to continue: prompt and prefix."""
        later = [] if self.prefix is None else self.prefix.tolist()
        return [*self.prompt.tokens, *later]


@dataclass(frozen=True)
class Routes:
    """The experts chosen for the tokens of one row in each MoE layer; only the rank that owns a
    layer's routes has them.

    If all K entries of a token are the same expert, its route is unknown. This is the case for the
    last token of a sample, which the engine never computed.
    """

    owners: tuple[int, ...]  # owner rank of each layer
    checksums: tuple[int, ...]  # weights.checksum.row_checksums of each layer
    # [layers, L, K], of route_dtype; layers first, because a rank reads only its own layers
    experts: Tensor | None = None


Choices = tuple[Routes | None, ...]  # routes of each row in a forward pass; empty: not recorded


def route_dtype(num_experts: int) -> torch.dtype:
    """Returns the smaller of uint8 and int16 that can represent every expert index."""
    return torch.uint8 if num_experts <= 256 else torch.int16


@dataclass(frozen=True)
class Sample:
    """One prompt with a response; element l of every tensor describes ``tokens[l]``."""

    prompt_id: int
    index: int  # index among the samples of the prompt
    tokens: Tensor  # [L] int64
    trainable: Tensor  # [L] bool: True where the policy sampled the token
    rollout_logprobs: Tensor  # [L] fp32: the engine's log-prob of tokens[l]; 0 if not trainable
    versions: Tensor  # [L] int32: policy version that sampled tokens[l]; -1 if not trainable
    finish: Finish
    text: str = ""  # the decoded response
    reward: float | None = None  # None: not scored yet, or the reward failed
    rewards: Mapping[str, float] = field(default_factory=dict)  # reward name -> unweighted value
    # (token index, reward of the reasoning step that ends at this token)
    step_rewards: tuple[tuple[int, float], ...] = ()
    # False: `reward` is the sum of the step rewards, and training uses the step rewards instead
    has_outcome: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)
    prompt_tokens_computed: int = 0  # prompt tokens that were not in the engine's prefix cache
    choices: Routes | None = None  # the engine's expert choices; None: not recorded

    @property
    def key(self) -> SampleKey:
        return self.prompt_id, self.index

    def without_reward(self, cause: str, detail: str = "") -> "Sample":
        """Returns a copy without a reward, which is dropped and counted as `cause`."""
        return replace(self, reward=None, extra={**self.extra, "dropped": cause, "detail": detail})


SAMPLE_TENSORS = {  # the tensor fields [L] of a Sample
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

    groups: tuple[Group, ...]  # groups to train on
    generated: tuple[Group, ...]  # all scored groups, including filtered ones
    counts: Mapping[str, int]  # cause -> number of samples or groups left out
    digest: str  # sha256 over prompt id, sample index and tokens of `groups`


@dataclass(frozen=True, kw_only=True)
class TokenBatch:
    """The inputs of a forward pass.

    Rows are concatenated. Labels are the tokens shifted by one: ``labels[t] = tokens[t + 1]``.
    """

    tokens: Tensor  # [T] int64
    labels: Tensor  # [T] int64; 0 and never used at the last position of a row
    mask: Tensor  # [T] bool: True where labels[t] is learned; False at the last position of a row
    cu_seqlens: Tensor  # [N + 1] int64
    temperature: float  # softmax temperature
    # [T, K] int32: additional tokens whose log-probs a loss needs; arbitrary ids where masked
    extra_labels: Tensor | None = None
    # routes to replay in the policy's MoE layers, by row; empty: no replay
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
        """Returns {name: value} of the fields of `kind`, to build a batch of another type."""
        return {field.name: getattr(self, field.name) for field in fields(kind)}


@dataclass(frozen=True, kw_only=True)
class PreferenceBatch(TokenBatch):
    """Responses with preferences between them.

    Rows of one prompt are consecutive, and share a micro-batch.
    """

    group: Tensor  # [N] int64, dense prompt ids
    # [P, 2] int64: row of the better response, row of the worse response of the same prompt
    pairs: Tensor
    margins: Tensor  # [P] fp32: 0 if the data has no margin


@dataclass(frozen=True, kw_only=True)
class StepBatch(TokenBatch):
    """Solutions split into reasoning steps.

    Unlike in other batches, `mask` is True at the last token of each step, not one position before:
    a step is scored at this token.
    """

    is_right: Tensor  # [T] bool: True where a correct step ends


@dataclass(frozen=True, kw_only=True)
class TrainBatch(TokenBatch):
    """A rollout batch with its rewards; `mask` is True where the policy sampled the label."""

    rollout_logprobs: Tensor  # [T] fp32: the engine's log-prob of labels[t]
    token_rewards: Tensor  # [T] fp32: step rewards, and the outcome at a row's last mask position
    # [T] bool: True where a process-reward step ends, or a row with an outcome reward
    step_ends: Tensor
    outcome_at: Tensor  # [N] int64: position in [T] of each row's outcome reward; -1: none
    rewards: Tensor  # [N] fp32: total reward of the row
    baseline: Tensor  # [N] fp32
    group: Tensor  # [N] int64, dense ids 0..G-1
    prompt_id: Tensor  # [N] int64
    finish: Tensor  # [N] int64, index into FINISH
    versions: Tensor  # [T] int32: policy version that sampled labels[t]; -1 where mask is False
    # reward name -> [N] fp32, unweighted; NaN where the sample lacks this reward
    reward_parts: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ScoredBatch(TrainBatch):
    """A rollout batch with its advantages."""

    advantages: Tensor  # [T] fp32
    # [T] fp32: the trainer's log-probs before the update; None: use the update's forward pass
    old_logprobs: Tensor | None = None
    # [T] fp32; None: no reference term, or the reference is the policy itself
    ref_logprobs: Tensor | None = None
    kl_coef: float  # KL coefficient of this batch, in the reward and in the loss
    teacher_logprobs: Tensor | None = None  # [T] fp32; None: the objective has no teacher
    # [T, K] fp32: log-probs of extra_labels, the teacher's likeliest tokens; -inf: padding
    teacher_top_logprobs: Tensor | None = None
    old_values: Tensor | None = None  # [T] fp32: the critic's values before the update, or None
    returns: Tensor | None = None  # [T] fp32: the critic's targets; None: no critic


@dataclass(frozen=True)
class TokenScores:
    """Log-probs and values of ``labels`` that the trainer computes before an update.

    Tensors are fp32, the same on every rank, and 0 where the mask is False.
    """

    old_logprobs: Tensor | None = None  # [T]; None: use those of the update's forward pass
    # [T]; None: no reference term, or the reference is the policy itself
    ref_logprobs: Tensor | None = None
    teacher_logprobs: Tensor | None = None  # [T]; None: the objective has no teacher
    # [T, K] int32: the teacher's likeliest tokens; None: the objective does not need them
    extra_labels: Tensor | None = None
    teacher_top_logprobs: Tensor | None = None  # [T, K]; -inf: padding
    # [T]: value of the state before each label, with critic.bootstrap_truncated also after a row's
    # last label; None: no critic
    old_values: Tensor | None = None
    choices: Choices | None = None  # routes of the pass for old_logprobs; None: not recorded

    def known(self) -> dict[str, Any]:
        """Returns {name: value} of the fields that are not None; ScoredBatch has the same names."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class TokenOutputs:
    """The outputs of a forward pass.

    Outputs of the head are fp32, one per position; None: the head does not compute them.
    """

    logprobs_T: Tensor | None = None  # log-prob of the label
    entropy_T: Tensor | None = None  # nats
    values_T: Tensor | None = None  # scalar per token: a critic's value or a reward model's score
    gates_T: Tensor | None = None  # logit of a token's weight in the score of its row
    # int64: the K likeliest tokens, if requested
    extra_labels_TK: Tensor | None = None
    extra_logprobs_TK: Tensor | None = None  # log-probs of extra_labels_TK or batch.extra_labels
    choices: Choices | None = None  # routes of the MoE layers; None: not recorded
    # shares of replayed routes that differ from the model's own choices, and that are missing
    metrics: Mapping[str, float] = field(default_factory=dict)

    def tensors(self) -> dict[str, Tensor]:
        """Returns {field: tensor} of the outputs that are not None."""
        return {name: x for name, x in vars(self).items() if isinstance(x, Tensor)}


@dataclass(frozen=True)
class MicrobatchRows:
    """The rows of one micro-batch as a loss receives them: complete rows, concatenated to M
    positions. There may be no rows.
    """

    rows: tuple[int, ...]  # R row indices of the batch
    index: Tensor  # [M] int64, on the CPU: position in the batch's [T]
    cu_seqlens: Tensor  # [R + 1] int64
    mask: Tensor  # [M] bool

    def select(self, x_T: Tensor) -> Tensor:
        """Selects these rows of a batch tensor [T, ...]; returns [M, ...] on the device."""
        return to_device(x_T[self.index], self.mask.device)


@dataclass(frozen=True)
class TokenLosses:
    """The per-token losses of one micro-batch, and sums for metrics."""

    loss: Tensor  # [M] with gradient, unweighted, 0 where the mask is False
    # metric -> 0-d sum over the micro-batch; every micro-batch must have the same names
    sums: Mapping[str, Tensor]
    count: Tensor  # 0-d: divisor of the sums, after summing both over micro-batches and ranks


Loss = Callable[[TokenOutputs, MicrobatchRows], TokenLosses]


@dataclass(frozen=True)
class MicrobatchPlan:
    """Assigns rows to micro-batches: ``rows[update][dp_rank][microbatch]`` is a tuple of row
    indices.

    Each row is in one update. In an update, every data-parallel rank has the same number of
    micro-batches; some may be empty.
    """

    rows: tuple[tuple[tuple[tuple[int, ...], ...], ...], ...]
    efficiency: float  # real tokens / (tokens of the fullest rank's micro-batches x dp ranks), 0..1

    def updates(self) -> tuple["MicrobatchPlan", ...]:
        """Splits the plan into one plan per update."""
        return tuple(replace(self, rows=(rows,)) for rows in self.rows)


@dataclass(frozen=True)
class ObjectiveState:
    """The state of the objective between steps, saved in checkpoints."""

    kl_coef: float
    reward_stats: tuple[float, float, float] = (
        0.0,
        0.0,
        0.0,
    )  # running count, mean and M2 (sum of squared deviations) of outcome rewards
    held_out: tuple[float, int] = (
        math.inf,
        0,
    )  # stage sft: lowest held-out loss, and number of evaluations since
    has_learned: bool = False  # stages without rollouts: True once an update was not skipped


@dataclass(frozen=True)
class UpdateReport:
    """The result of one optimizer step, the same on every rank."""

    loss: float
    grad_norm: float
    lr: float
    skipped: bool  # True: the gradient was not finite, or no token was trained; nothing changed
    metrics: Mapping[str, float] = field(default_factory=dict)  # clip_frac, entropy, kl/ref ...
    tokens: int = 0  # of the update's rows, prompts included
    flops: int = 0  # of forward and backward pass over these rows (models.flops)
    peak_flops: float = 0.0  # FLOP/s of all ranks' GPUs together; 0.0 on a CPU or an unknown GPU


@dataclass(frozen=True)
class StepReport:
    """The results of all updates on one batch."""

    updates: tuple[UpdateReport, ...]
    # metrics of the whole step: logprob_diff/mean ...
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class PublishReport:
    """The result of one weight sync."""

    version: int
    num_tensors: int
    bytes_kept: int  # bytes that all engine ranks store in total
    bytes_received: int  # bytes sent between processes
    verified: bool
    seconds: float
