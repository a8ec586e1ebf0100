"""Checks that need a GPU: an engine that slept, and rows that are padded before they are trained on.

Each runs in a process of its own, as engine and trainer take a whole device.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megarl.config.schema import Config, Rollout, Train
from megarl.layout import Axis, Layout
from megarl.models.registry import read_model
from megarl.platform.env import Env
from megarl.rollout.sampling import check_version, sample_all
from megarl.trainer.microbatch import pack
from megarl.trainer.trainer import Trainer
from megarl.types import CheckFailed

sys.path.insert(0, str(Path(__file__).parents[1] / "dist"))
from trainer_cases import load_model, oracle_logprobs, random_batch, save_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

DEVICE = torch.device("cuda", 0)


def join(folder: str) -> None:
    torch.cuda.set_device(DEVICE)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", init_method=f"file://{folder}/store", rank=0, world_size=1
    )


def _sleeps(_: int, folder: str, level: int) -> None:
    """Level 1 keeps weights on the host: the same answers after it. Level 2 drops them: no answers before a sync."""
    from sync_ranks import CONFIGS, SIZES, Request, holder

    from megarl.models.registry import hf_shapes, megatron_table, padded_vocab
    from megarl.models.shards import slices_of
    from megarl.rollout.vllm.engine import Engine
    from megarl.types import Prompt
    from megarl.weights.sync.publish import Publisher, WeightFormat, WeightSender, plan_slices
    from megarl.weights.sync.transports import Transport

    join(folder)
    kind, config = CONFIGS["llama"]
    model_config = kind(**SIZES | config)
    model_config.architectures = ["LlamaForCausalLM"]
    model_config.save_pretrained(folder)
    shape = read_model(Path(folder))
    shapes = hf_shapes(shape)
    rollout = Rollout(
        max_tokens=16,
        max_model_len=256,
        gpu_memory_utilization=0.3,
        enforce_eager=True,
        sleep_level=level,
    )
    format_ = WeightFormat(shapes, torch.bfloat16)
    engine = Engine.start(
        Path(folder), rollout, Env(job_id="sleep"), stop_token_ids=(1,), weights=format_
    )
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: 1 + 0.1 * torch.randn(size, generator=generator) for name, size in shapes.items()
    }
    layout = Layout.of(Config().parallel.sizes, 1, 0)
    slices = slices_of(
        megatron_table(shape, spec="local", padded_vocab=padded_vocab(shape.vocab, 1)),
        shape,
        layout,
    )
    held = {name: value.bfloat16().to(DEVICE) for name, value in holder(slices, weights).items()}
    plan = plan_slices(
        format_, [slices], [engine.receiver.slices], ranks_per_replica=1, round_bytes=256 << 20
    )
    sender = WeightSender(slices, lambda: held)
    publisher = Publisher(plan, sender, engine.receiver, Transport(), format_)
    requests = [Request(Prompt(0, (5, 6, 7), ""), 0, 1, 1.0)]

    def answers(version: int) -> list[tuple[list[int], list[float]]]:
        samples = sample_all(engine, requests)
        check_version(samples, version)
        return [(sample.tokens.tolist(), sample.rollout_logprobs.tolist()) for sample in samples]

    publisher.publish(version=0)
    before = answers(0)
    engine.sleep()
    with pytest.raises(CheckFailed, match=r"asleep|no verified weights"):
        answers(0)
    engine.wake("weights")
    if level == 1:
        engine.wake("kv_cache")
        assert answers(0) == before
    else:
        with pytest.raises(CheckFailed, match="no verified weights"):
            answers(0)
        publisher.publish(version=1)
        engine.wake("kv_cache")
        assert answers(1) == before
    engine.close()
    dist.destroy_process_group()


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_then_generate_without_a_sync(tmp_path: Path, level: int) -> None:
    mp.spawn(_sleeps, (str(tmp_path), level), 1)


def _pads(_: int, folder: str) -> None:
    """Log-probs do not depend on how rows are packed, so not on the padding behind them; dummies are not trained on."""
    join(folder)
    path = save_model("qwen3", Path(folder))
    batch = random_batch(num_rows=7)
    expected, found = oracle_logprobs(load_model(path), batch), []
    for tokens in (64, 4096):
        train, layout = (
            Train(max_tokens_per_microbatch=tokens),
            Layout.of(Config().parallel.sizes, 1, 0),
        )
        trainer = Trainer.build(read_model(path), layout, train=train, folder=path, device=DEVICE)
        found.append(trainer.forward(batch).logprobs_T)
        assert float((found[-1] - expected)[batch.mask].abs().max()) < 0.3, (
            "bf16, log-probs of some nats"
        )
        trainer.close()
    assert float((found[0] - found[1])[batch.mask].abs().max()) < 0.1
    dist.destroy_process_group()


def test_padding_changes_no_logprob(tmp_path: Path) -> None:
    mp.spawn(_pads, (str(tmp_path),), 1)


@pytest.mark.parametrize("multiple", [16, 32, 128])
@pytest.mark.parametrize("context", [1, 2])
def test_fp8_takes_rows_padded_to_its_multiple(multiple: int, context: int) -> None:
    """What packing gives is what an FP8 product takes; the last row's padding is no token of the loss."""
    te = pytest.importorskip("transformer_engine.pytorch")
    batch = random_batch(num_rows=5)
    rows = range(5)
    micros = [
        pack(batch, rows, batch.mask, tensor=multiple, context=Axis(context, r), device=DEVICE)
        for r in range(context)
    ]
    total = sum(micro.tokens.numel() for micro in micros)
    assert total % (multiple * (2 * context if context > 1 else 1)) == 0
    assert sum(micro.labels.numel() for micro in micros) == int(batch.mask.sum()), (
        "each trained token on one rank"
    )
    layer = te.Linear(256, 256, params_dtype=torch.bfloat16, device="cuda")
    with te.fp8_autocast(enabled=True):
        for micro in micros:
            out = layer(
                torch.randn(
                    micro.tokens.numel(),
                    256,
                    dtype=torch.bfloat16,
                    device=DEVICE,
                    requires_grad=True,
                )
            )
            out.float().square().mean().backward()
    assert layer.weight.grad is not None and bool(layer.weight.grad.isfinite().all())
