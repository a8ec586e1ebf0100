"""`transformer_engine_torch`, the compiled module of Transformer Engine, filled by the functions under @stands_in.

COMPILED    the module; what has no stand-in can be looked up while Transformer Engine is imported, not called
CALLS       {function: number of calls}, so that a test can see which layers ran
"""

from __future__ import annotations

import enum
import types
from collections import Counter
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

CALLS: Counter[str] = Counter()


class _Member(int):
    """A member of a compiled enum that Transformer Engine only compares and passes back."""

    name: str

    def __repr__(self) -> str:
        return self.name


class _Members:
    """A compiled enum; members are made when they are first named."""

    def __getattr__(self, name: str) -> _Member:
        if name.startswith("__"):
            raise AttributeError(name)
        member = _Member(len(vars(self)))
        member.name = name
        setattr(self, name, member)
        return member


class _Missing:
    """A name without a stand-in: modules may refer to it when they are loaded; a call fails."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> _Missing:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{self._name}.{name}")

    def __call__(self, *_args: Any, **_kwargs: Any) -> Any:
        raise NotImplementedError(f"transformer_engine_torch.{self._name} has no stand-in")

    def __mro_entries__(self, _bases: Any) -> tuple[type, ...]:
        return (object,)

    def __hash__(self) -> int:
        return hash(self._name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Missing) and other._name == self._name

    def __int__(self) -> int:
        return abs(hash(self._name)) % 1000

    __index__ = __int__

    def __or__(self, _other: Any) -> Any:  # in annotations
        return object

    __ror__ = __or__


class _Compiled(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(name)


COMPILED: Any = _Compiled("transformer_engine_torch")
for _name in ["layernorm_fwd", "layernorm_bwd"]:  # looked up in a copy of the module's dictionary
    setattr(COMPILED, _name, _Missing(_name))


def stands_in(function: Callable[..., Any]) -> Callable[..., Any]:
    """Puts a function into the compiled module, under its own name, and counts its calls."""

    @wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        CALLS[function.__name__] += 1
        return function(*args, **kwargs)

    setattr(COMPILED, function.__name__, counted)
    return function


_OPERANDS = [f"GEMM{n}_{operand}" for n in (1, 2, 3) for operand in ("INPUT", "WEIGHT", "OUTPUT")]
_GRADIENTS = [f"GRAD_{operand}{n}" for n in (1, 2, 3) for operand in ("OUTPUT", "INPUT")]
_ENUMS = {
    "DType": [
        "kByte",
        "kInt32",
        "kFloat32",
        "kFloat16",
        "kBFloat16",
        "kFloat8E4M3",
        "kFloat8E5M2",
        "kFloat4E2M1",
    ],
    "FP8FwdTensors": _OPERANDS,
    "FP8BwdTensors": _GRADIENTS,
}
for _name, _names in _ENUMS.items():
    setattr(COMPILED, _name, enum.IntEnum(_name, _names, start=0))
COMPILED.NVTE_Fused_Attn_Backend = enum.IntEnum(
    "NVTE_Fused_Attn_Backend",
    {"NVTE_No_Backend": -1, "NVTE_F16_arbitrary_seqlen": 1, "NVTE_FP8": 2},
)
for _name in ("QKV_Format", "QKV_Layout", "Bias_Type", "Mask_Type", "Softmax_Type"):
    setattr(COMPILED, f"NVTE_{_name}", _Members())

_TORCH = (
    torch.uint8,
    torch.int32,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)


def torch_dtype(kind: Any, default: torch.dtype | None = None) -> torch.dtype:
    """Returns the torch.dtype of a compiled DType; None gives the default."""
    if kind is None:
        assert default is not None
        return default
    return kind if isinstance(kind, torch.dtype) else _TORCH[int(kind)]


# The device and libraries that Transformer Engine chooses its kernels by
COMPILED.get_cudnn_version = lambda: 92400
COMPILED.get_cublasLt_version = lambda: 130100
COMPILED.get_num_cublas_streams = lambda: 4
COMPILED.get_stream_priority_range = lambda *_args: (0, -5)
COMPILED.get_fused_attn_backend = lambda _parameters: (
    COMPILED.NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen,
    "",
)
