"""Trains one batch in several layouts: loss, gradient norm, and the first layer whose hidden states
differ.

    layouts, one after another --> LayoutResult of each --> first difference from the first layout
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megarl.algorithms.objective import loss_weights, supervised_loss
from megarl.data.collate import token_batch
from megarl.data.packing import plan_microbatches
from megarl.layout import AXES, Layout, Parallel
from megarl.parity.sublayers import record_outputs, transformer_layers
from megarl.trainer.trainer import Trainer
from megarl.types import Prompt, TokenBatch

# precision -> tolerance of hidden states, loss and gradient norm, relative to the largest; scales
# that are powers of two round alike in any block
TOLERANCE = {
    "fp32": 1e-4,
    "bf16": 5e-2,
    "blockwise": 0.1,
    "mxfp8": 0.1,
    "tensorwise": 0.2,
    "delayed": 0.2,
}


@dataclass(frozen=True)
class LayoutResult:
    loss: float
    grad_norm: float
    layers: Tensor  # [layers, T, 8] fp64
    logprobs: Tensor  # [T] fp32


def parse_layout(text: str) -> Parallel:
    """Parses sizes such as "tp2,pp2"; "1" or "dp": only data parallelism.

    Raises ValueError for any other text.
    """
    sizes = {}
    for part in text.split(","):
        if part in ("1", "dp"):
            continue
        parts = re.fullmatch(r"([a-z]+)0*([1-9][0-9]*)", part)
        if parts is None or parts[1] not in AXES:
            raise ValueError(
                f"--layouts {text!r}: {part!r} is not a layout; write 1, tp2 or tp2,pp2 "
                f"({', '.join(AXES)})"
            )
        sizes[AXES[parts[1]]] = int(parts[2])
    return Parallel(**sizes)


def prompt_rows(prompts: Sequence[Prompt], *, num_tokens: int, vocab: int) -> TokenBatch:
    """Returns one row per prompt, which is followed by `num_tokens` random tokens.

    All tokens are trained, from the second one of a row on.
    """
    random = torch.Generator().manual_seed(0)
    rows = []
    for prompt in prompts:
        tokens = torch.cat(
            [torch.tensor(prompt.tokens), torch.randint(vocab, (num_tokens,), generator=random)]
        )
        rows.append((tokens, torch.ones_like(tokens, dtype=torch.bool)))
    return token_batch(rows, temperature=1.0)


def check_layouts(
    layouts: Sequence[str],
    batch: TokenBatch,
    build: Callable[[Layout], Trainer],
    *,
    world: int,
    rank: int,
) -> list[dict[str, Any]]:
    """Builds a trainer with `build` in each layout, and runs one update.

    Returns a dict for each layout: layout, loss, grad_norm, and the first difference from the first
    layout ("": none). Every rank must call it, and gets the same results.
    """
    results = []
    rows = []
    for text in layouts:
        trainer = build(Layout.of(parse_layout(text), world, rank))
        numbers = [str(number) for number in range(trainer.shape.layers)]
        with record_outputs(trainer, batch, transformer_layers(trainer), numbers) as layers:
            logprobs_T = trainer.logprobs(batch)
        plan = plan_microbatches(batch, trainer.layout, trainer.train)
        update = trainer.step(batch, plan, supervised_loss, loss_weights(batch, plan))
        precision = trainer.precision.recipe or trainer.train.dtype
        trainer.close()
        results.append(LayoutResult(update.loss, update.grad_norm, layers, logprobs_T))
        rows.append(
            {
                "layout": text,
                "loss": update.loss,
                "grad_norm": update.grad_norm,
                "difference": _first_difference(results[-1], results[0], TOLERANCE[precision]),
            }
        )
    return rows


def _first_difference(x: LayoutResult, first: LayoutResult, tolerance: float) -> str:
    for number, (values_T8, expected_T8) in enumerate(zip(x.layers, first.layers, strict=True)):
        off = (values_T8 - expected_T8).abs().amax(1) / expected_T8.abs().max()
        if not (off <= tolerance).all():
            where = f"layer {number}" + (", or the embedding" if number == 0 else "")
            token = f"token {int(off.argmax())} of the batch"
            return f"{where}: hidden states are {float(off.max()):.1e} off ({token})"
    off = (x.logprobs - first.logprobs).abs()
    if not off.max() <= tolerance * first.logprobs.abs().max():
        return f"output head: log-probs are {float(off.max()):.1e} off, but hidden states agree"
    for name, value, expected in (
        ("loss", x.loss, first.loss),
        ("gradient norm", x.grad_norm, first.grad_norm),
    ):
        if not abs(value - expected) <= tolerance * abs(expected):
            return (
                f"{name}: forward passes agree; check the backward pass and the reduction of losses"
            )
    return ""
