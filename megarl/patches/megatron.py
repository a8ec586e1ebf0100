"""Runs Megatron-Core on a CPU: only `megatron.core` and `megatron.bridge` see a patched torch.

Megatron-Core uses `torch.cuda` on some 500 lines. Patching `torch.cuda` for the whole process would
make vLLM, which runs in the same process, detect a GPU. Instead `install()` adds a finder to
`sys.meta_path`. Modules of megatron.core loaded through it get their own `__builtins__`, whose
`__import__` returns views of `torch`, `torch.cuda` and `torch.distributed`: the real modules with
the overrides of PATCHES. Method calls (`x.cuda()`, `x.type()`) are rewritten when the few files
that contain them are compiled. With CUDA `install()` does nothing.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.patches.patch import Patch

_PACKAGE = "megatron.core"
_SEEN_BY = (f"{_PACKAGE}.", "megatron.bridge.")


_CPU = torch.device("cpu")


def _nothing(*_args: Any, **_kwargs: Any) -> None: ...


class _Stream(contextlib.AbstractContextManager):
    """Stands in for a CUDA stream or event. A CPU executes in order, so nothing has to wait."""

    __init__ = __exit__ = wait_stream = wait_event = synchronize = record = wait = _nothing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    def record_event(self, event: _Stream | None = None) -> _Stream:
        return event or self

    def query(self) -> bool:
        return True


# Replaces the GPU's random state, which Megatron seeds, saves and swaps while it checks that the
# CPU's random state is unchanged. No numbers are drawn from it: layers have no dropout, and
# parameters are loaded.
_GENERATOR = torch.Generator()
_RANDOM = ("torch.cuda", "torch.cuda.random")


def _no_compile(function: Any = None, **_options: Any) -> Any:
    """Replaces torch.compile, with or without arguments, by a decorator that changes nothing."""
    return function or _no_compile


def _on_host(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Returns the factory with device="cuda" replaced by the CPU and pin_memory ignored."""

    @wraps(factory)
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
    return dist.all_to_all_single(
        output,
        input.contiguous(),
        _as_integers(output_split_sizes),
        _as_integers(input_split_sizes),
        group,
        async_op,
    )


def _as_integers(sizes: Any) -> list[int] | None:
    return None if sizes is None else list(map(int, sizes))


def _all_gather(
    tensor_list: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False
) -> Any:
    """Replaces all_gather; pads parts of different lengths to the longest, as gloo needs."""
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
    """Replaces reduce_scatter; all-reduces parts of different lengths as one tensor, of which each
    rank keeps its part.
    """
    if len({part.shape for part in input_list}) == 1:
        inputs = [part.contiguous() for part in input_list]
        return dist.reduce_scatter(output, inputs, op, group, async_op)
    assert not async_op, "an uneven reduce_scatter is emulated and cannot be asynchronous"
    whole = torch.cat(input_list)
    dist.all_reduce(whole, op, group)
    output.copy_(whole.split([len(part) for part in input_list])[dist.get_rank(group)])


def _type_name(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Replaces `tensor.type`: returns the CUDA type's name; with arguments, converts as usual."""
    result = tensor.type(*args, **kwargs)
    return result if args or kwargs else result.replace("torch.", "torch.cuda.", 1)


_FACTORIES = """
    arange as_tensor empty empty_like eye full full_like linspace ones ones_like rand randn tensor
    zeros zeros_like
"""

_AS_ABOVE = "as above"
_row = partial(
    Patch,
    versions="0.16.1, 0.19.2",
    delete_when="Megatron-Core no longer uses the name",
    test="unit/patches/test_megatron.py::test_upstream_still_needs_the_row",
)

PATCHES = (
    # devices
    _row("torch.cuda.current_device", lambda: _CPU, "names the device of every buffer"),
    _row("torch.cuda.device_count", lambda: 1, "bounds the local rank"),
    _row("torch.cuda.set_device", _nothing, "selects the GPU"),
    _row("torch.cuda.device", contextlib.nullcontext, "enters a GPU to set its random state"),
    _row("torch.cuda._lazy_init", _nothing, "starts CUDA before reading a generator"),
    _row("torch.cuda._lazy_call", lambda function, **_: function(), "queues calls for CUDA"),
    _row(".cuda()", lambda tensor, *_, **__: tensor, "moves rotary embeddings (context parallel)"),
    _row(".type()", _type_name, "sorts parameters by 'torch.cuda.FloatTensor' names"),
    *(
        _row(f"torch.{name}", _on_host(getattr(torch, name)), 'device="cuda"')
        for name in _FACTORIES.split()
    ),
    # randomness
    _row("torch.cuda.manual_seed", _GENERATOR.manual_seed, "seeds the model-parallel random state"),
    _row("torch.cuda.default_generators", defaultdict(lambda: _GENERATOR), _AS_ABOVE),
    *(
        _row(f"{module}.get_rng_state", lambda device=None: _GENERATOR.get_state(), _AS_ABOVE)
        for module in _RANDOM
    ),
    *(
        _row(
            f"{module}.set_rng_state",
            lambda state, device=None: _GENERATOR.set_state(state),
            _AS_ABOVE,
        )
        for module in _RANDOM
    ),
    # order of execution
    _row("torch.cuda.Stream", _Stream, "side streams for communication and offload"),
    _row("torch.cuda.Event", _Stream, "orders streams"),
    _row("torch.cuda.stream", lambda _stream: _Stream(), "enters a side stream"),
    _row("torch.cuda.current_stream", _Stream, "waits for side streams"),
    _row("torch.cuda.default_stream", _Stream, _AS_ABOVE),
    _row("torch.cuda.synchronize", _nothing, "waits for the GPU"),
    _row(
        "torch.cuda.is_current_stream_capturing",
        lambda: False,
        "checks for CUDA graph capture",
        versions="0.19.2",
    ),
    _row("torch.cuda.nvtx.range_push", _nothing, "marks profiler ranges"),
    _row("torch.cuda.nvtx.range_pop", _nothing, _AS_ABOVE),
    # others
    _row(
        "wandb",
        None,
        "imports it, where it is installed, for its timers; importing it takes a seventh of a "
        "rank's start, and megarl has timers of its own",
    ),
    _row(
        "torch.compile",
        _no_compile,
        "compiles its fused pointwise functions; compiling takes longer than small functions run,"
        " and inductor needs a C++ compiler",
    ),
    _row(
        "torch.distributed.all_to_all_single",
        _all_to_all_single,
        "passes split sizes as tensors or arrays, and strided inputs; gloo refuses them",
    ),
    _row(
        "torch.distributed.all_gather",
        _all_gather,
        "gathers uneven sizes (TP x EP); gloo refuses them",
    ),
    _row(
        "torch.distributed.reduce_scatter",
        _reduce_scatter,
        "reduces uneven sizes (TP x EP); gloo refuses them",
    ),
    _row(
        f"{_PACKAGE}.transformer.moe.moe_utils.te_general_gemm",
        None,
        "leaves it undefined without Transformer Engine",
        versions="0.16.1",
    ),
    _row(
        f"{_PACKAGE}.transformer.multi_latent_attention.HAVE_TE",
        False,
        "sets it without the classes of Transformer Engine",
        versions="0.16.1",
    ),
)


@dataclass
class _Rewrite(ast.NodeTransformer):
    """Rewrites method calls such as `x.cuda(...)` to `__host_cuda__(x, ...)`."""

    methods: dict[str, str]

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        method = node.func
        if not isinstance(method, ast.Attribute) or method.attr not in self.methods:
            return node
        name = ast.copy_location(ast.Name(self.methods[method.attr], ast.Load()), method)
        call = ast.Call(name, [method.value, *node.args], node.keywords)
        return ast.copy_location(call, node)


class _Loader(SourceFileLoader):
    """Loads a module of megatron.core with the finder's builtins in its globals."""

    host: _Host

    def get_code(self, fullname: str) -> CodeType | None:
        source = self.get_data(self.path)
        if not any(f".{method}(".encode() in source for method in self.host.methods):
            return super().get_code(fullname)  # cached bytecode
        tree = _Rewrite(self.host.methods).visit(ast.parse(source, self.path))
        return compile(ast.fix_missing_locations(tree), self.path, "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__builtins__"] = self.host.builtins
        super().exec_module(module)
        vars(module).update(self.host.names[module.__name__])


class _Host:
    """The finder on `sys.meta_path` that loads megatron.core and megatron.bridge with PATCHES."""

    def __init__(self) -> None:
        self.methods = {}
        self.hidden = [patch.where for patch in PATCHES if patch.where.isalpha()]
        self.names = defaultdict(dict)  # module -> {name: replacement}
        self.builtins = {**vars(builtins), "__import__": self._import}
        for patch in PATCHES:
            if patch.where in self.hidden:
                continue
            module, _, name = patch.where.rpartition(".")
            if module:
                self.names[module][name] = patch.replacement
            else:
                method = name.strip("()")
                self.methods[method] = f"__host_{method}__"
                self.builtins[self.methods[method]] = patch.replacement
        # {"torch": view, "torch.cuda": view, ...}; the first contains the second
        self.views = {}
        for module in sorted(self.names, key=lambda name: -name.count(".")):  # innermost first
            if not module.startswith(_PACKAGE):
                view = self.views[module] = ModuleType(module)
                missing = partial(getattr, sys.modules[module])
                vars(view).update(self.names[module], __getattr__=missing)
                outer, _, name = module.rpartition(".")
                self.names[outer][name] = view

    def _import(self, *args: Any, **kwargs: Any) -> Any:
        """Replaces __import__: returns the view of a patched module in place of the module.

        That is torch for `import torch.x`, and torch.x for `from torch.x import y`.
        """
        if args[0] in self.hidden:
            raise ImportError(f"{args[0]} is hidden from {_PACKAGE}")
        module = builtins.__import__(*args, **kwargs)
        return self.views.get(getattr(module, "__name__", ""), module)

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if not f"{fullname}.".startswith(_SEEN_BY):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec and type(spec.loader) is SourceFileLoader:
            spec.loader = _Loader(fullname, spec.loader.path)
            spec.loader.host = self
        return spec


def is_installed() -> bool:
    return any(isinstance(finder, _Host) for finder in sys.meta_path)


def install() -> bool:
    """Makes megatron.core run on a CPU; returns True if the patches are active.

    Does nothing with CUDA, or when called again. Raises RuntimeError if megatron.core was imported
    earlier.
    """
    if torch.cuda.is_available():
        return False
    if is_installed():
        return True
    if _PACKAGE in sys.modules:
        raise RuntimeError(
            f"{_PACKAGE} was imported before {__name__}.install(); call install() first"
        )
    sys.meta_path.insert(0, _Host())
    return True
