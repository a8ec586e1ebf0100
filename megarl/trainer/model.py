"""Builds this rank's chunks of Megatron-Core's GPTModel for a ModelShape.

The output layer keeps its weight but returns its input: a head (heads.py) reads hidden states, so
the logits of a micro-batch never exist all at once.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megarl.layout import Layout, stage_layers
from megarl.models.lora import is_adapter
from megarl.models.registry import padded_vocab
from megarl.models.shape import ModelShape, Shape
from megarl.models.shards import Slices, Table, by_prefix, shapes_of, slices_by_rank, slices_of
from megarl.trainer.layers import block_spec
from megarl.trainer.rope import rotate_by_position, scaled_frequencies
from megarl.weights.plan.tables import SlicesByRank


@dataclass(frozen=True)
class HfTensors:
    """The HF tensors that a model or its adapters store."""

    shapes: Mapping[str, Shape]  # full shape of every tensor
    slices: Slices  # in this rank's parameters
    by_rank: Callable[[], SlicesByRank]  # slices in every rank's parameters

    @classmethod
    def of(cls, table: Table, shape: ModelShape, layout: Layout) -> "HfTensors":
        return cls(
            shapes_of(table, shape),
            slices_of(table, shape, layout),
            partial(slices_by_rank, table, shape, layout),
        )


def build_model(
    shape: ModelShape,
    layout: Layout,
    config: TransformerConfig,
    *,
    use_te: bool,
) -> list[GPTModel]:
    """Returns this rank's chunks, with parameters not yet loaded.

    The last chunk returns hidden states [T / tp, 1, hidden].
    """
    rotary_base: Any = shape.rope_theta  # a float, despite GPTModel's annotation
    chunks = stage_layers(shape.layers, layout)
    models = []
    for number, layers in enumerate(chunks):
        last = layout.pp.last and number == len(chunks) - 1
        # GPTModel also accepts a block's submodules instead of a layer spec, despite its annotation
        spec: Any = block_spec(config, [*map(shape.kind, layers)], use_te=use_te)
        prediction: Any = None
        if last and config.mtp_num_layers:
            prediction = get_gpt_mtp_block_spec(
                config, spec.layer_specs[-1], use_transformer_engine=use_te
            )
        model = GPTModel(
            config=config,
            transformer_layer_spec=spec,
            mtp_block_spec=prediction,
            vocab_size=padded_vocab(shape.vocab, layout.tp.size),
            max_sequence_length=shape.max_position,
            pre_process=layout.pp.first and number == 0,
            post_process=last,
            share_embeddings_and_output_weights=shape.tied,
            position_embedding_type="rope",
            rotary_percent=shape.rotary_fraction,
            rotary_base=rotary_base,
            vp_stage=number if len(chunks) > 1 else None,
        )
        if shape.rope_scaling and shape.latent is None:
            rotary = model.rotary_pos_emb
            rotary.inv_freq = scaled_frequencies(shape).to(rotary.inv_freq.device)
        if shares_prefixes(shape, layout, use_te=use_te):
            rotate_by_position(model)
        patch_chunk(model, layout)
        models.append(model)
    return models


def shares_prefixes(
    shape: ModelShape,
    layout: Layout,
    *,
    use_te: bool,
) -> bool:
    """Returns True if updates compute a prefix that several rows share only once.

    They do so on a CPU, except with experts, whose router losses count every token, and where
    Megatron itself rotates rows or sends them between ranks.
    """
    is_plain = all(kind.is_attention and not kind.has_experts for kind in shape.layer_kinds)
    is_plain &= shape.bridge is None and shape.latent is None
    return is_plain and not use_te and layout.cp.size == layout.vpp.size == 1


def patch_chunk(model: Any, layout: Layout) -> None:
    """Prepares a GPTModel for the trainer, including one that Megatron-Bridge built."""
    for name, parameter in model.named_parameters():
        # Transformer Engine keeps attention sinks in fp32; Float16Module casts them
        parameter.data = parameter.data.to(model.config.params_dtype)
        if name.endswith("softmax_offset"):
            # unmarked, the gradient norm would count the sinks of the first tensor rank only
            parameter.tensor_model_parallel = True
    for module in model.modules():
        if hasattr(module, "fuse_wgrad_accumulation"):
            # Enables gradient_accumulation_fusion. The setting itself would require Apex, which
            # only the unused output layer needs.
            module.fuse_wgrad_accumulation = True
    if model.post_process:
        model.output_layer.forward = lambda hidden, *_, **__: (hidden, None)
    # With expert parallelism 1, megatron-core 0.16.1 reduces gradients of experts over the ranks of
    # dense ones. Where expert_tensor != tensor, an expert's replicas are on other ranks, and would
    # drift apart.
    if layout.ep.size == 1 and layout.etp.size != layout.tp.size:
        for name, parameter in model.named_parameters():
            if ".experts." in name:
                parameter.allreduce = False


def local_tensors(chunks: Sequence[torch.nn.Module]) -> dict[str, Tensor]:
    """Returns parameters and router biases, without adapters, by GPTModel's names with a prefix."""
    tensors = {}
    for prefix, chunk in by_prefix(chunks).items():
        for name, parameter in chunk.named_parameters():
            if not is_adapter(name):
                tensors[prefix + name] = parameter
        for name, buffer in chunk.named_buffers():
            if name.endswith(".expert_bias"):
                tensors[prefix + name] = buffer
    return tensors
