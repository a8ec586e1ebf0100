"""Slices of safetensors into parameters: each element once, padding zero, faults named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_trainer import SMALL, build

from megarl.checkpoint.hf_folder import load_hf
from megarl.commands.random_model import create_model
from megarl.config.schema import Create
from megarl.models.shards import ShardSlice

EMBED, FUSED = "embedding.word_embeddings.weight", "linear.weight"
WORDS, GATE = torch.arange(6.0).view(3, 2) + 1, torch.arange(8.0).view(2, 4) + 10
BOXES = [
    ShardSlice("words", (1, 0), (2, 2), EMBED, 0, (2, 1)),  # rows 1 and 2, then two rows of padding
    ShardSlice("gate", (0, 2), (2, 2), FUSED, 0, (2, 1)),  # its right half
    ShardSlice("gate", (0, 0), (2, 2), FUSED, 4, (2, 1)),  # and below it its left half
]


def parameters() -> dict[str, torch.Tensor]:
    return {EMBED: torch.full((4, 2), 9.0), FUSED: torch.full((4, 2), 9.0)}


@pytest.mark.parametrize("sharded", [False, True])
def test_slices_arrive_and_padding_is_zero(tmp_path: Path, sharded: bool) -> None:
    if sharded:
        save_file({"words": WORDS}, tmp_path / "one.safetensors")
        save_file({"gate": GATE}, tmp_path / "two.safetensors")
        index = {"weight_map": {"words": "one.safetensors", "gate": "two.safetensors"}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        save_file({"words": WORDS, "gate": GATE}, tmp_path / "model.safetensors")
    found = parameters()
    load_hf(found, BOXES, tmp_path)
    assert found[EMBED].tolist() == [[3, 4], [5, 6], [0, 0], [0, 0]]
    assert found[FUSED].tolist() == [[12, 13], [16, 17], [10, 11], [14, 15]]


def test_a_tensor_of_pairs_is_taken_apart(tmp_path: Path) -> None:
    """gpt-oss: in [experts, hidden, 2 x inner] gate and up alternate; the parameter has gates, then ups, transposed."""
    alternating = torch.arange(2 * 3 * 8.0).view(2, 3, 8)
    save_file({"gate_up": alternating}, tmp_path / "model.safetensors")
    found = {FUSED: torch.zeros(4, 3)}  # expert 1, pairs 2 and 3
    load_hf(
        found, [ShardSlice("gate_up", (1, 0, 2, 0), (1, 3, 2, 2), FUSED, 0, (0, 1, 3, 6))], tmp_path
    )
    assert torch.equal(
        found[FUSED], torch.cat([alternating[1, :, 4::2].T, alternating[1, :, 5::2].T])
    )


def test_faults_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no \*\.safetensors"):
        load_hf(parameters(), BOXES, tmp_path)
    save_file({"words": WORDS}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="has no tensor gate"):
        load_hf(parameters(), BOXES, tmp_path)
    save_file({"words": WORDS[:2].contiguous(), "gate": GATE}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"words has shape \(2, 2\)"):
        load_hf(parameters(), BOXES, tmp_path)
    save_file(
        {"words": WORDS.to(torch.float8_e4m3fn), "gate": GATE}, tmp_path / "model.safetensors"
    )
    with pytest.raises(ValueError, match="words is quantised \(F8_E4M3\)"):
        load_hf(parameters(), BOXES, tmp_path)


@pytest.mark.parametrize(
    ("boxes", "message"),
    [
        (BOXES[:2], "in no slice"),
        ([*BOXES, BOXES[2]], "in two slices"),
        (BOXES[:1], "slices and model differ"),
    ],
)
def test_boxes_must_cover_each_element_once(
    tmp_path: Path, boxes: list[ShardSlice], message: str
) -> None:
    save_file({"words": WORDS, "gate": GATE}, tmp_path / "model.safetensors")
    with pytest.raises(AssertionError, match=message):
        load_hf(parameters(), boxes, tmp_path)


@pytest.mark.usefixtures("one_rank")
def test_a_trainer_refuses_a_head_that_is_not_tied(tmp_path: Path) -> None:
    """Also of a model from the hub, whose weights come after the preflight."""
    file = create_model(Create(**SMALL), tmp_path) / "model.safetensors"
    tensors = load_file(file)
    head = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors | {"lm_head.weight": head}, file)
    build(tmp_path).close()
    save_file(tensors | {"lm_head.weight": -head}, file)
    with pytest.raises(ValueError, match=r"lm_head\.weight differs from model\.embed_tokens"):
        build(tmp_path)
