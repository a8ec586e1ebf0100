"""One job of gloo ranks that takes one update in many layouts; rank 0 writes how far each is from plain transformers.

python context_ranks.py RESULTS.json WORLD CHECK ...      (one launch for all that test_context.py asks of a world)
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from trainer_cases import Policy, load_model, oracle_logprobs, random_batch, save_model
from trainer_ranks import run_checks

from megarl.config.schema import Config
from megarl.data.packing import plan_microbatches
from megarl.layout import Layout, Parallel
from megarl.trainer import trainer as trainer_module
from megarl.trainer.trainer import Trainer
from megarl.types import MicrobatchPlan, ScoredBatch, TokenScores, TrainBatch

Sizes = dict[str, int]  # of parallel
DENSE: dict[int, list[Sizes]] = {
    1: [{}],
    2: [{}, {"context": 2}],
    4: [
        {},
        {"tensor": 2},
        {"pipeline": 2},
        {"pipeline": 2, "virtual_pipeline": 2},
        {"context": 2},
        {"context": 4},
        {"tensor": 2, "context": 2},
        {"pipeline": 2, "context": 2},
        {"pipeline": 2, "virtual_pipeline": 2, "context": 2},
    ],
    8: [{"tensor": 2, "pipeline": 2, "context": 2}],
}
SPARSE: dict[int, list[Sizes]] = {
    1: [{}],
    2: [{}, {"context": 2, "expert": 2}],
    4: [
        {},
        {"tensor": 2},
        {"context": 2},
        {"expert": 2},
        {"tensor": 2, "expert_tensor": 2},
        {"tensor": 2, "context": 2},
        {"tensor": 2, "expert": 4},
        {"context": 4, "expert": 4},
        {"pipeline": 2, "expert": 2},
        {"pipeline": 2, "virtual_pipeline": 2, "context": 2},
    ],
    8: [
        {"tensor": 2, "pipeline": 2, "expert": 2},
        {"tensor": 2, "context": 2, "expert": 4, "pipeline": 2},
    ],
}
# of four ranks: context with every other axis; the others are those of test_trainer.py and of the checks below
FEW_DENSE: list[Sizes] = [
    {},
    {"context": 4},
    {"tensor": 2, "context": 2},
    {"pipeline": 2, "virtual_pipeline": 2, "context": 2},
]
FEW_SPARSE: list[Sizes] = [
    {},
    {"tensor": 2, "context": 2},
    {"tensor": 2, "expert": 4},
    {"context": 4, "expert": 4},
    {"pipeline": 2, "virtual_pipeline": 2, "context": 2},
]
TRAIN = {
    "dtype": "fp32",
    "lr": 1e-2,
    "max_tokens_per_microbatch": 64,
    "clip_grad": 1.0,
    "logprob_chunk": 16,
}


def config_of(parallel: dict[str, int], **sections: Any) -> Config:
    train = TRAIN | sections.pop("train", {})
    return Config.model_validate({"parallel": parallel, "train": train, **sections})


class Bench:
    """Builds policies of the saved models, one after another."""

    def __init__(self, folder: Path, world: int) -> None:
        self.folder, self.world = folder, world
        self.last: Policy | None = None

    def fits(self, parallel: Sizes) -> bool:
        return self.world % Parallel(**parallel).dense == 0

    def path(self, model: str) -> Path:
        if dist.get_rank() == 0 and not (self.folder / model).exists():
            save_model(model, self.folder)
        dist.barrier()
        return self.folder / model

    def policy(self, model: str, config: Config) -> Policy:
        path = self.path(model)
        layout = Layout.of(config.parallel.sizes, self.world, dist.get_rank())
        if self.last is not None:
            self.last.trainer.close()
        self.last = Policy.build(config, path, layout)
        return self.last


def score(policy: Policy, batch: TrainBatch, logprobs: Tensor) -> ScoredBatch:
    """Old log-probs a little off those of the policy, so that ratios and clips act."""
    noise = torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(1)) * 0.15
    reference = logprobs if policy.learner.objective.algorithm.needs_reference else None
    return policy.score(batch, TokenScores(logprobs + noise * batch.mask, reference))


def whole_gradients(trainer: Trainer) -> dict[str, Tensor]:
    """HF name -> its gradient, on rank 0; where ranks hold copies they must agree."""
    for chunk in trainer.model:
        for buffer in chunk.buffers + chunk.expert_parallel_buffers:
            for bucket in buffer.buckets:  # reduced, but only this rank's part of it
                group = buffer.data_parallel_group
                parts = list(bucket.grad_data.chunk(group.size()))
                # into the bucket itself
                dist.all_gather(parts, parts[group.rank()].clone(), group=group)
    gradients = {}
    for number, chunk in enumerate(trainer.model):
        prefix = f"chunk{number}." if len(trainer.model) > 1 else ""
        gradients |= {prefix + name: p.main_grad for name, p in chunk.module.named_parameters()}
    mine = []
    for box in trainer.tensors.slices:
        if box.param in gradients:
            part = gradients[box.param]
            mine.append(
                (
                    box.name,
                    box.start,
                    part.as_strided(box.shape, box.strides, box.offset + part.storage_offset()),
                )
            )
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, [(name, start, part.clone()) for name, start, part in mine])
    return _assembled([item for rank in everywhere for item in rank])


def _assembled(parts: list[tuple[str, tuple[int, ...], Tensor]]) -> dict[str, Tensor]:
    ends: dict[str, list[int]] = {}
    for name, start, part in parts:
        end = [a + b for a, b in zip(start, part.shape, strict=True)]
        ends[name] = [max(pair) for pair in zip(end, ends.get(name, end), strict=True)]
    whole = {name: torch.full(end, torch.nan) for name, end in ends.items()}
    for name, start, part in parts:
        view = whole[name][tuple(slice(a, a + b) for a, b in zip(start, part.shape, strict=True))]
        if not view.isnan().any():
            assert torch.allclose(view, part, rtol=1e-4, atol=1e-6), (
                f"replicas of the gradient of {name} differ"
            )
        view.copy_(part)
    return whole


def update(policy: Policy, scored: ScoredBatch, plan: MicrobatchPlan) -> dict[str, Any]:
    """One update: what it reports, and its gradients before clipping."""
    kept: dict[str, Tensor] = {}
    trainer, objective = policy.trainer, policy.learner.objective
    before = router_biases(trainer)
    step = trainer_module.take_step

    def keeping(*args: Any, **kwargs: Any) -> Any:
        kept.update(whole_gradients(trainer))
        return step(*args, **kwargs)

    trainer_module.take_step = keeping
    try:
        report = trainer.step(scored, plan, objective.loss(scored), objective.weights(scored, plan))
    finally:
        trainer_module.take_step = step
    return {
        "loss": report.loss,
        "grad_norm": report.grad_norm,
        "metrics": report.metrics,
        "gradients": kept,
        "layers": sum(kind.has_experts for kind in trainer.shape.layer_kinds),
        "bias": (router_biases(trainer) - before).tolist(),
        "microbatches": len(plan.rows[0][0]),
    }


def router_biases(trainer: Trainer) -> Tensor:
    """Of this rank's layers, end to end."""
    found = [
        tensor
        for name, tensor in trainer.parameters_by_name().items()
        if name.endswith("expert_bias")
    ]
    return torch.cat([torch.zeros(0), *(bias.detach().clone() for bias in found)])


def compared(found: dict[str, Any], true: dict[str, Any]) -> dict[str, Any]:
    """Differences from `true`; of a gradient: the largest of an element over the largest of the tensor."""
    differ = found["gradients"].keys() ^ true["gradients"].keys()
    assert not differ, sorted(differ)
    worst = {
        name: float(
            (gradient - true["gradients"][name]).abs().max() / true["gradients"][name].abs().max()
        )
        for name, gradient in found["gradients"].items()
    }
    name = max(worst, key=lambda name: worst[name])
    return {
        "loss": [found["loss"], true["loss"]],
        "grad_norm": [found["grad_norm"], true["grad_norm"]],
        "gradient": [worst[name], name],
        "terms": [found["metrics"].get(f"moe/{name}") for name in ("aux_loss", "z_loss")],
        "true_terms": true.get("terms"),
        "layers": found["layers"],
        "bias": found["bias"],
        "microbatches": found["microbatches"],
    }


def oracle(model: torch.nn.Module, scored: ScoredBatch, config: Config) -> dict[str, Any]:
    """Plain transformers and autograd in one process: clipped policy loss, mean over tokens, and the routers' terms."""
    logits: list[tuple[torch.nn.Module, Tensor]] = []  # of each router, row after row
    for module in model.modules():
        if type(module).__name__.endswith(("TopKRouter", "TopkRouter")):
            module.register_forward_hook(
                lambda gate, x, _y: logits.append((gate, x[0].flatten(0, -2) @ gate.weight.T))
            )
    ratio = (oracle_logprobs(model, scored) - scored.old_logprobs).exp()
    clipped = ratio.clamp(1 - config.algorithm.clip_low, 1 + config.algorithm.clip_high)
    loss_T = torch.maximum(-scored.advantages * ratio, -scored.advantages * clipped)
    loss = loss_T[scored.mask].double().mean()
    terms = loss * 0
    spans = list(zip(scored.cu_seqlens[:-1].tolist(), scored.cu_seqlens[1:].tolist(), strict=True))
    for number, (_gate, logits_TE) in enumerate(logits):
        start, end = spans[number // (len(logits) // len(spans))]
        weight = scored.mask[start:end].sum() / scored.mask.sum()
        aux, z = router_losses(logits_TE, config)
        terms = terms + weight * (config.moe.aux_loss * aux + config.moe.z_loss * z)
    (loss + terms).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    norm = torch.stack([g.norm() for g in gradients.values()]).norm()
    gradients = {part: g for name, whole in gradients.items() for part, g in saved_as(name, whole)}
    return {
        "loss": float(loss),
        "grad_norm": float(norm),
        "gradients": gradients,
        "terms": float(terms),
    }


def saved_as(name: str, gradient: Tensor) -> list[tuple[str, Tensor]]:
    """transformers holds all experts in one tensor, and saves each by itself."""
    before, found, kind = name.partition(".experts.")
    if not found:
        return [(name, gradient)]
    names = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
    return [
        (f"{before}.experts.{number}.{part}.weight", piece)
        for number, expert in enumerate(gradient)
        for part, piece in zip(names, expert.chunk(len(names)), strict=True)
    ]


def router_losses(logits_TE: Tensor, config: Config) -> tuple[Tensor, Tensor]:
    """Balance and z of one row, written out for softmax routers that choose two experts."""
    scores_TE = logits_TE.softmax(-1)
    num_tokens, num_experts = logits_TE.shape
    aux = torch.zeros(())
    for expert in range(num_experts):
        chosen = sum(expert in best for best in scores_TE.topk(2).indices.tolist())
        aux = aux + num_experts / (2 * num_tokens) * chosen * scores_TE[:, expert].mean()
    return aux, logits_TE.exp().sum(-1).log().square().mean()


def check_layouts(
    bench: Bench,
    model: str,
    layouts: list[Sizes],
    batch: TrainBatch,
    *,
    plans: list[MicrobatchPlan] | None = None,  # None: megarl's own
    ask: bool = True,
    **sections: Any,
) -> list[dict[str, Any]]:
    """Every layout against plain transformers; unless those are asked, against the first layout."""
    found: list[dict[str, Any]] = []
    logprobs, true = bench.policy(model, config_of({})).logprobs(batch), {}
    for number, parallel in enumerate(layouts):
        config = config_of(parallel, **sections)
        policy = bench.policy(model, config)
        error = float((policy.logprobs(batch) - logprobs).abs().max())
        scored = score(policy, batch, logprobs)
        if ask and not true and dist.get_rank() == 0:
            true = oracle(load_model(bench.folder / model), scored, config)
        plan = (
            plans[number]
            if plans
            else plan_microbatches(scored, policy.trainer.layout, config.train)
        )
        one = update(policy, scored, plan)
        true = true or one
        if dist.get_rank() == 0:
            found.append({"parallel": parallel, "logprob_error": error, **compared(one, true)})
            print(json.dumps(found[-1]), flush=True)
    return found


MOE = {"aux_loss": 0.1, "z_loss": 0.02}


def check_dense(bench: Bench, layouts: list[Sizes] | None = None) -> list[dict[str, Any]]:
    return check_layouts(bench, "qwen3@4", layouts or DENSE[bench.world], random_batch(num_rows=8))


def check_sparse(bench: Bench, layouts: list[Sizes] | None = None) -> list[dict[str, Any]]:
    return check_layouts(
        bench, "qwen3_moe@4", layouts or SPARSE[bench.world], random_batch(num_rows=8), moe=MOE
    )


def check_plans(bench: Bench) -> list[dict[str, Any]]:
    """Rows dealt out at random, in 1 to 16 micro-batches a rank: whatever lies together, the same gradient."""
    layouts: list[Sizes] = [
        size for size in ({}, {"context": 2}, {"tensor": 2}, {"pipeline": 2}) if bench.fits(size)
    ]
    layouts = (6 * layouts)[:6]
    batch, draw = random_batch(num_rows=16, seed=5), Random(bench.world)
    plans = []
    for number, parallel in enumerate(layouts):
        data = bench.world // Parallel(**parallel).dense
        count = (1, 16)[number] if number < 2 else draw.randint(2, 15)
        dealt: list[list[list[int]]] = [[[] for _ in range(count)] for _ in range(data)]
        for row in draw.sample(range(16), 16):
            draw.choice(draw.choice(dealt)).append(row)
        rows = tuple(tuple(tuple(part) for part in rank) for rank in dealt)
        plans.append(MicrobatchPlan((rows,), 1.0))
    return check_layouts(bench, "qwen3_moe", layouts, batch, plans=plans, moe=MOE)


def check_idle(bench: Bench) -> list[dict[str, Any]]:
    """A data rank without rows; context ranks with no token to learn, as only the last chunk of each row has one."""
    batch = random_batch(num_rows=3, seed=3)
    is_last = torch.zeros_like(batch.mask).index_put(
        (batch.cu_seqlens[1:] - 2,), torch.tensor(True)
    )
    batch = replace(batch, mask=batch.mask & is_last)
    return check_layouts(
        bench, "qwen3_moe", [{}, {"context": 4}, {"tensor": 2, "context": 2}], batch, moe=MOE
    )


def check_families(bench: Bench) -> list[dict[str, Any]]:
    """LatentSizes attention, partial rotary embedding, shared experts and sigmoid routers, split along the rows."""
    layouts: list[Sizes] = [{}, {"context": 2, "expert": 2}]
    batch, moe = random_batch(num_rows=6, seed=2), MOE | {"bias_update_rate": 0.01}
    models = ("deepseek_v3", "glm4_moe")
    return [
        one
        for model in models
        for one in check_layouts(bench, model, layouts, batch, ask=False, moe=moe)
    ]


def check_objectives(bench: Bench) -> list[dict[str, Any]]:
    """Losses of whole sequences, a KL term and an entropy bonus need whole rows on every context rank."""
    objective = {
        "loss": "gspo",
        "aggregation": "seq-mean-token-mean",
        "entropy_coef": 0.05,
        "kl": {"estimator": "k3+", "where": "loss", "coef": 0.2},
    }
    layouts: list[Sizes] = [{}, {"context": 4}, {"tensor": 2, "context": 2}]
    return check_layouts(
        bench, "qwen3", layouts, random_batch(num_rows=8), ask=False, algorithm=objective
    )


def check_dispatcher(bench: Bench) -> list[dict[str, Any]]:
    """Megatron's other dispatcher."""
    layouts: list[Sizes] = [
        {"expert": 2},
        {"tensor": 2, "expert_tensor": 2},
        {"context": 2, "expert": 4},
        {"pipeline": 2},
    ]
    moe = MOE | {"dispatcher": "allgather"}
    return check_layouts(bench, "qwen3_moe", layouts, random_batch(num_rows=8), moe=moe)


def check_recompute(bench: Bench) -> list[dict[str, Any]]:
    """Routers run again in the backward pass, when the pipeline has gone on to other micro-batches."""
    found = []
    for how in ({"recompute": "full"}, {"recompute": "selective", "recompute_modules": ("moe",)}):
        train = how | {"max_tokens_per_microbatch": 30}
        layouts: list[Sizes] = [{"pipeline": 2, "context": 2}]
        found += check_layouts(
            bench, "qwen3_moe", layouts, random_batch(num_rows=8), train=train, moe=MOE
        )
    return found


CHECKS: dict[str, Callable[[Bench], Any]] = {
    "few_dense": partial(check_dense, layouts=FEW_DENSE),
    "few_sparse": partial(check_sparse, layouts=FEW_SPARSE),
    "dense": check_dense,
    "sparse": check_sparse,
    "plans": check_plans,
    "idle": check_idle,
    "families": check_families,
    "objectives": check_objectives,
    "dispatcher": check_dispatcher,
    "recompute": check_recompute,
}


def work(rank: int, results: str, folder: str, world: int, checks: list[str]) -> None:
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    bench = Bench(Path(folder), world)
    run_checks(bench, {name: CHECKS[name] for name in checks}, results)


if __name__ == "__main__":
    with TemporaryDirectory() as scratch:
        arguments = (sys.argv[1], scratch, int(sys.argv[2]), sys.argv[3:])
        # imports are slow, and done
        mp.start_processes(work, arguments, int(sys.argv[2]), start_method="fork")
