"""Log-probs, entropy and gradients over two tensor ranks equal plain fp64."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from start_ranks import run_ranks


@pytest.mark.long
def test_two_tensor_ranks_against_plain_fp64(tmp_path: Path) -> None:
    run_ranks(Path(__file__).parent / "logprob_ranks.py", 2, str(tmp_path / "found.json"))
    found = json.loads((tmp_path / "found.json").read_text())
    assert len(found) == 3 and all(max(errors) < 1e-5 for errors in found.values()), found
