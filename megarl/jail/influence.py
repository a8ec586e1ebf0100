"""Follows what the solution returns through the tests, and refuses those whose verdict it decides.

    names of the solution     --assigned, iterated, passed, stored, branched on--> other names
    names that evaluate code  ---------------------------------------------------> other names
                                              --> operands, calls and branches to refuse

A name is the solution's if anything that a variable or an attribute of that name ever gets is.
Where that is too strict, a problem is left out that could be judged.
"""

from __future__ import annotations

import ast
import builtins
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TypeVar


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# make objects that become plain data on the way to the solution or from it, or cannot be sent
FOREIGN = _words("""deque Counter OrderedDict defaultdict ChainMap Mock MagicMock AsyncMock
bytearray memoryview np numpy datetime timedelta date Path PurePath uuid UUID pd pandas torch
GeneratorType Generator""")
# attributes of objects that come as plain data
LOST = _words("""shape dtype ndim tolist astype sum mean max min most_common elements popleft
appendleft extendleft rotate move_to_end default_factory _asdict _fields _replace T all any flatten
ravel dot item equals iloc loc columns to_dict""")
CONTROL = _words("StopIteration StopAsyncIteration GeneratorExit KeyboardInterrupt SystemExit")
# end a test, or concern what is in the process of the solution
UNSUPPORTED = CONTROL | _words("""exit quit _exit skip skipif skipTest skipUnless xfail suppress
redirect_stdout redirect_stderr stdout stderr patch setup_method setup_class setup_module warns
assertWarns param fixture parametrize expectedFailure environ putenv issubclass open
globals locals vars exec eval setattr delattr pickle marshal StringIO BytesIO assertRegex
assertNotRegex AsyncFunctionDef Await TryStar Match exc_info format_exc doctest
builtins ContextVar Thread ThreadPoolExecutor setUpModule tearDownModule skipIf isfile isdir mkdtemp
mkstemp NamedTemporaryFile TemporaryDirectory write_text read_text""")
# change their object or first argument
MUTATORS = _words("""append add insert extend update setdefault appendleft extendleft push put
heappush heapify insort insort_left insort_right setitem delitem iadd copyto fill pop popleft
popitem remove discard clear sort reverse rotate subtract shuffle place putmask""")
# keep results apart
KEEPING = _words("list tuple str repr print all any enumerate iter reversed join")
# change no argument, whatever it is
PURE = KEEPING | _words("""len set sorted int float complex abs round bool sum min max isinstance
type allclose range bytes frozenset divmod pow isclose isnan isinf isfinite fabs floor ceil sqrt gcd
approx loads dumps literal_eval Decimal Fraction split strip startswith endswith count index find
replace format get issubset issuperset dict chain raises subTest reshape _call_test _sized
AssertionError Exception ValueError""")
ITERATING = _words("all any zip map filter")
SPECIAL = _words("__init__ __import__ __name__")
RAISES = _words("raises assertRaises assertRaisesRegex")
EQUAL = ("Equal", "_series_equal", "_frame_equal")
# catch no exception but one that a test expects
CONTEXTS = _words("subTest catch_warnings errstate") | RAISES
FAILURES = _words("AssertionError Exception BaseException")
RETURNING = (ast.Return, ast.Yield, ast.YieldFrom)
ORDERS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
FAILING = (ast.Assert, ast.Raise)
# end what an exception would have ended, and the exception
ENDING = (ast.Return, ast.Break, ast.Continue)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
# share nothing with their operands
FRESH = (ast.Compare, ast.JoinedStr, ast.Lambda, ast.Call)
# the fields of a node that others get the values of
SOURCES = "value iter context_expr defaults kw_defaults"
TARGETS = "targets target optional_vars args posonlyargs kwonlyargs"
BOTH = "both sides are the solution's"
FOREIGNER = "its class becomes another on the way to the solution or back"
FORMATS = "the solution would choose the format"
NAN = "true of NaN; compare the other way round"
SKIPS = "the solution would decide which assertions run"
STALE = "the solution may have changed its argument, which is not sent back"
PASSES = "passes a function to the solution"
NAMED = {ast.Name: "id", ast.Attribute: "attr", ast.arg: "arg", ast.ExceptHandler: "name"}
Node = TypeVar("Node", bound=ast.AST)
Flow = tuple[set[str], set[str]]  # from names to others


class UnreadableTests(ValueError):
    """The solution would decide its own verdict."""


def nodes(tree: ast.AST, kind: type[Node] | tuple[type[Node], ...]) -> list[Node]:
    return [node for node in ast.walk(tree) if isinstance(node, kind)]


def called(call: ast.Call) -> str:
    """Returns the name of a called function or method, or nothing."""
    return _key(call.func)


def expects_error(tree: ast.AST) -> bool:
    return any(called(call) in RAISES for call in nodes(tree, ast.Call))


def is_asserting(tree: ast.AST) -> bool:
    names = map(called, nodes(tree, ast.Call))
    has_assert = bool(nodes(tree, ast.Assert))
    return has_assert or any(name.startswith(("assert", "fail", "raises")) for name in names)


def _ends_failure(handlers: Sequence[ast.ExceptHandler]) -> bool:
    """Returns whether a failed assertion is caught, and not raised again."""
    for handler in handlers:
        if not handler.type or _mentioned(handler.type) & FAILURES:
            return not isinstance(handler.body[-1], ast.Raise)
    return False


def check(module: ast.Module, names: set[str]) -> Influence:
    """Raises UnreadableTests if the solution, with these `names`, would decide a verdict."""
    influence = Influence(module, names)
    for node in ast.walk(module):
        if reason := influence.refusal(node):
            raise UnreadableTests(f"{ast.unparse(node)[:80]}: {reason}")
    return influence


def _children(node: ast.AST, fields: str) -> list[ast.AST]:
    children = []
    for field in fields.split():
        value = getattr(node, field, None)
        children += value if isinstance(value, list) else [value]
    return [child for child in children if isinstance(child, ast.AST)]


def _key(node: ast.AST) -> str:
    """Returns the name of a variable or an attribute, or nothing."""
    return getattr(node, NAMED.get(type(node), ""), None) or ""


def _mentioned(*trees: ast.AST) -> set[str]:
    return set(map(_key, chain.from_iterable(map(ast.walk, trees)))) - {""}


def _arguments(function: ast.FunctionDef | ast.Lambda) -> list[str]:
    """Returns the names of a function's parameters."""
    names = map(_key, nodes(function.args, ast.arg))
    return [name for name in names if name not in ("self", "cls")]


def _bind(
    function: ast.FunctionDef | ast.Lambda, arguments: Sequence[ast.AST]
) -> Iterator[tuple[str, ast.AST]]:
    """Yields the parameters that get positional arguments, and these."""
    names = _arguments(function)
    rest = function.args.vararg
    if rest:
        names[names.index(rest.arg) :] = [rest.arg] * len(arguments)
    num_extra = len(arguments) - len(names)  # `self` of a method that is called by its class
    yield from zip(names, arguments[max(num_extra, 0) :], strict=False)


def _is_in_place(call: ast.Call) -> bool:
    return any(keyword.arg == "_in_place" for keyword in call.keywords)


def _mutated(call: ast.Call) -> list[ast.AST]:
    """Returns expressions whose values a call changes."""
    if _is_in_place(call):
        return [*call.args]
    if called(call) not in MUTATORS:
        return []
    return [*_children(call.func, "value"), *call.args[:-1]]


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
        self.functions: dict[str, list[ast.FunctionDef | ast.Lambda]] = defaultdict(list)
        # names with a value that nothing changes
        self.fixed = {alias.asname or alias.name for alias in nodes(module, ast.alias)}
        self.fixed |= {"self", "_call_test", "_sized", *dir(builtins)}
        self.fixed -= {
            _key(node) for node in nodes(module, ast.Name) if isinstance(node.ctx, ast.Store)
        }
        for function in nodes(module, ast.FunctionDef):
            self.functions[function.name].append(function)
        assignments = nodes(module, ast.Assign)
        for node in assignments:
            if isinstance(node.value, ast.Lambda):
                self.functions[_key(node.targets[0])].append(node.value)
        self.caught = set(map(_key, nodes(module, ast.ExceptHandler)))
        if expects_error(module):
            self.caught |= {"value", "exception"}
        self.influenced = {*names, *self.caught, "candidate"}
        flows = [*chain.from_iterable(map(self._flows, ast.walk(module)))]
        classes = [node.name for node in nodes(module, ast.ClassDef)]
        self.foreign = _reach({*FOREIGN, *classes}, flows)
        self.influenced = _reach(self.influenced, flows)
        functions = nodes(module, ast.FunctionDef)
        self.asserting = _reach({item.name for item in functions if is_asserting(item)}, flows)
        self.capitalized = {name for name in names if name[0].isupper()}
        # classes are told from functions by attributes of what they return
        attributes = [node.value for node in nodes(module, ast.Attribute)]
        self.classes = self.capitalized if self.of(*attributes) else set()
        self.instances = self.several = set[str]()
        made = [node.targets for node in assignments if self.is_object(node.value)]
        self.instances = self._roots(*chain.from_iterable(made))
        calls = nodes(module, ast.Call)
        given = [[*call.args, *call.keywords] for call in calls if self.of(call.func)]
        # arguments of the solution
        self.given = _reach(self._roots(*chain.from_iterable(given)), flows)
        # names with independent results
        collected = [_mutated(call) for call in calls if self.of(*call.args)]
        collected += [node.targets for node in assignments if self.is_several(node.value)]
        self.several = _reach(self._roots(*chain.from_iterable(collected)), flows)

    def _roots(self, *trees: ast.AST) -> set[str]:
        """Returns the names and attributes whose values change with those of expressions."""
        roots = set()
        todo = [*trees]
        for node in todo:
            match node:
                case ast.Call(func=function) if not self.of(function):
                    todo += [*_children(function, "value"), *node.args, *node.keywords]
                    for helper in self.functions.get(called(node), ()):
                        returned = nodes(helper, RETURNING) or [helper]
                        roots |= _mentioned(*returned).difference(_arguments(helper))
                case ast.Subscript(value=value):
                    todo.append(value)
                case _ if _key(node):
                    roots.add(_key(node))
                case _ if isinstance(node, COMPREHENSIONS):
                    todo += _children(node, "elt key value")
                case _ if not isinstance(node, FRESH):
                    todo += ast.iter_child_nodes(node)
        return roots - self.fixed

    def _flows(self, node: ast.AST) -> Iterator[Flow]:
        """Yields what a node passes on."""
        match node:
            case ast.FunctionDef(name=name):
                for wrapper in chain.from_iterable(map(self._functions, node.decorator_list)):
                    yield {name}, {*_arguments(wrapper)}
                if nodes(node, RETURNING):
                    yield _mentioned(node).difference(_arguments(node)), {name}
            case ast.Call(args=arguments, keywords=keywords):
                sources = [*arguments, *keywords]
                if _is_in_place(node):
                    sources.append(node.func)
                yield _mentioned(*sources), self._roots(*_mutated(node))
                for function in chain.from_iterable(map(self._functions, sources)):
                    yield _mentioned(node), {*_arguments(function)}
                for function in self._functions(node.func):
                    for parameter, argument in _bind(function, arguments):
                        yield _mentioned(argument), {parameter}
                        yield {parameter}, self._roots(argument)  # it may be changed in place
            case _:
                sources = _children(node, SOURCES)
                targets = self._roots(*_children(node, TARGETS))
                yield _mentioned(*sources), targets
                yield targets, self._roots(*sources)  # what is changed by another name

    def _functions(self, node: ast.AST) -> list[ast.FunctionDef | ast.Lambda]:
        """Returns the functions of the tests that an expression may be."""
        if isinstance(node, ast.keyword):
            node = node.value
        return [node] if isinstance(node, ast.Lambda) else self.functions.get(_key(node), [])

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
            is_list = len([*filter(self.of, _children(node, "elts keys values"))]) > 1
            is_computed = isinstance(node, COMPREHENSIONS) and self.of(node)
            if is_list or is_computed or _key(node) in self.several:
                return True
        return False

    def refusal(self, node: ast.AST) -> str:
        """Returns why a node makes the tests unjudgeable, empty if it does not."""
        name = _key(node) or getattr(node, "name", "") or type(node).__name__
        if name in UNSUPPORTED or (name.startswith("__") and name not in SPECIAL):
            return f"{name} is not supported in tests"
        match node:
            case ast.FunctionDef(args=parameters, decorator_list=decorators):
                if self.of(*decorators):
                    return PASSES
                if name.startswith("test_") and ast.unparse(parameters) not in ("", "self"):
                    return "fixtures are not supported"
            case ast.Expr(value=ast.Compare()) | ast.Assert(test=ast.Tuple()):
                return "it asserts nothing"
            case ast.If(test=test, body=[ast.Raise(), *_]) if self._is_ordering(test):
                return NAN
            case ast.Assert():
                if any(self._is_ordering(item.operand) for item in nodes(node, ast.UnaryOp)):
                    return NAN
                parts = [node]
                for group in filter(self.of, nodes(node, (ast.BoolOp, ast.Tuple))):
                    parts += _children(group, "values elts")
                return STALE if any(map(self._is_stale, parts)) else ""
            case ast.keyword(arg="record"):
                return "warnings of the solution are not sent"
            case ast.ClassDef(bases=bases) if self.of(*bases):
                return "a class of the solution cannot be a base"
            case ast.Compare():
                return self._refused_comparison(node)
            case ast.Set() | ast.Dict() | ast.Slice():
                return self._refused_operands(_children(node, "elts keys lower upper step"))
            case ast.SetComp(elt=key) | ast.DictComp(key=key) if self.of(key):
                return BOTH
            case ast.Subscript(value=value, slice=key, ctx=context) if self.of(key):
                is_read = isinstance(context, ast.Load)
                return "" if is_read and not self._is_stale(value) else BOTH
            case ast.BinOp() | ast.AugAssign():
                operands = _children(node, "left target right value")
                is_format = isinstance(node.op, ast.Mod) and ast.Constant not in map(type, operands)
                if is_format and self.of(operands[0]):
                    return FORMATS
                return self._refused_operands(operands)
            case ast.Call():
                return self._refused_call(node)
            case ast.Attribute(value=value) if self.of(value):
                if name in ("__name__", "format", "format_map"):
                    return "it evaluates what the solution returned, or cannot be sent to it"
                is_kept = self.capitalized or ast.unparse(value).startswith("np.")
                if name in LOST and not is_kept:
                    return f"{name} of plain data"
                if _key(value) in self.caught and not hasattr(Exception, name):
                    return "attributes of exceptions are not sent"
            case ast.FormattedValue() if self.of(*_children(node, "format_spec")):
                return FORMATS
        return SKIPS if self._skips(node) else ""

    def _is_ordering(self, tree: ast.AST) -> bool:
        """Returns whether an expression has an order of the solution's values, and is no `not`."""
        is_negated = isinstance(tree, ast.UnaryOp)
        return not is_negated and self.of(tree) and bool(nodes(tree, ORDERS))

    def _is_stale(self, tree: ast.AST) -> bool:
        return bool(_mentioned(tree) & self.given) and not self.of(tree)

    def _refused_operands(self, operands: Sequence[ast.AST]) -> str:
        if len([*filter(self.of, operands)]) > 1:
            return BOTH
        is_object = any(map(self.is_object, operands))
        return "only the solution could answer for its object" if is_object else ""

    def _refused_comparison(self, node: ast.Compare) -> str:
        sides = [node.left, *node.comparators]
        results = [*filter(self.of, sides)]
        if results and _mentioned(node) & self.foreign - {"Counter"}:
            return FOREIGNER
        if any(isinstance(side, ast.Name) and side.id in self.names for side in sides):
            return "variables of the solution are not sent"
        if results == sides[-1:] and isinstance(node.ops[-1], ast.In | ast.NotIn):
            return ""  # a container of the solution
        return self._refused_operands(sides)

    def _refused_call(self, call: ast.Call) -> str:
        name = called(call)
        arguments = [*call.args, *call.keywords]
        is_assertion = name.startswith("assert")
        if is_assertion and self._is_stale(call):
            return STALE
        if name == "assertFalse" and self._is_ordering(call):
            return NAN
        if is_assertion and ast.JoinedStr in map(type, call.args[2:]):
            del arguments[2:3]  # the message
        is_solution = self.of(call.func)
        if not is_solution and not self.of(*arguments):
            return ""
        if name in ITERATING and not {*COMPREHENSIONS}.issuperset(map(type, call.args)):
            return SKIPS
        if name in self.functions:
            is_plain = {ast.keyword, ast.Starred}.isdisjoint(map(type, arguments))
            return "" if is_plain else f"{name} gets arguments by name"
        receivers = _children(call.func, "value")
        foreign = set[str]()
        is_known = receivers or name in self.fixed
        if name in MUTATORS and is_known:
            return ""
        if name.endswith(EQUAL) and "Almost" not in name:
            foreign = self.foreign - {"Counter"}
        elif is_solution or name in ("isinstance", "assertIsInstance"):
            foreign = self.foreign
        if foreign & _mentioned(*arguments):
            return FOREIGNER
        if is_solution:
            if any(map(self._is_function, arguments)):
                return PASSES
            given = (_mentioned(*arguments) & self.influenced) - self.capitalized - self.instances
            is_changed_again = _is_in_place(call) and len(self.names) == 1
            return "gives the solution what it returned" if given and not is_changed_again else ""
        if not is_assertion:
            if name not in PURE or not is_known:
                return f"{name} may change its arguments, or evaluate them"
            if name == "format" and ast.unparse(call)[0] != "'":
                return FORMATS
            if name not in KEEPING and any(map(self.is_several, arguments)):
                return BOTH
        results = [item for item in arguments if self.of(item) or _mentioned(item) & MUTATORS]
        return BOTH if len(results) > 1 or ast.Starred in map(type, results) else ""

    def _is_function(self, argument: ast.AST) -> bool:
        name = ast.unparse(argument).rpartition("=")[2]
        return callable(getattr(builtins, name, None)) or bool(self._functions(argument))

    def _skips(self, node: ast.AST) -> bool:
        """Returns whether the solution decides what runs."""
        match node:
            case ast.If(test=test, body=body, orelse=other) if self.of(test):
                is_failing = all(isinstance(item, FAILING) for item in [*body, *other])
                return not is_failing or not (other or isinstance(body[0], ast.Raise))
            case ast.BoolOp(values=[_, *later]) if self.of(node):
                return bool(_mentioned(*later) & {*MUTATORS, *self.functions} - self.names)
            case ast.Try(body=body, orelse=other, handlers=handlers):
                is_ended = _ends_failure(handlers) or bool(
                    nodes(ast.Module(node.finalbody, []), ENDING)
                )
                if not self.of(*body):
                    return is_ended and not self.asserting.isdisjoint(_mentioned(*body))
                if all(isinstance(handler.body[-1], ast.Raise) for handler in handlers):
                    return bool(node.finalbody)
                last = other if is_ended else [*body[1:], *other]
                text = ast.unparse(ast.Module(last, []))
                return not text.startswith(("assert False", "raise ", "self.fail("))
            case ast.With(items=items, body=body) if self.of(*body):
                contexts = [getattr(item.context_expr, "func", item) for item in items]
                names = {*map(_key, contexts)}
                is_hidden = names & RAISES and nodes(node, ast.Assert)
                return bool(is_hidden) or not CONTEXTS.issuperset(names)
        return self.of(*_children(node, "iter ifs test subject"))
