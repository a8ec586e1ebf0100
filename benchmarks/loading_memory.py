"""Host memory that loading a quantised model adds to a rank, beyond its parameters.

python -m benchmarks.loading_memory [KIND ...]

Each case is a fresh process, the first of two tensor-parallel ranks, that fills its bf16 parameters from a random
folder with megarl's reader, after one slice has been read. It prints the bytes of tensors that live at once, and the
growth of resident memory, as benchmarks.checkpoint_memory does; neither counts the page cache. The limit of both
is the rank's share of the weights plus two of its largest slices in bf16; the exit code is 3 if a case exceeds it.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.checkpoint_memory import ROOT, Live, resident

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
WEIGHTS = {"type": "int", "num_bits": 4, "symmetric": True, "strategy": "group", "group_size": 32}
INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"0": {"weights": WEIGHTS}},
}
MOE = {
    "layers": 1,
    "hidden": 2112,
    "heads": 8,
    "kv_heads": 4,
    "experts": 4,
    "vocab": 4096,
    "tied": False,
}
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "bf16": ({"family": "qwen3_moe", "moe_intermediate": 4224, **MOE}, None),
    "fp8": (
        {"family": "qwen3_moe", "moe_intermediate": 4224, **MOE},
        FP8,
    ),  # partial blocks, also in a rank's half
    "int4": ({"family": "qwen3_moe", "moe_intermediate": 4224, **MOE}, INT4),
    "mxfp4": ({"family": "gpt_oss", "moe_intermediate": 4224, **MOE}, {"quant_method": "mxfp4"}),
}


def make(kind: str, folder: Path) -> None:
    from megarl.commands.random_model import create_model
    from megarl.config.schema import Create
    from megarl.models.formats import read_quantization
    from megarl.weights.encode.quantize import PLAIN, Storage

    create, quantization = KINDS[kind]
    shutil.copytree(
        create_model(Create(tokenizer="none", **create), folder / "made"), folder / "model"
    )
    tensors = load_file(folder / "model/model.safetensors")
    storage = PLAIN
    if quantization:
        config = folder / "model/config.json"
        config.write_text(
            json.dumps(json.loads(config.read_text()) | {"quantization_config": quantization})
        )
        linear = (
            ("_proj.weight", "gate_up_proj", "down_proj")
            if kind != "mxfp4"
            else ("gate_up_proj", "down_proj")
        )
        names = frozenset(name for name in tensors if name.endswith(linear))
        storage = Storage(read_quantization(quantization), names)
    stored = {
        part: x
        for name, tensor in tensors.items()
        for part, x in storage.encode(name, tensor.bfloat16()).items()
    }
    save_file(stored, folder / "model/model.safetensors")


def load(folder: Path) -> dict[str, int]:
    from megarl.checkpoint.hf_folder import HfFolder, load_hf
    from megarl.layout import Layout, Parallel
    from megarl.models.registry import megatron_table, padded_vocab, read_model
    from megarl.models.shards import slices_of

    torch.set_num_threads(1)
    shape = read_model(folder / "model")
    table = megatron_table(shape, spec="local", padded_vocab=padded_vocab(shape.vocab, 2))
    slices = slices_of(table, shape, Layout.of(Parallel(tensor=2, expert_tensor=2), 2, 0))
    sizes: dict[str, int] = {}
    for part in slices:
        last = part.offset + sum((n - 1) * s for n, s in zip(part.shape, part.strides, strict=True))
        sizes[part.param] = max(sizes.get(part.param, 0), last + 1)
    warm = next(part for part in slices if ".experts" in part.name and len(part.shape) > 1)
    with Live():  # its first use imports 40 MB
        HfFolder(folder / "model").copy(warm, torch.empty(sizes[warm.param], dtype=torch.bfloat16))
    libc = ctypes.CDLL("libc.so.6")
    # freed blocks of 1 MiB or more are returned at once, as in `megarl convert`
    libc.mallopt(-3, 1 << 20)
    libc.malloc_trim(0)
    # PR_SET_THP_DISABLE: pages of 4 kB, or each parameter is rounded up to 2 MB
    libc.prctl(41, 1, 0, 0, 0)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    with Live() as live:
        load_hf(
            {name: torch.empty(size, dtype=torch.bfloat16) for name, size in sizes.items()},
            slices,
            folder / "model",
        )
    share = 2 * sum(sizes.values())
    limit = share + 2 * 2 * max(part.numel for part in slices)
    return {
        "share": share,
        "limit": limit,
        "tensors": live.peak,
        "resident": resident("VmHWM") - before,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kinds", nargs="*", default=list(KINDS))
    parser.add_argument("--child", nargs=2)
    args = parser.parse_args()
    if args.child:
        action, folder = args.child
        print(json.dumps(load(Path(folder)) if action == "load" else make(action, Path(folder))))
        return 0
    print(f"MB; rank 0 of tensor 2, bf16; torch {torch.__version__}")
    print(f"{'format':8} {'share':>8} {'limit':>8} {'tensors':>8} {'resident':>8}")
    is_within = True
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for kind in args.kinds:
        with tempfile.TemporaryDirectory(prefix="megarl-bench-") as folder:
            for action in (kind, "load"):
                command = [
                    sys.executable,
                    "-W",
                    "ignore",
                    "-m",
                    "benchmarks.loading_memory",
                    "--child",
                    action,
                    folder,
                ]
                done = subprocess.run(
                    command, env=environment, stdout=subprocess.PIPE, text=True, check=True
                )
            found = json.loads(done.stdout.splitlines()[-1])
        is_within &= max(found["tensors"], found["resident"]) <= found["limit"]
        print(
            f"{kind:8} "
            + " ".join(
                f"{found[key] / 1e6:8.1f}" for key in ("share", "limit", "tensors", "resident")
            )
        )
    print("within the limit" if is_within else "beyond the limit")
    return 0 if is_within else 3


if __name__ == "__main__":
    sys.exit(main())
