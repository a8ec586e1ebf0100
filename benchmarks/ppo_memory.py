"""Memory of PPO beside GRPO: tensors of a small model counted after a step, and large models by arithmetic.

    python -m benchmarks.ppo_memory [FILE]        default: benchmarks/results/ppo_memory.txt

PPO adds a second trained model. What training keeps doubles (weights, gradients, main weights and Adam's moments);
the reference is PPO's and GRPO's alike where KL has a coefficient, and activations (with other temporary tensors: the
largest sum at any time during a step) exist of one model at a time.
"""

from __future__ import annotations

import gc
import sys
import tempfile
from collections.abc import Iterable
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.checkpoint_memory import Live
from megarl.algorithms.objective import Objective
from megarl.commands.random_model import create_model
from megarl.config.load import load_config, parse_config
from megarl.config.schema import Config, Create
from megarl.layout import Layout, Parallel
from megarl.models.registry import hf_shapes, megatron_table, padded_vocab, read_model
from megarl.models.shape import ModelShape
from megarl.models.shards import slices_of
from megarl.trainer.actor_critic import ActorCritic
from megarl.trainer.heads import ValueHead
from megarl.trainer.learner import PolicyLearner
from megarl.trainer.trainer import Trainer

HERE = Path(__file__).resolve().parents[1]
SMALL = Create(layers=4, hidden=256, heads=8, kv_heads=4, head_dim=32, vocab=4096, tokenizer="none")
KL = {"kl": {"where": "reward", "coef": 0.01}}
KINDS = ("weights", "gradients", "optimizer", "reference", "activations")
# model, numbers of GPUs, parallelism
LARGE = (
    ("llama_3_1_405b", (64, 128, 256, 512), {"tensor": 8, "pipeline": 8}),
    ("qwen3_235b_a22b", (64, 128, 256, 512), {"tensor": 4, "pipeline": 8, "expert": 8}),
)
GPU_GB = 80.0


def storages(tensors: Iterable[torch.Tensor]) -> int:
    return sum(
        {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values()
    )


def tensors_of(trainer: Trainer) -> dict[str, int]:
    buffers = [
        buffer
        for chunk in trainer.model
        for buffer in chunk.buffers + chunk.expert_parallel_buffers
    ]
    parts = getattr(trainer.optimizer, "chained_optimizers", [trainer.optimizer])
    mains = [x for part in parts for group in part.optimizer.param_groups for x in group["params"]]
    states = [
        x for part in parts for state in part.optimizer.state.values() for x in state.values()
    ]
    weights = [buffer.param_data for buffer in buffers]
    return {
        "weights": storages(weights),
        "gradients": storages(buffer.grad_data for buffer in buffers),
        "optimizer": storages(
            [*mains, *(x for x in states if torch.is_tensor(x) and x.numel() > 1)]
        ),
    }


def config_of(algorithm: dict) -> Config:
    train = {"dtype": "bf16", "lr": 1e-3, "max_tokens_per_microbatch": 1024}
    return parse_config({"algorithm": algorithm, "train": train, "critic": {}})


def measure(algorithm: dict, folder: Path) -> dict[str, int]:
    """Bytes of one rank, after a step on 16 rows of up to 64 tokens."""
    sys.path.insert(0, str(HERE / "tests" / "dist"))
    from trainer_cases import random_batch

    config, path, device = config_of(algorithm), create_model(SMALL, folder), torch.device("cpu")
    shape, layout, objective = (
        read_model(path),
        Layout.of(Parallel(), 1, 0),
        Objective(config.algorithm),
    )
    actor = Trainer.build(shape, layout, train=config.train, folder=path, device=device)
    learner = PolicyLearner(actor, objective)
    trainers = [actor]
    if config.algorithm.needs_critic:
        values = Trainer.build(
            shape,
            layout,
            train=config.train,
            folder=path,
            device=device,
            head=ValueHead(),
            share_groups_with=actor,
        )
        learner, trainers = ActorCritic(learner, values, config.critic), [actor, values]
    batch = random_batch(num_rows=16, longest=64)

    def step() -> None:
        scored, _ = objective.advantages(batch, learner.score(batch), objective.initial_state())
        learner.update(scored)

    step()
    with Live() as live:
        step()
    found = [tensors_of(trainer) for trainer in trainers]
    result = {kind: sum(each[kind] for each in found) for kind in KINDS[:3]}
    reference = learner.actor.reference if isinstance(learner, ActorCritic) else learner.reference
    result["reference"] = 0 if reference is None else reference._host._bytes.nbytes
    result["activations"] = live.peak
    for trainer in reversed(trainers):
        trainer.close()
    gc.collect()
    return result


def measured() -> list[str]:
    columns: dict[str, dict[str, int]] = {}
    with tempfile.TemporaryDirectory() as folder:
        count = sum(map(prod, hf_shapes(read_model(create_model(SMALL, Path(folder)))).values()))
        for name, algorithm in {
            "GRPO": {"preset": "grpo"},
            "GRPO, KL": {"preset": "grpo", **KL},
            "PPO, KL": {"preset": "ppo"},
        }.items():
            columns[name] = measure(algorithm, Path(folder))
    lines = [
        f"Measured: a Qwen3 of {count / 1e6:.2f} million parameters, bf16, one process; MB of tensors in a step",
        "",
    ]
    lines.append(f"{'':<20}" + "".join(f"{name:>12}" for name in columns))
    for kind in KINDS:
        lines.append(
            f"  {kind:<18}" + "".join(f"{column[kind] / 1e6:>12.1f}" for column in columns.values())
        )
    total = {name: sum(column.values()) for name, column in columns.items()}
    lines.append(f"  {'sum':<18}" + "".join(f"{value / 1e6:>12.1f}" for value in total.values()))
    lines.append(
        f"  {'of GRPO':<18}"
        + "".join(f"{value / total['GRPO']:>11.2f}x" for value in total.values())
    )
    return lines


def fullest_rank(shape: ModelShape, sizes: Parallel, world: int) -> tuple[int, int]:
    """Parameters, dense and of experts, of the rank that has most of them; data parallelism changes neither."""
    table = megatron_table(shape, spec="te", padded_vocab=padded_vocab(shape.vocab, sizes.tensor))
    found = []
    for rank in range(world):
        counts = [0, 0]
        for part in slices_of(table, shape, Layout.of(sizes, world, rank)):
            counts[".experts." in part.param] += part.numel
        found.append(tuple(counts))
    return max(found, key=sum)


def arithmetic() -> list[str]:
    lines = [
        "By arithmetic, not measured: GB of the fullest GPU in a step. bf16 weights W, fp32 gradients G, O: Adam with",
        "fp32 main weights, sharded over data ranks; no activations, vLLM, CUDA contexts or NCCL, reference on host",
        "  policy     W + G + O           policy and critic   2 (W + G + O), a critic of the policy's size",
        "  offloaded  2 W + G + O: train.offload=[gradients, optimizer] keeps those of one model at a time on the GPU;",
        f"             `host` is what then lies in host memory, per GPU.   `*`: more than the {GPU_GB:.0f} GB of a GPU",
    ]
    for name, worlds, sizes in LARGE:
        config = load_config(HERE / "configs" / f"{name}.yaml", [])
        parallel = config.parallel.model_copy(update={"virtual_pipeline": 1, "context": 1, **sizes})
        config = config.model_copy(update={"parallel": parallel})
        shape = read_model(HERE / "configs" / "models" / name)
        count = sum(map(prod, hf_shapes(shape).values()))
        lines += [
            "",
            f"{name}, {count / 1e9:.1f}e9 parameters, {', '.join(f'{k} {v}' for k, v in sizes.items())}",
        ]
        columns = ("policy", "policy and critic", "offloaded")
        lines.append(f"  {'GPUs':>6}" + "".join(f"{column:>20}" for column in (*columns, "host")))
        fits: dict[str, int] = {}
        dense, experts = fullest_rank(shape, config.parallel.sizes, worlds[0])
        for world in worlds:
            layout = Layout.of(config.parallel.sizes, world, 0)
            weights = 2 * (dense + experts) / 1e9
            adam = 12 * (dense / layout.dp.size + experts / layout.edp.size) / 1e9
            one, host = (
                3 * weights + adam,
                weights + 2 * adam,
            )  # gradients take twice the bytes of weights
            needed = dict(zip(columns, (one, 2 * one, one + weights), strict=True))
            for column, size in needed.items():
                if size <= GPU_GB:
                    fits.setdefault(column, world)
            cells = [f"{size:>19.1f}{'*' if size > GPU_GB else ' '}" for size in needed.values()]
            lines.append(f"  {world:>6}{''.join(cells)}{host:>20.1f}")
        lines.append(
            "  first fits" + "".join(f"{fits.get(column, '-'):>15} GPUs" for column in columns)
        )
    return lines


def main(file: Path) -> None:
    torch.set_num_threads(1)
    lines: list[str] = []
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for part in (arithmetic, measured):
        lines = ["\n".join(part()), "", *lines]
        file.write_text("\n".join(lines))
    dist.destroy_process_group()
    print(file.read_text())


if __name__ == "__main__":
    main(
        Path(sys.argv[1])
        if len(sys.argv) > 1
        else HERE / "benchmarks" / "results" / "ppo_memory.txt"
    )
