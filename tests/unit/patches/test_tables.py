"""Each row of a table names its versions, when it can be deleted, and a test that exists."""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest

from megarl.patches import checkpoints, megatron, ray, vllm
from megarl.patches.patch import Patch, replaced

TESTS = Path(__file__).resolve().parents[2]
TEXTS = ("where", "why", "versions", "delete_when", "test")
ROWS = [*checkpoints.PATCHES, *megatron.PATCHES, *ray.PATCHES, *vllm.PATCHES]


@pytest.mark.parametrize("patch", ROWS, ids=lambda patch: patch.where)
def test_a_row_is_complete(patch: Patch) -> None:
    assert {field.name for field in fields(patch)} == {*TEXTS, "replacement", "calls_original"}
    assert all(getattr(patch, name) for name in TEXTS)
    file, _, function = patch.test.partition("::")
    assert f"def {function}(" in (TESTS / file).read_text(encoding="utf-8")


def test_a_name_is_in_one_row() -> None:
    names = [patch.where for patch in ROWS]
    assert len(set(names)) == len(names)


class Upstream:
    limit = 1

    def __init__(self, value: int) -> None:
        self.value = value

    @classmethod
    def is_supported(cls, value: int) -> bool:
        return value < cls.limit


def row(name: str, replacement: object, *, calls_original: bool = False) -> Patch:
    return Patch(
        where=f"upstream_of_patches.Upstream.{name}",
        replacement=replacement,
        calls_original=calls_original,
        **{text: text for text in TEXTS if text != "where"},
    )


def test_names_are_replaced_within_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(original, instance, value):
        original(instance, value)
        instance.value += 1

    module = SimpleNamespace(Upstream=Upstream, __name__="upstream_of_patches")
    monkeypatch.setitem(sys.modules, "upstream_of_patches", module)
    rows = [
        row("limit", 3),
        row("__init__", init, calls_original=True),
        row("is_supported", lambda original, value: not original(value), calls_original=True),
    ]
    before = dict(vars(Upstream))
    with pytest.raises(KeyError, match="absent"), replaced([*rows, row("absent", None)]):
        pass
    assert dict(vars(Upstream)) == before
    with replaced(rows):
        assert Upstream.limit == 3 and Upstream(4).value == 5
        assert Upstream.is_supported(3) and not Upstream(0).is_supported(2)
    assert dict(vars(Upstream)) == before
    assert Upstream(4).value == 4 and Upstream.is_supported(0)
