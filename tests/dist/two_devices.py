"""A second device for tests on a CPU: mixing it with the CPU is refused, as CUDA refuses it.

with two_devices():
    there = torch.zeros(3, device=DEVICE)
    there + torch.zeros(3)  # RuntimeError
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

DEVICE = torch.device("meta")  # the only one whose tensors need no driver
aten = torch.ops.aten
CROSSING = (aten.copy_.default, aten._to_copy.default)
INDEXING = (
    aten.index.Tensor,
    aten.index_put_.default,
    aten.index_put.default,
)  # their indices may be on the CPU


class There(torch.Tensor):
    """A tensor on DEVICE, with its data in `here`."""

    here: Tensor
    bytes_made = 0  # in all

    @staticmethod
    def __new__(cls, here: Tensor) -> There:
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, here.size(), here.stride(), here.storage_offset(), dtype=here.dtype, device=DEVICE
        )
        made.here = here
        There.bytes_made += here.nbytes
        return made

    def numpy(self, **_: Any) -> Any:
        raise TypeError("can't convert a tensor of another device to numpy; use Tensor.cpu()")

    def new_tensor(self, data: Any, dtype: torch.dtype | None = None, **_: Any) -> There:
        return There(self.here.new_tensor(data, dtype=dtype))

    def tolist(self) -> Any:
        return self.here.tolist()

    @classmethod
    def __torch_dispatch__(
        cls, func: Callable, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _dispatch(func, args, kwargs or {})


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Callable, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _dispatch(func, args, kwargs or {})


def _dispatch(func: Callable, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
    is_there = [isinstance(x, There) for x in tensors]
    checked = tensors[:1] if func in INDEXING else tensors
    mixed = {isinstance(x, There) for x in checked if x.dim()}
    if len(mixed) == 2 and func not in CROSSING:
        raise RuntimeError(f"Expected all tensors to be on the same device, but found two: {func}")
    target = kwargs.get("device")
    wraps = any(is_there) if target is None else torch.device(target) == DEVICE
    if target is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    if func is aten.copy_.default:
        wraps = is_there[0]
    inner = tree_map(lambda x: x.here if isinstance(x, There) else x, (args, kwargs))
    result = func(*inner[0], **inner[1])
    for before, data in zip(args, inner[0], strict=True):  # in place: the same tensor
        if result is data and isinstance(before, Tensor):
            return before
    return tree_map(lambda x: There(x) if isinstance(x, Tensor) and wraps else x, result)


@contextmanager
def two_devices() -> Iterator[None]:
    def tensor(data: Any, device: Any = None, **options: Any) -> Tensor:
        made = plain(data, **options)
        return There(made) if device is not None and torch.device(device) == DEVICE else made

    plain, torch.tensor = torch.tensor, tensor  # it does not dispatch
    try:
        with _Mode():
            yield
    finally:
        torch.tensor = plain


def there(x: Tensor) -> Tensor:
    return There(x.clone())
