"""vLLM's source still does what each row replaces; a test that fails names a row to delete."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed as dist

from megarl.patches import vllm as patches
from megarl.patches.patch import Patch, replaced

SPEC = find_spec("vllm")
if SPEC is None:
    pytest.skip("needs vLLM", allow_module_level=True)
ROOT = Path(next(iter(SPEC.submodule_search_locations or ())))


def definition(file: Path, names: list[str]) -> str:
    """The source of a function or method, found without importing its module."""
    text = file.read_text(encoding="utf-8")
    node: ast.AST = ast.parse(text)
    for name in names:
        (node,) = (x for x in ast.iter_child_nodes(node) if getattr(x, "name", "") == name)
    return ast.get_source_segment(text, node) or ""


def source(patch: Patch) -> str:
    parts = patch.where.split(".")[1:]
    depth = next(
        n for n in range(1, len(parts)) if ROOT.joinpath(*parts[:n]).with_suffix(".py").is_file()
    )
    return definition(ROOT.joinpath(*parts[:depth]).with_suffix(".py"), parts[depth:])


def test_segments_are_not_named_after_the_job() -> None:
    name = source(patches.SEGMENT_NAME)
    assert "VLLM_DIST_IDENT" in name and "unique_name" in name
    worker = (ROOT / "v1/worker/cpu_worker.py").read_text(encoding="utf-8")
    identity = worker.partition('os.environ["VLLM_DIST_IDENT"] =')[2][:200]
    assert 'init_method.split(":")[-1]' in identity, "of env://, which every job has"


def test_fp8_experts_need_amx() -> None:
    assert "_is_amx_tile_supported" in source(patches.FP8_EXPERTS)


def test_lora_selects_triton_for_all_experts() -> None:
    oracle = ROOT / "model_executor/layers/fused_moe/oracle/unquantized.py"
    select = definition(oracle, ["select_unquantized_moe_backend"])
    lora = select.partition("if moe_config.is_lora_enabled:")[2].partition(
        "_get_priority_backends"
    )[0]
    assert "UnquantizedMoeBackend.TRITON" in lora and "is_cpu" not in lora


def test_a_finalizer_shuts_the_engine_down() -> None:
    assert "weakref.finalize(self, self.engine_core.shutdown)" in source(patches.FINALIZER)


def test_a_segment_has_the_prefix_and_no_slashes() -> None:
    def original(communicator: SimpleNamespace) -> str:
        return f"env://-{communicator.unique_name}-cpushm"

    communicator = SimpleNamespace(unique_name="tp:0")
    name = patches._segment_name(original, communicator, prefix="job-7-")
    assert name == "job-7-env:-tp:0-cpushm"


def test_experts_on_a_cpu_ignore_the_expert_map() -> None:
    for row in (patches.LOCAL_EXPERTS, patches.LOCAL_FP8_EXPERTS):
        assert "expert_map:" in source(row) and source(row).count("expert_map") == 1


def test_a_cpu_cannot_gather_rows_of_data_ranks() -> None:
    communicator = (ROOT / "distributed/device_communicators/cpu_communicator.py").read_text()
    for row in (patches.GATHER_ROWS, patches.SCATTER_ROWS):
        name = row.where.rpartition(".")[2]
        assert "raise NotImplementedError" in source(row)
        assert f"def {name}(" not in communicator


def test_an_expert_of_another_rank_adds_nothing() -> None:
    seen = {}
    ids, weights = torch.tensor([[2, 0], [3, 1]]), torch.tensor([[0.75, 0.25], [0.5, 0.5]])
    patches._apply_local_experts(
        lambda experts, **values: seen.update(values),
        None,
        topk_ids=ids.int(),
        topk_weights=weights,
        expert_map=torch.tensor([-1, -1, 0, 1]),
    )
    assert seen["topk_ids"].tolist() == [[0, 0], [1, 0]] and seen["topk_ids"].dtype == torch.int32
    assert seen["topk_weights"].tolist() == [[0.75, 0.0], [0.5, 0.0]]
    assert seen["expert_map"] is None


def create_store() -> tuple[dist.TCPStore, set[str]]:
    """Returns a store as workers create it, and the addresses on which it listens."""
    from vllm.distributed import parallel_state

    store = parallel_state.create_tcp_store("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    hosts = {
        connection.laddr.ip
        for connection in psutil.Process().net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == store.port
    }
    return store, hosts


def test_a_store_of_workers_listens_on_all_interfaces() -> None:
    _, hosts = create_store()
    assert hosts and hosts <= {"::", "0.0.0.0"}


def test_a_store_of_workers_listens_on_its_host_only() -> None:
    with replaced([patches.STORE]):
        store, hosts = create_store()
    assert hosts == {"127.0.0.1"}
    client = dist.TCPStore("127.0.0.1", store.port, is_master=False)
    client.set("key", "value")
    assert store.get("key") == b"value"
