"""Computes the sizes of what a rank of the trainer, or of an engine, has in memory. No torch."""

import math
from collections import Counter, defaultdict
from dataclasses import dataclass, replace

from megarl.config.device_memory import KERNELS, OVERHEADS, Kernels
from megarl.config.precision import rollout_format
from megarl.config.schema import Config
from megarl.layout import Fleet, Layout
from megarl.models.engine import engine_table
from megarl.models.lora import adapter_table
from megarl.models.registry import megatron_table, padded_vocab
from megarl.models.shape import ModelShape
from megarl.models.shards import Rule, is_expert, parameters_of

ALIGNED = 64  # elements: Megatron-Core aligns the parameters of a buffer to this
BUFFER_MULTIPLE = 128  # elements: a buffer's size is a multiple of this, and of its data ranks
OPEN_LAYERS = 3  # layers that an engine rank writes at once, beside the embedding


@dataclass(frozen=True)
class Gpu:
    """A device to plan for. Without `has_overheads`, only tensors count."""

    name: str
    bytes: int
    kernels: Kernels = KERNELS
    has_overheads: bool = True

    def overhead(self, *names: str) -> int:
        """Returns the upper ends of OVERHEADS, in bytes."""
        return int(self.has_overheads * sum(OVERHEADS[name].high for name in names) * 1e9)


# bytes that torch sees: 79.1, 139.8 and 178.4 GiB
GPUS = {
    "h100": Gpu("h100", 84_900_000_000),
    "h200": Gpu("h200", 150_100_000_000),
    "b200": Gpu("b200", 191_500_000_000),
}


@dataclass(frozen=True)
class State:
    """Bytes of the training state on one rank."""

    weights: int
    gradients: int
    optimizer: int
    on_host: int = 0  # optimizer state of train.optimizer_cpu_offload

    def kept(self, config: Config) -> "State":
        """Returns what stays on the device while the engine samples."""
        return replace(self, **dict.fromkeys(config.train.offload, 0))


def training_state(config: Config, shape: ModelShape, layout: Layout) -> State:
    """Returns the sizes of the buffers of Megatron's DistributedDataParallel and optimizer, of
    the data rank with most optimizer state. Buckets of overlapped reductions may add padding."""
    train = config.train
    item = 4 if train.dtype == "fp32" else 2
    table = megatron_table(shape, spec="te", padded_vocab=padded_vocab(shape.vocab, layout.tp.size))
    fixed = 0  # bytes without gradients
    # (chunk, is expert, is a tied embedding) -> elements of each parameter of a buffer
    buffers = defaultdict(list)
    has_own_buffer = layout.ep.size > 1 or layout.etp.size != layout.tp.size
    tied = {rule.param for rule in (*table.tied, *table.embedding) if table.tied}
    trained = table
    if config.lora:
        trained = adapter_table(table, config.lora.targets, config.lora.rank)
        fixed = item * sum(n * copies for *_, n, copies in parameters_of(table, shape, layout))
    for chunk, rule, numel, copies in parameters_of(trained, shape, layout):
        if _hf_name(rule) in table.bits:  # a router's bias
            fixed += 4 * numel
            continue
        is_tied = layout.pp.size > 1 and rule.param in tied
        key = (chunk, has_own_buffer and is_expert(rule), is_tied)
        buffers[key] += [numel] * copies
    padded = 0
    share = 0
    for (_, is_experts, _), numels in buffers.items():
        ranks = layout.edp.size if is_experts else layout.dp.size * layout.cp.size
        aligned = sum(-(-numel // ALIGNED) * ALIGNED for numel in numels)
        multiple = math.lcm(ranks, BUFFER_MULTIPLE)
        size = -(-aligned // multiple) * multiple
        padded += size
        share += min(sum(numels), size // ranks)
    optimizer = share * (8 if train.dtype == "fp32" else 12)
    state = State(fixed + item * padded, 4 * padded, optimizer)
    if train.optimizer_cpu_offload:
        return replace(state, optimizer=0, on_host=optimizer)
    return state


def _hf_name(rule: Rule) -> str:
    return next(iter(rule.shapes()))


@dataclass(frozen=True)
class EngineSizes:
    """Bytes of the fullest rank of an engine."""

    weights: int
    kv_cache: int  # what the others leave of its share; negative: they do not fit
    graphs: int
    runtime: int  # NCCL
    profile: int  # activations of a batch, while it samples
    per_token: int  # of KV cache
    opened: int  # tensors that a sync writes at once

    def sampling(self) -> dict[str, int]:
        """Returns the components in a rollout."""
        return {
            "weights": self.weights,
            "kv_cache": max(0, self.kv_cache),
            "graphs": self.graphs,
            "staged": 0,
            "not_tensors": self.runtime + self.profile,
        }

    def writing(self, sleep_level: int) -> dict[str, int]:
        """Returns the components in a sync, without messages."""
        components = {**self.sampling(), "not_tensors": self.runtime}
        if sleep_level:
            components["kv_cache"] = 0
        return components

    def resident(self, sleep_level: int) -> int:
        """Returns the bytes that stay while the trainer trains."""
        return self.runtime if sleep_level else sum(self.writing(0).values())


def engine_sizes(
    config: Config, shape: ModelShape, fleet: Fleet, gpu: Gpu, used: int = 0
) -> EngineSizes:
    """Returns the sizes of an engine rank. `used`: bytes that a trainer keeps on the GPU."""
    rollout = config.rollout
    fmt = rollout_format(config, shape)
    table = engine_table(shape, fmt, tensor=fleet.tensor, expert=fleet.expert)
    usual = 32 if config.train.dtype == "fp32" else 16
    layout = fleet.engine_layout(fleet.first_receiver)
    ends = (*table.embedding, *table.head)
    sizes = Counter()
    for _, rule, numel, copies in parameters_of(table, shape, layout):
        sizes[rule in ends] += numel * copies * table.bits.get(_hf_name(rule), usual) // 8
    weights = sizes.total()
    width = 2 * shape.head_dim * max(1, shape.kv_heads // layout.tp.size)
    if shape.latent:
        width = shape.latent.kv_lora_rank + shape.latent.qk_rope_head_dim
    runtime = gpu.overhead("engine_nccl")
    graphs = 0 if rollout.enforce_eager else gpu.overhead("graphs")
    profile = gpu.overhead("profile")
    if fleet.is_split:
        runtime += gpu.overhead("context", "workspaces")
    left = int(rollout.gpu_memory_utilization * gpu.bytes) - used
    return EngineSizes(
        weights,
        left - weights - graphs - runtime - profile,
        graphs,
        runtime,
        profile,
        per_token=shape.layers * width * usual // 8,
        opened=OPEN_LAYERS * sizes[False] // shape.layers + sizes[True],
    )
