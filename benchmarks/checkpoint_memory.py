"""Host memory that saving and loading a checkpoint adds to a data-parallel rank.

python -m benchmarks.checkpoint_memory [--model NAME] [--dtype DTYPE] [--data N ...] [--against FOLDER]

A case is a world of N gloo ranks with a random model and optimizer state. Fresh processes save it, others load it. Each
takes the largest of two figures: tensors, the bytes of the storages that operators made and that live at once, and
resident, the peak of resident memory (VmHWM, reset at the start) over its value at the start, free heap given back
first. Neither counts the page cache. Saving lasts from the copy to the complete folder, written by the thread.

The limit is 1.2 times the rank's share of weights and optimizer state, plus the largest parameter in fp32. `--against`
measures the megarl of another folder too; the exit code is 3 if this one exceeds the limit.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
import tempfile
import weakref
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

MODELS: dict[str, dict[str, Any]] = {
    "34M": {"layers": 6, "hidden": 512, "heads": 8, "kv_heads": 4, "vocab": 32_768},
    "298M": {"layers": 21, "hidden": 1024, "heads": 16, "kv_heads": 8, "vocab": 32_768},
}
ROOT = Path(__file__).parents[1]


class Live(TorchDispatchMode):
    """Counts the storages that operators make."""

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {
            leaf.untyped_storage()._cdata
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, torch.Tensor)
        }
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if (
                isinstance(tensor, torch.Tensor)
                and (key := (storage := tensor.untyped_storage())._cdata) not in known
            ):
                self._live[key] = weakref.ref(storage), storage.nbytes()
        self._live = {
            key: (ref, size) for key, (ref, size) in self._live.items() if ref() is not None
        }
        self.peak = max(self.peak, sum(size for _, size in self._live.values()))
        return result


def resident(field: str) -> int:
    line = next(
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith(field)
    )
    return 1024 * int(line.split()[1])


class Cursor:
    def state(self) -> dict[str, int]:
        return {}

    def restore(self, state: dict[str, int]) -> None:
        pass


def run_rank(rank: int, world: int, folder: Path, dtype: Any, *, loading: bool) -> dict[str, int]:
    from megarl.checkpoint.state import Checkpoints
    from megarl.config.schema import Train
    from megarl.layout import Layout, Parallel
    from megarl.models.registry import read_model
    from megarl.trainer.trainer import Trainer
    from megarl.types import ObjectiveState

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/init{loading:d}", rank=rank, world_size=world
    )
    (model,), layout = folder.glob("model/*"), Layout.of(Parallel(), world, rank)
    train, device = Train(dtype=dtype, offload=["gradients"]), torch.device("cpu")
    trainer = Trainer.build(read_model(model), layout, train=train, folder=model, device=device)
    for part in (
        () if loading else getattr(trainer.optimizer, "chained_optimizers", [trainer.optimizer])
    ):
        part.init_state_fn(part.optimizer, part.config)
        for state in part.optimizer.state.values():
            state["exp_avg"].normal_()
            state["exp_avg_sq"].uniform_()
            state["step"] = torch.tensor(1.0)
    state = ObjectiveState(0.0)
    checkpoints = Checkpoints(
        folder / "checkpoints", trainer, Cursor(), state, every=1, keep=1, last_step=1
    )
    trainer.memory.offload_training_state()
    sizes = [parameter.numel() for parameter in trainer.parameters_by_name().values()]
    dist.barrier()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    with Live() as live:
        if loading:
            assert checkpoints.restore("auto")[0] == 1
        else:
            checkpoints.maybe_save(1, state)
            checkpoints.finish()
    peak = resident("VmHWM") - before
    dist.barrier()
    dist.destroy_process_group()
    return {"tensors": live.peak, "resident": peak, "elements": sum(sizes), "largest": max(sizes)}


def measure(model: str, dtype: str, data: int, package: Path) -> dict[str, Any]:
    """Bytes of the rank that needs most, of `save` and `load`; `package` is the folder that has megarl."""
    with tempfile.TemporaryDirectory(prefix="megarl-bench-") as folder:
        environment = os.environ | {"PYTHONPATH": str(package), "OMP_NUM_THREADS": "1"}
        code = "import sys; from pathlib import Path; from megarl.config.schema import Create; "
        code += "from megarl.commands.random_model import create_model; "
        code += f"create_model(Create(tokenizer='none', **{MODELS[model]}), Path('{folder}/model'))"
        subprocess.run([sys.executable, "-W", "ignore", "-c", code], env=environment, check=True)
        found: dict[str, Any] = {}
        for action in ("save", "load"):
            command = [
                sys.executable,
                "-W",
                "ignore",
                __file__,
                "--rank",
                folder,
                dtype,
                str(data),
                action,
            ]
            ranks = [
                subprocess.Popen(
                    [*command, str(rank)], env=environment, stdout=subprocess.PIPE, text=True
                )
                for rank in range(data)
            ]
            outputs = [rank.communicate()[0] for rank in ranks]
            if any(rank.returncode for rank in ranks):
                raise RuntimeError(f"{action} with {data} data ranks failed")
            answers = [json.loads(output.splitlines()[-1]) for output in outputs]
            found[action] = {
                name: max(answer[name] for answer in answers) for name in ("tensors", "resident")
            }
            found |= {name: answers[0][name] for name in ("elements", "largest")}
    per_element = 14 if dtype == "bf16" else 12  # weights, moments, and in bf16 the fp32 weights
    found["share"] = per_element * found["elements"] // data
    found["limit"] = int(1.2 * found["share"]) + 4 * found["largest"]
    found["most"] = max(
        found[action][figure] for action in ("save", "load") for figure in ("tensors", "resident")
    )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="298M")
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--data", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--against", type=Path)
    args = parser.parse_args()
    packages = {"megarl": ROOT} | ({"against": args.against} if args.against else {})
    print(f"{args.model} parameters, {args.dtype}; MB; torch {torch.__version__}")
    print(
        f"{'data':>4} {'':8} {'share':>7} {'limit':>7}  save: tensors resident  load: tensors resident"
    )
    is_within = True
    for data in args.data:
        for label, package in packages.items():
            found = measure(args.model, args.dtype, data, package)
            share, limit, *figures = (
                round(value / 1e6)
                for value in (
                    found["share"],
                    found["limit"],
                    *found["save"].values(),
                    *found["load"].values(),
                )
            )
            print(f"{data:>4} {label:8} {share:>7,} {limit:>7,}  {figures[0]:>13,} {figures[1]:>8,}"
                  f"  {figures[2]:>13,} {figures[3]:>8,}", flush=True)  # fmt: skip
            is_within &= label != "megarl" or found["most"] <= found["limit"]
    return 0 if is_within else 3


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        _, _, where, precision, ranks, action, number = sys.argv
        answer = run_rank(int(number), int(ranks), Path(where), precision, loading=action == "load")
        print(json.dumps(answer))
        sys.stdout.flush()
        os._exit(0)
    raise SystemExit(main())
