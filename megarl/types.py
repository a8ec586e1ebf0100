"""What flows through the loop: Prompt -> Sample -> Group -> TrainBatch -> ScoredBatch -> StepReport.

Frozen, with shapes. N = rows (samples) of the batch, T = tokens of all rows laid end to end,
L = tokens of one sample (prompt and response). A later stage is a new type, never a field that
is filled in later. Tensors live on the CPU; a rank moves only its own micro-batches to a device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

__all__ = [
    "FINISH",
    "CheckFailed",
    "Finish",
    "Group",
    "LogProbs",
    "MicrobatchPlan",
    "ObjectiveState",
    "Prompt",
    "PublishReport",
    "Sample",
    "ScoredBatch",
    "StepReport",
    "TrainBatch",
    "UpdateReport",
]

Finish = Literal["stop", "length", "abort"]
FINISH: tuple[Finish, ...] = ("stop", "length", "abort")  # TrainBatch.finish indexes this


class CheckFailed(RuntimeError):
    """A check refuses to go on (exit code 3). Raised on every rank of the run alike."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question. `prompt_id` is its position in the task's endless stream, so it is unique."""

    prompt_id: int
    tokens: tuple[int, ...]
    text: str
    answer: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer with its prompt in front. Row l of every tensor is about ``tokens[l]``."""

    prompt_id: int
    index: int  # which of the prompt's samples
    tokens: Tensor  # [L] int64
    trainable: Tensor  # [L] bool: True where the policy sampled the token
    rollout_logprobs: Tensor  # [L] fp32, of tokens[l]; 0 where not trainable
    versions: tuple[int, int]  # oldest and newest policy version that sampled a token
    finish: Finish
    text: str = ""  # the response, decoded
    reward: float | None = None  # None: not scored (yet, or the reward failed)
    rewards: Mapping[str, float] = field(default_factory=dict)  # each reward, unweighted
    step_rewards: tuple[tuple[int, float], ...] = ()  # (token index, reward of the step ending there)
    has_outcome: bool = True  # False: `reward` only sums up the steps, and is not trained on beside them
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Group:
    """The samples of one prompt that were kept; `dropped` counts those that could not be scored, by cause."""

    prompt: Prompt
    samples: tuple[Sample, ...]
    baseline: float | None = None  # reward of the greedy sample (ReMax); None: there was none
    dropped: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """All rows end to end, shifted once: position t predicts ``labels[t] = tokens[t + 1]``."""

    tokens: Tensor  # [T] int64
    labels: Tensor  # [T] int64; at the last position of a row: 0, never used
    mask: Tensor  # [T] bool: True iff labels[t] was sampled by the policy
    rollout_logprobs: Tensor  # [T] fp32, of labels[t]
    token_rewards: Tensor  # [T] fp32, outcome reward on the last True position of each row
    step_ends: Tensor  # [T] bool: a process-reward step, or the whole row with its outcome, ends here
    outcome_at: Tensor  # [N] int64: where each row's outcome reward sits in [T]; -1: it has none
    cu_seqlens: Tensor  # [N + 1] int64
    rewards: Tensor  # [N] fp32, of the whole row
    baseline: Tensor  # [N] fp32
    group: Tensor  # [N] int64, dense ids 0..G-1
    prompt_id: Tensor  # [N] int64
    finish: Tensor  # [N] int64, index into FINISH
    versions: Tensor  # [N, 2] int64
    temperature: float

    @property
    def num_rows(self) -> int:
        return self.cu_seqlens.numel() - 1

    @property
    def num_tokens(self) -> int:
        return self.tokens.numel()


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredBatch(TrainBatch):
    """A batch with its advantages; `ref_logprobs` is None when the objective has no reference term."""

    advantages: Tensor  # [T] fp32
    old_logprobs: Tensor  # [T] fp32, the trainer's own, before the first update on this batch
    ref_logprobs: Tensor | None  # [T] fp32
    kl_coef: float  # in force for this batch, in the reward as in the loss


@dataclass(frozen=True, slots=True)
class LogProbs:
    """What the trainer says of ``labels``: global [T] on every rank, fp32, 0 where mask is False."""

    old: Tensor  # [T]
    ref: Tensor | None  # [T], None without a reference term
    entropy: Tensor | None = None  # [T]


@dataclass(frozen=True, slots=True)
class MicrobatchPlan:
    """Which rows go where: ``rows[update][dp_rank][microbatch]`` is a tuple of row indices.

    Every dp rank has the same number of micro-batches in an update; an empty one is legal.
    Together the rows of all updates are each row of the batch once.
    """

    rows: tuple[tuple[tuple[tuple[int, ...], ...], ...], ...]
    num_tokens: tuple[int, ...]  # trainable tokens of each update, over all ranks
    efficiency: float  # real tokens / (tokens of the fullest rank's micro-batches x dp ranks), 0..1


@dataclass(frozen=True, slots=True)
class ObjectiveState:
    """What the objective carries from step to step; saved with checkpoints."""

    kl_coef: float
    reward_stats: tuple[float, float, float] = (0.0, 0.0, 0.0)  # n, mean, M2 of outcome rewards seen, clipped if raw


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """One optimizer step, the same on every rank."""

    loss: float
    grad_norm: float
    lr: float
    skipped: bool  # True: the gradient was not finite, or no token was trained; nothing changed
    metrics: Mapping[str, float] = field(default_factory=dict)  # clip_frac, entropy, kl/ref ...


@dataclass(frozen=True, slots=True)
class StepReport:
    """The updates made on one rollout batch."""

    updates: tuple[UpdateReport, ...]


@dataclass(frozen=True, slots=True)
class PublishReport:
    """One weight sync: what was loaded, how much moved, and that it was verified."""

    version: int
    num_tensors: int
    bytes_kept: int  # what all engine ranks hold, bytes
    bytes_received: int  # what crossed a process border, bytes
    verified: bool
    seconds: float
