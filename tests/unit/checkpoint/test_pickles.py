"""Pickles that name code do not run it, and are refused by file and name; what a checkpoint contains is loaded."""

from __future__ import annotations

import importlib
import io
import os
import pickle
import struct
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

from megarl.checkpoint.pickles import check_pickles
from megarl.patches.checkpoints import ALLOWED, UnsafePickleError, load_object, load_pickle


class Runs:
    """Pickled, it is a call of os.system."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple:
        return os.system, (self.command,)


def text(value: str) -> bytes:
    return b"\x8c" + struct.pack("B", len(value)) + value.encode()


def call(module: str, name: str, argument: str) -> bytes:
    """A pickle of `module.name(argument)`, by opcodes: `name` may have dots."""
    return b"\x80\x04" + text(module) + text(name) + b"\x93" + text(argument) + b"\x85R."


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("posix", "system"),
        ("builtins", "eval"),
        ("builtins", "getattr"),
        ("importlib", "import_module"),
        ("torch", "load"),
        ("torch", "hub.load"),
        ("torch", "_C"),
        ("torch.serialization", "os.system"),
        ("torch.distributed.checkpoint.filesystem", "os.system"),
        ("torch.distributed.checkpoint.metadata", "Metadata.__init__.__globals__"),
        ("megarl.patches.checkpoints", "load_object"),
    ],
)
def test_a_name_that_no_checkpoint_contains_is_refused(
    tmp_path: Path, module: str, name: str
) -> None:
    (tmp_path / ".metadata").write_bytes(call(module, name, f"touch {tmp_path}/ran"))
    refused = rf"\.metadata refers to {module}\.{name}, which could run code"
    with pytest.raises(UnsafePickleError, match=refused):
        check_pickles(tmp_path)
    with pytest.raises(UnsafePickleError, match=refused):
        FileSystemReader(tmp_path).read_metadata()
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_every_protocol_is_read_by_the_same_rules(tmp_path: Path, protocol: int) -> None:
    with pytest.raises(UnsafePickleError, match=r"posix\.system"):
        load_pickle(io.BytesIO(pickle.dumps([Runs(f"touch {tmp_path}/ran")], protocol=protocol)))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("legacy", [False, True])
def test_an_object_that_runs_code_is_refused(tmp_path: Path, legacy: bool) -> None:
    stream = io.BytesIO()
    torch.save([Runs(f"touch {tmp_path}/ran")], stream, _use_new_zipfile_serialization=not legacy)
    stream.seek(0)
    with pytest.raises(
        UnsafePickleError, match=r"^__0_0\.distcp refers to posix\.system, which could run code"
    ):
        load_object(stream, "__0_0.distcp")
    assert not (tmp_path / "ran").exists()


def test_names_are_those_of_this_torch() -> None:
    for path in ALLOWED:
        module, _, name = path.rpartition(".")
        getattr(importlib.import_module(module), name)
    dtype, size = load_pickle(io.BytesIO(pickle.dumps((torch.bfloat16, torch.Size([2])))))
    assert (dtype, size) == (torch.bfloat16, torch.Size([2]))


def test_the_state_of_random_generators_is_loaded() -> None:
    state = {"numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    stream = io.BytesIO()
    torch.save(state, stream)
    stream.seek(0)
    loaded = load_object(stream, "__0_0.distcp")
    assert (loaded["numpy"][1] == state["numpy"][1]).all() and torch.equal(
        loaded["torch"], state["torch"]
    )


def test_a_pickle_for_transformer_engine_is_refused() -> None:
    """Its modules load their state, if it is not empty, with pickle.loads."""
    for size in (0, 8):
        stream = io.BytesIO()
        torch.save([torch.zeros(size, dtype=torch.uint8)], stream)
        stream.seek(0)
        with pytest.raises(ValueError, match="has FP8 state") if size else nullcontext():
            load_object(stream, "__0_0.distcp")


@pytest.mark.parametrize(
    "content", [b"", b"garbage", b"PK\3\4", pickle.dumps([Runs("true")], 4), b"\x80\x02]"]
)
def test_what_is_no_object_is_an_error_of_its_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Metadata({}, storage_data={})))
    (tmp_path / "common.pt").write_bytes(content)
    with pytest.raises(ValueError, match=r"^common\.pt cannot be read \(.*\)$"):
        check_pickles(tmp_path)


def test_torch_loads_objects_by_these_rules() -> None:
    """MCoreLoadPlanner inherits the function that `install` replaces."""
    from megatron.core.dist_checkpointing.strategies.torch import MCoreLoadPlanner

    assert MCoreLoadPlanner.load_bytes is DefaultLoadPlanner.load_bytes
    assert DefaultLoadPlanner.load_bytes.__module__.startswith("megarl.patches.")
