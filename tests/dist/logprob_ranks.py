"""One of two gloo ranks, each with half the vocabulary: how far log-probs, entropy and gradients are from plain fp64.

python logprob_ranks.py RESULTS.json        rank 0 writes {case: [largest relative error of each]}
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from megarl.trainer.logprobs import VocabShard, token_outputs, top_tokens

CASES = {
    "whole": (500, 256),
    "padded": (67, 40),
    "one rank holds padding alone": (30, 32),
}  # tokens, rows of a rank


def errors(vocab: int, rows: int) -> list[float]:
    random = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 32, generator=random) for n in (50, 2 * rows))
    labels, given = (
        torch.randint(vocab, (50,), generator=random),
        torch.randn(2, 50, generator=random),
    )
    shard = VocabShard.of(vocab, rows, dist.group.WORLD)
    ours = (
        hidden.clone().requires_grad_(),
        weight[shard.start : shard.start + rows].clone().requires_grad_(),
    )
    read = token_outputs(*ours, labels, shard, temperature=0.7, chunk=16, entropy=True)
    (read.logprobs_T * given[0] + read.entropy_T * given[1]).sum().backward()
    dist.all_reduce(ours[0].grad)

    plain = hidden.double().requires_grad_(), weight.double().requires_grad_()
    log_softmax = (plain[0] @ plain[1][:vocab].T / 0.7).log_softmax(1)
    logprobs, entropy = (
        log_softmax.gather(1, labels[:, None])[:, 0],
        -(log_softmax.exp() * log_softmax).sum(1),
    )
    (logprobs * given[0] + entropy * given[1]).sum().backward()
    pairs = [(read.logprobs_T, logprobs), (read.entropy_T, entropy), (ours[0].grad, plain[0].grad)]
    pairs.append((ours[1].grad, plain[1].grad[shard.start : shard.start + rows]))
    pairs += top_pairs(ours, plain, shard, vocab)
    worst = torch.tensor(
        [float((a - b).abs().max() / b.abs().max().clamp_min(1e-6)) for a, b in pairs]
    )
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return worst.tolist()


def top_pairs(ours: tuple, plain: tuple, shard: VocabShard, vocab: int) -> list[tuple]:
    """The 20 likeliest tokens, their log-probs, and gradients of a sum of these with random weights."""
    for x in (*ours, *plain):
        x.grad = None
    top = top_tokens(*ours, shard, chunk=16, count=20)
    logits = plain[0] @ plain[1][:vocab].T
    given = torch.randn(50, 20, generator=torch.Generator().manual_seed(1))
    read = token_outputs(
        *ours, torch.cat([top[:, :1], top], 1), shard, temperature=0.7, chunk=16, entropy=False
    )
    (read.extra_logprobs_TK * given).sum().backward()
    dist.all_reduce(ours[0].grad)
    of_top = (logits / 0.7).log_softmax(1).gather(1, top)
    (of_top * given).sum().backward()
    pairs = [
        (top, logits.topk(20, 1).indices),
        (read.extra_logprobs_TK, of_top),
        (ours[0].grad, plain[0].grad),
    ]
    return [*pairs, (ours[1].grad, plain[1].grad[shard.start : shard.start + len(ours[1])])]


def main(file: Path) -> None:
    dist.init_process_group("gloo")
    found = {name: errors(*sizes) for name, sizes in CASES.items()}
    if dist.get_rank() == 0:
        file.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
