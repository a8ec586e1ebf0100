"""One rank of engines in FP8 blocks, and in bf16 with the same dequantised weights. Run by test_fp8_rollout.py.

    python fp8_rollout_ranks.py FOLDER MODEL:ENGINE_TENSOR...      (under RANK, WORLD_SIZE, ...)

Leaves FOLDER/rank_<r>.json with what it saw.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import sync_ranks
import torch
import torch.distributed as dist
import transformers
from sync_ranks import EXPERTS, TIED, TP2, UNTIED, Launch, layouts, refused

from megarl.layout import Layout

sync_ranks.SIZES["intermediate_size"] = 192
WIDE = {"num_key_value_heads": 4, "moe_intermediate_size": 128}
sync_ranks.CONFIGS |= {
    "dense": (transformers.Qwen3Config, TIED | {"vocab_size": 67, "num_key_value_heads": 2}),
    "experts": (transformers.Qwen3MoeConfig, UNTIED | EXPERTS | WIDE | {"vocab_size": 67}),
    "halves": (
        transformers.Qwen3Config,
        UNTIED | WIDE | {"vocab_size": 70, "head_dim": 64, "intermediate_size": 256},
    ),
    "experts_halves": (
        transformers.Qwen3MoeConfig,
        UNTIED | EXPERTS | WIDE | {"vocab_size": 70, "head_dim": 64, "moe_intermediate_size": 256},
    ),
}
ROWS = torch.randint(2, 66, (8, 64), generator=torch.Generator().manual_seed(3))


def difference(launch: Launch) -> float:
    """Mean over tokens, in nats, of the engine's log-probs against transformers' of the weights that it has."""
    scores_NL = torch.stack(launch.engine.score(ROWS.unbind()))
    return float((scores_NL - launch.reference.logprobs(ROWS)).abs().mean())


def of_model(folder: Path, name: str, tensor: int) -> dict:
    launch = Launch(folder, name, tensor, dtype=torch.bfloat16, fp8=True)
    seen: dict = {"fp8": {}, "bytes": {}, "logprobs": {}, "block": launch.fp8.block}
    for version, parallel in enumerate(layouts(launch.shape, launch.world)):
        launch.reference.change(3)
        report = launch.connect(parallel).publish(version=version)
        assert report.verified
        where = str(Layout.of(parallel, launch.world, 0))
        seen["fp8"][where], seen["bytes"][where] = difference(launch), report.bytes_kept
        seen["logprobs"][where] = [row.tolist() for row in launch.engine.score(ROWS[:2].unbind())]
    launch.change(4)
    seen["stale"] = difference(launch)
    unquantised = launch.reference.logprobs(ROWS)
    publisher = launch.connect(parallel)
    publisher.publish(version=50)
    seen["changed"] = difference(launch)
    launch.reference.fp8 = None
    launch.reference.change(4)
    seen["quantising"] = float((launch.reference.logprobs(ROWS) - unquantised).abs().mean())
    if launch.world > 1:
        launch.reduces = False
        seen["not reduced"] = refused(lambda: launch.connect(TP2).publish(version=51))
    launch.engine.close()
    plain = Launch(folder, name, tensor, dtype=torch.bfloat16)
    plain.reference.fp8, plain.reference._shape = launch.fp8, launch.shape
    plain.reference.change(3)
    plain.reference.weights = plain.reference.engine_weights()
    report = plain.connect(layouts(plain.shape, plain.world)[0]).publish(version=0)
    seen["bf16"], seen["bf16 bytes"] = difference(plain), report.bytes_kept
    plain.engine.close()
    return seen


def main(folder: Path, cases: list[str]) -> None:
    dist.init_process_group("gloo")
    seen = {}
    for case in cases:
        name, tensor = case.split(":")
        seen[name] = of_model(folder, name, int(tensor))
    (folder / f"rank_{dist.get_rank()}.json").write_text(json.dumps(seen))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
