"""Layouts of engines: the same samples as one rank's engine, and how much KV cache each leaves.

    python -m benchmarks.engine_layouts          both; the first takes about 10 minutes on two cores
    python -m benchmarks.engine_layouts cache    the table of docs/guides/engine_layouts.md; no GPU, no weights

The runs are those of tests/dist/engine_layout_ranks.py, four steps each, on the real vLLM and Megatron-Core.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from megarl.config.schema import Config
from megarl.layout import Layout, Parallel
from megarl.models.engine import engine_format, engine_table
from megarl.models.registry import read_model
from megarl.models.shape import ModelShape
from megarl.models.shards import slices_of
from megarl.weights.sync.from_config import engine_weights

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).parent / "results" / "engine_layouts.txt"
GPU_GB = 80.0
UTILIZATION = 0.88
RUNTIME_GB = 3.0  # of vLLM: activations of its profile, CUDA graphs, communication buffers
LAYOUTS = {  # model, quantization -> (tensor, data, expert) of 64 GPUs
    ("qwen3_235b_a22b", "none"): [(8, 1, 1), (4, 2, 8), (4, 16, 64)],
    ("glm_4_5", "none"): [(16, 1, 1), (8, 2, 16), (8, 8, 64)],
    ("deepseek_v3", "fp8"): [(16, 1, 1), (1, 16, 16), (1, 64, 64)],
    ("deepseek_v3", "none"): [(32, 1, 1), (1, 64, 64)],
    ("kimi_k2", "fp8"): [(16, 1, 1), (1, 32, 32), (1, 64, 64)],
}
GPUS = 64


@dataclass(frozen=True)
class Cache:
    """Sizes on one GPU in bytes, and tokens on all GPUS."""

    weights: float
    per_token: int
    tokens: int


def cache_of(shape: ModelShape, quantization: str, tensor: int, data: int, expert: int) -> Cache:
    """Raises ValueError if the weights are in blocks that a rank would cut."""
    ranks = tensor * data
    fmt = engine_format(quantization, shape, tensor, expert) if quantization != "none" else None
    changes = {"tensor": tensor, "data": data, "expert": expert, "quantization": quantization}
    config = Config.model_validate({"rollout": changes, "train": {"dtype": "bf16"}})
    weights = engine_weights(config, shape)
    sizes = Parallel(tensor=tensor, expert=expert, expert_tensor=1 if expert > 1 else tensor)
    table = engine_table(shape, fmt, tensor=tensor, expert=expert)
    parts = slices_of(table, shape, Layout.of(sizes, ranks, 0))
    held = sum(part.numel for part in weights.moved_slices(parts)) * weights.unit.itemsize
    if shape.latent:
        width = shape.latent.kv_lora_rank + shape.latent.qk_rope_head_dim
    else:
        width = 2 * max(1, shape.kv_heads // tensor) * shape.head_dim
    per_token = 2 * shape.layers * width  # bf16
    left = (UTILIZATION * GPU_GB - RUNTIME_GB) * 1e9 - held
    return Cache(held, per_token, max(0, int(left / per_token)) * data * (GPUS // ranks))


def cache_table() -> str:
    lines = ["| model | format | layout of a replica | weights | a token | tokens of 64 GPUs |"]
    lines.append("|---|---|---|---|---|---|")
    for (model, quantization), layouts in LAYOUTS.items():
        shape = read_model(ROOT / "configs/models" / model)
        for tensor, data, expert in layouts:
            cache = cache_of(shape, quantization, tensor, data, expert)
            name = {"tensor": tensor, "data": data, "expert": expert}
            layout = ", ".join(f"{key} {size}" for key, size in name.items() if size > 1)
            tokens = f"{cache.tokens / 1e6:.2f}e6" if cache.tokens else "does not fit"
            form = "bf16" if quantization == "none" else quantization
            lines.append(
                f"| {model} | {form} | {layout} | {cache.weights / 1e9:.1f} GB | "
                f"{cache.per_token / 1e3:.1f} kB | {tokens} |"
            )
    return "\n".join(lines)


def runs() -> str:
    """Returns the printed differences of every layout from its base; raises if one differs."""
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "--show-capture=stdout"]
    command += ["-p", "no:cacheprovider", "-m", "exhaustive", "tests/dist/test_engine_layouts.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    print(done.stdout[-3000:], flush=True)
    if done.returncode:
        raise SystemExit(done.returncode)
    return "\n".join(line for line in done.stdout.splitlines() if "grad_norm" in line)


def main() -> None:
    table = cache_table()
    print(table)
    if sys.argv[1:] != ["cache"]:
        RESULTS.write_text(
            "$ python -m benchmarks.engine_layouts\n\n"
            "largest relative difference of four steps from the first run of the same trainer layout;\n"
            f"digests of the samples are equal, and every sync was verified\n\n{runs()}\n\n{table}\n"
        )


if __name__ == "__main__":
    main()
