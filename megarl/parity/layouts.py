"""Trains one batch in several layouts; names the layers, terms and gradients that differ.

    first layout, plain --> reference; again with rounding errors planted --> floor
    layouts, one after another, as configured --> difference from the reference, over the floor

The plain layout recomputes and offloads nothing, and has one micro-batch per rank. Log-probs are
moved before the update, as if other policies had sampled the tokens and were the reference:
otherwise every ratio would be 1, and KL 0.

V = values of an item, here 8 projections of a hidden state or a gradient.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from math import isfinite, prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.algorithms.objective import Objective
from megarl.config.schema import Algorithm
from megarl.data.collate import token_batch
from megarl.layout import AXES, Layout, Parallel
from megarl.models.shape import ModelShape
from megarl.models.shards import without_pairs
from megarl.parity.gate import rounding_of
from megarl.parity.statistics import FORMAT_EPS, MAX_EXCESS, Quantiles, rounding_floor
from megarl.parity.sublayers import (
    NUM_PROJECTIONS,
    fixed_projections,
    record_outputs,
    rounding_errors,
    transformer_layers,
)
from megarl.trainer.actor_critic import Learner, policy_of
from megarl.trainer.learner import batch_plans
from megarl.trainer.reference import Reference
from megarl.trainer.trainer import Trainer
from megarl.types import (
    Choices,
    Prompt,
    Routes,
    ScoredBatch,
    TokenBatch,
    TokenScores,
    TrainBatch,
    route_dtype,
)
from megarl.weights.plan.plan import first_few
from megarl.weights.sync.checksum import row_checksums
from megarl.weights.sync.execute import strided_view

DRAWS = 2  # runs with planted rounding errors
# nats that log-probs are moved by, up or down: far from the usual bounds of ratios, at which
# rounding would decide
MOVED = torch.tensor([-0.8, -0.1, 0.1, 0.8])
SCORES = ("ref_logprobs", "teacher_logprobs", "old_values", "advantages")
LayoutValues = dict[str, Tensor]  # name -> [items, V] or [items]
# cross-entropy of the labels
SUPERVISED = Objective(Algorithm(loss="sft", aggregation="token-mean"))


@dataclass(frozen=True)
class LayoutResult:
    # [T, V]: hidden states of each layer, log-probs, scores, advantages; then [1, V] of the update:
    # metrics, loss, gradient norm, gradients
    values: LayoutValues
    scored: ScoredBatch
    level: str  # the quantile to judge: max or p90


def parse_layout(text: str) -> Parallel:
    """Parses sizes such as "tp2,pp2"; "1" or "dp": only data parallelism.

    Raises ValueError for any other text.
    """
    sizes = {}
    for part in text.split(","):
        if part in ("1", "dp"):
            continue
        parts = re.fullmatch(rf"({'|'.join(AXES)})0*([1-9][0-9]*)", part)
        if parts is None:
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


def with_rewards(batch: TokenBatch) -> TrainBatch:
    """Returns the rows as samples with random rewards, two samples per prompt."""
    random = torch.Generator().manual_seed(1)
    zeros_T = torch.zeros(batch.num_tokens)
    ends_N = batch.cu_seqlens[1:] - 2  # the last token is the label of the position before
    rewards_N = torch.rand(batch.num_rows, generator=random)
    group_N = torch.arange(batch.num_rows) // 2
    return TrainBatch(
        **vars(batch),
        rollout_logprobs=zeros_T,
        token_rewards=zeros_T.index_put((ends_N,), rewards_N),
        step_ends=zeros_T.bool().index_fill(0, ends_N, True),
        outcome_at=ends_N,
        rewards=rewards_N,
        baseline=torch.zeros_like(rewards_N),
        group=group_N,
        prompt_id=group_N,
        finish=torch.zeros_like(group_N),
        versions=zeros_T.int(),
    )


def random_routes(shape: ModelShape, batch: TokenBatch) -> Choices:
    """Returns routes of each row that no router chose; rank 0 sends them."""
    layers = sum(kind.has_experts for kind in shape.layer_kinds)
    random = torch.Generator().manual_seed(1)
    choices = []
    for length in batch.lengths_N.tolist():
        scores = torch.rand(layers, length, shape.experts, generator=random)
        experts = scores.topk(shape.experts_per_token).indices.to(route_dtype(shape.experts))
        choices.append(Routes((0,) * layers, tuple(row_checksums(experts).tolist()), experts))
    return tuple(choices)


def check_layouts(
    layouts: Sequence[str],
    batch: TrainBatch,
    build: Callable[[Layout, bool], Learner],
    *,
    world: int,
    rank: int,
) -> list[dict[str, Any]]:
    """Builds a learner with `build(layout, is_plain)` in each layout, and runs one update.

    Returns a dict for each layout: layout, loss, grad_norm, and the difference from the first
    layout, plain ("": none). Every rank must call it, and gets the same results.
    """

    def run(
        text: str, first: LayoutResult | None, *, plain: bool = False, draw: int | None = None
    ) -> LayoutResult:
        learner = build(Layout.of(parse_layout(text), world, rank), plain)
        result = _measure(learner, batch, first, draw)
        for trainer in reversed(learner.trainers):
            trainer.close()
        return result

    reference = run(layouts[0], None, plain=True)
    draws = [run(layouts[0], reference, plain=True, draw=n) for n in range(DRAWS)]
    rows = []
    for text in layouts:
        result = run(text, reference)
        rows.append(
            {
                "layout": text,
                "loss": float(result.values["loss"]),
                "grad_norm": float(result.values["gradient norm"]),
                "difference": _difference(result, reference, draws),
            }
        )
    return rows


def _measure(
    learner: Learner, batch: TrainBatch, first: LayoutResult | None, draw: int | None
) -> LayoutResult:
    """Runs one update, on the scores of `first` if given, and with rounding errors if `draw` is."""
    actor = policy_of(learner)
    trainer = actor.trainer
    eps = rounding_of(trainer)
    if isinstance(actor.reference, Reference):
        actor.reference.is_policy = False  # compute its log-probs, although they are the policy's
    with nullcontext() if draw is None else rounding_errors(trainer, eps, draw=draw):
        values, scored = _score(learner, trainer, actor.objective, batch)
        if first is not None:
            scored = first.scored
        (plan,) = batch_plans(scored, trainer, actor.seed)
        weights_T = actor.objective.weights(scored, plan)
        pending = actor.backward(scored, plan, weights_T, 0)
    gradients = gradient_projections(trainer)
    report = trainer.apply(pending)
    metrics = dict(actor.objective.metrics(scored, report.metrics))
    metrics |= {"loss": report.loss, "gradient norm": report.grad_norm}
    values |= {name: torch.tensor([x], dtype=torch.float64) for name, x in metrics.items()}
    # after rounding, a few tokens may be routed to other experts
    level = "p90" if trainer.shape.is_moe and eps > FORMAT_EPS["fp32"] else "max"
    return LayoutResult(values | gradients, scored, level)


def _score(
    learner: Learner, trainer: Trainer, objective: Objective, batch: TrainBatch
) -> tuple[LayoutValues, ScoredBatch]:
    """Returns the values of the forward passes, and the batch with moved log-probs."""
    numbers = [str(number) for number in range(trainer.shape.layers)]
    unrouted = replace(batch, choices=())
    with record_outputs(trainer, unrouted, transformer_layers(trainer), numbers) as layers_NT8:
        logprobs_T = trainer.logprobs(unrouted)
    routed_T = trainer.logprobs(batch) if batch.choices else logprobs_T
    random = torch.Generator().manual_seed(2)

    def moved(x_T: Tensor) -> Tensor:
        by_T = MOVED[torch.randint(len(MOVED), x_T.shape, generator=random)]
        return torch.where(batch.mask, x_T + by_T, 0.0)

    old_T = moved(routed_T)
    batch = replace(batch, rollout_logprobs=moved(old_T))
    scores: dict[str, Any] = learner.score(batch).known() | {"old_logprobs": old_T}
    if "ref_logprobs" in scores:
        scores["ref_logprobs"] = moved(scores["ref_logprobs"])
    if batch.choices:
        scores["choices"] = batch.choices
    scored, _ = objective.advantages(batch, TokenScores(**scores), objective.initial_state())
    names = [f"hidden states of layer {number}" for number in numbers]
    values = dict(zip(names, layers_NT8, strict=True)) | {"log-probs": logprobs_T}
    values |= {name: x_T for name, x_T in vars(scored).items() if name in SCORES}
    return {name: x for name, x in values.items() if x is not None}, scored


@torch.no_grad()
def gradient_projections(trainer: Trainer) -> LayoutValues:
    """Returns [1, 8] fp64 of each HF tensor: projections of its gradient, equal in every layout.

    Call it after a backward pass. Collective.
    """
    chunks: Any = trainer.model
    for chunk in chunks:
        for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
            group = buffer.data_parallel_group
            for bucket in buffer.buckets:  # each data rank has the sums of its shard only
                shards = [*bucket.grad_data.view(group.size(), -1)]
                dist.all_gather(shards, shards[group.rank()].clone(), group=group)
    tensors = trainer.tensors
    parameters: Mapping[str, Tensor] = trainer.parameters_by_name()
    if trainer.adapters is not None:
        tensors = trainer.adapters.tensors
        parameters = trainer.adapters.parameters
    # projections and count of elements, summed over the copies that ranks have
    zeros_9 = torch.zeros(NUM_PROJECTIONS + 1, dtype=torch.float64, device=trainer.device)
    sums = {name: zeros_9.clone() for name in tensors.shapes}
    for part in tensors.slices:
        gradient = getattr(parameters[part.param], "main_grad", None)
        if gradient is not None:
            shape = tensors.shapes[part.name]
            start, size = without_pairs(part, len(shape))
            sums_9 = sums[part.name]
            sums_9[:-1] += _projected(strided_view(gradient, part).reshape(size), start, shape)
            sums_9[-1] += part.numel
    totals = torch.stack([*sums.values()])
    dist.all_reduce(totals)
    values = {}
    for name, sums_9 in zip(sums, totals.cpu(), strict=True):
        copies = sums_9[-1] / prod(tensors.shapes[name])
        if copies:
            values[f"gradient of {name}"] = sums_9[None, :-1] / copies
    return values


def _projected(x: Tensor, start: Sequence[int], shape: Sequence[int]) -> Tensor:
    """Returns [8]: the share of a slice `x` in the projections of a tensor of `shape`."""
    operands: list[Any] = [x.float(), [*range(x.dim())]]
    for dim, (first, size, total) in enumerate(zip(start, x.shape, shape, strict=True)):
        # other vectors for each dim, or a square matrix would lose its antisymmetric part
        vectors_D8 = fixed_projections(total)[first : first + size].roll(dim, 1)
        operands += [vectors_D8.to(operands[0]), [dim, x.dim()]]
    return torch.einsum(*operands, [x.dim()]).double()


def _difference(result: LayoutResult, first: LayoutResult, draws: Sequence[LayoutResult]) -> str:
    """Describes the values that rounding does not explain: the first of the forward passes, from
    which all others follow, or those of the update, terms before gradients, the worst first."""
    floors: dict[str, float] = {}
    for name, exact in first.values.items():
        noise = torch.stack([_distances(draw.values[name], exact) for draw in draws])
        floor = getattr(rounding_floor(_distances(exact), noise), result.level)
        floors[_kind(name)] = max(floors.get(_kind(name), 0.0), floor)
    found = []
    for name, exact in first.values.items():
        off = _distances(result.values[name], exact)
        limit = floors[_kind(name)] * 3 * MAX_EXCESS**0.5  # Excess.limit of a single value
        largest = getattr(Quantiles.of(off), result.level)
        if largest <= limit and isfinite(largest):
            continue
        explained = f"(rounding explains {limit:.1e})"
        if len(off) > 1:
            return f"{name}: {largest:.1e} off at token {int(off.argmax())} {explained}"
        excess = largest / max(limit, 1e-30)
        text = f"{name}: {largest:.1e} off {explained}"
        found.append((name.startswith("gradient of "), -excess, text))
    if not found:
        return ""
    names = first_few([text for *_, text in sorted(found)])
    return f"{names}; forward passes agree: check the backward pass and the reduction of losses"


def _distances(values: Tensor, expected: Tensor | float = 0.0) -> Tensor:
    """Returns [items] fp64: the distance of each item from the expected one."""
    return (values.double() - expected).view(len(values), -1).norm(dim=1)


def _kind(name: str) -> str:
    """Returns the name without numbers of layers and experts, which share a floor."""
    return re.sub(r"\d+", "*", name)
