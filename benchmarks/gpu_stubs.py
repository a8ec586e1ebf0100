"""Lets the GPU packages be imported, and their models be built on meta, on a machine without a GPU or a driver.

Nothing is computed: what is real are names, shapes, dtypes, and the code that decides on them. Call `pretend_gpu`
before importing anything that asks torch for a GPU, and build under `On(device)`.
"""

from __future__ import annotations

import enum
import os
import subprocess
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

DRIVER = """
cuCtxGetCurrent cuCtxSetCurrent cuDeviceGetAttribute cuDevicePrimaryCtxRetain cuDriverGetVersion cuGetErrorString
cuGetProcAddress cuGetProcAddress_v2 cuInit cuMemAddressFree cuMemAddressReserve cuMemCreate
cuMemGetAllocationGranularity cuMemMap cuMemRelease cuMemSetAccess cuMemUnmap cuPointerGetAttribute
cuTensorMapEncodeTiled
"""  # what vLLM's extensions link to
NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE


@dataclass(frozen=True)
class Gpu:
    """What torch and vLLM are told of a GPU."""

    name: str
    major: int  # compute capability
    minor: int
    multi_processor_count: int
    total_memory: int  # bytes
    warp_size: int = 32
    regs_per_multiprocessor: int = 65536


GPUS = {  # sizes of NVIDIA's data sheets
    "h100": Gpu("NVIDIA H100 80GB HBM3", 9, 0, 132, 80 << 30),
    "h200": Gpu("NVIDIA H200", 9, 0, 132, 141 * 10**9),
    "b200": Gpu("NVIDIA B200", 10, 0, 148, 180 * 10**9),
}


class _Stream:
    def __init__(self, *_args: Any, **_options: Any) -> None: ...
    def __getattr__(self, name: str) -> Any:
        return lambda *args, **options: None


def build_driver(folder: Path) -> None:
    """Compiles a libcuda.so.1 without a device into `folder`, for LD_LIBRARY_PATH."""
    source = "\n".join(f"int {name}(void) {{ return {NO_DEVICE}; }}" for name in DRIVER.split())
    command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(folder / "libcuda.so.1")]
    subprocess.run(command, input=source, text=True, check=True)


def environment(driver: Path, packages: Path | None = None) -> dict[str, str]:
    """Of a process that imports the GPU packages, those in `packages` first; `driver` is build_driver's folder."""
    first = {"LD_LIBRARY_PATH": driver, "PYTHONPATH": packages}
    paths = {
        name: ":".join(map(str, filter(None, (x, os.environ.get(name)))))
        for name, x in first.items()
    }
    return {
        **os.environ,
        **paths,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29511",
    }


def pretend_gpu(gpu: Gpu, device: Any) -> None:
    """torch.cuda answers as on a node with eight; `device` is what torch.cuda.current_device() returns."""
    answers = {
        "is_available": True,
        "device_count": 8,
        "current_device": device,
        "get_device_capability": (gpu.major, gpu.minor),
        "get_device_properties": gpu,
        "get_device_name": gpu.name,
        "current_stream": _Stream(),
        "default_stream": _Stream(),
        **dict.fromkeys(
            ("set_device", "synchronize", "_lazy_init", "manual_seed", "set_rng_state")
        ),
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *args, answer=answer, **options: answer)
    torch.cuda.Stream = torch.cuda.Event = _Stream  # type: ignore[assignment, misc]


class On(TorchFunctionMode):
    """Tensors that are to be made on a GPU are made on `device`."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if "cuda" in str(options.get("device")):
            options["device"] = self._device
        return func(*args, **options)


class _Anything:
    """Stands for whatever is looked up in a compiled module: called, subscripted, compared or inherited from."""

    def __init__(self, name: str) -> None:
        self.__dict__["_name"] = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(f"{self._name}.{name}")

    def __call__(self, *args: Any, **options: Any) -> Any:
        return _Anything(f"{self._name}()")

    def __hash__(self) -> int:
        return hash(self._name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Anything) and other._name == self._name

    def __mro_entries__(self, bases: Any) -> tuple[type, ...]:
        return (object,)

    def __int__(self) -> int:
        return abs(hash(self._name)) % 1000

    __index__ = __int__

    def __or__(self, other: Any) -> Any:
        return object

    __ror__ = __or__


class _Compiled(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name)


def stub_transformer_engine() -> None:
    """Imports Transformer Engine's Python, with stand-ins for its compiled part for torch."""
    from transformer_engine import common  # pyright: ignore[reportMissingImports]

    compiled = _Compiled("transformer_engine_torch")
    dtypes = "kByte kInt32 kFloat32 kFloat16 kBFloat16 kFloat8E4M3 kFloat8E5M2 kFloat4E2M1"
    compiled.DType = enum.IntEnum("DType", dtypes, start=0)  # type: ignore[attr-defined]
    backends = {"NVTE_No_Backend": -1, "NVTE_F16_arbitrary_seqlen": 1, "NVTE_FP8": 2}
    compiled.NVTE_Fused_Attn_Backend = enum.IntEnum("NVTE_Fused_Attn_Backend", backends)  # type: ignore[attr-defined]
    for name, value in {
        "get_cudnn_version": 92400,
        "get_num_cublas_streams": 4,
        "get_cublasLt_version": 130100,
    }.items():
        setattr(compiled, name, lambda value=value: value)
    sys.modules["transformer_engine_torch"] = compiled
    common.load_framework_extension = lambda name: None
    import transformer_engine.pytorch  # noqa: F401  # pyright: ignore[reportMissingImports]


def stub_random_states() -> None:
    """Megatron-Core's named random states, which are of the GPU's generator."""
    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = lambda *args, **options: torch.zeros(16, dtype=torch.uint8)
    random._set_cuda_rng_state = lambda *args, **options: None


def stub_memory() -> None:
    """What vLLM's loaders ask about the memory of a GPU, and memory of the host pinned for it."""
    for name in ("empty_cache", "synchronize", "max_memory_allocated", "memory_stats"):
        setattr(torch.accelerator, name, lambda *args, **options: 0)
    torch.cuda.empty_cache = lambda: None
    torch.Tensor.pin_memory = lambda self, *args: self  # type: ignore[method-assign]
    torch.cuda.is_current_stream_capturing = lambda: False


def fake_vllm_platform(gpu: Gpu) -> None:
    """vLLM's CUDA platform, which would ask the driver, answers for `gpu`."""
    from vllm import platforms
    from vllm.model_executor.models import registry
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    class Platform(NonNvmlCudaPlatform):
        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return DeviceCapability(gpu.major, gpu.minor)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return gpu.name

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return gpu.total_memory

        @classmethod
        def num_compute_units(cls, device_id: int = 0) -> int:
            return gpu.multi_processor_count

    platforms._current_platform = Platform()
    # it would only keep CUDA out of this process
    registry._run_in_subprocess = lambda function: function()


def stub_fp8_kernels() -> None:
    """Stand-ins on a CPU for two compiled kernels that vLLM calls while it processes weights.

    DeepGEMM's layout of scales: the same values as fp32, columns first; on a GPU of compute capability 10 the real
    one packs their exponents. And the product with block scales, which an MLA layer multiplies by the unit matrix.
    """
    from vllm.model_executor.kernels.linear.scaled_mm import BlockScaledMMLinearKernel as module
    from vllm.utils import deep_gemm

    def layout(sf: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        return sf.float().mT.contiguous().mT

    def apply_weights(self: Any, layer: Any, x: torch.Tensor, bias: Any = None) -> torch.Tensor:
        params = self._get_layer_params(layer)
        rows, columns = layer.weight_block_size
        scales = params.block_scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
        height, width = params.weight.shape
        return x @ (params.weight.float() * scales[:height, :width]).to(x.dtype).mT

    deep_gemm._apply_pdl = lambda *args: None  # asks the driver
    deep_gemm._lazy_init()
    deep_gemm._transform_sf_into_required_layout_impl = layout
    kernels = [module.Fp8BlockScaledMMLinearKernel]
    for kernel in kernels:
        kernels += kernel.__subclasses__()
        kernel.apply_weights = apply_weights


def pose_as(config: Any, rank: int, tensor: int, data: int) -> None:
    """Makes vLLM's groups, of this one process, those of a rank of several: nothing is sent while a model is built.

    With `data` ranks, the experts are distributed over all tensor x data ranks.
    """
    from vllm.distributed import parallel_state

    places = {
        "_TP": (tensor, rank % tensor),
        "_DP": (data, rank // tensor),
        "_EP": (tensor * data, rank),
    }
    for name, (size, place) in places.items():
        group = getattr(parallel_state, name)
        if group is not None:
            group.world_size = size
            group.rank_in_group = place
    if parallel_state._EP is not None and data > 1:
        # experts ask for its size when their kernel is made, and use it in forward passes only
        parallel_state._EP.device_communicator = SimpleNamespace(
            all2all_manager=SimpleNamespace(world_size=tensor * data), destroy=lambda: None
        )
    sizes = config.parallel_config
    sizes.tensor_parallel_size = tensor
    sizes.data_parallel_size = data
    sizes.data_parallel_rank = rank // tensor
