"""ModelShape and parallel sizes -> Megatron's process groups and GPTModel.

    init_parallel(sizes, layout)        -> Groups              the only place that touches parallel_state
    build_model(shape, layout, config)  -> GPTModel, ...       a chunk of the pipeline each; hidden states, not logits

The output layer keeps its weight but hands hidden states through: trainer/logprobs.py makes log-probs from
them in chunks, so the logits of a micro-batch never exist at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.distributed import ProcessGroup

from megarl.layout import Layout, Parallel, stage_layers
from megarl.models.registry import padded_vocab
from megarl.models.shape import ModelShape
from megarl.trainer.layers import block_spec
from megarl.trainer.rope import scaled_frequencies

__all__ = [
    "Groups",
    "build_model",
    "destroy_parallel",
    "expert_parameters",
    "init_parallel",
    "local_tensors",
    "output_weight",
    "patch_chunk",
]


@dataclass(frozen=True, slots=True)
class Groups:
    """The ranks that share this rank's work along one axis."""

    tensor: ProcessGroup
    context: ProcessGroup


def init_parallel(sizes: Parallel, layout: Layout, *, seed: int = 0) -> Groups:
    """Make Megatron's process groups for these sizes; a previous set is destroyed first.

    torch.distributed must be initialised.
    """
    destroy_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=sizes.tensor,
        pipeline_model_parallel_size=sizes.pipeline,
        virtual_pipeline_model_parallel_size=sizes.virtual_pipeline if sizes.virtual_pipeline > 1 else None,
        context_parallel_size=sizes.context,
        expert_model_parallel_size=sizes.expert,
        expert_tensor_parallel_size=sizes.expert_tensor,
        order="tp-cp-ep-dp-pp",
        create_gloo_process_groups=False,
    )
    _assert_agrees(layout)
    # Megatron's layers enter a named random state even where nothing is drawn.
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    tensor, context = parallel_state.get_tensor_model_parallel_group(), parallel_state.get_context_parallel_group()
    assert isinstance(tensor, ProcessGroup) and isinstance(context, ProcessGroup)
    return Groups(tensor, context)


def destroy_parallel() -> None:
    """Close Megatron's process groups, so that another layout can be built in this process. Every rank must call.

    Megatron only forgets them: their threads (some fifty a layout under gloo) would stay and poll.
    """
    if not parallel_state.model_parallel_is_initialized():
        return
    dist.barrier()  # nobody closes a connection that a peer still reads from
    known = dist.distributed_c10d._world.pg_map  # a default group closed before took its groups along
    groups = [group for group in parallel_state._global_process_group_list or () if group in known]
    parallel_state.destroy_model_parallel()
    for group in groups:
        dist.destroy_process_group(group)


def _assert_agrees(layout: Layout) -> None:
    """Our world arithmetic and Megatron's must put this rank in the same place."""
    theirs = {
        "tp": (parallel_state.get_tensor_model_parallel_world_size, parallel_state.get_tensor_model_parallel_rank),
        "pp": (parallel_state.get_pipeline_model_parallel_world_size, parallel_state.get_pipeline_model_parallel_rank),
        "cp": (parallel_state.get_context_parallel_world_size, parallel_state.get_context_parallel_rank),
        "dp": (parallel_state.get_data_parallel_world_size, parallel_state.get_data_parallel_rank),
        "ep": (parallel_state.get_expert_model_parallel_world_size, parallel_state.get_expert_model_parallel_rank),
        "etp": (parallel_state.get_expert_tensor_parallel_world_size, parallel_state.get_expert_tensor_parallel_rank),
        "edp": (parallel_state.get_expert_data_parallel_world_size, parallel_state.get_expert_data_parallel_rank),
    }
    for name, (size, rank) in theirs.items():
        ours = getattr(layout, name)
        assert (size(), rank()) == (ours.size, ours.rank), f"{name}: Megatron says {size()}, {rank()}, layout {ours}"


def build_model(shape: ModelShape, layout: Layout, config: TransformerConfig, *, use_te: bool) -> list[GPTModel]:
    """This rank's chunks of the pipeline, parameters not yet loaded. A forward gives hidden [1, T / tp, hidden]."""
    chunks = stage_layers(shape.layers, layout)
    last = len(chunks) - 1
    return [
        _build_chunk(
            shape,
            layout,
            config,
            vp_stage=number if last else None,
            spec=block_spec(config, [layer >= shape.dense_layers for layer in layers], use_te=use_te),
            use_te=use_te,
            first=layout.pp.first and number == 0,
            last=layout.pp.last and number == last,
        )
        for number, layers in enumerate(chunks)
    ]


def _build_chunk(
    shape: ModelShape,
    layout: Layout,
    config: TransformerConfig,
    *,
    vp_stage: int | None,
    spec: Any,  # GPTModel takes a block's submodules as well as a layer's spec, whatever its annotation says
    use_te: bool,
    first: bool,
    last: bool,
) -> GPTModel:
    prediction = None
    if last and config.mtp_num_layers:
        prediction = get_gpt_mtp_block_spec(config, spec.layer_specs[-1], use_transformer_engine=use_te)
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        mtp_block_spec=prediction,  # pyright: ignore[reportArgumentType]  # as above
        vocab_size=padded_vocab(shape.vocab, layout.tp.size),
        max_sequence_length=shape.max_position,
        pre_process=first,
        post_process=last,
        share_embeddings_and_output_weights=shape.tied,
        position_embedding_type="rope",
        rotary_percent=shape.rotary_fraction,
        rotary_base=shape.rope_theta,  # pyright: ignore[reportArgumentType]  # a float is as good
        vp_stage=vp_stage,
    )
    if shape.rope_scaling and shape.latent is None:
        model.rotary_pos_emb.inv_freq = scaled_frequencies(shape).to(model.rotary_pos_emb.inv_freq.device)
    patch_chunk(model, layout, last=last)
    return model


def patch_chunk(model: GPTModel, layout: Layout, *, last: bool) -> None:
    """What the actor asks of every chunk, whoever built it."""
    if last:
        model.output_layer.forward = _passthrough  # pyright: ignore[reportAttributeAccessIssue]
    _mark_replicated_experts(model, layout)


def local_tensors(chunks: Sequence[torch.nn.Module]) -> dict[str, Tensor]:
    """What a checkpoint stores of these chunks, by the names of `weights.mapping.slices_of`."""
    found: dict[str, Tensor] = {}
    for number, chunk in enumerate(chunks):
        prefix = f"chunk{number}." if len(chunks) > 1 else ""
        found |= {prefix + name: parameter for name, parameter in chunk.named_parameters()}
        found |= {prefix + name: buffer for name, buffer in chunk.named_buffers() if name.endswith(".expert_bias")}
    return found


def _passthrough(hidden: Tensor, weight: Tensor | None = None, **_unused: object) -> tuple[Tensor, None]:
    return hidden, None


def output_weight(model: GPTModel) -> Tensor:
    """[padded_vocab / tp, hidden] of the last stage: the output layer's own, or the tied embedding."""
    tied = model.share_embeddings_and_output_weights
    weight = model.shared_embedding_or_output_weight() if tied else model.output_layer.weight
    assert weight is not None
    return weight


def _mark_replicated_experts(model: GPTModel, layout: Layout) -> None:
    """megatron-core 0.16.1 reduces experts with the dense gradients when expert parallelism is 1, although with
    expert_tensor != tensor their replicas lie on other ranks: the copies on the tensor ranks would drift apart.
    """
    if layout.ep.size == 1 and layout.etp.size != layout.tp.size:
        for parameter in expert_parameters(model):
            parameter.allreduce = False  # pyright: ignore[reportAttributeAccessIssue]


def expert_parameters(model: GPTModel) -> Sequence[torch.nn.Parameter]:
    return [parameter for name, parameter in model.named_parameters() if ".experts." in name]
