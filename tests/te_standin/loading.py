"""Imports Transformer Engine's Python files with the patched torch of megarl.patches.megatron."""

from __future__ import annotations

import ast
import contextlib
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import find_spec
from types import CodeType, ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from megarl.patches import megatron as megatron_on_cpu
from megarl.patches.patch import Patch
from te_standin.attention import exchange
from te_standin.compiled import COMPILED

PACKAGE = "transformer_engine."
ATTENTION = f"{PACKAGE}pytorch.attention.dot_product_attention"
H100 = SimpleNamespace(
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=80 << 30,
    name="NVIDIA H100 80GB HBM3",
)


class _DeviceType(type):
    def __instancecheck__(cls, x: object) -> bool:
        return isinstance(x, torch.device)

    def __call__(cls, kind: Any = "cuda", index: Any = None) -> torch.device:
        name = str(kind)
        return torch.device("cpu" if name.startswith("cuda") or name.isdigit() else name)


class _Device(metaclass=_DeviceType):
    """Replaces torch.device: a type for isinstance, and the CPU for a GPU's name."""


class _Coalesced(contextlib.AbstractContextManager):
    """Replaces dist._coalescing_manager, which gloo lacks: collectives in it run at once."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None: ...

    def __exit__(self, *_args: Any) -> None: ...

    def wait(self) -> None: ...


def _row(where: str, replacement: Any, why: str) -> Patch:
    return Patch(where, replacement, why, "2.20.2", "-", "dist/test_te.py")


PATCHES = (
    _row("torch.cuda.is_available", lambda: True, "refuses to build a module"),
    _row("torch.cuda.get_device_properties", lambda *_args: H100, "chooses kernels"),
    _row("torch.cuda.get_device_capability", lambda *_args: (9, 0), "chooses kernels"),
    _row("torch.device", _Device, "compares devices"),
    _row("torch.distributed._coalescing_manager", _Coalesced, "gathers data and scales"),
    _row("torch.cuda.empty_cache", lambda: None, "-"),
)


NAMES = {  # module of Transformer Engine -> names that are replaced after it was loaded
    f"{ATTENTION}.context_parallel": {"flash_attn_p2p_communicate": exchange},
    f"{PACKAGE}common": {"load_framework_extension": lambda _name: None},
}


class _Rewrite(megatron_on_cpu._Rewrite):
    """Rewrites `x.cuda()`, `x.is_cuda`, the name "cuda", and the dtypes of fused attention."""

    takes_fp32 = False

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        return ast.copy_location(ast.Constant("cpu"), node) if node.value == "cuda" else node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        if node.attr == "is_cuda" and isinstance(node.ctx, ast.Load):
            return ast.copy_location(ast.Constant(True), node)
        return node

    def _with_fp32(self, node: Any) -> ast.AST:
        self.generic_visit(node)
        dtypes = {x.attr for x in node.elts if isinstance(x, ast.Attribute)}
        half = {"float16", "bfloat16"}
        if self.takes_fp32 and half <= dtypes <= half | {"float8_e4m3fn"}:
            fp32 = ast.Attribute(ast.Name("torch", ast.Load()), "float32", ast.Load())
            node.elts.append(ast.copy_location(fp32, node))
        return node

    visit_List = visit_Tuple = visit_Set = _with_fp32


class _Loader(megatron_on_cpu._Loader):
    def get_code(self, fullname: str) -> CodeType:
        rewrite = _Rewrite({"cuda": "__host_cuda__"})
        rewrite.takes_fp32 = fullname.startswith(ATTENTION)
        tree = rewrite.visit(ast.parse(self.get_data(self.path), self.path))
        return compile(ast.fix_missing_locations(tree), self.path, "exec", dont_inherit=True)


class _Finder(megatron_on_cpu._Host):
    def __init__(self) -> None:
        super().__init__()
        self.names.update(NAMES)

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if not f"{fullname}.".startswith(PACKAGE):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = _Loader(fullname, spec.loader.path)
            spec.loader.host = self
        return spec


class _NoExport(ModuleType):
    """Replaces the export to ONNX, which imports onnxscript."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


def is_available() -> bool:
    """True if Transformer Engine's Python files are installed, and no GPU is there to use them."""
    return find_spec("transformer_engine") is not None and not torch.cuda.is_available()


def _run_first_config(kernel: Any, *args: Any, **kwargs: Any) -> Any:
    return kernel.fn.run(*args, **kwargs, **kernel.configs[0].kwargs)


def install() -> None:
    """Makes `import transformer_engine` work, also for megatron.core, in this process."""
    assert not torch.cuda.is_available(), "the stand-in would hide the real Transformer Engine"
    assert not {"megatron.core", "transformer_engine"} & sys.modules.keys(), "install() comes first"
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # loads neither CUDA's libraries nor its own
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined
    from triton.runtime.autotuner import Autotuner

    Autotuner.run = _run_first_config  # which times configs on a GPU
    COMPILED.__spec__ = ModuleSpec("transformer_engine_torch", None)
    sys.modules["transformer_engine_torch"] = COMPILED
    sys.modules[f"{PACKAGE}pytorch.onnx_extensions"] = _NoExport("onnx_extensions")
    # without the rows for what megatron.core lacks without Transformer Engine
    shared = [x for x in megatron_on_cpu.PATCHES if not x.where.startswith("megatron.")]
    with patch.object(megatron_on_cpu, "PATCHES", shared):
        megatron_on_cpu.install()
    with patch.object(megatron_on_cpu, "PATCHES", [*shared, *PATCHES]):
        sys.meta_path.insert(0, _Finder())
