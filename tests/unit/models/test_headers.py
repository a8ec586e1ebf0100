"""Malformed safetensors files and indexes are refused by name, in one line, by every reader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megarl.checkpoint.hf_folder import HfFolder
from megarl.models.headers import INDEX, header_shapes

W = {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64]}
V = {"dtype": "F32", "shape": [4, 4], "data_offsets": [64, 128]}


def write(
    folder: Path,
    header: Any,
    *,
    data: int = 64,
    length: int | None = None,
    file: str = "model.safetensors",
) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / file).write_bytes(
        (len(text) if length is None else length).to_bytes(8, "little") + text + bytes(data)
    )


def assert_refused(folder: Path, *parts: str) -> None:
    for read in (HfFolder, header_shapes):
        with pytest.raises(ValueError) as refused:
            read(folder)
        message = str(refused.value)
        assert type(refused.value) is ValueError and "\n" not in message and len(message) < 1000
        assert all(part in message for part in parts), message


def test_a_file_as_the_format_has_it(tmp_path: Path) -> None:
    empty = {"dtype": "BF16", "shape": [0], "data_offsets": [64, 64]}
    write(tmp_path, {"__metadata__": {"a": "b"}, "v": V, "empty": empty, "w": W}, data=128)
    assert header_shapes(tmp_path) == {"w": (4, 4), "v": (4, 4), "empty": (0,)}
    write(tmp_path, {"w": W | {"shape": [], "data_offsets": [0, 4]}}, data=4)
    assert HfFolder(tmp_path).tensors["w"].shape == ()


@pytest.mark.parametrize(
    ("header", "parts"),
    [
        ({"w": W | {"data_offsets": [-64, 0]}}, ["integer `-64`"]),
        ({"w": W | {"data_offsets": [64, 0]}}, ["invalid offset for tensor `w`"]),
        ({"w": W | {"data_offsets": [0, 32]}}, ["invalid shape, data type, or offset"]),
        ({"w": W, "v": W}, ["invalid offset for tensor"]),
        ({"w": W, "v": V | {"data_offsets": [32, 96]}}, ["invalid offset for tensor `v`"]),
        ({"w": W | {"data_offsets": [4, 68]}}, ["invalid offset for tensor `w`"]),  # the format has no gaps
        ({"w": V}, ["invalid offset for tensor `w`"]),
        ({"w": W, "v": V}, ["incomplete metadata, file not fully covered"]),
        ({"w": W | {"shape": [-4, -4]}}, ["integer `-4`"]),
        ({"w": W | {"shape": [4, 4.0]}}, ["floating point `4.0`"]),
        ({"w": W | {"shape": [4, True, 4]}}, ["boolean `true`"]),
        ({"w": W | {"shape": "44"}}, ['string "44"']),
        ({"w": W | {"shape": [2**62, 2**62]}}, ["overflow"]),
        ({"w": W | {"shape": [2**62, 2**62], "data_offsets": [0, 2**126]}}, ["floating point `8.5"]),
        ({"w": W | {"dtype": "EVIL"}}, ["unknown variant `EVIL`"]),
        ({"w": W | {"dtype": "U64", "shape": [4, 2]}}, ["w has dtype U64"]),
        ({"w": W | {"dtype": ["F32"]}}, ["invalid type: sequence"]),
        ({"w": W | {"data_offsets": ["a", "b"]}}, ["cannot be read as safetensors"]),
        ({"w": W | {"data_offsets": [0, 32, 64]}}, ["cannot be read as safetensors"]),
        ({"w": {"dtype": "F32", "data_offsets": [0, 64]}}, ["missing field `shape`"]),
        ({"w": [1]}, ["cannot be read as safetensors"]),
        ([W], ["cannot be read as safetensors"]),
        (b'{"w": %s, "w": %s}' % (json.dumps(W).encode(), json.dumps(W).encode()), ["it has 'w' twice"]),
        (b"[" * 100_000, ["cannot be read as safetensors"]),
        (b'{"w":' * 150 + b"1" + b"}" * 150, ["recursion limit exceeded"]),
        (b"", ["cannot be read as safetensors"]),
        (b"\xff\xfe", ["cannot be read as safetensors"]),
    ],
)  # fmt: skip
def test_a_malformed_header(tmp_path: Path, header: Any, parts: list[str]) -> None:
    write(tmp_path, header)
    assert_refused(tmp_path, "model.safetensors", *parts)


@pytest.mark.parametrize("length", [2**64 - 1, 2**63, 8 << 30, 4096])
def test_a_header_longer_than_its_file(tmp_path: Path, length: int) -> None:
    write(tmp_path, {"w": W}, length=length)
    assert_refused(tmp_path, "model.safetensors cannot", "header", "copy it again")


def test_bytes_behind_the_last_tensor(tmp_path: Path) -> None:
    write(tmp_path, {"w": W}, data=80)
    assert_refused(tmp_path, "model.safetensors", "file not fully covered")


def test_a_long_header_is_not_read(tmp_path: Path) -> None:
    write(tmp_path, b"", length=1 << 27)
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.truncate(1 << 28)  # of holes
    assert_refused(tmp_path, "model.safetensors", "header too large")


@pytest.mark.parametrize("content", [b"", b"abc"])
def test_a_file_without_a_length(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    assert_refused(tmp_path, "model.safetensors", "header too small")


@pytest.mark.parametrize(
    ("index", "part"),
    [
        ({"weight_map": {"w": "../outside/x.safetensors"}}, "w is in '../outside/x.safetensors'"),
        ({"weight_map": {"w": "/etc/passwd"}}, "w is in '/etc/passwd'"),
        ({"weight_map": {"w": "./model.safetensors"}}, "w is in './model.safetensors'"),
        ({"weight_map": {"w": "sub/../model.safetensors"}}, "w is in"),
        ({"weight_map": {"w": "config.json"}}, "w is in 'config.json'"),
        ({"weight_map": {"w": 3}}, "w is in 3"),
        ({"weight_map": {"w": None}}, "w is in None"),
        ({"weight_map": ["w"]}, "is not a valid index"),
        ({"weight_map": "w"}, "is not a valid index"),
        ({}, "it has no weight_map"),
        ([{"weight_map": {}}], "is not a valid index"),
        ('{"weight_map": {', "is not a valid index"),
        ("[" * 100_000, "nested more than 100 deep"),
    ],
)  # fmt: skip
def test_a_malformed_index(tmp_path: Path, index: Any, part: str) -> None:
    (tmp_path / "outside").mkdir()
    write(tmp_path / "outside", {"w": W}, file="x.safetensors")
    folder = tmp_path / "model"
    folder.mkdir()
    write(folder, {"w": W})
    (folder / INDEX).write_text(index if isinstance(index, str) else json.dumps(index))
    assert_refused(folder, INDEX, part)


@pytest.mark.parametrize(
    ("name", "file", "part"),
    [
        ("w", "other.safetensors", "other.safetensors, which should contain w, is missing"),
        ("w", "a\0.safetensors", "which should contain w, is missing"),
        ("w", f"{'a' * 300}.safetensors", "which should contain w, is missing"),
        ("v", "model.safetensors", "has no tensor v, though"),
    ],
)
def test_an_index_of_what_is_not_there(tmp_path: Path, name: str, file: str, part: str) -> None:
    write(tmp_path, {"w": W})
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {name: file}}))
    assert_refused(tmp_path, part)


def test_links_into_a_cache_are_followed(tmp_path: Path) -> None:
    """huggingface_hub's snapshots are links to files of hashed names."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    write(tmp_path / "blobs", {"w": W}, file="0123")
    (tmp_path / "snapshot" / "model.safetensors").symlink_to("../blobs/0123")
    (tmp_path / "snapshot" / INDEX).write_text(
        json.dumps({"weight_map": {"w": "model.safetensors"}})
    )
    assert HfFolder(tmp_path / "snapshot").tensors.keys() == {"w"}
