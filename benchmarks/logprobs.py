"""Log-prob of each label from hidden states, with the gradients of hidden states and output weight.

"recompute" cases never materialise [T, vocab], forward or backward: verl's FusedLinearForPPO, TRL's chunked kernel.
"plain" cases do: verl's logprobs_from_logits, Megatron-Core's vocab_parallel_cross_entropy, torch's log_softmax.
Entropy is "none", a "value" to report, or has its "gradient" too; verl's fused function always computes it. Compared
are log-probs, entropy and both gradients (every 97th row of the weight's).
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.frame import Case, Contender, Outcome
from benchmarks.peers import trl_module, verl_module
from megarl.layout import Layout, Parallel
from megarl.trainer.logprobs import VocabShard, token_outputs
from megarl.trainer.parallel_groups import init_parallel

__all__ = [
    "CASES",
    "megatrons",
    "ours",
    "plain",
    "plain_forward",
    "trls",
    "verls_fused",
    "verls_logits",
]

VOCAB = 151_936
LARGE = 4096  # tokens; from here on a call takes long and is made once
HERE = "benchmarks.logprobs"
OURS = Contender("megarl", f"{HERE}:ours")
VERL = Contender("verl fused", f"{HERE}:verls_fused")
TRL = Contender("TRL chunked", f"{HERE}:trls")
TRL_SMALL = Contender("TRL, 1024 columns", f"{HERE}:trls", {"columns": 1024})
PLAIN = (
    Contender("verl logits", f"{HERE}:verls_logits"),
    Contender("Megatron-Core", f"{HERE}:megatrons"),
    Contender("torch", f"{HERE}:plain"),
)
FORWARD = Contender("torch, forward only", f"{HERE}:plain_forward")


def _case(title: str, *others: Contender, at_least: float | None = None, **arguments: Any) -> Case:
    name = f"{title} {arguments['tokens']}x{VOCAB} hidden {arguments['hidden']} entropy {arguments['entropy']}"
    # gradients of the weight are sums over all tokens in another order
    return Case(
        name, (OURS, *others), arguments, rtol=1e-3, atol=1e-5, with_memory=True, at_least=at_least
    )


def _recompute(entropy: str) -> Case:
    return _case(
        "recompute", VERL, TRL, TRL_SMALL, at_least=1.0, tokens=256, hidden=256, entropy=entropy
    )


CASES = (
    *(_recompute(entropy) for entropy in ("none", "value", "gradient")),
    _case("plain", *PLAIN, tokens=256, hidden=256, entropy="none"),
    _case("memory", VERL, TRL, FORWARD, tokens=16384, hidden=64, entropy="none"),
    _case(
        "memory, a quarter", PLAIN[-1], tokens=LARGE, hidden=64, entropy="none"
    ),  # whole, it would take 30 GB
)


def _inputs(tokens: int, hidden: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden [T, H], weight [V, H], labels [T], upstream gradient of the log-probs [T]."""
    random = torch.Generator().manual_seed(0)
    hidden_TH = torch.randn(tokens, hidden, generator=random).requires_grad_()
    weight_VH = (torch.randn(VOCAB, hidden, generator=random) / hidden**0.5).requires_grad_()
    labels_T = torch.randint(VOCAB, (tokens,), generator=random)
    return hidden_TH, weight_VH, labels_T, torch.randn(tokens, generator=random)


# hidden, weight, labels -> with entropy
LogProbs = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]]


def _call(tokens: int, hidden: int, entropy: str, read: LogProbs) -> Callable[[], Outcome]:
    hidden_TH, weight_VH, labels_T, given_T = _inputs(tokens, hidden)

    def call() -> Outcome:
        hidden_TH.grad = weight_VH.grad = None
        logprobs_T, entropy_T = read(hidden_TH, weight_VH, labels_T)
        loss = (logprobs_T * given_T).sum()
        if entropy == "gradient":
            assert entropy_T is not None
            loss = loss + 0.1 * entropy_T.sum()
        loss.backward()
        assert hidden_TH.grad is not None and weight_VH.grad is not None
        kept = [logprobs_T.detach(), hidden_TH.grad.flatten(), weight_VH.grad[::97].flatten()]
        if entropy != "none":
            assert entropy_T is not None
            kept.append(entropy_T.detach())
        return Outcome(torch.cat(kept).numpy())

    # one call of the largest case takes half a minute: time and memory are those of the first call
    return cache(_timed(call)) if tokens >= LARGE else call


def _timed(call: Callable[[], Outcome]) -> Callable[[], Outcome]:
    def once() -> Outcome:
        start = time.perf_counter()
        outcome = call()
        return Outcome(outcome.output, time.perf_counter() - start)

    return once


def ours(tokens: int, hidden: int, entropy: str) -> Callable[[], Outcome]:
    _one_rank()
    shard = VocabShard.of(VOCAB, VOCAB, dist.group.WORLD)  # pyright: ignore[reportArgumentType]

    def read(
        hidden_TH: Tensor, weight_VH: Tensor, labels_T: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        of = token_outputs(
            hidden_TH,
            weight_VH,
            labels_T,
            shard,
            temperature=1.0,
            chunk=1024,
            entropy=entropy != "none",
        )
        return of.logprobs_T, of.entropy_T

    return _call(tokens, hidden, entropy, read)


def verls_fused(tokens: int, hidden: int, entropy: str) -> Callable[[], Outcome]:
    return _call(
        tokens,
        hidden,
        entropy,
        verl_module("verl.utils.experimental.torch_functional").FusedLinearForPPO(),
    )


def trls(tokens: int, hidden: int, entropy: str, columns: int = 32768) -> Callable[[], Outcome]:
    """The default of `columns` is that of TRL's trainers, for GPUs; fewer suit a CPU's cache."""
    function = trl_module("trl.kernels.chunked_logprob").ChunkedLogProbFunction
    outputs = () if entropy == "none" else ("entropy",)

    def read(
        hidden_TH: Tensor, weight_VH: Tensor, labels_T: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        logprobs_T, entropy_T, *_ = function.apply(
            hidden_TH, weight_VH, None, labels_T, 1.0, columns, None, 1.0, outputs
        )
        return logprobs_T, entropy_T

    return _call(tokens, hidden, entropy, read)


def verls_logits(tokens: int, hidden: int, entropy: str) -> Callable[[], Outcome]:
    assert entropy == "none"
    logprobs_from_logits = verl_module("verl.utils.torch_functional").logprobs_from_logits
    return _call(
        tokens, hidden, entropy, lambda h, w, labels: (logprobs_from_logits(h @ w.T, labels), None)
    )


def megatrons(tokens: int, hidden: int, entropy: str) -> Callable[[], Outcome]:
    assert entropy == "none"
    _one_rank()
    init_parallel(Layout.of(Parallel(), 1, 0))
    cross_entropy = import_module("megatron.core.tensor_parallel").vocab_parallel_cross_entropy

    def read(
        hidden_TH: Tensor, weight_VH: Tensor, labels_T: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        return -cross_entropy((hidden_TH @ weight_VH.T)[:, None], labels_T[:, None])[:, 0], None

    return _call(tokens, hidden, entropy, read)


def plain(tokens: int, hidden: int, entropy: str) -> Callable[[], Outcome]:
    assert entropy == "none"
    return _call(
        tokens,
        hidden,
        entropy,
        lambda h, w, labels: ((h @ w.T).log_softmax(1).gather(1, labels[:, None])[:, 0], None),
    )


def plain_forward(tokens: int, hidden: int, entropy: str) -> Callable[[], Outcome]:
    """Without gradients, row by row: a lower bound of the plain cases. Its output is not compared."""
    assert entropy == "none"
    hidden_TH, weight_VH, labels_T, _ = _inputs(tokens, hidden)

    @torch.no_grad()
    def call() -> Outcome:
        logits_TV = hidden_TH @ weight_VH.T
        total = sum(
            float(row_V[label] - row_V.logsumexp(0))
            for row_V, label in zip(logits_TV, labels_T, strict=True)
        )
        return Outcome(figures={"mean": total / tokens})

    return cache(_timed(call))


def _one_rank() -> None:
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    atexit.register(dist.destroy_process_group)
