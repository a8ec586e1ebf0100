"""The house rules that a machine can check: rows, import circles, bans, sizes. Also run before every commit.

Each gate is a function of source texts that returns the violations. It is run on the package, and on a small source
that breaks it: a gate that nothing fails would guard nothing.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
Sources = Mapping[str, str]  # {path relative to megarl/: text}
SOURCES: Sources = {
    file.relative_to(ROOT / "megarl").as_posix(): file.read_text(encoding="utf-8")
    for file in sorted((ROOT / "megarl").rglob("*.py"))
}
MAX_PACKAGE_LINES = 29_650
MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_CONFIG_LINES = 400, 60, 40
MAX_POSITIONAL, MAX_PARAMETERS = 6, 10
FIXED_SIGNATURES = {
    "trainer/layers.py forward",
    "trainer/logprobs.py forward",
}  # Megatron-Core's, torch.autograd's

# pattern -> the files that may contain it, and a text that it must match
BANS: dict[str, tuple[set[str], str]] = {
    r"\bos\.(environ|getenv|putenv)\b": ({"platform/env.py", "jail/jailed.py"}, "os.environ['A']"),
    r"torch\.cuda\.current_device": (
        {"platform/megatron_on_cpu.py", "platform/device.py"},
        "torch.cuda.current_device()",
    ),
    r"megatron\.core\.parallel_state|import parallel_state": (
        {"trainer/parallel_groups.py"},
        "from megatron.core import parallel_state",
    ),
    r"(gather|broadcast|scatter|send|recv)_object": (
        set(),
        "dist.all_gather_object(values, value)",
    ),
    r"\bos\.(replace|rename)\(": ({"platform/atomic.py"}, "os.replace(new, old)"),
    r"^\s*global\s": (set(), "    global state"),
    r"^\s*from \.": (set(), "from .names import x"),
    r"except\s*:": (set(), "except:"),
    r"https?://(?!(arxiv\.org|github\.com|www\.apache\.org)/|(host|localhost)[:/])": (
        set(),
        "http://example.com/",
    ),
}


def banned(sources: Sources) -> list[str]:
    return [
        f"{path}:{number}: {line.strip()}"
        for path, text in sources.items()
        for number, line in enumerate(text.splitlines(), 1)
        for pattern, (allowed, _) in BANS.items()
        if path not in allowed
        and re.search(pattern, line if "http" in line else line.partition("#")[0])
    ]


def functions(sources: Sources) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for path, text in sources.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield path, node


def too_long(sources: Sources) -> list[str]:
    files = [
        f"{path}: {n} lines"
        for path, text in sources.items()
        if (n := len(text.splitlines())) > MAX_FILE_LINES
    ]
    return files + [
        f"{path} {node.name}: {length} lines"
        for path, node in functions(sources)
        if (length := (node.end_lineno or 0) - node.lineno + 1) > MAX_FUNCTION_LINES
    ]


def too_many_parameters(sources: Sources) -> list[str]:
    """Keyword-only parameters are free in algorithms/, where they are the options of a published formula."""
    violations = []
    for path, node in functions(sources):
        names = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args)]
        positional = len(names) - (names[:1] in (["self"], ["cls"]))
        total = positional + (0 if path.startswith("algorithms/") else len(node.args.kwonlyargs))
        if positional > MAX_POSITIONAL or total > MAX_PARAMETERS:
            violations.append(
                f"{path} {node.name}: {positional} positional parameters, {total} in all"
            )
    return [text for text in violations if text.partition(":")[0] not in FIXED_SIGNATURES]


def without_annotation(sources: Sources) -> list[str]:
    return [
        f"{path} {node.name}"
        for path, node in functions(sources)
        if node.returns is None
        or any(
            argument.annotation is None and argument.arg not in ("self", "cls")
            for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
        )
    ]


def without_docstring(sources: Sources) -> list[str]:
    return [
        path for path, text in sources.items() if text and not ast.get_docstring(ast.parse(text))
    ]


def vague_names(sources: Sources) -> list[str]:
    return [
        path
        for path in sources
        if Path(path).stem in ("utils", "util", "helpers", "misc", "common", "tools")
    ]


def deep_inheritance(sources: Sources) -> list[str]:
    """Classes of the package with a base whose own base is a class of the package; the batches of types.py may be."""
    bases: dict[str, list[str]] = {}
    for text in sources.values():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                bases[node.name] = [base.id for base in node.bases if isinstance(base, ast.Name)]
    ours = {name: [base for base in parents if base in bases] for name, parents in bases.items()}
    batches = {"ScoredBatch"}  # each stage's batch adds fields to the one before
    return [
        name
        for name, parents in ours.items()
        if name not in batches and any(ours[base] for base in parents)
    ]


def import_circles(sources: Sources) -> list[str]:
    """Files that import one another, whether at their top or inside functions."""

    def module(path: str) -> str:
        return f"megarl/{path}".removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    modules = {module(path): text for path, text in sources.items()}
    graph = {name: _imports(text) & modules.keys() - {name} for name, text in modules.items()}
    circles = {
        frozenset((name, *_between(graph, name)))
        for name in graph
        if name in _reachable(graph, name)
    }
    return [" <-> ".join(sorted(circle)) for circle in circles]


def _imports(text: str) -> set[str]:
    """Dotted names that a file imports, except for type checkers; `from a import b` may be a.b or a."""
    imports = set()
    for node in _executed(ast.parse(text)):
        if isinstance(node, ast.Import):
            imports |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imports |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
    return imports - {"megarl"}


def _executed(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"):
            yield from _executed(child)


def _reachable(graph: Mapping[str, set[str]], start: str) -> set[str]:
    reached: set[str] = set()
    frontier = [start]
    while frontier:
        fresh = graph[frontier.pop()] - reached
        reached |= fresh
        frontier += fresh
    return reached


def _between(graph: Mapping[str, set[str]], name: str) -> set[str]:
    return {other for other in _reachable(graph, name) if name in _reachable(graph, other)}


ALGORITHM = re.compile(
    r"(?i)grpo|(?<![a-z])(ppo|dpo|sft)(?![a-z])|rloo|reinforce|gspo|bradley|distill"
)


def algorithms_in_the_trainer(sources: Sources) -> list[str]:
    """Names and strings of trainer/ that belong to one algorithm or stage; docstrings may give examples."""
    violations = []
    for path, text in sources.items():
        for node in ast.walk(ast.parse(text)) if path.startswith("trainer/") else ():
            words = [getattr(node, key, None) for key in ("id", "attr", "name", "module", "value")]
            docs = (
                isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value
            )
            violations += [
                f"{path}: {word}"
                for word in words
                if isinstance(word, str) and not docs and ALGORITHM.search(word)
            ]
    return violations


LONG_FUNCTION = "def f() -> None:\n" + "    pass\n" * MAX_FUNCTION_LINES
GATES: tuple[
    tuple[Callable[[Sources], list[str]], Sources], ...
] = (  # gate, a package that fails it
    *((banned, {"a.py": text}) for _, text in BANS.values()),
    (too_long, {"a.py": "x = 0\n" * (MAX_FILE_LINES + 1)}),
    (too_long, {"a.py": LONG_FUNCTION}),
    (too_many_parameters, {"a.py": f"def f({', '.join(f'x{i}' for i in range(7))}): ..."}),
    (
        too_many_parameters,
        {"a.py": f"class C:\n def f(self, *, {', '.join(f'x{i}' for i in range(11))}): ..."},
    ),
    (without_annotation, {"a.py": "def f(x) -> None: ..."}),
    (without_annotation, {"a.py": "def f(x: int): ..."}),
    (without_docstring, {"a.py": "x = 1"}),
    (vague_names, {"data/utils.py": ""}),
    (algorithms_in_the_trainer, {"trainer/a.py": "if name == 'grpo_process': ..."}),
    (algorithms_in_the_trainer, {"trainer/a.py": "from megarl.stages.dpo import x"}),
    (deep_inheritance, {"a.py": "class A: ...\nclass B(A): ...\nclass C(B): ..."}),
    (import_circles, {"a.py": "import megarl.b", "b.py": "def f():\n    from megarl import a"}),
    (
        import_circles,
        {
            "p/a.py": "from megarl.p.b import x",
            "p/b.py": "from megarl.p import c",
            "p/c.py": "import megarl.p.a",
        },
    ),
)


@pytest.mark.parametrize(
    ("gate", "broken"), GATES, ids=lambda value: getattr(value, "__name__", "")
)
def test_a_gate_can_fail(gate: Callable[[Sources], list[str]], broken: Sources) -> None:
    assert gate(broken), "this gate guards nothing"


@pytest.mark.parametrize(
    "gate", dict.fromkeys(gate for gate, _ in GATES), ids=lambda gate: gate.__name__
)
def test_the_package_passes(gate: Callable[[Sources], list[str]]) -> None:
    violations = gate(SOURCES)
    assert not violations, "\n".join(violations)


def test_gates_let_pass_what_is_allowed() -> None:
    options = ", ".join(f"x{i}" for i in range(11))
    assert not too_many_parameters({"algorithms/a.py": f"def f(*, {options}): ..."})
    assert not import_circles(
        {"a.py": "import megarl.b", "b.py": "if TYPE_CHECKING:\n    import megarl.a"}
    )
    assert not banned({"platform/env.py": "os.environ", "a.py": "x = 1  # os.environ"})


def test_the_package_is_small() -> None:
    assert sum(len(text.splitlines()) for text in SOURCES.values()) <= MAX_PACKAGE_LINES


def test_configs_say_only_what_differs() -> None:
    for file in (ROOT / "configs").glob("*.yaml"):
        settings = [line for line in file.read_text().splitlines() if not line.startswith("#")]
        assert len(settings) <= MAX_CONFIG_LINES, file.name


def test_rows() -> None:
    """The import contracts of pyproject.toml."""
    cli = pytest.importorskip("importlinter.cli", reason="import-linter is in the dev extra")
    assert cli.lint_imports(config_filename=str(ROOT / "pyproject.toml"), no_cache=True) == 0


def test_planted_mistakes_are_those_of_this_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/mutants.py cannot plant a text that is gone, nor one that occurs twice."""
    monkeypatch.syspath_prepend(str(ROOT / "tests"))
    from planted import MUTANTS

    for file, source, replacement, test in MUTANTS:
        assert SOURCES[file].count(source) == 1 and source != replacement, f"{file}: {source}"
        test_file, _, name = test.partition("[")[0].partition("::")
        assert not name or f"def {name}(" in (ROOT / "tests" / test_file).read_text(
            encoding="utf-8"
        ), test
