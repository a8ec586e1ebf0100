"""Measures how the log-probs of the trainer and the engine differ on the tokens just sampled, and
suggests a cause.

Both score the same tokens with the same weights and temperature, so in fp32 they agree up to
rounding. A larger difference is a fault; how it is distributed over the batch shows where to look
first.
"""

from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor

from megarl.algorithms.kl import KL, LOG_RATIO_LIMIT
from megarl.types import ScoredBatch
from megarl.weights.sync.transports.values import carry


@dataclass(frozen=True)
class Parity:
    """Differences over the sampled tokens of a batch; all zero if there are none."""

    mean: float  # of |trainer - engine|
    max: float
    kl: float  # mean of k3(engine || trainer), nats per token
    share_off: float  # share of tokens that differ by more than a tenth of the maximum
    share_above: float  # share of tokens whose log-prob is higher in the engine than in the trainer
    early: float  # largest difference on the first sampled token of any row
    row: int  # row of the maximum; -1: there are no tokens
    position: int  # number of sampled tokens before it in that row
    trainer: float
    engine: float


# format -> relative rounding error of a sublayer's output. fp32 kernels also differ in exp. tf32
# and e4m3 have not been measured on a GPU.
FORMAT_EPS = {"fp32": 2**-18, "tf32": 2**-10, "bf16": 2**-8, "e4m3": 2**-4}
# absolute error in fp32; torch's exp is approximate on a CPU: 7e-6 off over 49,152 tokens
LOG_SOFTMAX_ERROR = 2**-17
MAX_EXCESS = 2.0


@dataclass(frozen=True)
class Quantiles:
    """Quantiles of absolute differences of log-probs, in nats.

    A few tokens that are routed to other experts change neither `median` nor `p90`.
    """

    median: float
    p90: float
    max: float
    count: int

    @classmethod
    def of(cls, diff: Tensor) -> "Quantiles":
        """Returns the quantiles of |diff|; NaN counts as infinite."""
        diff_K = torch.nan_to_num(diff.double().abs().flatten(), nan=torch.inf)
        if not (count := diff_K.numel()):
            return cls(0.0, 0.0, 0.0, 0)
        median, p90 = (
            float(diff_K.kthvalue(1 + ceil(level * (count - 1))).values) for level in (0.5, 0.9)
        )
        return cls(median, p90, float(diff_K.max()), count)

    def __str__(self) -> str:
        return f"median {self.median:.3g}, 90% below {self.p90:.3g}"


carry(Quantiles)  # ranks send them over a Transport


def rounding_floor(
    x_K: Tensor, noise_DK: Tensor, *, eps: float = 2**-22, error: float = 0.0
) -> Quantiles:
    """Returns the differences of `x_K` that rounding causes between a correct trainer and engine.

    `x_K` are log-probs or other values. `noise_DK` [draws, K] is what planted rounding errors
    change in the trainer; both sides round, so the floor has twice its variance. `eps` is the
    relative rounding error of `x_K` itself, `error` the absolute error of its kernel.
    """
    rounding = eps * x_K.double().abs().mean() + error
    return Quantiles.of((noise_DK * 2**0.5).double().abs() + rounding)


@dataclass(frozen=True)
class Excess:
    """The difference between trainer and engine, compared with what rounding explains."""

    found: Quantiles
    floor: Quantiles
    num_independent: int | None = None  # number of independent tokens; None: all

    @property
    def statistic(self) -> float:
        """The larger of the squared ratios of `found` to `floor`, of median and p90.

        It is about 1 or less in a healthy run, and 0 without tokens.
        """
        if not self.found.count:
            return 0.0
        return max(self.found.median / self.floor.median, self.found.p90 / self.floor.p90) ** 2

    @property
    def limit(self) -> float:
        """MAX_EXCESS, increased for few independent tokens, whose quantiles are noisy."""
        count = self.found.count if self.num_independent is None else self.num_independent
        return MAX_EXCESS * (1 + 2 / max(count, 1) ** 0.5) ** 2

    @property
    def is_explained(self) -> bool:
        return self.statistic <= self.limit

    def __str__(self) -> str:
        return (
            f"|trainer - engine| of {self.found.count} tokens: {self.found}; rounding explains: "
            f"{self.floor}; statistic {self.statistic:.3g}, at most {self.limit:.3g}"
        )


def compare(batch: ScoredBatch) -> Parity:
    """Compares `old_logprobs` (not None) with `rollout_logprobs` where `mask` is True.

    NaN counts as infinite.
    """
    assert batch.old_logprobs is not None
    positions = batch.mask.nonzero().flatten()
    if not positions.numel():
        return Parity(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1, 0, 0.0, 0.0)
    trainer = batch.old_logprobs[positions].double()
    engine = batch.rollout_logprobs[positions].double()
    signed = torch.nan_to_num(trainer - engine, nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
    diff = signed.abs()
    worst = int(diff.argmax())
    top = float(diff.max())
    row_of = torch.searchsorted(batch.cu_seqlens, positions, right=True) - 1
    is_first = row_of.diff(prepend=row_of.new_tensor([-1])) > 0  # first sampled token of its row
    k3 = KL["k3"](-signed.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT), torch.zeros_like(signed))
    row = int(row_of[worst])
    return Parity(
        mean=float(diff.mean()),
        max=top,
        kl=float(k3.mean()),
        share_off=float((diff > 0.1 * top).double().mean()),
        share_above=float((signed < 0).double().mean()),
        early=float(diff[is_first].max()),
        row=row,
        position=int((row_of[:worst] == row).sum()),
        trainer=float(trainer[worst]),
        engine=float(engine[worst]),
    )


def explain(parity: Parity, *, is_moe: bool, temperature: float) -> str:
    """Returns a likely cause, guessed from how the differences are distributed."""
    if parity.share_above > 0.98 or parity.share_above < 0.02:
        side = "more" if parity.share_above > 0.5 else "less"
        return (
            f"the engine gives nearly all tokens {side} probability than the trainer; check the "
            f"sampling settings: the trainer divides logits by temperature {temperature} and "
            "applies no top-p, top-k or penalties"
        )
    if parity.early < 0.01 * parity.max:
        return (
            "the first sampled token of every row agrees and later ones do not, which suggests "
            "wrong positions or a KV cache that was not reset after a weight sync"
        )
    if parity.share_off < 0.05:
        cause = "MoE routing: near-ties broken differently" if is_moe else "lower-precision kernels"
        return f"few tokens are far off and the rest agree, which suggests {cause}"
    return "most tokens differ, which suggests that the engine's weights are not the trainer's"
