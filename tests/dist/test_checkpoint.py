"""A state saved in one layout is bit for bit the one that another layout resumes, and that Megatron-Core gathers."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoint_ranks import CHAINS, SIZES

from megarl.checkpoint.torch_dist import MegatronFolder
from megarl.models.shards import whole_tensor


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Whole tensors, without the number that Megatron gives to the optimizer of dense and of expert parameters."""
    stored, tensors = MegatronFolder(folder), {}
    for key, entry in stored.tensors.items():
        shape = tuple(entry.size)
        tensor = tensors[re.sub(r"^chained_\d+\.", "", key)] = torch.empty(
            shape, dtype=entry.properties.dtype
        )
        stored.expect(key, shape, 0, False)
        stored.copy(whole_tensor(key, shape), tensor)
    vocab = SIZES["vocab"]  # more rows are padding, which depends on the layout
    return {
        key: tensor[:vocab] if "word_embeddings" in key else tensor
        for key, tensor in tensors.items()
    }


def same(one: Path, other: Path) -> int:
    """The number of tensors, which are all equal."""
    found, expected = tensors_of(one), tensors_of(other)
    assert found.keys() == expected.keys()
    assert [key for key in expected if not torch.equal(found[key], expected[key])] == []
    return len(expected)


@pytest.mark.long
def test_a_checkpoint_resumes_in_every_layout(tmp_path: Path) -> None:
    program = Path(__file__).with_name("checkpoint_ranks.py")
    command = [sys.executable, "-W", "ignore", program, tmp_path / "found.json", tmp_path]
    subprocess.run(command, check=True, timeout=550)
    for found in json.loads((tmp_path / "found.json").read_text()):
        assert {
            place: names for chain in found.values() for place, names in chain.items() if names
        } == {}
    for name, (_, _, layouts) in CHAINS.items():
        for number in range(1, len(layouts) + 1):
            saved = tmp_path / name / "checkpoints" / f"step_{number}"
            assert same(saved, tmp_path / name / f"megatron_{number}") in (40, 152)
            if number < len(layouts):
                same(saved, tmp_path / name / f"resumed_{number}")
