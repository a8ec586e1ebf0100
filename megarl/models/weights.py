"""Checks that a Hugging Face folder has the tensors of the model that its config.json describes. No
torch."""

from collections.abc import Collection, Mapping
from pathlib import Path

from megarl.models.config_json import read_config
from megarl.models.formats import CONFIG_KEY, BlockFormat
from megarl.models.headers import (
    HEAD,
    INDEX,
    HfTensor,
    check_tied,
    read_headers,
)
from megarl.models.registry import megatron_table
from megarl.models.shape import ModelShape, Shape
from megarl.models.shards import Table, shapes_of

SCORE = "score."  # of a value head or a reward model
FLOATS = ("F64", "F32", "F16", "BF16")
ACTIVATION_SCALES = ("input_scale", "input_global_scale")
# computed at run time; scales of activations and KV cache; or 0 in all supported formats
NOT_WEIGHTS = (*ACTIVATION_SCALES, "rotary_emb.inv_freq", "k_scale", "v_scale", "weight_zero_point")


def check_weights(
    folder: Path,
    shape: ModelShape,
    table: Table | None = None,
) -> dict[str, HfTensor]:
    """Returns the folder's tensors. Raises ValueError, naming file and tensor, unless they are
    exactly those of the table. Other heads and multi-token prediction are also accepted.

    table: None for that of the family
    """
    tensors = read_headers(folder)
    if shape.tied:
        check_tied(tensors)
    if shape.bridge is not None:
        return tensors
    fmt = read_config(folder / "config.json").block_format()
    shapes = shapes_of(table or megatron_table(shape), shape)
    # a value or reward head that the folder lacks keeps its initial values
    shapes = {name: size for name, size in shapes.items() if not name.startswith(SCORE)}
    others = [HEAD, SCORE]
    others += [f"model.layers.{shape.layers + n}." for n in range(shape.mtp_layers)]
    ignored = {name for name in tensors if name.startswith(tuple(others))}
    check_tensors(folder, tensors, shapes, fmt, ignored=ignored)
    return tensors


def check_tensors(
    folder: Path,
    tensors: Mapping[str, HfTensor],
    shapes: Mapping[str, Shape],
    fmt: BlockFormat | None,
    *,
    ignored: Collection[str] = (),
    config: str = "config.json",
) -> None:
    """Raises ValueError, naming tensor and file, if a tensor of `shapes` is missing, has another
    shape or is quantised in another format, or if there is a tensor that is neither in `shapes` nor
    in `ignored`."""
    expected = dict(shapes)
    in_blocks = set()
    if fmt:
        in_blocks = fmt.tensors(tensors).intersection(shapes)
        for name in in_blocks:
            for suffix, (_, size) in fmt.parts(expected.pop(name)).items():
                expected[name + suffix] = size
    for name, shape in expected.items():
        tensor = tensors.get(name)
        if tensor is None:
            file = folder / INDEX
            if not file.is_file():
                file = next((other.file for other in tensors.values()), file)
            raise ValueError(
                f"{file} has no tensor {name}, which {config} requires; copy the folder again"
            )
        if tensor.shape != shape and {*tensor.shape, *shape} != {1}:
            raise ValueError(
                f"{tensor.file}: {name} has shape {tensor.shape}, but {config} requires {shape}"
            )
        if name in shapes and name not in in_blocks and tensor.dtype not in FLOATS:
            raise ValueError(
                f"{tensor.file}: {name} is quantised ({tensor.dtype}), but not as {config}'s "
                f"{CONFIG_KEY} describes; use a bf16 copy of the model"
            )
    for name, tensor in tensors.items():
        if name not in expected and name not in ignored and not name.endswith(NOT_WEIGHTS):
            raise ValueError(
                f"{tensor.file}: {name} is not a tensor of the model that {config} describes; "
                f"correct {config}, or remove the tensor"
            )
