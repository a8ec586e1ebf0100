"""One batch under several layouts: loss, gradient norm, and the first layer whose hidden states are not the same.

layouts, one after another in the same ranks --> Found of each --differences--> where each first leaves the first
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.algorithms.objective import supervised
from megarl.config.schema import Config
from megarl.data.collate import collate
from megarl.data.packing import plan_microbatches
from megarl.debug.layer_probe import probe_layers
from megarl.layout import Layout, Parallel
from megarl.trainer.trainer import Actor
from megarl.types import Group, Prompt, Sample, TrainBatch

__all__ = ["Found", "Row", "check_layouts", "compare", "parse_layout", "rows_of"]

TOLERANCE = {"fp32": 1e-4, "bf16": 5e-2}  # of hidden states, loss and gradient norm, over the largest
AXES = {
    "tp": "tensor",
    "pp": "pipeline",
    "vpp": "virtual_pipeline",
    "cp": "context",
    "ep": "expert",
    "etp": "expert_tensor",
}


@dataclass(frozen=True)
class Found:
    layout: str
    loss: float
    grad_norm: float
    layers: Tensor  # [layers, T, 8] fp64
    logprobs: Tensor  # [T] fp32


@dataclass(frozen=True, slots=True)
class Row:
    """One layout beside the first."""

    layout: str
    loss: float
    grad_norm: float
    difference: str  # where they first differ; "" nowhere


def parse_layout(text: str) -> Parallel:
    """ "tp2,pp2" -> its sizes; "1" or "dp": data parallelism alone. Raises ValueError."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, size = part.rstrip("0123456789"), part[len(part.rstrip("0123456789")) :]
        if part in ("1", "dp"):
            continue
        if axis not in AXES or not size or int(size) < 1:
            raise ValueError(
                f"--layouts {text!r}: {part!r} is no layout; write 1, or as tp2 or tp2,pp2 ({', '.join(AXES)})"
            )
        sizes[AXES[axis]] = int(size)
    return Parallel(**sizes)


def rows_of(prompts: Sequence[Prompt], *, num_tokens: int = 0, vocab: int = 0) -> TrainBatch:
    """Prompts as rows to learn from their second token on; where told, with so many random tokens behind."""
    random = torch.Generator().manual_seed(0)
    groups = []
    for prompt in prompts:
        more = (
            torch.randint(vocab, (num_tokens,), generator=random) if num_tokens else torch.zeros(0, dtype=torch.int64)
        )
        tokens = torch.cat([torch.tensor(prompt.tokens), more])
        trained, none = torch.arange(tokens.numel()) > 0, torch.zeros(tokens.numel())
        sample = Sample(prompt.prompt_id, 0, tokens, trained, none, (0, 0), "stop", reward=0.0)
        groups.append(Group(prompt, (sample,)))
    return collate(groups, temperature=1.0)


def check_layouts(
    config: Config,
    layouts: Sequence[str],
    batch: TrainBatch,
    build: Callable[[Config, Layout], Actor],
    *,
    world: int,
    rank: int,
) -> list[Found]:
    """Each layout's model is built by `build`, and takes one update. Every rank calls and gets the same."""
    found = []
    for text in layouts:
        parallel = parse_layout(text)
        sizes = {name: getattr(parallel, name) for name in AXES.values()}
        values = config.model_dump() | {"parallel": sizes}
        here = Config.model_validate(values)
        actor = build(here, Layout.of(parallel, world, rank))
        with probe_layers(actor, batch) as layers:
            logprobs = actor.logprobs(batch)
        scored = supervised(batch, logprobs)
        update = actor.update(scored, plan_microbatches(scored, actor.layout, here.train)).updates[0]
        found.append(Found(text, update.loss, update.grad_norm, layers, logprobs.old))
        actor.close()
    return found


def compare(found: Sequence[Found], dtype: str) -> list[Row]:
    """Each beside the first."""
    first, tolerance = found[0], TOLERANCE[dtype]
    return [Row(x.layout, x.loss, x.grad_norm, _first_difference(x, first, tolerance)) for x in found]


def _first_difference(x: Found, first: Found, tolerance: float) -> str:
    for number, (ours, theirs) in enumerate(zip(x.layers, first.layers, strict=True)):
        off = (ours - theirs).abs().amax(1) / theirs.abs().max()
        if not bool((off <= tolerance).all()):
            where = f"layer {number}" + (", or the embedding" if number == 0 else "")
            return f"{where}: hidden states are {float(off.max()):.1e} off (token {int(off.argmax())} of the batch)"
    if not bool((off := (x.logprobs - first.logprobs).abs()).max() <= tolerance * first.logprobs.abs().max()):
        return f"output head: log-probs are {float(off.max()):.1e} off, hidden states agree"
    for name, ours, theirs in (("loss", x.loss, first.loss), ("gradient norm", x.grad_norm, first.grad_norm)):
        if not abs(ours - theirs) <= tolerance * abs(theirs):
            return f"{name}: forward passes agree, so it is the backward pass or how losses are summed"
    return ""
