"""Counts the floating-point operations of training, for the model FLOPs utilization (MFU)."""

from collections.abc import Sequence

from megarl.models.shape import ModelShape

# TFLOP/s of dense matrix products, without sparsity, from NVIDIA's data sheets; of the names that
# a GPU's name contains, the first one applies
PEAKS: str = """
    GPU          bf16     fp8      fp32
    GB200        2500     5000     80
    B200         2250     4500     75
    H200 NVL     835.5    1670.5   60
    H200         989.5    1979     67
    H100 NVL     835.5    1670.5   60
    H100 PCIe    756.5    1513     51
    H100         989.5    1979     67
    H800         989.5    1979     67
    H20          148      296      44
    A100         312      0        19.5
    A800         312      0        19.5
    L40S         362      733      91.6
"""


def peak_flops(gpu: str, dtype: str) -> float:
    """Returns the peak FLOP/s of a GPU, by the name that its driver reports, for "bf16", "fp8" or
    "fp32"; 0.0 if it is not known.
    """
    header, *lines = PEAKS.strip().splitlines()
    column = header.split().index(dtype)
    for line in lines:
        name, *peaks = line.rsplit(maxsplit=3)
        if name.strip() in gpu:
            return float(peaks[column - 1]) * 1e12
    return 0.0


def update_flops(
    shape: ModelShape, lengths: Sequence[int], *, outputs: int, is_partial: bool = False
) -> int:
    """Returns the FLOPs of a forward and a backward pass over rows of `lengths` tokens; 0 if the
    model has layers that are not counted, because they are not attention or have no table.

    A backward pass takes twice the FLOPs of a forward pass: for gradients of inputs and of weights.
    With `is_partial`, weights have none, as with LoRA, whose adapters are not counted.
    """
    if shape.bridge is not None or not all(kind.is_attention for kind in shape.layer_kinds):
        return 0
    return (2 if is_partial else 3) * forward_flops(shape, lengths, outputs=outputs)


def forward_flops(shape: ModelShape, lengths: Sequence[int], *, outputs: int) -> int:
    """Returns the FLOPs of one forward pass over rows of `lengths` tokens.

    Counts the matrix products of the model, two FLOPs for each multiply-add, as in PaLM
    (arXiv 2204.02311, appendix B) and Megatron-LM (arXiv 2104.04473, appendix):

        sum over layers of  T (attention projections + MLP) + pairs x heads x 2 (qk_dim + v_dim)
        and for the head    T x 2 x hidden x outputs

    T is the number of tokens. `pairs` counts the positions that a token attends to, itself and
    earlier ones of its row: L (L + 1) / 2 for a row of L tokens, fewer with a sliding window. The
    MLP of a layer with experts has the router, the chosen experts and the shared ones. `outputs`
    is the number of outputs of the head for each token, such as the size of the vocabulary. What
    the trainer saves or repeats is not considered: shared prefixes, unread positions of the head,
    recomputation.
    """
    total = 2 * shape.hidden * outputs * sum(lengths)
    for layer, kind in enumerate(shape.layer_kinds):
        width = shape.intermediate
        router = 0
        if kind.has_experts:
            width = shape.experts_per_token * shape.moe_intermediate + shape.shared_intermediate
            router = shape.experts
        weights = _attention_weights(shape) + shape.hidden * (3 * width + router)
        # gpt-oss: every second layer has a window
        window = 0 if layer % 2 else shape.sliding_window
        pairs = sum(_pairs(length, window) for length in lengths)
        total += 2 * weights * sum(lengths) + 2 * pairs * shape.heads * _head_dims(shape)
    return total


def _pairs(length: int, window: int) -> int:
    full = min(length, window or length)
    return full * (full + 1) // 2 + (length - full) * full


def _head_dims(shape: ModelShape) -> int:
    """Returns the sizes of a query and a value of one head, together."""
    if shape.latent is None:
        return 2 * shape.head_dim
    latent = shape.latent
    return latent.qk_nope_head_dim + latent.qk_rope_head_dim + latent.v_head_dim


def _attention_weights(shape: ModelShape) -> int:
    """Returns the number of weights of a layer's attention projections."""
    if shape.latent is None:
        return shape.hidden * 2 * (shape.heads + shape.kv_heads) * shape.head_dim
    latent = shape.latent
    query = shape.heads * (latent.qk_nope_head_dim + latent.qk_rope_head_dim)
    queries = shape.hidden * query
    if latent.q_lora_rank:
        queries = latent.q_lora_rank * (shape.hidden + query)
    keys = shape.hidden * (latent.kv_lora_rank + latent.qk_rope_head_dim)
    up = latent.kv_lora_rank * shape.heads * (latent.qk_nope_head_dim + latent.v_head_dim)
    return queries + keys + up + shape.heads * latent.v_head_dim * shape.hidden
