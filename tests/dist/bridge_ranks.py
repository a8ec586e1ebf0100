"""Families without a table, through Megatron-Bridge, on two gloo ranks; rank 0 writes what they found as JSON.

python bridge_ranks.py RESULTS.json CHECK...      on a CPU, with Megatron-Bridge and Transformer Engine's Python files
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import te_standin

if __name__ == "__main__":
    te_standin.install()  # before Megatron-Core is imported

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from family_ranks import in_bf16, round_trip
from te_cases import TE
from trainer_cases import Policy, random_batch
from trainer_ranks import Bench, _measure, config_of, join, measure, run_checks

from megarl.config.schema import Rollout
from megarl.models.registry import fp32_tensors, hf_shapes, read_model
from megarl.models.shards import ShardSlice
from megarl.parity.gate import ParityChecks, measure_logprobs
from megarl.platform.env import Env
from megarl.rollout.vllm.engine import Engine
from megarl.trainer.bridged import Bridged, record
from megarl.weights.sync.publish import Publisher, WeightFormat, WeightSender, plan_slices
from megarl.weights.sync.transports.collective import Collective

WORLD = 2
TP2, PP2, VPP2, EP2 = (
    {"tensor": 2},
    {"pipeline": 2},
    {"pipeline": 2, "virtual_pipeline": 2},
    {"expert": 2},
)
WITH_TABLES = {
    "qwen3@5": [{}, TP2, PP2, VPP2],
    "llama@5": [TP2, PP2],
    "qwen2@5": [TP2],
    "qwen3_moe@5": [TP2, PP2, EP2, TP2 | EP2, TP2 | {"expert_tensor": 2}],
    "deepseek_v3@3": [TP2, EP2],
}
LAYOUTS = {
    "mistral@5": [TP2, PP2, VPP2],
    "hy_v3@5": [TP2, PP2, EP2, TP2 | EP2],
    "glm4_moe_lite@3": [TP2],
    "deepseek_v2@3": [TP2, PP2],
}
# And the ranks of an engine: one replica, two. The second family has a table, which is not used: of those without,
# vLLM 0.32 on a CPU runs none with experts as transformers does (hy_v3's loader fills a router's bias once of twice).
ENGINES = [("mistral@5", PP2, 2), ("qwen3_moe_32@3", TP2 | EP2, 1)]
ON_TE = [("mistral@5", TP2), ("hy_v3@5", EP2), ("glm4_moe_lite@3", TP2)]
WITHOUT = [(model, parallel) for model, layouts in LAYOUTS.items() for parallel in layouts]


def compare_tables(bench: Bench) -> dict[str, Any]:
    """What Bridge's conversion was seen to do against what the family's own table says, of all ranks."""
    found = {}
    for model, layouts in WITH_TABLES.items():
        for parallel in layouts:
            policy = bench.policy(model, config_of(parallel))
            wrong = [str(part) for part in _disputed(policy)]
            everywhere: list[list[str]] = [[]] * WORLD
            dist.all_gather_object(everywhere, wrong)
            found[f"{model} {parallel}"] = [part for slices in everywhere for part in slices][:4]
    return found


def _disputed(policy: Policy, fault: str = "") -> list[ShardSlice]:
    trainer = policy.trainer
    shape = replace(trainer.shape, bridge=policy.folder)
    bridged = Bridged.of(
        shape, trainer.layout, dtype=torch.float32, dispatcher="alltoall", use_te=False
    )
    chunks: Any = [chunk.module for chunk in trainer.model]
    recorded = record(
        chunks, _Faulty(bridged.bridge, fault), hf_shapes(trainer.shape), trainer.layout.ep
    )
    table = trainer.tensors.slices
    return sorted({_normal(part) for part in recorded} ^ {_normal(part) for part in table}, key=str)


def _normal(part: ShardSlice) -> ShardSlice:
    """Strides of dims of one element say nothing."""
    return replace(
        part,
        strides=tuple(0 if n == 1 else s for n, s in zip(part.shape, part.strides, strict=True)),
    )


@dataclass(frozen=True)
class _Faulty:
    """Bridge's own rules and conversion, but for one planted fault."""

    bridge: Any
    fault: str

    def mapping_registry(self) -> Any:
        return self if self.fault == "no rule" else self.bridge.mapping_registry()

    def megatron_to_hf_lookup(self, name: str) -> Any:
        norm = name == "decoder.final_layernorm.weight"
        return None if norm else self.bridge.mapping_registry().megatron_to_hf_lookup(name)

    def maybe_modify_loaded_hf_weight(self, names: Any, tensors: Any) -> Any:
        weights = self.bridge.maybe_modify_loaded_hf_weight(names, tensors)
        if self.fault == "computed" and names == "model.norm.weight":
            return weights + 1
        if self.fault == "swapped" and str(names).endswith("o_proj.weight"):
            return weights[torch.tensor([1, 0, *range(2, len(weights))])]
        return weights


def faults(bench: Bench) -> dict[str, str]:
    """What recording says to each; swapped rows are a placement still, but not the table's."""
    policy, said = bench.policy("qwen3@2", config_of(TP2)), {}
    for fault in ("computed", "swapped", "no rule"):
        try:
            said[fault] = str(_disputed(policy, fault)[:1])
        except ValueError as error:
            said[fault] = str(error)
    return said


def refused(bench: Bench) -> dict[str, str]:
    """A family whose layers only Transformer Engine has, and one that Bridge does not know."""
    said = {}
    for model in ("olmoe@2", "olmo2@2"):
        try:
            bench.policy(model, config_of({}))
        except ValueError as error:
            said[model] = str(error)
    return said


def round_trip_in_bf16(bench: Bench) -> list[str]:
    """Router corrections stay in fp32."""
    bench.saved("hy_v3@3")
    return round_trip(bench.policy(in_bf16(bench, "hy_v3@3"), config_of(TP2, dtype="bf16")))


def families_without(bench: Bench) -> list[dict[str, Any]]:
    return measure(bench, WITHOUT, round_trip)


def families_on_te(bench: Bench) -> list[dict[str, Any]]:
    """Bridge's own layers, which are Transformer Engine's."""
    found = []
    for model, parallel in ON_TE:
        config = config_of(parallel)
        trainer = config.trainer.model_copy(update={"megatron_options": TE})
        config = config.model_copy(update={"trainer": trainer})
        found.append(_measure(bench, model, config, {}, lambda _: None))
    return found


def engines(bench: Bench) -> list[dict[str, Any]]:
    """An engine of each family, synced with changed weights; every publish proves the log-probs of both sides."""
    return [_synced(bench, *case) for case in ENGINES]


def _synced(bench: Bench, model: str, parallel: dict[str, int], tensor: int) -> dict[str, Any]:
    bench.close()
    rank, folder = dist.get_rank(), bench.saved(model)
    shape = replace(read_model(folder), bridge=folder)
    rollout = Rollout(tensor=tensor, max_tokens=16, max_model_len=64, cpu_kv_cache_gb=0.1)
    env = Env(rank, WORLD, rank, WORLD, job_id="bridge")
    engine = Engine.start(
        folder,
        rollout,
        env,
        stop_token_ids=(1,),
        weights=WeightFormat(hf_shapes(shape), torch.float32, fp32_tensors(shape)),
    )
    policy = bench.policy(model, config_of(parallel), shape)
    weights, transport = (
        WeightFormat(policy.trainer.tensors.shapes, torch.float32, fp32_tensors(shape)),
        Collective(),
    )
    plan = plan_slices(
        weights,
        policy.trainer.tensors.by_rank(),
        transport.gather(list(engine.receiver.slices)),
        ranks_per_replica=tensor,
        round_bytes=256 << 20,
    )
    prompts = torch.randint(
        shape.vocab, (4, 8), generator=torch.Generator().manual_seed(20)
    ).tolist()
    parity = ParityChecks(
        transport,
        partial(measure_logprobs, policy.trainer),
        [engine],
        prompts,
        max_tokens=16,
        max_diff=1e-4,
        always=True,
    )
    publisher = Publisher(
        plan,
        WeightSender(policy.trainer.tensors.slices, policy.trainer.parameters_by_name),
        engine.receiver,
        transport,
        weights,
        probe=parity,
    )
    scored, errors, stale = policy.score(random_batch(num_rows=8)), [], []
    for version in range(3):
        report = publisher.publish(version=version)
        assert report.verified
        errors.append(max(excess.found.max for excess in parity.probe()[1]))
        policy.update(scored)
        stale.append(max(excess.found.max for excess in parity.probe()[1]))
    sizes = [report.num_tensors, report.bytes_kept, report.bytes_received]
    engine.close()
    return {"model": model, "parallel": parallel, "errors": errors, "stale": stale, "sizes": sizes}


CHECKS: dict[str, Callable[[Bench], Any]] = {
    "tables": compare_tables,
    "faults": faults,
    "refused": refused,
    "families": families_without,
    "families_on_te": families_on_te,
    "bf16": round_trip_in_bf16,
    "engines": engines,
}


def work(rank: int, results: str, folder: str, checks: list[str]) -> None:
    run_checks(join(rank, WORLD, folder), {name: CHECKS[name] for name in checks}, results)


if __name__ == "__main__":
    with TemporaryDirectory() as scratch:
        mp.start_processes(work, (sys.argv[1], scratch, sys.argv[2:]), WORLD, start_method="fork")
