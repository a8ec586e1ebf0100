"""Runs Megatron-Core on a CPU: `megatron.core` and `megatron.bridge`, and no other package, see a patched torch.

Megatron-Core uses `torch.cuda` on some 500 lines. Patching `torch.cuda` for the whole process would make vLLM, which
runs in the same process, detect a GPU. Instead `install()` adds a finder to `sys.meta_path`. Modules of megatron.core
loaded through it get their own `__builtins__`, whose `__import__` returns views of `torch`, `torch.cuda` and
`torch.distributed`: the real modules with the overrides of PATCHES. Method calls (`x.cuda()`, `x.type()`) are rewritten
when the few files that contain them are compiled. With CUDA `install()` does nothing.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import importlib.machinery
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import CodeType, ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_PACKAGE = "megatron.core"
_SEEN_BY = (f"{_PACKAGE}.", "megatron.bridge.")


@dataclass(frozen=True, slots=True)
class Patch:
    """An override of a dotted name in torch, of a `.method()` of any object, or of a name in megatron.core."""

    where: str
    replacement: Any  # for a method: a function of the object and the arguments
    upstream: str  # what Megatron-Core uses it for
    versions: str = "0.16.1, 0.19.2"  # of megatron-core that need it


_CPU = torch.device("cpu")


def _nothing(*_args: Any, **_kwargs: Any) -> None: ...


class _Stream(contextlib.AbstractContextManager):
    """A CUDA stream or event. A CPU executes in order, so there is a single stream and nothing to wait for."""

    __init__ = __exit__ = wait_stream = wait_event = synchronize = record = wait = _nothing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def record_event(self, event: _Stream | None = None) -> _Stream:
        return event or self

    def query(self) -> bool:
        return True


# Replaces the GPU's random state, which Megatron seeds, saves and swaps while it checks that the CPU's is unchanged.
# Nothing draws from it: layers have no dropout, and parameters are loaded.
_GENERATOR = torch.Generator()
_RANDOM = ("torch.cuda", "torch.cuda.random")


def _no_compile(function: Any = None, **_kwargs: Any) -> Any:
    """torch.compile as a decorator that returns the function unchanged, with or without arguments."""
    return (lambda inner: inner) if function is None else function


def _on_host(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Returns the factory with device="cuda" replaced by the CPU and pin_memory ignored."""

    @functools.wraps(factory)
    def make(*args: Any, device: Any = None, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        if device is not None and torch.device(device).type == "cuda":
            device = _CPU
        return factory(*args, device=device, **kwargs)

    return make


def _all_to_all_single(
    output: Tensor,
    input: Tensor,  # Megatron passes it by this name
    output_split_sizes: Any = None,
    input_split_sizes: Any = None,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    output_sizes, input_sizes = (
        x if x is None else list(map(int, x)) for x in (output_split_sizes, input_split_sizes)
    )
    return dist.all_to_all_single(
        output, input.contiguous(), output_sizes, input_sizes, group, async_op
    )


def _all_gather(
    tensor_list: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False
) -> Any:
    """Pads parts of different lengths to the longest."""
    if len({part.shape for part in tensor_list}) == 1:
        return dist.all_gather(tensor_list, tensor.contiguous(), group, async_op)
    assert not async_op, "an uneven all_gather is emulated and cannot be asynchronous"
    padded = tensor.new_zeros(max(map(len, tensor_list)), *tensor.shape[1:])
    padded[: len(tensor)] = tensor
    buffers = [torch.empty_like(padded) for _ in tensor_list]
    dist.all_gather(buffers, padded, group)
    for part, buffer in zip(tensor_list, buffers, strict=True):
        part.copy_(buffer[: len(part)])


def _reduce_scatter(
    output: Tensor,
    input_list: list[Tensor],
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """Reduces parts of different lengths as one tensor, of which each rank keeps its part."""
    if len({part.shape for part in input_list}) == 1:
        return dist.reduce_scatter(
            output, [part.contiguous() for part in input_list], op, group, async_op
        )
    assert not async_op, "an uneven reduce_scatter is emulated and cannot be asynchronous"
    whole = torch.cat(input_list)
    dist.all_reduce(whole, op, group)
    output.copy_(whole.split([len(part) for part in input_list])[dist.get_rank(group)])


def _type_name(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    """`tensor.type()` returns the name of the CUDA type; with arguments it converts as usual."""
    found: Any = tensor.type(*args, **kwargs)
    return found if args or kwargs else found.replace("torch.", "torch.cuda.", 1)


_FACTORIES = (
    "arange", "as_tensor", "empty", "empty_like", "eye", "full", "full_like", "linspace", "ones", "ones_like",
    "rand", "randn", "tensor", "zeros", "zeros_like",
)  # fmt: skip

PATCHES: tuple[Patch, ...] = (
    # Devices
    Patch("torch.cuda.current_device", lambda: _CPU, "names the device of every buffer"),
    Patch("torch.cuda.device_count", lambda: 1, "bounds the local rank"),
    Patch("torch.cuda.set_device", _nothing, "selects the GPU"),
    Patch("torch.cuda.device", contextlib.nullcontext, "enters a GPU to set its random state"),
    Patch("torch.cuda._lazy_init", _nothing, "starts CUDA before reading a generator"),
    Patch(
        "torch.cuda._lazy_call",
        lambda function, **_kwargs: function(),
        "queues calls until CUDA starts",
    ),
    Patch(
        ".cuda()",
        lambda tensor, *_, **_kwargs: tensor,
        "moves rotary embeddings (context parallelism)",
    ),
    Patch(
        ".type()", _type_name, "the optimizers sort parameters by 'torch.cuda.FloatTensor' names"
    ),
    *(
        Patch(f"torch.{name}", _on_host(getattr(torch, name)), 'device="cuda"')
        for name in _FACTORIES
    ),
    # Randomness
    Patch(
        "torch.cuda.manual_seed",
        _GENERATOR.manual_seed,
        "the model-parallel random state is the GPU's",
    ),
    Patch("torch.cuda.default_generators", defaultdict(lambda: _GENERATOR), "as above"),
    *(
        Patch(f"{cuda}.get_rng_state", lambda device=None: _GENERATOR.get_state(), "as above")
        for cuda in _RANDOM
    ),
    *(
        Patch(
            f"{cuda}.set_rng_state",
            lambda state, device=None: _GENERATOR.set_state(state),
            "as above",
        )
        for cuda in _RANDOM
    ),
    # Order of execution
    Patch("torch.cuda.Stream", _Stream, "side streams for communication and offload"),
    Patch("torch.cuda.Event", _Stream, "orders streams"),
    Patch("torch.cuda.stream", lambda _stream: _Stream(), "enters a side stream"),
    Patch("torch.cuda.current_stream", _Stream, "waits for side streams"),
    Patch("torch.cuda.default_stream", _Stream, "as above"),
    Patch("torch.cuda.synchronize", _nothing, "waits for the GPU"),
    Patch(
        "torch.cuda.is_current_stream_capturing",
        lambda: False,
        "checks for CUDA graph capture",
        "0.19.2",
    ),
    Patch("torch.cuda.nvtx.range_push", _nothing, "marks profiler ranges"),
    Patch("torch.cuda.nvtx.range_pop", _nothing, "as above"),
    # Compilation: takes longer than small functions take to run, and inductor needs a C++ compiler
    Patch("torch.compile", _no_compile, "compiles its fused pointwise functions"),
    # gloo
    Patch(
        "torch.distributed.all_to_all_single",
        _all_to_all_single,
        "split sizes as tensors or arrays",
    ),
    Patch("torch.distributed.all_gather", _all_gather, "uneven sizes (TP x EP); gloo refuses them"),
    Patch("torch.distributed.reduce_scatter", _reduce_scatter, "as above"),
    # Names that need Transformer Engine
    Patch(
        f"{_PACKAGE}.transformer.moe.moe_utils.te_general_gemm",
        None,
        "undefined without it",
        "0.16.1",
    ),
    Patch(
        f"{_PACKAGE}.transformer.multi_latent_attention.HAVE_TE",
        False,
        "true without its classes",
        "0.16.1",
    ),
)


class _View(ModuleType):
    """A module with overrides; submodules that have overrides are views too."""

    def __init__(self, real: ModuleType, overrides: dict[str, Any]) -> None:
        super().__init__(real.__name__, real.__doc__)
        self.__dict__.update(overrides, _real=real)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def _views(patches: Sequence[Patch]) -> dict[str, _View]:
    """{"torch": view, "torch.cuda": view, ...}; the first contains the second."""
    overrides: dict[str, dict[str, Any]] = defaultdict(dict)
    for patch in patches:
        if patch.where.startswith("torch."):
            module, _, name = patch.where.rpartition(".")
            overrides[module][name] = patch.replacement
    views: dict[str, _View] = {}
    for module in sorted(overrides, key=lambda name: -name.count(".")):  # innermost first
        views[module] = _View(sys.modules[module], overrides[module])
        outer, _, name = module.rpartition(".")
        overrides[outer][name] = views[module]
    return views


@dataclass
class _Rewrite(ast.NodeTransformer):
    """Rewrites `x.cuda(...)` to `__host_cuda__(x, ...)`."""

    methods: dict[str, str]

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr in self.methods:
            name = ast.copy_location(ast.Name(self.methods[node.func.attr], ast.Load()), node.func)
            return ast.copy_location(
                ast.Call(name, [node.func.value, *node.args], node.keywords), node
            )
        return node


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads a module of megatron.core with the finder's builtins in its globals."""

    def __init__(self, fullname: str, path: str, host: _Host) -> None:
        super().__init__(fullname, path)
        self._host = host

    def get_code(self, fullname: str) -> CodeType | None:
        source = self.get_data(self.path)
        if not any(f".{method}(".encode() in source for method in self._host.methods):
            return super().get_code(fullname)  # cached bytecode
        tree = _Rewrite(self._host.methods).visit(ast.parse(source, self.path))
        return compile(ast.fix_missing_locations(tree), self.path, "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__builtins__"] = self._host.builtins
        super().exec_module(module)
        vars(module).update(self._host.names.get(module.__name__, {}))


class _Host:
    """The finder on `sys.meta_path`."""

    def __init__(self, patches: Sequence[Patch]) -> None:
        self.views = _views(patches)
        self.methods: dict[str, str] = {}
        self.names: dict[str, dict[str, Any]] = {}
        self.builtins: dict[str, Any] = {**vars(builtins), "__import__": self._import}
        for patch in patches:
            if patch.where.startswith("."):
                method = patch.where.strip(".()")
                self.methods[method] = f"__host_{method}__"
                self.builtins[f"__host_{method}__"] = patch.replacement
            elif patch.where.startswith(_PACKAGE):
                module, _, name = patch.where.rpartition(".")
                self.names.setdefault(module, {})[name] = patch.replacement

    def _import(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the view of torch for `import torch.x`, and of torch.x for `from torch.x import y`."""
        module = builtins.__import__(*args, **kwargs)
        return self.views.get(getattr(module, "__name__", ""), module)

    def find_spec(
        self, fullname: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not f"{fullname}.".startswith(_SEEN_BY):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and type(spec.loader) is importlib.machinery.SourceFileLoader:
            spec.loader = _Loader(fullname, spec.loader.path, self)
        return spec


def is_installed() -> bool:
    return any(isinstance(finder, _Host) for finder in sys.meta_path)


def install() -> bool:
    """Makes megatron.core run on a CPU; returns whether the patches are active. Does nothing with CUDA, or when called
    again. Raises RuntimeError if megatron.core has been imported before."""
    if torch.cuda.is_available():
        return False
    if is_installed():
        return True
    if _PACKAGE in sys.modules:
        raise RuntimeError(
            f"{_PACKAGE} was imported before {__name__}.install(); call install() first"
        )
    sys.meta_path.insert(0, _Host(PATCHES))
    return True
