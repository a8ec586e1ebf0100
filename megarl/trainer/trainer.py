"""Trains one model on Megatron-Core, in one layout, with a head. It is algorithm-agnostic: the loss is an argument.

    build:    process groups -> model -> weights from a checkpoint -> head -> gradient buffers -> optimizer
    forward:  TokenBatch -> TokenOutputs
    step:     TokenBatch, plan, loss, weights -> one optimizer step

Every rank must call every method, in the same order, and gets the same result.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor

from megarl.checkpoint import rank_state
from megarl.checkpoint.hf_folder import load_hf
from megarl.checkpoint.torch_dist import is_checkpoint
from megarl.config.schema import Moe, Train
from megarl.config.section import Fp8, Lora
from megarl.data.packing import microbatch_multiple, plan_microbatches, plan_rows
from megarl.layout import Layout
from megarl.models.registry import hf_shapes, megatron_table, padded_vocab
from megarl.models.shape import ModelShape
from megarl.models.shards import ShardSlice, Table, shapes_of, slices_by_rank, slices_of
from megarl.platform.device import DTYPES, to_device
from megarl.trainer.bridged import Bridged
from megarl.trainer.forward import LossSums, forward_backward, global_sums
from megarl.trainer.fp8 import MULTIPLES, Emulation, megatron_settings
from megarl.trainer.heads import Head, HeadOptions, VocabularyHead
from megarl.trainer.lora import Adapters
from megarl.trainer.megatron_config import fusions, te_kernels, transformer_config
from megarl.trainer.microbatch import Microbatch, pack
from megarl.trainer.model import build_model, local_tensors, shares_prefixes
from megarl.trainer.moe import RouterLosses, forget_last_batch
from megarl.trainer.offload import Memory, recompute
from megarl.trainer.optimizer import LrSchedule, build_optimizer, take_step, wrap, zero_grad
from megarl.trainer.parallel_groups import ProcessGroups, destroy_parallel, init_parallel
from megarl.trainer.router_replay import Record, RouterReplay, RowsByRank
from megarl.types import (
    Loss,
    MicrobatchPlan,
    MicrobatchRows,
    StepReport,
    TokenBatch,
    TokenOutputs,
    UpdateReport,
)
from megarl.weights.placement_check import slice_checksum, sums_by_tensor
from megarl.weights.placements import SlicesByRank


@dataclass
class Trainer:
    """Built by `Trainer.build`. A checkpoint saves `model`, `optimizer` and `scheduler`."""

    shape: ModelShape
    layout: Layout
    train: Train
    head: Head
    groups: ProcessGroups
    device: torch.device
    model: list[DistributedDataParallel]  # the chunks of this pipeline stage
    optimizer: MegatronOptimizer
    scheduler: LrSchedule
    router_losses: RouterLosses | None  # None: no experts, or no auxiliary loss for their routers
    router_replay: RouterReplay
    memory: Memory
    table: Table | None  # of the model with its head; None: the family has none
    traced: SlicesByRank | None  # instead of a table: recorded from Megatron-Bridge
    owns_groups: bool  # False: built beside another trainer
    fp8: Fp8 | None = None
    emulation: Emulation | None = None
    adapters: Adapters | None = None  # None: all weights are trained

    @classmethod
    def build(
        cls,
        shape: ModelShape,
        layout: Layout,
        *,
        train: Train,
        folder: str | Path,
        device: torch.device,
        moe: Moe | None = None,
        head: Head
        | Lora
        | None = None,  # None: log-probs over the vocabulary; Lora: the same, training adapters only
        seed: int = 0,
        # of TransformerConfig and DistributedDataParallelConfig; `fp8` may be the section precision.fp8
        megatron_options: Mapping[str, Any] | None = None,
        beside: Trainer
        | None = None,  # of the same layout, whose process groups are used; it must be closed last
    ) -> Trainer:
        """Builds the model of `folder`, a Hugging Face or Megatron checkpoint, with torch.distributed initialised."""
        lora = head if isinstance(head, Lora) else None
        moe = moe or Moe()
        head = (
            VocabularyHead(shape.vocab, train.logprob_chunk)
            if head is None or isinstance(head, Lora)
            else head
        )
        options = {
            name: value for name, value in (megatron_options or {}).items() if name != "unsafe"
        }
        reduction = {
            name: options.pop(name)
            for name in [*options]
            if not hasattr(MLATransformerConfig, name)
        }
        assert beside is None or beside.layout == layout
        groups = init_parallel(layout, seed=seed) if beside is None else beside.groups
        if lora:  # in the overlap, Megatron gathers the inputs of shared experts itself
            options.setdefault("moe_shared_expert_overlap", False)
        use_te, rows = device.type == "cuda", padded_vocab(shape.vocab, layout.tp.size)
        fp8 = section if isinstance(section := options.get("fp8"), Fp8) else None
        if fp8:
            options = {**options, "fp8": None} | megatron_settings(fp8, device)
        model, traced = _build_model(shape, layout, train, moe, options, use_te=use_te)
        emulation = Emulation(model, fp8, groups.stage) if fp8 and fp8.emulate else None
        if traced is None:
            table = head.table(
                megatron_table(shape, spec="te" if use_te else "local", padded_vocab=rows), shape
            )
            slices = slices_of(table, shape, layout)
        else:
            table, slices = None, traced[layout.rank]
        _load(model, slices, layout, head, Path(folder), has_table=table is not None)
        adapters = None
        if lora is not None:
            assert table is not None, "check_lora refuses families without a table"
            adapters = Adapters(model, table, shape, layout, lora, groups=groups, seed=seed)
        # an overlapped reduction waits for the gradient of the output layer, which other heads do not use
        overlaps = use_te and layout.dp.size * layout.cp.size > 1 and head.is_tensor_parallel
        reduced = None if adapters is None else adapters.reduce_gradients
        chunks = wrap(model, reduced, **({"overlap_grad_reduce": overlaps} | reduction))
        memory = Memory(chunks, train.offload)  # frees the gradients
        memory.optimizer = optimizer = build_optimizer(
            chunks, train
        )  # copies the weights: they must be loaded before
        if emulation is not None:
            emulation.after_update()
        router_losses = (
            RouterLosses(chunks, moe, shape, layout.tp)
            if shape.is_moe and moe.changes_router
            else None
        )
        can_replay = (
            shape.is_moe and traced is None and not model[0].config.moe_router_fusion
        )  # which replays nothing
        router_replay = RouterReplay(chunks if can_replay else [], shape, layout, groups)
        return cls(
            shape, layout, train, head, groups, device, chunks, optimizer, LrSchedule(train), router_losses,
            router_replay, memory, table, traced, owns_groups=beside is None, fp8=fp8, emulation=emulation,
            adapters=adapters,
        )  # fmt: skip

    def close(self) -> None:
        """Frees memory and process groups; another trainer can then be built in this process. Call it on every rank."""
        owns_groups = self.owns_groups
        forget_last_batch(self.model)
        vars(self).clear()  # so that other references to this trainer keep no tensor alive
        gc.collect()
        if owns_groups:
            destroy_parallel()

    def parameters_by_name(self) -> dict[str, Tensor]:
        """Returns this rank's parameters and router biases by GPTModel's names (`local_tensors`)."""
        return local_tensors([chunk.module for chunk in self.model])

    def merged_parameters(self) -> Mapping[str, Tensor]:
        """Returns the same, with adapters merged into them."""
        parameters = self.parameters_by_name()
        return parameters if self.adapters is None else self.adapters.merged(parameters)

    @cached_property
    def base_checksums(self) -> dict[str, tuple[int, int]]:
        """Of the frozen weights with LoRA, by HF tensor over all ranks: elements, and their positional checksum. A
        collective, the first time."""
        if self.adapters is None:
            return {}
        parameters, shapes, slices = (
            self.parameters_by_name(),
            self.hf_shapes(),
            self.local_slices(),
        )
        checksums = [
            slice_checksum(x, parameters, shapes[x.name], parameters[x.param].dtype) for x in slices
        ]
        sums = sums_by_tensor(shapes, slices, torch.stack(checksums))
        dist.all_reduce(sums)
        return {
            name: (int(numel), int(value))
            for name, (numel, value) in zip(shapes, sums.T.tolist(), strict=True)
        }

    def local_slices(self) -> Sequence[ShardSlice]:
        """Returns the slices of HF tensors that this rank's parameters store."""
        if self.table is None:
            return self.slices_by_rank()[self.layout.rank]
        return slices_of(self.table, self.shape, self.layout)

    def slices_by_rank(self) -> SlicesByRank:
        """Returns, for each rank, the slices of HF tensors that its parameters store."""
        if self.traced is not None:
            return self.traced
        assert self.table is not None
        return slices_by_rank(self.table, self.shape, self.layout)

    def hf_shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the full shape of every trained tensor of the checkpoint."""
        if self.table is not None:
            return shapes_of(self.table, self.shape)
        trained = {part.name for slices in self.slices_by_rank() for part in slices}
        return {name: size for name, size in hf_shapes(self.shape).items() if name in trained}

    def forward(self, batch: TokenBatch, *, top_k: int = 0, record: Record = None) -> TokenOutputs:
        """Returns the head's outputs, without gradient: [T] fp32 on the CPU of every rank, 0 where it does not read.
        With `top_k`, `extra_labels_TK` are the likeliest tokens, not those of the batch."""
        batch = replace(batch, extra_labels=None)
        options = HeadOptions(self.groups.tensor, batch.temperature, entropy=False, top_k=top_k)
        return self._gathered(self._run(batch, self._rows(batch), options, None, record))

    def logprobs(self, batch: TokenBatch, record: Record = None) -> Tensor:
        """Returns [T]: what `forward` does, where the head is that of the vocabulary."""
        logprobs_T = self.forward(batch, record=record).logprobs_T
        assert logprobs_T is not None
        return logprobs_T

    def train_on(
        self, batch: TokenBatch, loss: Loss, weights: Callable[[Any, MicrobatchPlan], Tensor]
    ) -> StepReport:
        """Makes the updates of one batch; ``weights(batch, plan)`` are those of `step`."""
        plan = plan_microbatches(batch, self.layout, self.train)
        weights_T = weights(batch, plan)
        updates = tuple(self.step(batch, update, loss, weights_T) for update in plan.updates())
        self.finish_batch()
        return StepReport(updates, {"packing/efficiency": plan.efficiency})

    def step(
        self,
        batch: TokenBatch,
        plan: MicrobatchPlan,
        loss: Loss,
        weights_T: Tensor,
        *,
        before_step: Callable[[TokenOutputs], None] | None = None,
        needs_entropy: bool = False,
    ) -> UpdateReport:
        """Takes one optimizer step on the rows of `plan`, which must have one update. The loss is the sum over tokens
        of ``loss_T * weights_T``; `weights_T` [T] fp64 includes all divisors, so the split into micro-batches and ranks
        does not matter. It gets entropy if it needs it, and every `train.entropy_every` steps. The step is skipped if
        the gradient is not finite, or if no token is trained: Adam's momentum alone would change the weights.
        `before_step` gets the forward pass's outputs after the backward pass; if it raises, nothing has changed."""
        (ranks,), (num_tokens,) = plan.rows, plan.num_tokens
        lr, every = self.scheduler.lr, self.train.entropy_every
        entropy = needs_entropy or (every > 0 and self.scheduler.step % every == 0)
        if not num_tokens:
            if before_step is not None:
                before_step(self._gathered(self._no_outputs(batch)))
            return UpdateReport(0.0, 0.0, lr, skipped=True)
        self.memory.onload_gradients()
        zero_grad(self.model, self.optimizer)
        sums = LossSums(loss, weights_T, self.head.fields(entropy=entropy), self.device)
        outputs = self._run(
            batch, ranks, HeadOptions(self.groups.tensor, batch.temperature, entropy), sums
        )
        if before_step is not None:
            before_step(self._gathered(outputs))
        self.memory.onload_optimizer()
        grad_norm, skipped = take_step(
            self.optimizer, lr=lr, clip_grad=self.train.clip_grad, device=self.device
        )
        if self.emulation is not None:
            self.emulation.after_update()
        totals = global_sums(sums.totals, counts=self._owns_outputs)
        value, count = totals.pop("loss"), totals.pop("count")
        metrics = {name: total / max(count, 1.0) for name, total in totals.items()}
        if self.router_losses is not None:
            metrics |= global_sums(self.router_losses.finish(step=not skipped), counts=True)
        if batch.routes:
            metrics |= self.router_replay.metrics()
        return UpdateReport(value, grad_norm, lr, skipped, metrics)

    def finish_batch(self) -> None:
        """Advances the learning-rate schedule after the updates of one batch. A checkpoint may be saved afterwards."""
        self.scheduler.step += 1
        self.memory.onload_optimizer()

    def microbatches(self, batch: TokenBatch) -> list[Microbatch]:
        """Returns this rank's micro-batches of the whole batch, for a forward pass."""
        return self._pack(batch, self._rows(batch)[self.layout.dp.rank])

    def _rows(self, batch: TokenBatch) -> RowsByRank:
        """Returns the rows of each micro-batch of each data-parallel rank, for a forward pass."""
        max_tokens, multiple = (
            self.train.max_tokens_per_microbatch,
            microbatch_multiple(self.layout),
        )
        lengths, dp = batch.cu_seqlens.diff().tolist(), self.layout.dp.size
        return plan_rows(lengths, dp=dp, updates=1, max_tokens=max_tokens, multiple=multiple)[0]

    @property
    def shares_prefixes(self) -> bool:
        return shares_prefixes(self.shape, self.layout, use_te=self.device.type == "cuda")

    def _pack(
        self, batch: TokenBatch, rows: Sequence[Sequence[int]], *, share: bool = False
    ) -> list[Microbatch]:
        """Returns this rank's micro-batches, of equal length where Megatron requires it."""
        context, is_read_T = self.layout.cp, self.head.positions(batch)
        tensor = self.layout.tp.size * (
            MULTIPLES[self.fp8.recipe] if self.fp8 else 1
        )  # what its tokens divide by
        fit: dict[str, Any] = {
            "tensor": tensor,
            "context": context,
            "device": self.device,
            "share": share,
        }
        microbatches = [pack(batch, part, is_read_T, **fit) for part in rows]
        if self.model[0].config.variable_seq_lengths:
            return microbatches
        longest = torch.tensor(
            max(microbatch.length for microbatch in microbatches), device=self.device
        )
        dist.all_reduce(longest, dist.ReduceOp.MAX)
        return [pack(batch, part, is_read_T, length=int(longest), **fit) for part in rows]

    def _run(
        self,
        batch: TokenBatch,
        ranks: RowsByRank,
        options: HeadOptions,
        sums: LossSums | None,
        record: Record = None,
    ) -> dict[str, Tensor]:
        """Runs this rank's micro-batches; with `sums`, also backward. Returns what the head read of them."""
        train, outputs = sums is not None, self._no_outputs(batch, options.top_k)
        microbatches = self._pack(
            batch, ranks[self.layout.dp.rank], share=train and self.shares_prefixes
        )

        def on_outputs(rows: MicrobatchRows, read: TokenOutputs) -> Tensor:
            if self._owns_outputs:
                index = to_device(rows.index, self.device)
                for name, output in outputs.items():
                    output[index] = getattr(read, name).detach()
            return torch.zeros((), device=self.device) if sums is None else sums(rows, read)

        if sums is not None and self.router_losses is not None:
            self.router_losses.begin(microbatches, sums.weights_T, self.device)
        if self.adapters is not None:
            self.adapters.trains = train
        with self.router_replay.over(batch, ranks, microbatches, record, train=train):
            context = self.groups.context
            forward_backward(
                self.model,
                microbatches,
                self.head,
                options,
                on_outputs,
                context=context,
                train=train,
            )
        return outputs

    def _no_outputs(self, batch: TokenBatch, top_k: int = 0) -> dict[str, Tensor]:
        """Returns zeros: fields of TokenOutputs for the whole batch."""
        zeros_TK = torch.zeros(batch.num_tokens, top_k, device=self.device)
        extra = {"extra_labels_TK": zeros_TK.long(), "extra_logprobs_TK": zeros_TK} if top_k else {}
        return {
            name: zeros_TK.new_zeros(batch.num_tokens) for name in self.head.fields(entropy=False)
        } | extra

    def _gathered(self, outputs: dict[str, Tensor]) -> TokenOutputs:
        """Sums over the ranks: each has written its rows into zeros. Returns them on the CPU."""
        for output in outputs.values():
            dist.all_reduce(output)
        return TokenOutputs(**{name: output.cpu() for name, output in outputs.items()})

    @property
    def _owns_outputs(self) -> bool:
        """True on one rank of each tensor and context group of the last stage; these ranks share no row."""
        return self.layout.pp.last and self.layout.tp.first and self.layout.cp.first


def _build_model(
    shape: ModelShape,
    layout: Layout,
    train: Train,
    moe: Moe,
    options: dict[str, Any],
    *,
    use_te: bool,
) -> tuple[list[GPTModel], SlicesByRank | None]:
    """Returns this rank's chunks, and every rank's slices if the family has no table."""
    how: dict[str, Any] = {
        "dtype": DTYPES[train.dtype],
        "dispatcher": moe.dispatcher,
        "use_te": use_te,
    }
    bridged = None if shape.bridge is None else Bridged.of(shape, layout, **how)
    config = transformer_config(shape, layout, **how) if bridged is None else bridged.provider
    recompute(config, train.recompute, train.recompute_modules)
    vars(config).update(fusions(config, te_kernels() if use_te else frozenset()) | options)
    if bridged is None:
        return build_model(shape, layout, config, use_te=use_te), None
    chunks = bridged.build()
    return chunks, bridged.slices_by_rank(chunks)


def _load(
    model: list[GPTModel],
    slices: Sequence[ShardSlice],
    layout: Layout,
    head: Head,
    folder: Path,
    *,
    has_table: bool,
) -> None:
    """Loads the weights of `folder` and attaches the head, whose own weights only a Hugging Face folder can have."""
    is_loaded = has_table and not is_checkpoint(folder)
    if layout.pp.last and is_loaded:
        head.attach(model[-1])
    if is_checkpoint(folder):  # written by `megarl convert --to megatron`
        rank_state.load(model, folder)
    else:
        load_hf(local_tensors(model), slices, folder)
    if layout.pp.last and not is_loaded:
        head.attach(model[-1])
