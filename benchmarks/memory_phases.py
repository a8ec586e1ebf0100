"""Peak bytes of each phase on a device that a CPU stands for, here or against another checkout; and by arithmetic.

    python -m benchmarks.memory_phases [--against PATH] [--only TEXT]

Two ranks train a small model in bf16 with an engine's memory beside them. Every storage that an operator makes is
counted as long as it lives, unless it is a copy "to the host": the real trainer, phases, publisher, exchange and
checkpoints run; of the engine there is only memory, weights that are synced and a cache that fills its share. What is
counted are tensors, not what CUDA, NCCL or kernels take.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megarl.platform import device as platform

__all__ = ["DEVICE", "Device", "main", "memory_by_phase"]

HERE = Path(__file__).resolve().parents[1]
DEVICE = torch.device("cpu", 0)
UTILIZATION = 0.6
SIZES = {
    "layers": 2,
    "hidden": 256,
    "heads": 8,
    "kv_heads": 4,
    "vocab": 8192,
    "tied": False,
    "tokenizer": "none",
}
EXPERTS = {"family": "qwen3_moe", "experts": 4, "moe_intermediate": 256, "experts_per_token": 2}
MODELS = {  # its layout, and the size of the device in copies of the model
    "dense tp2": (SIZES, {"tensor": 2}, 7),
    "experts ep2": (SIZES | EXPERTS, {"expert": 2}, 9),
}
OFFLOAD = {
    "nothing offloaded": ((), 0),
    "gradients, optimizer; sleep 2": (("gradients", "optimizer"), 2),
}
PHASES = ("device", "startup", "rollout", "exchange", "train", "save", "sync", "staging")
SHIPPED = {  # config -> folder below configs/models
    "examples/math_8gpu/math_8gpu.yaml": "qwen3_8b",
    "configs/gpu/qwen3_30b_a3b_8gpu.yaml": "qwen3_30b_a3b",
    "configs/gpu/qwen3_235b_a22b_64gpu.yaml": "qwen3_235b_a22b",
}
QWEN3_30B = HERE / "configs" / "gpu" / "qwen3_30b_a3b_8gpu.yaml"


class Device(TorchDispatchMode):
    """Counts the storages that live on the device: all but those copied to, or made by `host_bytes` on, the host.

    Counts what copies move between them, too. With `is_meta`, tensors of both have sizes and no memory.
    """

    def __init__(self, *, is_meta: bool = False) -> None:
        super().__init__()
        self._live: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._peaks: list[int] = []  # of each open measurement
        self._host: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._is_host = False
        self.moved = {"to host": 0, "to device": 0}  # bytes of copies between the two
        self._is_meta = is_meta

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func is torch.ops.aten.copy_.default:
            into, source = args[:2]
            if self._on_host(into) != self._on_host(source):
                way = "to host" if self._on_host(into) else "to device"
                self.moved[way] += into.nbytes
        found = func(*args, **given)
        to_host = func is torch.ops.aten._to_copy.default and given.get("device") == torch.device(
            "cpu"
        )
        storages = [x.untyped_storage() for x in tree_leaves(found) if isinstance(x, Tensor)]
        if to_host:
            # views of it, too
            self._host |= {storage._cdata: weakref.ref(storage) for storage in storages}
        elif not self._is_host:
            for storage in storages:
                self._add(storage)
            if self._peaks:
                now = self.bytes()
                self._peaks = [max(peak, now) for peak in self._peaks]
        return found

    def _on_host(self, tensor: Tensor) -> bool:
        key = tensor.untyped_storage()._cdata
        return key in self._host and self._host[key]() is not None

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._host and self._host[key]() is not None:
            return
        if key not in self._live or self._live[key]() is None:
            self._live[key] = weakref.ref(storage)

    def bytes(self) -> int:
        """Storages may have been resized, so all are asked."""
        live = [(key, ref()) for key, ref in self._live.items()]
        self._live = {key: self._live[key] for key, storage in live if storage is not None}
        return sum(storage.nbytes() for _, storage in live if storage is not None)

    @contextmanager
    def peak(self, name: str, peaks: dict[str, int]) -> Iterator[None]:
        """Adds the peak of this block to `peaks`; the largest counts."""
        self._peaks.append(self.bytes())
        yield
        peaks[name] = max(peaks.get(name, 0), self._peaks.pop(), self.bytes())

    @contextmanager
    def with_host(self) -> Iterator[Device]:
        """Knows what `host_bytes` makes as the host's."""
        made = getattr(platform, "host_bytes", None)

        def host_bytes(size: int, device: torch.device) -> Tensor:
            assert made is not None
            self._is_host = True
            if self._is_meta:
                buffer = torch.empty(size, dtype=torch.uint8, device="meta")
            else:
                buffer = made(size, device)
            self._is_host = False
            storage = buffer.untyped_storage()
            self._host[storage._cdata] = weakref.ref(storage)
            return buffer

        users = [
            m for m in list(sys.modules.values()) if made and vars(m).get("host_bytes") is made
        ]
        for module in users:
            module.host_bytes = host_bytes  # type: ignore[attr-defined]
        try:
            with self:
                yield self
        finally:
            for module in users:
                module.host_bytes = made  # type: ignore[attr-defined]


class EngineMemory:
    """What of an engine lies on the device: the weights that it keeps, and a cache that fills its share."""

    bytes_asleep = 0
    turn: Any = staticmethod(nullcontext)  # TimedPhases sets it

    def __init__(self, table: Any, share: int, level: int) -> None:
        from benchmarks.sync import room_for
        from megarl.weights.sync.execute import MemoryReceiver

        self._level, self._room = level, lambda: room_for(table, torch.bfloat16)
        self._memory = self._room()
        self.receiver = MemoryReceiver(table, self._memory, torch.bfloat16)
        weights = sum(tensor.nbytes for tensor in self._memory.values())
        assert share > weights, f"{share} bytes are left for {weights} of weights"
        self._cache_bytes = share - weights
        self._cache: Tensor | None = torch.empty(self._cache_bytes, dtype=torch.uint8)

    def sleep(self) -> None:
        if self._level:
            self.receiver.abort()
            self._memory.clear()
            self._cache = None

    def free_cache(self) -> None:
        if self._level:
            self._cache = None

    def complete(self, prompts: Any, *, max_tokens: int) -> list[Tensor]:
        with self.turn():
            self.wake("kv_cache")
        return [torch.tensor([*prompt, *range(max_tokens)]) for prompt in prompts]

    def score(self, rows: Any) -> list[Tensor]:
        with self.turn():
            self.wake("kv_cache")
        return [torch.zeros(len(row) - 1) for row in rows]

    def wake(self, part: str) -> None:
        if part == "weights" and not self._memory:
            self._memory |= self._room()
        if part == "kv_cache" and self._cache is None:
            self._cache = torch.empty(self._cache_bytes, dtype=torch.uint8)


class _Prompts:
    def observe(self, groups: Any) -> None:
        pass

    def take(self, count: int) -> list[Any]:
        return []

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None: ...


class _Sampler:
    """Samples, and rewards of this version and of one before it."""

    def sample(self, requests: Any, *, version: int, **_unused: Any) -> list[Any]:
        from megarl.types import Sample

        # before, the oldest and the newest
        of_tokens = "Tensor" in str(Sample.__annotations__["versions"])
        versions: Any = (
            torch.full((512,), version, dtype=torch.int32) if of_tokens else (version, version)
        )
        return [
            Sample(
                prompt_id=request.prompt.prompt_id,
                index=request.index,
                tokens=torch.arange(512),
                trainable=torch.ones(512, dtype=torch.bool),
                rollout_logprobs=torch.zeros(512),
                versions=versions,
                finish="stop",
            )
            for request in requests
        ]

    version = 0

    def submit(self, requests: Any) -> None:
        self.waiting = requests

    def poll(self, timeout_s: float | None = None) -> list[Any]:
        requests, self.waiting = self.waiting, []
        return self.sample(requests, version=self.version)

    def running(self) -> int:
        return len(self.waiting)

    def start(self, prompts: Any) -> _Sampler:
        return self

    def add(self, samples: list[Any]) -> None: ...

    def results(self, samples: list[Any]) -> list[Any]:
        return samples

    def score(self, prompts: Any, samples: list[Any]) -> list[Any]:
        return samples


def measure(model: str, offload: str, folder: Path) -> dict[str, int]:
    """The peaks of this rank, with the megarl that is first on the path."""
    from megarl.checkpoint.state import Checkpoints
    from megarl.commands.random_model import create_model
    from megarl.config.schema import Create, Train
    from megarl.layout import Axis, Fleet, Layout, Parallel
    from megarl.models.engine import engine_table
    from megarl.models.registry import hf_shapes, padded_vocab, read_model
    from megarl.models.shards import slices_of
    from megarl.processes.exit_codes import CurrentPhase
    from megarl.rollout.exchange import Exchange
    from megarl.run.phases import TimedPhases
    from megarl.stages.sft import train_supervised
    from megarl.trainer.trainer import Trainer
    from megarl.types import ObjectiveState, Prompt, Request, TokenBatch
    from megarl.weights.plan.plan import plan_transfers
    from megarl.weights.sync.publish import Publisher, WeightFormat, WeightSender
    from megarl.weights.sync.transports.collective import Collective

    create, sizes, copies = MODELS[model]
    kinds, level = OFFLOAD[offload]
    rank, parallel = dist.get_rank(), Parallel(**sizes)
    path = create_model(Create(**create), folder / f"model{rank}")
    shape, train = (
        read_model(path),
        Train(dtype="bf16", lr=1e-3, max_tokens_per_microbatch=256, offload=kinds),
    )
    fleet = Fleet(parallel, 2, tensor=1, ranks_per_replica=1, replicas=2, is_split=False)
    table = slices_of(engine_table(shape), shape, fleet.engine_layout(rank))
    total = copies * 2 * sum(map(prod, hf_shapes(shape).values()))
    subtracts = hasattr(platform, "device_bytes")  # what the trainer keeps, from the engine's share
    peaks = {"device": total}
    device, layout = Device(), Layout.of(parallel, 2, rank)

    with device.with_host():
        with device.peak("startup", peaks):
            trainer = Trainer.build(shape, layout, train=train, folder=path, device=DEVICE)
            trainer.memory.offload_all()
            used = device.bytes() if subtracts else 0
            side = EngineMemory(table, int(UTILIZATION * total) - used, level)
            side.sleep()
        options: dict[str, Any] = {"spec": "local", "itemsize": 2, "round_bytes": 1 << 20}
        measured: Any = lambda name: device.peak(name, peaks)  # noqa: E731
        publisher = Publisher(
            plan_transfers(
                shape, fleet, padded_vocab=padded_vocab(shape.vocab, parallel.tensor), **options
            ),
            WeightSender(trainer.tensors.slices, trainer.parameters_by_name),
            side.receiver,
            Collective(),
            WeightFormat(hf_shapes(shape), torch.bfloat16),
            table=table,
        )
        if subtracts:
            publisher.span = measured
        else:
            stage = publisher._stage
            publisher._stage = lambda parameters: _within(measured("staging"), stage, parameters)  # type: ignore[method-assign]
        memory: Any = (
            [trainer] if "trainers" in TimedPhases.__dataclass_fields__ else trainer.memory
        )
        timer: Any = [measured, lambda values: None]
        if "telemetry" in TimedPhases.__dataclass_fields__:
            timer = [SimpleNamespace(span=measured, add=lambda values: None)]
        if "current" in TimedPhases.__dataclass_fields__:
            phases = TimedPhases(*timer, DEVICE, memory, side, CurrentPhase())
        else:
            phases = TimedPhases(*timer, DEVICE, memory, side)
        # before, the exchange went over the device
        on_device = "device" in Exchange.__dataclass_fields__
        sampler = _Sampler()
        exchange = Exchange(
            sampler, sampler, Axis(2, rank), Axis(1), *([DEVICE] if on_device else [])
        )
        requests = [Request(Prompt(number, (1,), ""), 0, 0, 1.0) for number in range(64)]
        state = ObjectiveState(kl_coef=0.0)
        saves = Checkpoints(
            folder / "run",
            trainer,
            _Prompts(),
            state,
            every=1,
            keep=1,
            last_step=9,
            asynchronous=False,
        )
        save = getattr(phases, "save", None)
        with phases.sync():
            publisher.publish(version=0)
        for step in range(2):
            sampler.version = step
            with phases.rollout():
                samples = _within(measured("exchange"), exchange, requests, step)
                assert len(samples) == len(requests)
                del samples
            batch = _batch(TokenBatch, step)
            with phases.train():
                trainer.forward(batch)
                train_supervised(trainer, batch)
                if save is None:
                    _within(measured("save"), saves.maybe_save, step + 1, state)
            with save() if save else nullcontext():
                if save:
                    saves.maybe_save(step + 1, state)
            with phases.sync():
                publisher.publish(version=step + 1)
    return peaks


def _within(context: Any, function: Any, *arguments: Any) -> Any:
    with context:
        return function(*arguments)


def _batch(kind: Any, step: int) -> Any:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(8000, (256,), generator=generator)
    mask = torch.ones(256, dtype=torch.bool)
    mask[127::128] = False
    return kind(
        tokens=tokens,
        labels=tokens.roll(-1),
        mask=mask,
        cu_seqlens=torch.arange(0, 257, 128, dtype=torch.int32),
        temperature=1.0,
    )


def run(tree: Path, model: str, offload: str) -> dict[str, int]:
    """The larger peak of two ranks with the megarl of `tree`."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-W",
                    "ignore",
                    __file__,
                    "--rank",
                    f"{rank}",
                    folder,
                    model,
                    offload,
                ],
                env=os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        said = [rank.communicate(timeout=500)[0] for rank in ranks]
    assert not any(rank.returncode for rank in ranks), said
    found = [json.loads(text.splitlines()[-1]) for text in said]
    return {name: max(peaks.get(name, 0) for peaks in found) for name in PHASES}


def _rank(rank: str, folder: str, model: str, offload: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=int(rank), world_size=2
    )
    peaks = measure(model, offload, Path(folder))
    print(json.dumps(peaks), flush=True)
    dist.barrier()
    os._exit(0)


def memory_by_phase(config: Any, shape: Any, world: int) -> dict[str, float]:
    """GB of the rank with most parameters. No activations, messages in flight, CUDA contexts or NCCL."""
    from megarl.config.launch import fleet_of
    from megarl.layout import Layout
    from megarl.models.registry import megatron_table, padded_vocab
    from megarl.models.shards import slices_of
    from megarl.weights.plan.memory_sizes import GPUS, engine_sizes

    train, sizes = config.train, config.parallel.sizes
    table = megatron_table(shape, spec="te", padded_vocab=padded_vocab(shape.vocab, sizes.tensor))
    # of each rank: parameters, and its share of them over data ranks
    found: list[tuple[int, float]] = []
    for rank in range(world):
        layout = Layout.of(sizes, world, rank)
        copies = {True: layout.edp.size, False: layout.dp.size * layout.cp.size}
        parts = [
            (part.numel, copies[".experts." in part.param])
            for part in slices_of(table, shape, layout)
        ]
        found.append(
            (sum(numel for numel, _ in parts), sum(numel / shared for numel, shared in parts))
        )
    (count, share), item = max(found), 4 if train.dtype == "fp32" else 2
    weights, gradients, main = item * count, 4 * count, 4 * share if item == 2 else 0.0
    adam = main + 8 * share
    resident = {"weights": weights, "gradients": gradients, "optimizer": adam}
    kept = {name: 0 if name in train.offload else part for name, part in resident.items()}
    figures = {
        "weights": weights,
        "gradients": gradients,
        "adam": adam,
        "main": main,
        "kept": sum(kept.values()),
        "kept_gradients": kept["gradients"],
        "vllm": engine_sizes(config, shape, fleet_of(config, world), GPUS["h100"]).weights,
        "gpu_share": config.rollout.gpu_memory_utilization,
    }
    return {name: size / 1e9 if name != "gpu_share" else size for name, size in figures.items()}


class MetaEngine:
    """The sizes of an engine: weights, and a cache that fills the rest of its share."""

    bytes_asleep = 0
    turn: Any = staticmethod(nullcontext)

    def __init__(self, weights: int, share: int) -> None:
        self.sizes = {"weights": weights, "kv_cache": share - weights}
        self.held: dict[str, Tensor] = {}

    def sleep(self) -> None:
        self.held.clear()

    def free_cache(self) -> None:
        self.held.pop("kv_cache", None)

    def wake(self, part: str) -> None:
        if part not in self.held:
            self.held[part] = _meta(self.sizes[part])


def _meta(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device="meta")


def meta_trainer(sizes: Mapping[str, int], offload: Any) -> Any:
    """The real trainer.offload.Memory of tensors with these sizes in bytes: weights, gradients, optimizer."""
    from megarl.trainer.offload import Memory

    buffer = SimpleNamespace(
        param_data=_meta(sizes["weights"]), grad_data=_meta(sizes["gradients"])
    )
    chunk = SimpleNamespace(buffers=[buffer], expert_parallel_buffers=[], parameters=list)
    memory = Memory([chunk], offload)
    main, *moments = (_meta(sizes["optimizer"] // 3) for _ in range(3))
    state = {main: dict(zip(("exp_avg", "exp_avg_sq"), moments, strict=True))}
    inner = SimpleNamespace(param_groups=[{"params": [main]}], state=state)
    optimizer: Any = SimpleNamespace(config=SimpleNamespace(bf16=True), optimizer=inner)
    memory.optimizer = optimizer
    return SimpleNamespace(memory=memory)


def count_step(file: Path, model: str, *, is_before: bool = False) -> dict[str, float]:
    """GB on the device at the peak of each phase, and moved, of a shipped config's fullest rank, on meta tensors.

    The real phases and offload run; of models there are only sizes, activations are those of
    config/device_memory.py, what a sync adds is that of `megarl plan`. `is_before`: the optimizer state moves in
    every update, and a probe's engine has its cache while the trainer's weights are on the device.
    """
    from megarl.config.device_memory import activation_bytes
    from megarl.config.load import load_config
    from megarl.models.registry import read_model
    from megarl.processes.exit_codes import CurrentPhase
    from megarl.run.phases import TimedPhases
    from megarl.weights.plan.from_config import plan_weights

    folder = HERE / "configs" / "models" / model
    config = load_config(file, [f"model.path={folder}"])
    shape = read_model(folder)
    m = memory_by_phase(config, shape, config.launch.processes)
    sizes = {name: int(1e9 * m[name]) for name in ("weights", "gradients")}
    sizes["optimizer"] = int(1e9 * m["adam"])
    activations = activation_bytes(config, shape)
    extra = plan_weights(config)[1]["peak_extra_bytes"]
    peaks: dict[str, int] = {}
    moved: dict[str, float] = {}
    device = Device(is_meta=True)

    @contextmanager
    def counted(name: str) -> Iterator[None]:
        start = dict(device.moved)
        with device.peak(name, peaks):
            yield
        for way, size in device.moved.items():
            moved[f"{name}, {way}"] = (size - start[way]) / 1e9

    with device.with_host():
        trainer = meta_trainer(sizes, config.train.offload)
        memory = trainer.memory
        memory.keeps_optimizer = not is_before
        memory.offload_all()
        engine = MetaEngine(int(1e9 * m["vllm"]), int(80e9 * m["gpu_share"]) - device.bytes())
        telemetry: Any = SimpleNamespace(span=counted, add=lambda metrics: None)
        side: Any = engine
        phases = TimedPhases(telemetry, DEVICE, [trainer], side, CurrentPhase())
        if is_before:
            engine.turn = nullcontext
        with phases.sync(), counted("first probe"):
            for _ in range(2):  # it completes prompts, then scores them
                with engine.turn():
                    engine.wake("kv_cache")
            _meta(activations)
        for _ in range(2):
            with counted("step"):
                with phases.rollout():
                    pass
                with phases.train():
                    for _ in range(config.train.updates_per_step):
                        with counted("update"):
                            memory.onload_gradients()
                            _meta(activations)
                            memory.onload_optimizer()
                with phases.save():
                    pass
                with phases.sync():
                    _meta(extra)
    return {name: size / 1e9 for name, size in peaks.items()} | moved


def arithmetic(
    gpu_gb: float = 80.0, libraries_gb: float = 4.0
) -> list[tuple[str, float, float, float]]:
    """Qwen3-30B-A3B on 8 x 80 GB: GB of the fullest rank in each phase, with the engine first, before, and now."""
    from megarl.config.load import load_config
    from megarl.models.registry import read_model

    config = load_config(QWEN3_30B, [])
    shape = read_model(HERE / "configs" / "models" / "qwen3_30b_a3b")
    m = memory_by_phase(config, shape, 8)
    engine = 0.6 * gpu_gb
    build, resumed = (
        m["weights"] + m["gradients"] + m["main"],
        m["weights"] + m["gradients"] + m["adam"],
    )
    build_now = max(
        2 * m["weights"] + m["gradients"], m["weights"] + m["kept_gradients"] + m["main"]
    )
    save = m["weights"] + m["kept_gradients"] + m["adam"]
    rows = [
        ("start-up: trainer built", build + engine, build, build_now),
        ("start-up: resumed", resumed + engine, resumed, save),
        ("start-up: engine started", build + engine, m["kept"] + engine, engine - libraries_gb),
        ("rollout", m["kept"] + engine, m["kept"] + engine, engine - libraries_gb),
        ("optimizer step", resumed, resumed, resumed),
        ("save, without its buffers", resumed, resumed, save),
        (
            "sync, with staging",
            m["kept"] + 2 * m["vllm"],
            m["kept"] + 2 * m["vllm"],
            m["kept"] + m["vllm"],
        ),
    ]
    return [(name, *(value + libraries_gb for value in values)) for name, *values in rows]  # type: ignore[misc]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory_phases", description=__doc__)
    parser.add_argument(
        "--against", metavar="PATH", type=Path, help="another checkout: the peaks before"
    )
    parser.add_argument(
        "--only", metavar="TEXT", default="", help="only the models and settings that contain TEXT"
    )
    parser.add_argument("--rank", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        _rank(*args.rank)
    columns = [("before", args.against)] if args.against else []
    columns.append(("now", HERE))
    print(
        "MB on the device at the peak of a phase, the larger of two ranks, bf16; a parent includes its parts\n"
    )
    for model in MODELS:
        for offload in OFFLOAD:
            if args.only in f"{model}, {offload}":
                found = [run(tree, model, offload) for _, tree in columns]
                print(
                    f"{model}, {offload}\n  {'':10}" + "".join(f"{name:>14}" for name, _ in columns)
                )
                for phase in PHASES:
                    print(
                        f"  {phase:10}" + "".join(f"{peaks[phase] / 1e6:14.1f}" for peaks in found),
                        flush=True,
                    )
    for file, model in SHIPPED.items():
        before, now = count_step(HERE / file, model, is_before=True), count_step(HERE / file, model)
        print(
            f"\n{file}, GB of the fullest rank, on meta tensors\n  {'':24}{'before':>10}{'now':>10}"
        )
        for name, size in now.items():
            if before[name] or size:
                print(f"  {name:24}{before[name]:10.1f}{size:10.1f}")
    print(
        "\nQwen3-30B-A3B, 8 x 80 GB, configs/gpu/qwen3_30b_a3b_8gpu.yaml with a share of 0.6 for the engine: GB of the"
    )
    print("fullest rank by arithmetic, with 4 GB for CUDA contexts and NCCL, without activations")
    print(f"  {'':26}{'engine first':>14}{'before':>10}{'now':>10}")
    for name, *values in arithmetic():
        print(f"  {name:26}{values[0]:14.1f}{values[1]:10.1f}{values[2]:10.1f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
