"""Checks that the sizes of a model are divisible by those of the layouts; errors list the sizes that would divide."""

from __future__ import annotations

from megarl.config.schema import Config
from megarl.models.shape import ModelShape

__all__ = ["check_cpu_engine", "check_gpu_trainer", "check_model"]

CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # vLLM 0.32
CPU_LATENT = (512, 64)  # kv_lora_rank and qk_rope_head_dim: the only size its kernel supports


def check_model(config: Config, shape: ModelShape) -> None:
    """Raises ValueError when the model cannot be split over the trainer's or the engine's layout."""
    sizes, engine = config.parallel, config.rollout.tensor
    _divides("heads", shape.heads, "parallel.tensor", sizes.tensor)
    _divides("kv_heads", shape.kv_heads, "parallel.tensor", sizes.tensor)
    _check_stages(shape, sizes.pipeline, sizes.virtual_pipeline)
    _divides("heads", shape.heads, "rollout.tensor", engine)
    if shape.kv_heads % engine and engine % shape.kv_heads:  # vLLM replicates key-value heads
        raise ValueError(
            f"kv_heads={shape.kv_heads} and rollout.tensor={engine} do not divide one another; "
            f"choose rollout.tensor from the divisors or multiples of {shape.kv_heads}"
        )
    if shape.is_moe:
        _divides("experts", shape.experts, "parallel.expert", sizes.expert)
        _divides("moe_intermediate", shape.moe_intermediate, "parallel.expert_tensor", sizes.expert_tensor)
        _check_engine_experts(config, shape)
        _divides("shared experts' intermediate", shape.shared_intermediate, "parallel.tensor", sizes.tensor)
        _divides("shared experts' intermediate", shape.shared_intermediate, "rollout.tensor", engine)
        _check_router(shape)
        if shape.out_bias and sizes.expert_tensor > 1:  # every rank would add the bias to the sum
            raise ValueError(
                f"parallel.expert_tensor={sizes.expert_tensor}, but the experts of {shape.family} have biases, which "
                "Megatron-Core supports only with 1; set it to 1, and raise parallel.expert"
            )
    else:
        for key, size in (("expert", sizes.expert), ("expert_tensor", sizes.expert_tensor)):
            if size > 1:
                raise ValueError(f"parallel.{key}={size}, but the model ({shape.family}) has no experts; set it to 1")
        if config.rollout.expert > 1:
            raise ValueError(f"rollout.expert={config.rollout.expert}, but {shape.family} has no experts; set it to 1")
    if shape.dense_layers or not shape.is_moe:
        _divides("intermediate", shape.intermediate, "parallel.tensor", sizes.tensor)
        _divides("intermediate", shape.intermediate, "rollout.tensor", engine)


def _check_engine_experts(config: Config, shape: ModelShape) -> None:
    tensor, expert = config.rollout.tensor, config.rollout.expert
    if expert == 1:
        _divides("moe_intermediate", shape.moe_intermediate, "rollout.tensor", tensor)
        return
    _divides("experts", shape.experts, "rollout.expert", expert)
    if expert % tensor:
        raise ValueError(
            f"rollout.expert={expert} is not a multiple of rollout.tensor={tensor}: vLLM distributes experts over all "
            f"ranks of a replica; use {-(-expert // tensor) * tensor}, or 1"
        )


def _check_stages(shape: ModelShape, pipeline: int, virtual: int) -> None:
    """Stages may be uneven, but not empty."""
    if virtual > 1 and pipeline == 1:
        raise ValueError(
            f"parallel.virtual_pipeline={virtual} splits pipeline stages; set it to 1, or pipeline to 2 or more"
        )
    if shape.layers < pipeline * virtual:
        raise ValueError(
            f"layers={shape.layers} cannot fill pipeline x virtual_pipeline = {pipeline} x {virtual} chunks; lower one"
        )


def _check_router(shape: ModelShape) -> None:
    """Refuse routers that a Hugging Face config can describe but Megatron-Core does not implement."""
    router, chosen = shape.router, shape.experts_per_token
    if router.score_function == "sigmoid" and not router.norm_topk_prob and chosen > 1:
        raise ValueError("norm_topk_prob=false with a sigmoid router is not supported by Megatron-Core; set it to true")
    if router.groups > 1 and chosen != 2 * router.groups_per_token:
        raise ValueError(
            f"num_experts_per_tok={chosen} from topk_group={router.groups_per_token} of n_group={router.groups}: "
            "Megatron-Core scores a group by its best num_experts_per_tok / topk_group experts, the model by its "
            "best 2; these must be equal"
        )


def check_gpu_trainer(config: Config, shape: ModelShape) -> None:
    """Refuse what Transformer Engine has no kernel for; the attention used on a CPU supports it."""
    if shape.sinks and config.parallel.context > 1:
        raise ValueError(
            f"parallel.context={config.parallel.context}, but {shape.family}'s attention sinks are not supported with "
            "context parallelism on a GPU (Transformer Engine has no kernel for it); set it to 1"
        )


def check_cpu_engine(config: Config, shape: ModelShape) -> None:
    """Refuse early what vLLM's CPU kernels would refuse at start-up or in the first forward pass."""
    if shape.is_moe:
        _divides_by_32("hidden", shape.hidden)
        if shape.swiglu_limit:  # vLLM pads the others
            engine = config.rollout.tensor
            _divides_by_32(f"moe_intermediate / {engine}", shape.moe_intermediate // engine)
    if shape.latent is not None:
        sizes = (shape.latent.kv_lora_rank, shape.latent.qk_rope_head_dim)
        if sizes != CPU_LATENT:
            raise ValueError(
                f"kv_lora_rank={sizes[0]}, qk_rope_head_dim={sizes[1]}, and vLLM's latent attention on CPU takes "
                f"{CPU_LATENT[0]} and {CPU_LATENT[1]} only; choose these, or run on a GPU"
            )
    elif shape.head_dim not in CPU_HEAD_DIMS:
        raise ValueError(
            f"head_dim={shape.head_dim}, but vLLM's attention on CPU supports {', '.join(map(str, CPU_HEAD_DIMS))}; "
            "choose one of them for model.create.head_dim, or run on a GPU"
        )


def _divides_by_32(name: str, size: int) -> None:
    if size % 32:
        raise ValueError(
            f"{name} = {size} is not a multiple of 32, as vLLM's experts on a CPU require; change it, or run on a GPU"
        )


def _divides(name: str, size: int, by: str, count: int) -> None:
    if size % count:
        divisors = [d for d in range(1, min(size, 64) + 1) if size % d == 0]
        raise ValueError(
            f"{name}={size} is not divisible by {by}={count}; choose {by} from {', '.join(map(str, divisors))}"
        )
