"""Arithmetic of a GPU's memory: what is there beside tensors, and a config's activations.

The figures of OVERHEADS are ranges from the libraries' sources and from reports of others, in GB
(1e9 bytes) per rank; those of KERNELS follow from which tensors Transformer Engine saves. No run of
megarl has measured them yet. `megarl plan` adds them up (megarl/weights/plan/memory.py).
"""

from dataclasses import dataclass
from itertools import chain

from megarl.config.launch import fleet_of
from megarl.config.schema import Config
from megarl.layout import Layout, stage_layers
from megarl.models.shape import LayerKind, ModelShape

FRAGMENTATION = 0.03  # share of the memory that torch's allocator holds without using it; a guess


@dataclass(frozen=True)
class Overhead:
    """Device memory that no tensor accounts for."""

    what: str
    low: float
    high: float
    source: str


OVERHEADS = {
    "context": Overhead(
        "CUDA context and loaded kernels", 0.3, 0.6, "pytorch issues 107667, 81257"
    ),
    "graphs": Overhead(
        "vLLM's CUDA graphs, not in sleep", 1.5, 3.0, "vllm issue 47654: 1.5 at TP8; more: a guess"
    ),
    "engine_nccl": Overhead(
        "vLLM's NCCL and custom all-reduce", 0.9, 1.1, "vllm pulls 46234, 51485: 0.96 to 1 GiB"
    ),
    "trainer_nccl": Overhead(
        "Megatron's NCCL", 1.5, 3.0, "a guess from vLLM's figure and more groups"
    ),
    "profile": Overhead(
        "vLLM's activations of its largest batch", 0.5, 1.5, "vllm issue 47654; more: a guess"
    ),
    "workspaces": Overhead(
        "workspaces of cuBLAS and Transformer Engine", 0.1, 0.3, "TE 2.20: 32 MiB each on Hopper"
    ),
}


@dataclass(frozen=True)
class LayerBytes:
    """Bytes per token of a layer, for each element of the widths that they grow with."""

    hidden: int
    query: int  # the mean of query and attention output, of all heads
    key: int  # the mean of key and value
    mlp: int
    expert_hidden: int  # for each chosen expert
    expert_mlp: int

    def of(self, shape: ModelShape, kind: LayerKind, recomputed: tuple[str, ...] = ()) -> int:
        """Returns the bytes per token of a layer, without the parts that are recomputed: "mlp" and
        "moe"; other parts are small."""
        query = shape.heads * shape.head_dim
        key = shape.kv_heads * shape.head_dim
        latent = shape.latent
        small = 0
        if latent:
            query = key = shape.heads * (latent.qk_nope_head_dim + latent.qk_rope_head_dim)
            query = (query + shape.heads * latent.v_head_dim) // 2
            key = query
            small = latent.q_lora_rank + latent.kv_lora_rank
        total = self.hidden * shape.hidden + self.query * (query + small) + self.key * key
        if not kind.has_experts:
            return total + ("mlp" not in recomputed) * self.mlp * shape.intermediate
        if "moe" in recomputed:
            return total
        each = self.expert_hidden * shape.hidden + self.expert_mlp * shape.moe_intermediate
        return total + shape.experts_per_token * each + self.mlp * shape.shared_intermediate


@dataclass(frozen=True)
class Kernels:
    """The memory of a layer implementation, in bytes of bf16. fp32 takes twice as much."""

    kept: LayerBytes  # saved for the backward pass
    backward: LayerBytes  # in addition, while the gradients of a layer are computed
    forward: LayerBytes  # of a layer in a pass without gradients
    tile: int  # maximum size of a tile of logits (megarl/trainer/logprobs.py)
    # head, per element of the hidden states: saved, and while logits or their gradients are made
    head_kept: int = 4
    head_forward: int = 0
    head_backward: int = 6


_TE = LayerBytes(hidden=12, query=4, key=4, mlp=6, expert_hidden=4, expert_mlp=6)
KERNELS = Kernels(kept=_TE, backward=_TE, forward=_TE, tile=256 << 20)


@dataclass(frozen=True)
class Activations:
    """Bytes on one rank at the peaks of a pass: of layers, and of the head."""

    layers: int
    logits: int = 0


def activations(
    config: Config,
    shape: ModelShape,
    layout: Layout,
    *,
    updates: bool = True,
    kernels: Kernels = KERNELS,
) -> Activations:
    """Returns a rank's activations in an update, or in a pass without gradients, for micro-batches
    of the maximum size. Tokens are assumed to choose experts evenly."""
    train = config.train
    rollout = config.rollout
    longest = rollout.max_prompt_tokens + rollout.max_tokens
    tokens = max(train.max_tokens_per_microbatch, longest)
    if not updates:
        tokens = max(tokens, train.max_tokens_per_logprob_batch or 0)
    tokens = -(-tokens // layout.cp.size)
    scale = 2 if train.dtype == "fp32" else 1
    hidden = scale * shape.hidden
    kinds = shape.layer_kinds

    def per_layer(costs: LayerBytes, kind: LayerKind, recomputed: tuple[str, ...] = ()) -> int:
        return scale * tokens * costs.of(shape, kind, recomputed) // layout.tp.size

    chunks = stage_layers(shape.layers, layout)
    stage_kinds = [kinds[layer] for layer in chain(*chunks)]
    whole = 0
    if layout.pp.last:
        whole = 2 * hidden * tokens * (1 + (layout.tp.size > 1))  # gathered, and selected positions
    columns = -(-shape.vocab // layout.tp.size)
    chunk = min(train.logprob_chunk, tokens)
    tile = min(kernels.tile, 4 * chunk * columns)
    if not updates:
        layer = max(per_layer(kernels.forward, kind) for kind in stage_kinds)
        head = tile + kernels.head_forward * hidden * chunk
        return _larger(0, layer, whole, layout.pp.last * head)
    recomputed = train.recompute_modules if train.recompute == "selective" else ()
    if train.recompute == "full":
        kept = len(stage_kinds) * (2 * hidden * tokens // layout.tp.size)
        layer = max(
            per_layer(kernels.kept, kind) + per_layer(kernels.backward, kind)
            for kind in stage_kinds
        )
    else:
        kept = sum(per_layer(kernels.kept, kind, recomputed) for kind in stage_kinds)
        layer = max(per_layer(kernels.backward, kind) for kind in stage_kinds)
    kept *= _in_flight(config, layout)
    if not layout.pp.last:
        return Activations(int(kept) + layer)
    whole += hidden * kernels.head_kept * tokens // layout.tp.size
    forward = 2 * tile + kernels.head_forward * hidden * chunk
    head = max(forward, tile + kernels.head_backward * hidden * tokens)
    return _larger(kept, layer, whole, head)


def _larger(kept: float, layer: int, whole: int, head: int) -> Activations:
    """Returns the peak of a layer, or of the head, which come one after the other."""
    if layer > whole + head:
        return Activations(int(kept) + layer)
    return Activations(int(kept) + whole, head)


def _in_flight(config: Config, layout: Layout) -> float:
    """Returns the micro-batches whose activations a pipeline stage has at once. With virtual
    stages, a micro-batch counts in each chunk, so the number may be a fraction."""
    after = layout.pp.size - layout.pp.rank
    rows = config.train.prompts_per_step
    if config.stage_spec.needs_engine:
        rows *= config.rollout.samples_per_prompt
    available = max(1, -(-rows // (config.train.updates_per_step * layout.dp.size)))
    chunks = layout.vpp.size
    if chunks == 1:
        return min(available, after)
    return min(available, (2 * after - 1 + (chunks - 1) * layout.pp.size) / chunks)


def activation_bytes(config: Config, shape: ModelShape) -> int:
    """Returns the bytes of the fullest rank's activations at the peak of an update."""
    fleet = fleet_of(config)
    peaks = [
        activations(config, shape, fleet.trainer_layout(rank))
        for rank in range(0, fleet.trainers, fleet.trainers // fleet.parallel.pipeline)
    ]
    return int(max(peak.layers + peak.logits for peak in peaks))
