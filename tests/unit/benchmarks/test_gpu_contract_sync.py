"""The comparison of an engine's tensors, and whether the committed output of the syncs is of this code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import gpu_contract_sync, gpu_stubs, gpu_tensors
from benchmarks.gpu_contract import ROOT, SYNCS
from benchmarks.gpu_contract_code import FOLDERS, code_hash
from benchmarks.gpu_contract_plants import PLANTS
from benchmarks.gpu_tensors import addresses_of, differences, moved, tensors_of
from benchmarks.threaded import on_all_ranks, world_of
from megarl.models.registry import FAMILIES, read_model

COMMAND = "python -m benchmarks.gpu_contract sync"


def test_the_syncs_of_this_code_have_been_compared():
    found = re.search(r"^code +(\w+)", SYNCS.read_text(), re.MULTILINE)
    assert found
    assert found[1] == code_hash(), (
        f"{', '.join(FOLDERS)} or the pins of megarl[gpu] have changed since {SYNCS.name} was written: run {COMMAND}, "
        "with the GPU packages (its docstring says how), and commit the file"
    )


def test_every_case_was_equal_on_every_gpu_and_every_mistake_found():
    lines = SYNCS.read_text().splitlines()
    equal = [
        line.split()[1:3] for line in lines if line.startswith("sync ") and line.endswith(": equal")
    ]
    assert equal == [[gpu, case] for gpu in gpu_stubs.GPUS for case in gpu_contract_sync.CASES]
    planted = [
        line.split()[1]
        for line in lines
        if line.startswith("planted ") and line.endswith(": found")
    ]
    assert planted == list(PLANTS)


def test_every_family_is_synced(tmp_path):
    folders = {
        case: gpu_contract_sync.model_folder(case, tmp_path) for case in gpu_contract_sync.CASES
    }
    shapes = {case: read_model(folder) for case, folder in folders.items()}
    # another name for deepseek_v3
    assert {shape.family for shape in shapes.values()} == FAMILIES.keys() - {"kimi_k2"}
    assert shapes["qwen3_tied:fp8"].tied and not shapes["qwen3:fp8"].tied


def write(folder: Path, code: str) -> str:
    for name in FOLDERS:
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / FOLDERS[0] / "a.py").write_text(code)
    (folder / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    return code_hash(folder)


def test_the_hash_is_of_code_not_of_text(tmp_path):
    before = write(tmp_path, 'def f(x):\n    """Text."""\n    return x + 1\n')
    assert before == write(
        tmp_path, '"""A module."""\ndef f(x):  # a comment\n    return (x\n            + 1)\n'
    )
    assert before != write(tmp_path, "def f(x):\n    return x + 2\n")
    assert before != write(tmp_path, "def f(x, y=None):\n    return x + 1\n")
    pins = tmp_path / "pyproject.toml"
    pins.write_text(pins.read_text().replace("vllm==", "vllm>="))
    assert before != code_hash(tmp_path)


class Kernel:
    """As an object of vLLM that keeps a scale."""

    __module__ = "vllm.kernels"

    def __init__(self, scale: torch.Tensor) -> None:
        self.config = {"scales": [scale]}


def model() -> nn.Module:
    inner = nn.Linear(2, 2, bias=False)
    nn.init.ones_(inner.weight)
    inner.register_buffer("table", torch.arange(3))
    inner.cached = torch.ones(4, dtype=torch.bfloat16)  # pyright: ignore[reportArgumentType]
    inner.cached_cpu = torch.rand(1)  # pyright: ignore[reportArgumentType]
    inner.quant_method = Kernel(torch.tensor(2.0))  # pyright: ignore[reportArgumentType]
    return nn.Sequential(inner)


def test_attributes_of_modules_and_kernels_are_compared():
    live, fresh = tensors_of(model(), "cpu"), tensors_of(model(), "cpu")
    paths = {"0.weight", "0.table", "0.cached", "0.quant_method.config[scales][0]"}
    assert live.keys() == paths and not differences(live, fresh)
    for path in paths:
        changed = live | {path: live[path] + 1}
        assert list(differences(changed, fresh)) == [path]
    live["0.weight"][0, 1] = 3.0
    assert differences(live, fresh) == {"0.weight": "2 of 16 bytes differ"}


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (torch.ones(2, 3, dtype=torch.bfloat16), "instead of torch.float32 (2, 3) (3, 1)"),
        (torch.ones(3, 2).T, "torch.float32 (2, 3) (1, 2) instead of"),
        (torch.ones(2, 3, device="meta"), "has no data"),
        (torch.full((2, 3), -1.0), "6 of 24 bytes differ"),
        (torch.ones(2, 3), None),
    ],
)
def test_differences_are_named(other, text):
    found = differences({"x": other}, {"x": torch.ones(2, 3)}).get("x")
    assert found is None if text is None else text in str(found)


def test_missing_and_moved_tensors_are_named():
    a, b = torch.ones(2), torch.ones(2)
    assert differences({"a": a}, {"b": b}) == {
        "a": "only after a sync",
        "b": "only after a fresh load",
    }
    assert moved(addresses_of({"a": a, "b": b}), addresses_of({"a": b, "b": b})) == ["a"]


def test_sleep_discards_parameters_and_attributes_but_no_buffers():
    slept = model()
    gpu_tensors.discard(slept, "cpu")
    assert list(differences(tensors_of(slept, "cpu"), tensors_of(model(), "cpu"))) == [
        "0.cached", "0.quant_method.config[scales][0]", "0.weight",
    ]  # fmt: skip


def test_threads_exchange_messages_and_report_the_first_error():
    def exchange(link):
        peer = 1 - link.rank
        arrived = torch.zeros(1)
        link.start({peer: torch.full((1,), 10.0 + link.rank)}, {peer: arrived})()
        return arrived.item(), link.sum(torch.tensor(link.rank + 1)).item(), link.gather(link.rank)

    world = world_of(2)
    assert on_all_ranks(world, exchange) == [(11.0, 3, [0, 1]), (10.0, 3, [0, 1])]

    def fails(link):
        if link.rank:
            raise ValueError("rank 1")
        link.barrier("x")

    with pytest.raises(ValueError, match="rank 1"):
        on_all_ranks(world, fails)
