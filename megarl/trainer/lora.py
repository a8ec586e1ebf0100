"""LoRA on Megatron's layers: a hook on each adapted linear layer adds scale * B A x to its output.

    slices of weights and adapters -> parameters lora_A, lora_B beside each weight, all others frozen -> hooks

The inner product A x is `rank` wide, and it is what tensor ranks exchange (r: rank, T: tokens, sequence parallel):

    column parallel   A x [T/tp, r] --gather--> [T, r]            B has this rank's rows of the output
    row parallel      A x, over this rank's inputs [T, r] --reduce-scatter--> [T/tp, r]            B is whole
    expert            the dispatcher gathers and reduces: A x and the layer's output may both be partial sums

The gradient of an A or B that is whole on every tensor rank is a partial sum: Megatron adds it up over tensor ranks if
the parameter is marked as sequence parallel, and `reduce_gradients` over those of the experts.
"""

from __future__ import annotations

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
from torch.nn.functional import dropout, linear, rms_norm

from megarl.checkpoint.hf_folder import HfFolder
from megarl.config.section import Lora
from megarl.layout import Layout
from megarl.models.lora import adapter_names, adapter_table, peft_config, rows_of_outputs
from megarl.models.shape import ModelShape
from megarl.models.shards import ShardSlice, Table, shapes_of, slices_of
from megarl.trainer.model import by_prefix, local_tensors
from megarl.trainer.parallel_groups import ProcessGroups
from megarl.weights.execute import strided_view


@dataclass(frozen=True, eq=False)
class LayerAdapter:
    """The adapters of one weight: `a` [n r, in] and `b` [rows, r] of the n projections that it fuses."""

    a: torch.nn.Parameter
    b: torch.nn.Parameter
    rows: Tensor  # [rows] int64: where each row of `b` is in the weight
    numbers: Tensor  # [rows] int64: of its projection
    outputs: int  # of the weight
    scale: float
    exchange: Callable[[Tensor], Tensor]  # of A x over the tensor ranks

    def wide(self) -> Tensor:
        """Returns [out, n r]: each row of B at its place in the weight, with zeros for the As of other projections."""
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
        return (
            weight.float()
            .addmm(self.wide().float(), self.a.float(), alpha=self.scale)
            .to(weight.dtype)
        )


class Adapters:
    """The adapters of this rank's chunks; `parameters` and `slices` name them as `models.lora` does."""

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
        """Freezes the model and adapts it. Raises ValueError for targets, or a folder, that do not fit the model."""
        self.lora, self.is_on, self.trains = lora, True, False
        self.table = adapter_table(base, lora.targets, lora.rank)
        self.shapes = shapes_of(self.table, shape)
        self.slices = slices_of(self.table, shape, layout)
        self.layers: dict[str, LayerAdapter] = {}  # by the name of the weight
        self.parameters: dict[str, torch.nn.Parameter] = {}
        self._layout, self._groups = layout, groups
        self._partial: list[
            Any
        ] = []  # parameters whose gradients are summed over the tensor ranks of experts
        for weight in (x for chunk in chunks for x in chunk.requires_grad_(False).parameters()):
            if weight.device.type == "cpu":
                weight.data = (
                    weight.data.clone()
                )  # read by numpy, its storage could not be resized (offload.py)
        self._attach(chunks, slices_of(base, shape, layout))
        self._fill(seed)
        for chunk in chunks:
            if chunk.pre_process and chunk.config.recompute_granularity:
                # a recomputed layer has a gradient only if its input does
                chunk.embedding.register_forward_hook(
                    lambda _module, _inputs, hidden: hidden.requires_grad_()
                )

    @contextmanager
    def off(self) -> Iterator[None]:
        """Within this context, the model is the base model."""
        self.is_on = False
        try:
            yield
        finally:
            self.is_on = True

    def reduce_gradients(self) -> None:
        """Call it after Megatron's own reductions."""
        group = self._groups.expert_tensor
        for parameter in self._partial if group.size() > 1 else ():
            dist.all_reduce(parameter.main_grad, group=group)

    def peft_config(self, base: str) -> dict[str, Any]:
        """Returns the adapter_config.json of their PEFT folder; `base` is the model that they belong to."""
        lora = self.lora
        return peft_config(base, self.table, rank=lora.rank, alpha=lora.alpha, dropout=lora.dropout)

    def merged(self, weights: Mapping[str, Tensor]) -> Merged:
        return Merged(weights, self.layers)

    def _attach(self, chunks: Sequence[Any], base: Sequence[ShardSlice]) -> None:
        """Registers the parameters, and the hooks that add their products."""
        by_param: dict[str, list[ShardSlice]] = defaultdict(list)
        for part in (*base, *self.slices):
            by_param[part.param].append(part)
        for prefix, chunk in by_prefix(chunks).items():
            chunk.stored_parts = []  # instead of the model, in a checkpoint
            hooked: dict[Any, list[LayerAdapter]] = defaultdict(list)
            for local_name, weight in local_tensors([chunk]).items():
                name, module = (
                    prefix + local_name,
                    chunk.get_submodule(local_name.rpartition(".")[0]),
                )
                names = adapter_names(name)
                if names[0] not in by_param:
                    continue
                layer, replicas = self._layer(
                    weight, name, *(by_param[each] for each in (name, *names))
                )
                self.layers[name] = layer
                hooked[module].append(layer)
                for param, x, replica in zip(names, (layer.a, layer.b), replicas, strict=True):
                    self.parameters[param] = x
                    module.register_parameter(param.rpartition(".")[2], x)
                    chunk.stored_parts += [
                        (x, part, self.shapes[part.name], replica) for part in by_param[param]
                    ]
            for module, layers in hooked.items():
                module.register_forward_hook(self._hook(layers))

    def _layer(
        self,
        weight: Tensor,
        name: str,
        of_weight: list[ShardSlice],
        of_a: list[ShardSlice],
        of_b: list[ShardSlice],
    ) -> tuple[LayerAdapter, tuple[int, int]]:
        """Returns the adapters of a weight, and for A and B which of their replicas this rank has."""
        rank, is_expert = self.lora.rank, ".experts." in name
        tensor = self._layout.etp if is_expert else self._layout.tp
        is_row = of_a[0].shape[1] < self.shapes[of_a[0].name][1]
        is_column = of_b[0].shape[0] < self.shapes[of_b[0].name][0]
        a = weight.new_empty(len(of_a) * rank, of_a[0].shape[1])
        b = weight.new_zeros(sum(part.shape[0] for part in of_b), rank)
        parameters = torch.nn.Parameter(a), torch.nn.Parameter(b)
        replicas = (0 if is_row else tensor.rank, 0 if is_column else tensor.rank)
        for parameter, is_split, replica in zip(
            parameters, (is_row, is_column), replicas, strict=True
        ):
            marks: Any = parameter
            set_tensor_model_parallel_attributes(parameter, True, 0, 1)
            marks.shared = replica > 0  # the gradient norm leaves it out
            marks.sequence_parallel = not is_split and not is_expert and tensor.size > 1
            marks.allreduce = getattr(weight, "allreduce", True)
            if is_expert and not is_split:
                self._partial.append(parameter)
        rows, numbers = torch.empty(2, len(b), dtype=torch.int64)
        for row, first, count, number in rows_of_outputs(of_weight, of_a, of_b, rank):
            rows[first : first + count] = torch.arange(row, row + count)
            numbers[first : first + count] = number
        exchange: Callable[[Tensor], Tensor] = torch.nn.Identity()
        if not is_expert and (is_row or is_column):
            exchange = (
                reduce_scatter_to_sequence_parallel_region
                if is_row
                else gather_from_sequence_parallel_region
            )
        rows, numbers = rows.to(weight.device), numbers.to(weight.device)
        return LayerAdapter(
            *parameters, rows, numbers, len(weight), self.lora.alpha / rank, exchange
        ), replicas

    def _hook(self, layers: Sequence[LayerAdapter]) -> Callable[..., Any]:
        def add(module: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor | None]) -> Any:
            if not self.is_on:
                return output
            x = inputs[0]
            if (
                norm := getattr(module, "layer_norm_weight", None)
            ) is not None:  # Transformer Engine's fused norm
                x = rms_norm(x.float(), norm.shape, eps=module.eps).to(x.dtype) * norm
            if self.trains and self.lora.dropout:
                tracker: Any = get_cuda_rng_tracker()
                with tracker.fork():
                    x = dropout(x, self.lora.dropout)
            parts = (
                [x] if len(layers) == 1 else x.split(list(inputs[1]))
            )  # grouped experts: their numbers of tokens
            products = [layer.product(part) for layer, part in zip(layers, parts, strict=True)]
            return output[0] + (products[0] if len(layers) == 1 else torch.cat(products)), *output[
                1:
            ]

        return add

    @torch.no_grad()
    def _fill(self, seed: int) -> None:
        """As in PEFT: A is uniform, the same in every layout, and B is 0; or both are read from `lora.path`."""
        folder = None if self.lora.path is None else HfFolder(Path(self.lora.path))
        if folder is not None:
            folder.check(self.shapes)
        for part in self.slices:
            parameter = self.parameters[part.param]
            if folder is not None:
                folder.copy(part, parameter)
            elif ".lora_A." in part.name:
                shape = self.shapes[part.name]
                digest = hashlib.sha256(f"{seed} {part.name}".encode()).digest()
                generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
                whole = (torch.rand(shape, generator=generator, device="cpu") * 2 - 1) / math.sqrt(
                    shape[1]
                )
                strided_view(parameter, part).copy_(whole.narrow(1, part.start[1], part.shape[1]))


class Merged(UserDict[str, Tensor]):
    """This rank's weights with their adapters merged in, one at a time; the weights themselves do not change."""

    def __init__(self, weights: Mapping[str, Tensor], layers: Mapping[str, LayerAdapter]) -> None:
        super().__init__(weights)
        self._layers = layers
        self._last: tuple[str, Tensor] | None = None

    def __getitem__(self, name: str) -> Tensor:
        weight = self.data[name]
        if name not in self._layers:
            return weight
        if self._last is None or self._last[0] != name:
            self._last = None  # freed first
            self._last = name, self._layers[name].merged(weight)
        return self._last[1]
