"""The host's view of torch: in force inside megatron.core only, and no row of it is idle."""

from __future__ import annotations

import ast
import importlib
import re
import sys
from functools import cache
from importlib.metadata import version
from pathlib import Path
from types import BuiltinFunctionType

import pytest
import torch
import torch.distributed as dist

from megarl.patches import megatron as megatron_on_cpu

if torch.cuda.is_available():
    pytest.skip("the host stands back where there is a GPU", allow_module_level=True)
megatron_on_cpu.install()
megatron = importlib.import_module("megatron.core")
moe_utils = importlib.import_module("megatron.core.transformer.moe.moe_utils")
random = importlib.import_module("megatron.core.tensor_parallel.random")


INSTALLED, KNOWN = version("megatron-core"), ("0.16.1", "0.19.2")


@cache
def upstream() -> str:
    """All of megatron.core's source."""
    return "\n".join(path.read_text() for path in Path(megatron.__file__).parent.rglob("*.py"))


@pytest.mark.parametrize("patch", megatron_on_cpu.PATCHES, ids=lambda patch: patch.where)
def test_upstream_still_needs_the_row(patch: megatron_on_cpu.Patch) -> None:
    """Each name is still used by megatron.core; a row that is not can go."""
    if INSTALLED in KNOWN and INSTALLED not in patch.versions:
        pytest.skip(f"a row of {patch.versions}")
    if patch.where.startswith("torch.") and not patch.where.startswith(
        ("torch.cuda", "torch.distributed")
    ):
        name = patch.where.removeprefix("torch.")
        pattern = rf"torch\.{name}\b"
    elif patch.where.startswith("megatron."):
        pattern = rf"\b{patch.where.rpartition('.')[2]}\b"
    else:
        pattern = rf"\b{patch.where.strip('.()').rpartition('.')[2]}\b"
    assert re.search(pattern, upstream()), f"{patch.where} is gone from megatron-core {INSTALLED}"
    assert patch.why and patch.versions


def test_torch_itself_is_untouched() -> None:
    assert torch.cuda.current_device.__module__ == "torch.cuda"
    assert not torch.cuda.is_available()
    assert isinstance(torch.zeros, BuiltinFunctionType)
    assert dist.all_gather.__module__ == "torch.distributed.distributed_c10d"
    assert isinstance(sys.modules["torch"], type(sys)) and type(sys.modules["torch.cuda"]) is type(
        sys
    )
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(1, device="cuda")


def test_megatron_does_not_import_wandb() -> None:
    from megatron.core import timers

    assert timers.wandb is None


def test_megatron_sees_the_host() -> None:
    theirs = random.torch
    assert theirs.cuda.current_device() == torch.device("cpu")
    for name in ("zeros", "empty", "ones", "rand", "randn"):
        assert getattr(theirs, name)(2, device="cuda").device.type == "cpu", name
    assert theirs.tensor([1.0], device="cuda", pin_memory=True).device.type == "cpu"
    assert theirs.Tensor is torch.Tensor and theirs.nn is torch.nn
    assert theirs.cuda.Stream() == theirs.cuda.current_stream()


def test_every_module_of_megatron_sees_it() -> None:
    modules = {
        name: module for name, module in sys.modules.items() if name.startswith("megatron.core.")
    }
    assert len(modules) > 50
    blind = [name for name, module in modules.items() if getattr(module, "torch", None) is torch]
    assert not blind


def test_seeding_megatron_leaves_the_random_state_alone() -> None:
    before = torch.get_rng_state()
    tracker = random.CudaRNGStatesTracker()
    tracker.add("one", 1)
    with tracker.fork("one"):
        pass
    assert torch.equal(before, torch.get_rng_state())
    assert tracker.get_states().keys() == {"one"}


def test_names_of_transformer_engine_are_defined() -> None:
    assert moe_utils.te_general_gemm is None


def test_methods_are_rewritten_where_they_are_called() -> None:
    source = "y = f(x).cuda(non_blocking=True).type() + torch.cuda.device_count()"
    tree = megatron_on_cpu._Rewrite({"cuda": "__host_cuda__", "type": "__host_type__"}).visit(
        ast.parse(source)
    )
    assert (
        ast.unparse(tree)
        == "y = __host_type__(__host_cuda__(f(x), non_blocking=True)) + torch.cuda.device_count()"
    )


def test_type_names_are_those_of_a_gpu() -> None:
    row = next(patch for patch in megatron_on_cpu.PATCHES if patch.where == ".type()")
    assert row.replacement(torch.zeros(1)) == "torch.cuda.FloatTensor"
    assert row.replacement(torch.zeros(1, dtype=torch.bfloat16)) == "torch.cuda.BFloat16Tensor"
    assert row.replacement(torch.zeros(1), torch.float64).dtype == torch.float64


def test_install_is_late_never_twice_and_absent_with_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = list(sys.meta_path)
    assert megatron_on_cpu.install() and sys.meta_path == installed
    monkeypatch.setattr(sys, "meta_path", [])
    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "is_available", lambda: True)
        assert not megatron_on_cpu.install() and not sys.meta_path
    with pytest.raises(RuntimeError, match="before"):
        megatron_on_cpu.install()
