"""Chunked log-probs and entropy against plain autograd over the whole [T, vocab]."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close

from megarl.actor.logprobs import VocabShard, token_outputs

T, H, VOCAB, ROWS = 13, 8, 11, 16  # ROWS of the weight, 5 of them padding


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def draw() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(T, H, generator=generator).requires_grad_()
    weight = torch.randn(ROWS, H, generator=generator).requires_grad_()
    return hidden, weight, torch.randint(0, VOCAB, (T,), generator=generator)


@pytest.mark.parametrize("chunk", [1, 4, 13, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_values_and_gradients(chunk: int, temperature: float) -> None:
    hidden, weight, labels = draw()
    shard = VocabShard.of(VOCAB, ROWS, dist.group.WORLD)
    ours = token_outputs(hidden, weight, labels, shard, temperature=temperature, chunk=chunk, entropy=True)
    log_softmax = (hidden @ weight[:VOCAB].T / temperature).log_softmax(-1)
    logprobs, entropy = log_softmax.gather(1, labels[:, None])[:, 0], -(log_softmax.exp() * log_softmax).sum(-1)
    assert ours.entropy_T is not None
    assert_close(ours.logprobs_T, logprobs)
    assert_close(ours.entropy_T, entropy)
    weights = torch.linspace(-1, 1, T)
    for outputs in ((ours.logprobs_T, ours.entropy_T), (logprobs, entropy)):
        hidden.grad = weight.grad = None
        (outputs[0] * weights + 0.3 * outputs[1] * weights.flip(0)).sum().backward()
        if outputs[0] is ours.logprobs_T:
            mine = hidden.grad, weight.grad
    assert_close(mine, (hidden.grad, weight.grad))
    assert mine[1][VOCAB:].abs().max() == 0, "padding rows never learn"


def test_without_entropy_and_without_tokens() -> None:
    hidden, weight, labels = draw()
    shard = VocabShard.of(VOCAB, ROWS, dist.group.WORLD)
    ours = token_outputs(hidden[:0], weight, labels[:0], shard, temperature=1.0, chunk=4, entropy=False)
    assert ours.entropy_T is None and ours.logprobs_T.shape == (0,)
    ours.logprobs_T.sum().backward()
    assert weight.grad is not None and weight.grad.abs().max() == 0


def test_no_tensor_of_all_logits_is_ever_made() -> None:
    """Forward and backward: the widest product of tokens and vocabulary is one chunk's."""
    hidden, weight, labels = draw()
    shard = VocabShard.of(VOCAB, ROWS, dist.group.WORLD)
    widest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal widest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.ndim == 2 and out.shape[1] in (VOCAB, ROWS):
                widest = max(widest, out.shape[0])
            return out

    with Watch():
        ours = token_outputs(hidden, weight, labels, shard, temperature=1.0, chunk=4, entropy=True)
        ours.logprobs_T.sum().backward()
    assert widest <= max(4, H), "H: the weight itself, transposed"


def test_shards_stand_for_the_real_tokens_only() -> None:
    shard = VocabShard.of(VOCAB, ROWS, dist.group.WORLD)
    assert (shard.start, shard.size) == (0, VOCAB)
