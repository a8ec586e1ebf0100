"""Data-flow analysis: follows the solution's values through the tests, and refuses tests whose
verdict the solution could decide.

    names of the solution     --assigned, iterated, passed, stored, branched on--> other names
    names that evaluate code  ---------------------------------------------------> other names
                                              --> operands, calls and branches to refuse

A name is influenced if a variable or an attribute of that name ever gets a value of the solution.
This is conservative: some problems that could be judged are left out.
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


# names whose objects become plain data on the way to or from the solution, or cannot be sent
FOREIGN = _words("""deque Counter OrderedDict defaultdict ChainMap Mock MagicMock AsyncMock
bytearray memoryview np numpy datetime timedelta date Path PurePath uuid UUID pd pandas torch
GeneratorType Generator""")
# attributes that objects lose when they become plain data
LOST = _words("""shape dtype ndim size tolist astype sum mean max min most_common elements popleft
appendleft extendleft rotate move_to_end default_factory _asdict _fields _replace T all any flatten
ravel dot item equals iloc loc columns to_dict""")
CONTROL = _words("StopIteration StopAsyncIteration GeneratorExit KeyboardInterrupt SystemExit")
# names that end a test, or concern state of the solution's process
UNSUPPORTED = CONTROL | _words("""exit quit _exit skip skipif skipTest skipUnless xfail suppress
redirect_stdout redirect_stderr stdout stderr patch setup_method setup_class setup_module warns
assertWarns param fixture parametrize expectedFailure environ putenv issubclass open
globals locals vars exec eval setattr delattr pickle marshal StringIO BytesIO assertRegex
assertNotRegex AsyncFunctionDef Await TryStar Match exc_info format_exc doctest
builtins ContextVar Thread ThreadPoolExecutor setUpModule tearDownModule skipIf isfile isdir mkdtemp
mkstemp NamedTemporaryFile TemporaryDirectory write_text read_text""")
# functions and methods that change their object or first argument
MUTATORS = _words("""append add insert extend update setdefault appendleft extendleft push put
heappush heapify insort insort_left insort_right setitem delitem iadd copyto fill pop popleft
popitem remove discard clear sort reverse rotate subtract shuffle place putmask""")
# functions that keep several results apart
KEEPING = _words("list tuple str repr print all any enumerate iter reversed join")
# functions that change no argument of any type
PURE = KEEPING | _words("""len set sorted int float complex abs round bool sum min max isinstance
type allclose range bytes frozenset divmod pow isclose isnan isinf isfinite fabs floor ceil sqrt gcd
approx loads dumps literal_eval Decimal Fraction split strip startswith endswith count index find
replace format get issubset issuperset dict chain raises subTest reshape _call_test _sized
AssertionError Exception ValueError""")
SPECIAL = _words("__init__ __import__ __name__")
RAISES = _words("raises assertRaises assertRaisesRegex")
EQUAL = ("Equal", "_series_equal", "_frame_equal")
# context managers that catch only exceptions that a test expects
CONTEXTS = _words("subTest catch_warnings errstate") | RAISES
FAILURES = _words("AssertionError Exception BaseException")
RETURNING = (ast.Return, ast.Yield, ast.YieldFrom)
ORDERS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
# fields of a node whose values flow to other names
SOURCES = "value iter context_expr defaults kw_defaults"
OPERANDS = "left target right value comparators elts keys lower upper step"
# fields of a node that decide what runs, or how
DECIDING = "iter ifs test subject bases decorator_list format_spec"
TARGETS = "targets target optional_vars args posonlyargs kwonlyargs"
BOTH = "both sides are the solution's"
FOREIGNER = "its class becomes another on the way to the solution or back"
NAN = "true of NaN; compare the other way round"
DECIDES = "the solution would decide what the tests do"
STALE = "the solution may have changed its argument, which is not sent back"
NAMED = {ast.Name: "id", ast.Attribute: "attr", ast.arg: "arg", ast.ExceptHandler: "name"}
Node = TypeVar("Node", bound=ast.AST)
Names = set[str]  # of variables, attributes and functions
Function = ast.FunctionDef | ast.Lambda
Flow = tuple[Names, Names]  # (source names, names that get their values)


class UnreadableTests(ValueError):
    """Raised if the solution could decide the verdict of the tests."""


def nodes(tree: ast.AST, kind: type[Node] | tuple[type[Node], ...]) -> list[Node]:
    return [node for node in ast.walk(tree) if isinstance(node, kind)]


def called(call: ast.Call) -> str:
    """Returns the name of a called function or method, or ""."""
    return _key(call.func)


def expects_error(tree: ast.AST) -> bool:
    return any(called(call) in RAISES for call in nodes(tree, ast.Call))


def is_asserting(tree: ast.AST) -> bool:
    names = map(called, nodes(tree, ast.Call))
    has_assert = bool(nodes(tree, ast.Assert))
    return has_assert or any(name.startswith(("assert", "fail", "raises")) for name in names)


def _ends_failure(handlers: Sequence[ast.ExceptHandler]) -> bool:
    """Returns True if the handlers catch a failed assertion and do not raise it again."""
    for handler in handlers:
        if not handler.type or _mentioned(handler.type) & FAILURES:
            return not isinstance(handler.body[-1], ast.Raise)
    return False


def check(module: ast.Module, names: Names) -> Influence:
    """Returns the influence of the solution, which defines `names`, on the tests in `module`.

    Raises UnreadableTests if the solution could decide a verdict.
    """
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
    """Returns the name of a variable, attribute, parameter or caught exception, or ""."""
    return getattr(node, NAMED.get(type(node), ""), None) or ""


def _mentioned(*trees: ast.AST) -> Names:
    return set(map(_key, chain.from_iterable(map(ast.walk, trees)))) - {""}


def _arguments(function: Function) -> list[str]:
    """Returns the names of a function's parameters, without self and cls."""
    names = map(_key, nodes(function.args, ast.arg))
    return [name for name in names if name not in ("self", "cls")]


def _bind(function: Function, arguments: Sequence[ast.AST]) -> Iterator[tuple[str, ast.AST]]:
    """Returns (parameter, argument) for each positional argument."""
    names = _arguments(function)
    rest = function.args.vararg
    if rest:
        names[names.index(rest.arg) :] = [rest.arg] * len(arguments)
    # drops the first argument, `self`, of a method that is called on its class
    return zip(names, arguments[-len(names) :], strict=False)


def _is_in_place(call: ast.Call) -> bool:
    return any(keyword.arg == "_in_place" for keyword in call.keywords)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or isinstance(getattr(node, "value", None), str)


def _is_odd_method(node: ast.AST) -> bool:
    """Returns True for a method, not a static one, whose first parameter is not self or cls."""
    if not isinstance(node, ast.FunctionDef):
        return False
    first = ast.unparse(node.args).partition(",")[0]
    return first not in ("", "self", "cls") and "staticmethod" not in map(
        ast.unparse, node.decorator_list
    )


def _passed(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def _mutated(call: ast.Call) -> list[ast.AST]:
    """Returns the expressions whose values a call may change."""
    if _is_in_place(call):
        return [*call.args]
    if called(call) not in MUTATORS:
        return []
    return [*_children(call.func, "value"), *call.args[:-1]]


def _reach(names: Names, flows: Sequence[Flow]) -> Names:
    reached = set(names)
    size = 0
    while size < len(reached):
        size = len(reached)
        for sources, sinks in flows:
            if reached & sources:
                reached |= sinks
    return reached


class Influence:
    """The names in the tests that may have values or objects of the solution."""

    def __init__(self, module: ast.Module, names: Names) -> None:
        self.names = names
        self.functions: dict[str, list[Function]] = defaultdict(list)
        # names whose values never change
        self.fixed = {alias.asname or alias.name for alias in nodes(module, ast.alias)}
        self.fixed |= {"self", "_call_test", "_sized", *dir(builtins)}
        self.fixed -= {
            _key(node) for node in nodes(module, ast.Name) if isinstance(node.ctx, ast.Store)
        }
        functions = nodes(module, ast.FunctionDef)
        for function in functions:
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
        self.asserting = _reach({item.name for item in functions if is_asserting(item)}, flows)
        self.capitalized = {name for name in names if name[0].isupper()}
        # a capitalised name counts as a class if the tests use attributes of the solution's values
        attributes = [node.value for node in nodes(module, ast.Attribute)]
        self.classes = self.capitalized if self.of(*attributes) else set()
        self.instances = self.several = set[str]()
        made = [node.targets for node in assignments if self.is_object(node.value)]
        self.instances = {*map(_key, chain.from_iterable(made))}
        calls = nodes(module, ast.Call)
        given = [_passed(call) for call in calls if self.of(call.func)]
        # names whose values are passed to the solution
        self.given = _reach(self._roots(*chain.from_iterable(given)), flows)
        # names that may have several results of the solution
        collected = [_mutated(call) for call in calls if self.of(*call.args)]
        collected += [node.targets for node in assignments if self.is_several(node.value)]
        self.several = _reach(self._roots(*chain.from_iterable(collected)), flows)

    def _roots(self, *trees: ast.AST) -> Names:
        """Returns the names and attributes that may share their values with the expressions."""
        roots = set()
        todo = [*trees]
        for node in todo:
            match node:
                case ast.Call(func=function) if not self.of(function):
                    todo += [*_children(function, "value"), *_passed(node)]
                    for helper in self.functions.get(called(node), ()):
                        returned = nodes(helper, RETURNING) or [helper]
                        roots |= _mentioned(*returned).difference(_arguments(helper))
                case ast.Subscript(value=value):
                    todo.append(value)
                case _ if _key(node):
                    roots.add(_key(node))
                case _ if isinstance(node, COMPREHENSIONS):
                    todo += _children(node, "elt key value")
                case ast.Compare() | ast.JoinedStr() | ast.Lambda() | ast.Call():
                    pass  # the result shares nothing with its operands
                case _:
                    todo += ast.iter_child_nodes(node)
        return roots - self.fixed

    def _flows(self, node: ast.AST) -> Iterator[Flow]:
        """Yields the flows of values between names in a node."""
        match node:
            case ast.FunctionDef(name=name):
                for wrapper in chain.from_iterable(map(self._functions, node.decorator_list)):
                    yield {name}, {*_arguments(wrapper)}
                if nodes(node, RETURNING):
                    yield _mentioned(node).difference(_arguments(node)), {name}
            case ast.Call(args=arguments):
                sources = _passed(node)
                if _is_in_place(node):
                    sources.append(node.func)
                yield _mentioned(*sources), self._roots(*_mutated(node))
                for function in chain.from_iterable(map(self._functions, sources)):
                    yield _mentioned(node), {*_arguments(function)}
                for function in self._functions(node.func):
                    for parameter, argument in _bind(function, arguments):
                        yield _mentioned(argument), {parameter}
                        yield {parameter}, self._roots(argument)  # may be changed in place
            case _:
                sources = _children(node, SOURCES)
                targets = self._roots(*_children(node, TARGETS))
                yield _mentioned(*sources), targets
                yield targets, self._roots(*sources)  # may be changed through the other name

    def _functions(self, node: ast.AST) -> list[Function]:
        """Returns the functions of the tests that an expression may refer to."""
        return [node] if isinstance(node, ast.Lambda) else self.functions.get(_key(node), [])

    def of(self, *trees: ast.AST) -> bool:
        """Returns True if expressions may have values of the solution."""
        return not self.influenced.isdisjoint(_mentioned(*trees))

    def is_object(self, node: ast.AST) -> bool:
        """Returns True if an expression is an instance of a class of the solution."""
        if isinstance(node, ast.Call):
            return ast.unparse(node.func) in self.classes
        return _key(node) in self.instances

    def is_several(self, tree: ast.AST) -> bool:
        """Returns True if an expression may have several results of the solution, which could have
        been chosen to agree.
        """
        for node in ast.walk(tree):
            is_list = len([*filter(self.of, _children(node, "elts keys values"))]) > 1
            is_computed = isinstance(node, COMPREHENSIONS) and self.of(node)
            if is_list or is_computed or _key(node) in self.several:
                return True
        return False

    def refusal(self, node: ast.AST) -> str:
        """Returns why a node makes the tests unjudgeable, or "" if it does not."""
        name = _key(node) or getattr(node, "name", "") or type(node).__name__
        if name in UNSUPPORTED or (name.startswith("__") and name not in SPECIAL):
            return f"{name} is not supported in tests"
        match node:
            case ast.FunctionDef(args=parameters) if name.startswith("test_"):
                if ast.unparse(parameters) not in ("", "self"):
                    return "fixtures are not supported"
            case ast.Expr(value=ast.Compare()) | ast.Assert(test=ast.Tuple()):
                return "it asserts nothing"
            case ast.Assert(test=test) | ast.If(test=test, body=[ast.Raise(), *_]):
                negated = [item.operand for item in nodes(node, ast.UnaryOp)]
                if isinstance(node, ast.If):
                    negated = [test]
                if any(map(self._is_ordering, negated)):
                    return NAN
                parts = [test]
                for group in filter(self.of, nodes(test, (ast.BoolOp, ast.Tuple))):
                    parts += _children(group, "values elts")
                if any(map(self._is_stale, parts)):
                    return STALE
            case ast.ClassDef(body=body) if any(map(_is_odd_method, body)):
                return "a method's first parameter is not self"
            case ast.keyword(arg="record"):
                return "warnings of the solution are not sent"
            case (
                ast.Compare() | ast.BinOp() | ast.AugAssign() | ast.Set() | ast.Dict() | ast.Slice()
            ):
                return self._refused_operands(node)
            case ast.Subscript(value=value, slice=key, ctx=context) if self.of(key):
                is_read = isinstance(context, ast.Load)
                return "" if is_read and not self._is_stale(value) else BOTH
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
        return DECIDES if self._decides(node) else ""

    def _is_ordering(self, tree: ast.AST) -> bool:
        """Returns True if an expression orders values of the solution and is not a `not`."""
        is_negated = isinstance(tree, ast.UnaryOp)
        return not is_negated and self.of(tree) and bool(nodes(tree, ORDERS))

    def _is_stale(self, tree: ast.AST) -> bool:
        return bool(_mentioned(tree) & self.given) and not self.of(tree)

    def _refused_operands(self, node: ast.AST) -> str:
        sides = _children(node, OPERANDS)
        results = [*filter(self.of, sides)]
        match node:
            case ast.Compare(ops=[*_, operation]):
                if results and _mentioned(node) & self.foreign - {"Counter"}:
                    return FOREIGNER
                if any(isinstance(side, ast.Name) and side.id in self.names for side in sides):
                    return "variables of the solution are not sent"
                if results == sides[-1:] and isinstance(operation, ast.In | ast.NotIn):
                    return ""  # the solution returned the container
            case ast.BinOp(op=ast.Mod()) | ast.AugAssign(op=ast.Mod()) if sides[:1] == results[:1]:
                if not isinstance(sides[1], ast.Constant):
                    return DECIDES  # % with a format that the solution returned
        if len(results) > 1:
            return BOTH
        is_object = any(map(self.is_object, sides))
        return "only the solution could answer for its object" if is_object else ""

    def _refused_call(self, call: ast.Call) -> str:
        name = called(call)
        arguments = _passed(call)
        is_assertion = name.startswith("assert")
        if is_assertion and self._is_stale(call):
            return STALE
        if name == "assertFalse" and self._is_ordering(call):
            return NAN
        if name in ("assertTrue", "assertFalse"):
            if not all(map(_is_text, call.args[1:])):
                return "its second argument is a message, which it compares with nothing"
            del arguments[1:]
        if is_assertion and ast.JoinedStr in map(type, call.args[2:]):
            del arguments[2:3]  # the assertion's message
        is_solution = self.of(call.func)
        if not is_solution and not self.of(*arguments):
            return ""
        if name in ("all", "any") and not {*COMPREHENSIONS}.issuperset(map(type, call.args)):
            return DECIDES
        is_helper = name in self.functions
        is_spread = ast.Starred in map(type, arguments) and not is_solution
        if is_spread or (is_helper and call.keywords):
            return f"{name} gets arguments by name"
        if is_helper:
            return ""
        receivers = _children(call.func, "value")
        is_known = receivers or name in self.fixed
        if name in MUTATORS and is_known:
            return ""
        foreign = set[str]()
        if name.endswith(EQUAL) and "Almost" not in name:
            foreign = self.foreign - {"Counter"}
        elif is_solution or name in ("isinstance", "assertIsInstance"):
            foreign = self.foreign
        if foreign & _mentioned(*arguments):
            return FOREIGNER
        if is_solution:
            names = [getattr(item, "id", "") for item in arguments]
            if any(map(self._functions, arguments)) or not {*names}.isdisjoint(dir(builtins)):
                return "passes a function to the solution"
            given = (_mentioned(*arguments) & self.influenced) - self.capitalized - self.instances
            is_changed_again = _is_in_place(call) and len(self.names) == 1
            return "gives the solution what it returned" if given and not is_changed_again else ""
        if not is_assertion:
            if name not in PURE or not is_known:
                return f"{name} may change its arguments, or evaluate them"
            if name == "format" and ast.Constant not in map(type, receivers):
                return DECIDES
            if name in ("min", "max") and len(call.args) > 1:
                return NAN
            if name not in KEEPING and any(map(self.is_several, arguments)):
                return BOTH
        results = [item for item in arguments if self.of(item) or _mentioned(item) & MUTATORS]
        return BOTH if len(results) > 1 else ""

    def _decides(self, node: ast.AST) -> bool:
        """Returns True if the solution decides what runs, or how."""
        match node:
            case ast.Assert():
                return False
            case ast.If(test=test, body=body, orelse=other) if self.of(test):
                is_failing = all(isinstance(item, ast.Assert | ast.Raise) for item in body + other)
                return not is_failing or not (other or isinstance(body[0], ast.Raise))
            case ast.BoolOp(values=[_, *later]) if self.of(node):
                calls = chain.from_iterable(nodes(value, ast.Call) for value in later)
                sent = [_passed(call) for call in calls if self.of(call.func)]
                if isinstance(node.op, ast.Or) and ast.Attribute in map(type, chain(*sent)):
                    return True  # the attribute may have a value that cannot be sent
                return bool(_mentioned(*later) & {*MUTATORS, *self.functions} - self.names)
            case ast.Try(body=body, orelse=other, handlers=handlers) if self._is_judging(body):
                if node.finalbody or all(isinstance(item.body[-1], ast.Raise) for item in handlers):
                    return bool(node.finalbody)
                last = other if _ends_failure(handlers) else [*body[1:], *other]
                text = ast.unparse(ast.Module(last, []))
                return not text.startswith(("assert False", "raise ", "self.fail("))
            case ast.With(items=items, body=body) if self._is_judging(body):
                contexts = [getattr(item.context_expr, "func", item) for item in items]
                names = {*map(_key, contexts)}
                is_hidden = names & RAISES and (nodes(node, ast.Assert) or not self.of(*body))
                return bool(is_hidden) or not CONTEXTS.issuperset(names)
        return self.of(*_children(node, DECIDING))

    def _is_judging(self, body: Sequence[ast.AST]) -> bool:
        return bool(_mentioned(*body) & (self.influenced | self.asserting))
