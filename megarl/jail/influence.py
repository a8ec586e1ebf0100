"""Follows what the solution returns through the tests, and refuses those whose verdict it decides.

    names of the solution     --assigned, iterated, passed, stored, branched on--> other names
    names that evaluate code  ---------------------------------------------------> other names
                                              --> operands, calls and branches to refuse

A name is the solution's if anything that a variable or an attribute of that name ever gets is.
Where that is too strict, a problem is left out that could be judged.
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
contextlib warnings""")
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
# catch no exception but one that a test expects
CONTEXTS = _words("subTest warns catch_warnings errstate") | {*RAISES}
# of equal operands, the result is known
CANCELLING = (ast.Sub, ast.Div, ast.FloorDiv, ast.Mod, ast.BitXor, ast.BitAnd)
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
FORMATS = "the solution would choose the format"
SKIPS = "the solution would decide which assertions run"
NAMED = {ast.Name: "id", ast.Attribute: "attr", ast.arg: "arg", ast.ExceptHandler: "name"}
Node = TypeVar("Node", bound=ast.AST)
Flow = tuple[set[str], set[str]]  # from names to others


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


def _key(node: ast.AST) -> str:
    """Returns the name of a variable or an attribute, or nothing."""
    for kind, field in NAMED.items():
        if isinstance(node, kind):
            return getattr(node, field) or ""
    return ""


def _mentioned(*trees: ast.AST) -> set[str]:
    return set(map(_key, chain.from_iterable(map(ast.walk, trees)))) - {""}


def _roots(*trees: ast.AST) -> set[str]:
    """Returns the names and attributes whose values change with those of expressions."""
    roots = set()
    for node in trees:
        while isinstance(node, ast.Subscript | ast.Starred):
            node = node.value
        roots.add(_key(node))
    return roots - {""}


def _changed(*trees: ast.AST) -> set[str]:
    """Returns what statements assign to or change in place."""
    changed = []
    for node in chain.from_iterable(map(ast.walk, trees)):
        is_stored = isinstance(getattr(node, "ctx", None), ast.Store)
        if is_stored or isinstance(node, ast.arg | ast.ExceptHandler):
            changed.append(node)
        elif isinstance(node, ast.Call):
            changed += _mutated(node)
    return _roots(*changed)


def _is_in_place(call: ast.Call) -> bool:
    return any(keyword.arg == "_in_place" for keyword in call.keywords)


def _mutated(call: ast.Call) -> list[ast.AST]:
    """Returns expressions whose values a call changes."""
    if _is_in_place(call):
        return [*call.args]
    if called(call) in MUTATORS:
        return [*_children(call.func, "value"), *call.args[:1]]
    return []


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
        self.names = names
        self.functions: dict[str, ast.FunctionDef | ast.Lambda] = {}
        unsafe = set(EVALUATING)
        for node in ast.walk(module):
            match node:
                case ast.FunctionDef(name=name):
                    self.functions[name] = node
                case ast.Assign(targets=[ast.Name(id=name)], value=ast.Lambda() as function):
                    self.functions[name] = function
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
        self.capitalized = {name for name in names if name[0].isupper()}
        # classes are told from functions by attributes of what they return
        self.classes = set()
        if any(self.of(attribute.value) for attribute in nodes(module, ast.Attribute)):
            self.classes = self.capitalized
        self.instances: set[str] = set()
        made = [node.targets for node in nodes(module, ast.Assign) if self.is_object(node.value)]
        self.instances = _roots(*chain.from_iterable(made))
        self.caught = {handler.name for handler in nodes(module, ast.ExceptHandler)}
        calls = [call for call in nodes(module, ast.Call) if self.of(call.func)]
        given = [call.args for call in calls if not _is_in_place(call)]
        self.given = _roots(*chain.from_iterable(given))  # arguments of the solution

    def _flows(self, node: ast.AST) -> Iterator[Flow]:
        """Yields what a node passes on."""
        yield _mentioned(*_children(node, SOURCES)), _changed(*_children(node, SINKS))
        match node:
            case ast.Assign(targets=targets, value=ast.Name() | ast.Subscript() | ast.Attribute()):
                yield _roots(*targets), _roots(node.value)
            case ast.Try(body=body):
                yield _mentioned(*body), _changed(node)
            case ast.FunctionDef(name=name) if nodes(node, RETURNING):
                yield _mentioned(node).difference(self._parameters(node) or ()), {name}
            case ast.Call(args=arguments, keywords=keywords):
                sources = [*arguments, *keywords]
                if _is_in_place(node):
                    sources.append(node.func)
                yield _mentioned(*sources), _roots(*_mutated(node))
                yield from self._passed(node)

    def _passed(self, call: ast.Call) -> Iterator[Flow]:
        """Yields what a call passes to parameters of the tests' functions."""
        everything = _mentioned(call)
        for argument in [*call.args, *call.keywords]:
            yield everything, set(self._parameters(argument) or ())
        parameters = self._parameters(call.func) or []
        is_plain = len(call.args) <= len(parameters) and ast.Starred not in map(type, call.args)
        if call.keywords or not is_plain:
            yield everything, set(parameters)
        for parameter, argument in zip(parameters, call.args, strict=False):
            yield _mentioned(argument), {parameter}
            yield {parameter}, _roots(argument)  # it may be changed in place

    def _parameters(self, function: ast.AST) -> list[str] | None:
        """Returns the parameters of a function of the tests."""
        if isinstance(function, ast.keyword):
            function = function.value
        function = self.functions.get(_key(function), function)
        if not isinstance(function, ast.FunctionDef | ast.Lambda):
            return None
        names = [parameter.arg for parameter in nodes(function.args, ast.arg)]
        return [name for name in names if name != "self"]

    def of(self, *trees: ast.AST) -> bool:
        """Returns whether expressions can have values of the solution."""
        return not self.influenced.isdisjoint(_mentioned(*trees))

    def is_object(self, node: ast.AST) -> bool:
        """Returns whether an expression is an instance of a class of the solution."""
        if isinstance(node, ast.Call):
            return ast.unparse(node.func) in self.classes
        return _key(node) in self.instances

    def refusal(self, node: ast.AST) -> str:
        """Returns why a node makes the tests unjudgeable, empty if it does not."""
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.FunctionDef(name=name) if (
                name in UNSUPPORTED
            ):
                return f"{name} is not supported in tests"
            case ast.AsyncFunctionDef() | ast.Await() | ast.TryStar():
                return f"{type(node).__name__} is not supported in tests"
            case ast.Compare():
                return self._refused_comparison(node)
            case ast.Set() | ast.Dict():
                return self._refused_operands(_children(node, "elts keys"))
            case ast.BinOp() | ast.AugAssign():
                operands = _children(node, "left target right value")
                is_number = isinstance(operands[1], ast.Constant)
                if isinstance(node.op, ast.Mod) and self.of(operands[0]) and not is_number:
                    return FORMATS
                if any(map(self.is_object, operands)):
                    return ONLY
                if isinstance(node.op, CANCELLING):
                    return self._refused_operands(operands)
            case ast.Call():
                return self._refused_call(node)
            case ast.Attribute(value=value, attr=name) if self.of(value):
                if name.startswith("__") or name in ("format", "format_map"):
                    return EVALUATES
                if _key(value) in self.caught and not hasattr(Exception, name):
                    return "attributes of exceptions are not sent"
            case ast.FormattedValue(format_spec=ast.AST() as format_spec):
                return FORMATS if self.of(format_spec) else ""
            case ast.withitem(context_expr=context):
                return ONLY if self.of(context) and not expects_error(context) else ""
            case ast.stmt():
                return SKIPS if self._skips(node) else ""
        return ""

    def _refused_operands(self, operands: Sequence[ast.AST]) -> str:
        if len([*filter(self.of, operands)]) > 1:
            return BOTH
        return ONLY if any(map(self.is_object, operands)) else ""

    def _refused_comparison(self, node: ast.Compare) -> str:
        sides = [node.left, *node.comparators]
        results = [side for side in sides if self.of(side) and not _roots(side) & self.given]
        if not results and _roots(*sides) & self.given:
            return "the solution may have changed its argument, which is not sent back"
        if results == sides[-1:] and isinstance(node.ops[-1], ast.In | ast.NotIn):
            return ""  # a container of the solution
        return self._refused_operands(sides)

    def _refused_call(self, call: ast.Call) -> str:
        name = called(call)
        arguments = [*call.args, *call.keywords]
        if name.startswith("assert"):
            arguments = arguments[:2]  # without the message
        is_solution = self.of(call.func)
        if not is_solution and not self.of(*arguments):
            return ""
        if _mentioned(call.func, *arguments) & self.unsafe:
            return EVALUATES
        text = ast.unparse(call)
        is_quantified = text.startswith(("all(", "any(")) and any(map(self._counts, call.args))
        if is_quantified or name == "zip":
            return SKIPS
        if name in COLLECTING or name in self.functions:
            return ""
        if is_solution:
            if any(self._parameters(argument) is not None for argument in arguments):
                return "passes a function to the solution"
            given = (_mentioned(*arguments) & self.influenced) - self.capitalized - self.instances
            is_changed_again = _is_in_place(call) and len(self.names) == 1
            return "gives the solution what it returned" if given and not is_changed_again else ""
        if text.startswith(("len(set(", "len(Counter(", "format(")):
            return "the solution could know the result"
        if name in FORWARDING and len([*filter(self.of, arguments)]) == 1:
            return ""
        return self._refused_operands(arguments)

    def _counts(self, iterable: ast.AST) -> bool:
        """Returns whether the solution decides how many items there are."""
        deciding = []
        for part in getattr(iterable, "generators", []):
            deciding += _children(part, "iter ifs")
        return self.of(*(deciding or [iterable]))

    def _asserts(self, *trees: ast.AST) -> bool:
        """Returns whether statements assert something of the solution."""
        for node in chain.from_iterable(map(ast.walk, trees)):
            is_call = isinstance(node, ast.Call) and called(node).startswith("assert")
            if (is_call or isinstance(node, ast.Assert)) and self.of(node):
                return True
        return False

    def _skips(self, node: ast.stmt) -> bool:
        """Returns whether the solution decides if assertions in a statement run."""
        match node:
            case ast.If(test=test, body=body, orelse=other) if self.of(test):
                leaving = chain.from_iterable(nodes(item, LEAVING) for item in [*body, *other])
                return any(leaving) or self._asserts(*body) != self._asserts(*other)
            case ast.Match(subject=subject):
                return self.of(subject)
            case ast.Try(body=body, orelse=other, handlers=handlers):
                is_caught = not all(nodes(handler, FAILING) for handler in handlers)
                return is_caught and self._asserts(*body, *other)
            case ast.With(items=items, body=body) if self._asserts(*body):
                contexts = [getattr(item.context_expr, "func", item) for item in items]
                names = {ast.unparse(context).rpartition(".")[2] for context in contexts}
                return not names <= CONTEXTS
            case ast.For(iter=control, body=body) | ast.While(test=control, body=body):
                deciding = chain.from_iterable(nodes(item, DECIDING) for item in body)
                return self._counts(control) and (any(deciding) or self._asserts(*body))
        return False
