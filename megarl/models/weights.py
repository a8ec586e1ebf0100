"""Checks that a Hugging Face folder has the tensors of the model that its config.json describes. No
torch."""

from collections.abc import Collection, Mapping
from itertools import chain
from pathlib import Path

from megarl.models.config_json import read_config
from megarl.models.formats import BlockFormat
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
ACTIVATION_SCALES = ("input_scale", "input_global_scale")
# computed, of the engine's activations and cache, or 0 in the formats that are supported
NOT_WEIGHTS = (*ACTIVATION_SCALES, "rotary_emb.inv_freq", "k_scale", "v_scale", "weight_zero_point")


def check_weights(
    folder: Path,
    shape: ModelShape,
    table: Table | None = None,
) -> None:
    """Raises ValueError, naming file and tensor, unless the folder has the table's tensors and no
    others, except another head and multi-token prediction.

    `table`: None: the family's.
    """
    tensors = read_headers(folder)
    if shape.tied:
        check_tied(tensors)
    if shape.bridge is not None:
        return
    fmt = read_config(folder / "config.json").quantization()
    shapes = shapes_of(table or megatron_table(shape), shape)
    # those that the folder lacks keep their initial values
    shapes = {name: size for name, size in shapes.items() if not name.startswith(SCORE)}
    others = [HEAD, SCORE]
    others += [f"model.layers.{shape.layers + n}." for n in range(shape.mtp_layers)]
    ignored = {name for name in tensors if name.startswith(tuple(others))}
    check_tensors(folder, tensors, shapes, fmt, ignored=ignored)


def has_weights(folder: Path) -> bool:
    """Returns False for a folder that has no files of weights, as one with a config.json only."""
    return any(chain.from_iterable(map(folder.glob, (INDEX, "*.safetensors", "*.bin"))))


def check_tensors(
    folder: Path,
    tensors: Mapping[str, HfTensor],
    shapes: Mapping[str, Shape],
    fmt: BlockFormat | None,
    *,
    ignored: Collection[str] = (),
) -> None:
    """Raises ValueError, naming tensor and file, if tensors are missing or have another shape, or
    if there are others than these and those `ignored`."""
    expected = dict(shapes)
    if fmt:
        for name in fmt.tensors(tensors).intersection(shapes):
            for suffix, (_, size) in fmt.parts(expected.pop(name)).items():
                expected[name + suffix] = size
    for name, shape in expected.items():
        tensor = tensors.get(name)
        if tensor is None:
            file = folder / INDEX
            if not file.is_file():
                file = next((other.file for other in tensors.values()), file)
            raise ValueError(
                f"{file} has no tensor {name}, which config.json requires; copy the folder again"
            )
        if tensor.shape != shape and {*tensor.shape, *shape} != {1}:
            raise ValueError(
                f"{tensor.file}: {name} has shape {tensor.shape}, but config.json requires {shape}"
            )
    for name, tensor in tensors.items():
        if name not in expected and name not in ignored and not name.endswith(NOT_WEIGHTS):
            raise ValueError(
                f"{tensor.file}: {name} is not a tensor of the model that config.json describes; "
                "correct config.json, or remove the tensor"
            )
