"""Trains one model with one head on Megatron-Core, in one layout; the caller passes the loss.

    build:    process groups -> model -> weights -> head -> gradient buffers -> optimizer
    forward:  TokenBatch -> TokenOutputs
    step:     TokenBatch, plan, loss, weights -> one optimizer step

Every rank must call every method, in the same order, and gets the same result.
"""

import gc
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from megarl.algorithms.objective import trained_tokens
from megarl.checkpoint import rank_state
from megarl.checkpoint.hf_folder import load_hf
from megarl.checkpoint.torch_dist import is_checkpoint
from megarl.config.schema import Lora, Moe, Precision, Train
from megarl.data.packing import microbatch_multiple, plan_microbatches, plan_rows
from megarl.layout import Layout
from megarl.models.flops import peak_flops, update_flops
from megarl.models.registry import megatron_table, padded_vocab
from megarl.models.shape import ModelShape
from megarl.models.shards import Table
from megarl.models.weights import check_weights
from megarl.platform.device import DTYPES, gpu_name, to_device
from megarl.platform.env import set_env
from megarl.trainer.bridged import Bridged
from megarl.trainer.forward import LossSums, forward_backward, global_sums
from megarl.trainer.fp8 import MULTIPLES, Emulation, megatron_settings
from megarl.trainer.heads import Head, HeadOptions, VocabularyHead
from megarl.trainer.lora import Adapters, Merged
from megarl.trainer.megatron_config import (
    fusions,
    split_options,
    te_kernels,
    transformer_config,
)
from megarl.trainer.microbatch import Microbatch, pack
from megarl.trainer.model import HfTensors, build_model, local_tensors, shares_prefixes
from megarl.trainer.moe import RouterLosses, forget_last_batch
from megarl.trainer.offload import Memory, recompute
from megarl.trainer.optimizer import LrSchedule, build_optimizer, take_step, wrap, zero_grad
from megarl.trainer.parallel_groups import ProcessGroups, destroy_parallel, init_parallel
from megarl.trainer.router_replay import RouterReplay, RowsByRank
from megarl.types import (
    Loss,
    MicrobatchPlan,
    MicrobatchRows,
    StepReport,
    TokenBatch,
    TokenOutputs,
    UpdateReport,
)
from megarl.weights.sync.execute import slice_checksum
from megarl.weights.sync.placement import sums_by_tensor


@dataclass(frozen=True)
class Gradients:
    """Results of a backward pass; the gradients themselves are in the trainer's buffers."""

    outputs: TokenOutputs  # 0 in other ranks' rows; `Trainer.gathered` sums over ranks
    sums: LossSums | None  # None: no token is trained
    lengths: Sequence[int] = ()  # of the rows of all ranks, in tokens


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
    router_losses: RouterLosses | None  # None: no auxiliary loss and no bias update
    router_replay: RouterReplay
    memory: Memory
    table: Table | None  # for the model with its head; None: the family has no table
    tensors: HfTensors  # by the table, or recorded from Megatron-Bridge's conversion
    owns_groups: bool  # False: the process groups are another trainer's
    precision: Precision
    emulation: Emulation
    adapters: Adapters | None  # None: all weights are trained

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
        head: Head | None = None,  # None: log-probs over the vocabulary
        lora: Lora | None = None,  # None: all weights are trained
        precision: Precision | None = None,
        seed: int = 0,
        # fields of TransformerConfig and of DistributedDataParallelConfig
        megatron_options: Mapping[str, Any] | None = None,
        # a trainer of the same layout, which shares its process groups; close it last
        share_groups_with: "Trainer | None" = None,
    ) -> "Trainer":
        """Builds a trainer and loads `folder`, a Hugging Face or Megatron checkpoint."""
        moe = moe or Moe()
        precision = precision or Precision()
        head = head or VocabularyHead(shape.vocab, train.logprob_chunk)
        settings, reduction = split_options(megatron_options or {}, device)
        shared = share_groups_with
        assert shared is None or shared.layout == layout
        groups = shared.groups if shared else init_parallel(layout, seed=seed, device=device)
        owns_groups = shared is None
        if lora:  # with overlap, Megatron gathers the inputs of shared experts itself
            settings.setdefault("moe_shared_expert_overlap", False)
        settings |= megatron_settings(precision, device)
        use_te = settings["transformer_impl"] == "transformer_engine"
        model, recorded = _build_model(shape, layout, train, moe, settings, use_te)
        emulation = Emulation(model, precision, groups.stage)
        table, tensors = _load(model, recorded, shape, layout, head, Path(folder), use_te=use_te)
        adapters = None
        if lora:
            assert table is not None, "check_lora refuses families without a table"
            adapters = Adapters(model, table, shape, layout, lora, groups=groups, seed=seed)
        # overlap waits for the output layer's gradient, which other heads do not compute
        overlaps = use_te and layout.dp.size * layout.cp.size > 1 and head.is_tensor_parallel
        chunks = wrap(
            model,
            {"overlap_grad_reduce": overlaps} | reduction,
            adapters and adapters.reduce_gradients,
        )
        memory = Memory(chunks, train.offload)  # frees the gradients
        memory.optimizer = optimizer = build_optimizer(chunks, train)  # copies the loaded weights
        emulation.after_update()
        router_losses = None
        if shape.is_moe and (moe.aux_loss or moe.z_loss or moe.bias_update_rate):
            router_losses = RouterLosses(chunks, moe, shape, layout.tp)
        # a fused router cannot replay routes
        can_replay = shape.is_moe and table is not None and not model[0].config.moe_router_fusion
        replayed = chunks if can_replay else []
        router_replay = RouterReplay(replayed, shape, layout, groups, is_policy=owns_groups)
        return cls(
            shape, layout, train, head, groups, device, chunks, optimizer, LrSchedule(train),
            router_losses, router_replay, memory, table, tensors, owns_groups,
            precision, emulation, adapters,
        )  # fmt: skip

    def close(self) -> None:
        """Frees memory and process groups; another trainer can then be built in this process.

        Call it on every rank.
        """
        owns_groups = self.owns_groups
        forget_last_batch(self.model)
        vars(self).clear()  # so that other references to this trainer keep no tensor alive
        gc.collect()
        if owns_groups:
            destroy_parallel()

    def parameters_by_name(self) -> dict[str, Tensor]:
        """Returns this rank's parameters and router biases, by the names of `local_tensors`."""
        return local_tensors([chunk.module for chunk in self.model])

    def merged_parameters(self) -> Mapping[str, Tensor]:
        """Returns `parameters_by_name` with adapters merged into the weights."""
        parameters = self.parameters_by_name()
        return parameters if self.adapters is None else Merged(parameters, self.adapters.layers)

    @cached_property
    def base_checksums(self) -> dict[str, tuple[int, int]]:
        """{HF tensor: (elements, positional checksum)} of the frozen base weights over all ranks.

        Empty without LoRA. Collective on first use, then cached.
        """
        if self.adapters is None:
            return {}
        parameters = self.parameters_by_name()
        shapes = self.tensors.shapes
        slices = self.tensors.slices
        checksums = [
            slice_checksum(part, parameters, shapes[part.name], parameters[part.param].dtype)
            for part in slices
        ]
        sums = sums_by_tensor(shapes, slices, torch.stack(checksums))
        dist.all_reduce(sums)
        numels, values = sums.tolist()
        return dict(zip(shapes, zip(numels, values, strict=True), strict=True))

    def forward(self, batch: TokenBatch, *, top_k: int = 0, record: bool = False) -> TokenOutputs:
        """Returns the head's outputs, without gradient: [T] fp32 on the CPU of every rank.

        Outputs are 0 where the head does not read. With `top_k`, `extra_labels_TK` are the
        likeliest tokens, not the batch's extra labels. With `record`, the layers ignore the batch's
        choices and `choices` are their own.
        """
        batch = replace(batch, extra_labels=None)
        return self.gathered(self._run(batch, self._rows(batch), record=record, top_k=top_k))

    def logprobs(self, batch: TokenBatch) -> Tensor:
        """Returns [T] fp32: log-probs of the labels; the head must be a VocabularyHead."""
        logprobs_T = self.forward(batch).logprobs_T
        assert logprobs_T is not None
        return logprobs_T

    def train_on(
        self,
        batch: TokenBatch,
        loss: Loss,
        weights: Callable[[Any, MicrobatchPlan], Tensor],
        plans: Sequence[MicrobatchPlan] = (),  # a plan for each pass; empty: one pass
    ) -> StepReport:
        """Runs the updates of one batch; ``weights(batch, plan)`` returns `weights_T` of `step`."""
        plans = plans or [plan_microbatches(batch, self.layout, self.train)]
        updates = []
        for plan in plans:
            weights_T = weights(batch, plan)
            updates += [self.step(batch, update, loss, weights_T) for update in plan.updates()]
        self.finish_batch()
        return StepReport(tuple(updates), {"packing/efficiency": plans[0].efficiency})

    def step(
        self,
        batch: TokenBatch,
        plan: MicrobatchPlan,
        loss: Loss,
        weights_T: Tensor,
        *,
        needs_entropy: bool = False,
    ) -> UpdateReport:
        """Runs one update: `backward`, then `apply`."""
        return self.apply(self.backward(batch, plan, loss, weights_T, needs_entropy=needs_entropy))

    def backward(
        self,
        batch: TokenBatch,
        plan: MicrobatchPlan,
        loss: Loss,
        weights_T: Tensor,
        *,
        needs_entropy: bool = False,
    ) -> Gradients:
        """Computes the gradients of the rows of `plan`, which must have one update.

        The loss is the sum over tokens of ``loss_T * weights_T``; `weights_T` [T] fp64 includes all
        divisors, so the split into micro-batches and ranks does not matter. Entropy is computed
        with `needs_entropy`, and every `train.entropy_every` steps. Weights change only in `apply`.
        """
        (ranks,) = plan.rows
        every = self.train.entropy_every
        entropy = needs_entropy or (every > 0 and self.scheduler.step % every == 0)
        if not trained_tokens(batch, plan).any():
            return Gradients(self._no_outputs(batch), None)
        self.memory.onload_gradients()
        zero_grad(self.model, self.optimizer)
        sums = LossSums(loss, weights_T)
        rows = [*chain.from_iterable(chain.from_iterable(ranks))]
        outputs = self._run(batch, ranks, sums, entropy=entropy)
        return Gradients(outputs, sums, batch.lengths_N[rows].tolist())

    def apply(self, gradients: Gradients) -> UpdateReport:
        """Takes the optimizer step.

        It is skipped if a gradient is not finite, or if no token is trained: otherwise Adam's
        momentum alone would change the weights.
        """
        lr = self.scheduler.lr
        sums = gradients.sums
        if sums is None:
            return UpdateReport(math.nan, math.nan, lr, skipped=True)  # nothing is measured
        self.memory.onload_optimizer()
        grad_norm, skipped = take_step(
            self.optimizer, lr=lr, clip_grad=self.train.clip_grad, device=self.device
        )
        self.emulation.after_update()
        totals = global_sums(sums.totals, counts=self._owns_outputs)
        value = totals.pop("loss")
        count = totals.pop("count")
        metrics = {name: total / max(count, 1.0) for name, total in totals.items()}
        if self.router_losses:
            metrics |= global_sums(self.router_losses.finish(step=not skipped), counts=True)
        metrics |= gradients.outputs.metrics
        lengths = gradients.lengths
        is_partial = self.adapters is not None
        flops = update_flops(self.shape, lengths, outputs=self.head.outputs, is_partial=is_partial)
        return UpdateReport(value, grad_norm, lr, skipped, metrics, sum(lengths), flops, self._peak)

    @cached_property
    def _peak(self) -> float:  # FLOP/s
        dtype = "fp8" if self.precision.fp8 else self.train.dtype
        return peak_flops(gpu_name(self.device), dtype) * self.layout.world

    def finish_batch(self) -> None:
        """Advances the learning-rate schedule after the updates of one batch.

        A checkpoint may be saved afterwards.
        """
        self.scheduler.step += 1
        self.memory.onload_optimizer()

    def microbatches(self, batch: TokenBatch) -> list[Microbatch]:
        """Returns this rank's micro-batches of the whole batch, for a forward pass."""
        return self._pack(batch, self._rows(batch)[self.layout.dp.rank])

    def _rows(self, batch: TokenBatch) -> RowsByRank:
        """Returns the rows of each micro-batch of each data-parallel rank, for a forward pass."""
        train = self.train
        (ranks,) = plan_rows(
            batch.lengths_N.tolist(),
            dp=self.layout.dp.size,
            updates=1,
            max_tokens=train.max_tokens_per_logprob_batch or train.max_tokens_per_microbatch,
            multiple=microbatch_multiple(self.layout),
        )
        return ranks

    @property
    def follows_choices(self) -> bool:
        """True if forward passes can follow a batch's choices, that is, if routers can replay."""
        return bool(self.router_replay.chunks)

    @property
    def shares_prefixes(self) -> bool:
        use_te = self.model[0].config.transformer_impl == "transformer_engine"
        return shares_prefixes(self.shape, self.layout, use_te=use_te)

    def _pack(
        self, batch: TokenBatch, rows: Sequence[Sequence[int]], *, share: bool = False
    ) -> list[Microbatch]:
        """Packs this rank's micro-batches, with equal length where Megatron requires it."""
        multiple = MULTIPLES[self.precision.recipe]
        pack_rows = partial(
            pack,
            batch,
            is_read_T=self.head.positions(batch),
            tensor=self.layout.tp.size * multiple,  # the number of tokens is a multiple of this
            context=self.layout.cp,
            device=self.device,
            share=share,
        )
        microbatches = [pack_rows(part) for part in rows]
        if self.model[0].config.variable_seq_lengths:
            return microbatches
        longest = torch.tensor(max(x.length for x in microbatches), device=self.device)
        dist.all_reduce(longest, dist.ReduceOp.MAX)
        return [pack_rows(part, length=int(longest)) for part in rows]

    def _run(
        self,
        batch: TokenBatch,
        ranks: RowsByRank,
        sums: LossSums | None = None,
        *,
        entropy: bool = False,
        top_k: int = 0,
        record: bool = False,
    ) -> TokenOutputs:
        """Runs this rank's micro-batches forward, and with `sums` also backward.

        Returns outputs for the whole batch, 0 in the rows of other ranks.
        """
        train = sums is not None
        outputs = self._no_outputs(batch, top_k)
        rows = ranks[self.layout.dp.rank]
        microbatches = self._pack(batch, rows, share=train and self.shares_prefixes)

        def on_outputs(rows: MicrobatchRows, read: TokenOutputs) -> Tensor:
            if self._owns_outputs:
                index = to_device(rows.index, self.device)
                for name, output in outputs.tensors().items():
                    output[index] = getattr(read, name).detach()
            if sums is None:
                return torch.zeros((), device=self.device)
            return sums(rows, read)

        if sums and self.router_losses:
            self.router_losses.begin(microbatches, sums.weights_T, self.device)
        if self.adapters:
            self.adapters.trains = train
        replay = self.router_replay
        with replay.over(batch, ranks, microbatches, train=train, record=record) as found:
            forward_backward(
                self.model,
                microbatches,
                self.head,
                HeadOptions(self.groups, batch.temperature, entropy, top_k),
                on_outputs,
                train=train,
            )
        return replace(outputs, choices=found.choices, metrics=found.metrics)

    def _no_outputs(self, batch: TokenBatch, top_k: int = 0) -> TokenOutputs:
        """Returns outputs of zeros for the whole batch."""
        zeros_TK = torch.zeros(batch.num_tokens, top_k, device=self.device)
        outputs = {name: zeros_TK.new_zeros(batch.num_tokens) for name in self.head.fields}
        if top_k:
            outputs |= {"extra_labels_TK": zeros_TK.long(), "extra_logprobs_TK": zeros_TK}
        return replace(TokenOutputs(), **outputs)

    def gathered(self, outputs: TokenOutputs) -> TokenOutputs:
        """Sums outputs over ranks, which have different rows; returns them on every rank's CPU."""
        tensors = outputs.tensors()
        for output in tensors.values():
            dist.all_reduce(output)
        return replace(outputs, **{name: output.cpu() for name, output in tensors.items()})

    @property
    def _owns_outputs(self) -> bool:
        """True on one rank of each tensor and context group of the last stage."""
        return self.layout.pp.last and self.layout.tp.first and self.layout.cp.first


def _build_model(
    shape: ModelShape,
    layout: Layout,
    train: Train,
    moe: Moe,
    options: dict[str, Any],
    use_te: bool,
) -> tuple[list[GPTModel], HfTensors | None]:
    """Returns this rank's chunks, and the HF tensors that they store if the family has no table."""
    how: Any = {"dtype": DTYPES[train.dtype], "dispatcher": moe.dispatcher, "use_te": use_te}
    bridged = None
    if shape.bridge is None:
        config = transformer_config(shape, layout, **how)
    else:
        bridged = Bridged.of(shape, layout, **how)
        config = bridged.provider
    recompute(config, train.recompute, train.recompute_modules)
    vars(config).update(fusions(config, te_kernels() if use_te else frozenset()) | options)
    if config.deterministic_mode:  # Transformer Engine reads a variable instead
        set_env(NVTE_ALLOW_NONDETERMINISTIC_ALGO=0)
    if bridged is None:
        return build_model(shape, layout, config, use_te=use_te), None
    chunks = bridged.build()
    return chunks, bridged.tensors(chunks)


def _load(
    model: list[GPTModel],
    recorded: HfTensors | None,
    shape: ModelShape,
    layout: Layout,
    head: Head,
    folder: Path,
    *,
    use_te: bool,
) -> tuple[Table | None, HfTensors]:
    """Loads the weights of `folder`, attaches the head, and returns the table and tensors of both.

    Only a Hugging Face folder of a family with a table can contain the head's weights.
    """
    table = None
    tensors = recorded
    if tensors is None:
        rows = padded_vocab(shape.vocab, layout.tp.size)
        spec = "te" if use_te else "local"
        table = head.table(megatron_table(shape, spec=spec, padded_vocab=rows), shape)
        tensors = HfTensors.of(table, shape, layout)
    is_megatron = is_checkpoint(folder)  # written by `megarl convert --to megatron`
    is_head_loaded = table is not None and not is_megatron
    if layout.pp.last and is_head_loaded:
        head.attach(model[-1])
    if is_megatron:
        rank_state.load(model, folder)
    else:
        check_weights(folder, shape, table)
        load_hf(local_tensors(model), tensors.slices, folder)
    if layout.pp.last and not is_head_loaded:
        head.attach(model[-1])
    return table, tensors
