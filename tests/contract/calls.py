"""What megarl's code uses of its GPU packages, found by reading it: names, and calls with their arguments.

A use has a path: the dotted name as it was imported, with `()` for an instance or a result: `vllm.LLM().generate`. The
type of a variable is known where it is annotated, or assigned from a call; uses of others are not found. `problems`
compares uses with recorded signatures, {path: "(parameters)", ": type", or "" for an unknown type}.
"""

from __future__ import annotations

import ast
import builtins
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

PROVIDES = {  # distribution -> the package that it installs
    "vllm": "vllm",
    "megatron-core": "megatron.core",
    "transformer-engine": "transformer_engine",
    "nvidia-ml-py": "pynvml",
    "ray": "ray",
}
_SPECS = "megatron.core.models.gpt.gpt_layer_specs.get_gpt_layer_"
FORWARDED = {  # what the **kwargs of the first are given to
    "vllm.LLM": "vllm.EngineArgs",
    f"{_SPECS}local_spec": f"{_SPECS}local_submodules",
    f"{_SPECS}with_transformer_engine_spec": f"{_SPECS}with_transformer_engine_submodules",
}
_SCHEDULES = "megatron.core.pipeline_parallel.schedules.forward_backward"
CONCRETE = {  # what a value is, where its annotation says less
    "vllm.LLM().llm_engine.engine_core": ("vllm.v1.engine.core_client.InprocClient()",),
    "megatron.core.pipeline_parallel.get_forward_backward_func()": (
        f"{_SCHEDULES}_no_pipelining",
        f"{_SCHEDULES}_pipelining_with_interleaving",
        f"{_SCHEDULES}_pipelining_without_interleaving",
    ),
}
# given only if the installed version takes it
OPTIONAL = {("megatron.core.dist_checkpointing.save", "async_strategy")}
_OPTIMIZER = "megatron.core.optimizer.MegatronOptimizer()"
# either is called
RENAMED = {f"{_OPTIMIZER}.get_grads_for_grad_norm": f"{_OPTIMIZER}.get_main_grads_for_grad_norm"}
RENAMED |= {old: new for new, old in RENAMED.items()}
CONTAINERS = ("Sequence", "list", "Iterable", "Iterator", "tuple")
KINDS = inspect.Parameter
Function = ast.FunctionDef | ast.AsyncFunctionDef
Sources = Mapping[str, str]  # {path: text}
Signatures = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Use:
    where: str  # file:line
    path: str
    call: ast.Call | None = None
    override: ast.arguments | None = None  # of a method that overrides the one at `path`
    values: Mapping[str, ast.expr] | None = None  # of the names that a call may spread with **


def signature(arguments: ast.arguments, *, skip: int = 0) -> inspect.Signature:
    """Names, kinds, and `...` for every default; without the first `skip` positional parameters."""
    positional = [*arguments.posonlyargs, *arguments.args]
    required = len(positional) - len(arguments.defaults)
    found = [
        inspect.Parameter(
            x.arg,
            KINDS.POSITIONAL_ONLY if x in arguments.posonlyargs else KINDS.POSITIONAL_OR_KEYWORD,
            default=KINDS.empty if number < required else ...,
        )
        for number, x in enumerate(positional)
    ][skip:]
    if arguments.vararg:
        found.append(inspect.Parameter(arguments.vararg.arg, KINDS.VAR_POSITIONAL))
    for x, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found.append(
            inspect.Parameter(
                x.arg, KINDS.KEYWORD_ONLY, default=KINDS.empty if default is None else ...
            )
        )
    if arguments.kwarg:
        found.append(inspect.Parameter(arguments.kwarg.arg, KINDS.VAR_KEYWORD))
    return inspect.Signature(found)


def as_text(found: inspect.Signature) -> str:
    return str(found).replace("Ellipsis", "...")


def from_text(text: str) -> inspect.Signature:
    function = ast.parse(f"def f{text}: ...").body[0]
    assert isinstance(function, ast.FunctionDef)
    return signature(function.args)


def uses(sources: Sources) -> list[Use]:
    """Without attributes that megarl itself adds to a package's objects."""
    trees = {path: ast.parse(text) for path, text in sources.items()}
    returned = dict(found for tree in trees.values() for found in _returned(tree))
    files = [_File(path, tree, returned) for path, tree in trees.items()]
    added = {path for file in files for path in file.added}
    found = (use for file in files for use in file.uses if not added & set(prefixes(use.path)))
    return [replace(use, path=path) for use in found for path in _concrete(use.path)]


def _returned(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """(`f()`, a dictionary with its keys) of each function that returns one, or one and others that are not known."""
    for node in tree.body:
        if (
            isinstance(node, ast.FunctionDef)
            and isinstance(last := node.body[-1], ast.Return)
            and last.value
        ):
            values = {x.target.id: x.value for x in node.body if isinstance(x, ast.AnnAssign) and x.value and
                      isinstance(x.target, ast.Name)}  # fmt: skip
            value = last.value.left if isinstance(last.value, ast.BinOp) else last.value
            if keys := _spread(value, values):
                yield (
                    f"{node.name}()",
                    ast.Dict([ast.Constant(key) for key in keys], [ast.Constant(0)] * len(keys)),
                )


def _concrete(path: str) -> list[str]:
    start = next((prefix for prefix in prefixes(path) if prefix in CONCRETE), None)
    return [path.replace(start, name, 1) for name in CONCRETE[start]] if start else [path]


class _File:
    def __init__(self, path: str, tree: ast.Module, returned: Mapping[str, ast.expr]) -> None:
        """`returned`: what functions return, as `_returned` gives it."""
        self.path = path
        self.uses: list[Use] = []
        self.added: set[str] = set()  # paths that are assigned to
        self.imports: dict[str, str] = {}
        # of the file's own functions, as _annotated gives them
        self.results: dict[str, dict[str, str]] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom | ast.Import):
                for alias in node.names:
                    name = (
                        f"{node.module}.{alias.name}"
                        if isinstance(node, ast.ImportFrom)
                        else alias.name
                    )
                    if any(is_in(name, package) for package in PROVIDES.values()):
                        self.imports[alias.asname or alias.name] = name
                        self._add(node, name)
        for node in tree.body:
            if isinstance(node, Function) and node.returns:
                self.results[node.name] = self._annotated(node.returns)
        self._body(tree.body, {}, dict(returned))

    def _add(self, node: ast.AST, path: str, **more: object) -> None:
        self.uses.append(Use(f"{self.path}:{node.lineno}", path, **more))  # type: ignore[attr-defined, arg-type]

    def _body(
        self, body: list[ast.stmt], types: dict[str, str], values: dict[str, ast.expr]
    ) -> None:
        """`types`: {variable: path of its value}; `x[]` is the path of an element of x. `values`: what was assigned."""
        for node in body:
            if isinstance(node, Function):
                self._function(node, dict(types), dict(values))
            elif isinstance(node, ast.ClassDef):
                self._class(node, types, values)
            else:
                self._statement(node, types, values)

    def _statement(
        self, node: ast.stmt, types: dict[str, str], values: dict[str, ast.expr]
    ) -> None:
        nested = [
            getattr(node, name) for name in ("body", "orelse", "finalbody") if hasattr(node, name)
        ]
        for field, value in ast.iter_fields(node):
            if field not in ("body", "orelse", "finalbody", "handlers"):
                for expression in value if isinstance(value, list) else [value]:
                    if isinstance(expression, ast.AST):
                        self._expression(expression, types, values)
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name):
                values[target.id] = node.value
                found = (
                    self._annotated(node.annotation) if isinstance(node, ast.AnnAssign) else None
                )
                self._learn(types, target.id, found or {"": self._path(node.value, types)})
        elif isinstance(node, ast.For):
            self._element(node, types)
        for statements in nested:
            self._body(statements, types, values)
        for handler in getattr(node, "handlers", ()):
            if handler.type:
                self._expression(handler.type, types, values)
            self._body(handler.body, types, values)

    def _element(self, loop: ast.For | ast.comprehension, types: dict[str, str]) -> None:
        if isinstance(loop.target, ast.Name):
            self._learn(types, loop.target.id, {"": self._path_of_element(loop.iter, types)})

    def _path_of_element(self, node: ast.expr, types: Mapping[str, str]) -> str | None:
        if isinstance(node, ast.Call):
            return self.results.get(_dotted(node.func), {}).get("[]")
        return types.get(f"{node.id}[]") if isinstance(node, ast.Name) else None

    @staticmethod
    def _learn(types: dict[str, str], name: str, found: Mapping[str, str | None]) -> None:
        types.pop(name, None)
        types |= {name + suffix: path for suffix, path in found.items() if path}

    def _function(self, node: Function, types: dict[str, str], values: dict[str, ast.expr]) -> None:
        arguments = node.args
        for x in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
            if x.annotation:
                self._learn(types, x.arg, self._annotated(x.annotation))
                self._expression(x.annotation, {}, {})
        self._body(node.body, types, values)

    def _class(
        self, node: ast.ClassDef, types: dict[str, str], values: dict[str, ast.expr]
    ) -> None:
        """A subclass of a package's class sees that class through `self` and `super()`, less what it defines itself."""
        bases = [path for base in node.bases if (path := self._path(base, types))]
        members = {x.name for x in node.body if isinstance(x, Function)}
        stored = [
            x
            for x in ast.walk(node)
            if isinstance(x, ast.Attribute) and isinstance(x.ctx, ast.Store)
        ]
        members |= {x.attr for x in stored} | {
            target.id for x in node.body if isinstance(x, ast.Assign | ast.AnnAssign)
            for target in (x.targets if isinstance(x, ast.Assign) else [x.target]) if isinstance(target, ast.Name)
        }  # fmt: skip
        own = {f"self.{name}": "" for name in members}
        if bases:
            own |= {"super()": f"{bases[0]}()", "self": f"{bases[0]}()"}
        for x in node.body:
            if isinstance(x, ast.AnnAssign) and isinstance(x.target, ast.Name):
                own |= {
                    f"self.{x.target.id}{suffix}": path
                    for suffix, path in self._annotated(x.annotation).items()
                }
            if isinstance(x, Function) and x.name == "__init__":
                own |= self._attributes(x)
        for x in node.body:
            if isinstance(x, Function) and bases and not x.name.startswith("__"):
                self._add(x, f"{bases[0]}().{x.name}", override=x.args)
        self._body(node.body, {**types, **own}, values)

    def _attributes(self, node: Function) -> dict[str, str]:
        """{self.x: path} for `self.x = parameter`, also in `self.x, self.y = one, other`."""
        annotated = {x.arg: self._annotated(x.annotation) for x in node.args.args if x.annotation}
        found = {}
        for x in ast.walk(node):
            if isinstance(x, ast.Assign):
                pairs = [(x.targets[0], x.value)]
                if isinstance(x.targets[0], ast.Tuple) and isinstance(x.value, ast.Tuple):
                    pairs = list(zip(x.targets[0].elts, x.value.elts, strict=True))
                for target, value in pairs:
                    if (
                        isinstance(target, ast.Attribute)
                        and isinstance(value, ast.Name)
                        and value.id in annotated
                    ):
                        found |= {
                            _dotted(target) + suffix: path
                            for suffix, path in annotated[value.id].items()
                        }
        return found

    def _annotated(self, node: ast.expr) -> dict[str, str]:
        """{"": path of an instance} or {"[]": path of an element}; {} if the type is not a package's."""
        if isinstance(node, ast.BinOp):  # X | None
            return self._annotated(node.left)
        if isinstance(node, ast.Subscript):
            element = node.slice.elts[0] if isinstance(node.slice, ast.Tuple) else node.slice
            is_container = isinstance(node.value, ast.Name) and node.value.id in CONTAINERS
            path = self._annotated(element).get("")
            return {"[]": path} if is_container and path else {}
        path = self._path(node, {})
        return {"": f"{path}()"} if path else {}

    def _path(self, node: ast.expr, types: Mapping[str, str]) -> str | None:
        if (text := _dotted(node)) in types:
            return types[text] or None
        if isinstance(node, ast.Name):
            return self.imports.get(node.id) if not hasattr(builtins, node.id) else None
        if isinstance(node, ast.Attribute):
            path = self._path(node.value, types)
            return f"{path}.{node.attr}" if path else None
        if isinstance(node, ast.Call):
            path = self._path(node.func, types)
            return f"{path}()" if path else self.results.get(_dotted(node.func), {}).get("")
        return None

    def _expression(
        self, node: ast.AST, types: dict[str, str], values: dict[str, ast.expr]
    ) -> None:
        if isinstance(node, ast.Call) and (path := self._path(node.func, types)):
            self._add(node, path, call=node, values=dict(values))
        elif isinstance(node, ast.Attribute) and (path := self._path(node, types)):
            if isinstance(node.ctx, ast.Load):
                self._add(node, path)
            elif _dotted(node) not in types:  # not a variable of ours
                self.added.add(path)
        if isinstance(node, ast.comprehension):
            self._element(node, types)
        if isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            types = dict(types)
            for generator in node.generators:  # they come after what they bind
                self._expression(generator, types, values)
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.comprehension):
                self._expression(child, types, values)


def _dotted(node: ast.expr) -> str:
    """`a.b.c`, also of `super().c`; an empty text for other expressions."""
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super":
        return "super()"
    return node.id if isinstance(node, ast.Name) else ""


def _spread(node: ast.expr, values: Mapping[str, ast.expr]) -> set[str] | None:
    """The keys of a dictionary given by **; None if they cannot be read."""
    if isinstance(node, ast.Name) and node.id in values:
        return _spread(values[node.id], {name: x for name, x in values.items() if name != node.id})
    if isinstance(node, ast.Call) and (returned := values.get(f"{_dotted(node.func)}()")):
        return _spread(returned, values)
    if isinstance(node, ast.IfExp):
        branches = [_spread(node.body, values), _spread(node.orelse, values)]
        return None if None in branches else set().union(*(keys for keys in branches if keys))
    if not isinstance(node, ast.Dict):
        return None
    keys: set[str] = set()
    for key, value in zip(node.keys, node.values, strict=True):
        found = (
            {key.value}
            if isinstance(key, ast.Constant)
            else _spread(value, values)
            if key is None
            else None
        )
        if found is None:
            return None
        keys |= found
    return keys


def _arguments(call: ast.Call, values: Mapping[str, ast.expr]) -> tuple[int, set[str], bool]:
    """How many positional arguments, which keywords, and whether there may be more."""
    keywords, is_open = (
        {x.arg for x in call.keywords if x.arg},
        any(isinstance(x, ast.Starred) for x in call.args),
    )
    for x in call.keywords:
        if x.arg is None:
            spread = _spread(x.value, values)
            keywords, is_open = keywords | (spread or set()), is_open or spread is None
    return sum(not isinstance(x, ast.Starred) for x in call.args), keywords, is_open


def is_in(path: str, package: str) -> bool:
    return f"{path}.".startswith(f"{package}.")


def check(found: Sequence[Use], recorded: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line for each use that a recorded package would not accept; `recorded` is what signatures.json has."""
    lines = []
    for entry in recorded:
        package = PROVIDES[entry["package"]]
        wrong = problems([use for use in found if is_in(use.path, package)], entry["signatures"])
        lines += [f"{entry['package']} {entry['version']}: {line}" for line in wrong]
    packages = [PROVIDES[entry["package"]] for entry in recorded]
    unknown = [use for use in found if not any(is_in(use.path, package) for package in packages)]
    return lines + [
        f"{use.where}: {use.path} is of a package without recorded signatures" for use in unknown
    ]


def prefixes(path: str) -> Iterator[str]:
    """`a.b().c` -> a, a.b, a.b(), a.b().c"""
    segments = path.replace("()", ".()").split(".")
    return accumulate(
        segments, lambda start, segment: start + ("" if segment == "()" else ".") + segment
    )


def problems(found: Sequence[Use], signatures: Signatures) -> list[str]:
    """One line for each use that the packages would not accept."""
    lines = ((use, _problem(use, signatures)) for use in found)
    return [f"{use.where}: {use.path}: {problem}" for use, problem in lines if problem]


def _problem(use: Use, signatures: Signatures) -> str | None:
    if use.path not in signatures:
        is_unknown = any(signatures.get(prefix) == "" for prefix in prefixes(use.path))
        # a method of our own subclass that overrides nothing
        is_fine = is_unknown or use.override or RENAMED.get(use.path) in signatures
        return None if is_fine else "is not in the recorded packages"
    text = signatures[use.path]
    if not text.startswith("("):
        return None
    try:
        if use.override:
            _override(from_text(text), signature(use.override, skip=1))
        elif use.call:
            _bind(use, from_text(text), signatures)
    except TypeError as error:
        return f"{error}; it takes {text}"
    return None


def _bind(use: Use, taken: inspect.Signature, signatures: Signatures) -> None:
    assert use.call is not None
    count, keywords, is_open = _arguments(use.call, use.values or {})
    keywords = {x for x in keywords if x in taken.parameters or (use.path, x) not in OPTIONAL}
    if text := signatures.get(FORWARDED.get(use.path, "")):
        forwarded = keywords - taken.parameters.keys()
        from_text(text).bind_partial(**dict.fromkeys(forwarded))
    (taken.bind_partial if is_open else taken.bind)(*[None] * count, **dict.fromkeys(keywords))


def _override(base: inspect.Signature, own: inspect.Signature) -> None:
    """Raises TypeError unless `own` accepts all that `base` accepts by name."""
    if any(x.kind == KINDS.VAR_KEYWORD for x in own.parameters.values()):
        return
    named = [
        x
        for x in base.parameters.values()
        if x.kind not in (KINDS.VAR_POSITIONAL, KINDS.VAR_KEYWORD)
    ]
    positional = [x for x in named if x.kind != KINDS.KEYWORD_ONLY and x.default is KINDS.empty]
    own.bind(
        *[None] * len(positional), **dict.fromkeys(x.name for x in named if x not in positional)
    )
