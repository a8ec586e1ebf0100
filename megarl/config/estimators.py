"""The estimators that a config names, with their options and defaults: read from the source of
megarl/algorithms.

    LOSSES = table("losses", "RULES")     {"ppo_clip": Estimator(options={...: 0.2, ...}), ...}

A table there is a dict of names and functions; the keyword-only parameters of a function are its
options. They are stated nowhere else, and no torch is imported to read them.
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
    """One function of a table."""

    options: Mapping[str, Any] = field(default_factory=dict)  # keyword -> default
    inputs: tuple[str, ...] = ()  # tensors that it takes besides those of all functions


def table(file: str, name: str, *passed: str) -> dict[str, Estimator]:
    """Returns the table `name` of megarl/algorithms/<file>.py, in its order.

    `passed`: options that the loop passes, so they are none of the config.
    """
    nodes = _module(file)
    entries = nodes[name]
    return {
        # neither a partial nor a lambda has options
        key.value: _estimator(nodes.get(ast.unparse(value)), *passed)
        for key, value in zip(entries.keys, entries.values, strict=True)
    }


@cache
def _module(file: str) -> dict[str, Any]:
    """Returns the functions of a module, and the values of its annotated names, as nodes."""
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
PER_TOKEN = table("advantages", "PER_TOKEN")  # an advantage may differ within a response
_COMMON = _estimator(_module("advantages")["_advantages"], "values_T", "step_ends_T", "baseline_N")
ADVANTAGES = {
    name: Estimator({**_COMMON.options, **estimator.options}, estimator.inputs)
    for name, estimator in (PER_ROW | PER_TOKEN).items()
}
LOSSES = table("losses", "RULES", "select_T")
# options that are keys of `algorithm` itself, with their defaults
BOUNDS = {
    name: {key: default for key, default in loss.options.items() if "clip" in key}
    for name, loss in LOSSES.items()
}
BOUND_NAMES = tuple(dict.fromkeys(chain.from_iterable(BOUNDS.values())))
SELECT = table("losses", "SELECT", "generator", *BOUND_NAMES)
CORRECTIONS = table("corrections", "RULES")
AGGREGATIONS = table("aggregation", "RULES")
KL = table("kl", "KL")
