"""Families without a table: Megatron-Bridge builds the model; its conversion is recorded once and serves as the table.

    folder --AutoBridge--> provider, with megarl's settings --provide--> model chunks, as in model.py
    chunks, names and shapes of the checkpoint --hf_to_megatron on index tensors--> slices of this rank

The slices serve as a table's to load, sync and export weights. Recording makes a few copies of one HF tensor at a time,
at 8 bytes per element. On a GPU, Bridge builds the layers from Transformer Engine. On a CPU, where it still requires it
(tests have a stand-in), plain families use the layers of layers.py; Bridge does not know all their names.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from torch import Tensor

from megarl.layout import Axis, Layout, stage_layers
from megarl.models.registry import fp32_tensors, hf_shapes, padded_vocab
from megarl.models.shape import ModelShape
from megarl.models.shards import ShardSlice
from megarl.trainer.layers import block_spec
from megarl.trainer.megatron_config import Dispatcher, router_settings, run_settings
from megarl.trainer.model import by_prefix, local_tensors, patch_chunk
from megarl.weights.index_tensors import REMEDY, IndexTensors, moved_slices
from megarl.weights.placements import SlicesByRank
from megarl.weights.transports.values import gather_values

PLAIN = {
    "normalization": "RMSNorm",
    "layernorm_zero_centered_gamma": False,
    "window_size": None,
}  # on a CPU
FUSED = {  # local name -> Transformer Engine's, where a norm is fused into the linear layer after it
    ".input_layernorm.": ".self_attention.linear_qkv.layer_norm_",
    ".pre_mlp_layernorm.": ".mlp.linear_fc1.layer_norm_",
    ".self_attention.q_layernorm.": ".self_attention.linear_q_up_proj.layer_norm_",
    ".self_attention.kv_layernorm.": ".self_attention.linear_kv_up_proj.layer_norm_",
}
OFF = (
    "fp16",
    "should_pad_vocab",
    "moe_permute_fusion",
    "moe_shared_expert_overlap",
    "apply_rope_fusion",
)
EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"


@dataclass(frozen=True)
class Bridged:
    """Megatron-Bridge's model and conversion for one family, in this rank's layout."""

    shape: ModelShape
    layout: Layout
    provider: Any  # a TransformerConfig that can also provide() a GPTModel; recomputation is set on it later
    bridge: Any  # MegatronModelBridge

    @classmethod
    def of(
        cls,
        shape: ModelShape,
        layout: Layout,
        *,
        dtype: torch.dtype,
        dispatcher: Dispatcher,
        use_te: bool,
    ) -> Bridged:
        """Raises ValueError if Bridge does not know the family, or if its layers exist only in Transformer Engine."""
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
                f"{error}; install a version of that package which Bridge can use, or add a table (CONTRIBUTING.md, "
                "'Adding a model family')"
            ) from error

        if not AutoBridge.can_handle(str(shape.bridge)):
            raise ValueError(
                f"{shape.bridge}: model_type={shape.family!r} has no table, and Megatron-Bridge does not support "
                "it (without remote code); add a table (CONTRIBUTING.md, 'Adding a model family')"
            )
        for module in ("BalancedRouter", "ReplicatedLinear"):  # modules in layers.py
            AutoMapping.register_module_type(module, "replicated")
        auto = AutoBridge.from_hf_pretrained(str(shape.bridge))
        provider = auto.to_megatron_provider(load_weights=False)
        settings = _settings(
            provider, shape, layout, dtype=dtype, dispatcher=dispatcher, use_te=use_te
        )
        for name, value in settings.items():
            setattr(provider, name, value)
        if not use_te:
            _take_local_layers(provider, shape, layout)
        provider.finalize()
        return cls(shape, layout, provider, auto._model_bridge)

    def build(self) -> list[GPTModel]:
        """Returns this rank's model chunks, with parameters not yet loaded."""
        pp, count, chunks = self.layout.pp, self.layout.vpp.size, []
        for number in range(count):
            first, last = pp.first and number == 0, pp.last and number == count - 1
            vp_stage = number if count > 1 else None
            model = self.provider.provide(pre_process=first, post_process=last, vp_stage=vp_stage)
            if not isinstance(model, GPTModel):
                raise ValueError(
                    f"{self.shape.family}: Megatron-Bridge builds {type(model).__name__}, not GPTModel"
                )
            patch_chunk(model, self.layout, last=last)
            chunks.append(model)
        return chunks

    def slices_by_rank(self, chunks: Sequence[GPTModel]) -> SlicesByRank:
        """Returns, for each rank, the slices of HF tensors that its parameters store. Call it on every rank."""
        slices = record(chunks, self.bridge, hf_shapes(self.shape), self.layout.ep)
        parameters, fp32 = local_tensors(chunks), fp32_tensors(self.shape)
        for part in slices:
            expected = torch.float32 if part.name in fp32 else self.provider.params_dtype
            if (dtype := parameters[part.param].dtype) != expected:
                raise ValueError(
                    f"{part.param}, the parameter of {part.name}, is {dtype} in Megatron-Core, not {expected}; {REMEDY}"
                )
        return gather_values(slices)


def _settings(provider: Any, shape: ModelShape, layout: Layout, **how: Any) -> dict[str, Any]:
    """Returns megarl's settings, which override Bridge's: layout, numerics, no dropout, no multi-token prediction."""
    run = run_settings(shape.layers, layout, **how)
    if how["use_te"]:
        del run[
            "bias_activation_fusion"
        ]  # Bridge knows whether the family's activation has a fused kernel
    return {
        **run,
        **(router_settings(use_te=how["use_te"]) if provider.num_moe_experts else {}),
        "vocab_size": padded_vocab(shape.vocab, layout.tp.size),
        **dict.fromkeys(OFF, False),
        **dict.fromkeys(("mtp_num_layers", "moe_z_loss_coeff", "fp8")),
    }


def _take_local_layers(provider: Any, shape: ModelShape, layout: Layout) -> None:
    from megatron.bridge.models.gpt_provider import default_layer_spec  # pyright: ignore[reportMissingImports]

    spec = provider.transformer_layer_spec
    special = [
        f"{name}={found}"
        for name, plain in PLAIN.items()
        if (found := getattr(provider, name)) != plain
    ]
    if special or getattr(spec, "func", spec) not in (
        default_layer_spec,
        get_gpt_decoder_block_spec,
    ):
        reason = ", ".join(special) or "its own layer spec"
        raise ValueError(
            f"{shape.family} has {reason}, which only Transformer Engine supports: train it on GPUs"
        )
    chunks = stage_layers(shape.layers, layout)

    def layers_of_chunk(config: Any, vp_stage: int | None = None) -> Any:
        return block_spec(
            config, [_is_moe(config, layer) for layer in chunks[vp_stage or 0]], use_te=False
        )

    provider.transformer_layer_spec = layers_of_chunk


def _is_moe(config: Any, layer: int) -> bool:
    every = config.moe_layer_freq
    return bool(config.num_moe_experts) and bool(
        every[layer] if isinstance(every, list) else layer % every == 0
    )


@torch.no_grad()
def record(
    chunks: Sequence[GPTModel], bridge: Any, shapes: Mapping[str, tuple[int, ...]], experts: Axis
) -> list[ShardSlice]:
    """Returns the slices of the tensors in `shapes` that `chunks` store, according to Bridge's conversion. Experts are
    split over the axis `experts`. Call it on every rank that shares tensors. Raises ValueError naming tensor and
    parameter if the conversion does more than copy elements."""
    registry, slices = bridge.mapping_registry(), []
    for prefix, chunk in by_prefix(chunks).items():
        for name, tensor in local_tensors([chunk]).items():
            mapping = _mapping(registry, chunk, _global(name, chunk, experts), shapes)
            if mapping is None:
                raise ValueError(
                    f"Megatron-Bridge maps no tensor of the checkpoint to {name}; is config.json from another model?"
                )
            (first, second), indices = _convert(name, tensor, chunk, bridge, mapping, shapes)
            slices += moved_slices(
                prefix + name, first, second, indices, padded=name in (EMBEDDING, OUTPUT)
            )
    return slices


def _convert(
    name: str,
    tensor: Tensor,
    chunk: GPTModel,
    bridge: Any,
    mapping: Any,
    shapes: Mapping[str, tuple[int, ...]],
) -> tuple[list[Tensor], IndexTensors]:
    """Returns Bridge's parameter from index tensors, twice, and these tensors."""
    module = chunk.get_submodule(name.rpartition(".")[0])
    if not hasattr(module, "config"):
        module.config = chunk.config  # pyright: ignore[reportArgumentType]  # Bridge looks for it there
    indices, converted = IndexTensors(shapes, tensor.device), []
    is_vocabulary = name in (EMBEDDING, OUTPUT)
    with _in_fp64([tensor, *module.parameters(recurse=False)]):
        for indices.is_second in (False, True):
            try:
                weights = bridge.maybe_modify_loaded_hf_weight(mapping.hf_param, indices)
            except KeyError as error:
                raise ValueError(
                    f"{name}: the checkpoint has no tensor {error}; is config.json from another model?"
                ) from None
            index = mapping.hf_to_megatron(weights, module)
            num_missing = len(tensor) - len(index) if is_vocabulary else 0
            if (
                num_missing > 0 and index.shape[1:] == tensor.shape[1:]
            ):  # an unsplit tensor comes without padding
                index = torch.cat([index, index.new_zeros(num_missing, *tensor.shape[1:])])
            if index.shape != tensor.shape:
                raise ValueError(
                    f"{name} has shape {tuple(tensor.shape)}, but Megatron-Bridge gives it {tuple(index.shape)} from "
                    f"{' and '.join(indices.first)}; is config.json from another model?"
                )
            converted.append(index)
    return converted, indices


@contextmanager
def _in_fp64(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Make these tensors fp64 within the context: Bridge casts to their dtype, and reads only their dtype and shape."""
    originals = [(tensor, tensor.data) for tensor in tensors]
    try:
        for tensor, data in originals:
            tensor.data = torch.empty((), dtype=torch.float64, device=data.device).expand(
                data.shape
            )
        yield
    finally:
        for tensor, data in originals:
            tensor.data = data


def _mapping(
    registry: Any, model: GPTModel, name: str, shapes: Mapping[str, tuple[int, ...]]
) -> Any:
    """Bridge's rule for the parameter `name`, or for its name under Transformer Engine; None if there is none. A tied
    output layer, on the last stage, is a copy of the embedding."""
    names = (
        [EMBEDDING]
        if name == OUTPUT and model.share_embeddings_and_output_weights
        else [name, _under_te(name)]
    )
    for megatron_name in names:
        if (rule := registry.megatron_to_hf_lookup(megatron_name)) is None:
            continue
        tensors = rule.hf_param.values() if isinstance(rule.hf_param, dict) else [rule.hf_param]
        if rule.allow_hf_name_mismatch or all(tensor in shapes for tensor in tensors):
            rule = copy(rule)
            rule.megatron_param = name
            return rule
    return None


def _global(name: str, chunk: GPTModel, experts: Axis) -> str:
    """A parameter's name in Bridge, with global layer and expert indices."""
    if layer := re.match(r"decoder\.layers\.(\d+)\.", name):
        module: Any = chunk.decoder.layers[int(layer[1])]
        name = f"decoder.layers.{module.layer_number - 1}.{name[layer.end() :]}"
    if (
        expert := re.search(r"\.experts\.(?:local_experts\.|linear_fc\d\.[a-z]+)(\d+)", name)
    ) and experts.size > 1:
        first = experts.rank * (chunk.config.num_moe_experts or 0) // experts.size
        name = f"{name[: expert.start(1)]}{first + int(expert[1])}{name[expert.end(1) :]}"
    return name


def _under_te(name: str) -> str:
    """Maps the name of a parameter of Megatron's local layers to its name in Transformer Engine's layers."""
    name = re.sub(r"\.local_experts\.(\d+)\.(linear_fc\d\.[a-z]+)$", r".\2\1", name)
    for local, fused in FUSED.items():
        name = name.replace(local, fused)
    return name
