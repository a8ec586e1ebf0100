"""One job of four gloo ranks that builds many trainers one after another; rank 0 writes what they found as JSON.

python trainer_ranks.py RESULTS.json      (starting is what costs, so all of test_trainer.py shares one launch)
"""

from __future__ import annotations

import json
import logging
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from trainer_cases import (
    Oracle,
    Policy,
    ask,
    load_model,
    oracle_log_softmax,
    oracle_logprobs,
    random_batch,
    save_model,
)  # fmt: skip

from megarl.config.precision import Precision
from megarl.config.schema import Config
from megarl.data.collate import collate
from megarl.layout import Layout, Parallel
from megarl.models.registry import read_model
from megarl.models.shape import ModelShape
from megarl.patches import megatron as megatron_on_cpu
from megarl.stages.sft import train_supervised
from megarl.trainer.moe import BalancedRouter
from megarl.trainer.parallel_groups import destroy_parallel, init_parallel
from megarl.trainer.reference import forward_in_turn
from megarl.trainer.trainer import Trainer
from megarl.types import TrainBatch

WORLD = 4
DENSE = [{}, {"tensor": 2, "pipeline": 2}]
SPARSE = [
    {},
    {"expert": 4},
    {"tensor": 2},
    {"tensor": 2, "expert_tensor": 2},
    {"pipeline": 2, "expert": 2},
]
Layouts = list[tuple[str, dict[str, Any]]]
LAYOUTS: Layouts = [
    *(("qwen3", parallel) for parallel in DENSE),
    *(("qwen3_moe", parallel) for parallel in SPARSE),
    ("qwen2", {"tensor": 2, "pipeline": 2}),
    ("qwen3_moe_unnormalised", {"tensor": 2, "pipeline": 2}),
    ("qwen3@5", {"pipeline": 2, "virtual_pipeline": 2}),  # chunks of 2, 1, 1 and 1 layers
    ("mixtral", {"tensor": 2, "expert": 2}),
    ("deepseek_v3@3", {"tensor": 2, "pipeline": 2, "layers": (1, 2)}),
    ("glm4_moe", {"tensor": 2, "pipeline": 2}),
]
MORE_LAYOUTS: Layouts = [  # of parts that are all among those above
    *(("qwen3", parallel) for parallel in ({"tensor": 2}, {"pipeline": 2})),
    *(("qwen3_moe", parallel) for parallel in ({"expert": 2}, {"tensor": 2, "expert": 2})),
    *(("llama", parallel) for parallel in DENSE),
    ("qwen2", {"tensor": 2}),
    ("qwen3_untied", {"tensor": 2, "pipeline": 2}),
]
TOP_K, TOP_LAYOUTS = 5, [{"tensor": 2, "pipeline": 2}, {"tensor": 2, "context": 2}]
TRAIN = {
    "dtype": "fp32",
    "lr": 1e-2,
    "max_tokens_per_microbatch": 64,
    "clip_grad": 1.0,
    "logprob_chunk": 16,
}


# Steps as large as the gradient, so that clipping shows in the weights: Adam's own do not depend on its scale.
CLIPPED = {"eps": 0.1, "clip_grad": 0.05, "lr": 0.3, "betas": (0.7, 0.9), "weight_decay": 0.1}


def config_of(
    parallel: dict[str, int],
    algorithm: dict[str, Any] | None = None,
    moe: dict[str, Any] | None = None,
    **train: Any,
) -> Config:
    sections = {
        "parallel": parallel,
        "train": TRAIN | train,
        "algorithm": algorithm or {},
        "moe": moe or {},
    }
    return Config.model_validate(sections)


class Bench:
    """Builds policies of the saved models, one after another."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.last: Policy | None = None

    def saved(self, model: str) -> Path:
        path = self.folder / model
        if dist.get_rank() == 0 and not path.exists():
            save_model(model, self.folder)
        dist.barrier()
        return path

    def policy(self, model: str, config: Config, shape: ModelShape | None = None) -> Policy:
        """`shape`: other than its config.json is read."""
        path = self.saved(model)
        layout = Layout.of(config.parallel.sizes, dist.get_world_size(), dist.get_rank())
        self.close()
        self.last = Policy.build(config, path, layout, shape=shape)
        return self.last

    def close(self) -> None:
        if self.last is not None:
            self.last.trainer.close()
            self.last = None


def fingerprints(policy: Policy) -> dict[str, str]:
    """ShardSlice of an HF tensor -> hash of its bytes in this rank's parameters."""
    parameters = policy.trainer.parameters_by_name()
    result = {}
    for box in policy.trainer.tensors.slices:
        parameter = parameters[box.param].detach()
        part = parameter.as_strided(box.shape, box.strides, parameter.storage_offset() + box.offset)
        result[f"{box.name}{box.start}{box.shape}"] = sha256(
            part.float().numpy().tobytes()
        ).hexdigest()
    return result


def replicas_differ(policy: Policy) -> list[str]:
    everywhere: list[dict[str, str]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everywhere, fingerprints(policy))
    seen: dict[str, set[str]] = {}
    for rank in everywhere:
        for name, value in rank.items():
            seen.setdefault(name, set()).add(value)
    return sorted(name for name, values in seen.items() if len(values) > 1)


def measure(
    bench: Bench, layouts: Layouts, look: Callable[[Policy], Any] = lambda _: None
) -> list[dict[str, Any]]:
    """Every layout: what `look` sees of the new policy, what it says and how it learns.

    The oracle of each model is asked once, by rank 0.
    """
    oracles: dict[str, Oracle] = {}
    return [
        _measure(bench, model, config_of(parallel), oracles, look) for model, parallel in layouts
    ]


def _measure(
    bench: Bench,
    model: str,
    config: Config,
    oracles: dict[str, Oracle],
    look: Callable[[Policy], Any],
) -> dict[str, Any]:
    policy, batch = bench.policy(model, config), random_batch(num_rows=8)
    seen, scored = look(policy), policy.score(batch)
    if model not in oracles and dist.get_rank() == 0:
        oracles[model] = ask(load_model(bench.folder / model), scored, policy.config)
    before = replicas_differ(policy)
    steps = [policy.update(scored).updates[0] for _ in range(2)]
    differ = before + replicas_differ(policy)
    if dist.get_rank() != 0:
        return {}
    return {
        "model": model,
        "parallel": config.parallel.model_dump(exclude_defaults=True),
        "seen": seen,
        "logprob_error": float((scored.old_logprobs - oracles[model].logprobs).abs().max()),
        "entropy": [steps[0].metrics["entropy"], oracles[model].entropy],
        "steps": [(step.loss, step.grad_norm) for step in steps],
        "oracle": oracles[model].steps,
        "replicas_differ": differ,
    }


def check_clipping(bench: Bench) -> list[dict[str, Any]]:
    """By the norm over the whole model, whichever part of it a rank has."""
    cases: Layouts = [
        ("qwen3_untied", {"tensor": 2, "pipeline": 2}),
        ("qwen3_untied", {}),
        ("qwen3_moe", {"expert": 2}),
    ]
    return [
        _measure(bench, model, config_of(parallel, **CLIPPED), {}, lambda _: None)
        for model, parallel in cases
    ]


def check_router_bias(bench: Bench) -> list[list[float]]:
    """[what each router's bias should have moved by, what it did], from the tokens of all ranks."""
    policy = bench.policy("glm4_moe", config_of({"expert": 2}, moe={"bias_update_rate": 0.01}))
    routers = [
        module for module in policy.trainer.model[0].modules() if isinstance(module, BalancedRouter)
    ]
    counts = {router: torch.zeros_like(router.expert_bias) for router in routers}

    def count(
        router: torch.nn.Module, _inputs: Any, outputs: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        if torch.is_grad_enabled():
            counts[router] += outputs[1].sum(0)

    for router in routers:
        router.register_forward_hook(count)
    before = [router.expert_bias.clone() for router in routers]
    policy.update(policy.score(random_batch(num_rows=8)))
    found = []
    for router, bias in zip(routers, before, strict=True):
        local = counts[router].clone()
        dist.all_reduce(counts[router])
        assert not torch.equal(local * WORLD, counts[router]), "each rank routed other tokens"
        expected = 0.01 * (counts[router].mean() - counts[router]).sign()
        found += [expected.tolist(), (router.expert_bias - bias).tolist()]
    assert not replicas_differ(policy)
    return found


def check_microbatches(bench: Bench) -> dict[str, Any]:
    """One large micro-batch, many small ones, and fewer rows than data ranks: the same update."""
    found = {}
    for name, num_rows, max_tokens, parallel in (
        ("large", 8, 1000, {"tensor": 2}),
        ("small", 8, 20, {"tensor": 2}),
        ("few_rows", 3, 1000, {}),
        ("few_rows_pipeline", 3, 20, {"pipeline": 2}),
    ):
        policy = bench.policy(
            "qwen3_moe", config_of(parallel, max_tokens_per_microbatch=max_tokens, lr=1e-3)
        )
        scored = policy.score(random_batch(num_rows=num_rows, seed=3))
        steps = [policy.update(scored).updates[0] for _ in range(2)]
        found[name] = [(step.loss, step.grad_norm) for step in steps]
    return found


def check_bf16(bench: Bench) -> dict[str, Any]:
    """At lr 0 the weights keep their bits: the optimizer's main weights began as what was loaded."""
    batch = random_batch(num_rows=8)
    policy = bench.policy("qwen3", config_of({"tensor": 2}, dtype="bf16", lr=0.0))
    before = fingerprints(policy)
    scored = policy.score(batch)
    policy.update(scored)
    kept = before == fingerprints(policy)
    wide = bench.policy("qwen3", config_of({"tensor": 2})).logprobs(batch)
    moving = bench.policy("qwen3", config_of({"tensor": 2}, dtype="bf16", lr=1e-3))
    norm = moving.update(scored).updates[0].grad_norm
    return {
        "kept": kept,
        "moved": before != fingerprints(moving),
        "grad_norm": norm,
        "logprob_error": float((scored.old_logprobs - wide).abs().mean()),
        "replicas_differ": replicas_differ(moving),
    }


def check_fp8_without_tokens(bench: Bench) -> dict[str, Any]:
    """Updates in emulated FP8 on one short row, where all experts of a rank may be without tokens."""
    found: dict[str, Any] = {}
    batch = random_batch(num_rows=1, longest=5)
    for recipe, parallel in (
        ("blockwise", {"expert": 4}),
        ("delayed", {"expert": 4}),
        ("tensorwise", {"tensor": 2, "expert": 2}),
    ):
        fp8 = Precision.model_validate({"fp8": {"recipe": recipe, "emulate": True}})
        config = config_of(parallel, {"advantage": "reinforce"})
        config = config.model_copy(update={"precision": fp8})
        policy = bench.policy("qwen3_moe_16_experts", config)
        tokens: list[int] = []
        for name, module in policy.trainer.model[0].module.named_modules():
            if name.endswith("linear_fc1") and "experts" in name:
                module.register_forward_hook(lambda _m, x, _y: tokens.append(len(x[0])))  # noqa: B023
        step = policy.update(policy.score(batch)).updates[0]
        of_ranks: list[list[int]] = [[]] * WORLD
        dist.all_gather_object(of_ranks, [min(tokens), sum(tokens)])
        found[recipe] = (step.grad_norm, of_ranks)
    return found


def check_reference(bench: Bench) -> dict[str, Any]:
    """After updates the reference still says what the first weights said, and the weights keep their bits."""
    kl = {"kl": {"estimator": "k3", "where": "loss", "coef": 0.1}}
    policy, batch = (
        bench.policy("qwen3", config_of({"tensor": 2, "pipeline": 2}, kl)),
        random_batch(num_rows=8),
    )
    scored = policy.score(batch)
    first = policy.update(scored).updates[0]
    later, moved = policy.learner.score(batch), policy.logprobs(batch)
    assert later.ref_logprobs is not None and scored.ref_logprobs is not None
    second = policy.update(scored).updates[0]
    return {
        "reference_moved": float((later.ref_logprobs - scored.old_logprobs).abs().max()),
        "policy_moved": float((moved - scored.old_logprobs).abs().max()),
        "weights_kept_by_logprobs": _same_after(policy, batch),
        "kl": [first.metrics["kl/ref"], second.metrics["kl/ref"]],
    }


def check_teacher(bench: Bench) -> list[dict[str, Any]]:
    """Two steps of distillation from a model of another shape beside the policy, in each layout of the two."""
    found, teacher_folder, batch = [], bench.saved("llama"), random_batch(num_rows=8)
    with torch.no_grad():
        exact_T = oracle_logprobs(load_model(teacher_folder), batch)
        log_p_TV, log_q_TV = (
            oracle_log_softmax(load_model(folder), batch)[batch.mask].double()
            for folder in (bench.saved("qwen3"), teacher_folder)
        )
    top = log_q_TV.topk(TOP_K, 1).indices
    p, q = (
        torch.cat([x.gather(1, top), 1 - x.gather(1, top).sum(1, keepdim=True)], 1)
        for x in (log_p_TV.exp(), log_q_TV.exp())
    )
    exact_top_k = float((p * (p / q).log()).sum(1).mean())
    for parallel, top_k in [
        *((parallel, 0) for parallel in DENSE),
        *((parallel, TOP_K) for parallel in TOP_LAYOUTS),
    ]:
        rules = {
            "advantage": "reinforce",
            "loss": "reinforce",
            "distill_coef": 1.0,
            "distill_top_k": top_k,
        }
        policy = bench.policy("qwen3", config_of(parallel, rules))
        trainer = policy.trainer
        settings = {
            "train": trainer.train.model_copy(
                update={"offload": ("gradients", "optimizer", "weights")}
            )
        }
        other = Trainer.build(
            read_model(teacher_folder), trainer.layout, folder=teacher_folder, device=trainer.device, share_groups_with=trainer,
            **settings,
        )  # fmt: skip
        other.memory.offload_all()
        teacher = partial(forward_in_turn, other, trainer.memory, top_k=top_k)
        learner = replace(policy.learner, frozen={"teacher_logprobs": teacher})
        scores, objective = learner.score(batch), learner.objective
        assert scores.teacher_logprobs is not None
        scored = objective.advantages(batch, scores, objective.initial_state())[0]
        steps = [learner.update(scored).updates[0] for _ in range(2)]
        found.append(
            {
                "parallel": parallel,
                "error": float((scores.teacher_logprobs - exact_T).abs().max()),
                "steps": [
                    (step.loss, step.grad_norm, step.metrics["kl/teacher"]) for step in steps
                ],
                "top_k": [steps[0].metrics["kl/teacher_top_k"], exact_top_k] if top_k else None,
                "replicas_differ": replicas_differ(policy),
            }
        )
        other.close()
    return found


def _same_after(policy: Policy, batch: TrainBatch) -> bool:
    before = fingerprints(policy)
    policy.logprobs(batch)
    return before == fingerprints(policy)


def check_skip(bench: Bench) -> dict[str, Any]:
    """A gradient that is infinite on one data rank skips the step everywhere; the next step is as if nothing was."""
    policy = bench.policy("qwen3_moe", config_of({"expert": 2}))
    scored = policy.score(random_batch(num_rows=8))
    poisoned = scored.advantages.clone()
    poisoned[scored.mask.nonzero()[0]] = math.inf
    before = fingerprints(policy)
    bad = policy.update(replace(scored, advantages=poisoned)).updates[0]
    kept = before == fingerprints(policy)
    good = policy.update(scored).updates[0]
    return {
        "skipped": bad.skipped,
        "kept": kept,
        "after": (good.skipped, good.loss, good.grad_norm),
    }


def check_updates(bench: Bench) -> dict[str, Any]:
    """Two updates a step clip on the second; the schedule counts steps; SFT goes the same way."""
    policy = bench.policy(
        "qwen3", config_of({"tensor": 2}, updates_per_step=2, warmup_steps=3, lr=3e-2)
    )
    scored = policy.score(random_batch(num_rows=8))
    reports = [policy.update(scored) for _ in range(2)]
    taught = bench.policy("qwen3", config_of({"pipeline": 2}))
    batch = random_batch(num_rows=8)
    before = taught.logprobs(batch)
    return {
        "lrs": [[update.lr for update in report.updates] for report in reports],
        "clip_frac": [update.metrics["clip_frac"] for update in reports[-1].updates],
        "sft": [train_supervised(taught.trainer, batch).updates[0].loss for _ in range(4)],
        "sft_expected": float(-before[batch.mask].mean()),
    }


def check_selection(bench: Bench) -> dict[str, Any]:
    """Tokens are chosen over the whole batch, before each update, so every layout chooses the same."""
    found = {}
    for loss, options in (
        ("kl_cov", {"share": 0.2}),
        ("clip_cov", {"share": 0.2, "low": -1e9, "high": 1e9}),
    ):
        for parallel in ({}, {"tensor": 2, "pipeline": 2}):
            rules = {"loss": loss, "token_selection_options": options}
            policy = bench.policy("qwen3", config_of(parallel, rules, updates_per_step=2))
            updates = policy.update(policy.score(random_batch(num_rows=8))).updates
            found[f"{loss} {parallel}"] = [[update.loss, update.grad_norm] for update in updates]
    return found


def check_nothing(bench: Bench) -> dict[str, Any]:
    """A batch without a trained token changes nothing, though Adam has momentum; neither does one without a row."""
    policy = bench.policy("qwen3", config_of({"tensor": 2}))
    batch = random_batch(num_rows=8)
    scored = policy.score(batch)
    policy.update(scored)
    before = fingerprints(policy)
    masked = replace(batch, mask=torch.zeros_like(batch.mask))
    empty = collate([], temperature=1.0)
    reports = [policy.update(policy.score(nothing)).updates[0] for nothing in (masked, empty)]
    kept = before == fingerprints(policy)
    policy.update(scored)
    return {
        "skipped": [r.skipped for r in reports],
        "kept": kept,
        "moves": before != fingerprints(policy),
    }


def check_collectives(_bench: Bench) -> dict[str, Any]:
    """What Megatron's modules call, and that gloo alone still refuses it."""
    from megatron.core.tensor_parallel.mappings import torch as theirs

    rank, sizes = dist.get_rank(), [1, 2, 3, 4]
    mine = torch.full((sizes[rank], 2), float(rank))
    gathered = [torch.empty(size, 2) for size in sizes]
    theirs.distributed.all_gather(gathered, mine)
    own = torch.empty(sizes[rank], 2)
    theirs.distributed.reduce_scatter(
        own, [torch.full((size, 2), float(size + rank)) for size in sizes]
    )
    out = torch.empty(4)
    theirs.distributed.all_to_all_single(
        out, torch.full((4,), float(rank)), torch.ones(4), torch.ones(4)
    )
    try:
        dist.all_gather([torch.empty(size, 2) for size in sizes], mine)
        gloo = "accepted"
    except (RuntimeError, ValueError) as error:
        gloo = str(error)
    return {
        "gathered": [part[:, 0].tolist() for part in gathered],
        "scattered": own[:, 0].tolist(),
        "exchanged": out.tolist(),
        "gloo": gloo,
        "host": megatron_on_cpu.is_installed(),
    }


def check_connected(_bench: Bench) -> list[int]:
    """Collectives of each group of several ranks before the first forward pass: NCCL connects in the first."""
    from megatron.core import parallel_state

    found = []
    for sizes in ({"tensor": 2, "pipeline": 2}, {"expert": 2, "context": 2}, {"expert_tensor": 2}):
        parallel = Parallel(**sizes)
        init_parallel(Layout.of(parallel, WORLD, dist.get_rank()), device=torch.device("cpu"))
        state: Any = parallel_state
        groups = [
            state.get_tensor_model_parallel_group(),
            state.get_pipeline_model_parallel_group(),
            state.get_context_parallel_group(),
            state.get_data_parallel_group(with_context_parallel=True),
            state.get_expert_model_parallel_group(),
            state.get_expert_tensor_parallel_group(),
            state.get_expert_tensor_and_model_parallel_group(),
            state.get_expert_data_parallel_group(),
        ]
        found += [x._get_sequence_number_for_group() for x in groups if x.size() > 1]
    destroy_parallel()
    return found


CHECKS: dict[str, Callable[[Bench], Any]] = {
    "collectives": check_collectives,
    "connected": check_connected,
    "layouts": partial(measure, layouts=LAYOUTS),
    "clipping": check_clipping,
    "router_bias": check_router_bias,
    "microbatches": check_microbatches,
    "bf16": check_bf16,
    "fp8_without_tokens": check_fp8_without_tokens,
    "reference": check_reference,
    "teacher": check_teacher,
    "skip": check_skip,
    "updates": check_updates,
    "selection": check_selection,
    "nothing": check_nothing,
}
MORE = {"more_layouts": partial(measure, layouts=MORE_LAYOUTS)}


def join(rank: int, world: int, folder: str) -> Bench:
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{folder}/store", world), rank=rank, world_size=world
    )
    return Bench(Path(folder))


def run_checks(bench: Any, checks: Mapping[str, Callable[[Any], Any]], results: str) -> None:
    """Every rank calls; rank 0 tells the time of each and writes what they found. Ends the process group."""
    found, is_first = {}, dist.get_rank() == 0
    for name, check in checks.items():
        start = perf_counter()
        found[name] = check(bench)
        if is_first:
            print(f"{name}: {perf_counter() - start:.1f} s", flush=True)
    if is_first:
        Path(results).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def work(rank: int, results: str, folder: str, checks: list[str]) -> None:
    run_checks(join(rank, WORLD, folder), {name: (CHECKS | MORE)[name] for name in checks}, results)


if __name__ == "__main__":
    with TemporaryDirectory() as scratch:
        mp.start_processes(
            work, (sys.argv[1], scratch, sys.argv[2:] or list(CHECKS)), WORLD, start_method="fork"
        )
