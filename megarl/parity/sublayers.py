"""Records and replaces the outputs of the trainer's modules, independent of the layout, and plants
rounding errors in them.

    module of a stage --hook--> [Q / tp, H] --gather tp, project--> [Q, P]
                      --scatter by batch position--> [modules, T, P]
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from megarl.trainer.trainer import Trainer
from megarl.types import TokenBatch

NUM_PROJECTIONS = 8


def fixed_projections(hidden: int) -> Tensor:
    """Returns projections [H, 8] fp64, the same on every rank; they keep the scale of a vector."""
    random = torch.Generator().manual_seed(0)
    return torch.randn(hidden, NUM_PROJECTIONS, generator=random, dtype=torch.float64) / hidden**0.5


def transformer_layers(trainer: Trainer) -> dict[str, nn.Module]:
    """Returns the layers of this rank's stage by their number in the model, from 0."""
    modules = nn.ModuleList(trainer.model).modules()
    return {str(x.layer_number - 1): x for x in modules if isinstance(x, TransformerLayer)}


def trainer_sublayers(trainer: Trainer) -> dict[str, nn.Module]:
    """Returns the sublayers of this rank's stage, by the names of rollout/vllm/sublayers.py.

    Norms that Transformer Engine fuses into the next projection are left out.
    """
    found = {}
    for name, module in nn.ModuleList(trainer.model).named_modules():
        if isinstance(module, LanguageModelEmbedding):
            found["embedding"] = module
        elif name.endswith("final_layernorm"):
            found["final_norm"] = module
    for number, layer in transformer_layers(trainer).items():
        found |= {
            f"layers.{number}.input_norm": layer.input_layernorm,
            f"layers.{number}.attention": layer.self_attention,
            f"layers.{number}.mlp_norm": layer.pre_mlp_layernorm,
            f"layers.{number}.mlp": layer.mlp,
        }
    return {name: module for name, module in found.items() if not isinstance(module, IdentityOp)}


@contextmanager
def record_outputs(
    trainer: Trainer,
    batch: TokenBatch,
    modules: Mapping[str, nn.Module],
    names: Sequence[str],
    replaced: Mapping[str, Tensor] | None = None,
) -> Iterator[Tensor]:
    """Context: records the outputs of modules during one call of `trainer.forward(batch)`.

    Yields projected outputs [names, T, 8] fp64 on the CPU, filled in on exit, equal on all ranks.
    `modules` has the modules of `names` that are on this rank; `replaced` has outputs [T, H] that
    replace a module's own.
    """
    projection_H8 = fixed_projections(trainer.shape.hidden)
    outputs_NT8 = torch.zeros(len(names), batch.num_tokens, NUM_PROJECTIONS, dtype=torch.float64)
    microbatches = trainer.microbatches(batch)
    tensor = trainer.layout.tp

    def hook_of(name: str, row: int) -> Callable[..., Any]:
        remaining = iter(microbatches)
        replacement_TH = (replaced or {}).get(name)

        def hook(_module: nn.Module, _inputs: object, output: Any) -> Any:
            x, *rest = (
                output if isinstance(output, tuple) else (output,)
            )  # rest: a bias still to be added, or None
            bias = next((each for each in rest if each is not None), torch.zeros_like(x[..., :1]))
            is_split = trainer.model[0].config.sequence_parallel
            full_QH = (x + bias).detach().flatten(0, 1)
            if is_split:
                full_QH = gather_from_sequence_parallel_region(
                    full_QH, tensor_parallel_output_grad=False
                )
            microbatch = next(remaining)
            is_real_Q = microbatch.source >= 0
            # positions in the batch
            index = microbatch.rows.index[microbatch.source[is_real_Q]]
            if replacement_TH is not None:
                full_QH[is_real_Q] = replacement_TH[index].to(full_QH)
                x = (full_QH.chunk(tensor.size)[tensor.rank] if is_split else full_QH).view_as(
                    x
                ) - bias
            if tensor.first:
                outputs_NT8[row, index] = full_QH[is_real_Q].cpu().double() @ projection_H8
            return (x, *rest) if isinstance(output, tuple) else x

        return hook

    with ExitStack() as hooks:
        for row, name in enumerate(names):
            if name in modules:
                hooks.enter_context(modules[name].register_forward_hook(hook_of(name, row)))
        yield outputs_NT8
    total = outputs_NT8.to(trainer.device)
    dist.all_reduce(total)
    outputs_NT8.copy_(total)


@contextmanager
def rounding_errors(trainer: Trainer, eps: float, *, draw: int) -> Iterator[None]:
    """Context: multiplies the outputs of each attention, each MLP and the final norm by 1 + u.

    u is uniform in [-eps, eps]. Repeating a forward pass without it would measure nothing: on a
    CPU, passes are bit-equal.
    """
    random = torch.Generator(trainer.device).manual_seed(
        draw * trainer.layout.world + trainer.layout.rank
    )

    def plant(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        """A forward hook: multiplies the output by 1 + u, u uniform in [-eps, eps]."""
        x, *rest = output if isinstance(output, tuple) else (output,)
        u = torch.empty(x.shape, dtype=torch.float32, device=x.device).uniform_(
            -eps, eps, generator=random
        )
        planted = (x.float() * (1 + u)).to(x.dtype)
        return (planted, *rest) if isinstance(output, tuple) else planted

    with ExitStack() as hooks:
        for name, place in trainer_sublayers(trainer).items():
            if name.endswith((".attention", ".mlp", "final_norm")):
                hooks.enter_context(place.register_forward_hook(plant))
        yield
