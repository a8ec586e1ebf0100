"""`megarl check --layouts`: layouts that agree are said to, and a mistake is named by its layer, term or tensor."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from start_ranks import run_ranks

from megarl.layout import Parallel
from megarl.parity.layouts import parse_layout

NAMED = {  # mistake -> the difference of the last layout
    "weights": "hidden states of layer 2: ",
    "KL": "kl/loss: ",
    "balance": r"gradient norm: .*?, gradient of model\.layers\.\d\.mlp\.gate\.weight: ",
    "recompute": "routing/differs: ",
    "correction": r"correction/\w+: ",
    "divisor": "(loss|gradient norm): ",
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    file = tmp_path_factory.mktemp("layouts") / "found.json"
    run_ranks(Path(__file__).parent / "layout_ranks.py", 2, str(file), timeout_s=300)
    return json.loads(file.read_text())


@pytest.mark.long
@pytest.mark.parametrize("name", ["supervised", "dense", "moe"])
def test_layouts_agree(found: dict[str, list[dict[str, Any]]], name: str) -> None:
    assert [row["difference"] for row in found[name]] == [""] * len(found[name]), found[name]
    assert found[name][0]["grad_norm"] > 1e-3


@pytest.mark.long
@pytest.mark.parametrize("mistake", NAMED)
def test_a_mistake_is_named(found: dict[str, list[dict[str, Any]]], mistake: str) -> None:
    difference = found[mistake][-1]["difference"]
    print(difference)
    assert re.match(NAMED[mistake], difference), difference


def test_layouts_are_written_as_axes_and_sizes() -> None:
    assert parse_layout("1") == Parallel()
    assert parse_layout("tp2,pp2") == Parallel(tensor=2, pipeline=2)
    assert parse_layout("pp2,vpp4,etp2") == Parallel(
        pipeline=2, virtual_pipeline=4, expert_tensor=2
    )
    for text in ("tp", "t2", "tp0", "tp2,"):
        with pytest.raises(ValueError, match="is not a layout"):
            parse_layout(text)
