"""The Actor role on Megatron-Core: log-probs of a batch, and updates on it. Every rank calls, every rank gets the same.

Actor.build: groups -> model -> weights from safetensors -> gradient buffers -> optimizer -> (reference copy)
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from megarl.algorithms.objective import loss_weights, select_tokens, token_means
from megarl.algorithms.selection import SELECT
from megarl.checkpoint.load import load_weights
from megarl.checkpoint.torch_dist import is_checkpoint
from megarl.config.schema import Config
from megarl.data.packing import microbatch_multiple, plan_rows
from megarl.layout import Layout
from megarl.models.registry import hf_shapes, megatron_slices, padded_vocab
from megarl.models.shape import ModelShape
from megarl.models.shards import ShardSlice
from megarl.platform.device import DTYPES
from megarl.trainer.bridged import Bridged
from megarl.trainer.forward import HeadOptions, run
from megarl.trainer.load import load_hf
from megarl.trainer.logprobs import TokenOutputs
from megarl.trainer.megatron_config import transformer_config
from megarl.trainer.microbatch import Microbatch, extended, length_of, pack
from megarl.trainer.model import Groups, build_model, destroy_parallel, init_parallel, local_tensors
from megarl.trainer.moe import RouterLosses, forget_last_batch
from megarl.trainer.offload import Memory, recompute
from megarl.trainer.optimizer import LrSchedule, build_optimizer, take_step, wrap, zero_grad
from megarl.trainer.reference import Reference
from megarl.trainer.update import UpdateLoss, global_sums
from megarl.types import LogProbs, MicrobatchPlan, ScoredBatch, StepReport, TrainBatch, UpdateReport

__all__ = ["Actor"]

PlannedUpdate = tuple[tuple[tuple[int, ...], ...], ...]  # [dp_rank][microbatch] -> rows


@dataclass
class Actor:
    """Built by `Actor.build`. `model`, `optimizer` and `scheduler` are what a checkpoint holds."""

    config: Config
    shape: ModelShape
    layout: Layout
    groups: Groups
    device: torch.device
    model: list[DistributedDataParallel]  # the chunks of this stage
    optimizer: MegatronOptimizer
    scheduler: LrSchedule
    reference: Reference | None  # None: the objective has no reference term
    router_losses: RouterLosses | None  # None: no experts, or nothing is asked of their routers
    memory: Memory
    recorded: list[list[ShardSlice]] | None = None  # [rank]; None: the family has a table, which says it

    @classmethod
    def build(
        cls, config: Config, shape: ModelShape, layout: Layout, *, folder: str | Path, device: torch.device
    ) -> Actor:
        """The model of `folder` in this layout; torch.distributed must be initialised. Every rank must call."""
        use_te = device.type == "cuda"
        groups = init_parallel(config.parallel.sizes, layout, seed=config.run.seed)
        model, recorded = _model(config, shape, layout, use_te=use_te)
        if is_checkpoint(Path(folder)):  # what `megarl convert --to megatron` made; before the optimizer is built
            load_weights(model, Path(folder))
        else:
            boxes = recorded[layout.rank] if recorded else _boxes(shape, layout, use_te=use_te)
            load_hf(local_tensors(model), boxes, folder)
        chunks = [wrap(chunk) for chunk in model]
        optimizer = build_optimizer(chunks, config.train)
        terms = RouterLosses(chunks, config.moe, shape, layout.tp) if shape.is_moe and config.moe.acts else None
        scheduler = LrSchedule(config.train)
        memory = Memory(chunks, optimizer, offload=config.train.offload, device=device)
        actor = cls(config, shape, layout, groups, device, chunks, optimizer, scheduler, None, terms, memory, recorded)
        if config.algorithm.needs_reference:
            actor.reference = Reference.of(actor.parameters_by_name())
        return actor

    def close(self) -> None:
        """Give back memory and process groups; another actor may then be built in this process. Every rank must call.

        Its groups live as long as its model, each with threads that poll (some fifty together under gloo).
        """
        forget_last_batch(self.model)
        vars(self).clear()  # whoever still holds this actor holds nothing of it
        gc.collect()
        destroy_parallel()

    def parameters_by_name(self) -> dict[str, Tensor]:
        """What of the checkpoint this rank holds, under GPTModel's own names; of virtual stages: `chunk<n>.` + name."""
        return local_tensors([chunk.module for chunk in self.model])

    def local_slices(self) -> list[ShardSlice]:
        """Where this rank's parameters hold HF tensors."""
        if self.recorded is not None:
            return self.recorded[self.layout.rank]
        return _boxes(self.shape, self.layout, use_te=self.device.type == "cuda")

    def slices_by_rank(self) -> list[list[ShardSlice]]:
        """[rank] -> where that rank's parameters hold HF tensors; the same on every rank."""
        if self.recorded is not None:
            return self.recorded
        sizes, use_te = self.config.parallel.sizes, self.device.type == "cuda"
        layouts = [Layout.of(sizes, self.layout.world, rank) for rank in range(self.layout.world)]
        return [_boxes(self.shape, layout, use_te=use_te) for layout in layouts]

    def hf_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of the checkpoint that is trained, with its full shape."""
        shapes = hf_shapes(self.shape)
        if self.recorded is None:
            return shapes
        held = {box.name for boxes in self.recorded for box in boxes}
        return {name: size for name, size in shapes.items() if name in held}

    def logprobs(self, batch: TrainBatch) -> LogProbs:
        """Log-probs of `labels` under the current weights, and under the reference where there is one."""
        microbatches = self.microbatches(batch)
        old = self._score(batch, microbatches)
        if self.reference is None:
            return LogProbs(old, None)
        with self.reference.in_place_of(self.parameters_by_name()):
            return LogProbs(old, self._score(batch, microbatches))

    def update(self, batch: ScoredBatch, plan: MicrobatchPlan) -> StepReport:
        """One optimizer step for each update of the plan; the learning rate moves on once, at the end."""
        weights = loss_weights(
            batch,
            plan,
            aggregation=self.config.algorithm.aggregation,
            constant=self.config.rollout.max_tokens,
        )
        reports = tuple(
            self._update(batch, ranks, weights, num_tokens, index)
            for index, (ranks, num_tokens) in enumerate(zip(plan.rows, plan.num_tokens, strict=True))
        )
        self.scheduler.step += 1
        self.memory.before_step()  # a checkpoint may follow
        return StepReport(reports)

    def _update(
        self, batch: ScoredBatch, ranks: PlannedUpdate, weights: Tensor, num_tokens: int, index: int
    ) -> UpdateReport:
        """An update without a single token changes nothing: Adam's momentum alone would still move the weights."""
        lr = self.scheduler.lr
        if not num_tokens:
            return UpdateReport(0.0, 0.0, lr, skipped=True)
        selected = self._selected(batch, ranks, index)
        self.memory.before_backward()
        zero_grad(self.model, self.optimizer)
        loss = UpdateLoss(batch, weights, selected, self.config.algorithm, self.device)
        microbatches = self._packed(batch, ranks)
        if self.router_losses is not None:
            self.router_losses.begin(microbatches, weights, self.device)
        run(self.model, microbatches, self._reading(batch, entropy=True), loss, train=True)
        self.memory.before_step()
        outcome = take_step(self.optimizer, lr=lr, clip_grad=self.config.train.clip_grad)
        sums = global_sums(loss.sums, counts=self._holds_outputs)
        value = sums.pop("loss")
        metrics = token_means(sums, num_tokens)
        if self.config.algorithm.needs_reference:
            metrics["kl/coef"] = batch.kl_coef
        if self.router_losses is not None:
            metrics |= global_sums(self.router_losses.finish(step=not outcome.skipped), counts=True)
        return UpdateReport(value, outcome.grad_norm, lr, outcome.skipped, metrics)

    def _selected(self, batch: ScoredBatch, ranks: PlannedUpdate, index: int) -> Tensor:
        """[T] bool, chosen by the policy's log-probs now: those at hand before the first update are as good."""
        algorithm = self.config.algorithm
        logprobs = batch.old_logprobs
        if algorithm.loss in SELECT and (index or algorithm.use_rollout_logprobs):
            logprobs = self._score(batch, self.microbatches(batch))
        rows = [row for rank in ranks for chosen in rank for row in chosen]
        seed = self.config.run.seed + 1000 * self.scheduler.step + index
        return select_tokens(batch, logprobs, rows, algorithm, seed)

    @property
    def _holds_outputs(self) -> bool:
        """One rank of each tensor and context group of the last stage: together they hold each row once."""
        return self.layout.pp.last and self.layout.tp.first and self.layout.cp.first

    def microbatches(self, batch: TrainBatch) -> list[Microbatch]:
        """This rank's share of the whole batch, for a forward pass."""
        lengths = batch.cu_seqlens.diff().tolist()
        max_tokens = self.config.train.max_tokens_per_microbatch
        (ranks,) = plan_rows(
            lengths, dp=self.layout.dp.size, updates=1, max_tokens=max_tokens, multiple=microbatch_multiple(self.layout)
        )
        return self._packed(batch, ranks)

    def _packed(self, batch: TrainBatch, ranks: PlannedUpdate) -> list[Microbatch]:
        """This rank's micro-batches, of one length where Megatron asks for it."""
        layout = self.layout
        microbatches = [
            pack(batch, rows, tensor=layout.tp.size, context=layout.cp, device=self.device)
            for rows in ranks[layout.dp.rank]
        ]
        if self.model[0].config.variable_seq_lengths:
            return microbatches
        longest = torch.tensor(max(map(length_of, microbatches)), device=self.device)
        dist.all_reduce(longest, dist.ReduceOp.MAX)
        return [extended(microbatch, int(longest)) for microbatch in microbatches]

    def _reading(self, batch: TrainBatch, *, entropy: bool) -> HeadOptions:
        return HeadOptions(self.groups, self.shape.vocab, batch.temperature, self.config.train.logprob_chunk, entropy)

    def _score(self, batch: TrainBatch, microbatches: list[Microbatch]) -> Tensor:
        """[T] fp32 on the CPU of every rank: each writes its rows into zeros, one all-reduce puts them together."""
        found = torch.zeros(batch.num_tokens, device=self.device)

        def keep(microbatch: Microbatch, outputs: TokenOutputs) -> Tensor:
            if self._holds_outputs:
                found[microbatch.index.to(self.device)] = outputs.logprobs_T
            return outputs.logprobs_T.new_zeros(())

        run(self.model, microbatches, self._reading(batch, entropy=False), keep, train=False)
        dist.all_reduce(found)
        return found.cpu()


def _model(
    config: Config, shape: ModelShape, layout: Layout, *, use_te: bool
) -> tuple[list[GPTModel], list[list[ShardSlice]] | None]:
    """This rank's chunks, and what every rank holds where no table says it."""
    train, how = config.train, {"dtype": DTYPES[config.train.dtype], "dispatcher": config.moe.dispatcher}
    if shape.bridge is None:
        settings = transformer_config(shape, layout, **how, use_te=use_te)
        recompute(settings, train.recompute, train.recompute_modules)
        return build_model(shape, layout, settings, use_te=use_te), None
    bridged = Bridged.of(shape, layout, **how, use_te=use_te)
    recompute(bridged.provider, train.recompute, train.recompute_modules)
    chunks = bridged.build()
    return chunks, bridged.slices_by_rank(chunks)


def _boxes(shape: ModelShape, layout: Layout, *, use_te: bool) -> list[ShardSlice]:
    style = "te" if use_te else "local"
    return megatron_slices(shape, layout, style=style, padded_vocab=padded_vocab(shape.vocab, layout.tp.size))
