"""The block formats of quantised weights as data: how each element and each block's scale is
stored. No torch.

    value = element x scale of its block (/ the tensor's global scale)

A tensor [..., out, in] named `name` is stored as several, named `name` + suffix.
`weights/encode/quantize.py` has the maths; loading, sync and export use both. `read_format` reads a
config.json's `quantization_config`. A format is an entry of FORMATS, and of ENGINE_FORMATS if the
engine can keep its weights in it."""

import json
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, Literal

from megarl.models.headers import ITEM_BYTES
from megarl.models.shape import Settings, Shape
from megarl.models.shards import ShardSlice

Element = Literal["e4m3", "e2m1", "int4"]
ELEMENT_BITS: dict[Element, int] = {"e4m3": 8, "e2m1": 4, "int4": 4}
CONFIG_KEY = "quantization_config"


@dataclass(frozen=True)
class BlockFormat:
    """How a quantised tensor is stored. Blocks are counted from the tensor's first element; the
    last block of a dim may be partial."""

    name: str
    element: Element
    block: tuple[int, int]  # rows and columns that share a scale; 0: all
    values: str  # suffixes of the stored tensors' names
    scale: str
    scale_dtype: str  # safetensors' name; U8: the exponent of a power of two, plus 127
    # safetensors' dtype of the stored values, each as many elements as fill it, lowest bits first
    item: str = "F8_E4M3"
    # suffix of the global scale, fp32 [1]; block scales are multiplied by it before rounding
    global_scale: str = ""
    full_shape: str = ""  # suffix of the tensor's shape, int64 [dims]
    power_of_2: bool = False  # for e4m3: scales are powers of two
    # stored as [..., out, in / block, block / per_item] of a tensor [..., in, out]
    is_transposed: bool = False

    @property
    def bits(self) -> int:
        """Bits of an element."""
        return ELEMENT_BITS[self.element]

    @property
    def per_item(self) -> int:
        """Elements in a stored value (`item`)."""
        return 8 * ITEM_BYTES[self.item] // self.bits

    @property
    def column_step(self) -> int:
        """Alignment, in columns, of the start of a partial read: 1; if items pack several elements,
        a block, or an item where a block has all columns."""
        return 1 if self.per_item == 1 else self.block[1] or self.per_item

    def tensors(self, names: Collection[str]) -> frozenset[str]:
        """Returns the tensors of which `names` has both values and scales."""
        tensors = (name.removesuffix(self.scale) for name in names if name.endswith(self.scale))
        return frozenset(name for name in tensors if name + self.values in names)

    def grid(self, rows: int, columns: int) -> tuple[int, int]:
        """Returns the shape of a matrix's scales."""
        high, wide = self.block
        return -(-rows // (high or rows)), -(-columns // (wide or columns))

    def parts(self, shape: Shape) -> dict[str, tuple[str, Shape]]:
        """Returns {suffix: (dtype, shape)} of the stored tensors of a tensor of `shape`."""
        *lead, rows, columns = shape
        if self.is_transposed:
            rows, columns = columns, rows
        grid = self.grid(rows, columns)
        scales = (*lead, *grid)
        if self.block == (0, 0):
            scales = (1,)
        items = (*lead, rows, -(-columns // self.per_item))
        if self.is_transposed:
            items = (*lead, rows, grid[1], self.block[1] // self.per_item)
        parts = {self.values: (self.item, items), self.scale: (self.scale_dtype, scales)}
        if self.global_scale:
            parts[self.global_scale] = ("F32", (1,))
        if self.full_shape:
            parts[self.full_shape] = ("I64", (len(shape),))
        return parts


_FP8 = BlockFormat("fp8_tensor", "e4m3", (0, 0), values="", scale="_scale", scale_dtype="F32")
_FP4 = BlockFormat(
    "mxfp4_pack",
    "e2m1",
    (1, 32),
    values="_packed",
    scale="_scale",
    scale_dtype="U8",
    item="U8",
)
FORMATS = {
    fmt.name: fmt
    for fmt in (
        # DeepSeek-V3, Kimi-K2, Qwen3
        replace(_FP8, name="fp8_block", block=(128, 128), scale="_scale_inv"),
        # GLM-4.5-FP8; this format and the next four are compressed-tensors'
        replace(_FP8, name="fp8_channel", block=(1, 0)),
        _FP8,
        _FP4,
        replace(
            _FP4,
            name="nvfp4",
            block=(1, 16),
            scale_dtype="F8_E4M3",
            global_scale="_global_scale",
        ),
        BlockFormat(  # Kimi-K2-Thinking
            "int4_group",
            "int4",
            (1, 32),
            values="_packed",
            scale="_scale",
            scale_dtype="BF16",
            item="I32",
            full_shape="_shape",
        ),
        # gpt-oss
        replace(_FP4, name="mxfp4", values="_blocks", scale="_scales", is_transposed=True),
    )
}
# scales are powers of two, as DeepGEMM's kernels need them: with others, vLLM on a GPU would
# quantise the weights a second time after the sync has verified them
_ENGINE_FP8 = replace(FORMATS["fp8_block"], power_of_2=True)
# rollout.quantization -> formats of vLLM's linear layers; GPUs and experts need the first one
ENGINE_FORMATS = {
    "fp8": [replace(_ENGINE_FP8, block=(rows, 128)) for rows in (128, 64, 32)],
}


# Keys of a quantization_config that are read here, or concern activations, cache or calibration
ACCEPTED = """
    quant_method fmt scale_fmt weight_block_size activation_scheme modules_to_not_convert
    ignored_layers dequantize run_compressed
    config_groups format global_compression_ratio ignore kv_cache_scheme quantization_status
    sparsity_config transform_config version
    actorder block_structure dynamic group_size num_bits observer observer_kwargs scale_dtype
    strategy symmetric type zp_dtype
"""


def as_stored(part: ShardSlice, fmt: BlockFormat, dims: int) -> ShardSlice:
    """Returns the slice of a tensor of `dims` dims in the stored order: with the inputs last."""
    if not fmt.is_transposed:
        return part

    def move(sizes: Shape) -> Shape:
        return (*sizes[: dims - 2], *sizes[dims - 1 :], sizes[dims - 2])

    return replace(part, start=move(part.start), shape=move(part.shape), strides=move(part.strides))


def matrix_ranges(part: ShardSlice, dims: int) -> tuple[list[range], range, range]:
    """Returns the ranges of a slice in its leading dims (one index each), rows and columns, in the
    stored order. Rows that are viewed as pairs become one dim again."""
    starts = list(part.start)
    sizes = list(part.shape)
    if len(sizes) == dims + 1:
        starts[-3:-1] = [2 * starts[-3] + starts[-2]]
        sizes[-3:-1] = [sizes[-3] * sizes[-2]]
    assert all(size == 1 for size in sizes[:-2]), f"{part} has several matrices"
    ranges = [range(first, first + size) for first, size in zip(starts, sizes, strict=True)]
    return ranges[:-2], ranges[-2], ranges[-1]


def coarse(indices: range, size: int) -> range:
    """Returns the indices of the blocks of `size` that contain `indices`; size 0: a single block
    contains all."""
    return range(indices.start // size, -(-indices.stop // size)) if size else range(1)


def read_format(raw: Settings) -> BlockFormat:
    """Returns the format of weights that a `quantization_config` describes; the formats of
    activations and KV cache do not matter. Raises ValueError with the unsupported value and the
    supported ones."""
    method = raw.get("quant_method")
    _only(raw, "quant_method", "fp8", "mxfp4", "compressed-tensors")
    _accept(raw)
    if method == "fp8":
        _only(raw, "fmt", None, "e4m3")
        _only(raw, "scale_fmt", None, "float", "ue8m0")
        fmt = replace(FORMATS["fp8_block"], power_of_2=raw.get("scale_fmt") == "ue8m0")
        return _in_blocks(fmt, raw, "weight_block_size")
    if method == "mxfp4":
        return FORMATS["mxfp4"]
    _only(raw, "transform_config", None, {})
    sparsity = (raw.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        raise ValueError(
            f"sparsity_config: format={sparsity!r} is not supported; supported: 'dense'"
        )
    groups = list((raw.get("config_groups") or {}).values())
    ways = {json.dumps(group["weights"], sort_keys=True) for group in groups}
    if len(ways) != 1:
        raise ValueError(f"config_groups has {len(ways)} ways to store weights; supported: one")
    return _compressed(groups[-1]["weights"], groups[-1].get("format") or raw.get("format"))


def _compressed(weights: Settings, stored_as: Any) -> BlockFormat:
    """Returns the format of a group of compressed-tensors: `weights` are its QuantizationArgs,
    `stored_as` its compression format."""
    _accept(weights)
    _only(weights, "symmetric", True)
    _only(weights, "actorder", None, "weight", "static")  # others permute a row's inputs
    _only(weights, "dynamic", False, None)
    kind = f"{weights.get('type')}{weights.get('num_bits')} {weights.get('strategy')} {stored_as}"
    size = weights.get("group_size")
    match kind.split():
        case ["float8", "block", "float-quantized" | "naive-quantized"]:
            fmt = replace(FORMATS["fp8_block"], scale="_scale")
            return _in_blocks(fmt, weights, "block_structure")
        case ["float8", "channel" | "tensor" as strategy, "float-quantized" | "naive-quantized"]:
            return FORMATS[f"fp8_{strategy}"]
        case ["float4", "tensor_group", "nvfp4-pack-quantized"] if size == 16:
            return FORMATS["nvfp4"]
        case ["float4", "group", "mxfp4-pack-quantized"] if size == 32:
            return FORMATS["mxfp4_pack"]
        case ["int4", "group", "pack-quantized"] if (
            type(size) is int and size > 0 and size % 8 == 0
        ):
            return replace(FORMATS["int4_group"], block=(1, size))
        case ["int4", "channel", "pack-quantized"]:
            return replace(FORMATS["int4_group"], block=(1, 0))
    raise ValueError(
        f"weights of type and bits, strategy, format = {kind}, group_size={size} are not "
        "supported; supported: float8 block, channel or tensor float-quantized, float4 "
        "tensor_group 16 nvfp4-pack-quantized, float4 group 32 mxfp4-pack-quantized, int4 group "
        "or channel pack-quantized"
    )


def _accept(raw: Settings) -> None:
    """Raises ValueError for an unknown key, unless its value is null, false or empty."""
    for key, value in raw.items():
        if value and key not in ACCEPTED.split():
            raise ValueError(f"{key}={json.dumps(value)[:80]} is not supported")


def _in_blocks(fmt: BlockFormat, raw: Settings, key: str) -> BlockFormat:
    """Returns `fmt` with blocks of the size `raw[key]`; null: one scale per tensor. Raises
    ValueError if the size is invalid."""
    size = raw.get(key)
    if size is None:
        return replace(fmt, name="fp8_tensor", block=(0, 0))
    is_pair = isinstance(size, list) and len(size) == 2
    if not is_pair or not all(type(n) is int and 0 < n < 2**31 for n in size):
        raise ValueError(
            f"{key}={json.dumps(size)[:80]} is invalid; it must be two positive integers, or null"
        )
    return replace(fmt, block=(size[0], size[1]))


def _only(raw: Settings, key: str, *supported: Any) -> None:
    value = raw.get(key)
    if value not in supported:
        raise ValueError(
            f"{key}={json.dumps(value)[:80]} is not supported; "
            f"supported: {' or '.join(map(json.dumps, supported))}"
        )
