"""Arithmetic of a GPU's memory: what is there beside tensors, and a config's activations.

The figures are ranges from the libraries' sources and from reports of others, in GB (1e9 bytes) per
rank. No run of megarl has measured them yet.
"""

from dataclasses import dataclass

from megarl.config.schema import Config
from megarl.models.shape import ModelShape

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
    "workspaces": Overhead(
        "workspaces of cuBLAS and Transformer Engine", 0.1, 0.3, "TE 2.20: 32 MiB each on Hopper"
    ),
}


def activation_bytes(config: Config, shape: ModelShape) -> int:
    """Returns the bytes of a rank's activations at the peak of a backward pass, in bf16.

    Counts the longest micro-batch, once for each pipeline stage: the inputs of all layers if they
    are recomputed ("full"), otherwise all activations; and the layer whose gradients are computed,
    twice; and fp32 logits of a chunk of tokens, three times. Experts are chosen evenly.
    """
    train = config.train
    rollout = config.rollout
    tokens = max(train.max_tokens_per_microbatch, rollout.max_prompt_tokens + rollout.max_tokens)
    mlp = 3 * shape.intermediate
    if shape.is_moe:
        per_expert = 2 * shape.hidden + 3 * shape.moe_intermediate
        mlp = shape.experts_per_token * per_expert + 3 * shape.shared_intermediate
    # elements per token
    layer = 6 * shape.hidden + 2 * shape.head_dim * (shape.heads + shape.kv_heads) + mlp
    kept = shape.hidden if train.recompute == "full" else layer
    logits = 12 * train.logprob_chunk * shape.vocab
    ranks = config.parallel.tensor * config.parallel.context
    return (2 * tokens * (shape.layers * kept + 2 * layer) + logits) // ranks
