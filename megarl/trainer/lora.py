"""LoRA on Megatron's layers: a hook on each adapted linear layer adds scale * B A x to its output.

    slices of weights and adapters -> parameters lora_A and lora_B of each weight -> hooks

All other parameters are frozen. Tensor ranks exchange only A x, which is `rank` wide (r: rank,
T: tokens, sequence parallel):

    column parallel   A x [T/tp, r] --gather--> [T, r]; B has this rank's rows of the output
    row parallel      A x, over this rank's inputs [T, r] --reduce-scatter--> [T/tp, r]; B is whole
    expert            the dispatcher gathers and reduces: A x and the output may be partial sums

The gradient of an A or B that is replicated over tensor ranks is a partial sum. Megatron sums it
over tensor ranks if the parameter is marked as sequence parallel; for experts, `reduce_gradients`
sums it over the expert tensor ranks.
"""

import hashlib
import math
from collections import UserDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    get_cuda_rng_tracker,
    reduce_scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from torch import Tensor
from torch.nn import Parameter
from torch.nn.functional import dropout, linear, rms_norm

from megarl.checkpoint.hf_folder import HfFolder
from megarl.config.schema import Lora
from megarl.layout import Layout
from megarl.models.lora import adapter_names, adapter_table, peft_config, rows_of_outputs
from megarl.models.shape import ModelShape
from megarl.models.shards import Slices, Table, by_prefix, slices_of
from megarl.trainer.model import HfTensors, local_tensors
from megarl.trainer.parallel_groups import ProcessGroups
from megarl.weights.sync.execute import strided_view


@dataclass(frozen=True)
class LayerAdapter:
    """The adapters of one weight: `a` [n r, in] and `b` [rows, r] of its n fused projections."""

    a: Parameter
    b: Parameter
    rows: Tensor  # [rows] int64: the row of the weight that each row of `b` adapts
    numbers: Tensor  # [rows] int64: index of each row's projection
    outputs: int  # number of rows of the weight
    scale: float
    exchange: Callable[[Tensor], Tensor]  # moves A x between the tensor ranks

    def wide(self) -> Tensor:
        """Returns B as [out, n r], with a row for each row of the weight.

        A row is 0 in the columns of other projections.
        """
        rank = self.b.shape[1]
        if len(self.a) == rank and len(self.b) == self.outputs:
            return self.b
        zeros = self.b.new_zeros(self.outputs, len(self.a) // rank, rank)
        return zeros.index_put((self.rows, self.numbers), self.b).flatten(1)

    def product(self, x: Tensor) -> Tensor:
        return self.scale * linear(self.exchange(linear(x, self.a)), self.wide())

    @torch.no_grad()
    def merged(self, weight: Tensor) -> Tensor:
        """Returns weight + scale * B A, rounded once."""
        merged = weight.float().addmm(self.wide().float(), self.a.float(), alpha=self.scale)
        return merged.to(weight.dtype)


class Adapters:
    """The adapters of this rank's chunks; `parameters` and `tensors` use models/lora.py's names."""

    def __init__(
        self,
        chunks: Sequence[Any],  # GPTModel
        base: Table,
        shape: ModelShape,
        layout: Layout,
        lora: Lora,
        *,
        groups: ProcessGroups,
        seed: int,
    ) -> None:
        """Freezes the model and attaches the adapters.

        Raises ValueError if the targets or the tensors of `lora.path` do not fit the model.
        """
        self.lora = lora
        self.is_on = True
        self.trains = False
        self.table = adapter_table(base, lora.targets, lora.rank)
        self.tensors = HfTensors.of(self.table, shape, layout)
        self.layers: dict[str, LayerAdapter] = {}  # name of a weight -> its adapters
        self.parameters: dict[str, Parameter] = {}
        self._layout = layout
        self._groups = groups
        # parameters whose gradients are summed over the tensor ranks of experts
        self._partial = []
        for chunk in chunks:
            for weight in chunk.requires_grad_(False).parameters():
                if weight.device.type == "cpu":
                    # copied, because a storage that numpy read cannot be resized (offload.py)
                    weight.data = weight.data.clone()
            if chunk.pre_process and chunk.config.recompute_granularity:
                # a recomputed layer computes gradients only if its input requires them
                chunk.embedding.register_forward_hook(
                    lambda _module, _inputs, hidden: hidden.requires_grad_()
                )
        self._attach(chunks, slices_of(base, shape, layout))
        self._fill(seed)

    @contextmanager
    def off(self) -> Iterator[None]:
        """Context: turns the adapters off, which leaves the base model."""
        self.is_on = False
        try:
            yield
        finally:
            self.is_on = True

    def reduce_gradients(self) -> None:
        """Sums the gradients of experts' replicated adapters over the expert tensor ranks.

        Call it after Megatron's own reductions.
        """
        group = self._groups.expert_tensor
        if group.size() > 1:
            for parameter in self._partial:
                dist.all_reduce(parameter.main_grad, group=group)

    def peft_config(self, base: str) -> dict[str, Any]:
        """Returns PEFT's adapter_config.json; `base` is the name of the adapted model."""
        lora = self.lora
        return peft_config(
            base,
            self.table,
            rank=lora.rank,
            alpha=lora.alpha,
            dropout=lora.dropout,
        )

    def _attach(self, chunks: Sequence[Any], base: Slices) -> None:
        """Registers the adapters' parameters, and forward hooks that add their products."""
        shapes = self.tensors.shapes
        by_param = defaultdict(list)
        for part in (*base, *self.tensors.slices):
            by_param[part.param].append(part)
        for prefix, chunk in by_prefix(chunks).items():
            chunk.stored_parts = []  # saved in a checkpoint instead of the model's parameters
            hooked = defaultdict(list)
            for local_name, weight in local_tensors([chunk]).items():
                name = prefix + local_name
                module = chunk.get_submodule(local_name.rpartition(".")[0])
                names = adapter_names(name)
                if names[0] not in by_param:
                    continue
                of_a, of_b = (by_param[param] for param in names)
                is_expert = ".experts." in name
                is_row = of_a[0].shape[1] < shapes[of_a[0].name][1]
                is_column = of_b[0].shape[0] < shapes[of_b[0].name][0]
                exchange = torch.nn.Identity()
                if is_row and not is_expert:
                    exchange = reduce_scatter_to_sequence_parallel_region
                elif is_column and not is_expert:
                    exchange = gather_from_sequence_parallel_region
                layer = self._layer(weight, by_param[name], of_a, of_b, exchange)
                self.layers[name] = layer
                hooked[module].append(layer)
                for param, x, is_split in (
                    (names[0], layer.a, is_row),
                    (names[1], layer.b, is_column),
                ):
                    replica = self._mark(x, weight, is_split=is_split, is_expert=is_expert)
                    self.parameters[param] = x
                    module.register_parameter(param.rpartition(".")[2], x)
                    for part in by_param[param]:
                        chunk.stored_parts.append((x, part, shapes[part.name], replica))
            for module, layers in hooked.items():
                module.register_forward_hook(self._hook(layers))

    def _layer(
        self,
        weight: Tensor,
        of_weight: Slices,
        of_a: Slices,
        of_b: Slices,
        exchange: Callable[[Tensor], Tensor],
    ) -> LayerAdapter:
        """Builds the adapters of a weight: B is 0, A not yet initialised."""
        rank = self.lora.rank
        b = weight.new_zeros(sum(part.shape[0] for part in of_b), rank)
        rows, numbers = torch.empty(2, len(b), dtype=torch.int64)
        for row, first, count, number in rows_of_outputs(of_weight, of_a, of_b, rank):
            rows[first : first + count] = torch.arange(row, row + count)
            numbers[first : first + count] = number
        return LayerAdapter(
            Parameter(weight.new_empty(len(of_a) * rank, of_a[0].shape[1])),
            Parameter(b),
            rows.to(weight.device),
            numbers.to(weight.device),
            len(weight),
            self.lora.alpha / rank,
            exchange,
        )

    def _mark(
        self,
        marks: Any,
        weight: Tensor,
        *,
        is_split: bool,
        is_expert: bool,
    ) -> int:
        """Sets Megatron's attributes on an A or B; returns the index of this rank's replica."""
        tensor = self._layout.etp if is_expert else self._layout.tp
        replica = 0 if is_split else tensor.rank
        set_tensor_model_parallel_attributes(marks, True, 0, 1)
        marks.shared = replica > 0  # the gradient norm skips it
        marks.sequence_parallel = not is_split and not is_expert and tensor.size > 1
        marks.allreduce = getattr(weight, "allreduce", True)
        if is_expert and not is_split:
            self._partial.append(marks)
        return replica

    def _hook(self, layers: Sequence[LayerAdapter]) -> Callable[..., Any]:
        def add(module: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor | None]) -> Any:
            if not self.is_on:
                return output
            x = inputs[0]
            norm = getattr(module, "layer_norm_weight", None)
            if norm is not None:  # Transformer Engine's fused norm
                x = rms_norm(x.float(), norm.shape, eps=module.eps).to(x.dtype) * norm
            if self.trains and self.lora.dropout:
                tracker: Any = get_cuda_rng_tracker()
                with tracker.fork():
                    x = dropout(x, self.lora.dropout)
            if len(layers) == 1:
                product = layers[0].product(x)
            else:  # grouped experts; inputs[1] has their numbers of tokens
                parts = zip(layers, x.split(list(inputs[1])), strict=True)
                product = torch.cat([layer.product(part) for layer, part in parts])
            return output[0] + product, *output[1:]

        return add

    @torch.no_grad()
    def _fill(self, seed: int) -> None:
        """Loads A and B from `lora.path` if it is set, otherwise initialises A.

        As in PEFT, A is uniform and B is 0. A is the same in every layout.
        """
        if self.lora.path is not None:
            folder = HfFolder(Path(self.lora.path))
            folder.check(self.tensors.shapes)
            for part in self.tensors.slices:
                folder.copy(part, self.parameters[part.param])
            return
        for part in self.tensors.slices:
            if ".lora_A." not in part.name:
                continue
            shape = self.tensors.shapes[part.name]
            digest = hashlib.sha256(f"{seed} {part.name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
            uniform = torch.rand(shape, generator=generator, device="cpu") * 2 - 1
            whole = (uniform / math.sqrt(shape[1])).narrow(1, part.start[1], part.shape[1])
            strided_view(self.parameters[part.param], part).copy_(whole)


class Merged(UserDict[str, Tensor]):
    """This rank's weights, each merged with its adapters when read; the originals do not change."""

    def __init__(self, weights: Mapping[str, Tensor], layers: Mapping[str, LayerAdapter]) -> None:
        super().__init__(weights)
        self._layers = layers
        self._last = {}

    def __getitem__(self, name: str) -> Tensor:
        weight = self.data[name]
        if name not in self._layers:
            return weight
        if name not in self._last:
            self._last.clear()  # free the previous weight first
            self._last[name] = self._layers[name].merged(weight)
        return self._last[name]
