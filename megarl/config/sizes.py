"""Checks that a model's sizes are divisible by the parallel sizes; errors list the sizes that would work."""

from __future__ import annotations

from megarl.config.schema import Config
from megarl.layout import Layout, Parallel, stage_layers
from megarl.models.shape import ModelShape

CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # vLLM 0.32
CPU_LATENT = (512, 64)  # kv_lora_rank and qk_rope_head_dim: the only size its kernel supports


def check_model(config: Config, shape: ModelShape) -> None:
    """Raises ValueError when the model cannot be split over the trainer's or the engine's layout."""
    sizes, virtual, engine = config.parallel, config.parallel.virtual_pipeline, config.rollout.tensor
    for axis, ranks in (("parallel.tensor", sizes.tensor), ("rollout.tensor", engine)):
        _divides("heads", shape.heads, axis, ranks)
        _divides("shared experts' intermediate", shape.shared_intermediate, axis, ranks)
        if shape.dense_layers or not shape.is_moe:
            _divides("intermediate", shape.intermediate, axis, ranks)
    _divides("kv_heads", shape.kv_heads, "parallel.tensor", sizes.tensor)
    if shape.kv_heads % engine and engine % shape.kv_heads:  # vLLM replicates key-value heads
        raise ValueError(
            f"kv_heads={shape.kv_heads} and rollout.tensor={engine}: one must divide the other; "
            f"choose rollout.tensor from the divisors or multiples of {shape.kv_heads}"
        )
    if virtual > 1 and sizes.pipeline == 1:
        raise ValueError(f"parallel.virtual_pipeline={virtual} needs pipelining; set it to 1, or pipeline to 2 or more")
    stages = Parallel(pipeline=sizes.pipeline, virtual_pipeline=virtual)
    stage_layers(shape.layers, Layout.of(stages, sizes.pipeline, 0))  # raises if a stage would be empty
    if shape.is_moe:
        _check_experts(config, shape)
        return
    experts = {"parallel.expert": sizes.expert, "parallel.expert_tensor": sizes.expert_tensor}
    for key, size in (experts | {"rollout.expert": config.rollout.expert}).items():
        if size > 1:
            raise ValueError(f"{key}={size}, but the model ({shape.family}) has no experts; set it to 1")


def _check_experts(config: Config, shape: ModelShape) -> None:
    sizes, tensor, expert = config.parallel, config.rollout.tensor, config.rollout.expert
    _divides("experts", shape.experts, "parallel.expert", sizes.expert)
    _divides("moe_intermediate", shape.moe_intermediate, "parallel.expert_tensor", sizes.expert_tensor)
    if shape.out_bias and sizes.expert_tensor > 1:  # every rank would add the bias to the sum
        raise ValueError(
            f"parallel.expert_tensor={sizes.expert_tensor}, but the experts of {shape.family} have biases, which "
            "Megatron-Core supports only with 1; set it to 1, and use parallel.expert instead"
        )
    if expert == 1:
        _divides("moe_intermediate", shape.moe_intermediate, "rollout.tensor", tensor)
    _divides("experts", shape.experts, "rollout.expert", expert)
    if expert > 1 and expert % tensor:
        raise ValueError(
            f"rollout.expert={expert} is not a multiple of rollout.tensor={tensor}: vLLM distributes experts over all "
            f"ranks of a replica; use {-(-expert // tensor) * tensor}, or 1"
        )
    router, chosen = shape.router, shape.experts_per_token
    if router.score_function == "sigmoid" and not router.norm_topk_prob and chosen > 1:
        raise ValueError("norm_topk_prob=false with a sigmoid router is not supported by Megatron-Core; set it to true")
    if router.groups > 1 and chosen != 2 * router.groups_per_token:
        raise ValueError(
            f"num_experts_per_tok={chosen}, topk_group={router.groups_per_token}, n_group={router.groups}: "
            "Megatron-Core scores a group by its best num_experts_per_tok / topk_group experts, but the model by its "
            "best 2; num_experts_per_tok must be 2 * topk_group"
        )


def check_gpu_trainer(config: Config, shape: ModelShape) -> None:
    """Raises ValueError where Transformer Engine has no kernel; the attention used on a CPU does not need it."""
    if shape.sinks and config.parallel.context > 1:
        raise ValueError(
            f"parallel.context={config.parallel.context}, but {shape.family}'s attention sinks are not supported with "
            "context parallelism on a GPU (Transformer Engine has no kernel for it); set it to 1"
        )


def check_cpu_engine(config: Config, shape: ModelShape) -> None:
    """Raises ValueError for sizes that vLLM's CPU kernels reject only at start-up or in the first forward pass."""
    sizes = {"hidden": shape.hidden} if shape.is_moe else {}
    if shape.is_moe and shape.swiglu_limit:  # vLLM pads the others
        engine = config.rollout.tensor
        sizes[f"moe_intermediate / {engine}"] = shape.moe_intermediate // engine
    for name, size in sizes.items():
        if size % 32:
            raise ValueError(
                f"{name} = {size} is not a multiple of 32, which vLLM's CPU MoE kernel needs; change it, or use a GPU"
            )
    if shape.latent is not None:
        latent = (shape.latent.kv_lora_rank, shape.latent.qk_rope_head_dim)
        if latent != CPU_LATENT:
            raise ValueError(
                f"kv_lora_rank={latent[0]}, qk_rope_head_dim={latent[1]}, but vLLM's MLA on CPU supports "
                f"only {CPU_LATENT[0]} and {CPU_LATENT[1]}; choose these, or run on a GPU"
            )
    elif shape.head_dim not in CPU_HEAD_DIMS:
        raise ValueError(
            f"head_dim={shape.head_dim}, but vLLM's attention on CPU supports {', '.join(map(str, CPU_HEAD_DIMS))}; "
            "choose one of them for model.create.head_dim, or run on a GPU"
        )


def _divides(name: str, size: int, by: str, count: int) -> None:
    if size % count:
        divisors = [d for d in range(1, min(size, 64) + 1) if size % d == 0]
        raise ValueError(
            f"{name}={size} is not divisible by {by}={count}; choose {by} from {', '.join(map(str, divisors))}"
        )
