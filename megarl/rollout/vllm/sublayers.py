"""Records the outputs of the sublayers of a vLLM model that runs eagerly.

embedding, layers.<n>.input_norm, .attention, .mlp_norm, .mlp, ..., final_norm
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

PARTS = {
    "input_norm": ("input_layernorm",),
    "attention": ("self_attn", "attn"),
    "mlp_norm": ("post_attention_layernorm",),
    "mlp": ("mlp", "block_sparse_moe"),
}


def engine_sublayers(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the sublayers of families that megarl has tables for, in the order they run."""
    decoder = model.get_submodule("model")
    sublayers = {"embedding": _child(decoder, ("embed_tokens", "embedding"))}
    for number, layer in enumerate(decoder.get_submodule("layers").children()):
        for part, names in PARTS.items():
            sublayers[f"layers.{number}.{part}"] = _child(layer, names)
    sublayers["final_norm"] = _child(decoder, ("norm",))
    return {name: module for name, module in sublayers.items() if module is not None}


@contextmanager
def record_states(
    modules: Mapping[str, nn.Module], projection_HP: Tensor | None
) -> Iterator[dict[str, list[Tensor]]]:
    """Yields each call's outputs on the CPU: [tokens, P], or [tokens, H] without projection."""
    recorded = {name: [] for name in modules}

    def record(outputs: list[Tensor], _module: nn.Module, _inputs: object, output: Any) -> None:
        if isinstance(output, tuple):
            output = output[0]
        x_QH = output.flatten(0, -2)
        # copied at once: the next fused norm overwrites it
        if projection_HP is None:
            outputs.append(x_QH.to("cpu", copy=True))
        else:
            outputs.append(x_QH.cpu().double() @ projection_HP)

    with ExitStack() as hooks:
        for name, module in modules.items():
            hooks.enter_context(module.register_forward_hook(partial(record, recorded[name])))
        yield recorded


def _child(module: nn.Module, names: tuple[str, ...]) -> nn.Module | None:
    for name, child in module.named_children():
        if name in names:
            return child
    return None
