"""`megarl convert`: detects format and model, converts with a progress bar, and returns a summary.

    config.json -> ModelShape -> table (one rank), GPTModel on meta -> ConversionMap -> Conversion

Needs neither a GPU nor a launcher. Keeps a few parameters in memory, or one safetensors file while
it is written. A converted Megatron folder includes the model's config and tokenizer, so it can be
the `model.path` of a training run, or be converted back.
"""

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
from rich.progress import Progress

from megarl.checkpoint.conversion_map import ConversionMap, StoredTensors, TensorSource
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
from megarl.models.headers import HEAD, check_tied
from megarl.models.hub import model_folder
from megarl.models.registry import hf_shapes, megatron_table, padded_vocab, read_model
from megarl.models.shape import ModelShape
from megarl.models.shards import slices_of, whole_tensor
from megarl.platform.device import set_malloc
from megarl.trainer.megatron_config import transformer_config
from megarl.trainer.model import build_model
from megarl.trainer.parallel_groups import destroy_parallel, init_parallel
from megarl.weights.encode.quantize import PLAIN

Format = Literal["megatron", "hf"]
ALONE = Layout.of(Parallel(), 1, 0)
M_MMAP_THRESHOLD = -3  # from malloc.h


def run_convert(
    source: Path,
    target: Path,
    to: Format,
    sizes: Parallel,
    *,
    config: Path | None,
    file_bytes: int,
    interactive: bool,
    export_format: str = "bf16",
) -> str:
    """Converts `source` to `target`; returns a summary for the user.

    `file_bytes` is the maximum size of a file. `export_format` is "bf16", or "same" to keep the
    weight format of the Hugging Face model. Raises ValueError for invalid input, CheckFailed if the
    disk fails or a file reads back differently.
    """
    began = time.perf_counter()
    # return freed memory to the system; by default, each thread caches up to 32 MiB
    set_malloc({M_MMAP_THRESHOLD: 1 << 20})
    origin = _origin(source, config)
    shape = read_model(origin)
    _check_sizes(shape, sizes, to)
    keeps_format = export_format == "same"
    if keeps_format and to != "hf":
        raise ValueError(f"--export-format same applies to --to hf, not to --to {to}; remove it")
    opened = _open(source, shape)
    if to == "hf":
        storage = PLAIN
        if keeps_format:
            storage = HfFolder(origin).export_storage()
        made = HfTarget(opened, file_bytes=file_bytes, storage=storage)
    else:
        made = MegatronTarget(
            opened,
            file_of=_file_of(shape, sizes),
            file_bytes=file_bytes,
            tensor_parallel=sizes.tensor,
        )
    identity = repr((source.resolve(), _stats(source), to, sizes, file_bytes, keeps_format))
    nbytes = sum(file.nbytes for file in made.files)
    with _bar(nbytes, interactive=interactive) as progress:
        resumed = Conversion(opened, source, made, origin, identity, progress).run(target)
    tensors = opened.conversion_map.hf_shapes.keys()
    size = f"{len(tensors)} tensors in {len(made.files)} files, {nbytes / 1e9:.2f} GB"
    if resumed:
        size += f", {resumed / 1e9:.2f} GB of it from an interrupted run"
    summary = (
        f"{target}: {size}, in {time.perf_counter() - began:.1f} s; verified: every tensor read "
        "back matches its source checksum (see checksums.megarl)"
    )
    if shape.mtp_layers and tensors == hf_shapes(shape).keys():
        summary += (
            "; without multi-token prediction layers, which config.json lists but the source lacks"
        )
    return summary


def _stats(source: Path) -> list[tuple[str, int, int]]:
    """Returns (name, size in bytes, mtime in ns) of every weight file."""
    stats = []
    for file in source.iterdir():
        if file.suffix in (".safetensors", ".distcp") or file.name == ".metadata":
            stat = file.stat()
            stats.append((file.name, stat.st_size, stat.st_mtime_ns))
    return sorted(stats)


def _origin(source: Path, config: Path | None) -> Path:
    """Returns the folder with config.json and the tokenizer.

    This is `config` if given, the source, or the initial model of the training run that wrote the
    checkpoint. Raises ValueError if there is none, FileNotFoundError if the source is not a folder.
    """
    if not source.is_dir():
        raise FileNotFoundError(
            f"{source} is not a directory; pass a Hugging Face model or a Megatron checkpoint"
        )
    if config or (source / "config.json").is_file():
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
                f"--to hf writes whole tensors, so {sizes} does not apply; "
                "remove --tp, --pp and --ep"
            )
        return
    if shape.kv_heads % sizes.tensor:
        raise ValueError(
            f"num_key_value_heads={shape.kv_heads} is not divisible by --tp {sizes.tensor}; "
            "choose another"
        )
    if sizes.expert > 1 and (not shape.experts or shape.experts % sizes.expert):
        raise ValueError(
            f"--ep {sizes.expert} does not divide the model's {shape.experts} experts; "
            "choose another"
        )


def _open(source: Path, shape: ModelShape) -> TensorSource:
    if is_checkpoint(source):
        checkpoint = MegatronFolder(source)
        has_mtp = any(key.startswith("mtp.") for key in checkpoint.tensors)
        conversion_map = _conversion_map(shape, checkpoint.tensors, mtp=has_mtp)
        checkpoint.check(conversion_map.stored)
        return TensorSource(conversion_map, conversion_map.stored.slices, checkpoint)
    folder = HfFolder(source)
    if shape.tied:
        check_tied(folder.tensors)
    predicted = hf_shapes(shape, mtp=True).keys() - hf_shapes(shape).keys()
    has_mtp = not predicted.isdisjoint(folder.tensors)
    conversion_map = _conversion_map(shape, folder.tensors, mtp=has_mtp)
    ignored = ()
    if shape.tied:
        ignored = (HEAD,)  # same values as the embedding
    folder.check(conversion_map.hf_shapes, ignored=ignored)
    return hf_source(conversion_map, folder)


def _conversion_map(shape: ModelShape, names: Collection[str], *, mtp: bool) -> ConversionMap:
    """Returns the map between HF tensors and Megatron parameters of a source with tensors `names`.

    `mtp`: the source has multi-token-prediction layers. HF copies of the embedding and the head in
    such a layer have no parameter in Megatron's module, and are stored under their HF names.
    """
    shapes = dict(hf_shapes(shape, mtp=mtp))
    table = megatron_table(shape, spec="local", padded_vocab=padded_vocab(shape.vocab, 1))
    slices = []
    repeated = set()
    for part in slices_of(table, shape, ALONE, mtp=mtp):
        if ".layers." in part.name and ".layers." not in part.param:
            repeated.add(part.name)
        else:
            slices.append(part)
    stored = _stored_tensors(shape, mtp=mtp)
    stored_slices = dict(stored.slices)
    stored_shapes = dict(stored.shapes)
    for name in sorted(repeated):
        if name not in names:
            del shapes[name]
            continue
        whole = whole_tensor(name, shapes[name])
        slices.append(whole)
        stored_slices[name] = [whole]
        stored_shapes[name] = whole.shape
    stored = replace(stored, slices=stored_slices, shapes=stored_shapes)
    return ConversionMap.build(shapes, slices, stored)


def _stored_tensors(shape: ModelShape, *, mtp: bool) -> StoredTensors:
    """Returns the tensors of Megatron's model, built on the meta device with a world size of 1."""
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        init_parallel(ALONE)
        settings = transformer_config(
            shape, ALONE, dtype=torch.bfloat16, dispatcher="alltoall", use_te=False
        )
        settings.mtp_num_layers = None
        if mtp:
            settings.mtp_num_layers = shape.mtp_layers
        with torch.device("meta"):
            (model,) = build_model(shape, ALONE, settings, use_te=False)
        return stored_tensors(model)
    finally:
        destroy_parallel()
        dist.destroy_process_group()


def _file_of(shape: ModelShape, sizes: Parallel) -> Callable[[str], tuple[int, int | None]]:
    """Returns a function: parameter name -> (pipeline stage, expert rank or None).

    Each pair has its own files in the checkpoint.
    """
    stage_of = {}
    for stage in range(sizes.pipeline):
        layout = Layout.of(Parallel(pipeline=sizes.pipeline), sizes.pipeline, stage)
        (layers,) = stage_layers(shape.layers, layout)
        stage_of |= dict.fromkeys(layers, stage)

    def file_of(param: str) -> tuple[int, int | None]:
        stage = sizes.pipeline - 1
        layer = re.match(r"decoder\.layers\.(\d+)\.", param)
        if layer:
            stage = stage_of[int(layer[1])]
        elif param.startswith("embedding."):
            stage = 0
        expert_rank = None
        expert = re.search(r"local_experts\.(\d+)\.", param)
        if expert:
            expert_rank = int(expert[1]) * sizes.expert // shape.experts
        return stage, expert_rank

    return file_of


@contextmanager
def _bar(total: int, *, interactive: bool) -> Iterator[Any]:
    with Progress(disable=not interactive) as bar:
        tasks = {name: bar.add_task(name, total=total) for name in ("write", "verify")}
        yield lambda task, nbytes: bar.advance(tasks[task], nbytes)
