"""Section `moe`: router losses and the token dispatcher of MoE models, and its check."""

from typing import Literal

from pydantic import NonNegativeFloat

from megarl.config.section import Config, Section
from megarl.models.shape import ModelShape


class Moe(Section):
    """Router losses (megarl.trainer.moe), weighted like the policy loss; the loss-free update of
    the expert bias; the token dispatcher."""

    aux_loss: NonNegativeFloat = 0.0
    """Coefficient of the load-balancing loss."""
    aux_loss_type: Literal["per_sequence", "megatron"] = "per_sequence"
    """Tokens over which load is balanced. per_sequence: the tokens of each row, so the loss is the
    same in every layout; megatron: the tokens of a micro-batch, so the loss depends on packing.
    """
    z_loss: NonNegativeFloat = 0.0
    """Coefficient of mean logsumexp(logits)^2."""
    bias_update_rate: NonNegativeFloat = 0.0
    """Step size of the expert bias in DeepSeek-V3's routers, applied after each update."""
    dispatcher: Literal["alltoall", "allgather"] = "alltoall"
    """Token dispatcher; allgather pads micro-batches to equal length."""


def check_moe(config: Config, shape: ModelShape) -> None:
    """Raises ValueError for router losses or a bias update that the model's routers do not
    support.
    """
    moe = config.moe
    rate = moe.bias_update_rate
    for key in ("aux_loss", "z_loss", "bias_update_rate"):
        value = getattr(moe, key)
        if value and (shape.bridge or not shape.is_moe):
            raise ValueError(
                f"moe.{key}={value}, but the model ({shape.family}) has no experts, or is built by "
                "Megatron-Bridge; set it to 0"
            )
    if rate and not shape.router.expert_bias:
        raise ValueError(
            f"moe.bias_update_rate={rate}, but the routers of {shape.family} have no bias; "
            "set it to 0, and use moe.aux_loss"
        )
