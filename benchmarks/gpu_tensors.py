"""The tensors of a vLLM model after a weight sync against those of a fresh load of the same weights.

Used on a GPU by `benchmarks.gpu_check`, and on CPU tensors by `benchmarks.gpu_contract sync`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

# registries whose tensors are listed already, memory of a forward pass, and adapters on the host
SKIPPED = ("_parameters", "_buffers", "_modules", "kv_cache", "lora_manager", "punica_wrapper")
DEPTH = 6  # of attributes, lists and dictionaries between a module and a tensor
Tensors = dict[str, Tensor]


def tensors_of(model: nn.Module, device: str) -> Tensors:
    """Every tensor on `device` that can be reached from the model's modules, by its path.

    Parameters, buffers, plain attributes, and the attributes of vLLM's objects: kernels, methods and
    configs of quantisation, implementations of attention. Not copies on the host (`*_cpu`), which vLLM makes anew.
    """
    found: Tensors = {}
    seen: set[int] = set()
    for prefix, module in model.named_modules(remove_duplicate=False):
        own = {**module._parameters, **module._buffers, **vars(module)}
        for name, value in own.items():
            if name not in SKIPPED:
                found.update(_reachable(f"{prefix}.{name}", value, DEPTH, seen))
    return {
        path: tensor.detach()
        for path, tensor in found.items()
        if tensor.device.type in (device, "meta") and not path.endswith("_cpu")
    }


def _reachable(path: str, value: Any, depth: int, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
        return
    if not depth or id(value) in seen:
        return
    if isinstance(value, list | tuple):
        items: Iterable[tuple[str, Any]] = ((f"[{n}]", x) for n, x in enumerate(value))
    elif isinstance(value, dict):
        items = ((f"[{n}]", x) for n, x in list(value.items()))
    elif _is_vllm(value):
        seen.add(id(value))
        items = ((f".{n}", x) for n, x in list(vars(value).items()))
    else:
        return
    for name, item in items:
        yield from _reachable(path + name, item, depth - 1, seen)


def _is_vllm(value: Any) -> bool:
    module = type(value).__module__
    if not module.startswith("vllm.") or module.startswith("vllm.config"):
        return False
    return hasattr(value, "__dict__") and not isinstance(value, nn.Module | type)


def addresses_of(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    return {path: tensor.data_ptr() for path, tensor in tensors.items()}


def moved(before: Mapping[str, int], after: Mapping[str, int]) -> list[str]:
    """The paths of tensors that no longer lie where CUDA graphs have captured them."""
    return sorted(path for path in before.keys() & after.keys() if before[path] != after[path])


def differences(live: Mapping[str, Tensor], fresh: Mapping[str, Tensor]) -> dict[str, str]:
    """{path: how} of the tensors of which bytes, dtype, shape or strides differ, or which one side lacks."""
    found = dict.fromkeys(live.keys() - fresh.keys(), "only after a sync")
    found |= dict.fromkeys(fresh.keys() - live.keys(), "only after a fresh load")
    for path in live.keys() & fresh.keys():
        text = _difference(live[path], fresh[path])
        if text:
            found[path] = text
    return dict(sorted(found.items()))


def _difference(a: Tensor, b: Tensor) -> str | None:
    if "meta" in (a.device.type, b.device.type):
        return "has no data"
    if a.dtype != b.dtype or a.shape != b.shape or a.stride() != b.stride():
        sides = (f"{x.dtype} {tuple(x.shape)} {x.stride()}" for x in (a, b))
        return " instead of ".join(sides)
    wrong = (bytes_of(a) != bytes_of(b)).sum()
    return f"{wrong} of {a.nbytes} bytes differ" if wrong else None


def bytes_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def discard(model: nn.Module, device: str) -> None:
    """Overwrites what a sleep at level 2 loses: every tensor but the named buffers, which vLLM saves, and adapters."""
    kept = {tensor.data_ptr() for _, tensor in model.named_buffers()}
    for path, tensor in tensors_of(model, device).items():
        if tensor.data_ptr() not in kept and "lora" not in path and tensor.numel():
            whole = tensor.untyped_storage()
            torch.empty(0, dtype=torch.uint8, device=device).set_(whole).fill_(0x7E)


def kernels_of(model: nn.Module) -> set[str]:
    """The names of the kernels that vLLM has chosen, and of the implementations of attention."""
    found = set()
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        kernel = getattr(method, "moe_kernel", None)
        parts = (*vars(method).values(), getattr(kernel, "fused_experts", None)) if method else ()
        for part in (*parts, getattr(module, "impl", None)):
            name = type(part).__name__
            if any(word in name for word in ("Kernel", "Experts", "Impl")):
                found.add(name)
    return found
