"""`megarl convert`: detects the format and the model, converts with a progress bar, and reports one line at the end.

    config.json -> ModelShape -> table (one rank), GPTModel on meta -> ConversionMap -> checkpoint.convert

It needs neither a GPU nor a launcher, and holds only the weights in transit in memory. A converted Megatron folder
includes the model's config and tokenizer, so it can be the `model.path` of a training run, or be converted back.
"""

from __future__ import annotations

import ctypes
import re
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import yaml
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from megarl.checkpoint.conversion_map import ConversionMap, Source, StoredTensors
from megarl.checkpoint.convert import Conversion
from megarl.checkpoint.hf_files import HfTarget
from megarl.checkpoint.hf_folder import HfFolder, hf_source
from megarl.checkpoint.torch_dist import (
    MegatronFolder,
    MegatronTarget,
    is_checkpoint,
    stored_tensors,
)
from megarl.layout import Layout, Parallel, stage_layers
from megarl.models.hub import model_folder
from megarl.models.registry import hf_shapes, megatron_table, padded_vocab, read_model
from megarl.models.shape import ModelShape
from megarl.models.shards import ShardSlice, slices_of
from megarl.trainer.megatron_config import transformer_config
from megarl.trainer.model import build_model
from megarl.trainer.parallel_groups import destroy_parallel, init_parallel
from megarl.weights.quantize import PLAIN

Format = Literal["megatron", "hf"]


def run_convert(
    source: Path,
    target: Path,
    to: Format,
    sizes: Parallel,
    *,
    config: Path | None,
    file_bytes: int,
    interactive: bool,
    quantise: bool = False,
) -> str:
    """Converts `source` to `target`; returns a summary for the user. `quantise`: as the Hugging Face model is. Raises
    ValueError if the input is wrong, CheckFailed if the disk fails or a file reads back differently."""
    began = time.perf_counter()
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(
            -3, 1 << 20
        )  # M_MMAP_THRESHOLD: returned when freed; by default, each thread caches up to 32 MiB
    origin = _origin(source, config)
    shape = read_model(origin)
    _check_sizes(shape, sizes, to)
    if quantise and to != "hf":
        raise ValueError(f"--export-format same applies to --to hf, not to --to {to}; remove it")
    conversion_map, opened = _open(source, shape)
    made: HfTarget | MegatronTarget
    if to == "hf":
        storage = HfFolder(origin).storage() if quantise else PLAIN
        made = HfTarget(conversion_map, opened, file_bytes=file_bytes, storage=storage)
    else:
        options = {
            "file_of": _file_of(shape, sizes),
            "file_bytes": file_bytes,
            "tensor_parallel": sizes.tensor,
        }
        made = MegatronTarget(conversion_map, opened, **options)
    weights = [
        f
        for f in source.iterdir()
        if f.suffix in (".safetensors", ".distcp") or f.name == ".metadata"
    ]
    stats = sorted((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in weights)
    identity = repr((source.resolve(), stats, to, sizes, file_bytes, quantise))
    with _bar(sum(file.nbytes for file in made.files), interactive=interactive) as progress:
        done = Conversion(opened, source, made, origin, identity, progress).run(target)
    resumed = f", {done.resumed / 1e9:.2f} GB of it from an interrupted run" if done.resumed else ""
    absent = shape.mtp_layers and conversion_map.hf_shapes.keys() == hf_shapes(shape).keys()
    without = (
        "; without multi-token prediction layers, which config.json lists but the source lacks"
    )
    size = f"{done.tensors} tensors in {done.files} files, {done.nbytes / 1e9:.2f} GB"
    return (
        f"{target}: {size}{resumed}, in {time.perf_counter() - began:.1f} s; verified: every tensor read back matches "
        f"its source checksum (see checksums.megarl){without if absent else ''}"
    )


def _origin(source: Path, config: Path | None) -> Path:
    """Returns the folder of config.json and the tokenizer: `config`, the source, or a training run's initial model."""
    if not source.is_dir():
        raise FileNotFoundError(
            f"{source} is not a directory; pass a Hugging Face model or a Megatron checkpoint"
        )
    if config is not None or (source / "config.json").is_file():
        return config or source
    run = source.parent.parent / "config.yaml"  # runs/<name>/checkpoints/step_<n>
    if run.is_file():
        model = yaml.safe_load(run.read_text()).get("model") or {}
        if model.get("path"):
            folder = model_folder(model["path"], model.get("revision"))
            if (folder / "config.json").is_file():
                return folder
    raise ValueError(
        f"{source} has no config.json; pass the folder of its Hugging Face model with --config DIR"
    )


def _check_sizes(shape: ModelShape, sizes: Parallel, to: Format) -> None:
    if to == "hf":
        if sizes != Parallel():
            raise ValueError(
                f"--to hf writes whole tensors, so {sizes} does not apply; remove --tp, --pp and --ep"
            )
        return
    if shape.kv_heads % sizes.tensor:
        raise ValueError(
            f"num_key_value_heads={shape.kv_heads} is not divisible by --tp {sizes.tensor}; choose another"
        )
    if sizes.pipeline > shape.layers:
        raise ValueError(
            f"--pp {sizes.pipeline} exceeds the model's {shape.layers} layers; lower it"
        )
    if shape.experts % sizes.expert if shape.experts else sizes.expert > 1:
        raise ValueError(
            f"--ep {sizes.expert} does not divide the model's {shape.experts} experts; choose another"
        )


def _open(source: Path, shape: ModelShape) -> tuple[ConversionMap, Source]:
    if is_checkpoint(source):
        checkpoint = MegatronFolder(source)
        has_mtp = any(key.startswith("mtp.") for key in checkpoint.tensors)
        conversion_map = _conversion_map(shape, checkpoint.tensors, mtp=has_mtp)
        checkpoint.check(conversion_map.stored)
        return conversion_map, Source(conversion_map, conversion_map.stored.slices, checkpoint)
    folder = HfFolder(source)
    predicted = hf_shapes(shape, mtp=True).keys() - hf_shapes(shape).keys()
    conversion_map = _conversion_map(
        shape, folder.tensors, mtp=not predicted.isdisjoint(folder.tensors)
    )
    folder.check(
        conversion_map.hf_shapes, ignored={"lm_head.weight"} if shape.tied else ()
    )  # the embedding
    return conversion_map, hf_source(conversion_map, folder)


def _conversion_map(shape: ModelShape, names: Collection[str], *, mtp: bool) -> ConversionMap:
    """`mtp`: the source has multi-token-prediction layers. The `names` that repeat embedding and head for one have no
    parameter in Megatron's module, and are stored under their HF names."""
    sizes, rows = hf_shapes(shape, mtp=mtp), padded_vocab(shape.vocab, 1)
    boxes = slices_of(
        megatron_table(shape, spec="local", padded_vocab=rows),
        shape,
        Layout.of(Parallel(), 1, 0),
        mtp=mtp,
    )
    repeated = {box.name for box in boxes if ".layers." in box.name and ".layers." not in box.param}
    stored = _stored_tensors(shape, mtp=mtp)
    extra = {name: ShardSlice(name, (0, 0), sizes[name], name, 0, (sizes[name][1], 1))
             for name in sorted(repeated.intersection(names))}  # fmt: skip
    slices = {**stored.slices, **{name: [box] for name, box in extra.items()}}
    shapes = {**stored.shapes, **{name: sizes[name] for name in extra}}
    return ConversionMap.build(
        {name: size for name, size in sizes.items() if name not in repeated or name in extra},
        [*(box for box in boxes if box.name not in repeated), *extra.values()],
        replace(stored, slices=slices, shapes=shapes),
    )


def _stored_tensors(shape: ModelShape, *, mtp: bool) -> StoredTensors:
    """Returns the tensors of Megatron's module, built without allocating memory, in a world of one rank."""
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        alone = Layout.of(Parallel(), 1, 0)
        init_parallel(alone)
        settings = transformer_config(
            shape, alone, dtype=torch.bfloat16, dispatcher="alltoall", use_te=False
        )
        settings.mtp_num_layers = shape.mtp_layers if mtp else None
        with torch.device("meta"):
            (model,) = build_model(shape, alone, settings, use_te=False)
        return stored_tensors(model)
    finally:
        destroy_parallel()
        dist.destroy_process_group()


def _file_of(shape: ModelShape, sizes: Parallel) -> Callable[[str], tuple[int, int | None]]:
    """Returns a function that maps a parameter to (pipeline stage, expert rank); each such pair has its own files."""
    stage_of: dict[int, int] = {}
    for stage in range(sizes.pipeline):
        layout = Layout.of(Parallel(pipeline=sizes.pipeline), sizes.pipeline, stage)
        stage_of |= {
            layer: stage for layers in stage_layers(shape.layers, layout) for layer in layers
        }

    def file_of(param: str) -> tuple[int, int | None]:
        layer = re.match(r"decoder\.layers\.(\d+)\.", param)
        expert = re.search(r"local_experts\.(\d+)\.", param)
        edge = 0 if param.startswith("embedding.") else sizes.pipeline - 1
        stage = edge if layer is None else stage_of[int(layer[1])]
        return stage, int(expert[1]) * sizes.expert // shape.experts if expert else None

    return file_of


@contextmanager
def _bar(total: int, *, interactive: bool) -> Iterator[Any]:
    columns = (
        TextColumn("{task.description:<7}"),
        BarColumn(30),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    with Progress(*columns, TimeRemainingColumn(), disable=not interactive) as bar:
        tasks = {name: bar.add_task(name, total=total) for name in ("write", "verify")}
        yield lambda task, nbytes: bar.advance(tasks[task], nbytes)
