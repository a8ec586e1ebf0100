"""The side "sync" of `benchmarks.gpu_contract`: weight syncs into vLLM's CUDA models, on CPU tensors.

    random weights --megarl's plan, encoder, Publisher, LayerReceiver--> live model --+
                                                                     equal bytes, nothing moved
    the same weights --vLLM's load_weights--> fresh model ----------------------------+

vLLM believes in a GPU: its arguments, model code, loaders, choice of kernels and `process_weights_after_loading` are
the real ones. One rank of a replica is a model of vLLM, the other ranks hold plain memory, and all run as threads.
Before the third sync, everything that a sleep at level 2 discards is overwritten. No kernel of a forward pass runs.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

from benchmarks import gpu_stubs
from benchmarks.gpu_contract_plants import PLANTS, Plant
from benchmarks.gpu_tensors import (
    Tensors,
    addresses_of,
    differences,
    discard,
    kernels_of,
    moved,
    tensors_of,
)
from benchmarks.threaded import Threaded, on_all_ranks, world_of
from megarl.config.random_model import hf_config
from megarl.config.schema import Create, Rollout
from megarl.layout import Fleet, Parallel
from megarl.models.engine import engine_format, engine_table, linear_shapes, with_scales
from megarl.models.formats import FORMATS, BlockFormat
from megarl.models.lora import CONFIG, WEIGHTS, AdapterFormat, adapter_table, peft_config
from megarl.models.registry import fp32_tensors, hf_shapes, megatron_table, padded_vocab, read_model
from megarl.models.shape import Shape
from megarl.models.shards import shapes_of, slices_of, whole_tensor
from megarl.weights.encode.blocks import BlockEncoder
from megarl.weights.encode.quantize import dequantize, from_fp8, quantize
from megarl.weights.plan.plan import plan_transfers
from megarl.weights.sync.execute import MemoryReceiver, slice_checksum
from megarl.weights.sync.publish import Publisher, WeightFormat, WeightSender, plan_slices

DTYPE = torch.bfloat16
FP32 = torch.float32
FP8_SCALE = FORMATS["fp8_block"].scale
SIZES = {
    "layers": 2, "hidden": 256, "heads": 4, "kv_heads": 2, "head_dim": 128, "intermediate": 512, "vocab": 515,
    "tied": False,
}  # fmt: skip
MOE = {"experts": 4, "experts_per_token": 2, "moe_intermediate": 512}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"hidden": 512},  # vLLM's has no head_dim
    "qwen3": {},
    "qwen3_tied": {"family": "qwen3", "tied": True},
    "mixtral": MOE,
    "qwen3_moe": MOE,
    "glm4_moe": MOE,
    "deepseek_v3": MOE | {"heads": 8},
    "gpt_oss": MOE | {"head_dim": 64, "heads": 8, "kv_heads": 4},
}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ADAPTED = {
    "llama": ["all-linear"],
    "qwen3": ["all-linear"],
    "qwen3_tied": ["all-linear"],
    "qwen3_moe": ATTENTION,
    "glm4_moe": ATTENTION,
}
CASES = [
    *(f"{family}:bf16" for family in FAMILIES),
    *(f"{family}:fp8" for family in FAMILIES if family != "gpt_oss"),
    "gpt_oss:mxfp4",
    *(f"{family}:adapters" for family in ADAPTED),
]
# tensor and data ranks of a replica, and the rank that is compared; more than one data rank only with experts
LAYOUTS = {
    "h100": (
        (1, 1, 0),
        (2, 1, 0),
        (2, 1, 1),
        (4, 1, 0),
        (4, 1, 3),
        (2, 2, 0),
        (2, 2, 2),
        (2, 2, 3),
    ),
    "h200": ((1, 1, 0), (4, 1, 3)),  # of the same compute capability
    "b200": ((1, 1, 0), (2, 1, 1), (4, 1, 3), (2, 2, 2)),
}
SEEDS = (1, 2, 1)  # of the weights of each sync
RANK, ALPHA = 8, 16  # of the adapters
MOST = 6  # tensors of a rank that are named
NOT_COVERED = """
What is not covered, and why
  forward passes, log-probs     no kernel runs without a GPU: kernels that read other tensors than those, or read them wrongly
  DeepGEMM's layout of scales   compiled for CUDA: the stand-in keeps the values and makes a new tensor, columns first; with
                                compute capability 10 the real one packs exponents
  the product in W_UK, W_UV     of an FP8 layer with latent attention vLLM multiplies the unit matrix by the kernel's weight:
                                compiled for CUDA, the stand-in multiplies in bf16
  experts in FP8 of gpt_oss     refused by megarl (models/engine.py)
  experts in MXFP4 of gpt_oss   the engine keeps them in bf16 (rollout/vllm/arguments.py); the folder says mxfp4, and the
                                weights are values of that format
  kimi_k2                       the code of deepseek_v3
  adapters of experts, of MLA   merged before the sync; other families than those above share vLLM's layers with them
  adapters, experts             with tensor parallelism only: engines with data ranks adapt the same layers
  sleep and CUDA graphs         what level 2 discards is overwritten, and addresses are compared; no memory is unmapped, and
                                no graph is captured
  other ranks of a replica      hold plain memory by the engine's table, of which placement is checked
"""


@dataclass
class Model:
    """A case's config.json in a folder, and what a sync of it moves."""

    folder: Path
    format_name: str
    tensor: int
    data: int = 1  # with more than one, the experts are distributed over all ranks

    def __post_init__(self) -> None:
        self.shape = read_model(self.folder)
        self.weights = WeightFormat(hf_shapes(self.shape), DTYPE, fp32_tensors(self.shape))
        self.fmt: BlockFormat | None = None
        self.adapters: AdapterFormat | None = None
        if self.format_name == "fp8":
            self.fmt = engine_format("fp8", self.shape, self.tensor, self.expert)
            self.weights = self.weights.in_blocks(self.fmt, linear_shapes(self.shape))
        if self.format_name == "adapters":
            table = self.adapter_table()
            self.adapters = AdapterFormat(shapes_of(table, self.shape), RANK, ALPHA)

    @property
    def ranks(self) -> int:
        return self.tensor * self.data

    @property
    def expert(self) -> int:
        return self.ranks if self.data > 1 else 1

    def adapter_table(self) -> Any:
        family = self.folder.name.rpartition(".")[0]
        return adapter_table(megatron_table(self.shape), ADAPTED[family], RANK)

    def random(self, seed: int) -> Tensors:
        """The trainer's tensors, by their HF names."""
        from holder import random_weights

        shapes = hf_shapes(self.shape)
        tensors = random_weights(shapes, self.weights.fp32, DTYPE, seed)
        for name, tensor in tensors.items():
            if self.format_name == "mxfp4" and tensor.dim() == 3:
                tensors[name] = rounded(tensor, FORMATS["mxfp4"])
        return tensors

    def random_adapters(self, seed: int) -> Tensors:
        generator = torch.Generator().manual_seed(seed)
        assert self.adapters
        return {
            name: (0.12 * torch.randn(size, generator=generator)).to(DTYPE)
            for name, size in self.adapters.shapes.items()
        }

    def stored(self, weights: Tensors) -> Tensors:
        """The same tensors as a checkpoint in the engine's format has them."""
        if self.fmt is None:
            return weights
        found = dict(weights)
        for name in linear_shapes(self.shape):
            parts = quantize(found.pop(name), self.fmt)
            found |= {name + suffix: value for suffix, value in parts.items()}
        return found


def rounded(tensor: Tensor, fmt: BlockFormat) -> Tensor:
    values = tensor.mT.contiguous()
    return dequantize(quantize(tensor, fmt), fmt, values.shape, tensor.dtype).mT.contiguous()


def model_folder(case: str, home: Path) -> Path:
    """Writes the config.json of a case, FAMILY:FORMAT."""
    family, _, format_name = case.partition(":")
    create = Create.model_validate({"family": family} | SIZES | FAMILIES[family])
    config = hf_config(create) | {"dtype": "bfloat16"}
    if format_name == "mxfp4":  # as gpt-oss is published
        config["quantization_config"] = {"quant_method": "mxfp4"}
    folder = home / f"{family}.{format_name}"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def vllm_config(model: Model) -> Any:
    """vLLM's config from the arguments that megarl's engine passes."""
    from vllm.engine.arg_utils import EngineArgs

    from megarl.rollout.vllm.adapters import engine_options
    from megarl.rollout.vllm.arguments import engine_settings

    # of the data ranks, `pose_as` says which one this is
    rollout = Rollout(tensor=model.tensor, expert=model.expert, max_model_len=1024)
    settings = engine_settings(model.folder, rollout, DTYPE, model.fmt, trust_remote_code=False)
    if model.adapters:
        settings |= engine_options(model.adapters)
    launcher = {"distributed_executor_backend": "external_launcher"}
    config = EngineArgs(str(model.folder), **launcher, **settings).create_engine_config()
    config.device_config.device = torch.device("cpu")
    return config


def build(model: Model, rank: int, checkpoint: Tensors | None = None) -> tuple[nn.Module, Any]:
    """vLLM's model of a rank with dummy weights, or with those of `checkpoint`; and its manager of adapters."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    config = vllm_config(model)
    with set_current_vllm_config(config), gpu_stubs.On("cpu"):
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            parallel_state.init_distributed_environment(1, 0, "env://", 0, "gloo")
        parallel_state.destroy_model_parallel()  # the one before may have had no experts
        parallel_state.initialize_model_parallel(1, 1)
        gpu_stubs.pose_as(config, rank, model.tensor, model.data)
        loader = DummyModelLoader(config.load_config)
        if checkpoint is not None:
            loader.load_weights = lambda built, _: built.load_weights(iter(checkpoint.items()))  # type: ignore[method-assign]
        built: Any = loader.load_model(config, config.model_config)
        manager = None
        if model.adapters:
            cpu = torch.device("cpu")
            manager = LRUCacheWorkerLoRAManager(config, cpu, built.embedding_modules)
            built = manager.create_lora_manager(built, config)
    return built, manager


@dataclass
class OtherRank(MemoryReceiver):
    """A rank of the engine without a model: memory by the engine's table."""

    shapes: Mapping[str, Shape] = field(default_factory=dict)  # of the HF tensors that move

    def positional_checksums(self) -> Tensor:
        sums = [
            slice_checksum(part, self.memory, self.shapes[part.name], self.dtype)
            for part in self.slices
        ]
        return torch.stack(sums)


class Replica:
    """An engine of several ranks, of which one is a model of vLLM, and the trainer that sends to it."""

    def __init__(self, model: Model, rank: int) -> None:
        from megarl.rollout.vllm.adapters import AdapterReceiver, unwrapped
        from megarl.rollout.vllm.weight_loader import LayerReceiver

        self._model = model
        self._rank = rank
        self.built, _ = build(model, rank)
        with unwrapped(self.built), torch.device("cpu"):
            self.receiver: Any = LayerReceiver(self.built, model.weights, lambda: None)
        self._held: Tensors = {}  # the parameters of the trainer
        self._adapters: Tensors = {}
        self._world = world_of(model.ranks)
        ranks = range(model.ranks)
        receivers = [self.receiver if r == rank else self._memory(r) for r in ranks]
        self.publishers = on_all_ranks(self._world, partial(self._publisher, receivers))
        if model.adapters:
            self.receiver = AdapterReceiver(self.built, self.receiver, model.adapters, lambda: None)
            receivers = [self.receiver if r == rank else self._whole() for r in ranks]
            bases = self.publishers
            make = partial(self._adapter_publisher, receivers)
            self.publishers = on_all_ranks(self._world, make)
            for publisher, base in zip(self.publishers, bases, strict=True):
                publisher.base = base

    def _table(self, rank: int) -> list[Any]:
        layout = self._fleet().engine_layout(rank)
        model = self._model
        table = engine_table(model.shape, model.fmt, tensor=model.tensor, expert=model.expert)
        return slices_of(table, model.shape, layout)

    def _fleet(self) -> Fleet:
        model = self._model
        return Fleet(
            Parallel(),
            model.ranks,
            tensor=model.tensor,
            ranks_per_replica=model.ranks,
            replicas=1,
            expert=model.expert,
            is_split=False,
        )

    def _memory(self, rank: int) -> MemoryReceiver:
        weights = self._model.weights
        slices = weights.moved_slices(self._table(rank))
        sizes: dict[str, int] = {}
        for part in slices:
            last = sum((n - 1) * step for n, step in zip(part.shape, part.strides, strict=True))
            sizes[part.param] = max(sizes.get(part.param, 0), part.offset + last + 1)
        memory = {name: torch.zeros(size, dtype=weights.unit) for name, size in sizes.items()}
        return OtherRank(slices, memory, weights.unit, shapes=weights.moved_shapes())

    def _whole(self) -> MemoryReceiver:
        return MemoryReceiver(
            self.receiver.slices,
            {name: torch.zeros_like(tensor) for name, tensor in self.receiver.memory.items()},
            DTYPE,
        )

    def _publisher(self, receivers: Sequence[Any], transport: Threaded) -> Publisher:
        model = self._model
        shape = model.shape
        vocab = padded_vocab(shape.vocab, 1)
        table = megatron_table(shape, spec="te", padded_vocab=vocab)
        if model.fmt:
            table = with_scales(table, model.fmt, is_whole=True)
        slices = slices_of(table, shape, self._fleet().trainer_layout(transport.rank))
        self._plain = [part for part in slices if part.name in hf_shapes(shape)]
        sender = WeightSender(slices, lambda: self._held)
        if model.fmt:
            encoder = BlockEncoder(slices, model.fmt, lambda values, is_expert: None)
            sender = encoder.sender(lambda: self._held)
        plan = plan_transfers(
            shape, self._fleet(), padded_vocab=vocab, itemsize=2, round_bytes=1 << 20, fmt=model.fmt
        )
        table = self._table(transport.rank)
        receiver = receivers[transport.rank]
        return Publisher(plan, sender, receiver, transport, model.weights, table=table)

    def _adapter_publisher(self, receivers: Sequence[Any], transport: Threaded) -> Publisher:
        assert self._model.adapters
        weights = WeightFormat(self._model.adapters.shapes, DTYPE)
        slices = [whole_tensor(name, shape) for name, shape in weights.shapes.items()]
        sender = WeightSender(slices, lambda: self._adapters)
        plan = plan_slices(
            weights,
            [slices] * self._model.ranks,
            [receiver.slices for receiver in receivers],
            ranks_per_replica=1,
            round_bytes=1 << 20,
        )
        return Publisher(plan, sender, receivers[transport.rank], transport, weights)

    def publish(self, version: int, weights: Tensors, adapters: Tensors) -> None:
        from holder import holder

        self._held.update(holder(self._plain, weights))
        self._adapters.update(adapters)
        on_all_ranks(
            self._world,
            lambda transport: self.publishers[transport.rank].publish(version=version),
        )

    def requantised(self, stored: Tensors) -> dict[str, str]:
        """FP8 weights of which the kernels have other values than were sent, in whatever order.

        A block whose values all fit half its scale may have twice the bytes and half the scale.
        """
        fmt = self._model.fmt
        sent: dict[str, list[Tensor]] = {}
        for part in self._table(self._rank) if fmt else ():
            if part.name + FP8_SCALE in stored:
                whole = from_fp8(stored[part.name], stored[part.name + FP8_SCALE], fmt.block, FP32)
                ends = map(sum, zip(part.start, part.shape, strict=True))
                rows, columns = map(slice, part.start, ends)
                sent.setdefault(part.param, []).append(whole[rows, columns].flatten())
        found = {}
        for name, parts in sent.items():
            scale = self.built.get_parameter(name + FP8_SCALE)
            kept = from_fp8(self.built.get_parameter(name), scale, fmt.block, FP32).flatten()
            expected = torch.cat(parts)
            kept, expected = kept[kept != 0].sort()[0], expected[expected != 0].sort()[0]
            if not kept.equal(expected):
                found[name] = "quantised again: its kernel has other values than were sent"
        return found


def fresh_tensors(model: Model, rank: int, weights: Tensors, adapters: Tensors) -> Tensors:
    """The tensors of a model that vLLM loads."""
    from vllm.lora.request import LoRARequest

    built, manager = build(model, rank, model.stored(weights))
    if manager is not None:
        folder = model.folder / "adapter"
        folder.mkdir(exist_ok=True)
        config = peft_config("base", model.adapter_table(), rank=RANK, alpha=ALPHA, dropout=0.0)
        (folder / CONFIG).write_text(json.dumps(config))
        save_file(adapters, folder / WEIGHTS)
        manager.add_adapter(LoRARequest("policy", 1, str(folder)))
    return tensors_of(built, "cpu")


def problems_of(
    model: Model, rank: int, plant: Plant | None = None
) -> tuple[Replica, dict[str, str]]:
    """{path: what is wrong} after the syncs of SEEDS into one rank of an engine."""
    replica = Replica(model, rank)
    if plant:
        plant.before(replica.built)
    before = addresses_of(tensors_of(replica.built, "cpu"))
    fresh: dict[int, Tensors] = {}
    problems: dict[str, str] = {}
    for version, seed in enumerate(SEEDS):
        weights = model.random(seed)
        adapters = model.random_adapters(seed) if model.adapters else {}
        base = model.random(SEEDS[0]) if model.adapters else weights
        if version == 2 and not model.adapters:
            replica.receiver.abort()
            discard(replica.built, "cpu")
        replica.publish(version, base, adapters)
        if plant:
            plant.after(replica.built)
        live = tensors_of(replica.built, "cpu")
        if seed not in fresh:
            fresh[seed] = fresh_tensors(model, rank, base, adapters)
        found = dict.fromkeys(moved(before, addresses_of(live)), "has moved")
        found |= differences(live, fresh[seed])
        found |= replica.requantised(model.stored(base))
        for path, text in found.items():
            problems.setdefault(path, f"{text} (sync {version + 1})")
    return replica, problems


def check_sync(device: str, case: str, folder: Path) -> Iterator[tuple[str, str | None]]:
    """Yields what the engine of a case has, and the tensors that differ from a fresh load or have moved."""
    kernels: set[str] = set()
    wrong: list[str] = []
    counts = set()
    family, _, format_name = case.partition(":")
    layouts = [
        (tensor, data, rank)
        for tensor, data, rank in LAYOUTS[device]
        if data == 1 or ("experts" in FAMILIES[family] and format_name != "adapters")
    ]
    names = [
        f"tp{tensor}" + (f"dp{data}ep{tensor * data}" if data > 1 else "") + f"r{rank}"
        for tensor, data, rank in layouts
    ]
    for (tensor, data, rank), where in zip(layouts, names, strict=True):
        replica, problems = problems_of(Model(folder, format_name, tensor, data), rank)
        kernels.update(kernels_of(replica.built))
        counts.add(len(tensors_of(replica.built, "cpu")))
        texts = [f"{path}: {text}" for path, text in problems.items()]
        if len(texts) > MOST:
            texts[MOST:] = [f"and {len(texts) - MOST} more"]
        wrong += [f"\n  {where}: {text}" for text in texts]
    text = f"{' '.join(names)}, {max(counts)} tensors, {', '.join(sorted(kernels))}"
    yield text, "".join(wrong) or None


def find_planted(name: str, folder_of: Callable[[str], Path]) -> Iterator[tuple[str, str | None]]:
    """Yields what the comparison says of a planted mistake; a problem if it does not name its tensor."""
    plant = PLANTS[name]
    with plant.patches():
        _, problems = problems_of(
            Model(folder_of(plant.case), plant.case.partition(":")[2], 1), 0, plant
        )
    found = [
        f"{path}: {text}"
        for path, text in problems.items()
        if path.endswith(plant.path) and plant.says in text
    ]
    if found:
        yield f"{found[0]}, one of {len(problems)} tensors", None
    else:
        yield f"{plant.path} {plant.says}", f"not found among {problems}"


def prepare(gpu: gpu_stubs.Gpu) -> None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "dist"))
    gpu_stubs.pretend_gpu(gpu, 0)
    gpu_stubs.fake_vllm_platform(gpu)
    gpu_stubs.stub_memory()
    gpu_stubs.stub_fp8_kernels()
    torch.compiler.set_stance("force_eager")
    torch.set_num_threads(1)
    gc.freeze()  # vLLM's loader collects garbage twice a model
