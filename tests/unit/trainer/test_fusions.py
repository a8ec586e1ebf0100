"""Which of Megatron's fused kernels a model uses, by what is installed."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from tiny_trainer import build, make_batch

from megarl.algorithms.objective import supervised_loss
from megarl.config import library_options
from megarl.config.random_model import hf_config
from megarl.config.schema import Create
from megarl.data.packing import plan_microbatches
from megarl.layout import Layout, Parallel
from megarl.models.registry import parse_model
from megarl.stages.sft import train_supervised
from megarl.trainer.megatron_config import KERNELS, fusions, split_options, transformer_config

ROPE, PERMUTE, ROUTER, SHARED = KERNELS
ALL = frozenset(KERNELS)


@pytest.mark.parametrize(
    ("family", "change", "kernels", "expected"),
    [
        ("qwen3", {}, frozenset(), set()),  # a CPU
        ("qwen3", {}, ALL, {ROPE}),
        ("qwen3", {"rotary_interleaved": True}, ALL, set()),
        (
            "qwen3",
            {"position_embedding_type": "yarn"},
            ALL,
            set(),
        ),  # Megatron-Bridge's providers have it
        ("qwen3_moe", {}, frozenset(), set()),
        ("qwen3_moe", {}, ALL, {ROPE, PERMUTE, ROUTER}),
        ("qwen3_moe", {}, ALL - {ROUTER}, {ROPE, PERMUTE}),  # Transformer Engine before 2.6
        ("deepseek_v3", {}, ALL, {PERMUTE, ROUTER, SHARED}),
        ("deepseek_v3", {"moe_token_dispatcher_type": "allgather"}, ALL, {PERMUTE, ROUTER}),
        ("deepseek_v3", {"recompute_modules": ["shared_experts"]}, ALL, {PERMUTE, ROUTER}),
        ("deepseek_v3", {}, frozenset(), set()),
    ],
)
def test_fusions_by_model_and_kernels(family, change, kernels, expected):
    create = Create.model_validate(
        {"family": family, "experts": 4 if family != "qwen3" else 0, "vocab": 67}
    )
    layout = Layout.of(Parallel(), 1, 0)
    config = transformer_config(
        parse_model(hf_config(create), family),
        layout,
        dtype=torch.float32,
        dispatcher="alltoall",
        use_te=False,
    )
    vars(config).update(change)
    chosen = fusions(config, kernels)
    assert {name for name, is_on in chosen.items() if is_on} == expected
    assert chosen.keys() == KERNELS.keys(), "each is decided, whatever the default is"


def test_fields_are_those_of_megatron():
    """Read from the source, they are what importing the library gives."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    classes = (MLATransformerConfig, DistributedDataParallelConfig)
    known = set(library_options._fields(*library_options.LIBRARIES["trainer.megatron_options"][:2]))
    assert {x.name for kind in classes for x in fields(kind)} == known


def test_options_reach_megatron_and_entropy_is_measured_every_n_steps(one_rank, tmp_path):
    """Gradients are reduced during the backward pass, in buckets, if that is asked for on a CPU."""
    options = {
        "bias_dropout_fusion": True,
        "overlap_grad_reduce": True,
        "bucket_size": 1000,
        "unsafe": False,
    }
    # so that no other use of the output layer's weight gives it a gradient
    untied = {"tied": False}
    trainer, batch = (
        build(tmp_path, untied, entropy_every=3, megatron_options=options),
        make_batch(num_rows=4),
    )
    assert trainer.model[0].config.bias_dropout_fusion
    assert len(trainer.model[0].bucket_groups) > 3
    updates = [train_supervised(trainer, batch).updates[0] for _ in range(4)]
    assert ["entropy" in update.metrics for update in updates] == [True, False, False, True]
    assert updates[3].loss < updates[0].loss
    plan, weights_T = (
        plan_microbatches(batch, trainer.layout, trainer.train),
        torch.ones(batch.num_tokens).double(),
    )
    assert (
        "entropy"
        in trainer.step(batch, plan, supervised_loss, weights_T, needs_entropy=True).metrics
    )
    trainer.close()


def test_the_device_chooses_the_layers() -> None:
    """Unless an option does, as in tests that train Transformer Engine's layers on a CPU."""
    for device, layers in (("cpu", "local"), ("cuda", "transformer_engine")):
        assert split_options({}, torch.device(device)) == ({"transformer_impl": layers}, {})
    chosen = {"transformer_impl": "transformer_engine"}
    reduction = {"overlap_grad_reduce": True}
    options = chosen | reduction | {"unsafe": True}
    assert split_options(options, torch.device("cpu")) == (chosen, reduction)
