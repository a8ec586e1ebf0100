"""The house rules that a machine can check: rows, circles, bans, density. Also run before every commit.

Each gate is a function of source texts that returns the violations. It is run on the package, and on a small source
that breaks it: a gate that nothing fails would guard nothing.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from house_report import (
    MAX_LINE,
    code_lines,
    figures,
    prepositions,
    tuple_assignments,
)

ROOT = Path(__file__).resolve().parents[2]
Sources = Mapping[str, str]  # {path relative to megarl/: text}
SOURCES: Sources = {
    file.relative_to(ROOT / "megarl").as_posix(): file.read_text(encoding="utf-8")
    for file in sorted((ROOT / "megarl").rglob("*.py"))
}
MAX_PACKAGE_TOKENS = 257_550
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
MAX_CONFIG_LINES = 40
MAX_POSITIONAL = 6
MAX_PARAMETERS = 10
MAX_TOKENS_PER_LINE = 8.5
MAX_WALRUS = 3  # per 1,000 code lines
MAX_TERNARIES = 18  # per 1,000 code lines
MAX_NESTED = 10  # comprehensions inside comprehensions, and with more than one `for`
_SECTION = "a section of the config has the name of what it sets"
_ROLE = "a role of the loop, and its implementation"
NAMES_TWICE = {  # classes and aliases that two files may define, and why
    "Checkpoint": _SECTION,
    "Engine": _ROLE,
    "Evaluation": _ROLE,
    "Learner": _ROLE,
    "RewardModel": _SECTION,
    "Rollout": _SECTION,
    "Rollouts": _ROLE,
    "Scoring": _ROLE,
    "Sft": _SECTION,
    "Telemetry": f"{_SECTION}; {_ROLE}",
    "Trainer": _SECTION,
}
FIXED_SIGNATURES = {
    "trainer/layers.py forward",
    "trainer/logprobs.py forward",
}  # Megatron-Core's, torch.autograd's

# pattern -> the files that may contain it, and a text that it must match
BANS: dict[str, tuple[set[str], str]] = {
    r"\bos\.(environ|getenv|putenv)\b": ({"platform/env.py", "jail/jailed.py"}, "os.environ['A']"),
    r"torch\.cuda\.current_device": (
        {"patches/megatron.py", "platform/device.py"},
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
    r"\bos\.(replace|rename)\(": ({"processes/files.py"}, "os.replace(new, old)"),
    # vLLM's tensor-parallel size; others ask for rollout.ranks_per_replica. Messages may name it
    r"rollout[._]tensor\b(?![\"=]| from )": (
        {
            "config/launch.py",
            "config/model.py",
            "config/precision.py",
            "config/rollout.py",
            "config/run_dir.py",
            "config/validate.py",
            "rollout/vllm/arguments.py",
        },
        "size = config.rollout.tensor",
    ),
    r"shape\.family\s*(==|!=|in\b)|\bdense_layers\b": (  # they ask for shape.kind(layer)
        set(),
        "if shape.family == 'glm4_moe':",
    ),
    r"\.call\(\"": (set(), 'ranks.call("score", batch)'),  # no type checker sees such a call
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


# keyword-only parameters beyond MAX_PARAMETERS: each is a section of the config
WIDE = {"trainer/trainer.py build": 12}


def too_many_parameters(sources: Sources) -> list[str]:
    """Keyword-only parameters are free in algorithms/, where they are the options of a published formula."""
    violations = []
    for path, node in functions(sources):
        names = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args)]
        positional = len(names) - (names[:1] in (["self"], ["cls"]))
        total = positional + (0 if path.startswith("algorithms/") else len(node.args.kwonlyargs))
        most = WIDE.get(f"{path} {node.name}", MAX_PARAMETERS)
        if positional > MAX_POSITIONAL or total > most:
            violations.append(
                f"{path} {node.name}: {positional} positional parameters, {total} in all"
            )
    return [text for text in violations if text.partition(":")[0] not in FIXED_SIGNATURES]


def long_lines(sources: Sources) -> list[str]:
    return [
        f"{path}:{number}: {len(line)} columns"
        for path, text in sources.items()
        for number, line in enumerate(text.splitlines(), 1)
        if len(line) > MAX_LINE
    ]


def parallel_assignments(sources: Sources) -> list[str]:
    """`a, b = x, y`, except swaps."""
    return [
        f"{path}:{node.lineno}: {ast.unparse(node)}"
        for path, text in sources.items()
        for node in tuple_assignments(ast.parse(text))
    ]


def odd_docstrings(sources: Sources) -> list[str]:
    """Docstrings that begin with a preposition or "Whether"; a verb or a noun says what it is."""
    return [
        f"{path}:{node.lineno}: {str(node.value).splitlines()[0]}"
        for path, text in sources.items()
        for node in prepositions(ast.parse(text))
    ]


def too_dense(sources: Sources) -> list[str]:
    """Ratios over the whole package."""
    total: Counter[str] = Counter()
    for text in sources.values():
        total.update(figures(text))
    code = max(total["code"], 1)
    ratios = {
        "tokens a code line": (total["tokens"] / code, MAX_TOKENS_PER_LINE),
        "walruses per 1,000 code lines": (1000 * total["walrus"] / code, MAX_WALRUS),
        "conditional expressions per 1,000 code lines": (
            1000 * total["ternary"] / code,
            MAX_TERNARIES,
        ),
        "nested comprehensions": (total["nested"], MAX_NESTED),
        "tokens": (total["tokens"], MAX_PACKAGE_TOKENS),
    }
    return [
        f"{name}: {value:.2f}, at most {most}"
        for name, (value, most) in ratios.items()
        if value > most
    ]


def names_in_two_files(sources: Sources) -> list[str]:
    """Classes and aliases that two files define, unless NAMES_TWICE gives the reason."""
    files: dict[str, list[str]] = {}
    for path, text in sources.items():
        for node in ast.parse(text).body:
            if name := _class_or_alias(node):
                files.setdefault(name, []).append(path)
    return [
        f"{name}: {' '.join(paths)}"
        for name, paths in files.items()
        if len(paths) > 1 and name not in NAMES_TWICE
    ]


def _class_or_alias(node: ast.stmt) -> str:
    """Returns the name of a class or of an alias such as `Key = tuple[int, int]`, else ""."""
    if isinstance(node, ast.ClassDef):
        return node.name
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        name = node.targets[0].id
        return name if name[0].isupper() and not name.isupper() else ""
    return ""


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
    (long_lines, {"a.py": f'x = "{"x" * MAX_LINE}"'}),
    (long_lines, {"a.py": f"# {'x' * MAX_LINE}"}),
    (parallel_assignments, {"a.py": "a, b = 1, 2"}),
    (parallel_assignments, {"a.py": "*a, b = *x, 2"}),
    (odd_docstrings, {"a.py": 'def f():\n    """Of the rest."""'}),
    (odd_docstrings, {"a.py": 'class A:\n    x: int = 0\n    """Whether it is."""'}),
    (too_dense, {"a.py": "f(a, b, c, d)"}),
    (too_dense, {"a.py": "if (x := 1):\n    y\n"}),
    (too_dense, {"a.py": "x = 1 if y else 2"}),
    (too_dense, {"a.py": "f(\n    [\n        [y for y in x]\n        for x in z\n    ]\n)\n" * 11}),
    (too_dense, {"a.py": "[\n    y\n    for x in z\n    for y in x\n]\n" * 11}),
    (too_dense, {"a.py": "f(1)\n" * 70_000}),
    (names_in_two_files, {"a.py": "class Row: ...", "b.py": "Row = tuple[int, int]"}),
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
    assert not parallel_assignments({"a.py": "a, b = b, a\nc = (1, 2)\nd, e = f()"})
    assert not odd_docstrings({"a.py": '"""Offers what others take."""'})
    assert (
        code_lines('x = 1\n\n"""Text\nof x."""\n# why\n', ast.parse('x = 1\n\n"""Text\nof x."""\n'))
        == 1
    )
    assert not names_in_two_files({"a.py": "class Rollout: ...", "b.py": "class Rollout: ..."})
    assert not banned({"platform/env.py": "os.environ", "a.py": "x = 1  # os.environ"})


def test_configs_say_only_what_differs() -> None:
    for file in (*ROOT.glob("configs/**/*.yaml"), *ROOT.glob("examples/**/*.yaml")):
        settings = [line for line in file.read_text().splitlines() if not line.startswith("#")]
        assert len(settings) <= MAX_CONFIG_LINES, file.name


def test_files_beside_the_code_are_installed_with_it() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    data = settings["tool"]["setuptools"]["package-data"]
    listed = {
        f"{package.replace('.', '/')}/{name}" for package, names in data.items() for name in names
    }
    files = (path for path in (ROOT / "megarl").rglob("*") if path.is_file())
    found = {file.relative_to(ROOT).as_posix() for file in files if file.suffix[:3] != ".py"}
    assert found == listed


def test_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The import contracts of pyproject.toml."""
    cli = pytest.importorskip("importlinter.cli", reason="import-linter is in the dev extra")
    # it would disable all other loggers of this process
    monkeypatch.setattr(cli.logging_config, "dictConfig", lambda settings: None)
    assert cli.lint_imports(config_filename=str(ROOT / "pyproject.toml"), no_cache=True) == 0


def test_planted_mistakes_are_those_of_this_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/mutants.py cannot plant a text that is gone, nor one that occurs twice."""
    monkeypatch.syspath_prepend(str(ROOT / "tests"))
    from planted import MUTANTS

    for file, source, replacement, test in MUTANTS:
        text = (ROOT / "megarl" / file).read_text(encoding="utf-8")
        assert text.count(source) == 1 and source != replacement, f"{file}: {source}"
        test_file, _, name = test.partition("[")[0].partition("::")
        assert not name or f"def {name}(" in (ROOT / "tests" / test_file).read_text(
            encoding="utf-8"
        ), test
