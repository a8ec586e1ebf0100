"""Names, shapes and places in a checkpoint, taken from the tables, are those of Megatron's own modules."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megarl.checkpoint.slots import Slot, slots_of
from megarl.config.schema import Create
from megarl.launch.random_model import create_model
from megarl.layout import Layout, Parallel
from megarl.models.registry import hf_shapes, megatron_slices, padded_vocab
from megarl.models.shape import ModelShape, read_model
from megarl.trainer.megatron_config import transformer_config
from megarl.trainer.model import build_model
from megarl.trainer.parallel_groups import destroy_parallel, init_parallel

EXPERTS = {"experts": 4, "moe_intermediate": 16}
MODELS = {
    "qwen2": {"tied": False},
    "qwen3": {"tied": True},
    "llama": {"tied": False, "kv_heads": 4},
    "qwen3_moe": EXPERTS,
    "mixtral": EXPERTS,
    "deepseek_v3": EXPERTS,
    "glm4_moe": EXPERTS,
    "gpt_oss": EXPERTS,
}


@pytest.fixture(scope="module")
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    layout = Layout.of(Parallel(), 1, 0)
    init_parallel(Parallel(), layout)
    yield layout
    destroy_parallel()
    dist.destroy_process_group()


def shape_of(family: str, folder: Path) -> ModelShape:
    """With a layer of multi-token prediction where the family may have one."""
    sizes = {"layers": 3, "hidden": 32, "heads": 4, "vocab": 67, "tied": False} | MODELS[family]
    made = create_model(Create(family=family, **sizes), folder)
    config = json.loads((made / "config.json").read_text())
    if "num_nextn_predict_layers" in config:
        (made / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    return read_model(made)


def megatrons(model: torch.nn.Module) -> tuple[set[Slot], set[str]]:
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory

    slots, objects = set(), set()
    parameters = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, entry in model.sharded_state_dict().items():
        if isinstance(entry, ShardedObject):
            objects.add(entry.unique_key)
            continue
        built = entry.build() if isinstance(entry, ShardedTensorFactory) else [entry]
        for part in built.values() if isinstance(built, dict) else built:
            assert isinstance(part, ShardedTensor) and part.data.is_contiguous()
            at = part.data.storage_offset() - parameters[name].storage_offset()
            stacked = part.prepend_axis_num
            shape = (1,) * stacked + tuple(part.local_shape)
            param = name.replace(".mtp_model_layer.", ".transformer_layer.")  # 0.19's and 0.16's name of it
            where = (tuple(part.global_shape), tuple(part.global_offset), shape, stacked)
            slots.add(Slot(param, at, part.key, *where, bool(part.allow_shape_mismatch)))
    return slots, objects


@pytest.mark.parametrize("family", MODELS)
def test_slots_are_megatrons_own(alone, family, tmp_path):
    shape = shape_of(family, tmp_path)
    settings = transformer_config(shape, alone, dtype=torch.bfloat16, dispatcher="alltoall", use_te=False)
    settings.mtp_num_layers = shape.mtp_layers or None
    with torch.device("meta"):
        (model,) = build_model(shape, alone, settings, use_te=False)
    rows, sizes = padded_vocab(shape.vocab, 1), hf_shapes(shape, mtp=True)
    boxes = megatron_slices(shape, alone, style="local", padded_vocab=rows, mtp=True)
    # what repeats the embedding and the head for a predicting layer has no parameter of its own
    boxes = [box for box in boxes if ".layers." not in box.name or ".layers." in box.param]
    slots, objects = slots_of(shape, sizes, boxes, padded_vocab=rows)
    assert (set(slots), set(objects)) == megatrons(model)
    assert len(set(slots)) == len(slots) and any(re.search(r"^mtp\.", slot.key) for slot in slots) == (
        shape.mtp_layers > 0
    )
    one_more = slots_of(dataclasses.replace(shape, layers=shape.layers + 1, experts=shape.experts + 1), sizes, boxes,
                        padded_vocab=rows)[0]  # fmt: skip
    assert set(one_more) != set(slots), "sizes that are not the model's would show"
