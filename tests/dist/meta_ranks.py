"""Ranks of a large model's trainer, one after another in one process: real Megatron modules on the meta device.

    python meta_ranks.py FOLDER '{"tensor": ...}' WORLD   -> JSON {rank: {parameter: shape}}
    python meta_ranks.py FOLDER mtp                       -> the same of one rank, few layers, multi-token prediction

A fake process group stands for the other ranks: each build sees the coordinates its rank has in the whole world.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from megarl.layout import Layout, Parallel
from megarl.models.registry import read_model
from megarl.models.shape import ModelShape
from megarl.patches import megatron as megatron_on_cpu

megatron_on_cpu.install()

from megarl.trainer.megatron_config import transformer_config  # noqa: E402
from megarl.trainer.model import build_model, local_tensors  # noqa: E402
from megarl.trainer.parallel_groups import destroy_parallel, init_parallel  # noqa: E402


class OnMeta(TorchFunctionMode):
    """Megatron names its device in every call; here each is meta."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if "device" in kwargs:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def chosen(parallel: Parallel, world: int) -> list[int]:
    """One rank of each class: every stage, at the first and the last tensor and expert coordinate."""
    found: dict[tuple[int, ...], int] = {}
    for rank in range(world):
        at = Layout.of(parallel, world, rank)
        if (
            (at.tp.first or at.tp.last)
            and (at.ep.first or at.ep.last)
            and (at.etp.first or at.etp.last)
        ):
            found.setdefault((at.pp.rank, at.tp.rank, at.ep.rank, at.etp.rank), rank)
    return list(found.values())


def build(shape: ModelShape, parallel: Parallel, world: int, rank: int) -> dict[str, list[int]]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    layout = Layout.of(parallel, world, rank)
    init_parallel(layout)
    config = transformer_config(
        shape, layout, dtype=torch.bfloat16, dispatcher="alltoall", use_te=False
    )
    with torch.device("meta"), OnMeta():
        held = local_tensors(build_model(shape, layout, config, use_te=False))
    wide = {name for name, tensor in held.items() if tensor.dtype == torch.float32}
    assert all(name.endswith("expert_bias") for name in wide), wide
    destroy_parallel()
    dist.destroy_process_group()
    return {name: list(tensor.shape) for name, tensor in held.items()}


def with_prediction(shape: ModelShape) -> dict[str, list[int]]:
    shape = replace(shape, layers=max(1, len(shape.kinds)))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    layout = Layout.of(Parallel(), 1, 0)
    init_parallel(layout)
    config = transformer_config(
        shape, layout, dtype=torch.bfloat16, dispatcher="alltoall", use_te=False
    )
    config.mtp_num_layers = shape.mtp_layers
    with torch.device("meta"), OnMeta():
        model = build_model(shape, layout, config, use_te=False)
    return {name: list(tensor.shape) for name, tensor in local_tensors(model).items()}


def main(folder: str, sizes: str, world: str = "1") -> None:
    if sizes == "mtp":
        print("RANKS " + json.dumps({0: with_prediction(read_model(folder))}))
        return
    shape, parallel = read_model(folder), Parallel(**json.loads(sizes))
    ranks: Sequence[int] = chosen(parallel, int(world))
    print("RANKS " + json.dumps({rank: build(shape, parallel, int(world), rank) for rank in ranks}))


if __name__ == "__main__":
    main(*sys.argv[1:])
