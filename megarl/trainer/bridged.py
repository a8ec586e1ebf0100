"""Families without a table: Megatron-Bridge builds the model, and its conversion is recorded once.

    folder --AutoBridge--> provider, with megarl's settings --provide--> model chunks
    chunks, names and shapes of the checkpoint --hf_to_megatron on index tensors--> slices

Loading, sync and export use these slices exactly like the slices of a table. Recording makes a few
copies of one HF tensor at a time, at 8 bytes per element. On a GPU, Bridge builds the layers from
Transformer Engine. On a CPU, plain families use the layers of layers.py; Bridge does not know all
their parameter names, so Transformer Engine's names are tried too. Bridge requires Transformer
Engine even on a CPU; tests have a stand-in.
"""

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from torch import Tensor

from megarl.layout import Axis, Layout, stage_layers
from megarl.models.registry import fp32_tensors, hf_shapes, padded_vocab
from megarl.models.shape import DENSE, EXPERTS, LayerKind, ModelShape, Shape
from megarl.models.shards import Slices, by_prefix
from megarl.trainer.layers import block_spec
from megarl.trainer.megatron_config import Dispatcher, router_settings, run_settings
from megarl.trainer.model import HfTensors, local_tensors, patch_chunk
from megarl.weights.index_tensors import REMEDY, IndexTensors, moved_slices
from megarl.weights.sync.transports.values import gather_values

# provider settings of the families that can be trained on a CPU
PLAIN = {
    "normalization": "RMSNorm",
    "layernorm_zero_centered_gamma": False,
    "window_size": None,
}
# name in local layers -> in Transformer Engine, which fuses a norm into the next linear layer
FUSED = {
    ".input_layernorm.": ".self_attention.linear_qkv.layer_norm_",
    ".pre_mlp_layernorm.": ".mlp.linear_fc1.layer_norm_",
    ".self_attention.q_layernorm.": ".self_attention.linear_q_up_proj.layer_norm_",
    ".self_attention.kv_layernorm.": ".self_attention.linear_kv_up_proj.layer_norm_",
}
OFF = """
    fp16 should_pad_vocab moe_permute_fusion moe_shared_expert_overlap apply_rope_fusion
"""
UNSET = ("mtp_num_layers", "moe_z_loss_coeff", "fp8")
Shapes = Mapping[str, Shape]
EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"


@dataclass(frozen=True)
class Bridged:
    """Megatron-Bridge's model and conversion for one family, in this rank's layout."""

    shape: ModelShape
    layout: Layout
    # a TransformerConfig that can also provide() a GPTModel; recomputation is set on it later
    provider: Any
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
    ) -> "Bridged":
        """Configures Bridge's provider: layout, numerics, no dropout, no multi-token prediction.

        Raises ValueError if Bridge does not know the family, or if its layers exist only in
        Transformer Engine.
        """
        auto = _auto_bridge(shape)
        provider = auto.to_megatron_provider(load_weights=False)
        settings = run_settings(shape.layers, layout, dtype, dispatcher, use_te)
        if use_te:
            # Bridge knows whether the family's activation has a fused kernel
            del settings["bias_activation_fusion"]
        if provider.num_moe_experts:
            settings |= router_settings(use_te=use_te)
        settings["vocab_size"] = padded_vocab(shape.vocab, layout.tp.size)
        settings |= dict.fromkeys(OFF.split(), False) | dict.fromkeys(UNSET)
        for name, value in settings.items():
            setattr(provider, name, value)
        if not use_te:
            _take_local_layers(provider, shape, layout)
        provider.finalize()
        return cls(shape, layout, provider, auto._model_bridge)

    def build(self) -> list[GPTModel]:
        """Returns this rank's model chunks, with parameters not yet loaded."""
        pp = self.layout.pp
        count = self.layout.vpp.size
        chunks = []
        for number in range(count):
            model = self.provider.provide(
                pre_process=pp.first and number == 0,
                post_process=pp.last and number == count - 1,
                vp_stage=number if count > 1 else None,
            )
            if not isinstance(model, GPTModel):
                raise ValueError(
                    f"{self.shape.family}: Megatron-Bridge builds {type(model).__name__}, "
                    "not GPTModel"
                )
            patch_chunk(model, self.layout)
            chunks.append(model)
        return chunks

    def tensors(self, chunks: Sequence[GPTModel]) -> HfTensors:
        """Returns the HF tensors that the chunks of all ranks store.

        Call it on every rank. Raises ValueError if a parameter's dtype is not the expected one.
        """
        shapes = hf_shapes(self.shape)
        slices = record(chunks, self.bridge, shapes, self.layout.ep)
        parameters = local_tensors(chunks)
        fp32 = fp32_tensors(self.shape)
        for part in slices:
            dtype = parameters[part.param].dtype
            expected = torch.float32 if part.name in fp32 else self.provider.params_dtype
            if dtype != expected:
                raise ValueError(
                    f"{part.param}, the parameter of {part.name}, is {dtype} in Megatron-Core, "
                    f"not {expected}; {REMEDY}"
                )
        by_rank = gather_values(slices)
        trained = {part.name for part in chain.from_iterable(by_rank)}
        stored = {name: size for name, size in shapes.items() if name in trained}
        return HfTensors(stored, slices, lambda: by_rank)


def _auto_bridge(shape: ModelShape) -> Any:
    """Returns Megatron-Bridge's AutoBridge for the model's folder.

    Raises ValueError if Bridge cannot be imported or does not support the family.
    """
    logging.getLogger("megatron.bridge").setLevel(logging.ERROR)
    remedy = "add a table (CONTRIBUTING.md, 'Adding a model family')"
    try:
        from megatron.bridge import AutoBridge  # pyright: ignore[reportMissingImports]
        from megatron.bridge.models.conversion.param_mapping import AutoMapping  # pyright: ignore
    except ImportError as error:
        raise ValueError(
            f"model_type={shape.family!r} has no table, and Megatron-Bridge, though installed, "
            f"cannot be imported: {error}; install a version of that package which Bridge can use, "
            f"or {remedy}"
        ) from error

    folder = str(shape.bridge)
    if not AutoBridge.can_handle(folder):
        raise ValueError(
            f"{folder}: model_type={shape.family!r} has no table, and Megatron-Bridge does not "
            f"support it (without remote code); {remedy}"
        )
    for module in ("BalancedRouter", "ReplicatedLinear"):  # modules in layers.py
        AutoMapping.register_module_type(module, "replicated")
    return AutoBridge.from_hf_pretrained(folder)


def _take_local_layers(provider: Any, shape: ModelShape, layout: Layout) -> None:
    from megatron.bridge.models.gpt_provider import default_layer_spec  # pyright: ignore

    spec = provider.transformer_layer_spec
    special = [
        f"{name}={getattr(provider, name)}"
        for name, value in PLAIN.items()
        if getattr(provider, name) != value
    ]
    known = (default_layer_spec, get_gpt_decoder_block_spec)
    if special or getattr(spec, "func", spec) not in known:
        raise ValueError(
            f"{shape.family} has {', '.join(special) or 'its own layer spec'}, which only "
            "Transformer Engine supports: train it on GPUs"
        )
    chunks = stage_layers(shape.layers, layout)

    def layers_of_chunk(config: Any, vp_stage: int | None = None) -> Any:
        kinds = [_kind(config, layer) for layer in chunks[vp_stage or 0]]
        return block_spec(config, kinds, use_te=False)

    provider.transformer_layer_spec = layers_of_chunk


def _kind(config: Any, layer: int) -> LayerKind:
    every = config.moe_layer_freq
    is_moe = every[layer] if isinstance(every, list) else layer % every == 0
    return EXPERTS if config.num_moe_experts and is_moe else DENSE


@torch.no_grad()
def record(
    chunks: Sequence[GPTModel],
    bridge: Any,
    shapes: Shapes,
    experts: Axis,
) -> Slices:
    """Returns the slices of HF tensors that `chunks` store, recorded from Bridge's conversion.

    `shapes` has the checkpoint's tensors; experts are split over the axis `experts`. Call it on
    every rank that shares tensors. Raises ValueError naming tensor and parameter if the conversion
    does more than copy elements.
    """
    registry = bridge.mapping_registry()
    slices = []
    for prefix, chunk in by_prefix(chunks).items():
        for name, tensor in local_tensors([chunk]).items():
            mapping = _mapping(registry, chunk, _global(name, chunk, experts), shapes)
            if mapping is None:
                raise ValueError(
                    f"Megatron-Bridge maps no tensor of the checkpoint to {name}; "
                    "is config.json from another model?"
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
    shapes: Shapes,
) -> tuple[list[Tensor], IndexTensors]:
    """Converts index tensors to the parameter, twice; returns both results, and the index tensors.

    Raises ValueError if a tensor is missing or the shape differs from the parameter's.
    """
    module = chunk.get_submodule(name.rpartition(".")[0])
    if not hasattr(module, "config"):
        # Bridge reads the config from the module
        module.config = chunk.config  # pyright: ignore[reportArgumentType]
    indices = IndexTensors(shapes, tensor.device)
    converted = []
    with _in_fp64([tensor, *module.parameters(recurse=False)]):
        for indices.is_second in (False, True):
            try:
                weights = bridge.maybe_modify_loaded_hf_weight(mapping.hf_param, indices)
            except KeyError as error:
                raise ValueError(
                    f"{name}: the checkpoint has no tensor {error}; "
                    "is config.json from another model?"
                ) from None
            index = mapping.hf_to_megatron(weights, module)
            if name in (EMBEDDING, OUTPUT) and index.shape[1:] == tensor.shape[1:]:
                # Bridge does not pad a tensor that is not split
                num_missing = max(0, len(tensor) - len(index))
                index = torch.cat([index, index.new_zeros(num_missing, *tensor.shape[1:])])
            if index.shape != tensor.shape:
                raise ValueError(
                    f"{name} has shape {tuple(tensor.shape)}, but Megatron-Bridge gives it "
                    f"{tuple(index.shape)} from {' and '.join(indices.first)}; "
                    "is config.json from another model?"
                )
            converted.append(index)
    return converted, indices


@contextmanager
def _in_fp64(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Context: makes these tensors fp64, without allocating their elements.

    Bridge casts its inputs to the dtype of a parameter, and reads only its dtype and shape.
    """
    originals = [(tensor, tensor.data) for tensor in tensors]
    try:
        for tensor, data in originals:
            element = torch.empty((), dtype=torch.float64, device=data.device)
            tensor.data = element.expand(data.shape)
        yield
    finally:
        for tensor, data in originals:
            tensor.data = data


def _mapping(
    registry: Any,
    model: GPTModel,
    name: str,
    shapes: Shapes,
) -> Any:
    """Returns Bridge's rule for a parameter, found by `name` or by its Transformer Engine name.

    Returns None if there is no rule. On the last stage, a tied output layer is a copy of the
    embedding and uses its rule.
    """
    names = [name, _under_te(name)]
    if name == OUTPUT and model.share_embeddings_and_output_weights:
        names = [EMBEDDING]
    for megatron_name in names:
        rule = registry.megatron_to_hf_lookup(megatron_name)
        if rule is None:
            continue
        tensors = rule.hf_param.values() if isinstance(rule.hf_param, dict) else [rule.hf_param]
        if rule.allow_hf_name_mismatch or all(tensor in shapes for tensor in tensors):
            rule = copy(rule)
            rule.megatron_param = name
            return rule
    return None


def _global(name: str, chunk: GPTModel, experts: Axis) -> str:
    """Returns a parameter's name in Bridge, with global layer and expert indices."""
    layer = re.match(r"decoder\.layers\.(\d+)\.", name)
    if layer:
        module: Any = chunk.decoder.layers[int(layer[1])]
        name = f"decoder.layers.{module.layer_number - 1}.{name[layer.end() :]}"
    expert = re.search(r"\.experts\.(?:local_experts\.|linear_fc\d\.[a-z]+)(\d+)", name)
    if expert and experts.size > 1:
        first = experts.rank * (chunk.config.num_moe_experts or 0) // experts.size
        name = f"{name[: expert.start(1)]}{first + int(expert[1])}{name[expert.end(1) :]}"
    return name


def _under_te(name: str) -> str:
    """Translates a parameter's name in Megatron's local layers to its Transformer Engine name."""
    name = re.sub(r"\.local_experts\.(\d+)\.(linear_fc\d\.[a-z]+)$", r".\2\1", name)
    for local, fused in FUSED.items():
        name = name.replace(local, fused)
    return name
