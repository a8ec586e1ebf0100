"""What the trainer computes with the model of a folder."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist


def difference(folder: Path) -> float:
    """The largest difference of a log-prob from transformers', on `model`."""
    import transformers

    from megarl.config.schema import Train
    from megarl.data.collate import token_batch
    from megarl.layout import Layout, Parallel
    from megarl.models.registry import read_model
    from megarl.trainer.trainer import Trainer

    path = folder / "model"
    ids = torch.randint(3, 60, (40,), generator=torch.Generator().manual_seed(1))
    reference = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        logprobs = reference(input_ids=ids[None]).logits[0].log_softmax(-1)
    expected = logprobs[:-1].gather(1, ids[1:, None])[:, 0]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        trainer = Trainer.build(
            read_model(path),
            Layout.of(Parallel(), 1, 0),
            train=Train(dtype="fp32", max_tokens_per_microbatch=512),
            folder=path,
            device=torch.device("cpu"),
        )
        batch = token_batch([(ids, torch.arange(40) > 0)], temperature=1.0)
        measured = trainer.logprobs(batch)[batch.mask]
        trainer.close()
    finally:
        dist.destroy_process_group()
    return float((measured - expected).abs().max())
