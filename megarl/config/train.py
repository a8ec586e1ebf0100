"""Sections `train` and `trainer`: optimizer, step size and memory of the trainer; their check."""

from typing import Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt

from megarl.config.section import Config, Options, Section, refuse
from megarl.models.shape import ModelShape


class Train(Section):
    """Steps, updates, learning rate, precision and memory of the trainer."""

    steps: NonNegativeInt = 100
    """Number of rollout batches (or batches of examples) in the run."""
    prompts_per_step: PositiveInt = 32
    """Number of prompts per step."""
    updates_per_step: PositiveInt = 1
    """Number of optimizer steps in one pass over a batch."""
    epochs_per_batch: PositiveInt = 1
    """Number of passes over a batch; from the second pass on, prompts are shuffled between
    updates."""
    lr: NonNegativeFloat = 1.0e-6
    """Learning rate after the warm-up."""
    min_lr: NonNegativeFloat = 0.0
    """Learning rate at the end of the schedule."""
    warmup_steps: NonNegativeInt = 0
    """Number of steps in which the learning rate rises from 0."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning-rate schedule after the warm-up."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay of Adam."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of Adam's moments."""
    eps: NonNegativeFloat = 1e-8
    """Epsilon in the denominator of Adam's update."""
    clip_grad: NonNegativeFloat = 1.0
    """Maximum norm of the gradient; 0: no clipping."""
    max_tokens_per_microbatch: PositiveInt = 16384
    """Maximum number of tokens in a micro-batch; a longer row forms its own micro-batch."""
    max_tokens_per_logprob_batch: PositiveInt | None = None
    """Maximum number of tokens in a micro-batch of passes without gradients: log-probs, values and
    scores. null: `max_tokens_per_microbatch`. Larger ones are faster, keep no activations, and
    change log-probs by rounding only; they give a pipeline fewer micro-batches to overlap."""
    dtype: Literal["fp32", "bf16"] = "bf16"
    """Dtype of weights and activations in trainer and engine; main weights and moments are fp32."""
    logprob_chunk: PositiveInt = 1024
    """Number of tokens per chunk of the log-prob computation."""
    entropy_every: NonNegativeInt = 1
    """Steps between measurements of the metric `entropy`, if no loss needs entropy; 0: never."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Recomputation of activations in the backward pass."""
    recompute_modules: tuple[str, ...] = ("core_attn",)
    """Modules that `selective` recomputes, by Megatron-Core's names (mlp, moe, layernorm ...)."""
    offload: tuple[Literal["gradients", "optimizer", "weights"], ...] = ()
    """Trainer state that is offloaded to the host while the engine samples."""
    optimizer_cpu_offload: bool = False
    """Runs Adam on the CPU (Megatron-Core's hybrid optimizer)."""


class Trainer(Section):
    """Options passed through to Megatron-Core."""

    megatron_options: Options = {}
    """Fields of Megatron-Core's config dataclasses (megarl.config.library_options)."""


def check_train(config: Config, shape: ModelShape, gpus: int) -> None:
    """Raises ValueError for contradictory settings, or if the model lacks support for a setting."""
    train = config.train
    betas = list(train.betas)
    offloads = train.optimizer_cpu_offload
    context = config.parallel.context
    tokens = train.max_tokens_per_logprob_batch
    recipe = config.precision.recipe
    refuse(
        (
            tokens and tokens < train.max_tokens_per_microbatch,
            f"train.max_tokens_per_logprob_batch={tokens} is below train.max_tokens_per_microbatch="
            f"{train.max_tokens_per_microbatch}, although a pass without gradients needs less "
            "memory; raise it, or set it to null",
        ),
        (
            tokens and recipe in ("tensorwise", "delayed"),
            f"train.max_tokens_per_logprob_batch={tokens} would change log-probs: "
            f"precision.fp8.recipe={recipe} scales a micro-batch as a whole; set the first to "
            "null, or the recipe to blockwise",
        ),
        (
            train.updates_per_step > train.prompts_per_step,
            f"train.updates_per_step={train.updates_per_step} exceeds "
            f"prompts_per_step={train.prompts_per_step}, but the samples of a prompt must share an "
            "update; lower it",
        ),
        (offloads and not gpus, "train.optimizer_cpu_offload=true needs a GPU; remove it"),
        (
            offloads and "optimizer" in train.offload,
            "train.optimizer_cpu_offload=true keeps the optimizer on the host, so "
            f"train.offload={list(train.offload)} must not move it; remove optimizer from "
            "train.offload",
        ),
        (train.min_lr > train.lr, f"train.min_lr={train.min_lr} exceeds lr={train.lr}; lower it"),
        (
            not all(0 <= beta < 1 for beta in betas),
            f"train.betas={betas} must each be at least 0 and below 1, e.g. [0.9, 0.95]",
        ),
        (
            gpus and shape.sinks and context > 1,
            f"parallel.context={context}, but {shape.family}'s attention sinks have no kernel for "
            "it on a GPU; set it to 1",
        ),
        (
            context > 1 and not all(kind.is_attention for kind in shape.layer_kinds),
            f"parallel.context={context}, but {shape.family} has layers that need whole rows; "
            "set it to 1",
        ),
    )
