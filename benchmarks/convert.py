"""`megarl convert` of a random 2 GB Qwen3-MoE, as a user starts it, against a plain copy that touches every byte.

    setup: the model is written to a temporary folder     call: one process; its time without start-up, its peak memory

The copy reads each file, takes a CRC of what it read, writes it and waits for the disk; "read back" takes the CRC of
what was written too, as a conversion does. Checksums of every tensor of what they made must agree.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from benchmarks.frame import Case, Contender, Outcome
from megarl.config.random_model import hf_config
from megarl.config.schema import Create
from megarl.models.headers import INDEX
from megarl.models.registry import hf_shapes, parse_model
from megarl.weights.sync.checksum import positional_checksum

__all__ = ["CASES", "convert", "copy"]

MODEL = {
    "family": "qwen3_moe", "tied": False, "layers": 6, "hidden": 1024, "heads": 16, "kv_heads": 4, "vocab": 32_000,
    "experts": 64, "moe_intermediate": 768, "tokenizer": "none",
}  # fmt: skip
FILES, BLOCK = 4, 16 << 20

CASES = tuple(
    Case(
        f"convert 2 GB to {to}",
        (
            Contender("megarl convert, start-up left out", "benchmarks.convert:convert"),
            Contender(
                "plain copy, every byte touched", "benchmarks.convert:copy", {"read_back": False}
            ),
            Contender("plain copy, read back", "benchmarks.convert:copy", {"read_back": True}),
        ),
        {"to": to, "model": MODEL},
        at_least=0.5,
    )
    for to in ("megatron", "hf")
)


def convert(to: str, model: Mapping[str, object]) -> Callable[[], Outcome]:
    def call() -> Outcome:
        with tempfile.TemporaryDirectory(prefix="megarl-bench-") as folder:
            source, target = _source(Path(folder), model, to), Path(folder) / "made"
            whole, peak, line = _timed(_converting(source, target, to))
            seconds = float(re.findall(r" in ([\d.]+) s;", line)[-1])
            if to == "hf":
                sums = _sums(target)
            else:
                sums = {
                    line[18:]: line[:16]
                    for line in (target / "checksums.megarl").read_text().splitlines()
                }
            size = sum(file.stat().st_size for file in source.iterdir())
        numbers = {
            "MB at most": peak / 1e6,
            "% of the model": 100 * peak / size,
            "s of start-up": whole - seconds,
        }
        return Outcome(_as_array(sums), seconds, numbers)

    return cache(call)  # timed once a process: it warms nothing up


def copy(to: str, model: Mapping[str, object], read_back: bool) -> Callable[[], Outcome]:
    def call() -> Outcome:
        with tempfile.TemporaryDirectory(prefix="megarl-bench-") as folder:
            source, target = _source(Path(folder), model, to), Path(folder) / "made"
            seconds, _, _ = _timed(
                [
                    sys.executable,
                    "-c",
                    _COPY,
                    str(source),
                    str(target),
                    *(["again"] if read_back else []),
                ]
            )
            return Outcome(
                _as_array(_sums(target if to == "megatron" else Path(folder) / "model")), seconds
            )

    return cache(call)


_COPY = f"""
import os, sys, zlib
source, target, *again = sys.argv[1:]
memory = memoryview(bytearray({BLOCK}))
def crc(path, out=None):
    value = 0
    with open(path, "rb", 0) as file:
        while count := file.readinto(memory):
            value = zlib.crc32(memory[:count], value)
            if out:
                out.write(memory[:count])
    return value
os.mkdir(target)
for name in os.listdir(source):
    with open(f"{{target}}/{{name}}", "wb", 0) as out:
        told = crc(f"{{source}}/{{name}}", out)
        os.fsync(out.fileno())
    assert not again or crc(f"{{target}}/{{name}}") == told
"""


# a process begins with the peak of the one that starts it, so a small one does
_PEAK = """
import resource, subprocess, sys
code = subprocess.call(sys.argv[1:])
print("\\n", resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, sep="")
sys.exit(code)
"""


def _source(folder: Path, model: Mapping[str, object], to: str) -> Path:
    """The folder that is converted or copied: random in every tensor, on the disk."""
    config = hf_config(Create.model_validate(model))
    made = folder / "model"
    made.mkdir()
    (made / "config.json").write_text(json.dumps(config))
    shapes = hf_shapes(parse_model(config, "model.create"))
    generator, where = np.random.Generator(np.random.SFC64(0)), {}
    for number in range(FILES):
        names = list(shapes)[number::FILES]
        where |= dict.fromkeys(names, file := f"model-{number + 1:05d}.safetensors")
        tensors = {}
        for name in names:
            numbers = generator.integers(1 << 16, size=shapes[name], dtype=np.uint16)
            tensors[name] = torch.from_numpy(numbers).view(torch.bfloat16)
        save_file(tensors, made / file)
    (made / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    source = made
    if to == "hf":
        source = folder / "source"
        _timed(_converting(made, source, "megatron"))
    os.sync()
    return source


def _converting(source: Path, target: Path, to: str) -> list[str]:
    return [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "megarl.cli",
        "convert",
        str(source),
        str(target),
        "--to",
        to,
    ]


def _timed(command: list[str]) -> tuple[float, int, str]:
    """Seconds from its start to its end, the process's peak of resident bytes, and what it prints."""
    began = time.perf_counter()
    child = subprocess.run(
        [sys.executable, "-c", _PEAK, *command], stdout=subprocess.PIPE, text=True
    )
    seconds = time.perf_counter() - began
    if child.returncode:
        raise RuntimeError(f"{' '.join(command[:6])} ended with {child.returncode}")
    output, peak, _ = child.stdout.rsplit("\n", 2)
    return seconds, int(peak) * 1024, output


def _sums(folder: Path) -> dict[str, str]:
    """As `megarl convert` lists them, taken by other code: of whole tensors."""
    tensors = (item for file in folder.glob("*.safetensors") for item in load_file(file).items())
    return {
        name: f"{int(positional_checksum(tensor, (0,) * tensor.dim())) % (1 << 64):016x}"
        for name, tensor in tensors
    }


def _as_array(sums: Mapping[str, str]) -> np.ndarray:
    return np.array([int(sums[name][:13], 16) for name in sorted(sums)], np.float64)
