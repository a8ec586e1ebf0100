"""The estimators that a config can name, with their options and defaults, parsed from the source
of megarl/algorithms.

    LOSSES = table("losses", "RULES")     {"ppo_clip": Estimator(options={...: 0.2, ...}), ...}

A table in megarl/algorithms is a dict of names and functions; the keyword-only parameters of a
function are its options. The source is the only place that defines them, and it is parsed without
importing torch.
"""

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "algorithms"


@dataclass(frozen=True)
class Estimator:
    """The options and inputs of one function of a table."""

    options: Mapping[str, Any] = field(default_factory=dict)  # keyword -> default
    inputs: tuple[str, ...] = ()  # positional parameters after the first


def table(file: str, name: str, *passed: str) -> dict[str, Estimator]:
    """Returns the table `name` of megarl/algorithms/<file>.py, in source order.

    `passed` names keyword parameters that callers pass, which are therefore not config options.
    """
    nodes = _module(file)
    entries = nodes[name]
    return {
        # entries that are a partial or a lambda have no options
        key.value: _estimator(nodes.get(ast.unparse(value)), *passed)
        for key, value in zip(entries.keys, entries.values, strict=True)
    }


@cache
def _module(file: str) -> dict[str, Any]:
    """Parses a module of megarl/algorithms; returns AST nodes of its functions, and of the values
    of its annotated assignments, by name.
    """
    nodes = {}
    for node in ast.parse((FOLDER / f"{file}.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            nodes[node.name] = node
        elif isinstance(node, ast.AnnAssign):
            nodes[ast.unparse(node.target)] = node.value
    return nodes


def _estimator(function: ast.FunctionDef | None, *passed: str) -> Estimator:
    if function is None:
        return Estimator()
    arguments = function.args
    options = {}
    for parameter, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        if default is not None and parameter.arg not in passed:
            options[parameter.arg] = ast.literal_eval(default)
    inputs = tuple(parameter.arg for parameter in arguments.args[1:])
    return Estimator(options, inputs)


PER_ROW = table("advantages", "PER_ROW")
PER_TOKEN = table("advantages", "PER_TOKEN")  # advantages can differ within a response
_COMMON = _estimator(_module("advantages")["_advantages"], "values_T", "step_ends_T", "baseline_N")
ADVANTAGES = {
    name: Estimator({**_COMMON.options, **estimator.options}, estimator.inputs)
    for name, estimator in (PER_ROW | PER_TOKEN).items()
}
LOSSES = table("losses", "RULES", "select_T")
# loss -> its bounds, which are keys of `algorithm`, with their defaults
BOUNDS = {
    name: {key: default for key, default in loss.options.items() if "clip" in key}
    for name, loss in LOSSES.items()
}
BOUND_NAMES = tuple(dict.fromkeys(chain.from_iterable(BOUNDS.values())))
SELECT = table("losses", "SELECT", "generator", *BOUND_NAMES)
CORRECTIONS = table("corrections", "RULES")
AGGREGATIONS = table("aggregation", "RULES")
KL = table("kl", "KL")
