"""Checks of the trainer that need GPUs: log-probs beside fp64, layouts beside each other, memory that really goes."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import memory_peaks
import pytest
import torch
import torch.distributed as dist

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
with_te = pytest.mark.skipif(
    find_spec("transformer_engine") is None, reason="no Transformer Engine"
)
CONFIGS = Path(__file__).parents[2] / "configs"
SIZES = {
    "layers": 2,
    "hidden": 256,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 64,
    "vocab": 8192,
    "tokenizer": "none",
}


@pytest.fixture
def one_rank() -> Iterator[torch.device]:
    device = torch.device("cuda", 0)
    store = dist.HashStore()
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1, device_id=device
    )
    yield device
    dist.destroy_process_group()


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_logprobs_against_fp64(one_rank: torch.device, dtype: torch.dtype, most: float) -> None:
    """Values come from fp32 logits whatever the inputs are; the gradients of bf16 inputs are rounded to bf16."""
    from megarl.trainer.logprobs import VocabShard, token_outputs

    random = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 64, generator=random).to(one_rank, dtype) for n in (300, 5000))
    labels = torch.randint(5000, (300,), generator=random).to(one_rank)
    given = torch.randn(2, 300, generator=random).to(one_rank)
    shard = VocabShard.of(5000, 5000, dist.group.WORLD)
    ours, plain = (
        [x.to(kind, copy=True).requires_grad_() for x in (hidden, weight)]
        for kind in (dtype, torch.double)
    )
    read = token_outputs(*ours, labels, shard, temperature=0.7, chunk=128, entropy=True)
    assert read.entropy_T is not None
    (read.logprobs_T * given[0] + read.entropy_T * given[1]).sum().backward()
    log_softmax = (plain[0] @ plain[1].T / 0.7).log_softmax(1)
    logprobs, entropy = (
        log_softmax.gather(1, labels[:, None])[:, 0],
        -(log_softmax.exp() * log_softmax).sum(1),
    )
    (logprobs * given[0] + entropy * given[1]).sum().backward()
    for found, true in ((read.logprobs_T, logprobs), (read.entropy_T, entropy)):
        assert float((found - true).abs().max() / true.abs().max()) < 1e-5
    for mine, theirs in zip(ours, plain, strict=True):
        assert float((mine.grad - theirs.grad).abs().max() / theirs.grad.abs().max()) < most


@with_te
def test_what_is_offloaded_leaves_the_device(one_rank: torch.device, tmp_path: Path) -> None:
    trainer = memory_peaks.build(
        tmp_path, SIZES, {"offload": ["gradients", "optimizer", "weights"]}, device=one_rank
    )
    batch = memory_peaks.random_batch(num_rows=8)
    before = trainer.forward(batch).logprobs_T
    trainer.memory.onload_all()
    size, full = trainer.model[0].buffers[0].param_data.nbytes, torch.cuda.memory_allocated()
    trainer.memory.offload_training_state()
    rested = torch.cuda.memory_allocated()
    trainer.memory.offload_all()
    assert full - rested > 1.9 * size and rested - torch.cuda.memory_allocated() > 0.9 * size
    trainer.memory.onload_weights()
    assert torch.equal(trainer.forward(batch).logprobs_T, before)
    trainer.close()


@with_te
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")
@pytest.mark.parametrize("model", ["tiny_dense", "tiny_moe"])
def test_layouts_agree(tmp_path: Path, model: str) -> None:
    """Context parallelism is Transformer Engine's there; `megarl check` names the first layer that differs."""
    from megarl.cli import main

    values = [
        f"run.dir={tmp_path}",
        "train.dtype=bf16",
        "model.create.head_dim=64",
        "launch.processes=2",
    ]
    layouts = ["1", "tp2", "cp2", "pp2", *(["ep2"] if model == "tiny_moe" else [])]
    assert main(["check", str(CONFIGS / f"{model}.yaml"), *values, "--layouts", *layouts]) == 0
