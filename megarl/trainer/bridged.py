"""A family without a table: Megatron-Bridge builds its model, and its conversion, driven once, is the table.

    folder --AutoBridge--> provider, under our settings --provide--> chunks of the pipeline, as build.py's
    chunks, names and shapes of the checkpoint --hf_to_megatron on index tensors--> slices of this rank

Beyond the slices everything is as with a table: weights are loaded, synced and exported slice by slice. Recording moves
no weight; it makes a few copies, of 8 bytes per element, of one HF tensor at a time.
On a GPU the layers are Bridge's, of Transformer Engine. On a CPU, where Bridge itself asks for it (so in tests, with a
stand-in), plain families get the layers of layers.py, whose names Bridge's registries do not all know.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from torch import Tensor

from megarl.layout import Axis, Layout, stage_layers
from megarl.models.registry import fp32_tensors, hf_shapes, padded_vocab
from megarl.models.shape import ModelShape
from megarl.models.shards import ShardSlice
from megarl.trainer.layers import block_spec
from megarl.trainer.megatron_config import Dispatcher, router_settings, run_settings
from megarl.trainer.model import local_tensors, patch_chunk
from megarl.weights.index_tensors import REMEDY, IndexTensors, slices_from_indices

__all__ = ["Bridged", "record"]

PLAIN = {"normalization": "RMSNorm", "layernorm_zero_centered_gamma": False, "window_size": None}  # on a CPU
FUSED = {  # local name -> Transformer Engine's, where a norm is part of the linear behind it
    ".input_layernorm.": ".self_attention.linear_qkv.layer_norm_",
    ".pre_mlp_layernorm.": ".mlp.linear_fc1.layer_norm_",
    ".self_attention.q_layernorm.": ".self_attention.linear_q_up_proj.layer_norm_",
    ".self_attention.kv_layernorm.": ".self_attention.linear_kv_up_proj.layer_norm_",
}
EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"


@dataclass(frozen=True)
class Bridged:
    """What Megatron-Bridge knows of one family, laid out for this rank."""

    shape: ModelShape
    layout: Layout
    provider: Any  # a TransformerConfig that can also provide() a GPTModel; recomputation is still to be set on it
    bridge: Any  # MegatronModelBridge

    @classmethod
    def of(
        cls, shape: ModelShape, layout: Layout, *, dtype: torch.dtype, dispatcher: Dispatcher, use_te: bool
    ) -> Bridged:
        """Raises ValueError when Bridge does not know the family, or builds something the trainer cannot train."""
        assert shape.bridge is not None
        logging.getLogger("megatron.bridge").setLevel(logging.ERROR)
        try:
            from megatron.bridge import AutoBridge  # pyright: ignore[reportMissingImports]
            from megatron.bridge.models.conversion.param_mapping import (  # pyright: ignore[reportMissingImports]
                AutoMapping,
            )
        except ImportError as error:
            raise ValueError(
                f"model_type={shape.family!r} has no table, and Megatron-Bridge, though installed, cannot be imported: "
                f"{error}; mend the installation, or add a table (CONTRIBUTING.md, 'Adding a model family')"
            ) from error

        if not AutoBridge.can_handle(str(shape.bridge)):
            raise ValueError(
                f"{shape.bridge}: model_type={shape.family!r} has no table, and Megatron-Bridge does not know it "
                "either (without remote code); add a table (CONTRIBUTING.md, 'Adding a model family')"
            )
        for module in ("BalancedRouter", "_Whole"):  # of our layers
            AutoMapping.register_module_type(module, "replicated")
        auto = AutoBridge.from_hf_pretrained(str(shape.bridge))
        provider = auto.to_megatron_provider(load_weights=False)
        for name, value in _settings(provider, shape, layout, dtype=dtype, dispatcher=dispatcher, use_te=use_te):
            setattr(provider, name, value)
        if not use_te:
            _take_local_layers(provider, shape, layout)
        provider.finalize()
        return cls(shape, layout, provider, auto._model_bridge)

    def build(self) -> list[GPTModel]:
        """This rank's chunks of the pipeline, parameters not yet loaded."""
        count = self.layout.vpp.size
        return [self._chunk(number, number if count > 1 else None, number == count - 1) for number in range(count)]

    def _chunk(self, number: int, vp_stage: int | None, is_last_chunk: bool) -> GPTModel:
        last = self.layout.pp.last and is_last_chunk
        model = self.provider.provide(
            pre_process=self.layout.pp.first and number == 0, post_process=last, vp_stage=vp_stage
        )
        if not isinstance(model, GPTModel):
            raise ValueError(f"{self.shape.family}: Megatron-Bridge builds a {type(model).__name__}, not a GPTModel")
        patch_chunk(model, self.layout, last=last)
        return model

    def slices_by_rank(self, chunks: Sequence[GPTModel]) -> list[list[ShardSlice]]:
        """[rank] -> where that rank's parameters hold HF tensors; every rank must call."""
        slices = record(chunks, self.bridge, hf_shapes(self.shape), self.layout.ep)
        _refuse_other_dtypes(slices, local_tensors(chunks), fp32_tensors(self.shape), self.provider.params_dtype)
        found: list[list[ShardSlice]] = [[]] * dist.get_world_size()
        dist.all_gather_object(found, slices)
        return found


def _settings(provider: Any, shape: ModelShape, layout: Layout, **how: Any) -> Iterator[tuple[str, Any]]:
    """Ours over Bridge's: the layout, the numerics, no draws, no multi-token prediction, one head."""
    run = run_settings(shape.layers, layout, **how)
    if how["use_te"]:
        del run["bias_activation_fusion"]  # which activation has a fused kernel is the family's
    yield from run.items()
    if provider.num_moe_experts:
        yield from router_settings(use_te=how["use_te"]).items()
    yield from {
        "fp16": False,
        "vocab_size": padded_vocab(shape.vocab, layout.tp.size),
        "should_pad_vocab": False,
        "mtp_num_layers": None,
        "moe_z_loss_coeff": None,
        "moe_permute_fusion": False,
        "moe_shared_expert_overlap": False,
        "apply_rope_fusion": False,
        "deallocate_pipeline_outputs": False,
        "fp8": None,
    }.items()


def _take_local_layers(provider: Any, shape: ModelShape, layout: Layout) -> None:
    from megatron.bridge.models.gpt_provider import default_layer_spec  # pyright: ignore[reportMissingImports]

    spec = provider.transformer_layer_spec
    odd = {name: getattr(provider, name) for name, value in PLAIN.items() if getattr(provider, name) != value}
    if odd or getattr(spec, "func", spec) not in (default_layer_spec, get_gpt_decoder_block_spec):
        what = ", ".join(f"{name}={value}" for name, value in odd.items()) or "layers of its own"
        raise ValueError(f"{shape.family} has {what}, which only Transformer Engine's layers do: train it on GPUs")
    chunks = stage_layers(shape.layers, layout)

    def layers_of_chunk(config: Any, vp_stage: int | None = None) -> Any:
        return block_spec(config, [_is_moe(config, layer) for layer in chunks[vp_stage or 0]], use_te=False)

    provider.transformer_layer_spec = layers_of_chunk


def _is_moe(config: Any, layer: int) -> bool:
    every = config.moe_layer_freq
    return bool(config.num_moe_experts) and bool(every[layer] if isinstance(every, list) else layer % every == 0)


def _refuse_other_dtypes(
    slices: Sequence[ShardSlice], held: Mapping[str, Tensor], fp32: frozenset[str], dtype: torch.dtype
) -> None:
    for part in slices:
        expected = torch.float32 if part.name in fp32 else dtype
        if held[part.param].dtype != expected:
            raise ValueError(
                f"{part.param}, which holds {part.name}, is {held[part.param].dtype} in Megatron-Core, not {expected}; "
                f"{REMEDY}"
            )


@torch.no_grad()
def record(
    chunks: Sequence[GPTModel], bridge: Any, shapes: Mapping[str, tuple[int, ...]], experts: Axis
) -> list[ShardSlice]:
    """Where `chunks` hold the tensors of `shapes`, by Bridge's conversion. Ranks that share tensors call together.

    `experts`: this rank among those that split the experts.
    Raises ValueError, naming tensor and parameter, for whatever is not a placement.
    """
    registry, found = bridge.mapping_registry(), []
    for number, chunk in enumerate(chunks):
        prefix = f"chunk{number}." if len(chunks) > 1 else ""
        for name, tensor in local_tensors([chunk]).items():
            mapping = _mapping(registry, chunk, _global(name, chunk, experts), shapes)
            if mapping is None:
                raise ValueError(
                    f"Megatron-Bridge says of no tensor of the checkpoint that it lies in {name}; is its config.json "
                    "another model's?"
                )
            slices = _record_one(name, tensor, chunk, bridge, mapping, shapes)
            found += [replace(part, param=prefix + name) for part in slices]
    return found


def _record_one(
    name: str, tensor: Tensor, chunk: GPTModel, bridge: Any, mapping: Any, shapes: Mapping[str, tuple[int, ...]]
) -> list[ShardSlice]:
    module = chunk.get_submodule(name.rpartition(".")[0])
    if not hasattr(module, "config"):
        module.config = chunk.config  # pyright: ignore[reportArgumentType]  # Bridge looks for it there
    indices, landed = IndexTensors(shapes, tensor.device), []
    is_vocabulary = name in (EMBEDDING, OUTPUT)
    with _in_fp64([tensor, *module.parameters(recurse=False)]):
        for indices.is_second in (False, True):
            try:
                weights = bridge.maybe_modify_loaded_hf_weight(mapping.hf_param, indices)
            except KeyError as error:
                raise ValueError(
                    f"{name}: the checkpoint has no tensor {error}; is its config.json another model's?"
                ) from None
            landed.append(_filled(mapping.hf_to_megatron(weights, module), tensor, padded=is_vocabulary))
            if landed[-1].shape != tensor.shape:
                raise ValueError(
                    f"{name} is {tuple(tensor.shape)}, Megatron-Bridge makes {tuple(landed[-1].shape)} of "
                    f"{' and '.join(indices.first)}; is its config.json another model's?"
                )
    first, second = landed
    return slices_from_indices(name, first, second, indices, padded=is_vocabulary)


@contextmanager
def _in_fp64(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Bridge casts to a parameter's dtype, or its neighbour's, and reads no more of it than that and the shape."""
    kept = [(tensor, tensor.data) for tensor in tensors]
    try:
        for tensor, data in kept:
            tensor.data = torch.empty((), dtype=torch.float64, device=data.device).expand(data.shape)
        yield
    finally:
        for tensor, data in kept:
            tensor.data = data


def _filled(landed: Tensor, like: Tensor, *, padded: bool) -> Tensor:
    """A vocabulary comes without its padding where nothing is split."""
    if padded and landed.shape[1:] == like.shape[1:] and len(landed) < len(like):
        landed = torch.cat([landed, landed.new_zeros(len(like) - len(landed), *like.shape[1:])])
    return landed


def _mapping(registry: Any, model: GPTModel, name: str, shapes: Mapping[str, tuple[int, ...]]) -> Any:
    """Bridge's rule for the parameter that it calls `name`, or that it would under Transformer Engine; None: it has
    none. A tied output layer, the last stage's copy, holds what the embedding does."""
    names = [EMBEDDING] if name == OUTPUT and model.share_embeddings_and_output_weights else [name, _under_te(name)]
    for known in names:
        rule = registry.megatron_to_hf_lookup(known)
        if rule is None:
            continue
        tensors = rule.hf_param.values() if isinstance(rule.hf_param, dict) else [rule.hf_param]
        if rule.allow_hf_name_mismatch or all(tensor in shapes for tensor in tensors):
            rule = copy(rule)
            rule.megatron_param = name
            return rule
    return None


def _global(name: str, chunk: GPTModel, experts: Axis) -> str:
    """A parameter's name with the layer and the expert counted over all ranks, as Bridge calls it."""
    if layer := re.match(r"decoder\.layers\.(\d+)\.", name):
        here: Any = chunk.decoder.layers[int(layer[1])]
        name = f"decoder.layers.{here.layer_number - 1}.{name[layer.end() :]}"
    if (expert := re.search(r"\.experts\.(?:local_experts\.|linear_fc\d\.[a-z]+)(\d+)", name)) and experts.size > 1:
        first = experts.rank * (chunk.config.num_moe_experts or 0) // experts.size
        name = f"{name[: expert.start(1)]}{first + int(expert[1])}{name[expert.end(1) :]}"
    return name


def _under_te(name: str) -> str:
    """What Transformer Engine's layers call a parameter of Megatron's local ones."""
    name = re.sub(r"\.local_experts\.(\d+)\.(linear_fc\d\.[a-z]+)$", r".\2\1", name)
    for ours, theirs in FUSED.items():
        name = name.replace(ours, theirs)
    return name
