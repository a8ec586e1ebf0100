"""Follows what the solution returns through the tests, and refuses those whose verdict it decides.

    names of the solution     --assigned, iterated, passed, stored, branched on--> other names
    names that evaluate code  ---------------------------------------------------> other names
                                              --> operands, calls and branches to refuse

A name is the solution's if anything that a variable or an attribute of that name ever gets is.
Where that is too strict, a problem is left out that could be judged.
"""

import ast
import builtins
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
# their objects become plain data on the way to the solution and from it, or cannot be sent
FOREIGN_MODULES = _words("numpy datetime pathlib uuid")
FOREIGN = _words("""deque Counter OrderedDict defaultdict ChainMap Mock MagicMock AsyncMock bytearray
memoryview GeneratorType""")
FOREIGN_ATTRIBUTES = _words("""shape dtype ndim tolist astype sum mean max min most_common elements
popleft appendleft extendleft rotate move_to_end default_factory _asdict _fields _replace""")
CONTROL = _words("StopIteration StopAsyncIteration GeneratorExit KeyboardInterrupt SystemExit")
# end a test, or concern what is in the process of the solution
UNSUPPORTED = CONTROL | _words("""exit quit _exit skip skipif skipTest skipUnless xfail suppress
redirect_stdout redirect_stderr stdout stderr patch setup_method setup_class setup_module warns
assertWarns param fixture expectedFailure environ putenv issubclass""")
# change their object or first argument
MUTATORS = _words("""append add insert extend update setdefault appendleft extendleft push put
heappush heapify insort insort_left insort_right setitem delitem iadd copyto fill pop popleft
popitem remove discard clear sort reverse rotate subtract shuffle place putmask""")
# calls that leave all else to an object, and those of them that keep results apart
FORWARDING = _words("""len str repr list tuple set sorted iter next int float complex abs round bool
print sum any all enumerate reversed append assertTrue assertFalse assertIn assertNotIn""")
KEEPING = _words("list tuple str repr print all any enumerate iter next reversed map filter join")
# change no argument, whatever it is
PURE = (
    FORWARDING
    | KEEPING
    | _words("""min max isinstance type range bytes frozenset divmod pow
isclose isnan isinf isfinite fabs floor ceil sqrt gcd approx loads dumps literal_eval Decimal
Fraction split strip startswith endswith count index find replace format get issubset issuperset
dict chain copy deepcopy
raises subTest _call_test AssertionError Exception ValueError RuntimeError""")
)
RAISES = ("raises", "assertRaises", "assertRaisesRegex")
# catch no exception but one that a test expects
CONTEXTS = _words("subTest catch_warnings errstate") | {*RAISES}
RETURNING = (ast.Return, ast.Yield, ast.YieldFrom)
LEAVING = (ast.Return, ast.Continue, ast.Break)
FAILING = (ast.Assert, ast.Raise)
DECIDING = (*FAILING, ast.Return, ast.Compare)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
COMPUTING = (ast.Compare, ast.BinOp, ast.BoolOp, ast.UnaryOp, ast.IfExp)
# share nothing with their operands
FRESH = (ast.Compare, ast.JoinedStr)
# the fields of a node that decide the value of others
SOURCES = "value iter ifs context_expr items test subject decorator_list defaults kw_defaults"
SINKS = """targets target optional_vars body handlers orelse finalbody args posonlyargs kwonlyargs
vararg kwarg"""
SHARING = "targets target optional_vars args posonlyargs kwonlyargs"
STALE = "the solution may have changed its argument, which is not sent back"
BOTH = "both sides are the solution's"
FOREIGNER = "its class becomes another on the way to the solution or back"
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


def _is_in_place(call: ast.Call) -> bool:
    return any(keyword.arg == "_in_place" for keyword in call.keywords)


def _mutated(call: ast.Call) -> list[ast.AST]:
    """Returns expressions whose values a call changes."""
    if _is_in_place(call):
        return [*call.args]
    if called(call) not in MUTATORS:
        return []
    is_function = len(call.args) > 1
    return [*_children(call.func, "value"), *call.args[:is_function]]


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
        self.influenced = {*names, "candidate"}
        self.functions: dict[str, ast.FunctionDef | ast.Lambda] = {}
        self.fixed = {"self", *dir(builtins)}  # names with a value that nothing changes
        unsafe = set(EVALUATING)
        foreign = set(FOREIGN)
        for node in ast.walk(module):
            match node:
                case ast.FunctionDef(name=name) as function:
                    self._define(name, function)
                case ast.Assign(targets=[ast.Name(id=name)], value=ast.Lambda() as function):
                    self._define(name, function)
                case ast.ClassDef(name=name):
                    unsafe |= {name}
                case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                    for alias in aliases:
                        source = getattr(node, "module", None) or alias.name
                        package = source.partition(".")[0]
                        bound = {(alias.asname or alias.name).partition(".")[0]}
                        self.fixed |= bound
                        if package not in SAFE_MODULES:
                            unsafe |= bound
                        if package in FOREIGN_MODULES:
                            foreign |= bound
        flows = [*chain.from_iterable(map(self._flows, ast.walk(module)))]
        shared = [*chain.from_iterable(map(self._shared, ast.walk(module)))]
        self.influenced = _reach(names, [*flows, *shared])
        self.unsafe = _reach(unsafe, flows)
        self.foreign = _reach(foreign, flows)
        self.capitalized = {name for name in names if name[0].isupper()}
        # classes are told from functions by attributes of what they return
        self.classes = set()
        if any(self.of(attribute.value) for attribute in nodes(module, ast.Attribute)):
            self.classes = self.capitalized
        self.instances: set[str] = set()
        self.several: set[str] = set()
        assignments = nodes(module, ast.Assign)
        made = [node.targets for node in assignments if self.is_object(node.value)]
        self.instances = self._roots(*chain.from_iterable(made))
        self.caught = {handler.name for handler in nodes(module, ast.ExceptHandler)}
        if expects_error(module):
            self.caught |= {"value", "exception"}
        calls = nodes(module, ast.Call)
        given = [call.args for call in calls if self.of(call.func) and not _is_in_place(call)]
        # arguments of the solution
        self.given = self._roots(*chain.from_iterable(given)) - self.influenced
        # names with independent results
        collected = [_mutated(call) for call in calls if self.of(*call.args)]
        collected += [node.targets for node in assignments if self.is_several(node.value)]
        self.several = _reach(self._roots(*chain.from_iterable(collected)), flows)

    def _define(self, name: str, function: ast.FunctionDef | ast.Lambda) -> None:
        known = self.functions.setdefault(name, function)
        if known is not function and (self._parameters(known) or self._parameters(function)):
            raise UnreadableTests(f"{name} is defined twice")

    def _roots(self, *trees: ast.AST) -> set[str]:
        """Returns the names and attributes whose values change with those of expressions."""
        roots = set()
        todo = [*trees]
        called_functions = set()
        for node in todo:
            match node:
                case ast.Call(func=function):
                    if self.of(function):
                        continue
                    todo += [*_children(function, "value"), *node.args, *node.keywords]
                    name = called(node)
                    if name in self.functions and name not in called_functions:
                        called_functions.add(name)
                        todo += self._returned(self.functions[name])
                case ast.Subscript(value=value):
                    todo.append(value)
                case _ if _key(node):
                    roots.add(_key(node))
                case _ if isinstance(node, COMPREHENSIONS):
                    todo += _children(node, "elt key value")
                case _ if not isinstance(node, FRESH):
                    todo += ast.iter_child_nodes(node)
        return roots - self.fixed

    def _returned(self, function: ast.FunctionDef | ast.Lambda) -> list[ast.AST]:
        if isinstance(function, ast.Lambda):
            return [function.body]
        return [*chain(*(_children(node, "value") for node in nodes(function, RETURNING)))]

    def _changed(self, *trees: ast.AST) -> set[str]:
        """Returns what statements assign to or change in place."""
        changed = []
        for node in chain.from_iterable(map(ast.walk, trees)):
            is_stored = isinstance(getattr(node, "ctx", None), ast.Store | ast.Del)
            if is_stored or isinstance(node, ast.arg | ast.ExceptHandler):
                changed.append(node)
            elif isinstance(node, ast.Call):
                changed += _mutated(node)
        return self._roots(*changed)

    def _flows(self, node: ast.AST) -> Iterator[Flow]:
        """Yields what a node passes on."""
        yield _mentioned(*_children(node, SOURCES)), self._changed(*_children(node, SINKS))
        match node:
            case ast.Try(body=body):
                yield _mentioned(*body), self._changed(node)
            case ast.With(items=items, body=body):
                yield _mentioned(*body), self._changed(*items)
            case ast.BoolOp() | ast.IfExp() | ast.Delete():
                yield _mentioned(node), self._changed(node)
            case ast.FunctionDef(name=name) if nodes(node, RETURNING):
                yield _mentioned(node).difference(self._parameters(node) or ()), {name}
            case ast.Call(args=arguments, keywords=keywords):
                sources = [*arguments, *keywords]
                if _is_in_place(node):
                    sources.append(node.func)
                yield _mentioned(*sources), self._roots(*_mutated(node))
                yield from self._passed(node)

    def _shared(self, node: ast.AST) -> Iterator[Flow]:
        """Yields what else changes with what a node assigns."""
        targets = _children(node, SHARING)
        if targets and not isinstance(node, ast.Call):
            yield self._changed(*targets), self._roots(*_children(node, SOURCES))

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
            yield {parameter}, self._roots(argument)  # it may be changed in place

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

    def is_several(self, tree: ast.AST) -> bool:
        """Returns whether an expression has results of the solution that could agree."""
        for node in ast.walk(tree):
            operands = _children(node, "elts keys values")
            if isinstance(node, ast.Call) and called(node) in ("map", "filter"):
                operands = [*node.args[:1]] * 2
            elif isinstance(node, COMPREHENSIONS) and not self._counts(node, "iter"):
                operands = _children(node, "elt key value") * 2
            operands = [item for item in operands if not isinstance(item, ast.Compare)]
            is_known = isinstance(node, ast.Name) and node.id in self.several
            if is_known or len([*filter(self.of, operands)]) > 1:
                return True
        return False

    def refusal(self, node: ast.AST) -> str:
        """Returns why a node makes the tests unjudgeable, empty if it does not."""
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.FunctionDef(name=name) if (
                name in UNSUPPORTED
            ):
                return f"{name} is not supported in tests"
            case ast.Name(id="open") | ast.Import(names=[ast.alias(name="solution")]):
                return "not supported in tests"
            case ast.FunctionDef(name=name) if name.startswith("__") and name != "__init__":
                return f"{name} is not supported in tests"
            case ast.AsyncFunctionDef() | ast.Await() | ast.TryStar():
                return f"{type(node).__name__} is not supported in tests"
            case ast.Assert() if self._is_stale(node.test):
                return STALE
            case ast.Compare():
                return self._refused_comparison(node)
            case ast.Set() | ast.Dict():
                return self._refused_operands(_children(node, "elts keys"))
            case ast.SetComp() if self.is_several(node):
                return BOTH
            case ast.DictComp(key=key) | ast.Subscript(slice=key, ctx=ast.Store()) if self.of(key):
                return BOTH
            case ast.BinOp() | ast.AugAssign():
                operands = _children(node, "left target right value")
                is_number = isinstance(operands[1], ast.Constant)
                if isinstance(node.op, ast.Mod) and self.of(operands[0]) and not is_number:
                    return FORMATS
                return self._refused_operands(operands)
            case ast.Call():
                return self._refused_call(node)
            case ast.Attribute(value=value, attr=name):
                return self._refused_attribute(value, name)
            case ast.FormattedValue(format_spec=ast.AST() as format_spec):
                return FORMATS if self.of(format_spec) else ""
            case ast.withitem(context_expr=context):
                return ONLY if self.of(context) and not expects_error(context) else ""
            case ast.IfExp(test=test):
                return SKIPS if self.of(test) else ""
            case ast.FunctionDef(decorator_list=decorators) if self.of(*decorators):
                return "passes a function to the solution"
            case ast.stmt():
                return SKIPS if self._skips(node) else ""
            case _ if isinstance(node, COMPREHENSIONS):
                return SKIPS if self._thins(node) else ""
        return ""

    def _is_stale(self, tree: ast.AST) -> bool:
        return bool(_mentioned(tree) & self.given) and not self.of(tree)

    def _refused_operands(self, operands: Sequence[ast.AST]) -> str:
        if len([*filter(self.of, operands)]) > 1:
            return BOTH
        return ONLY if any(map(self.is_object, operands)) else ""

    def _refused_comparison(self, node: ast.Compare) -> str:
        sides = [node.left, *node.comparators]
        results = [side for side in sides if self.of(side) and not self._roots(side) & self.given]
        if not results and self._roots(*sides) & self.given:
            return STALE
        if results and _mentioned(node) & self.foreign:
            return FOREIGNER
        if any(isinstance(side, ast.Name) and side.id in self.names for side in sides):
            return "variables of the solution are not sent"
        if isinstance(node.ops[0], ast.Is | ast.IsNot) and _mentioned(sides[1]) & self.given:
            return STALE
        if results == sides[-1:] and isinstance(node.ops[-1], ast.In | ast.NotIn):
            return ""  # a container of the solution
        return self._refused_operands(sides)

    def _refused_attribute(self, value: ast.AST, name: str) -> str:
        if name.startswith("__") and name not in ("__init__", "__name__"):
            return EVALUATES
        if not self.of(value):
            return ""
        if name in ("__name__", "format", "format_map"):
            return EVALUATES
        if name in FOREIGN_ATTRIBUTES and not self.capitalized:
            return f"{name} of plain data"
        if _key(value) in self.caught and not hasattr(Exception, name):
            return "attributes of exceptions are not sent"
        return ""

    def _refused_call(self, call: ast.Call) -> str:
        name = called(call)
        receiver = getattr(call.func, "value", call)
        is_assertion = name.startswith("assert")
        messages = [item for item in call.args[2:] if isinstance(item, ast.JoinedStr)]
        messages += [keyword for keyword in call.keywords if keyword.arg == "msg"]
        arguments = [*call.args, *call.keywords]
        if is_assertion:
            arguments = [argument for argument in arguments if argument not in messages]
            results = [*filter(self.of, call.args)]
            if self._is_stale(call) or self._roots(*results) & self.given:
                return STALE
        is_solution = self.of(call.func)
        if not is_solution and not self.of(*arguments):
            return ""
        if _mentioned(call.func, *arguments) & self.unsafe:
            return EVALUATES
        if _mentioned(*arguments) & self.foreign:
            return FOREIGNER
        text = ast.unparse(call)
        is_quantified = text.startswith(("all(", "any(")) and any(map(self._counts, call.args))
        is_mapped = name in ("map", "filter") and self.of(*call.args[1:])
        is_item_kept = len(call.args) == 2 and _key(call.args[0]) in self.fixed
        if is_quantified or name == "zip" or (is_mapped and not is_item_kept):
            return SKIPS
        if name == "add" and self.of(*arguments) and not self.is_object(receiver):
            return BOTH
        if name in MUTATORS or name in ("print", *self.functions):
            return ""
        if is_solution:
            if any(map(self._is_function, arguments)):
                return "passes a function to the solution"
            given = (_mentioned(*arguments) & self.influenced) - self.capitalized - self.instances
            is_changed_again = _is_in_place(call) and len(self.names) == 1
            return "gives the solution what it returned" if given and not is_changed_again else ""
        return self._refused_function(call, arguments)

    def _refused_function(self, call: ast.Call, arguments: Sequence[ast.AST]) -> str:
        name = called(call)
        if not name.startswith("assert"):
            if name not in PURE:
                return f"{name} may change its arguments, or evaluate them"
            if name == "format" and not isinstance(_children(call.func, "value")[0], ast.Constant):
                return FORMATS
            if name not in KEEPING and any(map(self.is_several, arguments)):
                return BOTH
        results = [*filter(self.of, arguments)]
        if ast.Starred in map(type, results):
            return BOTH
        if name in FORWARDING and len(results) == 1:
            return ""
        return self._refused_operands(arguments)

    def _is_function(self, argument: ast.AST) -> bool:
        value = getattr(argument, "value", argument)
        is_builtin = isinstance(value, ast.Name) and value.id in dir(builtins)
        return is_builtin or self._parameters(argument) is not None

    def _counts(self, iterable: ast.AST, fields: str = "iter ifs") -> bool:
        """Returns whether the solution decides how many items there are."""
        deciding = []
        for part in getattr(iterable, "generators", []):
            deciding += _children(part, fields)
        return self.of(*(deciding or [iterable]))

    def _thins(self, comprehension: ast.AST) -> bool:
        """Returns whether the solution decides how many comparisons there are."""
        items = _children(comprehension, "elt key value")
        for part in _children(comprehension, "generators"):
            items += _children(part, "ifs") * 2
        compared = chain.from_iterable(nodes(item, COMPUTING) for item in items)
        return self._counts(comprehension, "iter") and (any(compared) or self._asserts(*items))

    def _asserts(self, *trees: ast.AST) -> bool:
        """Returns whether statements may assert something of the solution."""
        for node in chain.from_iterable(map(ast.walk, trees)):
            is_call = isinstance(node, ast.Call) and called(node).startswith(
                ("assert", *self.functions)
            )
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
            case ast.Expr(value=ast.BoolOp() as condition):
                return self.of(condition)
            case ast.Try(body=body, orelse=other, handlers=handlers) if self.of(*body):
                ends = chain.from_iterable(
                    nodes(item, LEAVING) for item in [*handlers, *node.finalbody]
                )
                is_caught = not all(nodes(handler, FAILING) for handler in handlers)
                is_expected = any(
                    nodes(item, FAILING) or ".fail(" in ast.unparse(item)
                    for item in [*body, *other]
                )
                return any(ends) or (
                    is_caught and (not is_expected or self._asserts(*body, *other))
                )
            case ast.With(items=items, body=body) if self.of(*body):
                contexts = [getattr(item.context_expr, "func", item) for item in items]
                names = {ast.unparse(context).rpartition(".")[2] for context in contexts}
                return not names <= CONTEXTS
            case ast.For(iter=control, body=body) | ast.While(test=control, body=body):
                deciding = chain.from_iterable(nodes(item, DECIDING) for item in body)
                return self._counts(control) and (any(deciding) or self._asserts(*body))
        return False
