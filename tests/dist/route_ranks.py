"""One rank of a job in which engines choose experts that the trainer would not. Run by test_routes.py.

    python route_ranks.py FOLDER LAYOUT...       e.g. '{"pipeline": 2}'; the engines have one rank each

For a tenth of the (token, layer) pairs the engine's routers take the least likely experts, weights equal. Its log-probs
are the reference of each trainer's, with and without replay. Rank 0 writes FOLDER/found.json.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import process_time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from trainer_cases import save_model

from megarl.algorithms.objective import Objective, loss_weights, supervised_loss
from megarl.config.schema import Config
from megarl.data.collate import collate
from megarl.data.packing import plan_microbatches
from megarl.layout import Layout
from megarl.platform.device import pick_device
from megarl.platform.env import Env
from megarl.rewards.scorer import make_scorer
from megarl.rollout.vllm.engine import Engine
from megarl.run.context import RankContext
from megarl.run.data import make_exchange, make_rollouts
from megarl.run.sync import parity_checks, synced
from megarl.trainer.moe import BalancedRouter
from megarl.trainer.trainer import Trainer
from megarl.types import CheckFailed, Prompt, TrainBatch

MODEL = "qwen3_moe_32@4"  # four layers
RECOMPUTED = [
    {"recompute": "none"},
    {"recompute": "full"},
    {"recompute": "selective", "recompute_modules": ["moe"]},
]


class Prompts:
    """One that fills three blocks of the prefix cache, and short ones."""

    def __init__(self) -> None:
        self.kept: dict[str, float] = {}

    def observe(self, groups: Any) -> None:
        pass

    def take(self, count: int) -> list[Prompt]:
        lengths = [110, 5, 40, 9][:count]
        random = torch.Generator().manual_seed(0)
        return [
            Prompt(n, tuple(torch.randint(4, 67, (length,), generator=random).tolist()), "", "")
            for n, length in enumerate(lengths)
        ]


def config_of(folder: Path, world: int) -> Config:
    return Config.model_validate(
        {
            "model": {"path": str(folder / MODEL)},
            "task": {"name": "megarl.data.tasks:random_tokens", "options": {"vocab": 67}, "template": "plain"},
            "rollout": {
                "router_replay": "engine", "samples_per_prompt": 4, "max_tokens": 24, "max_prompt_tokens": 128,
                "cpu_kv_cache_gb": 0.05,
            },
            "train": {"dtype": "fp32", "lr": 0.0, "clip_grad": 0.0, "max_tokens_per_microbatch": 160},
            "launch": {"processes": world},
        }
    )  # fmt: skip


def plant(engine: Engine) -> None:
    """A tenth of the (token, layer) pairs, by a hash of the router's logits."""
    assert engine._capture is not None
    for router in engine._capture._routers:
        router._compute_routing = _rerouted(router._compute_routing)


def _rerouted(
    compute: Callable[..., tuple[Tensor, Tensor]],
) -> Callable[..., tuple[Tensor, Tensor]]:
    def routing(hidden: Tensor, logits: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        weights, ids = compute(hidden, logits, *args, **kwargs)
        worst = (-logits).topk(ids.shape[1]).indices
        is_planted = (logits.float().contiguous().view(torch.int32).sum(1) % 10 == 0)[:, None]
        others = logits.float().gather(1, worst).softmax(1)
        return torch.where(is_planted, others, weights), torch.where(
            is_planted, worst.to(ids.dtype), ids
        )

    return routing


def sampled(rank: RankContext, engine: Engine) -> tuple[TrainBatch, int]:
    """The batch, and how many tokens of prompts came from the prefix cache."""
    exchange = replace(make_exchange(rank, engine), rewards=make_scorer(()))
    rollout = replace(make_rollouts(rank, exchange), filter_zero_std=False).collect(
        Prompts(), 4, version=0
    )  # type: ignore[arg-type]
    samples = [sample for group in rollout.groups for sample in group.samples]
    for sample in samples:
        assert sample.choices is not None
        owner = sample.choices.owners[0]
        assert (sample.choices.experts is not None) == (owner == dist.get_rank()), (
            "wide data on its owner only"
        )
        if (experts := sample.choices.experts) is not None:
            is_known = (experts != experts[..., :1]).any(-1)
            assert (
                experts.dtype == torch.uint8
                and is_known[:, :-1].all()
                and not is_known[:, -1].any()
            )
    computed = sum(sample.prompt_tokens_computed for sample in samples)
    return collate(rollout.groups, temperature=1.0), sum(
        4 * len(p.tokens) for p in Prompts().take(4)
    ) - computed


def routers(trainer: Trainer) -> list[BalancedRouter]:
    return [
        module
        for chunk in trainer.model
        for module in chunk.modules()
        if isinstance(module, BalancedRouter)
    ]


def step(trainer: Trainer, batch: TrainBatch) -> tuple[Tensor, float, dict[str, float]]:
    """Log-probs of the update's own forward pass, the norm of the gradient, metrics."""
    plan = plan_microbatches(batch, trainer.layout, trainer.train)
    gradients = trainer.backward(batch, plan, supervised_loss, loss_weights(batch, plan))
    assert all(router.router_replay is None for router in routers(trainer)), "nothing is left"
    logprobs_T = trainer.gathered(gradients.outputs).logprobs_T
    assert logprobs_T is not None
    report = trainer.apply(gradients)
    return logprobs_T, report.grad_norm, dict(report.metrics)


def layout_found(rank: RankContext, parallel: dict[str, int], batch: TrainBatch) -> dict[str, Any]:
    def mean_diff(logprobs_T: Tensor) -> float:
        return float((logprobs_T - batch.rollout_logprobs)[batch.mask].abs().mean())

    sizes = Config.model_validate({"parallel": parallel}).parallel.sizes
    found: dict[str, Any] = {"grad_norms": [], "update": []}
    for recompute in RECOMPUTED:
        layout = Layout.of(sizes, rank.env.world_size, rank.env.rank)
        train = rank.config.train.model_copy(update=recompute)
        trainer = Trainer.build(
            rank.shape, layout, train=train, folder=rank.model_folder, device=rank.device
        )
        if recompute["recompute"] == "none":
            found["without"] = mean_diff(trainer.logprobs(replace(batch, choices=())))
            found["replayed"] = mean_diff(trainer.logprobs(batch))
            own = trainer.forward(batch, record=True)
            again = trainer.forward(replace(batch, choices=own.choices))
            found["recorded"] = float((again.logprobs_T - own.logprobs_T).abs().max())
            found["recorded differs"] = again.metrics
            found["micro-batches"] = len(trainer.microbatches(batch))
        logprobs_T, grad_norm, metrics = step(trainer, batch)
        found["update"].append(mean_diff(logprobs_T))
        found["grad_norms"].append(grad_norm)
        found |= {name: metrics[name] for name in ("routing/differs", "routing/missing")}
        trainer.close()
    return found


def changed_on_the_way(trainer: Trainer, batch: TrainBatch) -> str:
    """Flips one bit of the first message that rank 1 sends."""
    exchange = dist.all_to_all_single

    def flipped(received: Tensor, message: Tensor, *sizes: Any) -> Any:
        message[7] ^= 1
        dist.all_to_all_single = exchange
        return exchange(received, message, *sizes)

    if dist.get_rank() == 1:
        dist.all_to_all_single = flipped
    try:
        trainer.logprobs(batch)
        return ""
    except CheckFailed as refusal:
        return str(refusal)
    finally:
        dist.all_to_all_single = exchange
        assert all(router.router_replay is None for router in routers(trainer))


def verdict(rank: RankContext, trainer: Trainer, engine: Engine, batch: TrainBatch) -> str:
    """What the gate says of a run that does not replay."""
    plain, objective = replace(batch, choices=()), Objective(rank.config.algorithm, 24)
    scores = objective.advantages(
        plain, _scores(trainer.logprobs(plain)), objective.initial_state()
    )[0]
    try:
        parity_checks(rank, trainer, engine).parity(scores)
        return ""
    except CheckFailed as refusal:
        return str(refusal)


def _scores(old_T: Tensor) -> Any:
    from megarl.types import TokenScores

    return TokenScores(old_T, None)


def main(folder: Path, layouts: list[dict[str, int]]) -> None:
    dist.init_process_group("gloo")
    this, world = dist.get_rank(), dist.get_world_size()
    if this == 0:
        save_model(MODEL, folder)
    dist.barrier()
    config, env = config_of(folder, world), Env(this, world, this, world, job_id=f"routes{world}")
    rank = RankContext.of(config, env, pick_device(this))
    trainer, engine, parity, _ = synced(rank)
    found: dict[str, Any] = {
        "probe": [[excess.statistic, excess.limit] for excess in parity.probe()[1]]
    }
    plant(engine)
    engine.receiver._reset_cache()
    batch, cached = sampled(rank, engine)
    again, more = sampled(rank, engine)  # all of each prompt's whole blocks from the cache
    found["cached"] = [cached, more]
    found["planted probe"] = [[excess.statistic, excess.limit] for excess in parity.probe()[1]]
    found["changed"] = changed_on_the_way(trainer, again)
    found["verdict"] = verdict(rank, trainer, engine, batch)
    found["gate"] = parity.parity(_replayed(rank, trainer, again))
    trainer.close()
    found["layouts"] = {
        json.dumps(parallel): layout_found(rank, parallel, again) for parallel in layouts
    }
    seconds = [[_seconds(rank, engine, captures=captures) for captures in (0, 1)] for _ in range(6)]
    found["sampling's CPU seconds, without and with capture"] = [
        min(column) for column in zip(*seconds, strict=True)
    ]
    engine.close()
    if this == 0:
        (folder / "found.json").write_text(json.dumps(found, indent=1))
    dist.barrier()
    dist.destroy_process_group()


def _replayed(rank: RankContext, trainer: Trainer, batch: TrainBatch) -> Any:
    objective = Objective(rank.config.algorithm, 24)
    return objective.advantages(batch, _scores(trainer.logprobs(batch)), objective.initial_state())[
        0
    ]


def _seconds(rank: RankContext, engine: Engine, *, captures: int) -> float:
    """CPU time of a rollout of 16 samples."""
    capture, mode = engine._capture, "engine" if captures else "none"
    assert capture is not None
    engine._rollout = engine._rollout.model_copy(update={"router_replay": mode})
    for router in capture._routers:
        router.set_capture_fn(None)
    if captures:
        capture.start()
    exchange, began = replace(make_exchange(rank, engine), rewards=make_scorer(())), process_time()
    replace(make_rollouts(rank, exchange), filter_zero_std=False).collect(Prompts(), 4, version=0)  # type: ignore[arg-type]
    return process_time() - began


if __name__ == "__main__":
    main(Path(sys.argv[1]), [json.loads(text) for text in sys.argv[2:]])
