"""One job of four gloo ranks: check_layouts as it is, and with a fault planted under tp2. Rank 0 writes the rows.

python layout_ranks.py RESULTS.json
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from megarl.commands.random_model import create_model
from megarl.config.schema import Create, Train
from megarl.layout import Layout
from megarl.models.registry import read_model
from megarl.parity.layouts import check_layouts, prompt_rows
from megarl.trainer.trainer import Trainer
from megarl.types import Prompt

WORLD = 4
SIZES = {
    "layers": 4,
    "hidden": 32,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
    "vocab": 67,
    "tokenizer": "none",
}
LAYOUTS = {
    "dense": ["1", "tp2", "cp2", "pp2,vpp2"],
    "moe": ["1", "tp2", "pp2,ep2"],
}


def main(file: Path) -> None:
    dist.init_process_group("gloo")
    rank, said = dist.get_rank(), {}
    for name, more in {"dense": {}, "moe": {"family": "qwen3_moe", "experts": 4}}.items():
        if rank == 0:
            create_model(Create(**SIZES, **more), file.parent)
        dist.barrier()
        model = create_model(Create(**SIZES, **more), file.parent)
        train = Train(dtype="fp32", max_tokens_per_microbatch=48)
        batch = prompt_rows(
            [Prompt(n, tuple(range(n, n + 4 + n)), "") for n in range(8)], num_tokens=5, vocab=67
        )

        def build(
            layout: Layout, *, fault: bool, model: Path = model, train: Train = train
        ) -> Trainer:
            device = torch.device("cpu")
            trainer = Trainer.build(
                read_model(model), layout, train=train, folder=model, device=device
            )
            if fault and layout.tp.size == 2:
                for held, parameter in trainer.parameters_by_name().items():
                    if "layers.2.mlp" in held and layout.tp.rank == 1:
                        parameter.data.mul_(1.01)
            return trainer

        for fault in (False, True):
            layouts = LAYOUTS[name] if not fault else LAYOUTS[name][:2]
            said[f"{name} fault" if fault else name] = check_layouts(
                layouts, batch, partial(build, fault=fault), world=WORLD, rank=rank
            )
    if rank == 0:
        file.write_text(json.dumps(said))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
