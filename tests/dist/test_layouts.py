"""`megarl check --layouts`: layouts that agree are said to, and a fault in one is named by its layer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from start_ranks import run_ranks

from megarl.layout import Parallel
from megarl.parity.layouts import parse_layout


@pytest.mark.long
def test_layouts_agree_and_a_fault_is_named(tmp_path: Path) -> None:
    run_ranks(
        Path(__file__).parent / "layout_ranks.py", 4, str(tmp_path / "found.json"), timeout_s=300
    )
    found = json.loads((tmp_path / "found.json").read_text())
    for name in ("dense", "moe"):
        assert [row["difference"] for row in found[name]] == [""] * len(found[name]), found[name]
        assert found[name][0]["grad_norm"] > 1e-3
        assert found[f"{name} fault"][1]["difference"].startswith("layer 2: hidden states"), found[
            f"{name} fault"
        ]


def test_layouts_are_written_as_axes_and_sizes() -> None:
    assert parse_layout("1") == Parallel()
    assert parse_layout("tp2,pp2") == Parallel(tensor=2, pipeline=2)
    assert parse_layout("pp2,vpp4,etp2") == Parallel(
        pipeline=2, virtual_pipeline=4, expert_tensor=2
    )
    for text in ("tp", "t2", "tp0", "tp2,"):
        with pytest.raises(ValueError, match="is not a layout"):
            parse_layout(text)
