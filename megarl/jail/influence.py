"""Follows what the solution returns through the tests, and refuses those whose verdict it decides.

    names of the solution --assignments, loops, containers, attributes, parameters, branches-->
        the origins of every name --> comparisons, calls and branches to refuse

An origin is a name of the solution, or UNSAFE: what evaluates its argument, or exists in the tests
only. A name has the origins of all that is ever assigned to it, wherever that is; only a plain
assignment outside functions, loops and branches begins anew. Where that is too strict, a problem is
left out that could be judged: none of MBPP's 974, and of HumanEval's 164 one (33).
"""

import ast
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import chain, pairwise
from typing import TypeVar

UNSAFE = ""


def _words(text: str) -> list[str]:
    return text.split()


# names that evaluate an argument, or ask for what only Python itself could answer
EVALUATING = _words("""eval exec compile __import__ open globals locals vars dir callable hash id
hasattr getattr setattr delattr format breakpoint attrgetter methodcaller Template exit quit""")
# evaluate no argument, and their results can be sent to the solution
SAFE_MODULES = _words("""math cmath numpy collections itertools functools operator json statistics
decimal fractions string heapq bisect copy unittest pytest random typing sys time enum ast
contextlib""")
CONTROL = frozenset(
    _words("""StopIteration StopAsyncIteration GeneratorExit KeyboardInterrupt
SystemExit""")
)
# how tests replace or read what is in the process of the solution
FOREIGN = _words("redirect_stdout redirect_stderr stdout stderr patch setup_method")
MUTATORS = _words("""append add insert extend update setdefault appendleft""")
# their second argument decides what becomes of the first
DIRECTED = _words("isinstance issubclass assertIsInstance assertRegex assertNotRegex")
COLLECTORS = _words("""dict zip print chain""")
# calls that leave all else to an object
FORWARDING = _words("""len str repr list tuple sorted iter next int float complex abs round bool
print sum any all enumerate zip reversed append assertTrue assertFalse assertIn assertNotIn""")
RAISES = ("raises", "assertRaises", "assertRaisesRegex")
# of equal operands, the result is known
CANCELLING = (ast.Sub, ast.Div, ast.FloorDiv, ast.Mod, ast.BitXor, ast.BitAnd)
ITERATING = ("map", "zip", "enumerate", "list", "tuple", "sorted", "reversed")
FUNCTIONS = (ast.FunctionDef, ast.Lambda)
RETURNING = (ast.Return, ast.Yield, ast.YieldFrom)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.GeneratorExp)
NAMED: dict[type[ast.AST], str] = {
    ast.Name: "id",
    ast.arg: "arg",
    ast.ExceptHandler: "name",
    ast.MatchAs: "name",
    ast.MatchStar: "name",
}
# fields of a value, and of what it can change
SOURCES = ("value", "iter", "context_expr", "test", "subject")
SINKS = ("targets", "target", "optional_vars", "cases")
BOTH = "both sides are the solution's"
ONLY = "only the solution could answer for its object"
Node = TypeVar("Node", bound=ast.AST)


class UnreadableTests(ValueError):
    """The solution would decide its own verdict."""


def nodes(tree: ast.AST, kind: type[Node]) -> list[Node]:
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


def _children(node: ast.AST, *fields: str) -> list[ast.AST]:
    children = []
    for field in fields:
        value = getattr(node, field, [])
        children += value if isinstance(value, list) else [value]
    return [child for child in children if isinstance(child, ast.AST)]


Flow = tuple[set[str], set[str]]  # from names and attributes to others


class Influence:
    """The origins of all names of the tests. Local names have the id of their function."""

    def __init__(self, module: ast.Module, names: set[str]) -> None:
        self.keys = {node: _name(node) for node in ast.walk(module) if _name(node)}
        self.functions: dict[str, ast.arguments] = {}
        self.values: defaultdict[str, list[ast.expr]] = defaultdict(list)  # ever assigned
        self.origins = defaultdict(set, {name: {name} for name in names})
        for name in EVALUATING:
            self.origins[name] = {UNSAFE}
            if name != "format":
                self.origins[f".{name}"] = {UNSAFE}
        self._tell_apart(module)
        for node in ast.walk(module):
            self._define(node)
        # classes of the solution are told from functions by their instances' attributes
        owners = [attribute.value for attribute in nodes(module, ast.Attribute)]
        owners += [value for owner in owners for value in self.values[self.keys.get(owner, "")]]
        used = {ast.unparse(owner) for owner in owners}
        used |= {ast.unparse(call.func) for owner in owners for call in nodes(owner, ast.Call)}
        self.classes = {name for name in names & used if name[0].isupper()}
        flows: list[Flow] = []
        returned: list[Flow] = []
        passed: list[Flow] = []
        for node in ast.walk(module):
            for value in _children(node, *SOURCES):
                group = returned if isinstance(value, ast.Lambda) else flows
                for target in _children(node, *SINKS):
                    group += self._assigned(target, value)
            if isinstance(node, ast.Try):
                flows.append((self._mentioned(*node.body), self._changed(*node.handlers)))
            elif isinstance(node, ast.If | ast.While):
                flows.append((self._mentioned(node.test), self._changed(*node.body, *node.orelse)))
            elif isinstance(node, ast.ClassDef):
                flows += [({name}, {f".{name}"}) for name in self._changed(*node.body)]
            elif isinstance(node, ast.FunctionDef):
                values = [item for kind in RETURNING for item in nodes(node, kind)]
                returned.append((self._mentioned(*values), {node.name, f".{node.name}"}))
                flows.append((self._mentioned(*node.decorator_list), self._all(node.args)))
            elif isinstance(node, ast.arguments):
                passed.append((self._mentioned(*_children(node, "defaults")), self._all(node)))
            elif isinstance(node, ast.Call):
                passed += self._passed(node)
                flows.append((self._mentioned(node), self._mutated(node)))
        # what a function returns depends on the arguments of each call
        self._spread(flows + returned)
        self._spread(flows + passed)
        handlers = nodes(module, ast.ExceptHandler)
        self.caught = {self.keys[handler] for handler in handlers if handler in self.keys}
        self.given: set[str] = set()  # arguments of the solution
        for call in nodes(module, ast.Call):
            if self.of(call.func) and "_in_place=" not in ast.unparse(call):
                self.given = self.given.union(*map(self._root, call.args))

    def _tell_apart(self, module: ast.Module) -> None:
        """Gives local variables and reassigned ones keys of their own."""
        shared = set()
        for function in [item for item in ast.walk(module) if isinstance(item, FUNCTIONS)]:
            inside = [item for item in ast.walk(function) if item in self.keys]
            bound = {self.keys[item] for item in inside if _is_bound(item)}
            bound -= {
                name
                for item in ast.walk(function)
                if isinstance(item, ast.Global | ast.Nonlocal)
                for name in item.names
            }
            for item in inside:
                if self.keys[item] in bound:
                    self.keys[item] += f" {id(function)}"
            shared |= {self.keys[item] for item in inside}
        current: dict[str, str] = {}
        for place, statement in enumerate(module.body):
            new = dict(current)
            if isinstance(statement, ast.Assign):
                targets = [item for target in statement.targets for item in ast.walk(target)]
                names = {self.keys.get(item, "") for item in targets if _is_bound(item)} - shared
                new |= {name: f"{name} {place}" for name in names}
            for item in ast.walk(statement):
                if item in self.keys:
                    version = new if _is_bound(item) else current
                    self.keys[item] = version.get(self.keys[item], self.keys[item])
            current = new

    def _define(self, node: ast.AST) -> None:
        """Notes a function, an assigned value or an import."""
        if isinstance(node, ast.FunctionDef):
            self.functions[node.name] = node.args
        elif isinstance(node, ast.ClassDef):
            self.origins[node.name] = {UNSAFE}
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                self.values[self.keys.get(target, "")].append(node.value)
                if isinstance(node.value, ast.Lambda):
                    self.functions[ast.unparse(target)] = node.value.args
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                module = getattr(node, "module", None) or alias.name
                if module.partition(".")[0] not in SAFE_MODULES:
                    self.origins[(alias.asname or alias.name).partition(".")[0]] = {UNSAFE}

    def _assigned(self, target: ast.AST, value: ast.AST) -> Iterable[Flow]:
        """Yields what an assignment passes on, item by item where both sides list them."""
        targets = getattr(target, "elts", [])
        values = getattr(value, "elts", [])
        if isinstance(value, ast.Call) and called(value) in ("zip", "enumerate"):
            values = [*value.args]
            if called(value) == "enumerate":
                values.insert(0, ast.Constant(0))
        starred = nodes(target, ast.Starred) or nodes(value, ast.Starred)
        if targets and len(targets) == len(values) and not starred:
            for pair in zip(targets, values, strict=True):
                yield from self._assigned(*pair)
        else:
            yield self._mentioned(value), self._changed(target)

    def _mentioned(self, *trees: ast.AST) -> set[str]:
        """Returns the names and attributes in expressions."""
        mentioned = set()
        for node in chain.from_iterable(map(ast.walk, trees)):
            if node in self.keys:
                mentioned.add(self.keys[node])
            elif isinstance(node, ast.Attribute):
                mentioned.add(f".{node.attr}")
        return mentioned

    def _changed(self, *trees: ast.AST) -> set[str]:
        """Returns what statements assign to or change in place."""
        changed = set()
        for node in chain.from_iterable(map(ast.walk, trees)):
            if _is_bound(node):
                changed |= self._root(node)
            elif isinstance(node, ast.Call):
                changed |= self._mutated(node)
        return changed

    def _mutated(self, call: ast.Call) -> set[str]:
        mutated = []
        if isinstance(call.func, ast.Attribute) and call.func.attr in MUTATORS:
            mutated = [call.func.value]
        if any(keyword.arg == "_in_place" for keyword in call.keywords):
            mutated += call.args
        return set().union(*map(self._root, mutated))

    def _root(self, node: ast.AST) -> set[str]:
        """Returns the names and attributes whose value changes with that of an expression."""
        while isinstance(node, ast.Subscript | ast.Starred):
            node = node.value
        if isinstance(node, ast.Attribute):
            return {f".{node.attr}"}
        key = self.keys.get(node, "")
        roots = {key} - {""}
        for value in self.values[key]:
            if isinstance(value, ast.Name | ast.Subscript):
                roots |= {self.keys.get(name, "") for name in ast.walk(value)}
        return roots

    def _all(self, signature: ast.arguments) -> set[str]:
        return {self.keys[parameter] for parameter in nodes(signature, ast.arg)}

    def _signature(self, function: ast.AST) -> ast.arguments | None:
        """Returns the parameters of a function of the tests."""
        if isinstance(function, ast.keyword):
            return self._signature(function.value)
        if isinstance(function, ast.Lambda):
            return function.args
        if isinstance(function, ast.Name | ast.Attribute):
            return self.functions.get(ast.unparse(function).rpartition(".")[2])
        return None

    def _passed(self, call: ast.Call) -> Iterable[Flow]:
        """Yields what a call passes to parameters of the tests' functions."""
        arguments = [*call.args, *call.keywords]
        for argument in arguments:
            signature = self._signature(argument)
            if signature:
                yield self._mentioned(call), self._all(signature)
        signature = self._signature(call.func)
        if not signature:
            return
        parameters = [item for item in signature.posonlyargs + signature.args if item.arg != "self"]
        named = {parameter.arg: parameter for parameter in nodes(signature, ast.arg)}
        for place, argument in enumerate(arguments):
            target = named.get(getattr(argument, "arg", None) or "")
            if place < len(parameters) and not isinstance(argument, ast.keyword | ast.Starred):
                target = parameters[place]
            sinks = {self.keys[target]} if target else self._all(signature)
            yield self._mentioned(argument), sinks
            yield sinks, self._root(argument)  # it may be changed in place

    def _spread(self, flows: list[Flow]) -> None:
        before = -1
        size = 0
        while before != size:
            before = size
            for sources, sinks in flows:
                origins = set().union(*(self.origins[source] for source in sources))
                for sink in sinks:
                    self.origins[sink] |= origins
            size = sum(map(len, self.origins.values()))

    def of(self, *trees: ast.AST) -> set[str]:
        """Returns the names of the solution whose values can be in expressions."""
        return self._origins(*trees) - {UNSAFE}

    def _origins(self, *trees: ast.AST) -> set[str]:
        return set().union(*(self.origins[key] for key in self._mentioned(*trees)))

    def is_object(self, node: ast.AST) -> bool:
        """Returns whether an expression is an instance of a class of the solution."""
        values = self.values[self.keys[node]] if node in self.keys else [node]
        calls = [value for value in values if isinstance(value, ast.Call)]
        return any(ast.unparse(call.func) in self.classes for call in calls)

    def refusal(self, node: ast.AST) -> str:
        """Returns why a node makes the tests unjudgeable, empty if it does not."""
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.FunctionDef(name=name) if (
                name in FOREIGN
            ):
                return f"{name} does not reach the solution"
            case ast.Compare():
                return self._refused_comparison(node)
            case ast.BinOp() | ast.AugAssign():
                sides = _children(node, "left", "target", "right", "value")
                objects = [side for side in sides if self.is_object(side)]
                if len(objects) == 1:
                    return ONLY
                is_format = isinstance(node.op, ast.Mod) and isinstance(
                    sides[1], ast.Dict | ast.Tuple
                )
                if is_format and self.of(sides[0]):
                    return "the solution would choose the format"
                if not objects and isinstance(node.op, CANCELLING) and all(map(self.of, sides)):
                    return BOTH
            case ast.Call():
                return self._refused_call(node)
            case ast.Attribute(value=value, attr=name):
                if self.keys.get(value) in self.caught and not hasattr(Exception, name):
                    return "attributes of exceptions are not sent"
                if (name.startswith("__") or name in ("format", "format_map")) and self.of(value):
                    return "it would evaluate what the solution returned"
            case ast.FormattedValue(format_spec=ast.AST() as format_spec):
                if self.of(format_spec):
                    return "the solution would choose the format"
            case ast.withitem(context_expr=context) if not expects_error(context):
                if self.of(context):
                    return ONLY
            case ast.Set() | ast.Dict():
                members = _children(node, "elts", "keys")
                is_counted = isinstance(node, ast.Set) and len([*filter(self.of, members)]) > 1
                if is_counted or any(map(self.is_object, members)):
                    return "only the solution could tell its values apart"
            case ast.MatchClass() if self.of(node.cls):
                return "needs a class of the solution"
            case ast.AsyncFunctionDef() | ast.Await():
                return "asynchronous tests are not supported"
            case ast.Name(id=name) if name in CONTROL:
                return f"the solution cannot be expected to raise {name}"
            case ast.stmt() if self._skips(node):
                return "the solution would decide which assertions run"
        return ""

    def _refused_comparison(self, node: ast.Compare) -> str:
        for sides, op in zip(pairwise([node.left, *node.comparators]), node.ops, strict=True):
            objects = [side for side in sides if self.is_object(side)]
            if objects and isinstance(op, ast.Is | ast.IsNot):
                continue
            if all(map(self.of, sides)):
                return BOTH
            for side, other in (sides, sides[::-1]):
                if self._root(side) & self.given and not self.of(other):
                    return "the solution may have changed its argument, which is not sent back"
            if objects and not (isinstance(op, ast.In | ast.NotIn) and objects == [sides[1]]):
                return ONLY
        return ""

    def _refused_call(self, call: ast.Call) -> str:
        name = called(call)
        arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
        if name.startswith("assert") and name not in RAISES:
            is_unary = name in ("assertTrue", "assertFalse") or name.startswith("assertIsN")
            arguments = arguments[: 1 if is_unary else 2]  # without the message
        influenced = [argument for argument in arguments if self.of(argument)]
        owners = self.of(call.func)
        if (owners or influenced) and UNSAFE in self._origins(call.func, *arguments):
            return "it evaluates what the solution returned, or cannot be sent to it"
        if name in DIRECTED and self.of(*call.args[1:2]):
            return "needs a class or a pattern of the solution"
        if ast.unparse(call.func) in ("all", "any") and any(map(self._counts, arguments)):
            return "the solution would decide how much it asserts"
        if influenced and ast.unparse(call).startswith(("len(set(", "len(Counter(")):
            return BOTH
        if name in MUTATORS or (self._signature(call.func) and not owners):
            return ""
        if owners:
            if any(map(self._signature, arguments)):
                return "passes a function to the solution"
            given = self.of(*(item for item in influenced if not self.is_object(item)))
            if {origin for origin in given - owners if origin[0].islower()}:
                return "gives the solution what it returned"
        elif len(influenced) > 1 and name not in COLLECTORS:
            return BOTH
        elif any(map(self.is_object, influenced)) and name not in FORWARDING:
            return ONLY
        return ""

    def _counts(self, node: ast.AST) -> bool:
        """Returns whether the solution decides how many items there are."""
        parts: list[ast.AST] = [node]
        for value in self.values[self.keys.get(node, "")]:
            parts.append(value)
        for part in parts[1:] or parts:
            if isinstance(part, COMPREHENSIONS):
                if any(self._counts(item.iter) or self.of(*item.ifs) for item in part.generators):
                    return True
            elif isinstance(part, ast.Call) and called(part) in ITERATING:
                if any(map(self._counts, part.args[called(part) == "map" :])):
                    return True
            elif not isinstance(part, ast.List | ast.Tuple) and self.of(part):
                return True
        return False

    def _asserts(self, *trees: ast.AST) -> bool:
        """Returns whether statements assert something of the solution."""
        for node in chain.from_iterable(map(ast.walk, trees)):
            is_call = isinstance(node, ast.Call) and called(node).startswith("assert")
            if (is_call or isinstance(node, ast.Assert)) and self.of(node):
                return True
        return False

    def _skips(self, node: ast.stmt) -> bool:
        """Returns whether the solution decides if assertions in a statement run."""
        body = _children(node, "body")
        handlers = _children(node, "handlers")
        is_asserting = self._asserts(*body)
        if isinstance(node, ast.If):
            is_one = is_asserting != self._asserts(*node.orelse)
            is_one &= not (_fails(body) and _fails(node.orelse))
            return bool(self.of(node.test)) and (is_one or _leaves(node, "exit(", "skipTest("))
        if not is_asserting:
            return False
        if isinstance(node, ast.Try | ast.With):
            catches = "suppress(" in ast.unparse(node) or not all(map(_fails, handlers))
            return catches and bool(
                self.of(*(item for item in body if not isinstance(item, ast.Assert)))
            )
        if not isinstance(node, ast.For | ast.While | ast.FunctionDef):
            return False
        branches = [branch for branch in nodes(node, ast.If) if self.of(branch.test)]
        return (
            any(_leaves(branch, "continue", "break", "return") for branch in branches)
            or bool(self.of(*_children(node, "test")))
            or any(map(self._counts, _children(node, "iter")))
        )


def _name(node: ast.AST) -> str:
    return getattr(node, NAMED.get(type(node), ""), None) or ""


def _is_bound(node: ast.AST) -> bool:
    """Returns whether a node gives a name, an attribute or an item a value."""
    is_stored = isinstance(getattr(node, "ctx", None), ast.Store)
    return is_stored or type(node) in NAMED.keys() - {ast.Name}


def _fails(node: ast.AST | Sequence[ast.AST]) -> bool:
    trees = [node] if isinstance(node, ast.AST) else node
    kinds = (ast.Raise, ast.Assert)
    return any(isinstance(item, kinds) for item in chain.from_iterable(map(ast.walk, trees)))


def _leaves(branch: ast.If, *ways: str) -> bool:
    last = ast.unparse(branch.body[-1])
    return any(way in last for way in ways)
