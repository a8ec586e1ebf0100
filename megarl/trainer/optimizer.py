"""Megatron's DistributedDataParallel and DistributedOptimizer, and one guarded optimizer step.

Gradients are summed in fp32 over data ranks, not divided: the loss is weighted already. The
gradient norm of the whole model decides whether a step is skipped, on every rank alike.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from torch import Tensor

from megarl.checkpoint.rank_state import parts_of
from megarl.config.schema import Train


@dataclass
class LrSchedule:
    """The learning rate as a function of the batches trained so far (rollout steps)."""

    train: Train
    step: int = 0  # saved in checkpoints

    @property
    def lr(self) -> float:
        """Learning rate of the current step: linear warm-up, then the schedule.

        The schedule reaches min_lr one step after the last, as in Megatron and transformers.
        """
        train = self.train
        step = self.step
        if step < train.warmup_steps:
            return train.lr * (step + 1) / train.warmup_steps
        if train.schedule == "constant":
            return train.lr
        done = min(1.0, (step - train.warmup_steps) / max(1, train.steps - train.warmup_steps))
        left = 1 - done if train.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
        return train.min_lr + (train.lr - train.min_lr) * left


def wrap(
    model: Sequence[GPTModel],
    options: Mapping[str, Any],
    reduced: Callable[[], None] | None,
) -> list[DistributedDataParallel]:
    """Wraps chunks in DDP, which moves loaded parameters and fp32 gradients into flat buffers.

    `options` are fields of DistributedDataParallelConfig; `reduced` is called after Megatron's
    reductions of gradients.
    """
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=True,
        check_for_nan_in_grad=False,  # a non-finite gradient only skips the step
        **options,
    )
    chunks = [
        DistributedDataParallel(chunk.config, ddp_config, chunk, disable_bucketing=number > 0)
        for number, chunk in enumerate(model)
    ]
    config: Any = model[0].config  # shared by all chunks

    def finalize(chunks: list[Any], _num_tokens: Any = None, **options: Any) -> None:
        finalize_model_grads(chunks, None, **options)  # without division by a token count
        if reduced:
            reduced()

    config.finalize_model_grads_func = finalize
    if options.get("overlap_grad_reduce"):
        config.no_sync_func = [chunk.no_sync for chunk in chunks]
        if len(chunks) == 1:
            config.no_sync_func = chunks[0].no_sync
        for chunk in chunks:
            for parameter in chunk.parameters():
                # logprobs.py adds to main_grad, but Megatron waits for a returned gradient
                parameter.must_have_grad = True  # pyright: ignore[reportAttributeAccessIssue]
    return chunks


_CPU_OFFLOAD: dict[str, Any] = {
    "optimizer_cpu_offload": True,
    "optimizer_offload_fraction": 1.0,
    "use_precision_aware_optimizer": torch.cuda.is_available(),  # needs Transformer Engine
    "overlap_cpu_optimizer_d2h_h2d": True,
    "pin_cpu_grads": torch.cuda.is_available(),
    "pin_cpu_params": torch.cuda.is_available(),
}


def build_optimizer(chunks: Sequence[DistributedDataParallel], train: Train) -> MegatronOptimizer:
    """Builds AdamW with fp32 main weights, its state sharded over data ranks.

    Norms and biases have no weight decay.
    """
    bf16 = train.dtype == "bf16"
    config = OptimizerConfig(
        optimizer="adam",
        lr=train.lr,
        min_lr=train.min_lr,
        weight_decay=train.weight_decay,
        adam_beta1=train.betas[0],
        adam_beta2=train.betas[1],
        adam_eps=train.eps,
        clip_grad=train.clip_grad,
        bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        use_distributed_optimizer=True,
        **(_CPU_OFFLOAD if train.optimizer_cpu_offload else {}),
    )
    optimizer = get_megatron_optimizer(config, list(chunks), use_gloo_process_groups=False)
    for group in optimizer.param_groups:  # Megatron leaves this to its own scheduler
        group["weight_decay"] = train.weight_decay * group["wd_mult"]
    return optimizer


def zero_grad(chunks: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer) -> None:
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()


@torch.no_grad()
def take_step(
    optimizer: MegatronOptimizer,
    *,
    lr: float,
    clip_grad: float,
    device: torch.device,
) -> tuple[float, bool]:
    """Clips the model's gradient to norm `clip_grad` (0: no clipping), and takes an optimizer step.

    Returns the norm before clipping, and True if the step was skipped because the gradient is not
    finite.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr
    found_inf = optimizer.prepare_grads()
    norm = gradient_norm(optimizer, device)
    if found_inf or not math.isfinite(norm):
        return norm, True
    if clip_grad > 0:
        parts: Sequence[MegatronOptimizer] = parts_of(optimizer)
        for part in parts:
            parameters = part.get_parameters()
            if parameters:
                clip_grad_by_total_norm_fp32(
                    list[Tensor](parameters),
                    clip_grad,
                    norm,
                    use_decoupled_grad=part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8,
                )
    optimizer.step_with_ready_grads()
    return norm, False


def gradient_norm(optimizer: MegatronOptimizer, device: torch.device) -> float:
    """Returns the L2 norm of the whole model's gradient.

    Collective, because the distributed optimizer assigns each gradient to one rank.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    parts: Sequence[MegatronOptimizer] = parts_of(optimizer)
    for part in parts:
        if hasattr(part, "get_grads_for_grad_norm"):  # megatron-core 0.19, not 0.16
            mcore: Any = part
            gradients = mcore.get_grads_for_grad_norm()
        else:
            gradients = part.get_main_grads_for_grad_norm()
        for gradient in gradients:
            total += sum_of_squares(gradient).to(device)
    dist.all_reduce(total)
    return math.sqrt(float(total))


def sum_of_squares(x: Tensor, *, run: int = 1024) -> Tensor:
    """Returns the sum of squares: fp32 norms of `run` elements each, added up in fp64.

    On a CPU, torch's fp32 norm of 28 million elements is 0.2% off.
    """
    whole = x.numel() // run * run
    runs = (x.flatten()[:whole].view(-1, run), x.flatten()[whole:])
    sums = [
        torch.linalg.vector_norm(each, dim=-1, dtype=torch.float32).double().square().sum()
        for each in runs
    ]
    return torch.stack(sums).sum()
