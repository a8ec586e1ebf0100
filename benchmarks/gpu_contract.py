"""Compares megarl's weight tables with the real GPU packages, without a GPU: every family, names, counts and dtypes.

    python -m benchmarks.gpu_contract [trainer|engine] [CASE ...]      both sides and every case by default; 2 minutes

trainer   Megatron-Core's model with Transformer Engine's layers on meta, in tp2 pp2 (ep2): each stage's parameters
          against the table of the spec "te", and sharded_state_dict.
engine    vLLM's CUDA model on meta, as on an H100, first and last tensor rank of TENSOR: where its weight loaders put
          each tensor (loader_trace.py) against the table of the engine.

Large models keep their widths and lose layers. It needs gcc and, in Python 3.12, the packages pinned in pyproject.toml
(9.4 GB; Transformer Engine's compiled part for torch, which is built against CUDA, is replaced by a stub):

    python3.12 -m venv gpu && gpu/bin/pip install -c docker/constraints-gpu.txt torch vllm megatron-core \\
        transformer-engine transformer-engine-cu13 onnxscript nvdlfw-inspect
    gpu/bin/pip install -e . && gpu/bin/python -m benchmarks.gpu_contract

With --megatron DIR, the unpacked wheel of another Megatron-Core, the trainer is built with that one too.
Exits with 1 if anything differs. A full run writes benchmarks/results/gpu_contract.txt.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks import gpu_stubs
from megarl.config.random_model import hf_config
from megarl.config.schema import Create
from megarl.layout import Layout, Parallel
from megarl.models.engine import engine_table
from megarl.models.registry import fp32_tensors, hf_shapes, megatron_table, padded_vocab, read_model
from megarl.models.shape import ModelShape
from megarl.models.shards import ShardSlice, first_mismatch, slices_of

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).parent / "results" / "gpu_contract.txt"
PACKAGES = ("torch", "vllm", "megatron-core", "transformer-engine", "transformers")
LARGE = ("llama_3_1_405b", "qwen3_235b_a22b", "deepseek_v3", "kimi_k2", "glm_4_5", "gpt_oss_120b")
SMALL = {  # families without a large config, and tied embeddings
    "qwen2": {"family": "qwen2", "tied": False},
    "qwen3": {"family": "qwen3", "tied": False},
    "qwen3 tied": {"family": "qwen3", "tied": True},
    "mixtral": {"family": "mixtral", "experts": 4, "tied": False},
}
SIZES = {"layers": 2, "hidden": 512, "heads": 8, "kv_heads": 4, "vocab": 5003}
TENSOR = 4  # of the engine
DTYPE = torch.bfloat16
Difference = str | None


def model_folder(case: str, folder: Path) -> Path:
    """Writes the case's config.json: a large model's with two layers of each kind, or a small model's."""
    if case in SMALL:
        config = hf_config(Create.model_validate(SIZES | SMALL[case]))
    else:
        config = json.loads((ROOT / "configs/models" / case / "config.json").read_text())
        layers, kept = config["num_hidden_layers"], config.get("first_k_dense_replace", 0) + 2
        config = {
            key: x[:kept] if isinstance(x, list) and len(x) == layers else x
            for key, x in config.items()
        }
        config["num_hidden_layers"] = kept
    model = folder / case.replace(" ", "_")
    model.mkdir()
    (model / "config.json").write_text(json.dumps(config))
    return model


def count_elements(slices: Iterable[ShardSlice]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for part in slices:
        counts[part.param] += part.numel
    return counts


def compare_parameters(
    slices: list[ShardSlice],
    parameters: dict[str, torch.Tensor],
    fp32: frozenset[str],
    *,
    widened: bool,
) -> Difference:
    """Names, element counts, extents and dtypes; with `widened`, other tensors than those of `fp32` may be fp32 too."""
    counts = count_elements(slices)
    if counts.keys() != parameters.keys():
        tables, models = (
            sorted(counts.keys() - parameters.keys()),
            sorted(parameters.keys() - counts.keys()),
        )
        return f"only in the table: {tables[:4]}; only in the model: {models[:4]}"
    for part in slices:
        tensor = parameters[part.param]
        last = part.offset + sum(
            (n - 1) * stride for n, stride in zip(part.shape, part.strides, strict=True)
        )
        allowed = (
            {torch.float32} if part.name in fp32 else {DTYPE, torch.float32} if widened else {DTYPE}
        )
        if tensor.dtype not in allowed:
            return f"{part.param} is {tensor.dtype}, {part.name} is sent as {allowed}"
        if last >= tensor.numel():
            return f"{part.param} has {tensor.numel()} elements, {part.name} is placed at element {last}"
    return None


def check_trainer(case: str, model: Path) -> Iterable[tuple[str, Difference]]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from megarl.trainer.parallel_groups import destroy_parallel, init_parallel

    shape = read_model(model)
    parallel, world = Parallel(tensor=2, pipeline=2, expert=2 if shape.is_moe else 1), 4
    for rank in (0, world - 1):
        layout = Layout.of(parallel, world, rank)
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
        try:
            init_parallel(layout)
            yield _trainer_difference(shape, layout)
            destroy_parallel()
        finally:
            dist.destroy_process_group()


def _trainer_difference(shape: ModelShape, layout: Layout) -> tuple[str, Difference]:
    from megarl.trainer.megatron_config import transformer_config
    from megarl.trainer.model import build_model, local_tensors

    with gpu_stubs.On("meta"), torch.device("meta"):
        settings = transformer_config(
            shape, layout, dtype=DTYPE, dispatcher="alltoall", use_te=True
        )
        chunks = build_model(shape, layout, settings, use_te=True)
        held = local_tensors(chunks)
        saved = chunks[0].sharded_state_dict()
    vocab = padded_vocab(shape.vocab, layout.tp.size)
    slices = slices_of(megatron_table(shape, spec="te", padded_vocab=vocab), shape, layout)
    problem = compare_parameters(slices, held, fp32_tensors(shape), widened=False)
    padding = (vocab - shape.vocab) * shape.hidden  # of the last rank's embedding and head
    gaps = {
        name: held[name].numel() - numel
        for name, numel in count_elements(slices).items()
        if name in held
    }
    if wrong := [name for name, gap in gaps.items() if gap not in (0, padding)]:
        problem = problem or f"the table fills only part of {wrong[:4]}"
    if unsaved := sorted(held.keys() - saved.keys()):
        problem = problem or f"not in sharded_state_dict: {unsaved[:4]}"
    dtypes = dict(Counter(str(tensor.dtype).removeprefix("torch.") for tensor in held.values()))
    return f"stage {layout.pp.rank}: {len(held)} parameters {dtypes}", problem


def check_engine(case: str, model: Path) -> Iterable[tuple[str, Difference]]:
    shape = read_model(model)
    for rank in (0, TENSOR - 1):
        # on meta, a tied head aliases nothing
        built = _engine_model(model, rank, "cpu" if shape.tied else "meta")
        dtypes = dict(Counter(str(x.dtype).removeprefix("torch.") for x in built.parameters()))
        text = f"rank {rank} of {TENSOR}: {sum(dtypes.values())} parameters {dtypes}"
        yield text, _engine_difference(shape, built, rank)


def _engine_model(model: Path, rank: int, device: str) -> torch.nn.Module:
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    config = EngineArgs(
        model=str(model),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype=str(DTYPE).removeprefix("torch."),
        enforce_eager=True,
        max_model_len=1024,
        generation_config="vllm",
        distributed_executor_backend="external_launcher",
    ).create_engine_config()
    with set_current_vllm_config(config):
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            parallel_state.init_distributed_environment(1, 0, "env://", 0, "gloo")
        parallel_state.destroy_model_parallel()  # the one before may have had no experts
        parallel_state.initialize_model_parallel(1, 1)
        # one process poses as one of TENSOR ranks: nothing is sent while a model is built
        config.parallel_config.tensor_parallel_size = TENSOR
        for group in (parallel_state._TP, parallel_state._EP):
            if group is not None:
                group.world_size, group.rank_in_group = TENSOR, rank
        with set_default_torch_dtype(DTYPE), torch.device(device), gpu_stubs.On(device):
            return initialize_model(vllm_config=config, model_config=config.model_config)


def _engine_difference(shape: ModelShape, built: torch.nn.Module, rank: int) -> Difference:
    from megarl.rollout.vllm.loader_trace import trace_loader

    trace = trace_loader(built, hf_shapes(shape), DTYPE)
    layout = Layout.of(Parallel(tensor=TENSOR, expert_tensor=TENSOR), TENSOR, rank)
    table = slices_of(engine_table(shape), shape, layout)
    parameters = {
        name: x
        for name, x in built.named_parameters()
        if name in {part.param for part in trace.slices}
    }
    return first_mismatch(table, trace.slices) or compare_parameters(
        list(trace.slices), parameters, fp32_tensors(shape), widened=True
    )


def run_side(side: str, cases: Iterable[str]) -> int:
    """Runs the cases of one side in this process; returns how many differ."""
    if side == "trainer":
        gpu_stubs.pretend_h100("meta")
        gpu_stubs.stub_transformer_engine()
        gpu_stubs.stub_random_states()
        import megatron.core

        print(f"trainer  on megatron-core {megatron.core.__version__}")
    else:
        gpu_stubs.pretend_h100(0)
        gpu_stubs.fake_vllm_platform()
    check: Callable[[str, Path], Iterable[tuple[str, Difference]]] = {
        "trainer": check_trainer,
        "engine": check_engine,
    }[side]
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        for case in cases:
            began = time.monotonic()
            try:
                for text, problem in check(case, model_folder(case, Path(folder))):
                    failed += problem is not None
                    print(f"{side:8} {case:17} {text}: {problem or 'equal'}", flush=True)
            except Exception:  # noqa: BLE001 (the other cases are still of interest)
                failed += 1
                print(
                    f"{side:8} {case:17} could not be built:\n{traceback.format_exc(limit=-4)}",
                    flush=True,
                )
            print(f"{side} {case}: {time.monotonic() - began:.0f} s", file=sys.stderr)
    return failed


def versions() -> str:
    return ", ".join(f"{name} {metadata.version(name)}" for name in PACKAGES)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("side", nargs="?", choices=["trainer", "engine"])
    parser.add_argument(
        "cases", nargs="*", metavar="CASE", help=f"of {', '.join([*LARGE, *SMALL])}"
    )
    parser.add_argument("--megatron", metavar="DIR", type=Path)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # in this process
    args = parser.parse_args()
    if unknown := sorted(set(args.cases) - {*LARGE, *SMALL}):
        parser.error(f"no such case: {', '.join(unknown)}")
    if args.here:
        return min(1, run_side(args.side, args.cases or [*SMALL, *LARGE]))
    runs: list[tuple[str, Path | None]] = [
        (side, None) for side in ([args.side] if args.side else ["trainer", "engine"])
    ]
    if args.megatron and args.side != "engine":
        runs.append(("trainer", args.megatron.resolve()))
    outputs, codes = [], []
    with tempfile.TemporaryDirectory() as folder:
        gpu_stubs.build_driver(Path(folder))
        for side, packages in runs:
            command = [
                sys.executable,
                "-W",
                "ignore",
                "-m",
                "benchmarks.gpu_contract",
                side,
                *args.cases,
                "--here",
            ]
            environment = gpu_stubs.environment(Path(folder), packages)
            done = subprocess.run(
                command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
            )
            print(done.stdout, end="", flush=True)
            outputs.append(done.stdout)
            codes.append(done.returncode)
    if not args.side:
        option = " --megatron DIR" if args.megatron else ""
        header = f"$ python -m benchmarks.gpu_contract{option}\ndate      {time.strftime('%Y-%m-%d', time.gmtime())}\n"
        header += f"versions  Python {sys.version.split()[0]}, {versions()}\n\n"
        RESULTS.write_text(header + "".join(outputs))
    return 1 if any(codes) else 0


if __name__ == "__main__":
    raise SystemExit(main())
