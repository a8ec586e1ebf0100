"""Follows what the solution returns through the tests, and refuses those whose verdict it decides.

    names of the solution     --assigned, iterated, passed, stored, branched on--> other names
    names that evaluate code  ---------------------------------------------------> other names
                                              --> operands, calls and branches to refuse

A name is the solution's if anything that it ever gets is, wherever that is; local names are told
apart by their function. Where that is too strict, a problem is left out that could be judged.
"""

import ast
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TypeVar


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# names that evaluate an argument, or ask for what only Python itself could answer
EVALUATING = _words("""eval exec compile __import__ open globals locals vars dir callable hash id
hasattr getattr setattr delattr breakpoint attrgetter methodcaller Template assertRegex
assertNotRegex""")
# evaluate no argument, and their results can be sent to the solution
SAFE_MODULES = _words("""math cmath numpy collections itertools functools operator json statistics
decimal fractions string heapq bisect copy unittest pytest random typing sys time enum ast
contextlib""")
CONTROL = _words("StopIteration StopAsyncIteration GeneratorExit KeyboardInterrupt SystemExit")
# end a test, or concern what is in the process of the solution
UNSUPPORTED = CONTROL | _words("""exit quit _exit skip skipTest xfail suppress redirect_stdout
redirect_stderr stdout stderr patch setup_method""")
# change their object or first argument
MUTATORS = _words("""append add insert extend update setdefault appendleft push put heappush insort
insort_left insort_right setitem copyto""")
# calls that leave all else to an object
FORWARDING = _words("""len str repr list tuple set sorted iter next int float complex abs round bool
print sum any all enumerate reversed append assertTrue assertFalse assertIn assertNotIn""")
COLLECTING = MUTATORS | _words("dict print chain")
RAISES = ("raises", "assertRaises", "assertRaisesRegex")
# of equal operands, the result is known
CANCELLING = (ast.Sub, ast.Div, ast.FloorDiv, ast.Mod, ast.BitXor, ast.BitAnd)
FUNCTIONS = (ast.FunctionDef, ast.Lambda)
RETURNING = (ast.Return, ast.Yield, ast.YieldFrom)
LEAVING = (ast.Return, ast.Continue, ast.Break)
FAILING = (ast.Assert, ast.Raise)
DECIDING = (*FAILING, ast.Return, ast.Compare)
# the fields of a node that decide the value of others
SOURCES = "value iter ifs context_expr items test subject decorator_list defaults kw_defaults"
SINKS = """targets target optional_vars body handlers orelse finalbody args posonlyargs kwonlyargs
vararg kwarg"""
BOTH = "both sides are the solution's"
ONLY = "only the solution could answer for its object"
EVALUATES = "it evaluates what the solution returned, or cannot be sent to it"
SKIPS = "the solution would decide which assertions run"
Node = TypeVar("Node", bound=ast.AST)
Flow = tuple[set[str], set[str]]  # from names and .attributes to others


class UnreadableTests(ValueError):
    """The solution would decide its own verdict."""


def nodes(tree: ast.AST, kind: type[Node] | tuple[type[Node], ...]) -> list[Node]:
    return [node for node in ast.walk(tree) if isinstance(node, kind)]


def called(call: ast.Call) -> str:
    """Returns the name of a called function or method."""
    return ast.unparse(call.func).rpartition(".")[2]


def expects_error(tree: ast.AST) -> bool:
    return any(called(call) in RAISES for call in nodes(tree, ast.Call))


def check(module: ast.Module, names: set[str]) -> None:
    """Raises UnreadableTests if the solution, with these `names`, would decide a verdict."""
    influence = Influence(module, names)
    for node in ast.walk(module):
        reason = influence.refusal(node)
        if reason:
            raise UnreadableTests(f"{ast.unparse(node)[:80]}: {reason}")


def _children(node: ast.AST, fields: str) -> list[ast.AST]:
    children = []
    for field in fields.split():
        value = getattr(node, field, None)
        children += value if isinstance(value, list) else [value]
    return [child for child in children if isinstance(child, ast.AST)]


def _walk(trees: Sequence[ast.AST]) -> Iterator[ast.AST]:
    return chain.from_iterable(map(ast.walk, trees))


def _is_bound(node: ast.AST) -> bool:
    """Returns whether a node gives a name, an attribute or an item a value."""
    is_stored = isinstance(getattr(node, "ctx", None), ast.Store)
    return is_stored or isinstance(node, ast.arg | ast.ExceptHandler)


def _keys(module: ast.Module) -> dict[ast.AST, str]:
    """Returns names and .attributes; local names end with the ids of their functions."""
    keys = {}
    for node in ast.walk(module):
        for kind, field in ((ast.Name, "id"), (ast.arg, "arg"), (ast.ExceptHandler, "name")):
            if isinstance(node, kind):
                keys[node] = getattr(node, field) or ""
    for function in nodes(module, FUNCTIONS):
        inside = [node for node in ast.walk(function) if node in keys]
        bound = {keys[node] for node in inside if _is_bound(node)}
        for statement in nodes(function, (ast.Global, ast.Nonlocal)):
            bound.difference_update(statement.names)
        for node in inside:
            if keys[node] in bound:
                keys[node] += f" {id(function)}"
    return keys | {node: f".{node.attr}" for node in nodes(module, ast.Attribute)}


def _reach(names: set[str], flows: Sequence[Flow]) -> set[str]:
    reached = set(names)
    size = 0
    while size < len(reached):
        size = len(reached)
        for sources, sinks in flows:
            if reached & sources:
                reached |= sinks
    return reached


class Influence:
    """What of the tests has values of the solution, its objects, or what evaluates."""

    def __init__(self, module: ast.Module, names: set[str]) -> None:
        self.keys = _keys(module)
        self.functions: dict[str, ast.arguments] = {}
        unsafe = EVALUATING | {f".{name}" for name in EVALUATING}
        for node in ast.walk(module):
            match node:
                case ast.FunctionDef(name=name, args=signature):
                    self.functions[name] = signature
                case ast.Assign(targets=[ast.Name(id=name)], value=ast.Lambda(args=signature)):
                    self.functions[name] = signature
                case ast.ClassDef(name=name):
                    unsafe |= {name}
                case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                    for alias in aliases:
                        source = getattr(node, "module", None) or alias.name
                        if source.partition(".")[0] not in SAFE_MODULES:
                            unsafe |= {(alias.asname or alias.name).partition(".")[0]}
        flows = [*chain.from_iterable(map(self._flows, ast.walk(module)))]
        self.influenced = _reach(names, flows)
        self.unsafe = _reach(unsafe, flows)
        self.names = names
        self.capitalized = {name for name in names if name[0].isupper()}
        # classes are told from functions by attributes of what they return
        self.classes = self.capitalized
        if not any(self.of(attribute.value) for attribute in nodes(module, ast.Attribute)):
            self.classes = set()
        self.instances: set[str] = set()
        for node in nodes(module, ast.Assign):
            if self.is_object(node.value):
                self.instances |= self._roots(node.targets)
        self.given: set[str] = set()  # arguments of the solution
        for call in nodes(module, ast.Call):
            if self.of(call.func) and not _is_in_place(call):
                self.given |= self._roots(call.args)

    def _mentioned(self, *trees: ast.AST) -> set[str]:
        """Returns the names and attributes in trees, except local ones of functions in them."""
        inside = {str(id(node)) for node in _walk(trees) if isinstance(node, FUNCTIONS)}
        names = {self.keys[node] for node in _walk(trees) if node in self.keys}
        return {name for name in names if not inside.intersection(name.split())}

    def _roots(self, trees: Sequence[ast.AST]) -> set[str]:
        """Returns the names and attributes whose values change with those of expressions."""
        roots = set()
        for node in trees:
            while isinstance(node, ast.Subscript | ast.Starred):
                node = node.value
            roots.add(self.keys.get(node, ""))
        return roots - {""}

    def _changed(self, *trees: ast.AST) -> set[str]:
        """Returns what statements assign to or change in place."""
        changed = [node for node in _walk(trees) if _is_bound(node)]
        for node in _walk(trees):
            if isinstance(node, ast.Call):
                changed += _mutated(node)
        return self._roots(changed)

    def _flows(self, node: ast.AST) -> Iterator[Flow]:
        """Yields what a node passes on."""
        yield self._mentioned(*_children(node, SOURCES)), self._changed(*_children(node, SINKS))
        match node:
            case ast.Assign(targets=targets, value=ast.Name() | ast.Subscript() | ast.Attribute()):
                yield self._roots(targets), self._roots([node.value])
            case ast.Try(body=body):
                yield self._mentioned(*body), self._changed(node)
            case ast.ClassDef(body=body):
                for name in self._changed(*body):
                    yield {name}, {f".{name}"}
            case ast.FunctionDef(name=name) if nodes(node, RETURNING):
                yield self._mentioned(node), {name, f".{name}"}
            case ast.Call(args=arguments, keywords=keywords):
                sources = [*arguments, *keywords]
                if _is_in_place(node):
                    sources.append(node.func)
                yield self._mentioned(*sources), self._roots(_mutated(node))
                yield from self._passed(node)

    def _passed(self, call: ast.Call) -> Iterator[Flow]:
        """Yields what a call passes to parameters of the tests' functions."""
        for argument in [*call.args, *call.keywords]:
            signature = self._signature(argument)
            if signature:
                yield self._mentioned(call), self._changed(signature)
        signature = self._signature(call.func)
        if signature is None:
            return
        parameters = [parameter for parameter in signature.args if parameter.arg != "self"]
        starred = [argument for argument in call.args if isinstance(argument, ast.Starred)]
        if call.keywords or starred or len(call.args) > len(parameters):
            yield self._mentioned(call), self._changed(signature) | self._roots(call.args)
        for parameter, argument in zip(parameters, call.args, strict=False):
            yield self._mentioned(argument), {self.keys[parameter]}
            yield {self.keys[parameter]}, self._roots([argument])  # it may be changed in place

    def _signature(self, function: ast.AST) -> ast.arguments | None:
        """Returns the parameters of a function of the tests."""
        if isinstance(function, ast.Lambda):
            return function.args
        if isinstance(function, ast.keyword):
            return self._signature(function.value)
        return self.functions.get(ast.unparse(function).rpartition(".")[2])

    def of(self, *trees: ast.AST) -> bool:
        """Returns whether expressions can have values of the solution."""
        return not self.influenced.isdisjoint(self._mentioned(*trees))

    def is_object(self, node: ast.AST) -> bool:
        """Returns whether an expression is an instance of a class of the solution."""
        if isinstance(node, ast.Call):
            return ast.unparse(node.func) in self.classes
        return self.keys.get(node) in self.instances

    def refusal(self, node: ast.AST) -> str:
        """Returns why a node makes the tests unjudgeable, empty if it does not."""
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.FunctionDef(name=name) if (
                name in UNSUPPORTED
            ):
                return f"{name} is not supported in tests"
            case ast.AsyncFunctionDef() | ast.Await():
                return "asynchronous tests are not supported"
            case ast.Compare():
                return self._refused_comparison(node)
            case ast.Set(elts=members) | ast.Dict(keys=members):
                return self._refused_operands(_children(node, "elts keys"))
            case ast.BinOp() | ast.AugAssign():
                operands = _children(node, "left target right value")
                is_number = isinstance(operands[1], ast.Constant)
                if isinstance(node.op, ast.Mod) and self.of(operands[0]) and not is_number:
                    return "the solution would choose the format"
                is_refused = isinstance(node.op, CANCELLING) or not all(map(self.of, operands))
                if is_refused and not all(map(self.is_object, operands)):
                    return self._refused_operands(operands)
            case ast.Call():
                return self._refused_call(node)
            case ast.Attribute(value=value, attr=name) if self.of(value):
                if name.startswith("__") or name in ("format", "format_map"):
                    return EVALUATES
            case ast.FormattedValue(format_spec=ast.AST() as format_spec):
                if self.of(format_spec):
                    return "the solution would choose the format"
            case ast.withitem(context_expr=context) if not expects_error(context):
                if self.of(context):
                    return ONLY
            case ast.ExceptHandler(name=str(name), body=body):
                for attribute in chain.from_iterable(nodes(item, ast.Attribute) for item in body):
                    is_known = hasattr(Exception, attribute.attr)
                    if ast.unparse(attribute.value) == name and not is_known:
                        return "attributes of exceptions are not sent"
            case ast.stmt() if self._skips(node):
                return SKIPS
        return ""

    def _refused_operands(self, operands: Sequence[ast.AST]) -> str:
        if len([*filter(self.of, operands)]) > 1:
            return BOTH
        return ONLY if any(map(self.is_object, operands)) else ""

    def _refused_comparison(self, node: ast.Compare) -> str:
        sides = [node.left, *node.comparators]
        influenced = [side for side in sides if self.of(side)]
        others = [side for side in influenced if not self._roots([side]) & self.given]
        if not others and self._roots(sides) & self.given:
            return "the solution may have changed its argument, which is not sent back"
        is_container = isinstance(node.ops[-1], ast.In | ast.NotIn)
        if influenced == sides[-1:] and is_container or isinstance(node.ops[0], ast.Is | ast.IsNot):
            return BOTH if len(influenced) > 1 else ""
        return self._refused_operands(sides)

    def _refused_call(self, call: ast.Call) -> str:
        name = called(call)
        arguments = [*call.args, *_children(call, "keywords")]
        if name.startswith("assert"):
            arguments = arguments[:2]  # without the message
        influenced = [argument for argument in arguments if self.of(argument)]
        is_solution = self.of(call.func)
        if not is_solution and not influenced:
            return ""
        if self._mentioned(call.func, *arguments) & self.unsafe:
            return EVALUATES
        if name == "zip" or (name in ("all", "any") and any(map(self._counts, arguments))):
            return SKIPS
        if name in COLLECTING or self._signature(call.func):
            return ""
        if is_solution:
            if any(map(self._signature, arguments)):
                return "passes a function to the solution"
            given = self._mentioned(*arguments) & self.influenced
            is_changed_again = _is_in_place(call) and len(self.names) == 1
            if given - self.capitalized - self.instances and not is_changed_again:
                return "gives the solution what it returned"
            return ""
        if ast.unparse(call).startswith(("len(set(", "len(Counter(")):
            return BOTH
        if name in FORWARDING and len(influenced) == 1:
            return ""
        return self._refused_operands(arguments)

    def _counts(self, node: ast.AST) -> bool:
        """Returns whether the solution decides how many items there are."""
        match node:
            case ast.List() | ast.Tuple():
                return self.of(*nodes(node, ast.Starred))
            case ast.ListComp(generators=parts) | ast.GeneratorExp(generators=parts):
                return any(self._counts(part.iter) or self.of(*part.ifs) for part in parts)
            case ast.Call(func=ast.Name(id="map"), args=[_, *iterables]):
                return self.of(*iterables)
        return self.of(node)

    def _asserts(self, trees: Sequence[ast.AST]) -> bool:
        """Returns whether statements assert something of the solution."""
        for node in _walk(trees):
            is_call = isinstance(node, ast.Call) and called(node).startswith("assert")
            if (is_call or isinstance(node, ast.Assert)) and self.of(node):
                return True
        return False

    def _skips(self, node: ast.stmt) -> bool:
        """Returns whether the solution decides if assertions in a statement run."""
        body = _children(node, "body orelse")
        leaving = [item for item in nodes(node, ast.If) if self.of(item.test)]
        match node:
            case ast.If(test=test, body=one, orelse=other) if self.of(test):
                return self._asserts(one) != self._asserts(other)
            case ast.Match(subject=subject):
                return self.of(subject)
            case ast.Try(handlers=handlers) if self._asserts(body):
                return not all(nodes(handler, FAILING) for handler in handlers)
            case ast.For() | ast.While():
                if self.of(*_children(node, "test")) or any(
                    map(self._counts, _children(node, "iter"))
                ):
                    deciding = [item for item in _walk(body) if isinstance(item, DECIDING)]
                    return bool(deciding) or self._asserts(body)
            case ast.FunctionDef():
                pass
            case _:
                return False
        return self._asserts(body) and any(nodes(item, LEAVING) for item in leaving)


def _is_in_place(call: ast.Call) -> bool:
    return any(keyword.arg == "_in_place" for keyword in call.keywords)


def _mutated(call: ast.Call) -> list[ast.AST]:
    """Returns expressions whose values a call changes."""
    if _is_in_place(call):
        return [*call.args]
    if called(call) in MUTATORS:
        return [*_children(call.func, "value"), *call.args[:1]]
    return []
