"""`megarl convert`: what the folder is, what the model is, one conversion with a bar, one line at the end.

    config.json -> ModelShape -> table (one rank) -> ConversionMap -> checkpoint.convert

No GPU, no ranks, and no weights in memory but those on their way. A Megatron folder made here holds the model's
config and tokenizer too, so it can be given to training as `model.path`, or converted back.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, Literal

import yaml
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from megarl.checkpoint.conversion_map import ConversionMap
from megarl.checkpoint.convert import convert
from megarl.checkpoint.hf_folder import HfFolder
from megarl.checkpoint.sides import HfSource, HfTarget, MegatronSource, MegatronTarget, Source, Target
from megarl.checkpoint.slots import Slot, slots_of
from megarl.checkpoint.torch_dist import Reader, is_checkpoint
from megarl.layout import Layout, Parallel, stage_layers
from megarl.models.registry import hf_shapes, megatron_slices, padded_vocab, read_model
from megarl.models.shape import ModelShape
from megarl.models.shards import ShardSlice

__all__ = ["FILE_BYTES", "run_convert"]

FILE_BYTES = 4 << 30
LEAST, MOST = 2 << 20, 16 << 20  # bytes of a parameter that are in memory at once: a small model's memory is small too
Format = Literal["megatron", "hf"]


def run_convert(
    source: Path, target: Path, to: Format, sizes: Parallel, *, config: Path | None, file_bytes: int, interactive: bool
) -> str:
    """Convert; what to tell the user.

    Raises ValueError when the input is wrong, CheckFailed when the disk fails or the round trip differs.
    """
    began = time.perf_counter()
    origin = _origin(source, config)
    shape = read_model(origin)
    _check_sizes(shape, sizes, to)
    opened, places, objects = _open(source, shape)
    dtypes = {name: opened.dtype(name) for name in places.shapes}
    total = sum(prod(size) * dtypes[name].itemsize for name, size in places.shapes.items())
    group_bytes = max(LEAST, min(MOST, total // 1024))
    made: Target
    if to == "hf":
        made = HfTarget(places, dtypes, file_bytes=file_bytes, group_bytes=group_bytes)
    else:
        made = MegatronTarget(
            places,
            objects,
            dtypes,
            cuts=sizes.tensor,
            file_of=_Files(shape, sizes),
            file_bytes=file_bytes,
            group_bytes=group_bytes,
        )
    files = [
        file for file in source.iterdir() if file.suffix in (".safetensors", ".distcp") or file.name == ".metadata"
    ]
    identity = {
        "source": sorted((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files),
        "folder": str(source.resolve()), "to": to, "sizes": str(sizes), "file_bytes": file_bytes,
    }  # fmt: skip
    with _bar(sum(file.nbytes for file in made.files), interactive=interactive) as progress:
        done = convert(
            target,
            source=opened,
            source_folder=source,
            target=made,
            origin=origin,
            identity=_as_json(identity),
            progress=progress,
        )
    seconds = time.perf_counter() - began
    resumed = f", {done.resumed / 1e9:.2f} GB of it by an interrupted run" if done.resumed else ""
    left = "; without layers of multi-token prediction, which config.json counts and the source has not"
    left = left if shape.mtp_layers and places.shapes.keys() == hf_shapes(shape).keys() else ""
    size = f"{done.tensors} tensors in {done.files} files, {done.nbytes / 1e9:.2f} GB"
    return (
        f"{target}: {size}{resumed}, in {seconds:.1f} s; "
        f"verified: every tensor read back has the source's checksum (checksums.megarl lists them){left}"
    )


def _origin(source: Path, config: Path | None) -> Path:
    """The folder with config.json and tokenizer: given, the source itself, or the model a training run began with."""
    if not source.is_dir():
        raise FileNotFoundError(f"{source} is not a directory; name a Hugging Face model or a Megatron checkpoint")
    if config is not None or (source / "config.json").is_file():
        return config or source
    run = source.parent.parent / "config.yaml"  # runs/<name>/checkpoints/step_<n>
    if run.is_file():
        path = (yaml.safe_load(run.read_text()).get("model") or {}).get("path")
        if path and (Path(path) / "config.json").is_file():
            return Path(path)
    raise ValueError(f"{source} holds no config.json; name the folder of its Hugging Face model as --config DIR")


def _check_sizes(shape: ModelShape, sizes: Parallel, to: Format) -> None:
    if to == "hf":
        if sizes != Parallel():
            raise ValueError(f"--to hf writes whole tensors: {sizes} has no meaning there; leave the sizes away")
        return
    if shape.kv_heads % sizes.tensor:
        raise ValueError(
            f"num_key_value_heads={shape.kv_heads} is not divisible by --tp {sizes.tensor}; choose another"
        )
    if sizes.pipeline > shape.layers:
        raise ValueError(f"--pp {sizes.pipeline} is more than the model's {shape.layers} layers; choose fewer")
    if shape.experts % sizes.expert if shape.experts else sizes.expert > 1:
        raise ValueError(f"--ep {sizes.expert} does not divide the model's {shape.experts} experts; choose another")


def _open(source: Path, shape: ModelShape) -> tuple[Source, ConversionMap, list[str]]:
    """The source, where it and its target hold what, and the names of Megatron's other state."""
    if is_checkpoint(source):
        reader = Reader(source)
        places, objects = _places(shape, reader.tensors, mtp=any(key.startswith("mtp.") for key in reader.tensors))
        reader.check(slot for slots in places.slots.values() for slot in slots)
        return MegatronSource(places, reader), places, objects
    folder = HfFolder.open(source)
    predicted = hf_shapes(shape, mtp=True).keys() - hf_shapes(shape).keys()
    places, objects = _places(shape, folder.names, mtp=not predicted.isdisjoint(folder.names))
    folder.check(places.shapes, skipped={"lm_head.weight"} if shape.tied else ())  # a head that is the embedding
    return HfSource(places, folder), places, objects


def _places(shape: ModelShape, names: Collection[str], *, mtp: bool) -> tuple[ConversionMap, list[str]]:
    """Where one rank alone would hold everything, and the names of Megatron's other state.

    `mtp`: with the layers of multi-token prediction, which the source has. Of `names` there, those that repeat the
    embedding and the head for such a layer have no place in Megatron's module, and keep one under their own name.
    """
    sizes = hf_shapes(shape, mtp=mtp)
    rows = padded_vocab(shape.vocab, 1)
    boxes = megatron_slices(shape, Layout.of(Parallel(), 1, 0), style="local", padded_vocab=rows, mtp=mtp)
    repeated = {box.name for box in boxes if ".layers." in box.name and ".layers." not in box.param}
    boxes = [box for box in boxes if box.name not in repeated]
    slots, objects = slots_of(shape, sizes, boxes, padded_vocab=rows)
    for name in sorted(repeated.intersection(names)):
        size, start = sizes[name], (0,) * len(sizes[name])
        boxes.append(ShardSlice(name, start, size, name, 0, (size[1], 1)))
        slots.append(Slot(name, 0, name, size, start, size, 0, may_be_padded=False))
    held = {name: size for name, size in sizes.items() if name not in repeated or name in names}
    return ConversionMap.of(held, boxes, slots), objects


class _Files:
    """Parameter -> its file's label: each pipeline stage's own, and in a stage each expert rank's."""

    def __init__(self, shape: ModelShape, sizes: Parallel) -> None:
        self._experts = shape.experts // sizes.expert
        self._stage: dict[int, int] = {}
        for stage in range(sizes.pipeline):
            layout = Layout.of(Parallel(pipeline=sizes.pipeline), sizes.pipeline, stage)
            self._stage |= {layer: stage for layers in stage_layers(shape.layers, layout) for layer in layers}
        self._last = sizes.pipeline - 1

    def __call__(self, param: str) -> str:
        layer = re.match(r"decoder\.layers\.(\d+)\.", param)
        expert = re.search(r"local_experts\.(\d+)\.", param)
        ends = 0 if param.startswith("embedding.") else self._last
        stage = ends if layer is None else self._stage[int(layer[1])]
        return f"__{stage}" + ("" if expert is None else f"_expert{int(expert[1]) // self._experts}")


def _as_json(identity: dict[str, Any]) -> dict[str, Any]:
    return identity | {"source": [list(entry) for entry in identity["source"]]}


@contextmanager
def _bar(total: int, *, interactive: bool) -> Iterator[Any]:
    if not interactive:
        yield lambda task, nbytes: None
        return
    columns = (TextColumn("{task.description:<7}"), BarColumn(30), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn()) as bar:
        tasks = {name: bar.add_task(name, total=total) for name in ("write", "verify")}
        yield lambda task, nbytes: bar.advance(tasks[task], nbytes)
