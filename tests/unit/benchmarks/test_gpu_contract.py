"""What the runs with the GPU packages compare; the runs themselves need 9.4 GB of packages."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu_contract import LARGE, SMALL, compare_parameters, model_folder
from megarl.models.registry import FAMILIES, read_model
from megarl.models.shards import ShardSlice

SLICES = [
    ShardSlice("a", (0, 0), (2, 4), "x", 0, (4, 1)),
    ShardSlice("b", (0,), (4,), "x", 8, (1,)),
]
X = torch.empty(12, dtype=torch.bfloat16)


def test_every_family_is_covered_with_its_widths(tmp_path):
    shapes = {case: read_model(model_folder(case, tmp_path)) for case in (*SMALL, *LARGE)}
    assert {shape.family for shape in shapes.values()} == FAMILIES.keys()
    assert all(2 <= shape.layers <= max(2, len(shape.kinds) + 1) for shape in shapes.values())
    assert shapes["deepseek_v3"].experts == 256 and shapes["qwen3 tied"].tied


@pytest.mark.parametrize(
    ("parameters", "fp32", "widened", "problem"),
    [
        ({"x": X}, set(), False, None),
        ({"x": X.float()}, set(), True, None),
        ({"x": X.float()}, {"a", "b"}, False, None),
        ({"x": X.float()}, set(), False, "x is torch.float32, a is sent as"),
        ({"x": X}, {"b"}, True, "x is torch.bfloat16, b is sent as"),
        ({"x": X[:11]}, set(), False, "x has 11 elements, b is placed at element 11"),
        ({"x": X, "y": X}, set(), False, "only in the table: []; only in the model: ['y']"),
        ({}, set(), False, "only in the table: ['x']"),
    ],
)
def test_differences_are_named(parameters, fp32, widened, problem):
    found = compare_parameters(SLICES, parameters, frozenset(fp32), widened=widened)
    assert found is None if problem is None else problem in str(found)
