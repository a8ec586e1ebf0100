"""Chunked log-probs and entropy against plain autograd over the whole [T, vocab]."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close

from megarl.trainer import logprobs
from megarl.trainer.logprobs import VocabShard, token_outputs, top_tokens

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
    ours = token_outputs(
        hidden, weight, labels, shard, temperature=temperature, chunk=chunk, entropy=True
    )
    log_softmax = (hidden @ weight[:VOCAB].T / temperature).log_softmax(-1)
    logprobs, entropy = (
        log_softmax.gather(1, labels[:, None])[:, 0],
        -(log_softmax.exp() * log_softmax).sum(-1),
    )
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


@pytest.mark.parametrize("chunk", [4, 13])
def test_logits_are_rounded_to_bf16_by_a_share(chunk: int) -> None:
    hidden, weight, labels = draw()
    shard = VocabShard.of(VOCAB, ROWS, dist.group.WORLD)
    logits = hidden @ weight[:VOCAB].T
    rounded = logits.lerp(logits.bfloat16().float(), 0.7)
    with torch.no_grad():
        ours = token_outputs(
            hidden,
            weight,
            labels,
            shard,
            temperature=1.0,
            chunk=chunk,
            entropy=False,
            rounding=0.7,
        )
    assert_close(ours.logprobs_T, rounded.log_softmax(-1).gather(1, labels[:, None])[:, 0])
    assert (
        ours.logprobs_T - logits.log_softmax(-1).gather(1, labels[:, None])[:, 0]
    ).abs().max() > 1e-3


def test_without_entropy_and_without_tokens() -> None:
    hidden, weight, labels = draw()
    shard = VocabShard.of(VOCAB, ROWS, dist.group.WORLD)
    ours = token_outputs(
        hidden[:0], weight, labels[:0], shard, temperature=1.0, chunk=4, entropy=False
    )
    assert ours.entropy_T is None and ours.logprobs_T.shape == (0,)
    ours.logprobs_T.sum().backward()
    assert weight.grad is not None and weight.grad.abs().max() == 0


@pytest.mark.parametrize("tile", [64, 200, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_against_plain_fp64(monkeypatch: pytest.MonkeyPatch, tile: int, dtype: torch.dtype) -> None:
    """Logits are never rounded to bf16: given the same inputs only the gradients' last rounding is."""
    monkeypatch.setitem(logprobs.TILE_BYTES, "cpu", tile)
    generator = torch.Generator().manual_seed(1)
    hidden, weight = (torch.randn(n, 32, generator=generator).to(dtype) for n in (40, 500))
    labels, given = (
        torch.randint(500, (40,), generator=generator),
        torch.randn(2, 40, generator=generator),
    )
    found = []
    for wide in (False, True):
        h, w = (x.double() if wide else x.clone() for x in (hidden, weight))
        h.requires_grad_(), w.requires_grad_()
        if wide:
            log_softmax = (h @ w.T / 0.7).log_softmax(1)
            out = [
                log_softmax.gather(1, labels[:, None])[:, 0],
                -(log_softmax.exp() * log_softmax).sum(1),
            ]
        else:
            shard = VocabShard.of(500, 500, dist.group.WORLD)
            read = token_outputs(h, w, labels, shard, temperature=0.7, chunk=16, entropy=True)
            out = [read.logprobs_T, read.entropy_T]
        (out[0] * given[0] + out[1] * given[1]).sum().backward()
        found.append([x.detach().double() for x in (*out, h.grad, w.grad)])
    for number, (ours, true) in enumerate(zip(*found, strict=True)):
        tolerance = 1e-5 if number < 2 or dtype == torch.float32 else 5e-3
        assert (ours - true).abs().max() <= tolerance * true.abs().max(), number


@pytest.mark.parametrize("of_entropy", [False, True])
def test_gradients_at_likely_tokens_are_not_rounded_to_the_size_of_the_logits(
    of_entropy: bool,
) -> None:
    """max + log sum has steps of 4e-6 at 40, and p has them with it."""
    logits = torch.zeros(64, VOCAB)
    logits[:, 0] = torch.linspace(33, 40, 64)
    logits[:, 1] = logits[:, 0] - torch.linspace(0.5, 6, 64)
    labels, found = torch.zeros(64, dtype=torch.long), []
    for dtype in (torch.float32, torch.float64):
        # times the identity: logits without an error
        hidden = logits.to(dtype, copy=True).requires_grad_()
        shard = VocabShard.of(VOCAB, VOCAB, dist.group.WORLD)
        ours = token_outputs(
            hidden,
            torch.eye(VOCAB, dtype=dtype),
            labels,
            shard,
            temperature=1.0,
            chunk=64,
            entropy=of_entropy,
        )
        (ours.logprobs_T.sum() + (ours.entropy_T.sum() if of_entropy else 0)).backward()
        found.append(hidden.grad.double())
    assert_close(*found, atol=2e-7, rtol=0)


def test_the_gradient_goes_to_main_grad_where_there_is_one() -> None:
    hidden, weight, labels = draw()
    shard = VocabShard.of(VOCAB, ROWS, dist.group.WORLD)

    def backward() -> None:
        token_outputs(
            hidden, weight, labels, shard, temperature=1.0, chunk=4, entropy=False
        ).logprobs_T.sum().backward()

    backward()
    expected, weight.grad, weight.main_grad = weight.grad, None, torch.ones(ROWS, H)
    backward()
    assert weight.grad is None
    assert_close(weight.main_grad, expected + 1)


@pytest.mark.parametrize("of_entropy", [False, True])
def test_no_tensor_of_all_logits_is_ever_made(
    monkeypatch: pytest.MonkeyPatch, of_entropy: bool
) -> None:
    """Forward and backward: no tensor of tokens and vocabulary is larger than a tile; an entropy that is only looked
    at has no backward."""
    monkeypatch.setitem(logprobs.TILE_BYTES, "cpu", 4 * 4 * 5)
    hidden, weight, labels = draw()
    shard = VocabShard.of(VOCAB, ROWS, dist.group.WORLD)
    largest, exponentials = 0, 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest, exponentials
            out = func(*args, **(kwargs or {}))
            inputs = {x.untyped_storage().data_ptr() for x in (hidden, weight)}
            for x in [out] if isinstance(out, torch.Tensor) else []:
                if (
                    x.ndim == 2
                    and x.untyped_storage().data_ptr() not in inputs
                    and x.shape[1] not in (H, T)
                ):
                    largest = max(largest, x.numel() * x.itemsize)
            exponentials += func is torch.ops.aten.exp.out
            return out

    with Watch():
        ours = token_outputs(hidden, weight, labels, shard, temperature=1.0, chunk=4, entropy=True)
        of_forward = exponentials
        assert ours.entropy_T is not None
        (ours.logprobs_T + (ours.entropy_T if of_entropy else 0)).sum().backward()
    assert 0 < largest <= 4 * 4 * 5
    assert (exponentials > of_forward) == of_entropy


@pytest.mark.parametrize("of_entropy", [False, True])
@pytest.mark.parametrize("tile", [60, 200, 1 << 20])
def test_extra_labels_against_plain_fp64(
    monkeypatch: pytest.MonkeyPatch, tile: int, of_entropy: bool
) -> None:
    """Eight labels of each position, two of them equal, in tiles of one column and more; memory as for one."""
    monkeypatch.setitem(logprobs.TILE_BYTES, "cpu", tile)
    generator = torch.Generator().manual_seed(2)
    hidden, weight = (torch.randn(n, H, generator=generator) for n in (T, ROWS))
    labels = torch.stack([torch.randperm(VOCAB, generator=generator)[:8] for _ in range(T)])
    labels[:, 3] = labels[:, 0]
    given = torch.randn(T, 8, generator=generator)
    given[2] -= given[2].mean()  # the factor of a row's softmax is 0
    found = []
    for wide in (False, True):
        h, w = (x.double() if wide else x.clone() for x in (hidden, weight))
        h.requires_grad_(), w.requires_grad_()
        if wide:
            log_softmax = (h @ w[:VOCAB].T / 0.7).log_softmax(1)
            of_labels, entropy = (
                log_softmax.gather(1, labels),
                -(log_softmax.exp() * log_softmax).sum(1),
            )
        else:
            shard = VocabShard.of(VOCAB, ROWS, dist.group.WORLD)
            read = token_outputs(h, w, labels, shard, temperature=0.7, chunk=4, entropy=True)
            assert (
                read.logprobs_T is not None
                and read.extra_logprobs_TK is not None
                and read.entropy_T is not None
            )
            of_labels, entropy = (
                torch.cat([read.logprobs_T[:, None], read.extra_logprobs_TK], 1),
                read.entropy_T,
            )
        ((of_labels * given).sum() + (entropy.square().sum() if of_entropy else 0)).backward()
        found.append([x.detach().double() for x in (of_labels, h.grad, w.grad)])
    for ours, true in zip(*found, strict=True):
        assert (ours - true).abs().max() <= 2e-6 * true.abs().max()


def test_one_label_is_bit_for_bit_that_of_a_flat_tensor() -> None:
    hidden, weight, labels = draw()
    shard, found = VocabShard.of(VOCAB, ROWS, dist.group.WORLD), []
    for each in (labels, labels[:, None]):
        hidden.grad = weight.grad = None
        read = token_outputs(hidden, weight, each, shard, temperature=0.6, chunk=4, entropy=False)
        (read.logprobs_T * torch.linspace(-1, 1, T)).sum().backward()
        found.append((read.logprobs_T, hidden.grad, weight.grad))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("tile", [60, 200, 1 << 20])
@pytest.mark.parametrize("count", [1, 5, VOCAB])
def test_top_tokens_are_those_of_all_logits(
    monkeypatch: pytest.MonkeyPatch, tile: int, count: int
) -> None:
    monkeypatch.setitem(logprobs.TILE_BYTES, "cpu", tile)
    hidden, weight, _ = draw()
    weight.data[VOCAB:] = 100 * hidden.data[0]  # padding that would win
    shard = VocabShard.of(VOCAB, ROWS, dist.group.WORLD)
    expected = (hidden @ weight[:VOCAB].T).topk(count, 1).indices
    assert torch.equal(top_tokens(hidden, weight, shard, chunk=4, count=count), expected)
    assert top_tokens(hidden[:0], weight, shard, chunk=4, count=count).shape == (0, count)


def test_shards_stand_for_the_real_tokens_only() -> None:
    shard = VocabShard.of(VOCAB, ROWS, dist.group.WORLD)
    assert (shard.start, shard.size) == (0, VOCAB)
