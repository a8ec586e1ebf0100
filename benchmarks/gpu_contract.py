"""Compares megarl with the real GPU packages, without a GPU: its weight tables and its weight sync, every family.

    python -m benchmarks.gpu_contract [trainer] [engine] [sync] [CASE ...]      all sides and cases by default

trainer   Megatron-Core's model with Transformer Engine's layers on meta, in tp2 pp2 (ep2): each stage's parameters
          against the table of the spec "te", and sharded_state_dict. One minute, as engine.
engine    vLLM's CUDA model on meta, as on an H100, first and last tensor rank of TENSOR; with experts, also first, middle
          and last rank of TENSOR x DATA with expert parallelism: where its weight loaders put each tensor
          (loader_trace.py) against the table of the engine.
sync      vLLM's CUDA model on CPU tensors, as on an H100, H200 and B200: what its kernels would get after three syncs
          against a fresh load, and mistakes that must be found (gpu_contract_sync.py). 15 minutes. CASE is
          FAMILY:FORMAT; --device and --plant choose one of each.

Large models of trainer and engine keep their widths and lose layers. It needs gcc and, in Python 3.12, the packages
pinned in pyproject.toml (9.4 GB; Transformer Engine's compiled part for torch, which is built against CUDA, is replaced
by a stub):

    python3.12 -m venv gpu && gpu/bin/pip install -c docker/constraints-gpu.txt torch vllm megatron-core \\
        transformer-engine transformer-engine-cu13 onnxscript nvdlfw-inspect
    gpu/bin/pip install -e . && gpu/bin/python -m benchmarks.gpu_contract

With --megatron DIR, the unpacked wheel of another Megatron-Core, the trainer is built with that one too.
Exits with 1 if anything differs, or a planted mistake is not found. All cases of trainer and engine write
benchmarks/results/gpu_contract.txt, all of sync gpu_contract_sync.txt, with a hash of the code that was compared:
tests/unit/benchmarks/test_gpu_contract_sync.py fails where it is another one.
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks import gpu_contract_sync, gpu_stubs
from benchmarks.gpu_contract_code import code_hash
from megarl.config.random_model import hf_config
from megarl.config.schema import Create
from megarl.layout import Fleet, Layout, Parallel
from megarl.models.engine import engine_table
from megarl.models.registry import fp32_tensors, hf_shapes, megatron_table, padded_vocab, read_model
from megarl.models.shape import ModelShape
from megarl.models.shards import ShardSlice, first_mismatch, slices_of

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).parent / "results"
TABLES = RESULTS / "gpu_contract.txt"
SYNCS = RESULTS / "gpu_contract_sync.txt"
SIDES = ("trainer", "engine", "sync")
PACKAGES = ("torch", "vllm", "megatron-core", "transformer-engine", "transformers")
LARGE = ("llama_3_1_405b", "qwen3_235b_a22b", "deepseek_v3", "kimi_k2", "glm_4_5", "gpt_oss_120b")
SMALL = {  # families without a large config, and tied embeddings
    "qwen2": {"family": "qwen2", "tied": False},
    "qwen3": {"family": "qwen3", "tied": False},
    "qwen3 tied": {"family": "qwen3", "tied": True},
    "mixtral": {"family": "mixtral", "experts": 8, "tied": False},
}
SIZES = {"layers": 2, "hidden": 512, "heads": 8, "kv_heads": 4, "vocab": 5003}
TENSOR = 4  # of the engine
DATA = 2  # of its layouts with expert parallelism
DTYPE = torch.bfloat16
ALL = "all"
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
    layouts = [(1, rank) for rank in (0, TENSOR - 1)]
    if shape.is_moe:
        layouts += [(DATA, rank) for rank in (0, TENSOR + 1, DATA * TENSOR - 1)]
    for data, rank in layouts:
        # on meta, a tied head aliases nothing
        built = _engine_model(model, rank, data, "cpu" if shape.tied else "meta")
        dtypes = dict(Counter(str(x.dtype).removeprefix("torch.") for x in built.parameters()))
        where = f"rank {rank} of {TENSOR}"
        if data > 1:
            where = f"rank {rank} of tp{TENSOR} dp{data} ep{TENSOR * data}"
        text = f"{where}: {sum(dtypes.values())} parameters {dtypes}"
        yield text, _engine_difference(shape, built, rank, data)


def _engine_model(model: Path, rank: int, data: int, device: str) -> torch.nn.Module:
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
        enable_expert_parallel=data > 1,
    ).create_engine_config()
    with set_current_vllm_config(config):
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            parallel_state.init_distributed_environment(1, 0, "env://", 0, "gloo")
        parallel_state.destroy_model_parallel()  # the one before may have had no experts
        parallel_state.initialize_model_parallel(1, 1)
        gpu_stubs.pose_as(config, rank, TENSOR, data)
        with set_default_torch_dtype(DTYPE), torch.device(device), gpu_stubs.On(device):
            return initialize_model(vllm_config=config, model_config=config.model_config)


def _engine_difference(
    shape: ModelShape, built: torch.nn.Module, rank: int, data: int
) -> Difference:
    from megarl.rollout.vllm.loader_trace import trace_loader

    trace = trace_loader(built, hf_shapes(shape), DTYPE)
    expert = TENSOR * data if data > 1 else 1
    fleet = Fleet(
        Parallel(),
        TENSOR * data,
        tensor=TENSOR,
        ranks_per_replica=TENSOR * data,
        replicas=1,
        expert=expert,
        is_split=False,
    )
    layout = fleet.engine_layout(rank)
    rules = engine_table(shape, tensor=TENSOR, expert=expert)
    table = slices_of(rules, shape, layout)
    parameters = {
        name: x
        for name, x in built.named_parameters()
        if name in {part.param for part in trace.slices}
    }
    return first_mismatch(table, trace.slices) or compare_parameters(
        list(trace.slices), parameters, fp32_tensors(shape), widened=True
    )


def run_side(side: str, cases: Sequence[str], device: str, plants: Sequence[str]) -> int:
    """Runs the cases of one side in this process; returns how many differ, or were not found."""
    prepare_side(side, gpu_stubs.GPUS[device])
    check: Callable[[str, Path], Iterable[tuple[str, Difference]]] = {
        "trainer": check_trainer,
        "engine": check_engine,
        "sync": partial(gpu_contract_sync.check_sync, device),
    }[side]
    failed = 0
    label = side if side != "sync" else f"{side} {device}"
    with tempfile.TemporaryDirectory() as home:
        folder = partial(model_folder, folder=Path(home))
        if side == "sync":
            folder = partial(gpu_contract_sync.model_folder, home=Path(home))
        for case in cases:
            failed += run_case(label, case, partial(check, case, folder(case)))
        for name in plants:
            seen = partial(gpu_contract_sync.find_planted, name, folder)
            case = gpu_contract_sync.PLANTS[name].case
            failed += run_case(f"planted {name}", case, seen, "found")
    return failed


def prepare_side(side: str, gpu: gpu_stubs.Gpu) -> None:
    if side == "sync":
        gpu_contract_sync.prepare(gpu)
        return
    gpu_stubs.pretend_gpu(gpu, "meta" if side == "trainer" else 0)
    if side == "engine":
        gpu_stubs.fake_vllm_platform(gpu)
        return
    gpu_stubs.stub_transformer_engine()
    gpu_stubs.stub_random_states()
    import megatron.core

    print(f"trainer  on megatron-core {megatron.core.__version__}")


def run_case(
    label: str,
    case: str,
    check: Callable[[], Iterable[tuple[str, Difference]]],
    good: str = "equal",
) -> int:
    """Prints what a case shows, and how long it took; returns how often it failed."""
    began = time.monotonic()
    failed = 0
    try:
        for text, problem in check():
            failed += problem is not None
            print(f"{label:8} {case:19} {text}: {problem or good}", flush=True)
    except Exception:  # noqa: BLE001 (the other cases are still of interest)
        failed = 1
        text = traceback.format_exc(limit=-4)
        print(f"{label:8} {case:19} could not be built:\n{text}", flush=True)
    print(f"{label} {case}: {time.monotonic() - began:.0f} s", file=sys.stderr)
    return failed


def versions() -> str:
    return ", ".join(f"{name} {metadata.version(name)}" for name in PACKAGES)


def read_arguments() -> argparse.Namespace:
    """The arguments; `words` become `sides`, and `cases` of each side."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    models = [*SMALL, *LARGE]
    known = {"trainer": models, "engine": models, "sync": gpu_contract_sync.CASES}
    tables, syncs = (", ".join(known[side]) for side in ("engine", "sync"))
    parser.add_argument(
        "words",
        nargs="*",
        metavar="SIDE|CASE",
        help=f"sides: {', '.join(SIDES)}; cases of trainer and engine: {tables}; of sync: {syncs}",
    )
    parser.add_argument("--megatron", metavar="DIR", type=Path)
    parser.add_argument("--device", choices=gpu_stubs.GPUS, help="of sync; all by default")
    plants = [*gpu_contract_sync.PLANTS, ALL]
    parser.add_argument("--plant", choices=plants, help="a mistake that sync must find")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # in this process
    args = parser.parse_args()
    args.sides = [side for side in SIDES if side in args.words] or list(SIDES)
    named = [word for word in args.words if word not in SIDES]
    if args.plant:
        args.sides = ["sync"]
    args.cases = {
        side: [case for case in known[side] if case in named or not (named or args.plant)]
        for side in args.sides
    }
    unknown = sorted(set(named).difference(*args.cases.values()))
    if unknown:
        parser.error(f"no such case of {', '.join(args.sides)}: {', '.join(unknown)}")
    args.is_whole = not (named or args.device or args.plant)
    return args


def processes_of(args: argparse.Namespace) -> Iterator[tuple[str, list[str], Path | None]]:
    """Each process's side, its arguments, and the folder of packages that come first."""
    for side in args.sides:
        words = [side, *args.cases[side]]
        if side != "sync":
            yield side, words, None
            if side == "trainer" and args.megatron:
                yield side, words, args.megatron.resolve()
            continue
        plant = args.plant or (ALL if args.is_whole else None)
        for device in [args.device] if args.device else gpu_stubs.GPUS:
            yield side, [*words, "--device", device, *(["--plant", plant] if plant else [])], None
            if args.plant:
                return
            plant = None  # one device shows it


def main() -> int:
    args = read_arguments()
    if args.here:
        side = args.sides[0]
        plants = list(gpu_contract_sync.PLANTS) if args.plant == ALL else [args.plant]
        plants = plants if args.plant else []
        return min(1, run_side(side, args.cases[side], args.device or "h100", plants))
    outputs: dict[str, str] = {}
    codes = []
    code = code_hash()
    with tempfile.TemporaryDirectory() as folder:
        gpu_stubs.build_driver(Path(folder))
        for side, words, packages in processes_of(args):
            done = subprocess.run(
                [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu_contract", *words, "--here"],
                cwd=ROOT,
                env=gpu_stubs.environment(Path(folder), packages),
                stdout=subprocess.PIPE,
                text=True,
            )
            print(done.stdout, end="", flush=True)
            outputs[side] = outputs.get(side, "") + done.stdout
            codes.append(done.returncode)
    if args.is_whole:
        option = " --megatron DIR" if args.megatron else ""
        if "trainer" in outputs and "engine" in outputs:
            write(TABLES, f"trainer engine{option}", "", outputs["trainer"] + outputs["engine"])
        if "sync" in outputs:
            hashed = f"code      {code}\n"
            write(SYNCS, "sync", hashed, outputs["sync"] + gpu_contract_sync.NOT_COVERED)
    return 1 if any(codes) else 0


def write(file: Path, words: str, lines: str, text: str) -> None:
    header = f"$ python -m benchmarks.gpu_contract {words}\n"
    header += f"date      {time.strftime('%Y-%m-%d', time.gmtime())}\n"
    header += f"versions  Python {sys.version.split()[0]}, {versions()}\n{lines}\n"
    file.write_text(header + text)


if __name__ == "__main__":
    raise SystemExit(main())
